"""Fitting an engine's terms to whole runs: what no operator measurement shows, by least squares with priors.

The residual of an observation is log(observed / predicted) over its relative error, with soft-L1 loss, since recorded
runs hold outliers; a term's prior is (value - prior) / spread from the engine's description, without it. So a term
that the records do not show stays where it was. Only the terms move: operator rates, curves and launch costs are the
box's, and a fit that changed them would explain one model's run with another's operator. docs/fit.md derives it.
"""

from __future__ import annotations

import fnmatch
import itertools
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from specsim.cycle import evaluate
from specsim.engines import Engine, load_engine
from specsim.errors import InputError, did_you_mean
from specsim.fit_runs import needed
from specsim.machine import Machine, lift
from specsim.pages import Shown
from specsim.prediction import machine_of
from specsim.profiles import EngineTerms, Profile, Source
from specsim.progress import track
from specsim.quantities import HALF, counted, six
from specsim.records import Correction, Point, Record
from specsim.replay import added_ms, left_out, scenario_of
from specsim.scenarios import Scenario

Array = NDArray[np.float64]
SCHEMA = "specsim.fit/1"
PHASES = ("decode", "draft", "verify", "extend", "cycle")
FLOOR = 0.015  # relative error of any observation: clocks, the steadiness of a batch
UNSTATED = 0.03  # relative error of an observation whose record gives no interval
WIDTH = 2 * HALF  # standard deviations in an 80 % interval
OUTLIER = 2.0  # standard deviations beyond which an observation counts less
IDENTIFIED = 0.5  # least share of a term's information that must come from the records
STARTS = (0.0, -1.0, 1.0, 2.0)  # prior spreads from the priors at which a search begins: the least sum of all counts
TOGETHER = 0.05  # prior spreads within which two searches ended at one place
DEEPER = 5.0  # of the cost, minus the logarithm of how likely a place is
UNKNOWN = 1e-6  # share below which they say nothing at all
# How far one model's runs lie from what terms common to all models say: the error of the profile's operator classes for
# its shapes in graphs; eagerly, that a launch from one model's code costs 6 and from another's 11 bare ones.
MODEL_SPREAD, EAGER_SPREAD = 0.03, 0.25
WAITING = {"draft", "extend"}  # phases of several ranks whose timers hold the wait for the rank whose host is late
SIGNED_SPREAD = (
    0.1  # prior spread of a term whose prior is 0 (kernel_gap, microseconds): a tenth of the smallest kernel
)
LOWEST = {
    "kernel_gap_us": -np.inf,
    "row_layer_us": -np.inf,
    "verify_layer_us": -np.inf,
    "eager_factor": 0.1,
    "eager_experts": 0.1,
}


@dataclass(frozen=True)
class Seen:
    """One observed time: milliseconds and relative error (one standard deviation) of a phase of a point, by its place."""

    phase: str
    place: int
    ms: float
    error: float


@dataclass(frozen=True, eq=False)
class Case:
    """One record that can be predicted again with other terms; its scenario has one element a point."""

    record: str
    model: str  # what the target is, by its sizes: runs of one model share it
    scenario: Scenario
    machine: Machine
    corrections: tuple[Correction, ...]
    seen: tuple[Seen, ...]

    @property
    def eager(self) -> bool:
        """Whether the target runs without graphs."""
        return not self.scenario.graph_phases["decode" if self.scenario.method == "none" else "verify"]

    def times(self, terms: Mapping[str, Array]) -> dict[str, Array]:
        """Milliseconds of each phase that the scenario has; shapes broadcast to (samples, points). Terms are in the
        units of their names, each of shape () or (samples,)."""
        machine = self.machine.under({**self.machine.terms, **_si(terms)})
        cycle = evaluate(self.scenario, machine)
        launch_s = lift(machine.launch_s(self.scenario.model, self.scenario.parallel.tp), self.scenario.batch.ndim)
        more = {p: sum(added_ms(c, self.scenario, p, launch_s) for c in self.corrections) for p in PHASES[:4]}
        times: dict[str, Array] = {"decode": cycle.decode_s * 1e3 + more["decode"]}
        for phase, cost in (("draft", cycle.draft), ("verify", cycle.verify), ("extend", cycle.extend)):
            if cost is not None:
                times[phase] = cost.total * 1e3 + more[phase]
        if cycle.verify is not None:
            times["cycle"] = cycle.cycle_s * 1e3 + more["draft"] + more["verify"] + more["extend"]
        return times

    def predicted(self, terms: Mapping[str, Array]) -> Array:
        """Milliseconds of all that was seen, by sample of the terms: shape (len(seen), samples)."""
        shape = (max((np.size(value) for value in terms.values()), default=1), self.scenario.batch.size)
        full = {phase: np.broadcast_to(time, shape) for phase, time in self.times(terms).items()}
        return np.stack([full[s.phase][:, s.place] for s in self.seen])


def _si(terms: Mapping[str, Array]) -> dict[str, Array]:
    return {n.removesuffix("_us"): np.asarray(v) * (1e-6 if n.endswith("_us") else 1.0) for n, v in terms.items()}


@dataclass(frozen=True)
class Term:
    """A fitted term. `error` and `prior_error` are one standard deviation; `share` is the part of what is known about
    the term that the records gave, 0 to 1."""

    name: str
    prior: float
    prior_error: float
    value: float
    error: float
    share: float


@dataclass(frozen=True, repr=False)
class Fit(Shown):
    """Fitted terms, what was left at its prior and why, and errors of the observations before and after.

    `correlations` follows the order of `terms`. `noise`: by how much residuals exceed the stated errors (at least 1),
    which the errors include. `values`: every term of the engine, fitted or as it was, for Case.predicted. `spread`: one relative uncertainty of all terms that gives times the spread of the fit.
    """

    page_from = "specsim.fit_text"

    engine: str
    terms: tuple[Term, ...]
    correlations: Array
    left: Mapping[str, str]
    noise: float
    spread: float
    records: tuple[str, ...]
    points: int
    values: dict[str, Array]
    before: Mapping[str, Mapping[str, float]]
    after: Mapping[str, Mapping[str, float]]


@dataclass(frozen=True)
class HeldOut:
    """Errors on records that a fit did not see."""

    name: str
    records: tuple[str, ...]
    before: Mapping[str, Mapping[str, float]]
    after: Mapping[str, Mapping[str, float]]
    fit: Fit = field(repr=False)


# --- records to cases -------------------------------------------------------------------------------------------------


def cases_of(
    records: Iterable[Record], hardware: str | Profile | None = None, engine: str | None = None
) -> tuple[list[Case], list[str]]:
    """Every record with a time that can be predicted, and lines on those left out.

    hardware: the profile to predict all with, else each record's own. Raises InputError when no point is left, or
    when the records are of several engines and none is chosen.
    """
    records = [r for r in records if r.engine is not None and r.engine.name != "other"]
    if not records:
        raise InputError("no record says that SGLang or vLLM ran", where="fit", mend="give others")
    engines = sorted({r.engine.name for r in records if r.engine})
    if engine is None and len(engines) > 1:
        raise InputError(f"the records are of {', '.join(engines)}", where="fit", mend="choose one with --engine")
    if engine is not None and engines and engine not in engines:
        raise InputError(f"no record is of {engine}", where="--engine", mend=f"they are of {', '.join(engines)}")
    cases: list[Case] = []
    unpriced: dict[tuple[str, str], list[Point]] = {}
    for record in track(records, "records"):
        if engine is not None and record.engine and record.engine.name != engine:
            continue
        alike: dict[Any, tuple[Scenario, list[Point]]] = {}  # by the host's cores, which are part of the machine
        for point in record.points:
            if point.batch is None or not any(_seen(point, 0)):
                continue
            try:
                scenario = scenario_of(record, point, hardware)
            except InputError as error:
                unpriced.setdefault((record.name, str(error)), []).append(point)
                continue
            slow = None if point.host_slowdown is None else point.host_slowdown.value
            alike.setdefault(slow, (scenario, []))[1].append(point)
        cases += [case for first, points in alike.values() if (case := _case(record, first, points)).seen]
    skipped = left_out(unpriced)
    if not cases and not skipped:
        mend = "give steady runs; runs under load and logs without a batch have none"
        raise InputError("no record holds the time of a step at a batch", where="fit", mend=mend)
    if not cases:
        why = f" ({skipped[0]})" if skipped else ""
        raise InputError(f"no point could be predicted{why}", where="fit", mend="give --hardware, or other records")
    return cases, skipped


def _case(record: Record, first: Scenario, points: Sequence[Point]) -> Case:
    """The case of a record's points, all in one scenario; `first`: that of the first point."""
    batch, context = (
        np.array(a, dtype=float) for a in zip(*((p.batch, round(p.context or 0)) for p in points), strict=True)
    )
    scenario = replace(first, batch=batch, context=context)
    seen = tuple(s for place, point in enumerate(points) for s in _seen(point, place))
    case = Case(record.name, _model(scenario), scenario, machine_of(scenario), tuple(record.corrections), seen)
    has = {phase for phase, time in case.times({}).items() if np.all(time > 0)}  # one draft step is no draft pass
    has -= {"decode"} if scenario.method != "none" else set()
    has -= WAITING if scenario.parallel.tp > 1 else set()
    return replace(case, seen=tuple(s for s in seen if s.phase in has))


def _seen(point: Point, place: int) -> Iterator[Seen]:
    """The times of a point, with the error that its interval says and that of any observation."""
    for phase in PHASES:
        quantity = getattr(point, f"{phase}_ms")
        if quantity is None or quantity.value <= 0:
            continue
        stated = UNSTATED
        if quantity.low is not None and quantity.high is not None:
            stated = (quantity.high - quantity.low) / WIDTH / quantity.value
        yield Seen(phase, place, quantity.value, float(np.hypot(stated, FLOOR)))


def _model(scenario: Scenario) -> str:
    """The target by its sizes, so that runs of one model stay together whatever their names, ranks or number formats."""
    m = scenario.model
    experts = f", {counted(m.experts.count, 'expert')}" if m.experts else ""
    return f"{m.num_layers} layers x {m.hidden}{experts}"


def split(cases: Sequence[Case], patterns: Sequence[str]) -> tuple[list[Case], list[Case]]:
    """(to fit, held out): cases whose record matches one of the patterns are held out.

    Raises InputError when a pattern matches nothing or everything is held out.
    """
    names = sorted({case.record for case in cases})
    for pattern in patterns:
        if not fnmatch.filter(names, pattern):
            raise InputError(f"no record matches {pattern!r}", where="--hold-out", mend=did_you_mean(pattern, names))
    out = [c for c in cases if any(fnmatch.fnmatchcase(c.record, p) for p in patterns)]
    kept = [c for c in cases if c not in out]
    if not kept:
        raise InputError("holds out every record", where="--hold-out", mend="leave some to fit")
    return kept, out


def by_model(cases: Sequence[Case]) -> dict[str, list[Case]]:
    """Cases of each model, under what the names of its records begin with."""
    groups: dict[str, list[Case]] = {}
    for case in cases:
        groups.setdefault(case.model, []).append(case)
    named = {}
    for model, group in groups.items():
        name = _beginning(sorted(c.record for c in group)) or model
        named[name if name not in named else f"{name} ({model})"] = group
    return named


def _beginning(names: Sequence[str]) -> str:
    """What sorted names begin with, in whole words."""
    first, last = (re.split(r"([-_. ])", name) for name in (names[0], names[-1]))
    same = itertools.takewhile(lambda pair: pair[0] == pair[1], zip(first, last, strict=False))
    return "".join(word for word, _ in same).rstrip("-_. ")


# --- the fit ----------------------------------------------------------------------------------------------------------


def priors(engine: Engine, records: Iterable[str] = ()) -> dict[str, tuple[float, float]]:
    """(value, standard deviation) of each term from the engine's description, for a fit to these records.

    Where the description's own terms were fitted to one of the records, they are those from before any fit, so that no
    record counts twice.
    """
    terms = engine.terms if set(records).isdisjoint(engine.fitted_to) else engine.unfitted
    return {n: (t.value, abs(t.value) * t.relative_uncertainty or SIGNED_SPREAD) for n, t in terms.items()}


def unfitted(engine: Engine, profile: Profile) -> Profile:
    """The profile with the engine's terms as they were before any whole run was fitted."""
    terms = engine.unfitted
    values: dict[str, Any] = {n: t.value for n, t in terms.items()}
    group = EngineTerms(
        **values,
        uncertainties={n: t.relative_uncertainty for n, t in terms.items()},
        source=Source(kind="assumed", reference=f"the description of {engine.name}, before any fit", date="2026"),
        relative_uncertainty=1.0,
    )
    return profile.model_copy(update={"engines": {**profile.engines, engine.name: group}})


def fit(cases: Sequence[Case], terms: Sequence[str] | None = None) -> Fit:
    """Fit engine terms to the cases.

    terms: names, with or without the unit (`eager_factor`, `verify_layer`). Without any: all that the cases identify;
    the others stay at their prior and `Fit.left` says why. Raises InputError when a named term is unknown, or is not
    identified: with the run that would identify it.
    """
    engine = cases[0].scenario.engine
    prior = priors(engine, (case.record for case in cases))
    names = list(prior) if terms is None else list(dict.fromkeys(known(name, prior) for name in terms))
    if not names:
        raise InputError("names no term", where="--terms", mend=f"one or more of {', '.join(_short(n) for n in prior)}")
    left: dict[str, str] = {}
    while True:
        if not names:
            nearest, why = list(left.items())[-1]
            raise InputError("the records identify no term", where="fit", mend=f"nearest is {_short(nearest)}: {why}")
        solution = _solve(cases, names, prior)
        weakest = int(np.argmin(solution.shares))
        if solution.shares[weakest] >= IDENTIFIED:
            break
        # The weakest alone, since another may then be told; but all those of which nothing is known, on which none depends.
        unknown = np.flatnonzero(solution.shares < UNKNOWN).tolist()
        gone = sorted({weakest, *unknown}, key=lambda i: float(solution.shares[i]))
        unseen = {names[i]: _why(names, i, solution, cases) for i in gone}
        if terms is not None:
            name, needed = unseen[names[weakest]]
            raise InputError(f"{name}: the records do not identify it", where="--terms", mend=needed)
        left |= {name: why for name, (_, why) in unseen.items()}
        names = [name for name in names if name not in unseen]
    found = tuple(
        Term(name, *prior[name], float(solution.values[i]), float(solution.errors[i]), float(solution.shares[i]))
        for i, name in enumerate(names)
    )
    start = {name: np.asarray(value) for name, (value, _) in prior.items()}
    values = start | dict(zip(names, solution.values, strict=True))
    return Fit(
        engine=engine.name,
        terms=found,
        correlations=solution.correlations,
        left={name: left[name] for name in prior if name in left},
        noise=solution.noise,
        spread=solution.spread,
        records=tuple(dict.fromkeys(case.record for case in cases)),
        points=sum(len({s.place for s in case.seen}) for case in cases),
        values=values,
        before=summary(cases, start),
        after=summary(cases, values),
    )


def _short(name: str) -> str:
    return name.removesuffix("_us")


def known(name: str, terms: Collection[str]) -> str:
    """The full name of a term that was given with or without its unit. Raises InputError where `terms` has none of that name."""
    full = name if name in terms else f"{name}_us"
    if full not in terms:
        raise InputError(
            f"no engine term {name!r}", where="--terms", mend=did_you_mean(name, sorted(map(_short, terms)))
        )
    return full


def _why(names: Sequence[str], place: int, solution: _Solution, cases: Sequence[Case]) -> tuple[str, str]:
    """The term's short name, and what is missing with the run that would show it."""
    name = _short(names[place])
    others = np.abs(solution.correlations[place]) - np.eye(len(names))[place]
    nearest = int(np.argmax(others))
    share = max(float(solution.shares[place]), 0.0)
    told = f"{share:.0%} of what is known about it comes from the records"
    if others[nearest] > 0.8:
        told += f", which cannot tell it from {_short(names[nearest])}"
    return name, f"{told}; needs {needed(names[place], cases)}"


@dataclass(frozen=True)
class _Solution:
    values: Array
    errors: Array
    shares: Array
    correlations: Array
    noise: float
    spread: float


def _solve(cases: Sequence[Case], names: Sequence[str], prior: Mapping[str, tuple[float, float]]) -> _Solution:
    """Least squares over (value - prior) / spread of each term and of one factor on all times for each model, in graphs
    and eagerly; twice, the second time with errors as large as the residuals of the first say."""
    from scipy.optimize import least_squares

    observed = np.array([s.ms for case in cases for s in case.seen])
    error = np.array([s.error for case in cases for s in case.seen])
    rest = {name: np.asarray(value) for name, (value, _) in prior.items()}
    centre = np.array([prior[name][0] for name in names])
    width = np.array([prior[name][1] for name in names])
    groups = list(dict.fromkeys((case.model, case.eager) for case in cases))
    spreads = [EAGER_SPREAD if eager else MODEL_SPREAD for _, eager in groups]
    own = np.vstack([  # log of the factor of each observation's group, in units of the group's spread
        [spread * ((case.model, case.eager) == group) for group, spread in zip(groups, spreads, strict=True)]
        for case in cases for _ in case.seen
    ])  # fmt: skip
    n, k, m = len(observed), len(names), len(names) + len(groups)
    lowest = np.full(m, -np.inf)
    lowest[:k] = (np.array([LOWEST.get(name, 0.0) for name in names]) - centre) / width
    step = 1e-3

    def times(u: Array) -> tuple[Array, Array]:
        """log predicted, shape (n,), and its slope in u, shape (n, m): one evaluation with the terms as samples."""
        moved = np.vstack([u[:k], u[:k] + step * np.eye(k)])
        terms = rest | {name: centre[i] + width[i] * moved[:, i] for i, name in enumerate(names)}
        logs = np.log(np.vstack([case.predicted(terms) for case in cases]))
        return logs[:, 0] + own @ u[k:], np.hstack([(logs[:, 1:] - logs[:, :1]) / step, own])

    def robust(z: Array) -> Array:
        """soft-L1 for observations, plain squares for priors."""
        rho = np.vstack([z, np.ones_like(z), np.zeros_like(z)])
        root = np.sqrt(1 + z[:n])
        rho[:, :n] = [2 * (root - 1), 1 / root, -0.5 / root**3]
        return rho

    noise = 1.0
    # From the priors, from below and from above: host time that hides behind the GPU's has no slope there, and time that does
    # not hide has one that ends where it would.
    starts = [np.concatenate([np.full(k, away), np.zeros(len(groups))]) for away in STARTS]
    for _ in range(2):
        scale = error * noise
        cache: dict[bytes, tuple[Array, Array]] = {}

        def at(u: Array, cache: dict[bytes, tuple[Array, Array]] = cache) -> tuple[Array, Array]:
            key = u.tobytes()
            if key not in cache:
                cache.clear()
                cache[key] = times(u)
            return cache[key]

        def residual(u: Array, scale: Array = scale, at: Any = at) -> Array:
            return np.concatenate([(np.log(observed) - at(u)[0]) / scale, u])

        def slope(u: Array, scale: Array = scale, at: Any = at) -> Array:
            return np.vstack([-at(u)[1] / scale[:, None], np.eye(m)])

        bounds = (lowest, np.inf)
        results = [
            least_squares(residual, u, slope, bounds=bounds, loss=robust, f_scale=OUTLIER, x_scale="jac", xtol=1e-6, ftol=1e-6)
            for u in (np.maximum(start, lowest) for start in starts)
        ]  # fmt: skip
        result = min(results, key=lambda r: float(r.cost))
        u = result.x
        starts = [valley for valley, _ in _valleys(results)]
        left = np.abs(residual(u)[:n] * noise)
        noise = max(1.0, float(np.median(left)) / 0.6745 * np.sqrt(n / max(n - k, 1)))
    jacobian = result.jac  # with the robust weights
    covariance = np.linalg.inv(jacobian.T @ jacobian)[:k, :k] + _between(_valleys(results), u)[:k, :k]
    spread = np.sqrt(np.diag(covariance))
    values = centre + width * u[:k]
    slopes = times(u)[1][:, :k] / width  # of log time in the term itself
    variance = np.einsum("ni,ij,nj->n", slopes * width, covariance, slopes * width)
    alike = np.sum((slopes * values) ** 2, axis=1)
    moved = alike > 1e-8
    return _Solution(
        values=values,
        errors=width * spread,
        shares=1 - spread**2,
        correlations=covariance / np.outer(spread, spread),
        noise=noise,
        spread=float(np.sqrt(np.median(variance[moved] / alike[moved]))) if np.any(moved) else 0.0,
    )


def _valleys(results: Sequence[Any]) -> list[tuple[Array, float]]:
    """The places where searches ended that are as likely as the lowest within a factor of exp(DEEPER), and their costs, lowest first;
    those that ended together once."""
    found: list[tuple[Array, float]] = []
    for result in sorted(results, key=lambda r: float(r.cost)):
        near = any(np.max(np.abs(result.x - place)) < TOGETHER for place, _ in found)
        if not near and (not found or result.cost < found[0][1] + DEEPER):
            found.append((result.x, float(result.cost)))
    return found


def _between(valleys: Sequence[tuple[Array, float]], chosen: Array) -> Array:
    """What the covariance around the chosen place gains where others are about as likely: each by exp(-cost)."""
    likely = np.exp([valleys[0][1] - cost for _, cost in valleys])
    away = np.array([place - chosen for place, _ in valleys])
    return np.asarray(np.einsum("v,vi,vj->ij", likely / likely.sum(), away, away))


def summary(cases: Sequence[Case], terms: Mapping[str, Array]) -> dict[str, dict[str, float]]:
    """n, median and worst relative error a phase: predicted / observed - 1."""
    errors: dict[str, list[float]] = {}
    for case in cases:
        for s, time in zip(case.seen, case.predicted(terms)[:, 0], strict=True):
            errors.setdefault(s.phase, []).append(float(time) / s.ms - 1)
    return {
        phase: {
            "n": len(errors[phase]),
            "median_abs_error": float(np.median(np.abs(errors[phase]))),
            "worst_error": max(errors[phase], key=abs),
        }
        for phase in PHASES
        if phase in errors
    }


def held_out(name: str, fitted: Fit, out: Sequence[Case]) -> HeldOut:
    """Errors of a fit on cases that it did not see."""
    records = tuple(dict.fromkeys(case.record for case in out))
    prior = fitted.values | {t.name: np.asarray(t.prior) for t in fitted.terms}
    return HeldOut(name, records, summary(out, prior), summary(out, fitted.values), fitted)


def leave_one_out(cases: Sequence[Case], terms: Sequence[str] | None = None) -> list[HeldOut]:
    """Each model's runs predicted with terms fitted on the other models' runs.

    Named terms that the others do not identify stay at their prior. Raises InputError when there is only one model.
    """
    models = by_model(cases)
    if len(models) < 2:
        raise InputError(
            "all records are of one model", where="--leave-one-out", mend="give runs of two models or more"
        )
    results = []
    for name, out in track(list(models.items()), "models left out"):
        kept = [case for case in cases if case not in out]
        results.append(held_out(name, _of_named(kept, terms), out))
    return results


def _of_named(cases: Sequence[Case], terms: Sequence[str] | None) -> Fit:
    if terms is None:
        return fit(cases)
    wanted = {known(name, priors(cases[0].scenario.engine)) for name in terms}
    everything = fit(cases)
    kept = [t.name for t in everything.terms if t.name in wanted]
    return fit(cases, kept) if kept else everything


# --- results ----------------------------------------------------------------------------------------------------------


def with_terms(profile: Profile, fitted: Fit, date: str) -> Profile:
    """The profile with the fitted terms in its `engines` group. Terms that were not fitted keep what the profile has."""
    engine = load_engine(fitted.engine)
    before = profile.engines.get(fitted.engine)
    kept = before.model_dump(exclude_none=True, include=EngineTerms.names()) if before else {}
    old = {name: before.uncertainty(name) for name in kept} if before else {}
    names = ", ".join(fitted.records)
    group = EngineTerms(
        **{**kept, **{t.name: float(f"{t.value:.4g}") for t in fitted.terms}},
        uncertainties={**old, **{t.name: _uncertainty(t, engine) for t in fitted.terms}},
        source=Source(kind="fitted", reference=f"specsim fit on {names}", date=date),
        relative_uncertainty=float(f"{min(max(fitted.spread, 0.01), 3.0):.2g}"),
        note=counted(fitted.points, "point"),
    )
    return profile.model_copy(update={"engines": {**profile.engines, fitted.engine: group}})


def _uncertainty(term: Term, engine: Engine) -> float:
    """Relative uncertainty of a fitted term for a model that the fit has not seen: never below the spread between models
    and hosts that the description states, which the error of a common value does not hold."""
    relative = term.error / abs(term.value) if term.value else 3.0
    return float(f"{min(max(relative, engine.terms[term.name].relative_uncertainty), 3.0):.2g}")


def document(fitted: Fit, held: Sequence[HeldOut], skipped: Sequence[str]) -> dict[str, Any]:
    """The document of schema specsim.fit/1."""
    names = [t.name for t in fitted.terms]
    return {
        "schema": SCHEMA,
        "engine": fitted.engine,
        "terms": [
            {
                "name": t.name,
                **{k: six(getattr(t, k)) for k in ("prior", "prior_error", "value", "error", "share")},
                "correlations": {n: six(r) for n, r in zip(names, row, strict=True) if n != t.name},
            }
            for t, row in zip(fitted.terms, fitted.correlations, strict=True)
        ],
        "left_at_prior": dict(fitted.left),
        "noise": six(fitted.noise),
        "records": list(fitted.records),
        "points": fitted.points,
        "before": _rounded(fitted.before),
        "after": _rounded(fitted.after),
        "held_out": [
            {"name": h.name, "records": list(h.records), "before": _rounded(h.before), "after": _rounded(h.after)}
            for h in held
        ],
        "skipped": list(skipped),
    }


def _rounded(phases: Mapping[str, Mapping[str, float]]) -> dict[str, dict[str, float]]:
    return {
        phase: {k: v if isinstance(v, int) else six(v) for k, v in figures.items()} for phase, figures in phases.items()
    }
