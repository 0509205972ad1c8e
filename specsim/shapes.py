"""What one rank of a model runs, as shapes for a calibration to time: its benchmarks know nothing of models."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from specsim.forward import slice_of
from specsim.models import Model, Projection


def shapes(models: Iterable[Model], tp: int) -> dict[str, Any]:
    """What one of `tp` ranks of models runs: experts, attention, widths and dense projections, each shape once. A list is empty where
    the models have none of a kind."""
    found: dict[str, Any] = {"hidden": [], "experts": [], "attention": [], "gemm": []}

    def once(key: str, value: Any) -> None:
        if value not in found[key]:
            found[key].append(value)

    def projections(ranks: int, *some: Projection | None) -> None:
        for p in some:
            if p is not None:
                inputs, outputs = slice_of(p, ranks)
                once("gemm", [int(outputs), int(inputs)])

    for model in models:
        once("hidden", int(model.hidden))
        projections(tp, model.head)
        if model.draft is not None:
            projections(1, model.draft.fc, *model.draft.token_heads)
    for layer in (layer for model in models for layer, _ in model.layers):
        if layer.experts is not None:
            e = layer.experts
            projections(1, e.router)
            projections(tp, *e.shared)
            inner = max(1, e.intermediate // tp)
            once("experts", {"hidden": e.inputs, "intermediate": inner, "experts": e.count, "top_k": e.per_token})
        a = layer.attention
        if a is not None and a.kind == "mla":
            once(
                "attention",
                {"kind": "mla", "heads": max(1, a.heads // tp), "latent": a.kv_lora_rank, "rope": a.rope_dim},
            )
        elif a is not None and a.kind == "gqa":
            shape = {
                "kind": "gqa",
                "heads": max(1, a.heads // tp),
                "kv_heads": max(1, a.kv_heads // tp),
                "head_dim": a.head_dim,
            }
            once("attention", shape)
        projections(tp, *layer.mixer, *layer.ffn)
    return found
