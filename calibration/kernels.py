"""Triton kernels of our own, for what torch has no single kernel: norms, routing, grouped experts, split-KV attention.

They are the plain form of what engines run, not tuned to a GPU. Imported only on a GPU.
"""

from __future__ import annotations

# mypy cannot type jitted functions.
# mypy: disable-error-code="misc,untyped-decorator,no-untyped-def,no-untyped-call,type-arg"
import triton
import triton.language as tl


@triton.jit
def empty_kernel(x, BLOCK: tl.constexpr):
    """Nothing but a launch: the load is never true."""
    if tl.program_id(0) > 1000000:
        tl.store(x, 0.0)


@triton.jit
def add_rms_norm(x, residual, weight, out, width, eps, BLOCK: tl.constexpr):
    """residual += x; out = residual / rms(residual) * weight; one program a row."""
    row = tl.program_id(0)
    cols = tl.arange(0, BLOCK)
    inside = cols < width
    a = tl.load(x + row * width + cols, mask=inside, other=0.0).to(tl.float32)
    b = tl.load(residual + row * width + cols, mask=inside, other=0.0).to(tl.float32)
    s = a + b
    tl.store(residual + row * width + cols, s, mask=inside)
    scale = 1.0 / tl.sqrt(tl.sum(s * s, axis=0) / width + eps)
    w = tl.load(weight + cols, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + row * width + cols, s * scale * w, mask=inside)


@triton.jit
def route(logits, ids, weights, experts, TOP_K: tl.constexpr, BLOCK: tl.constexpr):
    """The TOP_K largest logits of a row and their sigmoid weights; one program a row."""
    row = tl.program_id(0)
    cols = tl.arange(0, BLOCK)
    left = tl.load(logits + row * experts + cols, mask=cols < experts, other=-1.0e30).to(tl.float32)
    for i in tl.static_range(TOP_K):
        best = tl.max(left, axis=0)
        at = tl.argmax(left, axis=0)
        tl.store(ids + row * TOP_K + i, at)
        tl.store(weights + row * TOP_K + i, 1.0 / (1.0 + tl.exp(-best)))
        left = tl.where(cols == at, -1.0e30, left)


@triton.jit
def align_experts(ids, slots, counts, active, n_active, assignments, most, BLOCK: tl.constexpr):
    """Group assignments (row, choice) by expert: one program an expert lists its own and, if any, enters `active`."""
    e = tl.program_id(0)
    a = tl.arange(0, BLOCK)
    mine = tl.load(ids + a, mask=a < assignments, other=-1) == e
    ones = mine.to(tl.int32)
    position = tl.cumsum(ones, axis=0) - 1
    tl.store(slots + e * most + position, a, mask=mine)
    count = tl.sum(ones, axis=0)
    tl.store(counts + e, count)
    if count > 0:
        at = tl.atomic_add(n_active, 1)
        tl.store(active + at, e)


@triton.jit
def grouped_gemm(
    x, w, out, slots, counts, active, n_active, scale, route_weights, n, k, most,
    TOP_K: tl.constexpr, WEIGHTED: tl.constexpr, SCALED: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """out[assignment] = x[assignment // TOP_K] @ w[expert].T for the experts in `active`; BLOCK_N | n, BLOCK_K | k."""
    slot = tl.program_id(1)
    tile_n = tl.program_id(0)
    tile_m = tl.program_id(2)
    if slot < tl.load(n_active):
        e = tl.load(active + slot)
        count = tl.load(counts + e)
        m = tile_m * BLOCK_M + tl.arange(0, BLOCK_M)
        if tile_m * BLOCK_M < count:
            a = tl.load(slots + e * most + m, mask=m < count, other=0)
            rows = (a // TOP_K).to(tl.int64)
            cols = tile_n * BLOCK_N + tl.arange(0, BLOCK_N)
            ks = tl.arange(0, BLOCK_K)
            left = x + rows[:, None] * k + ks[None, :]
            right = w + e.to(tl.int64) * n * k + cols[None, :].to(tl.int64) * k + ks[:, None]
            total = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
            for _ in range(0, k, BLOCK_K):
                total = tl.dot(tl.load(left), tl.load(right), total)
                left += BLOCK_K
                right += BLOCK_K
            if SCALED:
                total = total * tl.load(scale + e)
            if WEIGHTED:
                total = total * tl.load(route_weights + a, mask=m < count, other=0.0)[:, None]
            tl.store(out + a.to(tl.int64)[:, None] * n + cols[None, :], total, mask=(m < count)[:, None])


@triton.jit
def silu_mul(h, out, width, BLOCK: tl.constexpr):
    """out = silu(h[:, :width]) * h[:, width:]."""
    row = tl.program_id(0).to(tl.int64)
    cols = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = cols < width
    gate = tl.load(h + row * 2 * width + cols, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(h + row * 2 * width + width + cols, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + row * width + cols, gate / (1.0 + tl.exp(-gate)) * up, mask=inside)


@triton.jit
def sum_experts(y, out, n_active, width, TOP_K: tl.constexpr, BLOCK: tl.constexpr):
    """out[row] = sum of the row's TOP_K results; empties `active` for the next call."""
    row = tl.program_id(0).to(tl.int64)
    cols = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = cols < width
    total = tl.zeros((BLOCK,), dtype=tl.float32)
    for i in tl.static_range(TOP_K):
        total += tl.load(y + (row * TOP_K + i) * width + cols, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + row * width + cols, total, mask=inside)
    tl.store(n_active, 0, mask=(row == 0) & (tl.program_id(1) == 0))


@triton.jit
def attend_split(
    q, k, v, part, lse, context, scale, split_tokens, GROUP, QUERIES, KV_HEADS, SPLITS,
    D: tl.constexpr, TAIL: tl.constexpr, DV: tl.constexpr, LATENT: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_T: tl.constexpr,
):  # fmt: skip
    """One split of the cache for all query rows and heads that share it: KV is read once for all of them.

    q [batch, queries, heads, D + TAIL]; k [batch, context, kv_heads, D + TAIL]; v [batch, context, kv_heads, DV], or,
    with LATENT, the first D values of k. part [batch x kv_heads, splits, BLOCK_M, DV], lse [.., BLOCK_M].
    """
    pid = tl.program_id(0)
    split = tl.program_id(1)
    b = pid // KV_HEADS
    h = pid % KV_HEADS
    r = tl.arange(0, BLOCK_M)
    used = r < GROUP * QUERIES
    query = r // GROUP
    head = h * GROUP + r % GROUP
    d = tl.arange(0, D)
    q_at = q + ((b * QUERIES + query) * (KV_HEADS * GROUP) + head) * (D + TAIL)
    q_main = tl.load(q_at[:, None] + d[None, :], mask=used[:, None], other=0.0)
    peak = tl.full((BLOCK_M,), -1.0e30, dtype=tl.float32)
    norm = tl.zeros((BLOCK_M,), dtype=tl.float32)
    total = tl.zeros((BLOCK_M, DV), dtype=tl.float32)
    first = split * split_tokens
    last = tl.minimum(first + split_tokens, context)
    for t0 in range(first, last, BLOCK_T):
        t = t0 + tl.arange(0, BLOCK_T)
        here = t < last
        token = (b * context + t).to(tl.int64) * KV_HEADS + h
        keys = tl.load(k + token[None, :] * (D + TAIL) + d[:, None], mask=here[None, :], other=0.0)
        logits = tl.dot(q_main, keys)
        if TAIL > 0:
            tail = tl.arange(0, TAIL)
            q_tail = tl.load(q_at[:, None] + D + tail[None, :], mask=used[:, None], other=0.0)
            k_tail = tl.load(k + token[None, :] * (D + TAIL) + D + tail[:, None], mask=here[None, :], other=0.0)
            logits += tl.dot(q_tail, k_tail)
        seen = here[None, :] & (t[None, :] <= (context - QUERIES + query)[:, None])
        logits = tl.where(seen, logits * scale, -1.0e30)
        top = tl.maximum(peak, tl.max(logits, axis=1))
        p = tl.where(seen, tl.exp(logits - top[:, None]), 0.0)
        shrink = tl.exp(peak - top)
        if LATENT:
            values = tl.trans(keys)
        else:
            dv = tl.arange(0, DV)
            values = tl.load(v + token[:, None] * DV + dv[None, :], mask=here[:, None], other=0.0)
        total = total * shrink[:, None] + tl.dot(p.to(values.dtype), values)
        norm = norm * shrink + tl.sum(p, axis=1)
        peak = top
    at = (pid * SPLITS + split) * BLOCK_M + r
    dv_all = tl.arange(0, DV)
    safe = tl.where(norm > 0.0, norm, 1.0)
    tl.store(part + at[:, None] * DV + dv_all[None, :], total / safe[:, None], mask=used[:, None])
    tl.store(lse + at, tl.where(norm > 0.0, peak + tl.log(safe), -1.0e30), mask=used)


@triton.jit
def attend_combine(
    part, lse, out, GROUP, QUERIES, KV_HEADS, SPLITS: tl.constexpr, DV: tl.constexpr, BLOCK_M: tl.constexpr,
):  # fmt: skip
    """Weigh the splits of one (sequence, query row, head) by their log-sum-exp."""
    pid = tl.program_id(0)
    r = tl.program_id(1)
    s = tl.arange(0, SPLITS)
    at = (pid * SPLITS + s) * BLOCK_M + r
    weight = tl.load(lse + at)
    weight = tl.exp(weight - tl.max(weight, axis=0))
    weight = weight / tl.sum(weight, axis=0)
    dv = tl.arange(0, DV)
    parts = tl.load(part + at[:, None] * DV + dv[None, :])
    b = pid // KV_HEADS
    head = (pid % KV_HEADS) * GROUP + r % GROUP
    row = (b * QUERIES + r // GROUP) * (KV_HEADS * GROUP) + head
    tl.store(out + row.to(tl.int64) * DV + dv, tl.sum(parts * weight[:, None], axis=0))
