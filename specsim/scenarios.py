"""A scenario: which model on which box under which engine, and what one asks of it. Built once, from options.

Options come from the command line, a launch line (`specsim.launch`), a record or a program; they are resolved here and
nowhere else. With no option at all the scenario is the field case of docs/field-case.md.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from specsim.acceptance import Acceptance
from specsim.configs import default_draft, load_model, load_preset, model_from_config, mtp_draft, public_drafts
from specsim.engines import Engine, InBlocks, load_engine, running_flag
from specsim.errors import InputError, did_you_mean
from specsim.formats import ONLINE, quantised_online
from specsim.forward import Network, Parallel
from specsim.keys import Keys
from specsim.models import BF16, Format, Model
from specsim.names import METHODS, PHASES, flag_of
from specsim.profiles import Profile, load_profile, load_shipped
from specsim.quantities import counted
from specsim.routing import Routing, parse

if TYPE_CHECKING:
    from specsim.records import Point, Record

Array = NDArray[np.float64]
FIELD_MODEL, FIELD_HARDWARE = "Kimi-K2.5", "8x-pcie-field"
DEFAULT_CONTEXT, DEFAULT_DRAFT_TOKENS = 2048, 3
NO_CAP = 2**31  # running requests
LACKS = {"none": ("draft", "extend", "verify"), "ngram": ("draft", "extend")}  # phases, by method
LIMITS = {
    "batch": 65536,
    "context": 16_777_216,
    "draft_tokens": 512,
    "num_steps": 511,
    "topk": 64,
    "tp": 1024,
    "ep": 1024,
}
LEAST = {"context": 0, "draft_tokens": 2}  # of those; else 1


@dataclass(frozen=True, repr=False)
class Scenario:
    """Everything a cost depends on. batch (sequences decoded together), context (tokens in each one's cache), draft_tokens
    (rows a sequence verifies in a cycle, root included) and num_steps are float arrays that broadcast; a single one has
    shape (1,) or ()."""

    model: Model
    draft: Model | None
    profile: Profile
    engine: Engine
    parallel: Parallel
    batch: Array
    context: Array
    method: str
    draft_tokens: Array
    num_steps: Array
    topk: int = 1
    acceptance: Acceptance | None = None
    routing: Routing | None = None  # None: uniform, and not known to be
    eager: frozenset[str] = frozenset()
    options: Mapping[str, Any] = field(default_factory=dict)  # engine flags: disable_cuda_graph, attention_backend, ...
    names: Mapping[str, str] = field(default_factory=dict)  # model, draft and hardware by name, and what to load
    warnings: tuple[str, ...] = ()
    asked: Mapping[str, Any] = field(default_factory=dict, repr=False, compare=False)  # the options that made it

    @property
    def ndim(self) -> int:
        """Axes that batch, context and draft tokens broadcast to."""
        return max(self.batch.ndim, self.context.ndim, self.draft_tokens.ndim)

    @property
    def title(self) -> str:
        """One line: which model on which box, engine and settings; arrays by their smallest and largest."""
        draft = f" + {self.draft.name}" if self.draft is not None else ""
        cut = "".join(f" {name} {n}" for name, n in (("EP", self.parallel.ep), ("DP", self.parallel.dp)) if n > 1)
        drafting = "" if self.method == "none" else f", {self.method} with {_span(self.draft_tokens)} draft tokens"
        return (
            f"{self.model.name}{draft} on {self.profile.name}, {self.engine.name} {self.engine.version}, "
            f"TP {self.parallel.tp}{cut}, batch {_span(self.batch)}, context {_span(self.context)}{drafting}"
        )

    def __repr__(self) -> str:
        return f"<Scenario: {self.title}>"

    @cached_property
    def graph_phases(self) -> Mapping[str, bool]:
        """Which phases the engine replays from CUDA graphs, for the batches that were captured."""
        return self.engine.graph_phases(
            "eagle3" if self.method in ("dflash", "dspark") else self.method,
            attention_backend=self.options.get("attention_backend"),
            draft_attention_backend=self.options.get("draft_attention_backend"),
            disable_cuda_graph=bool(self.options.get("disable_cuda_graph", False)),
            eager=self.eager,
            compute_capability=self.profile.gpu.compute_capability,
        )

    @cached_property
    def block_products(self) -> str:
        """See `Engine.block_products`."""
        return self.engine.block_products(self.options, self.profile.gpu.compute_capability)

    @cached_property
    def expert_kernels(self) -> str:
        """See `Engine.expert_kernels`, of the target's experts."""
        experts = self.model.experts
        capability = self.profile.gpu.compute_capability
        return self.engine.expert_kernels(self.options, capability, experts.format.name) if experts else ""

    @cached_property
    def in_blocks(self) -> InBlocks:
        """The kernels that fp8 weights scaled in blocks are priced by. Experts' other kernels are not the whole path, which
        is priced where the profile lacks them."""
        measured = f"moe_fp8_{self.expert_kernels}" in self.profile.operators
        usual = "" if self.expert_kernels or self.model.experts is None else self.model.experts.format.name
        around = self.engine.around_experts(self.profile.gpu.compute_capability, usual)
        return InBlocks(self.block_products, self.expert_kernels if measured else "", around)

    def tree_block(self, phase: str) -> int:
        """Tokens in a block of the second attention call of a draft step or verify over a tree; 0: there is none."""
        tree = self.topk > 1 or (self.method == "ngram" and bool(self.engine.policy.get("ngram_tree")))
        if phase not in ("draft", "verify") or not tree:
            return 0
        kind = _attention(self.model)
        capability = self.profile.gpu.compute_capability
        default = (
            self.engine.default_attention_backend(kind, capability, self.topk) if self.engine.name == "sglang" else ""
        )
        return self.engine.tree_block(str(self.options.get("attention_backend") or default))

    def running_cap(self, phase: str) -> int | None:
        """Requests that the server runs at once in a phase, unless the scenario asks for more."""
        given = self.options.get("max_running_requests")
        # decode is the server without speculation
        return given or (self.engine.running_cap_speculative if self.method != "none" and phase != "decode" else None)

    def captured(self, phase: str, rows: int = 1, *, beyond: bool | None = None) -> tuple[int, ...]:
        """Batch sizes that have a graph in a phase of `rows` rows a sequence. Graphs are a rank's own, so under data-parallel
        attention each serves as many sequences of every group.

        beyond: for a batch above the cap on running requests (None: whether the largest is). One that the scenario asks for
        is one that the server runs, whatever cap it would have by default: requests queue, which is a warning, and nothing
        runs eagerly.
        """
        running = self.running_cap(phase)
        if running is not None and (self.batch.max() > running if beyond is None else beyond):
            running = NO_CAP
        groups = self.parallel.dp
        sizes = self.engine.captured_batches(
            self.options.get("cuda_graph_max_bs"),
            self.method != "none" and phase != "decode",
            self.profile.gpu.memory_gb,
            self.parallel.tp,
            rows=rows if phase in ("verify", "extend") else 1,
            explicit=self.options.get("captured_sizes"),
            max_running=running if running is None else max(running // groups, 1),
        )
        return sizes if groups == 1 else tuple(groups * size for size in sizes)

    @cached_property
    def network(self) -> Network:
        """What decides which all-reduce serves a message."""
        known = {
            "compute_capability": self.profile.gpu.compute_capability,
            "architecture": self.model.architecture,
            "row_bytes": self.model.hidden * self.model.activation.bytes,
        }
        return Network(
            self.parallel.tp, self.profile.link, {**known, "dp_attention": self.parallel.dp > 1, **self.options}
        )

    def noted(self, notes: Iterable[str]) -> Scenario:
        """The scenario with notes before its own warnings."""
        said = tuple(dict.fromkeys([*notes, *self.warnings]))
        return self if said == self.warnings else replace(self, warnings=said)

    @property
    def accept_length(self) -> Array | None:
        """Mean tokens a sequence gains a cycle, or None when no acceptance was given."""
        if self.acceptance is None or self.method == "none":
            return None
        return np.asarray(self.acceptance.length(self.num_steps, self.topk, self.draft_tokens))


def _span(values: Array) -> str:
    low, high = (values.item(),) * 2 if values.size == 1 else (values.min(), values.max())
    return f"{low:.0f}" if low == high else f"{low:.0f} to {high:.0f}"


def no_meaning(option: str) -> str:
    """The note that plain decoding has no use for an option."""
    return f"{option} has no meaning without speculation and is left out"


def build(
    *,
    model: str | Model | None = None,
    draft: str | Model | None = None,
    hardware: str | Profile | None = None,
    engine: str | None = None,
    tp: int | None = None,
    ep: int | None = None,
    dp_attention: int | bool | None = None,
    batch: ArrayLike | None = None,
    context: ArrayLike | None = None,
    method: str | None = None,
    draft_tokens: ArrayLike | None = None,
    num_steps: ArrayLike | None = None,
    topk: int | None = None,
    acceptance: Acceptance | None = None,
    accept_rate: ArrayLike | None = None,
    accept_length: float | None = None,
    accept_per_position: tuple[float, ...] | None = None,
    accept_profile: str | None = None,
    routing: str | Routing | None = None,
    eager: tuple[str, ...] | frozenset[str] = (),
    asked: Mapping[str, Any] | None = None,
    **options: Any,
) -> Scenario:
    """Resolve options into a Scenario. `options` are engine flags as `specsim.launch` names them; `asked`: what these
    options were read from, where that was a launch line.

    Raises InputError for anything that cannot be: unknown names, numbers out of range, heads that tp does not divide,
    two statements of acceptance.
    """
    if asked is None:
        asked = {k: v for k, v in locals().items() if k not in ("asked", "options") and v is not None}
        asked = {k: v for k, v in asked.items() if k != "eager" or v}
        asked |= options
    warnings: list[str] = []
    box, target = hardware or load_shipped(FIELD_HARDWARE), model or load_preset(FIELD_MODEL)
    profile = box if isinstance(box, Profile) else load_profile(box)
    target = target if isinstance(target, Model) else load_model(target)
    if model is not None and hardware is None:
        warnings.append(f"no --hardware given: the box is {FIELD_HARDWARE}")
    described = load_engine(engine or "sglang", options.pop("version", None))
    parallel = _parallel(target, profile, tp, ep, dp_attention)
    target = _served(target, options, warnings)
    warnings += _blocks_cut(target, parallel)
    if target.draft is not None and target.draft.kind != "model":
        raise InputError(f"{target.name} drafts by {target.draft.kind} and is no target", where="--model", mend="give it as --draft")  # fmt: skip
    drafter, kind = _drafter(target, draft, method, described.name)
    drafter = drafter and _cached_as(drafter, options)
    wants = [
        x
        for x in (draft_tokens, num_steps, accept_rate, accept_length, accept_per_position, accept_profile)
        if x is not None
    ]
    if kind == "none" and method is None and wants:
        raise InputError(f"no public draft of {target.name} is known", where="--draft", mend="give --draft or --method, or leave the draft tokens and the acceptance out")  # fmt: skip
    if draft is not None and drafter is None:
        warnings.append(f"method {kind} has no draft model: --draft is left out")
    if kind == "none" and (draft_tokens is not None or num_steps is not None or topk is not None):
        warnings.append("without speculation draft tokens, steps and topk have no meaning and are left out")
    if drafter is not None:
        check_heads(drafter, parallel, profile.gpus)
        warnings += _vocabularies(target, drafter, kind, described.name, options)
    target_warnings = [*target.warnings, *(drafter.warnings if drafter is not None and draft is not None else ())]
    steps, tokens, branch, said = resolve_lengths(kind, num_steps, draft_tokens, topk, drafter)
    warnings += said
    rows = whole("batch", 1 if batch is None else batch)
    default = min(DEFAULT_CONTEXT, int(options.get("context_length") or target.max_context or DEFAULT_CONTEXT))
    cached = whole("context", default if context is None else context)
    warnings += too_long(target, options, float(np.max(cached)), f"context {np.max(cached):,.0f}")
    if routing is not None and target.experts is None:
        warnings.append(f"{target.name} has no experts: --routing is left out")
    given = [n for n, v in (("--accept-rate", accept_rate), ("--accept-length", accept_length),
                            ("--accept-per-position", accept_per_position), ("--accept-profile", accept_profile),
                            ("acceptance", acceptance)) if v is not None]  # fmt: skip
    if len(given) > 1:
        raise InputError("acceptance is stated twice", where=" and ".join(given), mend="give one of them")
    if given and kind == "none":
        warnings.append(no_meaning(given[0]))
        accept_rate = accept_length = accept_per_position = accept_profile = acceptance = None
    if accept_rate is not None:
        acceptance = Acceptance.constant(accept_rate)
    elif accept_length is not None:
        acceptance = Acceptance.from_length(
            accept_length, _scalar(steps, "--accept-length"), branch, _scalar(tokens, "--accept-length")
        )
    elif accept_per_position is not None:
        acceptance = Acceptance.per_position(accept_per_position)
    elif accept_profile is not None:
        acceptance = Acceptance.from_profile(accept_profile)
        warnings.append(f"acceptance: {acceptance.source}")
    if acceptance is not None and max(np.size(steps), np.size(tokens)) == 1:
        warnings += acceptance.warnings(_scalar(steps, "--num-steps"), branch, _scalar(tokens, "--draft-tokens"))
    _check_phases(eager)
    warnings += (
        f"method {kind} has no {phase}: --eager {phase} is left out"
        for phase in sorted(eager)
        if phase in LACKS.get(kind, ())
    )
    if described.name == "vllm" and branch > 1:
        warnings.append("vLLM drafts chains alone: this tree is priced as if it could")
    if kind != "none" and not options.get("disable_cuda_graph"):
        warnings += _unlike(eager)
    _cap(described, options, rows, kind, warnings)
    usual = described.default_attention_backend(_attention(target), profile.gpu.compute_capability, branch)
    warnings += _other_attention(options, usual)
    known_routing = parse(routing) if isinstance(routing, str) else routing
    return Scenario(
        model=target,
        draft=drafter,
        profile=profile,
        engine=described,
        parallel=parallel,
        batch=rows,
        context=cached,
        method=kind,
        draft_tokens=tokens,
        num_steps=steps,
        topk=branch,
        acceptance=acceptance,
        routing=known_routing,
        eager=frozenset(eager),
        options=options,
        names={
            "model": target.name,
            "model_path": _checkpoint(model, target),
            "draft": drafter.name if drafter else "",
            "draft_path": _checkpoint(draft, drafter) if drafter else "",
            "hardware": profile.name,
        },
        warnings=tuple(dict.fromkeys([*warnings, *target_warnings])),
        asked=asked,
    )


# What can be said of the value of an option without the others, if it is of the kind that the command line gives; each raises
# InputError.
_WORDS_ALONE: dict[str, Callable[[str], object]] = {
    "model": load_model,
    "draft": load_model,
    "hardware": load_profile,
    "engine": load_engine,
    "method": lambda value: _check_method(value),
    "accept_profile": Acceptance.from_profile,
    "routing": parse,
}
_NUMBERS_ALONE: dict[str, Callable[[Any], object]] = {
    "tp": lambda value: whole("tp", value),
    "ep": lambda value: whole("ep", value),
    "batch": lambda value: whole("batch", value),
    "context": lambda value: whole("context", value),
    "draft_tokens": lambda value: whole("draft_tokens", value),
    "num_steps": lambda value: whole("num_steps", value),
    "topk": lambda value: whole("topk", value),
    "accept_rate": Acceptance.constant,
}
_TUPLES_ALONE: dict[str, Callable[[Any], object]] = {
    "accept_per_position": Acceptance.per_position,
    "eager": lambda value: _check_phases(value),
}


def wrong_alone(values: Mapping[str, Any]) -> Iterator[InputError]:
    """What is wrong with the values of options, by name, whatever the others say: `build` raises the first that it meets."""
    for name, value in values.items():
        kinds = (_WORDS_ALONE, str), (_NUMBERS_ALONE, (int, float)), (_TUPLES_ALONE, tuple)
        check = next((known[name] for known, kind in kinds if name in known and isinstance(value, kind)), None)
        if check is not None and value != () and str(value).strip():
            try:
                check(value)
            except InputError as error:
                yield error


def refuse_unknown(lists: Mapping[str, Iterable[Any]]) -> None:
    """Raises InputError for the first word in lists of values, by option, that no scenario can have: what is misspelt is no
    scenario that happens not to fit. A file is not looked into: one that cannot be used is left out, as what does not fit is."""
    for name, values in lists.items():
        for value in values if name in _WORDS_ALONE or name == "eager" else ():
            if not (isinstance(value, str) and Path(value).exists()):
                for error in wrong_alone({name: value}):
                    raise error


def too_long(model: Model, options: Mapping[str, Any], tokens: float, what: str) -> tuple[str, ...]:
    """A note where `what`, of so many tokens, is longer than the launch line allows, or else than the model was made for."""
    allowed = options.get("context_length")
    if allowed:
        limit, whose = int(allowed), "that the launch line allows: the server refuses it"
    else:
        limit, whose = model.max_context, f"of {model.name}"
    return (f"{what} is beyond the {limit:,} tokens {whose}",) if limit and tokens > limit else ()


def whole(name: str, value: ArrayLike) -> Array:
    """The value, or the values, of an option of `LIMITS`. Raises InputError for the first that no scenario can have."""
    least = LEAST.get(name, 1)
    if type(value) is int and least <= value <= LIMITS[name]:
        return np.asarray(float(value))
    option = flag_of(name)
    try:
        array = np.asarray(value, dtype=float)
    except (TypeError, ValueError):
        raise InputError(f"{value!r} is not a number", where=option, mend="give a whole number") from None
    except OverflowError:
        raise InputError("is out of range", where=option, mend=f"give {least:g} to {LIMITS[name]:,}") from None
    most = LIMITS[name]
    bad = ~(np.isfinite(array) & (array >= least) & (array <= most))
    if np.any(bad):
        wrong = float(array[bad].flat[0] if array.ndim else array)
        said = f"{wrong:,.0f}" if abs(wrong) < 1e12 else f"{wrong:g}"
        raise InputError(f"{said} is out of range", where=option, mend=f"give {least:g} to {most:,}")
    if np.any(broken := array != np.floor(array)):
        said = f"{float(array[broken].flat[0] if array.ndim else array):g}"
        raise InputError(f"{said} is not a whole number", where=option, mend=f"give {least:g} to {most:,}")
    return array


def _scalar(value: Array, option: str) -> int:
    if value.size != 1:
        mend = "give --accept-rate for several draft lengths" if option == "--accept-length" else "give one number"
        raise InputError("has several values where one is needed", where=option, mend=mend)
    return int(value.reshape(-1)[0])


def _parallel(
    model: Model, profile: Profile, tp: int | None, ep: int | None, dp_attention: int | bool | None
) -> Parallel:
    ranks = default_tp(model, profile.gpus) if tp is None else _scalar(whole("tp", tp), "--tp")
    groups = 1 if ep is None else _scalar(whole("ep", ep), "--ep")
    experts = model.experts
    if groups > 1 and experts is None:
        raise InputError(f"{model.name} has no experts", where="--ep", mend="leave --ep out")
    if ranks % groups or (experts is not None and experts.count % groups):
        raise InputError(f"ep {groups} does not divide tp {ranks} and the experts", where="--ep", mend=f"1 or {ranks}")
    dp = ranks if dp_attention is True else int(dp_attention or 1)
    if dp < 1 or ranks % dp:
        raise InputError(
            f"{dp} attention groups do not divide tp {ranks}", where="--dp-attention", mend=f"1 or {ranks}"
        )
    check_ranks(profile, ranks)
    parallel = Parallel(ranks, groups, dp)
    check_heads(model, parallel, profile.gpus)
    return parallel


def check_ranks(profile: Profile, ranks: int) -> None:
    """Raise InputError where a box cannot run so many ranks, or does not say what their all-reduces cost."""
    if ranks > profile.gpus:
        raise InputError(f"tp {ranks} needs more GPUs than the {profile.gpus} of {profile.name}", where="--tp", mend=f"tp up to {profile.gpus}, or another --hardware")  # fmt: skip
    if ranks > 1 and not profile.allreduce:
        mend = "specsim calibrate --only allreduce, or specsim hardware import of nccl-tests output"
        raise InputError(f"{profile.name} has no all-reduce curve, which tp {ranks} needs", where="--tp", mend=mend)


def check_heads(model: Model, parallel: Parallel, gpus: int = 64) -> None:
    """Raise InputError where the ranks of one attention layer do not divide its heads, or neither divide its K/V heads
    nor are divided by them. gpus: up to how many ranks another number is offered."""
    ranks, groups = parallel.attention, parallel.dp
    if what := _uncut(model, ranks):
        over = f" over {groups} attention groups" if groups > 1 else ""
        fit = [str(n * groups) for n in range(1, gpus // groups + 1) if not _uncut(model, n)]
        mend = f"{'one of ' if len(fit) > 1 else ''}{', '.join(fit)} would"
        raise InputError(f"tp {parallel.tp}{over} does not divide {what} of {model.name}", where="--tp", mend=mend)


def _uncut(model: Model, ranks: int) -> str:
    """The heads of a model that so many ranks cannot share; "" where they can."""
    for layer, _ in model.layers:
        a = layer.attention
        if a is None or not a.heads:
            continue
        kv = a.kv_heads if a.kind == "gqa" else 0
        if a.heads % ranks or (kv and kv % ranks and ranks % kv):
            return f"{a.heads} attention heads" if a.heads % ranks else f"{kv} K/V heads"
    return ""


def cut_blocks(model: Model, parallel: Parallel) -> str:
    """What a cut of FP8 weights in blocks leaves that is no multiple of a block, which engines refuse to load ("The output_size of
    gate's and up's weight = 192 is not divisible by weight quantization block_n = 128"); "" where all fit."""
    for layer, _ in model.layers:
        e = layer.experts
        parts = [("the experts'", e.intermediate, e.format, parallel.tp // parallel.ep)] if e else []
        rows = ((p, parallel.attention if p in layer.mixer else parallel.tp) for p in layer.projections())
        parts += [(f"{p.name}'s", p.inputs, p.format, ranks) for p, ranks in rows if p.split == "row"]
        for whose, width, stored, ranks in parts:
            block = round(math.sqrt(32 / stored.scale_bits)) if stored.in_blocks else 1
            if ranks > 1 and width % (ranks * block):
                return f"{whose} width of {width:,} into {width / ranks:,g} a rank, within blocks of {block}"
    return ""


def _blocks_cut(model: Model, parallel: Parallel) -> Iterator[str]:
    """Said where an engine refuses a cut of weights in blocks, with the cuts that it takes."""
    if wrong := cut_blocks(model, parallel):
        fit = [n for n in range(1, parallel.tp) if parallel.tp % n == 0 and not cut_blocks(model, Parallel(n))]
        ways = [f"tp {fit[-1]}"] if fit else []
        if model.experts and not cut_blocks(model, replace(parallel, ep=parallel.tp)):
            ways.append(f"ep {parallel.tp}")
        instead = f"; {' or '.join(ways)} would do" if ways else ""
        yield f"tp {parallel.tp} cuts {wrong}: engines refuse to load FP8 weights so{instead}"


def default_tp(model: Model, gpus: int) -> int:
    """All GPUs of the box, or the most that its heads can be shared by."""
    return max(n for n in range(1, gpus + 1) if gpus % n == 0 and not _uncut(model, n))


def _check_method(method: str) -> None:
    if method in ("domino", "peagle", "medusa", "lookahead", "suffix", "hydra"):
        raise InputError(f"method {method} has no cost model", where="--method", mend=f"one of {', '.join(METHODS)}")
    if method not in METHODS:
        raise InputError(f"unknown method {method!r}", where="--method", mend=did_you_mean(method, METHODS))


def _drafter(target: Model, draft: str | Model | None, method: str | None, engine: str) -> tuple[Model | None, str]:
    """The drafter and the method: what is given, else the target's public draft, else its built-in MTP, else none."""
    if method is not None:
        _check_method(method)
    if method in ("none", "ngram"):
        return None, method
    if method == "mtp" and draft is None:
        return mtp_draft(target), "mtp"
    if draft is None and method is None:
        name = default_draft(target.name)
        if name is None:
            return (mtp_draft(target), "mtp") if target.mtp_layers else (None, "none")
        draft = load_preset(name)
    if draft is None:
        name = next((n for n in public_drafts(target.name) if _serves(load_preset(n), str(method))), None)
        if name is None:
            raise InputError(
                f"no public {method} draft of {target.name} is known",
                where="--draft",
                mend="give the draft's config.json",
            )
        draft = load_preset(name)
    drafter = draft if isinstance(draft, Model) else load_model(draft)
    kind = drafter.draft.kind if drafter.draft else "model"
    if _natural(drafter) not in METHODS:
        what = f"{drafter.name} drafts by {_natural(drafter)}, which has no cost model"
        raise InputError(what, where="--draft", mend="give another draft, or --method ngram, mtp or none")
    if method is not None and not _serves(drafter, method):
        raise InputError(f"{drafter.name} drafts by {_natural(drafter)}, not {method}", where="--method", mend=f"give --method {_natural(drafter)} or another --draft")  # fmt: skip
    if kind != "model" and drafter.draft and drafter.draft.target_hidden not in (0, target.hidden):
        raise InputError(
            f"{drafter.name} was trained for a target of hidden size {drafter.draft.target_hidden}, {target.name} has {target.hidden}",
            where="--draft", mend="give the draft of this target",
        )  # fmt: skip
    return drafter, method or _natural(drafter)


def _vocabularies(
    target: Model, drafter: Model, method: str, engine: str, options: Mapping[str, Any]
) -> tuple[str, ...]:
    """A note where drafter and target do not have the same tokens; the head of an EAGLE-3 drafter may have fewer, which its ids are
    mapped from.

    Raises InputError for a draft model by itself: vLLM refuses one of another vocabulary (`verify_equal_vocab_size_if_draft_model`
    of vllm/config/speculative.py) unless it is told to draft what both have; SGLang refuses it as well
    (`_validate_vocab_compatibility` of speculative/standalone_worker_v2.py; releases before that check garble the text, sgl-project/sglang
    issue 24051). The other drafters use the target's embedding, whatever their config says.
    """
    if not drafter.vocab or drafter.vocab == target.vocab:
        return ()
    said = f"{drafter.name} has {drafter.vocab} tokens, {target.name} {target.vocab}: they must share a tokenizer"
    if method != "draft-model":
        return (said,)
    if options.get("heterogeneous_vocab"):
        return (f"{said}, or vLLM drafts what both have alone",)
    mend = "give a draft model of the target's family"
    if engine == "vllm":
        mend += ', or "use_heterogeneous_vocab": true in --speculative-config'
    raise InputError(said, where="--draft", mend=mend)


def _natural(drafter: Model) -> str:
    """The method that a drafter was made for."""
    kind = drafter.draft.kind if drafter.draft else "model"
    return "draft-model" if kind == "model" else kind


def _serves(drafter: Model, method: str) -> bool:
    """Whether a drafter can draft by a method: its own, or EAGLE for EAGLE-3 and back, as engines name them."""
    own = _natural(drafter)
    return method == own or {method, own} == {"eagle", "eagle3"}


def resolve_lengths(
    method: str,
    num_steps: ArrayLike | None,
    draft_tokens: ArrayLike | None,
    topk: int | None,
    drafter: Model | None = None,
) -> tuple[Array, Array, int, list[str]]:
    """(num_steps, draft_tokens, topk, what was resolved), as the engine would: a chain has d = num_steps + 1.

    Raises InputError for draft_tokens below 2 or more nodes than the tree of that depth and branching has.
    """
    if method == "none":
        return np.zeros(()), np.ones(()), 1, []
    branch = 1 if topk is None else _scalar(whole("topk", topk), "--topk")
    steps = None if num_steps is None else whole("num_steps", num_steps)
    tokens = None if draft_tokens is None else whole("draft_tokens", draft_tokens)
    block = drafter.draft.block if drafter is not None and drafter.draft else 0
    if block and tokens is not None and np.any(tokens > block):
        raise InputError(f"{drafter.name if drafter else method} drafts blocks of {block} tokens", where="--draft-tokens", mend=f"give 2 to {block}")  # fmt: skip
    if steps is None and tokens is None:
        tokens = np.asarray(float(block or DEFAULT_DRAFT_TOKENS))
    said: list[str] = []
    if branch == 1:
        if steps is None:
            assert tokens is not None
            steps = tokens - 1
        elif tokens is not None and np.any(tokens != steps + 1):
            said.append(
                f"topk 1 verifies num_steps + 1 tokens: draft tokens are taken as {_show(steps + 1)}, not {_show(tokens)}"
            )
        return steps, steps + 1, 1, said
    if steps is None:
        raise InputError("a tree needs its depth", where="--num-steps", mend="give --num-steps beside --topk")
    if tokens is None:
        raise InputError("a tree needs its size", where="--draft-tokens", mend="give --draft-tokens beside --topk")
    depth = float(np.max(steps))
    nodes = 1 + branch + (depth - 1) * branch * branch if depth >= 1 else 1
    if np.any(tokens > nodes):
        raise InputError(
            f"a tree of {depth:g} steps and topk {branch} has only {nodes:g} nodes",
            where="--draft-tokens",
            mend=f"give 2 to {nodes:g}",
        )
    return steps, tokens, branch, said


def _checkpoint(given: str | Model | None, model: Model) -> str:
    """What an engine would load: the folder that the user named, else the model's name."""
    if isinstance(given, str) and Path(given).exists():
        path = Path(given)
        return str(path if path.is_dir() else path.parent)
    return model.name


def _check_phases(eager: Iterable[str]) -> None:
    """Raise InputError for what is no phase, and for several in one."""
    for phase in sorted({str(phase) for phase in eager} - set(PHASES)):
        several = [part.strip() for part in phase.split(",") if part.strip()]
        lists = len(several) > 1 and set(several) <= set(PHASES)
        mend = (
            f"give one at a time: {' '.join(f'--eager {p}' for p in several)}" if lists else did_you_mean(phase, PHASES)
        )
        raise InputError(f"unknown phase {phase!r}", where="--eager", mend=mend)


def _unlike(eager: Iterable[str]) -> Iterator[str]:
    """Said where the baseline and the verify are launched differently, so that a break-even compares two servers."""
    both = "compares two servers; --eager decode --eager verify is one without graphs"
    if "decode" in eager and "verify" not in eager:
        yield f"plain decoding runs without CUDA graphs and the verify in them: the break-even {both}"
    elif "verify" in eager and "decode" not in eager:
        yield f"the verify runs without CUDA graphs and plain decoding in them: the break-even {both}"


def _cached_as(model: Model, options: Mapping[str, Any]) -> Model:
    """The model with the KV cache type of the launch line, which holds for the target and for a draft beside it."""
    kv = str(options.get("kv_cache_dtype") or "auto")
    if kv.startswith("fp8"):
        return replace(model, kv_format=Format("fp8", 8))
    return replace(model, kv_format=BF16) if kv in ("bf16", "bfloat16") else model


def _served(model: Model, options: Mapping[str, Any], warnings: list[str]) -> Model:
    """The model as the server holds it: a KV cache type or a quantisation from the launch line."""
    model = _cached_as(model, options)
    wanted = options.get("quantization")
    if model.quantisation == "none" and wanted in ONLINE:
        model = quantised_online(model, str(wanted))
    elif wanted and model.quantisation == "none":
        warnings.append(
            f"--quantization {wanted} of unquantised weights is not modelled: {model.name} is priced as its config.json has it"
        )
    return model


def _attention(model: Model) -> str:
    """What an engine chooses its attention backend by."""
    return "mla" if any(a.attention and a.attention.kind == "mla" for a, _ in model.layers) else "gqa"


def _other_attention(options: Mapping[str, Any], usual: str) -> Iterator[str]:
    """Said where a line names another attention backend than the one whose kernels profiles time."""
    named = (options.get(name) for name in ("attention_backend", "decode_attention_backend"))
    others = {str(name) for name in named if name and str(name).casefold().removesuffix("_vllm_v1") != usual}
    if others:
        yield f"attention is priced as the engine's default here, {usual}, has it: what {' and '.join(sorted(others))} takes is not known"


def _show(values: Array) -> str:
    return ", ".join(f"{v:g}" for v in np.unique(values)[:5])


def _cap(engine: Engine, options: Mapping[str, Any], batch: Array, method: str, warnings: list[str]) -> None:
    cap = options.get("max_running_requests") or (engine.running_cap_speculative if method != "none" else None)
    if cap and (batch > cap).any():
        rows = math.floor(float(np.max(batch)))
        warnings.append(
            f"{engine.name} runs at most {counted(cap, 'request')} at once here: batch {rows} would queue; more need "
            f"{running_flag(engine.name)} {rows} in the launch line, which --{engine.name}-args reads"
        )


def contents(s: Scenario) -> str:
    """All that a scenario's costs depend on, down to each digit of the model, the box and the engine."""
    parts: dict[str, Any] = {field.name: getattr(s, field.name) for field in fields(s) if field.name != "asked"}
    parts["eager"] = sorted(s.eager)  # sets show in any order
    parts["profile"] = s.profile.model_dump_json()
    for name in ("model", "draft", "engine"):
        part = parts[name]
        parts[name] = part and {field.name: getattr(part, field.name) for field in fields(part)}
    return exactly(parts)


def exactly(value: Any) -> str:
    """`repr` with every number of an array in it, and every digit."""
    with np.printoptions(threshold=sys.maxsize, floatmode="unique"):
        return repr(value)


def of_record(record: Record, point: Point, hardware: str | Profile | None = None) -> Scenario:
    """The scenario that a recorded point ran: models and launch flags from the record, batch and context from the point.

    hardware: the profile to predict with, else the record's own. Raises InputError when the record lacks what a
    prediction needs.
    """
    box = hardware or record.hardware
    if box is None:
        raise InputError("names no hardware profile", where=f"record {record.name}", mend="give --hardware")
    options, _ = recorded(record)
    return build(hardware=box, batch=point.batch, context=round(point.context or 0), **options)


def recorded(record: Record) -> tuple[dict[str, Any], tuple[str, ...]]:
    """The models, launch flags and environment that a record holds, as options of `build`, and notes on the launch line. Raises
    InputError when there is no engine or no model among them."""
    from specsim.launch import read_launch  # only replays need it, and every start-up would pay for it

    if record.engine is None or record.target_config is None:
        raise InputError(
            "has no engine or no target config", where=f"record {record.name}", mend="measure again with both"
        )
    target = model_from_config(record.target_config, name=record.name, source="record")
    named = Keys(record.target_config, record.name).first("architectures") or None
    launch = read_launch(record.engine.name, record.engine.flags, version=record.engine.version, architecture=named)
    options = {
        "tp": 1,
        "method": "none",
        **launch.options,
        "env": {**record.engine.env, **launch.options.get("env", {})},
    }
    for key in ("model", "draft", "version", "nodes", "pp", "dp"):
        options.pop(key, None)
    draft = None
    if record.draft_config is not None:
        draft = model_from_config(record.draft_config, name=f"{record.name}-draft", source="record")
    elif options["method"] == "mtp":
        draft = mtp_draft(target)
    if record.engine.env.get("SGLANG_SIMULATE_UNIFORM_EXPERTS"):
        options["routing"] = "uniform"
    held = {"model": target, "draft": draft, "engine": record.engine.name, "version": record.engine.version}
    return {**options, **held}, launch.notes
