"""The server of a scenario as the closed form sees it: its step times, its prefills, and what its memory holds."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import ArrayLike, NDArray

from specsim.errors import InputError
from specsim.machine import Machine
from specsim.preemption import FullMemory
from specsim.riding import Mixing
from specsim.scenarios import Scenario
from specsim.simulation_costs import (
    Ranges,
    acceptance_of,
    base_seconds,
    cache_limits,
    default_chunk,
    lanes,
    lead_seconds,
    longest,
    prefill_seconds,
    rows_of,
    running_limit,
    step_seconds,
)
from specsim.simulation_reference import LEAST_RATIO
from specsim.steady import Requests, Server, scatter

Array = NDArray[np.float64]
WIDTHS = 64  # numbers of rows at which a mixed step is worked out
MOST_RUNNING = 4096  # running requests that are looked at; engines admit fewer in all but name
NODES = 16  # lengths of prompts that are looked at, where they vary


def server_of(
    s: Scenario,
    machine: Machine,
    requests: Requests,
    ranges: Ranges = (),
    *,
    chunk_tokens: int | None = None,
) -> Server:
    """The server of a scenario (its batch and context play no part). Its accept length is the scenario's, 1 without.

    `ranges`: draft lengths by batch, which replace the scenario's. chunk_tokens: of a prefill step, else the engine's.
    Raises InputError when the weights leave no room for the KV cache of
    one request.
    """
    s = longest(s, ranges)
    tokens = float(rows_of(s))
    kv, running = cache_limits(s, running_limit(s))
    chunk = chunk_tokens or default_chunk(s)
    mixed = s.engine.name != "sglang"
    memory = FullMemory(
        kv,
        requests.input_tokens,
        requests.output_tokens,
        requests.context,
        tokens,
        requests.output_cv2,
        requests.whole_cv2,
        requests.input_cv2,
    )
    held = memory.starting if mixed else max(memory.reserved, memory.crowded)
    if mixed:
        running = min(running, max(1, int(chunk / tokens)))
    most = int(min(running, math.ceil(held) if held >= 1 else 0, MOST_RUNNING))
    if most < 1:
        raise InputError(
            f"the KV cache holds {kv:,} tokens, a request of {requests.input_tokens + requests.output_tokens:,.0f} does not fit",
            where=f"{s.profile.name}, TP {s.parallel.tp}",
            mend="raise --tp, or take another --hardware",
        )
    cut = lanes(s, most, ranges)
    step, gained, graphs = np.empty(most), np.ones(most), set()
    for one, batches in cut:
        graphs.add(
            max(one.captured("decode" if one.method == "none" else "verify", rows_of(one), beyond=False), default=0)
        )
        at = batches.astype(np.int64) - 1
        step[at] = step_seconds(one, machine, batches, np.asarray(requests.context))
        if one.accept_length is not None:
            gained[at] = one.accept_length.reshape(-1)[0]
    prompt = max(requests.input_tokens * (1 - requests.prefix_rate), 1.0)
    cached = requests.input_tokens * requests.prefix_rate
    together = np.arange(1.0, max(1, min(int(chunk / prompt), most)) + 1)

    def prefill(tokens: Array, reach: ArrayLike) -> Array:
        return prefill_seconds(s, machine, tokens, np.asarray(reach), on_average=requests.input_cv2 > 0)

    # g prompts are so many tokens with such weights, in so many steps: what they take is the mean of that, not of the mean.
    sizes, weights = _sums(prompt, requests.input_cv2, together)
    steps = np.maximum(np.ceil(sizes / chunk * (1 - 1e-12)), 1.0)
    share = (1 + requests.input_cv2) / (1 + requests.input_cv2 / together)[
        :, None
    ]  # of a row's own prompt: sum x^2 / (sum x)^2 x g
    average = cached + (sizes / together[:, None] * share + 1) / 2  # tokens that a row attends to
    totals = prefill(sizes - (steps - 1) * chunk, average)
    if steps.max() > 1:
        totals = totals + (steps - 1) * prefill(np.full_like(sizes, chunk), average)
    seconds = (weights * totals).sum(axis=1) / together
    if len(together) > 1:  # more wait than fit: the last one is cut, and the step is full
        of_a_row = (weights[-1] * sizes[-1] * average[-1]).sum() / (weights[-1] * sizes[-1]).sum()
        seconds[-1] = float(prefill(np.asarray([float(chunk)]), of_a_row)[0]) * prompt / chunk
    chunks = float((weights * steps)[0].sum())
    a_step = prompt / chunks
    reach = cached + (prompt * (1 + requests.input_cv2) + 1) / 2  # of a row of any prompt: long ones have more
    fill = 0.0 if len(together) > 1 else float(prefill(np.asarray([float(chunk)]), reach)[0])
    alone = float((weights[0] * totals[0] ** 2).sum() / seconds[0] ** 2 - 1)
    spread = None if len(together) > 1 else alone
    mixing = None
    if mixed:
        base, rows = np.zeros(most + 1), np.zeros(most + 1)
        for one, batches in cut:
            at = batches.astype(np.int64)
            base[at] = base_seconds(one, machine, batches)
            rows[at] = batches * rows_of(one)
        widths = np.geomspace(a_step, chunk + rows[-1], WIDTHS)
        mixing = Mixing(base, rows, a_step, widths, prefill(widths, reach).reshape(-1))
    ends = held < running  # memory, before places do
    crowd = min(float(running), memory.fitting) if mixed else memory.crowded
    return Server(
        requests,
        step,
        seconds,
        gained,
        s.parallel.tp,
        chunks=chunks,
        fits=chunk / prompt,
        fill=fill,
        mixing=mixing,
        budget=float(chunk) if mixed else math.inf,
        rows=tokens,
        prompt=prompt,
        late=not mixed and most > 1,  # with one place nobody decodes when it falls free, and that is seen at once
        spread=spread,
        memory=memory if mixed and memory.fitting < running else None,
        graphs=tuple(sorted(graphs - {0})),
        held=held if ends else math.inf,
        crowd=crowd if ends else math.inf,
        lead_s=float((weights[0] * lead_seconds(s, machine, np.minimum(sizes[0], chunk))).sum()),
        uneven=requests.held_cv2(0.0 if mixed else LEAST_RATIO) if ends and requests.whole_cv2 else 0.0,
        scatter=scatter(np.asarray(() if s.acceptance is None else acceptance_of(s))),
    )


def _sums(mean: float, cv2: float, counts: Array) -> tuple[Array, Array]:
    """Sums of `counts` Gamma distributed lengths of that mean and variation, as a few values (n, NODES) with weights: the nodes of
    Gauss-Laguerre, from the recurrence of its polynomials (Golub and Welsch, Math. Comp. 23, 1969)."""
    if not cv2:
        return (counts * mean)[:, None], np.ones((len(counts), 1))
    shape = counts[:, None] / cv2
    i = np.arange(NODES)
    matrix = np.zeros((len(counts), NODES, NODES))
    matrix[:, i, i] = 2 * i + shape
    matrix[:, i[1:], i[:-1]] = np.sqrt(i[1:] * (i[1:] + shape - 1))  # the lower half is what eigh reads
    nodes, vectors = np.linalg.eigh(matrix)
    return nodes * mean * cv2, vectors[:, 0, :] ** 2
