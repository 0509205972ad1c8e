"""Decode attention: one or several query rows a sequence against a cached context.

What: seconds that one call adds after a product in a graph (see between): GQA (kv heads shared by query heads) and MLA
(one latent head for all). FlashAttention-3 from sgl_kernel when importable (paged with page size 1, as SGLang calls it),
else a split-KV Triton kernel of our own.
Against: bytes of the cache, read once a sequence, and flops. Units: seconds, bytes, flops.
The same at 3 and 4 query rows (`queries`) gives what a verify pays a layer for its extra rows: with FlashAttention-3 and GQA
the division into blocks too, which SGLang makes once a pass for one query row and in every layer for several.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from functools import partial
from typing import Any

from specsim.calibration.between import in_place, products
from specsim.calibration.context import Case, Context, Measurement

NAME = "attention"
WHAT = "decode attention, GQA and MLA, 1 and 3 to 4 query rows a sequence"
AGAINST = "cache bytes, read once a sequence; flops"
UNITS = "seconds a call"
RANKS = "one"
CLASSES = ("attention_gqa", "attention_mla")

Points = tuple[tuple[int, int], ...]  # batch, context
POINTS = ((1, 1024), (1, 8192), (1, 32768), (4, 4096), (8, 2048), (32, 1024), (32, 4096))
LARGE_POINTS = tuple((batch, tokens) for tokens in (1024, 4096) for batch in (64, 128, 256))  # at 1 and 4 query rows
QUICK_POINTS = ((1, 1024), (1, 8192), (8, 2048), (32, 4096))
QUICK_LARGE_POINTS = ((128, 1024), (256, 4096))
MOST_MEMORY = 0.4  # of the GPU's, for the caches of one case
CPU_POINTS = ((1, 64), (2, 128), (4, 256))
CPU_SHAPES = {
    "gqa": {"kind": "gqa", "heads": 4, "kv_heads": 2, "head_dim": 32},
    "mla": {"kind": "mla", "heads": 4, "latent": 64, "rope": 16},
}
GQA = {"kind": "gqa", "heads": 32, "kv_heads": 8, "head_dim": 128}
MLA = {"kind": "mla", "heads": 8, "latent": 512, "rope": 64}


def cases(context: Context) -> list[Case]:
    shapes = context.chosen("attention", NAME, (GQA, MLA))
    if not context.gpu:  # small ones of the same kinds
        shapes = [CPU_SHAPES[kind] for kind in dict.fromkeys(shape["kind"] for shape in shapes)]
    points: Points = CPU_POINTS if not context.gpu else QUICK_POINTS if context.quick else POINTS
    large: Points = () if not context.gpu else QUICK_LARGE_POINTS if context.quick else LARGE_POINTS
    found = []
    for shape in shapes:
        for queries in (1, 3, 4):
            found += [_case(shape, b, c, queries) for b, c in points]
        for queries in (1, 4):
            found += [_case(shape, b, c, queries) for b, c in large]
    return [c for c in found if c.bytes * _copies(context, c) <= MOST_MEMORY * context.memory_bytes]


def _copies(context: Context, case: Case) -> int:
    """Caches to rotate through: one, where the L2 keeps next to nothing of it."""
    return 1 if case.bytes > 8 * context.rotation_bytes else context.copies(case.bytes)


def _case(shape: dict[str, Any], batch: int, tokens: int, queries: int) -> Case:
    kind = shape["kind"]
    if kind == "mla":
        values, width = shape["latent"] + shape["rope"], 2 * shape["latent"] + shape["rope"]
    else:
        values, width = shape["kv_heads"] * 2 * shape["head_dim"], 2 * shape["head_dim"]
    params = {"batch": batch, "context": tokens, "queries": queries, **{k: v for k, v in shape.items() if k != "kind"}}
    flops = 2.0 * shape["heads"] * width * batch * queries * tokens
    return Case(NAME, f"attention_{kind}", params, bytes=batch * tokens * values * 2.0, flops=flops, timeout_s=120.0)


def run(context: Context, case: Case) -> Measurement:
    import torch

    torch.manual_seed(case.seed)
    p, kind = case.params, case.operator.removeprefix("attention_")
    inputs = [_inputs(context, kind, p) for _ in range(_copies(context, case))]
    make, extras = _choose(context, kind, p, inputs[0])
    queries = inputs[0][0]
    before = products(context, p["batch"] * p["queries"], queries.shape[2] * queries.shape[3])
    measured = in_place(context, [make(data) for data in inputs], before)
    return Measurement(measured.seconds, measured.calls, measured.narrow, {**measured.extras, **extras})


Inputs = tuple[Any, Any, Any]


def _choose(
    context: Context, kind: str, p: dict[str, Any], data: Inputs
) -> tuple[Callable[[Inputs], Callable[[], Any]], dict[str, str]]:
    """The engine's kernel where it runs and is right on these data, else our own; and what the sample says of it."""
    if not context.gpu:
        return partial(_plain, kind, p), {"kernel": "torch"}
    import torch

    engine, why = _flash(context, kind)
    if engine is not None:
        schedule = _schedule() if kind == "gqa" and p["queries"] == 1 else None
        make = partial(_fa3, engine, schedule, context, kind, p)
        try:
            _check(kind, p, data, make(data)())
            return make, {"kernel": "flash-attention-3" + (", scheduled once a pass" if schedule else "")}
        except torch.cuda.OutOfMemoryError:
            raise
        except Exception as error:  # any failure of a foreign package means: not usable
            why = f"sgl_kernel's flash-attention-3 is not used: {type(error).__name__}: {error}"[:200]
            context.cache[f"flash-{kind}"] = None, why
    own = partial(_own, context, kind, p)
    _check(kind, p, data, own(data)())
    return own, {"kernel": "split-kv"} | ({"trouble": why} if why else {})


def _check(kind: str, p: dict[str, Any], data: Inputs, result: Any) -> None:
    """Compare the first and the last sequence with float32. Raises RuntimeError."""
    out = (result[0] if isinstance(result, tuple) else result).reshape(p["batch"], -1)
    for i in sorted({0, p["batch"] - 1}):
        want = _reference(kind, p, *(None if t is None else t[i : i + 1] for t in data)).reshape(-1)
        error = float((out[i].float() - want).norm() / want.norm())
        if not error < 0.03:
            raise RuntimeError(f"wrong result: relative error {error:.3g} in sequence {i}")


def _inputs(context: Context, kind: str, p: dict[str, Any]) -> Inputs:
    """q [batch, queries, heads, width], k [batch, context, kv_heads, width], v likewise (None for MLA: part of k)."""
    import torch

    dtype = torch.bfloat16 if context.gpu else torch.float32
    heads = 1 if kind == "mla" else p["kv_heads"]
    width = p["latent"] + p["rope"] if kind == "mla" else p["head_dim"]

    def random(*shape: int) -> Any:
        return torch.randn(*shape, device=context.device, dtype=dtype)

    q = random(p["batch"], p["queries"], p["heads"], width)
    k = random(p["batch"], p["context"], heads, width)
    return q, k, None if kind == "mla" else random(p["batch"], p["context"], heads, width)


def _scale(kind: str, p: dict[str, Any]) -> float:
    return float((p["latent"] + p["rope"] if kind == "mla" else p["head_dim"]) ** -0.5)


def _reference(kind: str, p: dict[str, Any], q: Any, k: Any, v: Any) -> Any:
    """Attention in float32; query i of n sees the context but its last n - 1 - i tokens. [batch, queries, heads, dv]"""
    import torch

    k = k.float()
    v = k[..., : p["latent"]] if kind == "mla" else v.float()
    q = q.float().unflatten(2, (k.shape[2], -1))  # heads that share keys and values
    logits = torch.einsum("bqhgd,bthd->bhgqt", q, k) * _scale(kind, p)
    t = torch.arange(p["context"], device=q.device)
    limit = p["context"] - p["queries"] + torch.arange(p["queries"], device=q.device)
    logits = logits.masked_fill(t[None, :] > limit[:, None], float("-inf"))
    return torch.einsum("bhgqt,bthd->bqhgd", logits.softmax(-1), v).flatten(2, 3)


def _plain(kind: str, p: dict[str, Any], data: Inputs) -> Callable[[], Any]:
    return lambda: _reference(kind, p, *data)


def _flash(context: Context, kind: str) -> tuple[Any, str]:
    """sgl_kernel's flash_attn_with_kvcache where it runs (compute capability 8 or 9), else None and what is wrong with it
    ("" where it is simply not there)."""
    key = f"flash-{kind}"
    if key not in context.cache:
        context.cache[key] = None, ""
        if importlib.util.find_spec("sgl_kernel") is not None and _capability(context) in (8, 9):
            try:
                from sgl_kernel.flash_attn import flash_attn_with_kvcache

                context.cache[key] = flash_attn_with_kvcache, ""
            except Exception as error:  # any failure of a foreign package means: not usable
                why = f"sgl_kernel's flash-attention-3 cannot be imported: {type(error).__name__}: {error}"[:200]
                context.cache[key] = None, why
    result: tuple[Any, str] = context.cache[key]
    return result


def _schedule() -> Any:
    """sgl_kernel's function that divides the cache into blocks; None in releases that do so in every call. SGLang calls it once
    a pass where each sequence has one query row, so that it is no part of a layer's attention there."""
    from sgl_kernel import flash_attn

    return getattr(flash_attn, "get_scheduler_metadata", None)


def _capability(context: Context) -> int:
    import torch

    return int(torch.cuda.get_device_capability(context.device)[0])


def _fa3(engine: Any, schedule: Any, context: Context, kind: str, p: dict[str, Any], data: Inputs) -> Callable[[], Any]:
    import torch

    q, k, v = data
    batch, tokens, queries, device = p["batch"], p["context"], p["queries"], context.device
    pages = torch.arange(batch * tokens, device=device, dtype=torch.int32).view(batch, tokens)
    lengths = torch.full((batch,), tokens, device=device, dtype=torch.int32)
    starts = torch.arange(0, (batch + 1) * queries, queries, device=device, dtype=torch.int32)
    common = {
        "page_table": pages, "cache_seqlens": lengths, "cu_seqlens_q": starts, "max_seqlen_q": queries,
        "softmax_scale": _scale(kind, p), "causal": True,
    }  # fmt: skip
    rows = q.view(batch * queries, p["heads"], -1)
    cache = k.view(batch * tokens, 1, k.shape[2], -1)
    if kind == "mla":
        latent = p["latent"]
        nope, rope = rows[..., :latent].contiguous(), rows[..., latent:].contiguous()
        c, r = cache[..., :latent], cache[..., latent:]
        return lambda: engine(q=rope, k_cache=r, v_cache=c, qv=nope, **common)
    values = v.view(batch * tokens, 1, k.shape[2], -1)
    if schedule is not None:
        common["scheduler_metadata"] = schedule(
            batch_size=batch, max_seqlen_q=1, max_seqlen_k=tokens, num_heads=p["heads"], num_heads_k=p["kv_heads"],
            headdim=p["head_dim"], cache_seqlens=lengths, qkv_dtype=q.dtype, cu_seqlens_q=starts, page_size=1, causal=True,
        )  # fmt: skip
    return lambda: engine(q=rows, k_cache=cache, v_cache=values, **common)


def _own(context: Context, kind: str, p: dict[str, Any], data: Inputs) -> Callable[[], Any]:
    import torch
    import triton
    from specsim.calibration import kernels

    q, k, v = data
    latent = kind == "mla"
    kv_heads = k.shape[2]
    group = p["heads"] // kv_heads
    block_m = max(16, triton.next_power_of_2(group * p["queries"]))
    block_t = 32 if latent else 64
    dim, tail = (p["latent"], p["rope"]) if latent else (p["head_dim"], 0)
    processors = torch.cuda.get_device_properties(context.device).multi_processor_count
    wanted = max(1, min(2 * processors // (p["batch"] * kv_heads), p["context"] // block_t, 64))
    splits = 1 << (wanted.bit_length() - 1)
    each = triton.cdiv(triton.cdiv(p["context"], splits), block_t) * block_t
    part = torch.empty(p["batch"] * kv_heads, splits, block_m, dim, device=context.device)
    lse = torch.empty(p["batch"] * kv_heads, splits, block_m, device=context.device)
    out = torch.empty(p["batch"], p["queries"], p["heads"], dim, device=context.device, dtype=q.dtype)
    shape = {
        "GROUP": group,
        "QUERIES": p["queries"],
        "KV_HEADS": kv_heads,
        "SPLITS": splits,
        "DV": dim,
        "BLOCK_M": block_m,
    }

    def call() -> Any:
        kernels.attend_split[(p["batch"] * kv_heads, splits)](
            q, k, k if v is None else v, part, lse, p["context"], _scale(kind, p), each,
            D=dim, TAIL=tail, LATENT=latent, BLOCK_T=block_t, num_warps=8 if latent else 4, num_stages=2, **shape)  # fmt: skip
        kernels.attend_combine[(p["batch"] * kv_heads, group * p["queries"])](part, lse, out, **shape)
        return out

    return call
