"""A sweep asked for by options: `specsim sweep`, and `specsim.sweep` in Python."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np

from specsim.asked import FILES, NAMES, SEQUENCES, AModel, check_numbers, scenario_of, sharing_a_name, with_model
from specsim.errors import InputError, as_fraction, did_you_mean
from specsim.fanout import cluster_of
from specsim.names import flag_of
from specsim.progress import report
from specsim.scenarios import LIMITS, Scenario, refuse_unknown, whole
from specsim.sweep_run import Result, run
from specsim.sweeps import DRAFTING, MOST_CASES, Spec

ACCEPTANCE = {
    "accept_rate": "rate",
    "accept_length": "length",
    "accept_per_position": "per_position",
    "accept_profile": "profile",
}
SINGLE = ("eager", "sglang_args", "vllm_args")  # these do not vary


def sweep(
    model: AModel | Sequence[AModel] | None = None,
    /,
    *,
    out: str | Path | None = None,
    jobs: int = 1,
    cluster: str | None = None,
    **options: Any,
) -> Result:
    """Predict every combination of models and options: those of `specsim.scenario`, each a value or several. Times of the
    rows are in ms, rates in tokens a second over the batch.

        >>> found = sweep(batch=[1, 8], draft_tokens=range(2, 5), accept_rate=0.7)
        >>> found.digest.configurations, len(found.rows)
        (6, 6)

    out: a .csv or .parquet file for the rows; without one, `rows` of the result holds up to 2,000. jobs: processes, -1 for
    one a core; cluster: "dask://HOST:PORT" or "ray" instead. Raises InputError, WorkError.
    """
    options = with_model(model, options, several=True)
    cluster = cluster_of(options, cluster)
    return run(spec_of(options), out=None if out is None else Path(out), jobs=jobs, cluster=cluster, progress=report)


def spec_of(options: Mapping[str, Any]) -> Spec:
    """The sweep of options of a scenario, each of which may have several values. Raises InputError."""
    for name in options:
        if name not in NAMES:
            raise InputError(f"no option {name!r}", mend=did_you_mean(name, sorted(NAMES)))
    single = {name: value for name, value in options.items() if name in SINGLE and value is not None and value != ()}
    lists = {name: several(name, value) for name, value in options.items() if name not in SINGLE and value is not None}
    kinds = [name for name in lists if name in ACCEPTANCE]
    if len(kinds) > 1:
        named = " and ".join(flag_of(name) for name in kinds)
        raise InputError("acceptance is stated twice", where=named, mend="give one of them")
    outer = [name for name in lists if name not in (*DRAFTING, *ACCEPTANCE, "batch", "context", "draft_tokens")]
    drafting = [name for name in lists if name in DRAFTING]
    for names, what in ((outer, "cases"), (drafting, "ways to draft")):
        count = math.prod(len(lists[name]) for name in names)
        if count > MOST_CASES:
            mend = f"{MOST_CASES:,} at most: make several sweeps of it"
            raise InputError(f"{count:,} {what}", where="sweep", mend=mend)
    for name in LIMITS:  # what no scenario can have is refused; what some cannot have is left out of the sweep
        if any(value is not None for value in lists.get(name, ())):
            whole(name, [value for value in lists[name] if value is not None])
    refuse_unknown(lists)
    for name in ("accept_rate", "accept_length"):
        check_numbers(name, lists.get(name, ()))
    kind = ACCEPTANCE[kinds[0]] if kinds else ""
    for a in lists["accept_rate"] if kind == "rate" else ():
        if not 0 <= a <= 1:
            raise InputError(f"{a:g} is not in [0, 1]", where="--accept-rate", mend=as_fraction(a))
    return Spec(
        make=partial(_made, _called(lists)),
        cases=tuple((*single.items(), *case) for case in products(outer, lists)),
        draftings=tuple(products(drafting, lists)),
        batch=lists.get("batch", (1,)),
        context=lists.get("context", (2048,)),
        draft_tokens=lists.get("draft_tokens", ()),
        kind=kind,
        acceptance=lists[kinds[0]] if kinds else (None,),
    )


def _made(called: Mapping[tuple[str, str], str], options: dict[str, Any]) -> Scenario:
    """The scenario of options, whose files go by their paths where their names do not tell them apart."""
    made = scenario_of(options)
    paths = {kind: called[kind, str(options[kind])] for kind in FILES if (kind, str(options.get(kind))) in called}
    return replace(made, names={**made.names, **paths}) if paths else made


def _called(lists: Mapping[str, tuple[Any, ...]]) -> dict[tuple[str, str], str]:
    """(option, value) of files that share a name with another value."""
    return {(kind, path): path for kind in FILES for path in sharing_a_name(kind, lists.get(kind, ()))}


def products(names: Sequence[str], lists: Mapping[str, tuple[Any, ...]]) -> Iterable[tuple[tuple[str, Any], ...]]:
    """Every combination of the values of some options, as (name, value) pairs."""
    for values in product(*(lists[name] for name in names)):
        yield tuple(zip(names, values, strict=True))


def several(name: str, value: Any) -> tuple[Any, ...]:
    """The values of an option: one, or those of a list, a range or an array. Several rates by position, or sizes of graphs, are one value."""
    if isinstance(value, np.ndarray):
        value = value.tolist()
    if isinstance(value, str) or not isinstance(value, Iterable) or hasattr(value, "model_dump"):
        return (value,)
    values = tuple(tuple(v) if isinstance(v, list) else v for v in value)
    if not values:
        raise InputError("has no value", where=flag_of(name), mend="give one, or leave it out")
    one = name in SEQUENCES and not isinstance(values[0], tuple)
    return (values,) if one else values
