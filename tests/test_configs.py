"""Models from configs: published parameter counts as facts, shapes derived by hand, and refusals.

The configs here are written for these tests: just the keys that give a shape, with the public numbers.
"""

from __future__ import annotations

import copy
import itertools
import json
import os
import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from specsim.configs import list_presets, load_config, load_model, model_from_config, mtp_draft
from specsim.engines import load_engine
from specsim.errors import InputError
from specsim.forward import Parallel, build
from specsim.models import Model

MLA = {"q_lora_rank": 1536, "kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128}


def llama(hidden: int, layers: int, heads: int, kv: int, ffn: int, vocab: int, **more: Any) -> dict[str, Any]:
    """A config of Llama's shape, with further keys."""
    return {
        "model_type": "llama",
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv,
        "intermediate_size": ffn,
        "vocab_size": vocab,
        "tie_word_embeddings": False,
        **more,
    }


def read(config: dict[str, Any]) -> Model:
    return model_from_config(config, name="test", source="test.json")


# name -> (config, published total in billions, published active in billions).
# Cards count active parameters in three ways: with embedding and head, without the embedding, without both.
PUBLISHED: dict[str, tuple[dict[str, Any], float, float]] = {
    "Llama-3.1-8B": (llama(4096, 32, 32, 8, 14336, 128256), 8.03, 8.03),
    "Llama-3.1-405B": (llama(16384, 126, 128, 8, 53248, 128256), 405.9, 405.9),
    "Mistral-Nemo": (llama(5120, 40, 32, 8, 14336, 131072, model_type="mistral", head_dim=128), 12.2, 12.2),
    "Qwen2.5-72B": (llama(8192, 80, 64, 8, 29568, 152064, model_type="qwen2"), 72.7, 72.7),
    "Qwen3-14B": (llama(5120, 40, 40, 8, 17408, 151936, model_type="qwen3", head_dim=128), 14.8, 14.8),
    "Seed-OSS-36B": (
        llama(5120, 64, 80, 8, 27648, 155136, model_type="seed_oss", head_dim=128, attention_bias=True), 36.15, 36.15),
    "StarCoder2-15B": (llama(6144, 40, 48, 4, 24576, 49152, model_type="starcoder2"), 16, 16),
    "Phi-4": (llama(5120, 40, 40, 10, 17920, 100352, model_type="phi3"), 14.7, 14.7),
    "Phi-4-mini": (llama(3072, 32, 24, 8, 8192, 200064, model_type="phi3", tie_word_embeddings=True), 3.84, 3.84),
    "Gemma-2-9B": (
        llama(3584, 42, 16, 8, 14336, 256000, model_type="gemma2", head_dim=256, tie_word_embeddings=True,
              sliding_window=4096), 9.24, 9.24),
    "Gemma-3-27B (text)": (
        llama(5376, 62, 32, 16, 21504, 262208, model_type="gemma3_text", head_dim=128, tie_word_embeddings=True,
              sliding_window=1024, sliding_window_pattern=6), 27.0, 27.0),
    "GLM-4-9B": (llama(4096, 40, 32, 2, 13696, 151552, model_type="glm4", head_dim=128), 9.4, 9.4),
    "GLM-4-32B": (llama(6144, 61, 48, 2, 23040, 151552, model_type="glm4", head_dim=128), 32.6, 32.6),
    "Mixtral-8x7B": (
        llama(4096, 32, 32, 8, 14336, 32000, model_type="mixtral", num_local_experts=8, num_experts_per_tok=2),
        46.7, 12.9),
    "Phi-3.5-MoE": (
        llama(4096, 32, 32, 8, 6400, 32064, model_type="phimoe", num_local_experts=16, num_experts_per_tok=2),
        41.9, 6.6),
    "OLMoE-1B-7B": (
        llama(2048, 16, 16, 16, 1024, 50304, model_type="olmoe", num_experts=64, num_experts_per_tok=8), 6.9, 1.3),
    "Qwen2-57B-A14B": (
        llama(3584, 28, 28, 4, 18944, 151936, model_type="qwen2_moe", num_experts=64, num_experts_per_tok=8,
              moe_intermediate_size=2560, shared_expert_intermediate_size=20480, decoder_sparse_step=1), 57.4, 14.2),
    "Qwen3-30B-A3B": (
        llama(2048, 48, 32, 4, 6144, 151936, model_type="qwen3_moe", head_dim=128, num_experts=128,
              num_experts_per_tok=8, moe_intermediate_size=768), 30.5, 3.3),
    "Qwen3-235B-A22B": (
        llama(4096, 94, 64, 4, 12288, 151936, model_type="qwen3_moe", head_dim=128, num_experts=128,
              num_experts_per_tok=8, moe_intermediate_size=1536), 235, 22),
    "gpt-oss-20b": (
        llama(2880, 24, 64, 8, 2880, 201088, model_type="gpt_oss", head_dim=64, num_local_experts=32,
              num_experts_per_tok=4, attention_bias=True, sliding_window=128,
              layer_types=["sliding_attention", "full_attention"] * 12), 20.9, 3.6),
    "gpt-oss-120b": (
        llama(2880, 36, 64, 8, 2880, 201088, model_type="gpt_oss", head_dim=64, num_local_experts=128,
              num_experts_per_tok=4, attention_bias=True, sliding_window=128,
              layer_types=["sliding_attention", "full_attention"] * 18), 116.8, 5.1),
    "MiniMax-M2": (
        llama(3072, 62, 48, 8, 1536, 200064, model_type="minimax_m2", head_dim=128, num_local_experts=256,
              num_experts_per_tok=8, use_qk_norm=True, qk_norm_type="per_layer", shared_intermediate_size=0), 230, 10),
    "MiniMax-M3": (
        llama(6144, 60, 64, 4, 3072, 200064, model_type="minimax_m3", head_dim=128, num_local_experts=128,
              num_experts_per_tok=4, n_shared_experts=1, shared_intermediate_size=3072, dense_intermediate_size=12288,
              moe_layer_freq=[0] * 3 + [1] * 57,
              sparse_attention_config={"sparse_num_index_heads": 4, "sparse_index_dim": 128, "sparse_topk_blocks": 16,
                                       "sparse_block_size": 128, "sparse_attention_freq": [0] * 3 + [1] * 57}), 428, 23),
    "GLM-4.5": (
        llama(5120, 92, 96, 8, 12288, 151552, model_type="glm4_moe", head_dim=128, n_routed_experts=160,
              num_experts_per_tok=8, n_shared_experts=1, moe_intermediate_size=1536, first_k_dense_replace=3,
              attention_bias=True, use_qk_norm=True), 355, 32),
    "GLM-4.5-Air": (
        llama(4096, 46, 96, 8, 10944, 151552, model_type="glm4_moe", head_dim=128, n_routed_experts=128,
              num_experts_per_tok=8, n_shared_experts=1, moe_intermediate_size=1408, first_k_dense_replace=1,
              attention_bias=True), 106, 12),
    "dots.llm1": (
        llama(4096, 62, 32, 32, 10944, 152064, model_type="dots1", head_dim=128, n_routed_experts=128,
              num_experts_per_tok=6, n_shared_experts=2, moe_intermediate_size=1408, first_k_dense_replace=1), 142, 14),
    "Ling-flash-2.0": (
        llama(4096, 32, 32, 4, 9216, 157184, model_type="bailing_moe_v2", head_dim=128, num_experts=256,
              num_experts_per_tok=8, num_shared_experts=1, moe_intermediate_size=1024, first_k_dense_replace=1),
        103, 6.1),
    "ERNIE-4.5-21B-A3B": (
        llama(2560, 28, 20, 4, 12288, 103424, model_type="ernie4_5_moe", head_dim=128, tie_word_embeddings=True,
              moe_num_experts=64, moe_k=6, moe_num_shared_experts=2, moe_intermediate_size=1536,
              moe_layer_start_index=1, moe_layer_interval=1), 21.8, 3),
    "Hunyuan-A13B": (
        llama(4096, 32, 32, 8, 3072, 128167, model_type="hunyuan_v1_moe", head_dim=128, tie_word_embeddings=True,
              num_experts=64, moe_topk=[8] * 32, num_shared_expert=[1] * 32, moe_intermediate_size=[3072] * 32), 80, 13),
    "Step-3.7-Flash": (
        llama(4096, 45, 64, 8, 11264, 128896, model_type="step3p7", head_dim=128, num_experts=288, sliding_window=512,
              layer_types=[("sliding" if i % 4 else "full") + "_attention" for i in range(45)],
              num_experts_per_tok=8, moe_intermediate_size=1280, share_expert_dim=1280, n_shared_experts=1,
              first_k_dense_replace=3), 196, 11),
    "Step-3 (text)": (
        llama(7168, 61, 64, 1, 18432, 128815, model_type="step3_text", num_key_value_heads=None, head_dim=256,
              num_attention_groups=1, share_q_dim=2048, moe_num_experts=48, moe_top_k=3, moe_intermediate_size=5120,
              share_expert_dim=5120, moe_layers_enum=",".join(str(i) for i in range(4, 60))), 316, 38),
    "MiMo-V2-Flash": (
        llama(4096, 48, 64, 4, 16384, 152576, model_type="mimo_v2_flash", head_dim=192, v_head_dim=128,
              swa_num_key_value_heads=8, swa_head_dim=192, swa_v_head_dim=128, sliding_window=128,
              hybrid_layer_pattern=([0] + [1] * 5) * 8, moe_layer_freq=[0] + [1] * 47, n_routed_experts=256,
              n_shared_experts=None, num_experts_per_tok=8, moe_intermediate_size=2048), 309, 15),
    "Llama-4-Scout": (
        {"model_type": "llama4", "text_config": llama(
            5120, 48, 40, 8, 8192, 202048, model_type="llama4_text", head_dim=128, intermediate_size_mlp=16384,
            num_local_experts=16, num_experts_per_tok=1, interleave_moe_layer_step=1, attention_chunk_size=8192),
         "vision_config": {"hidden_size": 1408, "num_hidden_layers": 34, "intermediate_size": 5632}}, 109, 17),
    "Llama-4-Maverick": (
        {"model_type": "llama4", "text_config": llama(
            5120, 48, 40, 8, 8192, 202048, model_type="llama4_text", head_dim=128, intermediate_size_mlp=16384,
            num_local_experts=128, num_experts_per_tok=1, interleave_moe_layer_step=2, attention_chunk_size=8192)},
        400, 17),
    "DeepSeek-V2-Lite": (
        llama(2048, 27, 16, 16, 10944, 102400, model_type="deepseek_v2", n_routed_experts=64, num_experts_per_tok=6,
              n_shared_experts=2, moe_intermediate_size=1408, first_k_dense_replace=1, **{**MLA, "q_lora_rank": None}),
        15.7, 2.4),
    "DeepSeek-V3": (
        llama(7168, 61, 128, 128, 18432, 129280, model_type="deepseek_v3", n_routed_experts=256, num_experts_per_tok=8,
              n_shared_experts=1, moe_intermediate_size=2048, first_k_dense_replace=3, **MLA), 671, 37),
    "DeepSeek-V4-Flash": (
        llama(4096, 43, 64, 1, 0, 129280, model_type="deepseek_v4", intermediate_size=None, head_dim=512,
              q_lora_rank=1024, o_lora_rank=1024, o_groups=8, qk_rope_head_dim=64, index_head_dim=128,
              index_n_heads=64, index_topk=512, sliding_window=128, hc_mult=4, n_routed_experts=256,
              n_shared_experts=1, num_experts_per_tok=6, moe_intermediate_size=2048,
              compress_ratios=[0, 0] + [4, 128] * 20 + [4]), 284, 13),
    "DeepSeek-V4-Pro": (
        llama(7168, 61, 128, 1, 0, 129280, model_type="deepseek_v4", intermediate_size=None, head_dim=512,
              q_lora_rank=1536, o_lora_rank=1024, o_groups=16, qk_rope_head_dim=64, index_head_dim=128,
              index_n_heads=64, index_topk=1024, sliding_window=128, hc_mult=4, n_routed_experts=384,
              n_shared_experts=1, num_experts_per_tok=6, moe_intermediate_size=3072,
              compress_ratios=[128] + [128, 4] * 30), 1600, 49),
    "Kimi-K2": (
        llama(7168, 61, 64, 64, 18432, 163840, model_type="kimi_k2", n_routed_experts=384, num_experts_per_tok=8,
              n_shared_experts=1, moe_intermediate_size=2048, first_k_dense_replace=1, **MLA), 1026, 32),
    "Kimi-Linear-48B-A3B": (
        llama(2304, 27, 32, 32, 9216, 163840, model_type="kimi_linear", num_experts=256, num_experts_per_token=8,
              num_shared_experts=1, moe_intermediate_size=1024, first_k_dense_replace=1, **{**MLA, "q_lora_rank": None},
              linear_attn_config={
                  "full_attn_layers": [4, 8, 12, 16, 20, 24, 27], "num_heads": 32, "head_dim": 128,
                  "kda_layers": [i for i in range(1, 27) if i % 4], "short_conv_kernel_size": 4}), 49.1, 3),
    "GLM-5": (
        llama(6144, 78, 64, 64, 12288, 154880, model_type="glm_moe_dsa", n_routed_experts=256, num_experts_per_tok=8,
              n_shared_experts=1, moe_intermediate_size=2048, first_k_dense_replace=3, q_lora_rank=2048,
              kv_lora_rank=512, qk_nope_head_dim=192, qk_rope_head_dim=64, v_head_dim=256, index_topk=2048,
              index_n_heads=32, index_head_dim=128), 744, 40),
    "Qwen3-Next-80B-A3B": (
        llama(2048, 48, 16, 2, 5120, 151936, model_type="qwen3_next", head_dim=256, full_attention_interval=4,
              linear_num_key_heads=16, linear_num_value_heads=32, linear_key_head_dim=128, linear_value_head_dim=128,
              num_experts=512, num_experts_per_tok=10, moe_intermediate_size=512,
              shared_expert_intermediate_size=512), 80, 3),
    "Qwen3.5-397B-A17B": (
        {"model_type": "qwen3_5_moe", "text_config": llama(
            4096, 60, 32, 2, 0, 248320, model_type="qwen3_5_moe_text", intermediate_size=None, head_dim=256,
            full_attention_interval=4, linear_num_key_heads=16, linear_num_value_heads=64, linear_key_head_dim=128,
            linear_value_head_dim=128, num_experts=512, num_experts_per_tok=10, moe_intermediate_size=1024,
            shared_expert_intermediate_size=1024)}, 397, 17),
    "Nemotron-3-Nano-30B-A3B": (
        llama(2688, 52, 32, 2, 1856, 131072, model_type="nemotron_h", head_dim=128, mamba_num_heads=64,
              mamba_head_dim=64, n_groups=8, ssm_state_size=128, conv_kernel=4, n_routed_experts=128,
              num_experts_per_tok=6, n_shared_experts=1, moe_intermediate_size=1856,
              moe_shared_expert_intermediate_size=3712,
              hybrid_override_pattern="MEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEMEM*EMEMEMEME"), 31.6, 3.2),
    "Nemotron-3-Super-120B-A12B": (
        llama(4096, 88, 32, 2, 2688, 131072, model_type="nemotron_h", head_dim=128, mamba_num_heads=128,
              mamba_head_dim=64, n_groups=8, ssm_state_size=128, conv_kernel=4, n_routed_experts=512,
              num_experts_per_tok=22, n_shared_experts=1, moe_intermediate_size=2688, moe_latent_size=1024,
              moe_shared_expert_intermediate_size=5376, hybrid_override_pattern=(
                  "MEMEMEM*EMEMEMEM*EMEMEMEM*EMEMEMEMEM*EMEMEMEMEM*EMEMEMEMEM*EMEMEMEMEM*EMEMEMEM*EMEMEMEME")), 120, 12),
    "Nemotron-H-56B": (
        llama(8192, 118, 64, 8, 32768, 131072, model_type="nemotron_h", attention_head_dim=128, mamba_num_heads=256,
              mamba_head_dim=64, n_groups=8, ssm_state_size=256, conv_kernel=4,
              hybrid_override_pattern="M-M-M-M*-" + "M-M-M-M-M*-" * 9 + "M-M-M-M-M-"), 56, 56),
    "Jamba-v0.1": (
        llama(4096, 32, 32, 8, 14336, 65536, model_type="jamba", num_experts=16, num_experts_per_tok=2,
              expert_layer_period=2, expert_layer_offset=1, attn_layer_period=8, attn_layer_offset=4,
              mamba_d_state=16, mamba_d_conv=4, mamba_expand=2, mamba_dt_rank=256), 52, 12),
    "Granite-4.0-H-Tiny": (
        llama(1536, 40, 12, 4, 512, 100352, model_type="granitemoehybrid", tie_word_embeddings=True,
              num_local_experts=64, num_experts_per_tok=6, shared_intermediate_size=1024, mamba_n_heads=48,
              mamba_d_head=64, mamba_d_state=128, mamba_n_groups=1, mamba_d_conv=4,
              layer_types=["attention" if i in (5, 15, 25, 35) else "mamba" for i in range(40)]), 7, 1),
    "LFM2-1.2B": (
        llama(2048, 16, 32, 8, 12288, 65536, model_type="lfm2", tie_word_embeddings=True, block_ff_dim=12288,
              block_auto_adjust_ff_dim=True, block_multiple_of=256, conv_L_cache=3,
              full_attn_idxs=[2, 5, 8, 10, 12, 14]), 1.17, 1.17),
    "LFM2-8B-A1B": (
        llama(2048, 24, 32, 8, 7168, 65536, model_type="lfm2_moe", tie_word_embeddings=True, conv_L_cache=3,
              layer_types=["full_attention" if i in (2, 6, 10, 14, 18, 21) else "conv" for i in range(24)],
              num_dense_layers=2, num_experts=32, num_experts_per_tok=4, moe_intermediate_size=1792), 8.3, 1.5),
    "Grok-2": (
        llama(8192, 64, 64, 8, 32768, 131072, model_type="git", architectures=["Grok1ForCausalLM"], head_dim=128,
              num_local_experts=8, num_experts_per_tok=2, moe_intermediate_size=16384, residual_moe=True,
              router_logit_softcapping=30.0, sliding_window_size=-1), 270, 115),
    "MiniMax-M1": (
        llama(6144, 80, 64, 8, 9216, 200064, model_type="minimax_m1", head_dim=128, num_local_experts=32,
              num_experts_per_tok=2, shared_intermediate_size=0, attn_type_list=([0] * 7 + [1]) * 10), 456, 45.9),
    "Ring-mini-linear-2.0": (
        llama(2048, 20, 16, 4, 5120, 157184, model_type="bailing_moe_linear", head_dim=128, layer_group_size=5,
              num_experts=256, num_experts_per_tok=8, num_shared_experts=1, moe_intermediate_size=512,
              first_k_dense_replace=1, group_norm_size=4), 16.4, 1.6),
    "LongCat-Flash": (
        llama(6144, 28, 64, 64, 0, 131072, model_type="longcat_flash", num_hidden_layers=None, num_layers=28,
              num_key_value_heads=None, intermediate_size=None, ffn_hidden_size=12288, expert_ffn_hidden_size=2048,
              n_routed_experts=512, zero_expert_num=256, zero_expert_type="identity", moe_topk=12, **MLA), 560, 27),
    "Trinity-Mini": (
        llama(2048, 32, 32, 4, 6144, 200192, model_type="afmoe", head_dim=128, num_experts=128, num_experts_per_tok=8,
              num_shared_experts=1, num_dense_layers=2, moe_intermediate_size=1024, sliding_window=2048,
              layer_types=(["sliding_attention"] * 3 + ["full_attention"]) * 8), 26.1, 3),
    "Gemma-4-26B-A4B (text)": (
        llama(2816, 30, 16, 8, 2112, 262144, model_type="gemma4_text", tie_word_embeddings=True, head_dim=256,
              global_head_dim=512, num_global_key_value_heads=2, attention_k_eq_v=True, enable_moe_block=True,
              num_experts=128, top_k_experts=8, moe_intermediate_size=704, sliding_window=1024,
              layer_types=(["sliding_attention"] * 5 + ["full_attention"]) * 5), 25.2, 3.8),
    "Gemma-4-31B (text)": (
        llama(5376, 60, 32, 16, 21504, 262144, model_type="gemma4_text", tie_word_embeddings=True, head_dim=256,
              global_head_dim=512, num_global_key_value_heads=4, attention_k_eq_v=True, enable_moe_block=False,
              num_experts=None, top_k_experts=None, sliding_window=1024,
              layer_types=(["sliding_attention"] * 5 + ["full_attention"]) * 10), 30.7, 30.7),
}  # fmt: skip


def rounding(published: float) -> float:
    """Half a unit of the last digit that a card prints, and a little, for some cut: 3.3 -> 0.06, 22 -> 0.6."""
    return 0.06 if published != int(published) else 0.6


@pytest.mark.parametrize("name", PUBLISHED)
def test_counts_agree_with_the_published_ones(name: str) -> None:
    """Total within 2 % or the card's rounding; active likewise in one of the three ways in which cards count it."""
    config, total, active = PUBLISHED[name]
    model = read(config)
    assert abs(model.total_parameters / 1e9 - total) <= max(0.02 * total, rounding(total))
    counted = (model.active_parameters, model.active_parameters_without_embedding, model.active_parameters_in_layers)
    assert min(abs(c / 1e9 - active) for c in counted) <= max(0.02 * active, rounding(active))
    assert not model.warnings


@pytest.mark.parametrize("name", PUBLISHED)
def test_every_moe_is_read_with_all_its_experts(name: str) -> None:
    config, total, active = PUBLISHED[name]
    text = config.get("text_config", config)
    counts = [
        text[k] for k in ("n_routed_experts", "num_experts", "num_local_experts", "moe_num_experts") if text.get(k)
    ]
    model = read(config)
    assert (model.experts.count if model.experts else 0) == max(counts, default=0)
    assert (model.experts is not None) == (active < 0.9 * total)


def test_dense_shape_by_hand() -> None:
    """Llama-3.1-8B: qkv 4096 x (32 + 2 x 8) x 128, o 4096 x 4096, gate and up 4096 x 28672, down 14336 x 4096."""
    model = read(llama(4096, 32, 32, 8, 14336, 128256))
    ((layer, count),) = model.layers
    shapes = {p.name: (p.inputs, p.outputs, p.split) for p in layer.projections()}
    assert count == 32
    assert shapes == {
        "qkv": (4096, 6144, "column"),
        "o": (4096, 4096, "row"),
        "ffn_gate_up": (4096, 28672, "column"),
        "ffn_down": (14336, 4096, "row"),
    }
    assert (layer.mixer[0].kv_outputs, layer.mixer[0].kv_heads) == (2048, 8)
    assert layer.parameters == 4096 * 6144 + 4096 * 4096 + 3 * 4096 * 14336 + 2 * 4096
    assert model.kv_bytes_per_token() == 32 * 2 * 8 * 128 * 2
    assert layer.allreduces == 2


def test_kimi_k2_layer_by_hand() -> None:
    """MLA of Kimi-K2: latent 512 + 64 a token and layer; 61 layers of 576 values in 2 bytes are 70,272 bytes a token."""
    model = load_model("Kimi-K2.5")
    (dense, ones), (moe, sixty) = model.layers
    assert (ones, sixty) == (1, 60)
    assert model.kv_bytes_per_token() == 61 * 576 * 2
    shapes = {p.name: (p.inputs, p.outputs, p.split) for p in moe.mixer}
    assert shapes == {
        "qkv_a": (7168, 1536 + 576, "none"),
        "q_b": (1536, 64 * 192, "column"),
        "k_absorbed": (512, 64 * 128, "column"),
        "v_absorbed": (512, 64 * 128, "column"),
        "o": (64 * 128, 7168, "row"),
    }
    assert moe.experts is not None
    assert (moe.experts.count, moe.experts.per_token, moe.experts.intermediate) == (384, 8, 2048)
    assert [p.name for p in moe.experts.shared] == ["shared_gate_up", "shared_down"]
    assert dense.ffn[0].outputs == 2 * 18432


def test_hybrid_keeps_a_state_and_a_cache() -> None:
    """Qwen3-Next: 36 of 48 layers keep 32 x 128 x 128 + (2 x 2048 + 4096) x 3 values; 12 keep 2 x 2 x 256 a token."""
    model = load_model("Qwen3-Next-80B-A3B")
    kinds = {layer.kind: (layer, n) for layer, n in model.layers}
    linear, count = kinds["gdn+moe"]
    full, rest = kinds["gqa+moe"]
    assert (count, rest) == (36, 12)
    assert linear.attention is not None
    assert full.attention is not None
    assert linear.attention.state_values == 32 * 128 * 128 + 8192 * 3
    assert linear.attention.kv_bytes(2) == 0
    assert model.kv_bytes_per_token() == 12 * 2 * 2 * 256 * 2
    qkv = full.mixer[0]
    assert qkv.outputs == (2 * 16 + 2 * 2) * 256  # queries and their gate, keys and values


def test_layers_that_read_their_neighbour_s_cache_keep_none() -> None:
    """Hunyuan-Large: each second of 4 layers has queries alone, so that a token adds 2 x 2 x 8 x 128 values of 2 bytes."""
    shape = llama(6400, 4, 80, 8, 18304, 128512, head_dim=128, cla_share_factor=2)
    shared, own = read({**shape, "use_cla": True}), read({**shape, "use_cla": False})
    assert (shared.kv_bytes_per_token(), own.kv_bytes_per_token()) == (2 * 2 * 8 * 128 * 2, 4 * 2 * 8 * 128 * 2)
    assert own.total_parameters - shared.total_parameters == 2 * 6400 * 2 * 8 * 128


@pytest.mark.parametrize("off", [None, 0, -1])
def test_a_window_of_no_tokens_is_none(off: int | None) -> None:
    for family in ("mistral", "gemma2", "llama"):
        (layer, count), *others = read(
            llama(4096, 4, 32, 8, 14336, 32000, model_type=family, sliding_window=off)
        ).layers
        assert layer.attention is not None
        assert (layer.attention.window, count, others) == (None, 4, [])


def test_embeddings_of_layers_may_have_a_vocabulary_of_their_own() -> None:
    """Gemma-3n embeds 262,144 of its 262,400 tokens in each layer: 2 layers of 256 values."""
    own = llama(2048, 2, 8, 2, 16384, 262400, model_type="gemma3n_text", head_dim=256, hidden_size_per_layer_input=256)
    assert read({**own, "vocab_size_per_layer_input": 262144}).other_parameters == 262144 * 2 * 256
    assert read(own).other_parameters == 262400 * 2 * 256


def test_whole_numbers_may_be_written_with_a_point() -> None:
    shape = llama(4096, 2, 32, 8, 14336, 32000)
    assert read({**shape, "hidden_size": 4096.0, "num_hidden_layers": 2.0}).layers == read(shape).layers
    for wrong in (4096.5, float("nan"), float("inf"), "4096", True):
        with pytest.raises(InputError, match=r"hidden_size'.*not a whole number; write a whole number, without quotes"):
            read({**shape, "hidden_size": wrong})


def test_layers_that_a_key_singles_out_are_warned_of() -> None:
    found = read(llama(4096, 4, 32, 8, 14336, 32000, cross_attention_layers=[1, 3])).warnings
    assert found == ("key 'cross_attention_layers' singles out layers and is not used",)


def test_a_vision_tower_with_gates_has_three_matrices_a_layer() -> None:
    """Qwen2.5-VL-7B is published as 8.29 B parameters: 7.62 B of language, and a tower whose feed-forwards are gated."""
    tower = {"depth": 32, "hidden_size": 1280, "intermediate_size": 3420, "num_heads": 16, "out_hidden_size": 3584,
             "patch_size": 14, "temporal_patch_size": 2, "spatial_merge_size": 2}  # fmt: skip
    text = llama(3584, 28, 28, 4, 18944, 152064, model_type="qwen2_5_vl")
    gated, plain = (
        read({**text, "vision_config": {**tower, "hidden_act": act}}).total_parameters for act in ("silu", "gelu")
    )
    assert gated == pytest.approx(8.29e9, rel=2e-3)
    assert gated - plain == 32 * 1280 * 3420


def test_windows_chunks_and_selected_tokens() -> None:
    oss = load_model("gpt-oss-120b")
    assert sorted((layer.attention.window or 0, n) for layer, n in oss.layers if layer.attention) == [
        (0, 18),
        (128, 18),
    ]
    scout = load_model("Llama-4-Scout")
    assert sorted((layer.attention.window or 0, n) for layer, n in scout.layers if layer.attention) == [
        (0, 12),
        (8192, 36),
    ]
    sparse = load_model("DeepSeek-V3.2").layers[0][0].attention
    assert sparse is not None
    assert (sparse.sparse_tokens, sparse.index_heads, sparse.index_dim) == (2048, 64, 128)
    m3 = read(PUBLISHED["MiniMax-M3"][0]).layers[-1][0].attention
    assert m3 is not None
    assert m3.sparse_tokens == 16 * 128


def test_compressed_cache_of_deepseek_v4() -> None:
    """Entries of 512 values: one a token in window layers (2), one in 4 with its index key of 128 fp8 values and a scale
    (21), one in 128 (20)."""
    model = read(PUBLISHED["DeepSeek-V4-Flash"][0])
    assert model.kv_bytes_per_token() == 2 * 2 * 512 + 21 * (2 * 512 + 132) / 4 + 20 * 2 * 512 / 128


@pytest.mark.parametrize(
    ("name", "by_groups"),
    [("DeepSeek-V2-Lite", True), ("DeepSeek-V3", False), ("Kimi-K2.5", False), ("Qwen3-30B-A3B", False)],
)
def test_experts_without_a_learnt_bias_are_chosen_by_groups(name: str, by_groups: bool) -> None:
    """A pass then has one top-k and six small kernels a layer of experts more: 26 of DeepSeek-V2-Lite's 27 layers."""
    model = load_model(name)
    experts = [(layer.experts, count) for layer, count in model.layers if layer.experts is not None]
    assert {e.by_groups for e, _ in experts} == {by_groups}
    engine = load_engine("sglang")
    more = engine.kernels["groups"]
    operators = build(model, Parallel(), engine, graph=True).operators
    router = sum(o.calls for o in operators if o.rate == "router")
    layers = sum(count for _, count in experts)
    assert router == layers * (engine.kernels["moe"]["router"] + by_groups * more["router"])


def test_layers_that_share_an_indexer_have_none() -> None:
    config = copy.deepcopy(PUBLISHED["GLM-5"][0])
    config["indexer_types"] = (["full", "shared"] * 39)[:78]
    model = read(config)
    by_kind = {layer.kind: layer.attention for layer, _ in model.layers}
    assert by_kind["dsa-shared+moe"] is not None
    assert by_kind["dsa-shared+moe"].index_dim == 0
    assert by_kind["dsa-shared+moe"].sparse_tokens == 2048


def test_kv_sharing_layers_keep_no_cache() -> None:
    """Gemma-3n-like: of 4 layers the last 2 read another's cache: half of 4 x 2 x 2 x 256 x 2 bytes."""
    config = llama(2048, 4, 8, 2, 8192, 1000, model_type="gemma3n_text", head_dim=256, num_kv_shared_layers=2,
                   intermediate_size=[8192] * 4, hidden_size_per_layer_input=256)  # fmt: skip
    model = read(config)
    assert model.kv_bytes_per_token() == 2 * 2 * 2 * 256 * 2
    assert model.other_parameters == 1000 * 4 * 256


def test_nas_blocks_vary() -> None:
    """ffn_mult 2.625 of hidden 8192: 2 x 2.625 x 8192 / 3 = 14336; a no_op drops the part."""
    block = {"attention": {"n_heads_in_group": 8, "no_op": False}, "ffn": {"ffn_mult": 2.625, "no_op": False}}
    bare = {"attention": {"n_heads_in_group": None, "no_op": True}, "ffn": {"ffn_mult": None, "no_op": True}}
    config = llama(8192, 2, 64, 8, 1, 1000, model_type="nemotron-nas", intermediate_size=None,
                   num_key_value_heads=None, block_configs=[block, bare])  # fmt: skip
    model = read(config)
    assert model.layers[0][0].ffn[1].inputs == 14336
    assert model.layers[1][0].parameters == 0


def test_vision_tower_counts_in_the_total_only() -> None:
    """One layer of width 8: attention 4 x 64, feed-forward 2 x 8 x 16, biases and norms 3 x 8 + 16 + 6 x 8."""
    config = {"model_type": "x", "text_config": llama(64, 1, 4, 4, 64, 100),
              "vision_config": {"hidden_size": 8, "depth": 1, "intermediate_size": 16, "patch_size": 2}}  # fmt: skip
    model = read(config)
    layer = 4 * 64 + 2 * 8 * 16 + 3 * 8 + 16 + 6 * 8
    assert model.other_parameters == layer + 3 * 2 * 2 * 8 + 8 * 64
    assert model.active_parameters == model.total_parameters - model.other_parameters


# --- drafters ---


def test_eagle3_is_one_double_width_layer() -> None:
    """Llama-3.1-8B's EAGLE-3: fc 3 x 4096 -> 4096, QKV input 8192, head of 32,000; the embedding is the target's."""
    config = llama(4096, 1, 32, 8, 14336, 128256, architectures=["LlamaForCausalLMEagle3"], draft_vocab_size=32000)
    model = read(config)
    assert model.draft is not None
    assert model.draft.fc is not None
    assert (model.draft.kind, model.draft.fc.inputs, model.draft.fc.outputs) == ("eagle3", 3 * 4096, 4096)
    ((layer, _),) = model.layers
    assert layer.mixer[0].inputs == 8192
    assert layer.norms == 3
    assert (model.head.outputs, model.vocab) == (32000, 128256)
    attention = 8192 * 6144 + 4096 * 4096
    assert model.total_parameters == (
        3 * 4096 * 4096 + attention + 3 * 4096 * 14336 + 3 * 4096 + 4096 + 32000 * 4096
    )  # fmt: skip
    assert model.weight_bytes == 2 * model.total_parameters


def test_eagle3_without_a_reduced_vocabulary_has_the_whole_head() -> None:
    model = load_model("kimi-k2.5-eagle3")
    assert model.head.outputs == 163840
    assert not model.tied


def test_eagle3_reads_as_many_hidden_states_as_it_names() -> None:
    config = llama(64, 1, 4, 4, 128, 1000, architectures=["LlamaForCausalLMEagle3"], target_hidden_size=96,
                   eagle_config={"eagle_aux_hidden_state_layer_ids": [1, 5]})  # fmt: skip
    model = read(config)
    assert model.draft is not None
    assert model.draft.fc is not None
    assert model.draft.fc.inputs == 2 * 96
    assert model.embedding_parameters is None  # another width than the target's: its own embedding


def test_mla_eagle3() -> None:
    model = load_model("kimi-k2.5-eagle3-mla")
    ((layer, _),) = model.layers
    assert layer.kind == "mla+dense"
    assert layer.mixer[0].inputs == 2 * 7168
    assert model.kv_bytes_per_token() == 576 * 2


def test_eagle_borrows_head_and_embedding() -> None:
    model = read(llama(4096, 1, 32, 8, 14336, 128256, architectures=["LlamaForCausalLMEagle"]))
    assert model.draft is not None
    assert model.draft.kind == "eagle"
    assert model.tied
    assert model.embedding_parameters == 0
    assert model.layers[0][0].norms == 1


def test_peagle_doubles_its_first_layer_only() -> None:
    config = llama(4096, 4, 32, 8, 12288, 151936, architectures=["PEagleDraftModel"], draft_vocab_size=32000)
    model = read(config)
    assert [(layer.mixer[0].inputs, n) for layer, n in model.layers] == [(8192, 1), (4096, 3)]


@pytest.mark.parametrize("kind", ["dflash", "dspark", "domino"])
def test_block_drafters(kind: str) -> None:
    """fc joins five hidden states of the target; DSpark and Domino add matrices that run once a token."""
    dflash: dict[str, Any] = {"target_layer_ids": [1, 9, 17, 25, 33]}
    if kind == "dspark":
        dflash |= {"projector_type": kind, "markov_rank": 256, "enable_confidence_head": True,
                   "confidence_head_with_markov": True}  # fmt: skip
    if kind == "domino":
        dflash |= {"projector_type": kind, "emb_dim": 256, "gru_hidden_dim": 1024}
    config = llama(4096, 5, 32, 8, 12288, 151936, model_type="qwen3", head_dim=128, block_size=16, dflash_config=dflash)
    model = read(config)
    assert model.draft is not None
    assert model.draft.fc is not None
    assert (model.draft.kind, model.draft.block, model.draft.fc.inputs) == (kind, 16, 5 * 4096)
    expected = {
        "dflash": 0,
        "dspark": 256 * 151936 + (4096 + 256) + 1,
        "domino": 3 * 1024 * (4096 + 1024) + 256 * (4096 + 1024) + 256 * 151936,
    }
    assert sum(p.parameters for p in model.draft.token_heads) == expected[kind]
    assert model.tied
    assert model.embedding_parameters == 0


def test_speculators_format() -> None:
    config = {"speculators_model_type": "eagle3", "draft_vocab_size": 32000,
              "transformer_layer_config": llama(4096, 1, 32, 8, 14336, 128256)}  # fmt: skip
    model = read(config)
    assert model.draft is not None
    assert (model.draft.kind, model.head.outputs) == ("eagle3", 32000)


def test_mtp_is_a_target_layer_with_an_fc() -> None:
    """DeepSeek-V3's module: one MLA and MoE layer, eh_proj 14336 -> 7168, two norms more; head and embedding shared."""
    target = load_model("DeepSeek-V3")
    draft = mtp_draft(target)
    assert draft.draft is not None
    assert draft.draft.fc is not None
    assert (draft.draft.fc.inputs, draft.draft.fc.outputs) == (2 * 7168, 7168)
    assert draft.layers[0][0].parameters == target.layers[-1][0].parameters
    assert draft.total_parameters == draft.layers[0][0].parameters + 2 * 7168 * 7168 + 3 * 7168
    assert (draft.head, draft.tied, draft.embedding_parameters) == (target.head, True, 0)


@pytest.mark.parametrize(
    ("more", "modules"),
    [({"num_nextn_predict_layers": 2}, 2), ({"num_mtp_modules": 3, "use_mtp": True}, 3), ({"mtp_num_hidden_layers": 1}, 1),
     ({"num_mtp_modules": 7, "num_nextn_predict_layers": 1}, 1), ({"num_mtp_modules": 3, "use_mtp": False}, 0), ({}, 0)],
)  # fmt: skip
def test_mtp_modules_are_counted(more: dict[str, Any], modules: int) -> None:
    model = read(llama(64, 2, 4, 4, 128, 1000, **more))
    assert sum(n for _, n in model.mtp_layers) == modules
    if not modules:
        with pytest.raises(InputError, match="no next-token-prediction"):
            mtp_draft(model)


def test_mtp_of_a_hybrid_attends_fully() -> None:
    assert [layer.kind for layer, _ in load_model("Qwen3-Next-80B-A3B").mtp_layers] == ["gqa+moe"]


def test_mtp_of_nemotron_follows_its_own_pattern() -> None:
    config = copy.deepcopy(PUBLISHED["Nemotron-3-Super-120B-A12B"][0])
    config |= {"num_nextn_predict_layers": 1, "mtp_hybrid_override_pattern": "*E"}
    model = read(config)
    assert [layer.kind for layer, _ in model.mtp_layers] == ["gqa", "moe"]
    assert len(mtp_draft(model).layers) == 2


# --- refusals ---


def refusal(config: Any, **options: Any) -> str:
    with pytest.raises(InputError) as caught:
        model_from_config(config, name="test", source="test.json", **options)
    message = str(caught.value)
    assert "\n" not in message
    assert message.startswith("test.json")
    return message


EXPERT_KEYS = re.compile(r"expert|moe_|^moe|share_expert")


@pytest.mark.parametrize("name", [n for n, (_, total, active) in PUBLISHED.items() if active < 0.9 * total])
@pytest.mark.parametrize("change", ["drop", "rename", "null", "zero"])
def test_no_moe_is_ever_read_as_dense(name: str, change: str) -> None:
    """Whatever happens to any one or two of its expert keys, a MoE is refused or keeps all its experts."""
    config = PUBLISHED[name][0]
    text = config.get("text_config", config)
    count = read(config).experts
    assert count is not None
    keys = [k for k in text if EXPERT_KEYS.search(k)]
    for chosen in itertools.chain(itertools.combinations(keys, 1), itertools.combinations(keys, 2)):
        changed = copy.deepcopy(config)
        inner = changed.get("text_config", changed)
        for key in chosen:
            value = inner.pop(key)
            if change == "rename":
                inner[f"{key}_v2"] = value
            elif change != "drop":
                inner[key] = None if change == "null" else 0
        if change == "zero" and "Granite" in name:
            continue  # it has dense models, which say so just like that
        try:
            model = read(changed)
        except InputError:
            continue
        assert model.experts is not None, chosen
        assert model.experts.count == count.count, chosen


@pytest.mark.parametrize(
    ("key", "value"),
    [("num_experts", 8), ("n_experts", 8), ("moe_num_primary_experts", 64), ("num_experts_per_tok", 2),
     ("moe_layers_total", 12), ("moe_num_experts", [64, 64]), ("ffn_config", {"moe_num_experts": 16}), ("use_moe", True),
     ("zero_expert_num", 4), ("num_local_experts", "8"), ("expert_choice", "top2"), ("moe", {"num_experts": 8})],
)  # fmt: skip
def test_an_expert_key_that_is_not_used_is_refused_by_name(key: str, value: Any) -> None:
    assert re.search(r"expert|moe", refusal(llama(64, 2, 4, 4, 128, 1000, **{key: value})))


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("router_top_k", 2),
        ("mixture", {"count": 8}),
        ("n_routed", 64),
        ("ffn_type", "moe"),
        ("ffn", {"kind": "mixture"}),
    ],
)
def test_other_words_for_experts_are_hints_too(key: str, value: Any) -> None:
    assert f"key '{key}" in refusal(llama(64, 2, 4, 4, 128, 1000) | {key: value})


def test_the_name_of_a_moe_is_no_hint() -> None:
    assert (
        read(llama(64, 2, 4, 4, 128, 1000, target_model_name="some-moe", tokenizer_class="MoeTokenizer")).experts
        is None
    )


@pytest.mark.parametrize("value", [None, 0, 1])
def test_absent_experts_are_absent(value: int | None) -> None:
    model = read(llama(64, 2, 4, 4, 128, 1000, num_experts=value, num_experts_per_tok=value if value is None else 0))
    assert model.experts is None


def test_experts_beside_the_text_config_are_refused() -> None:
    assert "num_experts" in refusal({"num_experts": 8, "text_config": llama(64, 2, 4, 4, 128, 1000)})


def test_a_moe_architecture_without_experts_is_refused() -> None:
    for known in ("new", "llama"):
        message = refusal(llama(64, 2, 4, 4, 128, 1000, model_type=known, architectures=["NewMoEForCausalLM"]))
        assert "num_experts" in message


@pytest.mark.parametrize("key", ["use_residual", "parallel_attn_mlp_res"])
def test_a_dense_branch_beside_experts_is_not_dropped(key: str) -> None:
    config = llama(64, 2, 4, 4, 128, 1000, num_local_experts=8, num_experts_per_tok=2, **{key: True})
    assert key in refusal(config)


def test_two_counts_must_agree() -> None:
    config = copy.deepcopy(PUBLISHED["GLM-5"][0])
    assert read(config | {"num_experts": 256}).experts == read(config).experts
    assert "num_experts" in refusal(config | {"num_experts": 128})


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"hidden_size": None}, ["hidden_size", "missing"]),
        ({"vocab_size": "32000"}, ["vocab_size", "whole number"]),
        ({"hidden_size": -4096}, ["hidden_size", "-4096"]),
        ({"hidden_size": 0}, ["hidden_size"]),
        ({"hidden_size": float("nan")}, ["hidden_size"]),
        ({"hidden_size": 64.5}, ["hidden_size"]),
        ({"hidden_size": True}, ["hidden_size"]),
        ({"hidden_size": 10**40}, ["hidden_size", "digits"]),
        ({"num_hidden_layers": 10**6}, ["num_hidden_layers", "10000"]),
        ({"num_attention_heads": 3}, ["num_attention_heads", "divide"]),
        ({"num_key_value_heads": 3}, ["num_key_value_heads", "divide"]),
        ({"layer_types": ["full_attention", "hyena"]}, ["layer_types", "hyena"]),
        ({"layer_types": ["full_attention"]}, ["layer_types", "1 entries", "2 layers"]),
        ({"layer_types": "full_attention"}, ["layer_types", "list"]),
        ({"hybrid_override_pattern": "MX"}, ["hybrid_override_pattern", "'X'"]),
        ({"hybrid_override_pattern": "M"}, ["hybrid_override_pattern", "1 layers"]),
        ({"layer_types": ["sliding_attention"] * 2}, ["sliding_window", "missing"]),
        ({"num_experts": 4, "num_experts_per_tok": 8}, ["num_experts_per_tok", "8", "4"]),
        ({"num_experts": 4}, ["num_experts_per_tok", "missing"]),
        ({"mamba_d_state": 16}, ["mamba_d_state"]),
        ({"attn_type_list": [1, 0]}, ["attn_type_list", "lightning"]),
        ({"tie_word_embeddings": "yes"}, ["tie_word_embeddings", "true or false"]),
        ({"torch_dtype": "posit16"}, ["torch_dtype", "posit16"]),
        ({"torch_dtype": 16}, ["torch_dtype"]),
        ({"text_config": {"hidden_size": 5}}, ["text_config", "missing"]),
        ({"draft_vocab_size": 2000}, ["draft_vocab_size", "larger"]),
        ({"model_type": ["llama"]}, ["model_type"]),
    ],
)
def test_bad_values_are_refused_by_name(change: dict[str, Any], words: list[str]) -> None:
    message = refusal(llama(64, 2, 4, 2, 128, 1000) | change)
    assert all(word in message for word in words), message
    assert len(message) < 400


def test_nesting_without_end_is_refused() -> None:
    config = llama(64, 2, 4, 2, 128, 1000)
    for _ in range(2000):
        config = {"deeper": config}
    assert "nested" in refusal(config)


def test_unknown_types_and_sizes_warn() -> None:
    model = read(llama(64, 2, 4, 2, 128, 1000, model_type="brand_new"))
    assert "brand_new" in model.warnings[0]
    model = read(llama(64, 2, 4, 2, 128, 1000, v_lora_rank=64))
    assert "v_lora_rank" in model.warnings[0]
    assert not read(llama(64, 2, 4, 2, 128, 1000, vision_config=None, rope_scaling={"factor": 8})).warnings


def test_layer_limit_is_reached_quickly() -> None:
    assert read(llama(64, 10_000, 4, 2, 128, 1000)).num_layers == 10_000


# --- finding ---


def test_a_folder_of_hugging_faces_cache_is_its_newest_commit(tmp_path: Path) -> None:
    """The model goes by its own name, by which its public draft is found, whichever of the two folders is given."""
    cache = tmp_path / "models--Qwen--Qwen3-8B"
    (cache / "blobs").mkdir(parents=True)
    for place, (commit, layers) in enumerate((("aaaa", 30), ("0000", 36))):
        blob = cache / "blobs" / commit
        blob.write_text(json.dumps({**load_config("Qwen3-8B"), "num_hidden_layers": layers}))
        os.utime(blob, (1e9 + place, 1e9 + place))
        (cache / "snapshots" / commit).mkdir(parents=True)
        (cache / "snapshots" / commit / "config.json").symlink_to(blob)
    for folder, layers in ((cache, 36), (cache / "snapshots" / "aaaa", 30)):
        model = load_model(folder)
        assert (model.name, model.num_layers) == ("Qwen3-8B", layers)


def test_presets_folders_and_files(tmp_path: Path) -> None:
    for name in ("Kimi-K2.5", "kimi-k2.5", "moonshotai/Kimi-K2.5", "MOONSHOTAI/kimi-k2.5"):
        assert load_model(name).name == "Kimi-K2.5"
    config = tmp_path / "my-model" / "config.json"
    config.parent.mkdir()
    config.write_text(json.dumps(llama(64, 2, 4, 2, 128, 1000)))
    for place in (config.parent, config):
        model = load_model(str(place))
        assert (model.name, model.source) == ("my-model", str(config))
    assert load_config(str(config))["hidden_size"] == 64


@pytest.mark.parametrize(
    ("content", "words"),
    [("{", ["not JSON", "line 1"]), ('{\n "a": 1,\n}', ["not JSON", "line 3"]), ("[1]", ["list", "object"]),
     ("3", ["a number", "object"]), ("null", ["is null", "object"]), ("", ["is empty"]), ("{}", ["hidden_size"]), ("[" * 5000, ["nested"])],
)  # fmt: skip
def test_bad_files_are_refused(tmp_path: Path, content: str, words: list[str]) -> None:
    path = tmp_path / "config.json"
    path.write_text(content)
    with pytest.raises(InputError) as caught:
        load_model(str(tmp_path))
    assert all(word in str(caught.value) for word in [*words, str(path)])


def test_missing_places_are_refused(tmp_path: Path) -> None:
    for place, words in (
        (str(tmp_path), "no config.json"),
        (str(tmp_path / "none.json"), "no such file"),
        ("/models/mine", "/models/mine: no such folder or file; give a preset or the folder of a config.json"),
        ("./my-model", "by --model or --draft where a launch line names this path"),
        ("Kimi-K25", "did you mean 'Kimi-K2.5'"),
        ("", "no model"),
        ("a\0b", "no path|no model"),
        ("x" * 10_000, "no path"),
    ):
        with pytest.raises(InputError, match=words):
            load_model(place)


# --- whatever comes ---

JUNK = st.one_of(
    st.none(), st.booleans(), st.integers(-3, 130), st.sampled_from([10**6, 10**9, 10**30]), st.floats(),
    st.text(max_size=12), st.lists(st.integers(-1, 3), max_size=70), st.lists(st.text(max_size=3), max_size=3),
    st.dictionaries(st.text(max_size=4), st.integers(), max_size=2),
)  # fmt: skip


def places(value: Any, at: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Every path into a config, lists entered at their first two entries."""
    inner = value.items() if isinstance(value, dict) else enumerate(value[:2]) if isinstance(value, list) else ()
    return [p for key, each in inner for p in ((*at, key), *places(each, (*at, key)))]


CONFIGS = [load_config(preset.name) for preset in list_presets()] + [config for config, _, _ in PUBLISHED.values()]


@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])
@given(st.data())
def test_a_damaged_config_is_a_model_or_a_refusal(data: st.DataObject) -> None:
    config = copy.deepcopy(data.draw(st.sampled_from(CONFIGS)))
    for _ in range(data.draw(st.integers(1, 3))):
        path = data.draw(st.sampled_from(places(config)))
        holder = config
        for key in path[:-1]:
            holder = holder[key]
        if data.draw(st.booleans()):
            holder.pop(path[-1])
        else:
            holder[path[-1]] = data.draw(JUNK)
        if not config:
            break
    try:
        model = model_from_config(config, name="damaged", source="damaged.json")
    except InputError as error:
        message = str(error)
        assert "\n" not in message and len(message) < 600  # noqa: PT018
        return
    assert model.total_parameters >= model.active_parameters > 0
    assert 0 < model.weight_bytes < float("inf")
    assert model.kv_bytes_per_token() >= 0
    if model.mtp_layers:
        assert mtp_draft(model).total_parameters > 0


def test_weights_of_32_bits_are_priced_as_engines_serve_them():
    """Both engines' --dtype auto serves what is stored as float32 in 16 bits."""
    plain, wide = (
        model_from_config(llama(512, 2, 8, 2, 1024, 1000, torch_dtype=kind), name="m", source="m")
        for kind in ("bfloat16", "float32")
    )
    assert wide == plain
    assert any("stored in 32 bits" in text for text in wide.warnings)
    assert not plain.warnings
