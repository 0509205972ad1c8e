"""Small models and profiles whose costs can be worked out by hand."""

from __future__ import annotations

import signal
from dataclasses import replace
from typing import Any

import numpy as np
from hypothesis import strategies as st

from specsim.engines import Engine, Term, load_engine
from specsim.forward import Parallel
from specsim.models import Attention, DraftShape, Experts, Format, Layer, Model, Projection
from specsim.profiles import AllReduceCurve, Gpu, Launch, OperatorRate, Profile, Source
from specsim.scenarios import Scenario
from specsim.simulation_costs import Costs, Server

FACTORS = ("eager_factor", "eager_experts")  # terms that are no times
SOURCE = Source(kind="assumed", reference="a test", date="2026")
INT4 = Format("int4", 4, 0.5)


def rate(fixed_us: float, bandwidth_gb_s: float, peak_tflops: float = 500.0, spread: float = 0.1) -> OperatorRate:
    return OperatorRate(
        source=SOURCE,
        relative_uncertainty=spread,
        fixed_us=fixed_us,
        bandwidth_gb_s=bandwidth_gb_s,
        peak_tflops=peak_tflops,
    )


def profile(gpus: int = 8, **changes: Any) -> Profile:
    """A box of round numbers: every class 10 us + 1,000 GB/s, all-reduces 20 us up to 16 KiB and 80 us at 64 KiB."""
    names = (
        "gemm_bf16",
        "moe_bf16",
        "moe_int4",
        "attention_gqa",
        "attention_mla",
        "attention_linear",
        "norm",
        "tiny",
        "router",
    )
    curves = [
        AllReduceCurve(source=SOURCE, relative_uncertainty=0.1, implementation="nccl", ranks=n, mode=mode,
                       bytes=[16384, 65536], latency_us=[base, 4 * base])
        for n in (2, 4, 8)
        for mode, base in (("graph", 20.0), ("eager", 50.0))
    ]  # fmt: skip
    values: dict[str, Any] = {
        "name": "round",
        "gpus": gpus,
        "link": "pcie",
        "gpu": Gpu(
            source=SOURCE, relative_uncertainty=0.0, name="test", memory_gb=100, bandwidth_gb_s=1000, bf16_tflops=1000
        ),
        "operators": {name: rate(10, 1000) for name in names},
        "allreduce": curves,
        "launch": Launch(
            source=SOURCE, relative_uncertainty=0.1, kernel_us=5, collective_us=50, graph_us=10, graph_node_us=1
        ),
    }
    return Profile(**{**values, **changes})


def dense(
    layers: int = 4,
    hidden: int = 1024,
    heads: int = 16,
    kv_heads: int = 8,
    head_dim: int = 64,
    window: int | None = None,
) -> Model:
    attention = Attention("gqa", heads, kv_heads, head_dim, window=window)
    kv = 2 * kv_heads * head_dim
    layer = Layer(
        "gqa+dense",
        attention,
        mixer=(
            Projection("qkv", hidden, heads * head_dim + kv, kv_outputs=kv, kv_heads=kv_heads),
            Projection("o", heads * head_dim, hidden, split="row"),
        ),
        ffn=(Projection("gate_up", hidden, 8 * hidden), Projection("down", 4 * hidden, hidden, split="row")),
    )
    return Model("dense", "Test", hidden, 32000, ((layer, layers),), Projection("head", hidden, 32000))


def moe(layers: int = 4, hidden: int = 1024, experts: int = 64, per_token: int = 4) -> Model:
    base = dense(1, hidden).layers[0][0]
    routed = Experts(experts, per_token, hidden, 512, INT4, router=Projection("router", hidden, experts, split="none"))
    layer = Layer("gqa+moe", base.attention, base.mixer, experts=routed)
    return Model("moe", "Test", hidden, 32000, ((layer, layers),), Projection("head", hidden, 32000))


def eagle(target: Model, vocab: int = 8000) -> Model:
    h = target.hidden
    layer = dense(1, h).layers[0][0]
    return Model("eagle", "Test", h, vocab, ((layer, 1),), Projection("head", h, vocab), embedding_parameters=0,
                 draft=DraftShape("eagle3", Projection("fc", 3 * h, h, split="none"), h))  # fmt: skip


def quiet() -> Engine:
    """SGLang without terms of its own: no host time, no skew, eager launches at the bare cost."""
    engine = load_engine("sglang")
    return replace(engine, terms={name: Term(float(name in FACTORS), 0.0, "none") for name in engine.terms})


def scenario(model: Model | None = None, draft: Model | None = None, *, tp: int = 1, d: Any = 3, batch: Any = 1, context: Any = 1000,
             box: Profile | None = None, engine: Engine | None = None, **more: Any) -> Scenario:  # fmt: skip
    target = model or dense()
    drafter = draft or eagle(target)
    tokens = np.asarray(d, dtype=float)
    return Scenario(target, drafter, box or profile(), engine or load_engine("sglang"), Parallel(tp), np.asarray(batch, dtype=float),
                    np.asarray(context, dtype=float), more.pop("method", "eagle3"), tokens, tokens - 1, **more)  # fmt: skip


def random_server(draw: st.DrawFn, costs: Costs, batch: int, survival: tuple[float, ...]) -> Server:
    """A server of either policy with these costs, often short of memory, whose other settings hypothesis draws."""
    return Server(
        costs,
        draw(st.sampled_from(["prefill-first", "mixed"])),
        batch,
        draw(st.integers(1, 300)),
        draw(st.integers(10, 1500)),
        overlap=draw(st.booleans()),
        survival=survival,
        prefix_rate=draw(st.sampled_from([0.0, 0.3, 0.999, 1 - 2**-53])),
        overhead_s=draw(st.sampled_from([0.0, 1e-12, 0.0041, 5.0])),
        chunk_s=draw(st.sampled_from([0.0, 0.0, 1e-12, 0.0003, 0.02])),
    )


def heed_interrupts() -> None:
    """For a child process: take SIGINT as a terminal would send it, also where the tests themselves run in the background,
    whose children ignore it."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)
