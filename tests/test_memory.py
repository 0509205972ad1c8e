"""What a rank's GPU memory holds, by hand."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from builders import dense
from hypothesis import given, settings
from hypothesis import strategies as st

from specsim.configs import list_presets, load_model, load_preset
from specsim.forward import Parallel, attention_core
from specsim.memory import memory, rank_kv, rank_kv_per_token, rank_weights, would_fit
from specsim.models import DraftShape, Format, Projection
from specsim.profiles import load_shipped
from specsim.scenarios import build


def test_a_window_bounds_the_cache() -> None:
    """4 layers x 2 x 8 KV heads x 64 values x 2 bytes = 8,192 bytes a token; a window of 128 keeps 128 tokens."""
    assert rank_kv(dense(), Parallel(), 10_000) == 8192 * 10_000
    assert rank_kv(dense(window=128), Parallel(), 10_000) == 8192 * 128
    assert rank_kv(dense(window=128), Parallel(), 100) == 8192 * 100


def test_alternate_windows_halve_the_cache_of_long_contexts() -> None:
    """gpt-oss-120b: 18 of 36 layers keep 128 tokens."""
    model = load_model("gpt-oss-120b")
    each = rank_kv_per_token(model, Parallel()) / 2
    assert rank_kv(model, Parallel(), 100_000) == pytest.approx(each * (100_000 + 128))


def test_index_keys_of_sparse_attention_are_fp8_whatever_the_cache_is() -> None:
    """DeepSeek-V3.2, 61 layers: 512 + 64 values of the cache's format and an index key of 128 bytes and a 4-byte scale a
    token, on every rank; and a pass reads those same bytes of each key."""
    model = load_model("DeepSeek-V3.2")
    for bits, value_bytes in ((16, 2), (8, 1)):
        served = replace(model, kv_format=Format(f"{bits} bits", bits))
        for ranks in (1, 8):
            assert rank_kv_per_token(served, Parallel(ranks)) == 61 * (576 * value_bytes + 132)
    attention = model.layers[0][0].attention
    assert attention is not None
    indexer, _ = attention_core(attention, 1, 2.0, 1)
    assert list(indexer.bytes.values()) == [132]


def test_index_keys_are_on_every_rank() -> None:
    """Grouped-query attention with an indexer: 8 KV heads of 2 x 64 values are cut over 8 ranks, the key of 128 is not."""
    model = dense(1)
    layer = replace(model.layers[0][0], attention=replace(model.layers[0][0].attention, sparse_tokens=64, index_heads=4, index_dim=128))  # type: ignore[type-var]  # fmt: skip
    assert rank_kv_per_token(replace(model, layers=((layer, 1),)), Parallel(8)) == 2 * 64 * 2 + 132


def test_kv_heads_are_repeated_beyond_one_a_rank() -> None:
    """8 KV heads: an eighth of the cache on each of 8 ranks, and no less on 16."""
    assert rank_kv_per_token(dense(), Parallel(8)) == 8192 / 8
    assert rank_kv_per_token(dense(), Parallel(16)) == 8192 / 8


def test_the_matrices_a_drafter_runs_for_each_token_are_in_memory() -> None:
    """A head of 100 x 1,000 in bf16 adds 200,000 bytes."""
    head = Projection("markov_out", 100, 1000)
    with_fc = replace(dense(), draft=DraftShape("dspark", Projection("fc", 64, 64), block=4))
    with_both = replace(with_fc, draft=DraftShape("dspark", Projection("fc", 64, 64), block=4, token_heads=(head,)))
    assert rank_weights(with_both, Parallel()) - rank_weights(with_fc, Parallel()) == 200_000


@settings(max_examples=30)
@given(st.integers(1, 4096), st.integers(0, 2**20), st.sampled_from(["gpt-oss-120b", "Qwen3-8B", "DeepSeek-R1"]))
def test_what_is_said_to_fit_does_and_one_more_does_not(batch: int, context: int, model: str) -> None:
    s = build(model=load_preset(model), hardware=load_shipped("2x-h200"), tp=1, batch=batch, context=context)
    if memory(s).fits:
        return
    for words in would_fit(s):
        if words.startswith("TP"):
            option, found, more = "tp", int(words.split()[1]), 0
        else:
            option, found, more = "batch" if "batch" in words else "context", int(words.split()[-1].replace(",", "")), 1
        for n in (found, found + more)[: 1 + more]:
            at = {"parallel": Parallel(n)} if option == "tp" else {option: np.asarray(float(n))}
            assert memory(replace(s, **at)).fits == (n == found)


@pytest.mark.parametrize("name", [p.name for p in list_presets()])
def test_one_rank_holds_the_whole_model_and_more_ranks_no_less(name: str) -> None:
    model = load_model(name)
    assert rank_weights(model, Parallel()) == pytest.approx(model.weight_bytes, rel=1e-9)
    for ranks in (2, 8):
        assert ranks * rank_weights(model, Parallel(ranks)) >= model.weight_bytes * (1 - 1e-9)
