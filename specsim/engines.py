"""What an engine does with a model: the kernels it adds, which passes run in CUDA graphs, which all-reduce it picks.

Numbers are data (specsim/data/sglang.yaml, vllm.yaml), read from the engines' public source; policy is here.
docs/engines.md names the source files and follows the cycle of each drafting method.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, lru_cache
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from specsim.errors import InputError, did_you_mean
from specsim.files import read_yaml
from specsim.names import ENGINES, PHASES

METHODS = ("eagle3", "eagle", "mtp", "draft-model", "ngram", "none")
NO_LIMIT = 2**62  # bytes
MOST_CAPTURED = 2**17  # sequences or tokens of the largest graph: more than any batch has
ALLREDUCE_OPTIONS = (  # what decides which implementation serves an all-reduce, beside the environment
    "disable_custom_all_reduce", "p2p", "nodes", "compute_capability", "flashinfer_allreduce_fusion", "architecture",
    "dp_attention", "moe_a2a_backend", "row_bytes",
)  # fmt: skip
OLDER_CUSTOM = ("custom-v1", "custom")  # the kernel of vLLM and of older SGLang, and what stands in for it


@dataclass(frozen=True)
class Term:
    """One host or gap term in microseconds; `relative_uncertainty` is one standard deviation over the value.

    `before`: what was known before whole runs were fitted; None where the value comes from none.
    """

    value: float
    relative_uncertainty: float
    source: str
    before: Term | None = None


class InBlocks(NamedTuple):
    """Kernels of fp8 weights scaled in blocks, as the end of the class's name; "" where the class itself is priced. around: those
    of experts whose class is of the products alone (`Engine.around_experts`)."""

    products: str = ""
    experts: str = ""
    around: str = ""


USUAL = InBlocks()


@dataclass(frozen=True, repr=False)
class Engine:
    """One release of one engine.

    `kernels` are those launched besides the structural ones, by piece ("gqa", "mla", "linear", "conv", "indexer",
    "dense", "moe", "groups", "shared", once a "pass", "draft" and "accept") and operator class. `kernel_counts` says how many
    CUDA kernels one call of a class launches. `fitted_to` names the records of whole runs that terms were fitted to.
    """

    name: str
    version: str
    kernels: Mapping[str, Mapping[str, int]]
    kernel_counts: Mapping[str, int]
    shared_experts_overlap: bool
    running_cap_speculative: int | None
    terms: Mapping[str, Term]
    fitted_to: tuple[str, ...]
    policy: Mapping[str, Any] = field(repr=False)  # the description's other entries, already of this release

    @property
    def unfitted(self) -> dict[str, Term]:
        """The terms as they were known before any whole run was fitted."""
        return {name: term.before or term for name, term in self.terms.items()}

    def __hash__(self) -> int:
        return hash((self.name, self.version))

    def __repr__(self) -> str:
        return f"<Engine: {self.name} {self.version}>"

    def launches(self, operator: str) -> int:
        """CUDA kernels of one call of the class `operator`; "moe_int4" falls back on "moe", an unknown class is 1."""
        return self.kernel_counts.get(operator, self.kernel_counts.get(operator.split("_")[0], 1))

    def attention_launches(self, kind: str, backend: str | None = None) -> int:
        """CUDA kernels of one attention call ("gqa", "mla", ...) with an attention backend."""
        by_backend: Mapping[str, int] = self.policy["attention_kernels"].get(backend or "", {})
        return by_backend.get(kind, self.launches(f"attention_{kind}"))

    def captured_batches(
        self,
        max_batch: int | None,
        speculative: bool,
        gpu_memory_gb: float,
        tp: int,
        *,
        rows: int = 1,
        explicit: Sequence[int] | None = None,
        max_running: int | None = None,
    ) -> tuple[int, ...]:
        """Batch sizes (sequences) with a CUDA graph, ascending.

        `max_batch`: the largest as the user asked for it (SGLang: sequences, --cuda-graph-max-bs; vLLM: tokens,
        max_cudagraph_capture_size); None: the engine's default. `explicit`: the user's own list, in the same unit.
        `rows`: tokens a sequence has in the pass (draft tokens for a verify). `max_running`: the user's limit of
        running sequences. `gpu_memory_gb` is decimal. Raises InputError when no size is positive.
        """
        sizes = None if explicit is None else tuple(explicit)
        return _captured(self, max_batch, speculative, gpu_memory_gb, tp, rows, sizes, max_running)

    def _captured_batches(
        self,
        max_batch: int | None,
        speculative: bool,
        gpu_memory_gb: float,
        tp: int,
        rows: int,
        explicit: tuple[int, ...] | None,
        max_running: int | None,
    ) -> tuple[int, ...]:
        if any(size < 1 for size in [*(explicit or ()), *([] if max_batch is None else [max_batch]), rows]):
            raise InputError("must be positive", where="captured batch sizes", mend="give sizes of 1 or more")
        if max_batch is not None and max_batch > MOST_CAPTURED:
            mend = f"give up to {MOST_CAPTURED:,}"
            raise InputError(f"{max_batch:,} is out of range", where="captured batch sizes", mend=mend)
        mib = gpu_memory_gb * 1e9 / 2**20
        running = max_running or (self.running_cap_speculative if speculative else None)
        if self.name == "vllm":
            return self._captured_tokens(max_batch, mib, rows, explicit, max_running)
        if explicit:
            sizes = set(explicit)
        else:
            largest = max_batch or self._largest_default(mib, tp)
            steps = self.policy["graphs"]["speculative" if speculative else "plain"]
            sizes = _expand(steps, largest) | {largest}
        if running is not None and max(sizes) > running:
            sizes = {size for size in sizes if size <= running} | {running}
        return tuple(sorted(sizes))

    def _largest_default(self, mib: float, tp: int) -> int:
        tiers = self.policy["graphs"]["max_batch"]
        tier = next(t for t in tiers if mib < t.get("below_mib", np.inf))
        return int(tier["small_tp" if tp < 4 else "large_tp"])

    def prefill_graphs(self, options: Mapping[str, Any], *, latent: bool, chunk: int) -> tuple[int, ...]:
        """Numbers of prompt tokens that prefills have a graph for, ascending; none where they run eagerly.

        options: `prefill_graphs` (True: asked for whatever the default; False: off), `prefill_graph_tokens` (the largest),
        `prefill_graph_sizes` (a list instead), `disable_cuda_graph`, `moe_a2a_backend`, `dp_attention`, and the limits
        `max_total_tokens` and `context_length`. latent: whether the model has latent attention. chunk: tokens of a prefill
        step at most; 0 where prompts are not cut, whose graphs would have no largest. Raises InputError for sizes that no graph has.
        """
        graphs = self.policy["graphs"]
        if "prefill" not in graphs:
            return ()
        asked = options.get("prefill_graphs")
        if asked is None:
            grouped = bool(options.get("dp_attention")) or str(options.get("moe_a2a_backend") or "none") != "none"
            asked = not (options.get("disable_cuda_graph") or grouped or (latent and not graphs["prefill"]["latent"]))
        if not asked:
            return ()
        largest, sizes = options.get("prefill_graph_tokens"), options.get("prefill_graph_sizes")
        if not all(isinstance(n, int) and 1 <= n <= MOST_CAPTURED for n in (largest or 1, *(sizes or ()))):
            mend = f"give whole numbers from 1 to {MOST_CAPTURED:,}"
            raise InputError(f"{largest or sizes} is out of range", where="prompt tokens of graphs", mend=mend)
        if sizes:
            return tuple(sorted(set(sizes)))
        limits = [MOST_CAPTURED, options.get("context_length")]
        if not largest:
            largest = graphs["prefill_latent_tokens"] if latent else chunk
            limits.append(options.get("max_total_tokens"))
        return tuple(sorted(_expand(graphs["prefill_tokens"], min(largest, *(int(n) for n in limits if n)))))

    def padded_prefill(
        self, tokens: NDArray[np.float64], captured: Sequence[int], *, on_average: bool = False
    ) -> NDArray[np.float64]:
        """Rows that the graph of a prefill of so many tokens runs; 0 where it has none and runs eagerly. on_average: of any
        number of tokens between the captured ones on either side, half of what lies between them is added."""
        if not len(captured):
            return np.zeros_like(tokens)
        rows = self.padded_batch(np.ceil(tokens), captured).astype(float)
        fits = (tokens <= max(captured)) & (rows <= self.policy["graphs"]["prefill_padding"] * tokens)
        if on_average:
            sizes = np.concatenate([[0], _ascending(tuple(captured))])
            gap = rows - sizes[np.maximum(np.searchsorted(sizes, rows) - 1, 0)]
            rows = np.minimum(tokens + (gap - 1) / 2, max(captured))
        return np.where(fits, rows, 0.0)

    def _captured_tokens(
        self, max_tokens: int | None, mib: float, rows: int, explicit: Sequence[int] | None, max_seqs: int | None
    ) -> tuple[int, ...]:
        """vLLM captures numbers of tokens; with several rows a sequence it rounds them up to multiples of the rows."""
        graphs = self.policy["graphs"]
        default = graphs["max_num_seqs"]
        seqs = max_seqs or default["large" if mib >= default["large_from_mib"] else "small"]
        largest = max_tokens or (max(explicit) if explicit else min(seqs * rows * 2, graphs["max_tokens"]))
        sizes = set(explicit) if explicit else _expand(graphs["sizes"], largest)
        batches = {-(-size // rows) for size in sizes if -(-size // rows) * rows <= largest}
        return tuple(sorted(batch for batch in batches if batch <= seqs))

    def padded_batch(self, batch: ArrayLike, captured: Sequence[int]) -> NDArray[np.int64]:
        """The batch that a graph really runs: the next captured size; above the largest one, eager and unpadded."""
        wanted = np.asarray(batch, dtype=np.int64)
        if not len(captured):
            return np.array(wanted)
        sizes = _ascending(tuple(captured))
        next_up: NDArray[np.int64] = sizes.take(sizes.searchsorted(wanted), mode="clip")
        return np.maximum(next_up, wanted)  # above the largest there is no next one

    def tree_block(self, backend: str) -> int:
        """Tokens in a block of the second call that a backend makes to attend to a tree; 0: it makes one call."""
        found: int = self.policy.get("tree_block", {}).get(backend, 0)
        return found

    @property
    def split_products(self) -> Mapping[str, Any]:
        """Products whose kernels split the inner width among threads, by projection: up to how many `rows`, `outputs` wide."""
        found: Mapping[str, Any] = self.policy.get("split_products", {})
        return found

    def block_products(self, options: Mapping[str, Any], compute_capability: str | None) -> str:
        """The kernels that multiply fp8 weights scaled in blocks ("deepgemm", "triton", or another that was asked for by its
        name); "" where the description does not say.

        options: `fp8_gemm_backend` and `env`. An unknown compute capability is taken for a Hopper's.
        """
        rules: Mapping[str, Any] = self.policy.get("block_products", {})
        if not rules:
            return ""
        flag = str(options.get("fp8_gemm_backend") or "auto").replace("_", "-")
        asked = None if flag == "auto" else rules["by_flag"].get(flag, flag)
        found = str(asked or _of_gpu(rules["by_gpu"], compute_capability))
        return str(rules["by_gpu"]["other"]) if found == "deepgemm" and not self._deepgemm(options) else found

    def expert_kernels(self, options: Mapping[str, Any], compute_capability: str | None, format: str) -> str:
        """The kernels that run routed experts of a format, where they are not those that the class "moe_..." is of: "deepgemm",
        or another that was asked for by its name; else "".

        options: `moe_runner_backend`, `moe_a2a_backend` and `env`. An unknown compute capability is taken for a Hopper's.
        """
        rules: Mapping[str, Any] = self.policy.get("expert_kernels", {})
        if not rules:
            return ""
        flag = str(options.get("moe_runner_backend") or "auto").replace("_", "-")
        if flag == "auto":
            exchanged = str(options.get("moe_a2a_backend")) in rules["deepgemm_exchanges"] and format == "fp8"
            here = _of_gpu(self.policy["block_products"]["by_gpu"], compute_capability) == "deepgemm"
            return "deepgemm" if exchanged and here and self._deepgemm(options) else ""
        found: str = rules["by_flag"].get(flag, flag)
        return "" if found in rules["usual"].get(format, ()) else found

    def around_experts(self, compute_capability: str | None, format: str) -> str:
        """The usual kernels of a format, by name, where what runs around them is no part of the class "moe_..."; else ""."""
        rules: Mapping[str, Any] = self.policy.get("expert_kernels", {}).get("products_alone", {})
        return str(_of_gpu({"other": "", **rules.get(format, {})}, compute_capability))

    def _deepgemm(self, options: Mapping[str, Any]) -> bool:
        """Whether no variable turns DeepGEMM off."""
        variable = (options.get("env") or {}).get(self.policy["block_products"]["deepgemm_variable"])
        return variable is None or _on(variable)

    def default_attention_backend(self, kind: str, compute_capability: str | None, topk: int = 1) -> str:
        """The attention backend that the engine picks for "mla" or "gqa" when no flag says it.

        `compute_capability` "9.0" is Hopper, which also stands in for an unknown one; "12.0" an RTX PRO 6000.
        """
        major = (compute_capability or "9").split(".")[0]
        tree = "_tree" if topk > 1 and kind != "mla" else ""
        by_gpu: Mapping[str, str] = self.policy["attention_defaults"][("mla" if kind == "mla" else "gqa") + tree]
        return by_gpu.get(major, by_gpu["other"])

    def graph_phases(
        self,
        method: str,
        *,
        attention_backend: str | None = None,
        draft_attention_backend: str | None = None,
        disable_cuda_graph: bool = False,
        eager: Collection[str] = frozenset(),
        compute_capability: str | None = None,
    ) -> dict[str, bool]:
        """Which phases run in a CUDA graph (for batches that were captured). A phase that `method` lacks is False.

        `attention_backend` is the one that serves the draft extend unless `draft_attention_backend` is given.
        `eager`: phases forced out of graphs. Raises InputError for an unknown method or phase.
        """
        if method not in METHODS:
            raise InputError(f"unknown drafting method {method!r}", mend=did_you_mean(method, METHODS))
        for phase in eager:
            if phase not in PHASES:
                raise InputError(f"unknown phase {phase!r}", where="eager", mend=did_you_mean(phase, PHASES))
        drafts = method not in ("ngram", "none")
        present = {"decode": True, "draft": drafts, "verify": method != "none", "extend": drafts}
        if self.name == "sglang":
            backend = draft_attention_backend or attention_backend
            backend = backend or self.default_attention_backend("gqa", compute_capability)
            present["extend"] &= backend in self.policy["graphs"]["extend_backends"]
        return {phase: on and not disable_cuda_graph and phase not in eager for phase, on in present.items()}

    def switches(self, method: str, dp_attention: bool) -> bool:
        """Whether the draft length of a chain may follow the batch while the server runs."""
        rules = self.policy["by_batch"]
        return method in rules["methods"] and (rules["dp_attention"] or not dp_attention)

    def allreduce_limits(
        self, *, ranks: int, link: str, graph: bool, options: Mapping[str, Any] | None = None
    ) -> tuple[tuple[str, int], ...]:
        """Implementations in the order that the engine tries them, each with the largest message in bytes it takes.

        Used: the first whose limit the message does not exceed; the last has none. `options`, all optional, are
        `ALLREDUCE_OPTIONS` and env (environment variables by name). p2p: two PCIe GPUs reach each other;
        compute_capability: as "9.0"; flashinfer_allreduce_fusion: None where the engine decides by architecture, which is
        that of the target as its config.json names it; row_bytes: of one row, for limits in rows.
        """
        options = options or {}
        env: Mapping[str, str] = options.get("env") or {}
        asked = tuple((name, options[name]) for name in ALLREDUCE_OPTIONS if name in options)
        return _limits(self, ranks, link, graph, asked, tuple(env.items()))

    def _allreduce_limits(
        self, ranks: int, link: str, graph: bool, options: Mapping[str, Any], env: Mapping[str, str]
    ) -> tuple[tuple[str, int], ...]:
        capability = str(options.get("compute_capability") or "")
        one_node = int(options.get("nodes") or 1) == 1
        found: list[tuple[str, int]] = []
        if ranks > 1:
            custom = one_node and not options.get("disable_custom_all_reduce")
            choose = self._sglang_allreduce if self.name == "sglang" else self._vllm_allreduce
            found = choose(ranks, link, graph, custom, capability, options, env)
        protocol = env.get("NCCL_PROTO", "").lower()
        if re.fullmatch(r"ll|ll128|simple", protocol):
            found.append((f"nccl-{protocol}", NO_LIMIT))
        if _on(env.get("NCCL_P2P_DISABLE")):  # NCCL then goes through host memory
            found.append(("nccl-no-p2p", NO_LIMIT))
        return (*found, ("nccl", NO_LIMIT))

    def _sglang_allreduce(
        self,
        ranks: int,
        link: str,
        graph: bool,
        custom: bool,
        capability: str,
        options: Mapping[str, Any],
        env: Mapping[str, str],
    ) -> list[tuple[str, int]]:
        rules = self.policy["allreduce"]
        major = capability.split(".")[0]
        found: list[tuple[str, int]] = []
        row_bytes = int(options.get("row_bytes") or 0)
        if self._fuses(link, major, options):
            limit = rules["fusion_max_rows"] * row_bytes or NO_LIMIT
            found += [(name, limit) for name in rules["fusion_kernels"]]
        if custom and link == "nvlink" and ranks in rules["v2_ranks"] and self._v2(env):
            table = rules["oneshot_kib"].get(major, rules["oneshot_kib"]["other"])
            found.append(("oneshot", table[ranks][0 if graph else 1] * 1024))
            found.append(("custom", rules["v2_max_bytes"]))
        elif custom and ranks in rules["ranks"] and (link == "nvlink" or (ranks == 2 and options.get("p2p", True))):
            found += [(name, rules["legacy_max_bytes"]) for name in OLDER_CUSTOM]
        staged = rules["pcie_ipc"] and _on(env.get("SGLANG_ENABLE_PCIE_IPC_ALLREDUCE"))
        if staged and graph and ranks in rules["pcie_ipc_ranks"]:  # it serves passes up to the widest captured one
            found.append(("pcie-ipc", NO_LIMIT))
        return found

    def _fuses(self, link: str, major: str, options: Mapping[str, Any]) -> bool:
        """Whether SGLang sums and normalises in one FlashInfer kernel: by flag, or by itself for some architectures."""
        rules = self.policy["allreduce"]
        if major not in rules["fusion_capabilities"] or options.get("dp_attention"):
            return False
        told = options.get("flashinfer_allreduce_fusion")
        if told is not None:
            return bool(told)
        one_node = int(options.get("nodes") or 1) == 1 or major in rules["fusion_nodes_capabilities"]
        spread = str(options.get("moe_a2a_backend") or "none") != "none"  # experts exchange rows instead of sums
        return (
            link == "nvlink"
            and one_node
            and not spread
            and options.get("architecture") in rules["fusion_architectures"]
        )

    def _v2(self, env: Mapping[str, str]) -> bool:
        said = env.get("SGLANG_OPT_USE_CUSTOM_ALL_REDUCE_V2", env.get("SGLANG_USE_JIT_ALL_REDUCE"))
        return bool(self.policy["allreduce"]["v2_default"]) if said is None else _on(said)

    def _vllm_allreduce(
        self,
        ranks: int,
        link: str,
        graph: bool,
        custom: bool,
        capability: str,
        options: Mapping[str, Any],
        env: Mapping[str, str],
    ) -> list[tuple[str, int]]:
        rules = self.policy["allreduce"]
        mesh = link == "nvlink"
        symmetric = rules["symmetric_kib"].get(capability, {}) if mesh and custom else {}
        symmetric = symmetric if _on(env.get("VLLM_ALLREDUCE_USE_SYMM_MEM", "1")) else {}
        found: list[tuple[str, int]] = []
        if custom and ranks in rules["ranks"] and (mesh or (ranks == 2 and options.get("p2p", True))):
            limit = rules["legacy_max_bytes"]
            if symmetric:
                limit = min(limit, rules["custom_kib"].get(capability, {}).get(ranks, NO_LIMIT) * 1024)
            found += [(name, limit - 1) for name in OLDER_CUSTOM]  # vLLM takes messages strictly smaller
        if ranks in symmetric:
            found.append(("symm-mem", symmetric[ranks] * 1024 - 1))
        return found


@lru_cache(maxsize=256)
def _limits(
    engine: Engine,
    ranks: int,
    link: str,
    graph: bool,
    asked: tuple[tuple[str, Any], ...],
    env: tuple[tuple[str, str], ...],
) -> tuple[tuple[str, int], ...]:
    return engine._allreduce_limits(ranks, link, graph, dict(asked), dict(env))


@lru_cache(maxsize=64)
def _captured(engine: Engine, *settings: Any) -> tuple[int, ...]:
    return engine._captured_batches(*settings)


@lru_cache(maxsize=64)
def _ascending(sizes: tuple[int, ...]) -> NDArray[np.int64]:
    return np.sort(np.asarray(sizes, dtype=np.int64))


def _expand(steps: Sequence[Sequence[int | None]], largest: int) -> set[int]:
    """The sizes of runs [first, last or None, step], up to `largest`."""
    sizes: set[int] = set()
    for first, last, step in steps:
        assert first is not None
        assert step is not None
        stop = largest if last is None else min(last, largest)
        sizes.update(range(first, stop + 1, step))
    return sizes


def _of_gpu(by_gpu: Mapping[str, str], compute_capability: str | None) -> str:
    """What a rule says of a GPU; "9.0" stands in for an unknown capability."""
    return by_gpu.get((compute_capability or "9").split(".")[0], by_gpu["other"])


def _on(text: str | None) -> bool:
    return (text or "").strip().lower() in ("1", "true", "yes", "y", "on", "t")


def _release(version: str) -> tuple[int, ...]:
    """ "v0.5.16.post1" to (0, 5, 16)."""
    match = re.match(r"v?(\d+)\.(\d+)(?:\.(\d+))?", version.strip())
    return tuple(int(part or 0) for part in match.groups()) if match else ()


def _of_release(value: Any, release: tuple[int, ...]) -> Any:
    """`value` with each list of {since, value} replaced by the value that held in `release`."""
    if isinstance(value, dict):
        return MappingProxyType({key: _of_release(item, release) for key, item in value.items()})
    if isinstance(value, list) and value and isinstance(value[0], dict) and "since" in value[0]:
        held = [item["value"] for item in value if _release(str(item["since"])) <= release]
        return _of_release(held[-1], release)
    if isinstance(value, list):
        return tuple(_of_release(item, release) for item in value)
    return value


@cache
def _description(name: str) -> dict[str, Any]:
    described: dict[str, Any] = read_yaml(Path(__file__).parent / "data" / f"{name}.yaml", "engine description")
    return described


@cache
def read_flags(name: str) -> Mapping[str, str]:
    """Every flag of the engine's command line: "switch" (no value), "value", "optional" (one or none) or "list"."""
    kinds = {"switches": "switch", "lists": "list", "optional": "optional", "values": "value"}
    described = _description(name)["flags"]
    return MappingProxyType({flag: kind for key, kind in kinds.items() for flag in described.get(key, ())})


def command_line(name: str) -> Mapping[str, Any]:
    """How the engine's flags become options: `aliases` (flag to flag) and `options` (by kind, option to flag)."""
    described: Mapping[str, Any] = _description(name)["command_line"]
    return described


def running_flag(engine: str) -> str:
    """The flag of an engine's launch line that limits the requests it runs at once."""
    return str(command_line(engine)["options"]["whole"]["max_running_requests"])


def _term(before: Mapping[str, Any] | None = None, **term: Any) -> Term:
    return Term(**term, before=None if before is None else Term(**before))


@lru_cache(maxsize=64)
def load_engine(name: str, version: str | None = None) -> Engine:
    """The description of a release; without a version, of the one that was measured.

    Raises InputError for an unknown engine (with the nearest known) or a release outside the described range.
    """
    if name not in ENGINES:
        raise InputError(f"unknown engine {name!r}", where="--engine", mend=did_you_mean(name, ENGINES))
    data = _description(name)
    wanted = data["default"] if version is None else version
    release, first, last = _release(wanted), _release(data["first"]), _release(data["last"])
    if not first <= release <= last:
        mend = f"described: {data['first']} to {data['last']} (default {data['default']})"
        raise InputError(f"no description of {name} {wanted!r}", where="engine version", mend=mend)
    held = _of_release({key: value for key, value in data.items() if key not in ("flags", "command_line")}, release)
    return Engine(
        name=name,
        version=".".join(map(str, release)),
        kernels=held["kernels"],
        kernel_counts=held["kernel_counts"],
        shared_experts_overlap=held["shared_experts_overlap"],
        running_cap_speculative=held["running_cap_speculative"],
        terms=MappingProxyType({key: _term(**term) for key, term in held["terms"].items()}),
        fitted_to=tuple(held.get("fitted_to", ())),
        policy=MappingProxyType(
            {key: held[key] for key in ("attention_kernels", "attention_defaults", "graphs", "allreduce", "by_batch")}
            | {
                key: held[key]
                for key in ("tree_block", "ngram_tree", "block_products", "expert_kernels", "split_products")
                if key in held
            }
        ),
    )
