"""What people ask of a fit, on a command line or in Python: engine terms from recorded runs, and how well they hold."""

from __future__ import annotations

import datetime
import fnmatch
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from specsim import apart, engine_fit
from specsim.engine_fit import Case, Fit, HeldOut
from specsim.errors import InputError, did_you_mean
from specsim.files import path_of, write_atomically
from specsim.pages import Shown
from specsim.profiles import EngineTerms, Profile, dump_profile, load_profile
from specsim.quantities import six
from specsim.replay import distinct, load, on_others


@dataclass(frozen=True, repr=False)
class Fitted(Shown):
    """A fit and how it does on records that it did not see.

    `left_out`: a line for each record that it could not use; `boxes`: names of the profiles of those that it used. `set_aside`:
    why, by record that was only predicted since it says nothing about the terms. `apart`: median of predicted / observed - 1 by
    record that was fitted and is far from what the others say. `warnings`: lines on records of another GPU than their profile's."""

    page_from = "specsim.fit_text"

    fit: Fit
    held: tuple[HeldOut, ...]
    left_out: tuple[str, ...]
    boxes: tuple[str, ...]
    set_aside: Mapping[str, str] = field(default_factory=dict)
    apart: Mapping[str, float] = field(default_factory=dict)
    warnings: tuple[str, ...] = ()

    def json(self) -> dict[str, Any]:
        """The document of schema specsim.fit/1: terms in the units that their names end in, errors as fractions."""
        return {
            **engine_fit.document(self.fit, self.held, self.left_out),
            "set_aside": [{"record": record, "reason": why} for record, why in self.set_aside.items()],
            "standing_apart": [{"record": record, "median_error": six(e)} for record, e in self.apart.items()],
            "warnings": list(self.warnings),
        }

    def profile(self, hardware: str | None = None) -> Profile:
        """The profile with the fitted terms: the records' own, or `hardware`. Raises InputError when they are of several."""
        return engine_fit.with_terms(_one(self.boxes, hardware), self.fit, datetime.date.today().isoformat())


def fit(
    records: str | os.PathLike[str],
    *,
    hardware: str | None = None,
    hold_out: Sequence[str] = (),
    include: Sequence[str] = (),
    leave_one_out: bool = False,
    terms: Sequence[str] | None = None,
    engine: str | None = None,
    output: str | os.PathLike[str] | None = None,
) -> Fitted:
    """Fit an engine's terms to recorded runs (a folder, or one record): `specsim fit`.

    hardware: the profile to predict with, in place of each record's own. hold_out: names of records, which may hold *, that
    are only predicted. include: of the records that would be set aside (`specsim.apart`), those to fit all the same. leave_one_out: also predict each model's runs from a fit to the others'. terms: those to fit, all
    that the records identify by default. engine: where records are of several. output: a YAML file for the profile with the fitted terms. Terms are in the units that their names end
    in (_us: microseconds), errors are fractions. Raises InputError.
    """
    for name in terms or ():  # before the records, of which there may be many
        engine_fit.known(name, EngineTerms.names())
    found, unreadable = load(path_of(records, "records"))
    found, copies = distinct(found)
    cases, skipped = engine_fit.cases_of(found, hardware, engine)
    left_out = (*unreadable, *copies, *skipped)
    kept, out = engine_fit.split(cases, tuple(hold_out))
    kept, aside, why = _set_aside(kept, include)
    used = {case.record for case in kept}
    boxes = tuple(sorted({r.hardware for r in found if r.name in used and r.hardware}))
    if output is not None:
        _one(boxes, hardware)  # before the work
    names = None if terms is None else list(terms)
    try:
        fitted = engine_fit.fit(kept, names)
    except InputError as error:
        more = f" ({len(left_out)} left out, the first: {left_out[0]})" if left_out else ""
        raise InputError(f"{error.what}{more}", where=error.where, mend=error.mend) from None
    held = [engine_fit.held_out(name, fitted, of) for name, of in (("held out", out), ("set aside", aside)) if of]
    if leave_one_out:
        held += engine_fit.leave_one_out(kept, names)
    far = apart.standing_apart(kept, fitted.values)
    others = tuple(on_others([r for r in found if r.name in used], hardware))
    made = Fitted(fitted, tuple(held), left_out, boxes, why, far, others)
    if output is not None:
        write_atomically(Path(output), dump_profile(made.profile(hardware)))
    return made


def _set_aside(cases: Sequence[Case], include: Sequence[str]) -> tuple[list[Case], list[Case], dict[str, str]]:
    """(to fit, set aside, why by record). Raises InputError when nothing is left, or `include` names none of them."""
    why = apart.set_aside(cases)
    for pattern in include:
        if not fnmatch.filter(why, pattern):
            known = sorted(why)
            mend = did_you_mean(pattern, known) if known else "leave it out: none is set aside"
            raise InputError(f"no record that is set aside matches {pattern!r}", where="--include", mend=mend)
    why = {name: w for name, w in why.items() if not any(fnmatch.fnmatchcase(name, p) for p in include)}
    kept = [case for case in cases if case.record not in why]
    if not kept:
        name, first = next(iter(why.items()))
        raise InputError(
            f"no record says anything about the terms ({name}: {first})",
            where="fit",
            mend="give others, or --include NAME to fit one all the same",
        )
    return kept, [case for case in cases if case.record in why], why


def _one(boxes: Sequence[str], hardware: str | None) -> Profile:
    """The profile that takes the terms. Raises InputError."""
    if hardware is None and len(boxes) != 1:
        what = f"the records name {len(boxes)} profiles ({', '.join(boxes)})"
        raise InputError(what, where="--output", mend="choose with --hardware")
    return load_profile(hardware or boxes[0])
