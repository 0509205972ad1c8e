"""The choices of a plan, from options: cuts of the boxes, by plain decoding and by each draft length."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from itertools import product
from os import PathLike, fspath
from typing import Any

from specsim.asked import NAMES, options_of, scenario_of, sharing_a_name
from specsim.errors import InputError, did_you_mean
from specsim.memory import memory
from specsim.names import flag_of
from specsim.profiles import load_profile
from specsim.scenarios import Scenario, build, cut_blocks, no_meaning

LISTS = ("hardware", "tp", "ep", "draft_tokens")  # options that take several values
FIXED = ("batch", "context", "num_steps", "topk")  # what the load and the plan set
DRAFT_TOKENS = (2, 3, 4, 5, 6, 7, 8)
MOST = 2000  # choices
Maker = Callable[[], Scenario]


def choices(options: Mapping[str, Any]) -> tuple[list[Maker], tuple[int, ...], tuple[str, ...]]:
    """(what builds each choice, the draft lengths, notes on a launch line), for options of a scenario of which those in
    `LISTS` may hold several values. Raises InputError."""
    single = {k: v for k, v in options.items() if k not in LISTS and v is not None and v != ()}
    for name in single:
        if name in FIXED:
            where = flag_of(name)
            raise InputError("the load and --draft-tokens set it", where=where, mend="leave it out")
        if name not in NAMES:
            raise InputError(f"no option {name!r}", mend=did_you_mean(name, sorted(NAMES)))
    boxes, ranks, groups, lengths = (_several(options.get(name)) for name in LISTS)
    boxes = _told_apart(boxes)
    given = {name: values for name, values in (("tp", ranks), ("ep", groups), ("draft_tokens", lengths)) if values}
    base, notes = options_of({**single, **given})
    if not lengths and "accept_length" in single and "draft_tokens" in base:  # that of the launch line
        lengths = (int(base["draft_tokens"]),)
    lengths = lengths or DRAFT_TOKENS
    if min(lengths) < 2:
        mend = "give 2 or more; off is always among the choices"
        raise InputError(f"{min(lengths)} is below 2", where="--draft-tokens", mend=mend)
    if "accept_length" in single and len(lengths) > 1:
        mend = "give that --draft-tokens, or --accept-rate"
        raise InputError("belongs to one draft length", where="--accept-length", mend=mend)
    accepted = [k for k in single if k.startswith("accept")]
    if accepted and base.get("method") == "none":
        notes += (no_meaning(f"--{accepted[0].replace('_', '-')}"),)
    base = {k: v for k, v in base.items() if k not in (*FIXED, *given, "draft_tokens")}
    plain = {k: v for k, v in base.items() if k not in (*accepted, "draft")} | {"method": "none"}
    if base.get("method") != "none" and "eager" in base:  # the phases of those that draft
        plain["eager"] = tuple(phase for phase in base["eager"] if phase == "decode")
    makers: list[Maker] = []
    drafting: list[Maker] = []
    for box, ep in product(boxes or (None,), groups or (None,)):
        here = {k: v for k, v in (("hardware", box), ("ep", ep)) if v is not None}
        for tp in ranks or _cuts({**plain, **here}):
            cut = here if tp is None else {**here, "tp": tp}
            makers.append(functools.partial(build, **{**plain, **cut}))
            if accepted and base.get("method") != "none":
                drafts = [
                    functools.partial(build, **{**base, **cut, "draft_tokens": d, "num_steps": d - 1, "topk": 1})
                    for d in lengths
                ]
                makers += drafts
                drafting += drafts
    if len(makers) > MOST:
        raise InputError(f"{len(makers):,} choices", where="plan", mend="shorten the lists")
    _one_builds(drafting)
    return makers, lengths, notes


def _one_builds(makers: Sequence[Maker]) -> None:
    """Raise the first's InputError when none can be built: speculation was asked for, and a plan without it is no answer."""
    failure: InputError | None = None
    for make in makers:
        try:
            make()
        except InputError as error:
            failure = failure or error
        else:
            return
    if failure is not None:
        raise failure


def drafting(options: Mapping[str, Any], best: Scenario) -> Scenario:
    """The best choice's scenario with speculation, whatever its acceptance."""
    if best.method != "none":
        return best
    kept = {k: v for k, v in options.items() if k not in LISTS and not k.startswith("accept") and v is not None}
    boxes = _told_apart(_several(options.get("hardware")))
    here = (b for b in boxes if (load_profile(b) if isinstance(b, str) else b).name == best.profile.name)
    hardware = next(here, best.profile.name)  # a file has another name than its profile
    return scenario_of({**kept, "hardware": hardware, "tp": best.parallel.tp, "ep": best.parallel.ep})


def _told_apart(boxes: tuple[Any, ...]) -> tuple[Any, ...]:
    """The boxes; files that share a name with another are read, and called by their paths."""
    paths = sharing_a_name("hardware", boxes)
    named = (isinstance(b, (str, PathLike)) and fspath(b) in paths for b in boxes)
    return tuple(
        load_profile(b).model_copy(update={"name": fspath(b)}) if file else b
        for b, file in zip(boxes, named, strict=True)
    )


def _several(value: Any) -> tuple[Any, ...]:
    """The values of an option that takes one or several."""
    if value is None:
        return ()
    return tuple(value) if isinstance(value, Sequence) and not isinstance(value, str) else (value,)


def _cuts(options: Mapping[str, Any]) -> tuple[int | None, ...]:
    """Every power of two of ranks on which the model fits the box, and that engines take, or the box's default."""
    if "flags" in options:  # a launch line says it
        return (None,)
    whole = build(**options)
    found: list[int | None] = []
    for tp in (2**i for i in range(11)):
        if tp <= whole.profile.gpus:
            try:
                s = build(**{**options, "tp": tp})
            except InputError:
                continue
            if memory(s).fits and not cut_blocks(s.model, s.parallel):
                found.append(tp)
    return tuple(found) or (None,)
