"""All-reduce over every number of ranks, by message size.

What: seconds of one sum over ranks of a bf16 buffer. `graph`: in a CUDA graph between small kernels, as in a model's
layer, so that what ranks wait for each other is in it (the same chain without the all-reduce is subtracted);
`alone`: in a graph back to back; `eager`: called from Python. Against: bytes of one rank's buffer (a bus bandwidth is
bytes / seconds x 2 (n - 1) / n). Units: seconds, bytes. The sum is checked value by value before it is timed.

The implementation is what the worker's environment makes of NCCL (`nccl`, `nccl-ll`, ...: see VARIANTS), or an engine's
own kernel (`custom`, `custom-v1`, `flashinfer`: see engine_allreduce). No symmetric memory, no multicast.
"""

from __future__ import annotations

from typing import Any

from specsim.calibration.context import Call, Case, Context, Measurement
from specsim.calibration.engine_allreduce import COMPILE_S, ENGINES, LIMITS, Kernel, build
from specsim.calibration.engine_allreduce import RANKS as ENGINE_RANKS
from specsim.calibration.timing import Chain, eager, in_graph

NAME = "allreduce"
WHAT = "all-reduce for 2 up to all ranks: in a graph between small kernels, alone, and eager"
AGAINST = "bytes of one rank's buffer; the sum is checked first"
UNITS = "seconds a call"
NEEDS = "two ranks and more"
RANKS = "groups"

KB = 1024
# 14 KB is a row of 7,168 bf16 values: 28, 42, 56 and 84 KB are 2, 3, 4 and 6 of them
FULL_SIZES = tuple(
    KB * s
    for s in (4, 8, 14, 16, 24, 28, 32, 42, 48, 56, 64, 84, 96, 128, 192, 256, 384, 512, 1024, 2048, 4096, 16384, 65536)
)
QUICK_SIZES = tuple(KB * s for s in (4, 8, 16, 32, 48, 64, 128, 256, 512, 1024, 4096))
FORCED_SIZES = tuple(KB * s for s in (4, 16, 32, 64, 128, 256, 512, 1024, 4096))
EAGER_SIZES = tuple(KB * s for s in (16, 64, 1024))  # of a forced kind
CPU_SIZES = tuple(KB * s for s in (4, 16, 64, 256))

# implementation -> environment that makes NCCL use it; each runs in worker processes of its own
VARIANTS: dict[str, dict[str, str]] = {
    "nccl": {},
    "nccl-ll": {"NCCL_PROTO": "LL"},
    "nccl-ll128": {"NCCL_PROTO": "LL128"},
    "nccl-simple": {"NCCL_PROTO": "Simple"},
    "nccl-ring": {"NCCL_ALGO": "Ring"},
    "nccl-tree": {"NCCL_ALGO": "Tree"},
    "nccl-no-p2p": {"NCCL_P2P_DISABLE": "1"},
    **ENGINES,
}
CLASSES = tuple(VARIANTS)


def cases(context: Context) -> list[Case]:
    """Every number of ranks in graphs; alone and eager for those that models are cut over. A forced kind, which is there
    to explain the default one, has fewer sizes."""
    if context.world < 2:
        return []
    name = str(context.options.get("implementation", "nccl"))
    forced = name != "nccl" and name not in ENGINES
    usual = sorted({n for n in (2, 4, 8) if n < context.world} | {context.world}, reverse=True)
    every = usual if forced or context.quick else list(range(context.world, 1, -1))
    sizes = QUICK_SIZES if context.quick else FORCED_SIZES if forced else FULL_SIZES
    if not context.gpu:
        sizes = CPU_SIZES[:: 2 if context.quick else 1]
    if name in ENGINES:
        sizes = tuple(s for s in sizes if s <= LIMITS[name])
    few = tuple(s for s in sizes if s in EAGER_SIZES)
    plan = [("graph", every, sizes)]
    plan += [(mode, usual[:1] if forced else usual, few if forced else sizes) for mode in ("alone", "eager")]
    allowed = ENGINE_RANKS.get(name)
    return [
        _case(context, name, n, mode, nbytes)
        for mode, counts, some in plan
        for n in counts
        for nbytes in some
        if allowed is None or n in allowed
    ]


def _case(context: Context, implementation: str, ranks: int, mode: str, nbytes: int) -> Case:
    params = {"ranks": ranks, "mode": mode, "bytes": nbytes}
    estimate = (0.6 if mode == "eager" else 0.15) * (1.0 if context.gpu and not context.quick else 0.4)
    return Case(NAME, implementation, params, bytes=nbytes, ranks=ranks, estimate_s=estimate)


def compile_s(case: Case) -> float:
    """Seconds that compiling at the first use of a case's kernel may take; 0 where nothing is compiled."""
    return COMPILE_S if case.operator in ENGINES else 0.0


def prepare(context: Context, case: Case) -> None:
    """Compile the kernel of a case by using it once. Raises RuntimeError where it cannot run."""
    _, control = groups(context, case.ranks)
    _engine(context, case.operator, case.ranks, control).reduce(_kept(context, case.operator, 4 * KB))
    context.synchronize()


def run(context: Context, case: Case) -> Measurement:
    import torch

    n, mode, nbytes = case.params["ranks"], case.params["mode"], case.params["bytes"]
    group, control = groups(context, n)
    kernel: Kernel | None = None
    if case.operator in ENGINES:
        kernel = _engine(context, case.operator, n, control)
        x = _kept(context, case.operator, nbytes)
    else:
        x = torch.empty(nbytes // 2, device=context.device, dtype=torch.bfloat16)

    def reduce() -> Any:
        if kernel is not None:
            return kernel.reduce(x)
        import torch.distributed as dist

        dist.all_reduce(x, group=group)
        return x

    capture = kernel.capture if kernel is not None and context.gpu and mode != "eager" else None
    _check(context, n, x, reduce)
    if mode != "eager" and context.gpu:
        _check_graph(context, n, x, reduce, control, capture)
    calls = 2 if not context.gpu else 16 if nbytes <= 2**20 else 4
    if mode == "eager":
        measured = eager(context, [reduce] * (calls * 4 if context.gpu else calls), group=control)
    elif mode == "alone":
        measured = in_graph(context, [reduce] * calls, group=control, capture=capture)
    else:
        y = torch.ones(4096, device=context.device, dtype=torch.bfloat16)

        def between() -> None:
            for _ in range(3):
                y.mul_(1.0)

        def both() -> None:
            between()
            reduce()

        base: list[Call] = [between] * calls
        measured = in_graph(context, [both] * calls, group=control, capture=capture, base=base)
    slowest = context.agree(sorted(measured.seconds)[len(measured.seconds) // 2], control)
    extras = {**measured.extras, "slowest_rank_s": slowest} | ({"kernel": kernel.name} if kernel else {})
    return Measurement(measured.seconds, measured.calls, measured.narrow, extras)


def groups(context: Context, n: int) -> tuple[Any, str]:
    """The group of ranks 0 to n - 1 that carries the data, and the name of its gloo twin for decisions.

    Made by every rank, once: ranks outside take part in the making alone.
    """
    import torch.distributed as dist

    control = f"control-{n}"
    if control not in context.cache:
        ranks = list(range(n))
        context.cache[f"data-{n}"] = dist.new_group(ranks, backend="nccl" if context.gpu else "gloo")
        context.cache[control] = dist.new_group(ranks, backend="gloo")
    return context.cache[f"data-{n}"], control


def _check(context: Context, n: int, x: Any, reduce: Call, how: str = "") -> None:
    """Sums of small integers, exact in bf16 (up to 256): rank r holds (r + 1) x (i mod 7), fewer values for many ranks."""
    import torch

    few = n <= 8
    weights = [r + 1 if few else 1 + r % 2 for r in range(n)]
    pattern = (torch.arange(x.numel(), device=context.device, dtype=torch.int32) % (7 if few else 2)).to(x.dtype)
    for attempt in range(3):
        x.copy_(pattern * weights[context.rank])
        result: Any = reduce()
        context.synchronize()
        if result is None:
            raise RuntimeError("the engine's kernel declined this size or link")
        wrong = int((result != pattern * sum(weights)).sum())
        if wrong:
            raise RuntimeError(f"WRONG DATA{how}: {wrong} of {x.numel()} values over {n} ranks, attempt {attempt + 1}")
    x.copy_(pattern * 0.01)


def _check_graph(context: Context, n: int, x: Any, reduce: Call, control: str, capture: Any) -> None:
    """The same for a call captured in a graph: kernels find their peers' buffers in another way there."""
    result: list[Any] = []

    def once() -> None:
        result[:] = [reduce()]

    chain = Chain(context, [once], control, capture)

    def replay() -> Any:
        chain.run()
        return result[0]

    _check(context, n, x, replay, " in a graph")


def _kept(context: Context, name: str, nbytes: int) -> Any:
    """A buffer that is never freed: other ranks keep the memory that a graph was captured with mapped."""
    import torch

    if "engine-buffer" not in context.cache:
        context.cache["engine-buffer"] = torch.empty(LIMITS[name] // 2, device=context.device, dtype=torch.bfloat16)
    return context.cache["engine-buffer"][: nbytes // 2]


def _engine(context: Context, name: str, n: int, control: str) -> Kernel:
    """The engine's kernel for n ranks, built once. What kept it from being built is told again for every size."""
    key = f"{name}-{n}"
    if key not in context.cache:
        try:
            context.cache[key] = build(name, context.cache[control], context.device)
        except Exception as error:  # any failure of a foreign package means: not usable
            named = RuntimeError(f"{type(error).__name__}: {error}")
            context.cache[key] = error if isinstance(error, RuntimeError) else named
    found = context.cache[key]
    if isinstance(found, RuntimeError):
        raise found
    return found  # type: ignore[no-any-return]
