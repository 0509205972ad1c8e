"""What launching costs, on the host and between the nodes of a graph.

What: `eager_kernel`: seconds of one small kernel launched from Python in a long loop; `eager_collective`: one all-reduce
of 4 KB called from Python; `graph_launch`: seconds by the host's clock from the launch of a one-node graph on an idle GPU
to its end; `graph_host`: host seconds to launch a graph, by nodes; `graph_node`: seconds one empty
node adds to a graph. Against: nothing (one kernel that does nothing). Units: seconds.
"""

from __future__ import annotations

import time
from typing import Any

from specsim.calibration.context import Case, Context, Measurement
from specsim.calibration.timing import Chain, eager, in_graph

NAME = "launches"
WHAT = "eager launches and collectives, graph launches, graph nodes"
AGAINST = "a kernel that does nothing"
UNITS = "seconds a launch or node"
RANKS = "one"
CLASSES = ("eager_kernel", "eager_collective", "graph_launch", "graph_host", "graph_node")


def cases(context: Context) -> list[Case]:
    found = [
        Case(NAME, "eager_kernel", {}),
        Case(NAME, "graph_node", {}),
        Case(NAME, "graph_launch", {"nodes": 1}),
        Case(NAME, "eager_collective", {"bytes": 4096}),
    ]
    return found + [Case(NAME, "graph_host", {"nodes": n}) for n in ((64, 512, 2048) if context.gpu else (64,))]


def run(context: Context, case: Case) -> Measurement:
    import torch

    a = torch.ones(256, device=context.device)
    out = torch.empty_like(a)

    def tiny() -> Any:
        return torch.mul(a, a, out=out)

    if case.operator == "eager_kernel":
        return eager(context, [tiny] * (1000 if context.gpu else 100))
    if case.operator == "eager_collective":
        return eager(context, [_collective(torch, context)] * (200 if context.gpu else 50))
    if case.operator == "graph_node":
        return in_graph(context, [_nothing(torch, context)] * 256)
    chain = Chain(context, [tiny] * case.params["nodes"], None, None)
    return Measurement(_host(context, chain, wait=case.operator == "graph_launch"), case.params["nodes"])


def _nothing(torch: Any, context: Context) -> Any:
    if not context.gpu:
        return lambda: None
    from specsim.calibration.kernels import empty_kernel

    x = torch.ones(32, device=context.device)
    return lambda: empty_kernel[(1,)](x, BLOCK=32, num_warps=1)


def _collective(torch: Any, context: Context) -> Any:
    """An all-reduce over one rank: the host's part is that of any other; the GPU has nothing to do."""
    import torch.distributed as dist

    if "alone" not in context.cache:
        context.cache["alone"] = dist.new_group([context.rank], backend="nccl" if context.gpu else "gloo")
    x = torch.ones(2048, device=context.device, dtype=torch.bfloat16)
    return lambda: dist.all_reduce(x, group=context.cache["alone"])


def _host(context: Context, chain: Chain, *, wait: bool) -> list[float]:
    samples = []
    for _ in range(30):
        context.synchronize()
        start = time.perf_counter()
        chain.run()
        if wait:
            context.synchronize()
        samples.append(time.perf_counter() - start)
    context.synchronize()
    return samples[5:]
