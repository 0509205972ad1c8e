"""What people ask of a fit, on a command line or in Python: engine terms from recorded runs, and how well they hold."""

from __future__ import annotations

import datetime
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from specsim import engine_fit
from specsim.engine_fit import Fit, HeldOut
from specsim.errors import InputError
from specsim.files import write_atomically
from specsim.pages import Shown
from specsim.profiles import Profile, dump_profile, load_profile
from specsim.replay import load


@dataclass(frozen=True, repr=False)
class Fitted(Shown):
    """A fit and how it does on records that it did not see. `left_out`: a line for each record that it could not use;
    `boxes`: names of the profiles of those that it used."""

    page_from = "specsim.fit_text"

    fit: Fit
    held: tuple[HeldOut, ...]
    left_out: tuple[str, ...]
    boxes: tuple[str, ...]

    def json(self) -> dict[str, Any]:
        """The document of schema specsim.fit/1: terms in the units that their names end in, errors as fractions."""
        return engine_fit.document(self.fit, self.held, self.left_out)

    def profile(self, hardware: str | None = None) -> Profile:
        """The profile with the fitted terms: the records' own, or `hardware`. Raises InputError when they are of several."""
        return engine_fit.with_terms(_one(self.boxes, hardware), self.fit, datetime.date.today().isoformat())


def fit(
    records: str | os.PathLike[str],
    *,
    hardware: str | None = None,
    hold_out: Sequence[str] = (),
    leave_one_out: bool = False,
    terms: Sequence[str] | None = None,
    engine: str | None = None,
    output: str | os.PathLike[str] | None = None,
) -> Fitted:
    """Fit an engine's terms to recorded runs (a folder, or one record): `specsim fit`.

    hardware: the profile to predict with, in place of each record's own. hold_out: names of records, which may hold *, that
    are only predicted. leave_one_out: also predict each model's runs from a fit to the others'. terms: those to fit, all
    that the records identify by default. engine: where records are of several. output: a YAML file for the profile with the fitted terms. Terms are in the units that their names end
    in (_us: microseconds), errors are fractions. Raises InputError.
    """
    found, left_out = load(Path(records))
    cases, skipped = engine_fit.cases_of(found, hardware, engine)
    kept, out = engine_fit.split(cases, tuple(hold_out))
    used = {case.record for case in kept}
    boxes = tuple(sorted({r.hardware for r in found if r.name in used and r.hardware}))
    if output is not None:
        _one(boxes, hardware)  # before the work
    names = None if terms is None else list(terms)
    fitted = engine_fit.fit(kept, names)
    held = [engine_fit.held_out("held out", fitted, out)] if out else []
    if leave_one_out:
        held += engine_fit.leave_one_out(kept, names)
    made = Fitted(fitted, tuple(held), (*left_out, *skipped), boxes)
    if output is not None:
        write_atomically(Path(output), dump_profile(made.profile(hardware)))
    return made


def _one(boxes: Sequence[str], hardware: str | None) -> Profile:
    """The profile that takes the terms. Raises InputError."""
    if hardware is None and len(boxes) != 1:
        what = f"the records name {len(boxes)} profiles ({', '.join(boxes)})"
        raise InputError(what, where="--output", mend="choose with --hardware")
    return load_profile(hardware or boxes[0])
