"""Layer families: from the keys of a config.json to the projections, caches and experts of one layer.

One function a family of mixer (attention or recurrence) and of feed-forward. Each reads its own Hugging Face keys, so
a key is read in one place. `FAMILIES` holds what no key says: biases, norms and module names of an architecture.
Never sizes.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from specsim.formats import Scheme
from specsim.keys import Keys
from specsim.models import Attention, Experts, Format, Layer, Projection


@dataclass(frozen=True)
class Family:
    """What an architecture's code fixes and its config does not say."""

    qk_norm: str = ""  # "": none, "head": over each head, "full": over all heads together
    qkv_bias: bool = False
    norms: int = 2  # norms around mixer and feed-forward
    gated: bool = True  # gate, up and down; else up and down
    tied: bool = False  # when tie_word_embeddings is absent
    moe: bool = False  # there is no dense model of this family
    shared_experts: int = 0  # shared experts that no key announces, of the routed size
    query_gate: bool = False  # the query projection yields a gate as well
    expert_bias: bool = False
    sinks: bool = False
    linear: str = "gdn"  # the mixer of its linear layers
    twofold: bool = False  # a layer is two of mixer and dense feed-forward, with experts beside the second (LongCat)
    windows: str = ""  # "alternate": sliding_window on every other layer; "off": the key is not used
    attention: str = "self_attn"
    ffn: str = "mlp"
    router: str = "gate"
    matrices: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj")
    root: str = "model.layers"
    defaults: Mapping[str, Any] = field(default_factory=dict)  # of the configuration class, for keys left out


_QWEN3 = Family(qk_norm="head")
_QWEN_NEXT = Family(qk_norm="head", query_gate=True)
_QWEN2 = Family(qkv_bias=True)
_GLM4 = Family(norms=4)
_GEMMA = Family(tied=True)
_GEMMA3 = Family(tied=True, norms=4, qk_norm="head")
_W123 = ("w1", "w3", "w2")
_BLOCK_MOE = Family(moe=True, ffn="block_sparse_moe", matrices=_W123)
_LIGHTNING = Family(moe=True, ffn="block_sparse_moe", matrices=_W123, linear="lightning")
_NEMOTRON_H = Family(gated=False, attention="mixer", ffn="mixer", root="backbone.layers")
_PLAIN = Family()
_UNGATED = Family(gated=False)

FAMILIES: dict[str, Family] = {
    "llama": _PLAIN,
    "mistral": _PLAIN,
    "ministral": _PLAIN,
    "mistral3": _PLAIN,
    "yi": _PLAIN,
    "exaone4": Family(qk_norm="head"),
    "exaone_moe": Family(moe=True, qk_norm="head"),
    "afmoe": Family(moe=True, qk_norm="head", norms=4, query_gate=True),
    "solar_open": Family(moe=True),
    "grok_1": Family(moe=True, norms=4),
    "seed_oss": _PLAIN,
    "nemotron": _UNGATED,
    "nemotron-nas": _PLAIN,
    "nemotron_h": _NEMOTRON_H,
    "mixtral": _BLOCK_MOE,
    "phi3": _PLAIN,
    "phi4": _PLAIN,
    "phimoe": _BLOCK_MOE,
    "smollm3": Family(tied=True),
    "internlm2": _PLAIN,
    "internlm3": _PLAIN,
    "stablelm": _PLAIN,
    "minicpm": _GEMMA,
    "cohere": Family(tied=True, norms=1),
    "cohere2": Family(tied=True, norms=1),
    "starcoder2": _UNGATED,
    "gpt_neox": _UNGATED,
    "phi": _UNGATED,
    "arcee": _UNGATED,
    "apertus": Family(gated=False, qk_norm="head"),
    "olmo2": Family(qk_norm="full"),
    "olmo3": Family(qk_norm="full"),
    "olmoe": Family(qk_norm="full", moe=True),
    "qwen2": _QWEN2,
    "qwen2_vl": _QWEN2,
    "qwen2_vl_text": _QWEN2,
    "qwen2_5_vl": _QWEN2,
    "qwen2_5_vl_text": _QWEN2,
    "qwen2_moe": Family(qkv_bias=True, moe=True),
    "qwen3": _QWEN3,
    "qwen3_vl_text": _QWEN3,
    "qwen3_moe": Family(qk_norm="head", moe=True),
    "qwen3_vl_moe_text": Family(qk_norm="head", moe=True),
    "qwen3_omni_moe_text": Family(qk_norm="head", moe=True),
    "qwen3_next": _QWEN_NEXT,
    "qwen3_5": _QWEN_NEXT,
    "qwen3_5_text": _QWEN_NEXT,
    "qwen3_5_moe": _QWEN_NEXT,
    "qwen3_5_moe_text": _QWEN_NEXT,
    "gemma": _GEMMA,
    "gemma2": Family(tied=True, norms=4, windows="alternate"),
    "gemma3_text": Family(tied=True, norms=4, qk_norm="head", defaults={
        "vocab_size": 262208, "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256,
        "sliding_window": 4096, "sliding_window_pattern": 6}),
    "gemma3n_text": Family(tied=True, norms=4, qk_norm="head"),
    "gemma4_text": _GEMMA3,
    "glm": Family(qkv_bias=True),
    "glm4": _GLM4,
    "glm4v_text": _GLM4,
    "glm4_moe": Family(moe=True),
    "glm4v_moe_text": Family(moe=True),
    "glm4_moe_lite": Family(moe=True),
    "glm_moe_dsa": Family(moe=True),
    "deepseek_v2": Family(moe=True, defaults={"topk_method": "greedy"}),
    "deepseek_v3": Family(moe=True),
    "deepseek_v32": Family(moe=True),
    "deepseek_v4": Family(moe=True, attention="attn", ffn="ffn", matrices=_W123, root="layers"),
    "deepseek_ref": Family(moe=True, attention="attn", ffn="ffn", matrices=_W123, root="layers"),
    "kimi_k2": Family(moe=True),
    "kimi_linear": Family(moe=True),
    "longcat_flash": Family(moe=True, twofold=True),
    "gpt_oss": Family(moe=True, expert_bias=True, sinks=True, router="router"),
    "minimax_m2": Family(moe=True, ffn="block_sparse_moe", matrices=_W123),
    "minimax_m3": Family(moe=True, ffn="block_sparse_moe", matrices=_W123),
    "minimax_m3_text": Family(moe=True, ffn="block_sparse_moe", matrices=_W123),
    "minimax": _LIGHTNING,
    "minimax_m1": _LIGHTNING,
    "minimax_text_01": _LIGHTNING,
    "llama4_text": Family(moe=True, shared_experts=1, ffn="feed_forward", router="router"),
    "llama4": Family(moe=True, shared_experts=1, ffn="feed_forward", router="router"),
    "dots1": Family(moe=True, qk_norm="head"),
    "ernie4_5": _GEMMA,
    "ernie4_5_moe": Family(moe=True, tied=True),
    "hunyuan_v1_dense": Family(qk_norm="head"),
    "hunyuan_v1_moe": Family(moe=True, qk_norm="head"),
    "step3p5": Family(moe=True, qk_norm="head"),
    "step3p7": Family(moe=True, qk_norm="head"),
    "mimo": _QWEN2,
    "mimo_v2_flash": Family(moe=True),
    "bailing_moe": Family(moe=True),
    "bailing_moe_v2": Family(moe=True, qk_norm="head"),
    "bailing_moe_linear": Family(moe=True, qk_norm="head", linear="lightning"),
    "step3_text": Family(moe=True),
    "jamba": Family(attention="mamba", ffn="feed_forward", router="router"),
    "granite": _PLAIN,
    "granitemoe": Family(moe=True, ffn="block_sparse_moe"),
    "granitemoeshared": Family(moe=True, ffn="block_sparse_moe"),
    "granitemoehybrid": Family(tied=True, ffn="block_sparse_moe"),
    "bamba": Family(),
    "lfm2": Family(tied=True, qk_norm="head", ffn="feed_forward", matrices=_W123),
    "lfm2_moe": Family(tied=True, moe=True, qk_norm="head", ffn="feed_forward", matrices=_W123),
}  # fmt: skip

EXPERT_COUNTS = ("n_routed_experts", "num_experts", "num_local_experts", "moe_num_experts", "num_routed_experts")
EXPERTS_PER_TOKEN = ("num_experts_per_tok", "num_experts_per_token", "experts_per_token", "top_k_experts", "moe_k",
                     "moe_top_k", "moe_topk", "moe_router_topk")  # fmt: skip
SHARED_COUNTS = ("n_shared_experts", "num_shared_experts", "moe_num_shared_experts", "num_shared_expert")
SHARED_SIZES = ("shared_expert_intermediate_size", "moe_shared_expert_intermediate_size", "shared_intermediate_size",
                "share_expert_dim", "share_expert_dims")  # fmt: skip
BIASED = "noaux_tc"  # the topk_method that learns a bias for each expert; one kernel chooses then
EXPERT_SIZES = ("moe_intermediate_size", "expert_intermediate_size", "expert_ffn_hidden_size", "moe_ffn_hidden_size")


@dataclass(frozen=True)
class Plan:
    """What one layer consists of: names of a mixer and a feed-forward, and what varies among layers of one model."""

    mixer: str = "gqa"  # "", gqa, mla, csa, gdn, lightning, kda, mamba1, mamba2, conv
    ffn: str = "dense"  # "", dense, moe, both
    window: int | None = None
    local: bool = False  # a sliding or chunked layer, which may have its own head sizes
    chunked: bool = False
    shares_kv: bool = False
    ratio: int = 0  # DeepSeek-V4: tokens folded into one cache entry, 0 for a window alone
    indexer: str = "full"  # "full", "shared" (uses the choice of another layer) or "" for none
    kv_heads: int = 0  # when layers differ
    intermediate: int = 0  # when layers differ


@dataclass(frozen=True)
class Mixer:
    """The mixer part of a layer: what `Layer` needs of it."""

    label: str = ""
    attention: Attention | None = None
    projections: tuple[Projection, ...] = ()
    norms: int = 0  # norms inside the mixer
    norm_parameters: int = 0
    other_parameters: int = 0


@dataclass(frozen=True)
class FeedForward:
    label: str = ""
    projections: tuple[Projection, ...] = ()
    experts: Experts | None = None
    other_parameters: int = 0


class Builder:
    """Builds layers of one model. `width` is 2 in a drafter's layer whose mixer reads embedding and hidden state."""

    def __init__(self, keys: Keys, family: Family, scheme: Scheme, hidden: int, *, wrapped: bool = False) -> None:
        self.keys = keys
        self.family = family
        self.scheme = scheme
        self.hidden = hidden
        self.width = 1
        self.layer: int | None = None
        roots = [family.root, "model.layers"]
        if wrapped:
            roots += ["language_model.model.layers", "model.language_model.layers"]
        self.roots = tuple(dict.fromkeys(roots))
        self.aliases: tuple[str, ...] = ()  # further prefixes, for MTP layers
        self._formats: dict[tuple[str, str, int | None], Format] = {}
        self.built: dict[tuple[Plan, int | None], Layer] = {}  # for whoever builds many equal layers

    def format(self, module: str, part: str = "linear") -> Format:
        """The storage format of a module of the current layer, such as "self_attn.q_proj"; "a|b" gives two names of it."""
        key = (module, part, self.layer if self.aliases else self.scheme.layer_key(self.layer or 0))
        if key not in self._formats:
            number = self.layer or 0
            starts = (*(f"{root}.{number}." for root in self.roots), *self.aliases)
            names = [f"{start}{each}" for start in starts for each in module.split("|")]
            self._formats[key] = self.scheme.format(names, number, part=part)
        return self._formats[key]

    def one(self, name: str, inputs: int, outputs: int, module: str, *, split: str = "column", bias: bool = False,
            part: str = "linear", count: int = 1) -> Projection:  # fmt: skip
        return Projection(name, inputs, outputs, self.format(module, part), split, bias, count)

    def fused(self, name: str, inputs: int, parts: Iterable[tuple[str, int]], *, split: str = "column",
              bias: bool = False) -> tuple[Projection, ...]:  # fmt: skip
        """Matrices over the same input, as (module, outputs): one kernel when stored alike, else one each."""
        parts = [p for p in parts if p[1]]
        formats = {self.format(module) for module, _ in parts}
        if len(formats) == 1:
            return (Projection(name, inputs, sum(n for _, n in parts), formats.pop(), split, bias),)
        return tuple(
            self.one(m.split("|")[0].rsplit(".", 1)[-1], inputs, n, m, split=split, bias=bias) for m, n in parts
        )

    def build(self, plan: Plan) -> Layer:
        """The layer that a plan describes. Raises InputError for a missing or impossible size."""
        mixer = MIXERS[plan.mixer](self, plan) if plan.mixer else Mixer()
        dense = dense_ffn(self, plan) if plan.ffn in ("dense", "both") else FeedForward()
        routed = moe_ffn(self, plan) if plan.ffn in ("moe", "both") else FeedForward()
        outer = self.family.norms * (bool(plan.mixer) + bool(plan.ffn)) // 2
        if plan.ffn == "both" and self.keys.flag("enable_moe_block"):
            outer += 3  # Gemma-4 norms the dense and the routed branch apart
        label = "+".join(x for x in (mixer.label, dense.label, routed.label) if x)
        return Layer(
            kind=label,
            attention=mixer.attention,
            mixer=mixer.projections,
            ffn=dense.projections + routed.projections,
            experts=routed.experts,
            norms=outer + mixer.norms,
            norm_parameters=outer * self.hidden + mixer.norm_parameters,
            other_parameters=mixer.other_parameters + routed.other_parameters,
        )


# --- mixers ---


def head_shape(builder: Builder, plan: Plan) -> tuple[int, int, int, int]:
    """(heads, KV heads, head size, value head size) of a layer with per-head keys and values."""
    keys = builder.keys
    heads = keys.whole("num_attention_heads", maximum=65536)
    kv = plan.kv_heads or keys.whole("num_key_value_heads", "num_attention_groups", default=heads, maximum=65536)
    size = keys.optional("head_dim", "attention_head_dim", maximum=65536)
    value = keys.optional("v_head_dim", maximum=65536)
    if plan.local:
        heads = keys.whole("swa_num_attention_heads", default=heads, maximum=65536)
        kv = keys.whole("swa_num_key_value_heads", default=kv, maximum=65536)
        size = keys.optional("swa_head_dim", maximum=65536) or size
        value = keys.optional("swa_v_head_dim", maximum=65536) or value
        other = keys.nested("attention_other_setting")
        if other is not None:
            heads = other.whole("num_attention_heads", default=heads, maximum=65536)
            kv = other.whole("num_attention_groups", default=kv, maximum=65536)
            size = other.optional("head_dim", maximum=65536) or size
    else:
        kv = keys.whole("num_global_key_value_heads", default=kv, maximum=65536)
        size = keys.optional("global_head_dim", maximum=65536) or size
    if size is None:
        if builder.hidden % heads:
            raise keys.fail("num_attention_heads", f"{heads} heads do not divide a hidden size of {builder.hidden}",
                            "correct one of them, or give head_dim")  # fmt: skip
        size = builder.hidden // heads
    if heads % kv:
        raise keys.fail("num_key_value_heads", f"{heads} heads do not divide over {kv} KV heads", "correct one of them")
    return heads, kv, size, value or size


def gqa(builder: Builder, plan: Plan) -> Mixer:
    """Grouped-query attention, full, sliding or chunked; with a block-sparse indexer when the config has one."""
    keys, family, hidden = builder.keys, builder.family, builder.hidden
    heads, kv, size, value = head_shape(builder, plan)
    at = f"{family.attention if family.attention == 'mixer' else 'self_attn'}."
    bias = family.qkv_bias or keys.flag("attention_bias") or keys.flag("qkv_bias")
    no_values = keys.flag("attention_k_eq_v") and not plan.local
    gate = (
        heads * size if family.query_gate or keys.flag("attn_output_gate") or keys.flag("attention_output_gate") else 0
    )
    k, v = (0, 0) if plan.shares_kv else (kv * size, 0 if no_values else kv * value)
    fused = f"|{at}qkv_proj"
    parts = [(f"{at}q_proj{fused}", heads * size + gate), (f"{at}k_proj{fused}", k), (f"{at}v_proj{fused}", v)]
    inputs = builder.width * hidden
    if rank := keys.optional("share_q_dim"):  # Step-3: queries through a low rank that all heads share
        parts[0] = (f"{at}q_proj", rank)
    projections = list(builder.fused("qkv", inputs, parts, bias=bias))
    if len(projections) == 1 and k:
        only = projections[0]
        projections = [Projection("qkv", inputs, only.outputs, only.format, "column", bias, 1, k + v, kv)]
    else:
        projections = [
            p if p.name == "q_proj" or not k else Projection(p.name, p.inputs, p.outputs, p.format, "column", bias, 1, p.outputs, kv)
            for p in projections
        ]  # fmt: skip
    if rank:
        projections.append(builder.one("q_b", rank, heads * size, f"{at}wq"))
    if keys.flag("use_head_wise_attn_gate"):
        projections.append(builder.one("head_gate", hidden, heads, f"{at}g_proj"))
    o_bias = keys.flag("attention_bias") and not family.qkv_bias and not re.match("glm4v?_moe", keys.text("model_type"))
    projections.append(builder.one("o", heads * value, hidden, f"{at}o_proj", split="row", bias=o_bias))
    norms = norm_parameters = 0
    normed = family.qk_norm
    if not normed and keys.flag("use_qk_norm") and not keys.text("model_type").startswith("llama4"):
        normed = "full" if keys.text("qk_norm_type") == "per_layer" else "head"
    if normed:
        norms = 0 if normed == "head" else 1 if plan.shares_kv else 2
        norm_parameters = (heads + kv) * size if normed == "full" else 2 * size
    sinks = (
        heads
        if family.sinks or keys.flag("add_swa_attention_sink_bias" if plan.local else "add_full_attention_sink_bias")
        else 0
    )
    sparse, index_heads, index_dim = None, 0, 0
    chosen = keys.nested("sparse_attention_config")
    if plan.indexer == "full" and chosen is not None:
        index_heads = chosen.whole("sparse_num_index_heads")
        index_dim = chosen.whole("sparse_index_dim")
        sparse = chosen.whole("sparse_topk_blocks") * chosen.whole("sparse_block_size")
        projections += builder.fused("index_qk", hidden, [(f"{at}index_q_proj", index_heads * index_dim), (f"{at}index_k_proj", index_dim)], split="none")  # fmt: skip
    attention = Attention(
        "gqa", heads, kv, size, 0 if value == size else value, window=plan.window, sparse_tokens=sparse,
        index_heads=index_heads, index_dim=index_dim, shares_kv=plan.shares_kv, head_norms=normed == "head",
    )  # fmt: skip
    label = "chunked" if plan.chunked else "swa" if plan.window else "sparse" if sparse else "gqa"
    return Mixer(label, attention, tuple(projections), norms, norm_parameters, sinks)


def mla(builder: Builder, plan: Plan) -> Mixer:
    """Multi-head latent attention, absorbed: the K and V up-projections are applied to queries and outputs.

    With index_topk, an indexer picks the tokens to read (DeepSeek sparse attention).
    """
    keys, hidden = builder.keys, builder.hidden
    at = f"{builder.family.attention}."
    heads = keys.whole("num_attention_heads", maximum=65536)
    for key in ("num_key_value_heads", "head_dim"):
        keys.optional(key, maximum=65536)  # left over from the configuration class: no cache head is a latent's
    latent = keys.whole("kv_lora_rank")
    nope, rope = keys.whole("qk_nope_head_dim"), keys.whole("qk_rope_head_dim", minimum=0)
    value = keys.whole("v_head_dim")
    rank = keys.optional("q_lora_rank", minimum=0)
    inputs = builder.width * hidden
    projections: list[Projection]
    norm_parameters = latent
    if rank:
        parts = [(f"{at}q_a_proj", rank), (f"{at}kv_a_proj_with_mqa", latent + rope)]
        projections = [*builder.fused("qkv_a", inputs, parts, split="none"),
                       builder.one("q_b", rank, heads * (nope + rope), f"{at}q_b_proj")]  # fmt: skip
        norm_parameters += rank
    else:
        projections = [builder.one("q", inputs, heads * (nope + rope), f"{at}q_proj"),
                       builder.one("kv_a", inputs, latent + rope, f"{at}kv_a_proj_with_mqa", split="none")]  # fmt: skip
    projections += [builder.one("k_absorbed", latent, heads * nope, f"{at}kv_b_proj"),
                    builder.one("v_absorbed", latent, heads * value, f"{at}kv_b_proj")]  # fmt: skip
    if keys.flag("mla_use_output_gate"):
        projections.append(builder.one("output_gate", hidden, heads * value, f"{at}g_proj"))
    projections.append(builder.one("o", heads * value, hidden, f"{at}o_proj", split="row"))
    topk = keys.optional("index_topk")
    index_heads = index_dim = 0
    if topk and plan.indexer == "full":
        index_heads, index_dim = keys.whole("index_n_heads"), keys.whole("index_head_dim")
        if rank is None:
            raise keys.fail(
                "q_lora_rank", "the key is missing, and an indexer (index_topk) needs it", "add q_lora_rank"
            )
        projections += [
            builder.one("index_q", rank, index_heads * index_dim, f"{at}indexer.wq_b", split="none"),
            builder.one("index_k", hidden, index_dim, f"{at}indexer.wk", split="none"),
            builder.one("index_weights", hidden, index_heads, f"{at}indexer.weights_proj", split="none", part="plain"),
        ]
        norm_parameters += 2 * index_dim
    attention = Attention(
        "mla", heads, 1, nope + rope, value, latent, rope, plan.window, topk, index_heads, index_dim
    )  # fmt: skip
    label = "mla" if not topk else "dsa" if index_heads else "dsa-shared"
    return Mixer(label, attention, tuple(projections), 2 if rank else 1, norm_parameters)


def compressed_attention(builder: Builder, plan: Plan) -> Mixer:
    """DeepSeek-V4: one shared key and value head, a window of raw tokens, and beyond it entries of `ratio` tokens each.

    A ratio of 4 has an indexer over its entries; larger ratios read all of them; 0 has the window alone. The weights
    of hyper-connections are counted here as well.
    """
    keys, hidden = builder.keys, builder.hidden
    at = f"{builder.family.attention}."
    heads, size = keys.whole("num_attention_heads", maximum=65536), keys.whole("head_dim")
    rope, rank = keys.whole("qk_rope_head_dim"), keys.whole("q_lora_rank")
    keys.optional("num_key_value_heads", maximum=1)
    groups, out_rank = keys.whole("o_groups", maximum=65536), keys.whole("o_lora_rank")
    if rope > size:
        raise keys.fail("qk_rope_head_dim", f"{rope} is larger than head_dim, {size}", "correct one of them")
    if (heads * size) % groups:
        raise keys.fail("o_groups", f"{groups} groups do not divide {heads} heads of {size}", "correct one of them")
    projections = [
        *builder.fused("q_a_kv", hidden, [(f"{at}wq_a", rank), (f"{at}wkv", size)], split="none"),
        builder.one("q_b", rank, heads * size, f"{at}wq_b"),
        builder.one("o_a", heads * size // groups, out_rank, f"{at}wo_a", count=groups),
        builder.one("o_b", groups * out_rank, hidden, f"{at}wo_b", split="row"),
    ]
    ratio, topk, index_heads, index_dim = plan.ratio, None, 0, 0
    other = heads  # attention sinks
    if ratio:
        overlap = 2 if ratio == 4 else 1
        parts = [(f"{at}compressor.wkv", overlap * size), (f"{at}compressor.wgate", overlap * size)]
        projections += builder.fused("compressor", hidden, parts, split="none")
        other += ratio * overlap * size + size
        if ratio == 4:
            topk, index_heads, index_dim = (
                keys.whole("index_topk"),
                keys.whole("index_n_heads"),
                keys.whole("index_head_dim"),
            )
            parts = [
                (f"{at}indexer.compressor.wkv", overlap * index_dim),
                (f"{at}indexer.compressor.wgate", overlap * index_dim),
            ]
            projections += [
                builder.one("index_q", rank, index_heads * index_dim, f"{at}indexer.wq_b", split="none"),
                builder.one(
                    "index_weights", hidden, index_heads, f"{at}indexer.weights_proj", split="none", part="plain"
                ),
                *builder.fused("index_compressor", hidden, parts, split="none"),
            ]
            other += ratio * overlap * index_dim + index_dim
    streams = keys.optional("hc_mult", maximum=64) or 0
    other += 2 * (streams * (2 + streams) * streams * hidden + streams * (2 + streams) + 3)
    attention = Attention(
        "mla", heads, 1, size, size, size - rope, rope, keys.optional("sliding_window"), topk, index_heads, index_dim,
        compress=ratio or 1,
    )  # fmt: skip
    label = "csa" if ratio == 4 else "hca" if ratio else "swa"
    return Mixer(label, attention, tuple(projections), 2, rank + size, other)


def gated_delta(builder: Builder, plan: Plan) -> Mixer:
    """Gated delta net (Qwen3-Next and later): a state of value heads x key size x value size, and a convolution."""
    keys, hidden = builder.keys, builder.hidden
    k_heads, v_heads = (
        keys.whole("linear_num_key_heads", maximum=65536),
        keys.whole("linear_num_value_heads", maximum=65536),
    )
    k_size, v_size = keys.whole("linear_key_head_dim"), keys.whole("linear_value_head_dim")
    kernel = keys.whole("linear_conv_kernel_dim", default=4, maximum=1024)
    key, value = k_heads * k_size, v_heads * v_size
    fused = "|linear_attn.in_proj_qkvz"
    qkvz = [(f"linear_attn.in_proj_qkv{fused}", 2 * key + value), (f"linear_attn.in_proj_z{fused}", value)]
    projections = (
        *builder.fused("in_qkvz", hidden, qkvz),
        builder.one("in_ba", hidden, 2 * v_heads, "linear_attn.in_proj_b|linear_attn.in_proj_ba"),
        builder.one("out", value, hidden, "linear_attn.out_proj", split="row"),
    )
    state = v_heads * k_size * v_size + (2 * key + value) * (kernel - 1)
    attention = Attention("linear", v_heads, k_heads, k_size, v_size, state_values=state)
    return Mixer("gdn", attention, projections, 1, v_size, (2 * key + value) * kernel + 2 * v_heads)


def lightning(builder: Builder, plan: Plan) -> Mixer:
    """Lightning attention (MiniMax-01 and -M1, Ring-linear): a state of head size squared a head that decays at a fixed rate,
    with as many key heads as query heads, and a gate on its normed output."""
    keys, hidden = builder.keys, builder.hidden
    heads = keys.whole("num_attention_heads", maximum=65536)
    size = keys.whole("head_dim", default=max(1, hidden // heads), maximum=65536)
    inner, at = heads * size, f"{builder.family.attention}."
    projections = (
        builder.one("qkv", hidden, 3 * inner, f"{at}qkv_proj|{at}query_key_value"),
        builder.one("gate", hidden, inner, f"{at}output_gate|{at}g_proj"),
        builder.one("o", inner, hidden, f"{at}out_proj|{at}dense", split="row"),
    )
    attention = Attention("linear", heads, heads, size, size, state_values=heads * size * size)
    return Mixer("lightning", attention, projections, 1, inner)


def kda(builder: Builder, plan: Plan) -> Mixer:
    """Kimi delta attention: per-channel decay, one state of head size squared a head, three short convolutions."""
    hidden = builder.hidden
    keys = builder.keys.nested("linear_attn_config")
    if keys is None:
        raise builder.keys.fail("linear_attn_config", "the key is missing", "KDA layers need it")
    heads, size = keys.whole("num_heads", maximum=65536), keys.whole("head_dim")
    kernel = keys.whole("short_conv_kernel_size", default=4, maximum=1024)
    inner, at = heads * size, "self_attn."
    projections = [
        *builder.fused("qkv", hidden, [(f"{at}q_proj", inner), (f"{at}k_proj", inner), (f"{at}v_proj", inner)]),
        builder.one("decay_a", hidden, size, f"{at}f_a_proj", split="none"),
        builder.one("decay_b", size, inner, f"{at}f_b_proj"),
        builder.one("beta", hidden, heads, f"{at}b_proj"),
    ]
    if keys.flag("use_full_rank_gate"):
        projections.append(builder.one("gate", hidden, inner, f"{at}g_proj"))
    else:
        projections += [builder.one("gate_a", hidden, size, f"{at}g_a_proj", split="none"),
                        builder.one("gate_b", size, inner, f"{at}g_b_proj")]  # fmt: skip
    projections.append(builder.one("o", inner, hidden, f"{at}o_proj", split="row"))
    attention = Attention(
        "linear", heads, heads, size, size, state_values=heads * size * size + 3 * inner * (kernel - 1)
    )
    return Mixer("kda", attention, tuple(projections), 1, size, 3 * inner * kernel + heads + inner)


def mamba2(builder: Builder, plan: Plan) -> Mixer:
    """Mamba-2: one input projection for gate, x, B, C and dt; a state of heads x head size x state size."""
    keys, hidden = builder.keys, builder.hidden
    at = "mixer." if builder.family.attention == "mixer" else "mamba."
    heads = keys.whole("mamba_num_heads", "mamba_n_heads", maximum=65536)
    size = keys.whole("mamba_head_dim", "mamba_d_head")
    groups = keys.whole("n_groups", "mamba_n_groups", default=1, maximum=65536)
    state = keys.whole("ssm_state_size", "mamba_d_state", "state_size")
    kernel = keys.whole("conv_kernel", "mamba_d_conv", default=4, maximum=1024)
    inner = heads * size
    channels = inner + 2 * groups * state
    bias = keys.flag("use_bias") or keys.flag("mamba_proj_bias")
    projections = (
        builder.one("in", hidden, inner + channels + heads, f"{at}in_proj", bias=bias),
        builder.one("out", inner, hidden, f"{at}out_proj", split="row", bias=bias),
    )
    values = inner * state + channels * (kernel - 1)
    attention = Attention("linear", heads, groups, size, state, state_values=values)
    return Mixer("mamba2", attention, projections, 1, inner, channels * (kernel + 1) + 3 * heads)


def mamba1(builder: Builder, plan: Plan) -> Mixer:
    """Mamba (Jamba): a diagonal state of inner size x state size."""
    keys, hidden = builder.keys, builder.hidden
    inner = keys.whole("mamba_expand", default=2, maximum=1024) * hidden
    state = keys.whole("mamba_d_state", default=16, maximum=65536)
    kernel = keys.whole("mamba_d_conv", default=4, maximum=1024)
    rank = keys.whole("mamba_dt_rank")
    projections = (
        builder.one("in", hidden, 2 * inner, "mamba.in_proj"),
        builder.one("x", inner, rank + 2 * state, "mamba.x_proj", split="row"),
        builder.one("dt", rank, inner, "mamba.dt_proj", bias=True),
        builder.one("out", inner, hidden, "mamba.out_proj", split="row"),
    )
    attention = Attention(
        "linear", inner, inner, 1, state, state_values=inner * (state + kernel - 1)
    )  # each channel alone
    return Mixer("mamba", attention, projections, 1, rank + 2 * state, inner * (kernel + 1) + inner * (state + 1))


def short_conv(builder: Builder, plan: Plan) -> Mixer:
    """LFM2's gated short convolution."""
    keys, hidden = builder.keys, builder.hidden
    kernel = keys.whole("conv_L_cache", maximum=1024)
    bias = keys.flag("conv_bias")
    projections = (
        builder.one("in", hidden, 3 * hidden, "conv.in_proj", bias=bias),
        builder.one("out", hidden, hidden, "conv.out_proj", split="row", bias=bias),
    )
    attention = Attention("conv", hidden, hidden, 1, state_values=hidden * (kernel - 1))  # each channel alone
    return Mixer("conv", attention, projections, other_parameters=hidden * kernel)


MIXERS: dict[str, Callable[[Builder, Plan], Mixer]] = {
    "gqa": gqa,
    "mla": mla,
    "csa": compressed_attention,
    "gdn": gated_delta,
    "lightning": lightning,
    "kda": kda,
    "mamba2": mamba2,
    "mamba1": mamba1,
    "conv": short_conv,
}


# --- feed-forward ---


def gated_pair(builder: Builder, name: str, module: str, size: int, *, bias: bool = False, inputs: int = 0,
               matrices: tuple[str, str, str] | None = None) -> tuple[Projection, ...]:  # fmt: skip
    """Up (and gate) and down of one feed-forward of `size`, as two kernels."""
    gate, up, down = matrices or builder.family.matrices
    inputs = inputs or builder.hidden
    if builder.family.gated:
        fused = f"|{module}.gate_up_proj"
        parts = [(f"{module}.{gate}{fused}", size), (f"{module}.{up}{fused}", size)]
        first = builder.fused(f"{name}_gate_up", inputs, parts, bias=bias)
    else:
        first = (builder.one(f"{name}_up", inputs, size, f"{module}.{up}", bias=bias),)
    return (*first, builder.one(f"{name}_down", size, inputs, f"{module}.{down}", split="row", bias=bias))


def dense_ffn(builder: Builder, plan: Plan) -> FeedForward:
    """The dense feed-forward of a layer."""
    keys, family = builder.keys, builder.family
    size = plan.intermediate or dense_size(keys)
    if plan.shares_kv and keys.flag("use_double_wide_mlp"):
        size *= 2
    # Mixtral-like families keep dense layers, where they have any, under "mlp" with the usual names.
    module = "mlp" if family.ffn == "block_sparse_moe" else family.ffn
    matrices = None if module == family.ffn else ("gate_proj", "up_proj", "down_proj")
    found = gated_pair(builder, "ffn", module, size, bias=keys.flag("mlp_bias"), matrices=matrices)
    return FeedForward("dense", found + _per_layer_input(builder))


def _per_layer_input(builder: Builder) -> tuple[Projection, ...]:
    """Gemma-3n and -4: each layer mixes in an embedding of its own. Its share of the projection from the hidden
    state, which engines run once for all layers, counts with the layer. Gemma-3n's low-rank branch (laurel) too."""
    keys, hidden = builder.keys, builder.hidden
    found: tuple[Projection, ...] = ()
    if width := keys.optional("hidden_size_per_layer_input", minimum=0):
        found += (
            builder.one("per_layer_in", hidden, width, "per_layer_model_projection", split="none", part="plain"),
            builder.one("per_layer_gate", hidden, width, "per_layer_input_gate", split="none"),
            builder.one("per_layer_out", width, hidden, "per_layer_projection", split="none"),
        )
    if rank := keys.optional("laurel_rank", minimum=0):
        found += (
            builder.one("laurel_in", hidden, rank, "laurel.linear_left", split="none"),
            builder.one("laurel_out", rank, hidden, "laurel.linear_right", split="none"),
        )
    return found


def dense_size(keys: Keys) -> int:
    """The width of dense feed-forwards: `intermediate_size`, unless a key of its own gives it."""
    if keys.has("block_ff_dim"):  # LFM2: two thirds of it, rounded up
        size = keys.whole("block_ff_dim")
        keys.get("intermediate_size")
        if keys.flag("block_auto_adjust_ff_dim"):
            size = int((keys.number("block_ffn_dim_multiplier") or 1.0) * (2 * size // 3))
            multiple = keys.whole("block_multiple_of", default=256)
            size = -(-size // multiple) * multiple
        return size
    for name in ("dense_intermediate_size", "intermediate_size_mlp"):
        if (size_ := keys.optional(name)) is not None:
            return size_
    if keys.has("shared_intermediate_size") and not any(keys.values.get(n) for n in EXPERT_COUNTS):
        return keys.whole("shared_intermediate_size")
    return keys.whole("intermediate_size", "ffn_hidden_size")


def moe_ffn(builder: Builder, plan: Plan) -> FeedForward:
    """Routed experts with their router, shared experts, and the projections into a latent space where there is one."""
    keys, family, hidden = builder.keys, builder.family, builder.hidden
    count = keys.whole(*EXPERT_COUNTS, maximum=65536)
    chosen = keys.whole(*EXPERTS_PER_TOKEN, maximum=65536)
    if chosen > count:
        raise keys.fail(
            EXPERTS_PER_TOKEN[0], f"{chosen} experts a token, but there are only {count}", "correct one of them"
        )
    idle = keys.optional("zero_expert_num", minimum=0, maximum=65536) or 0  # chosen too, and they return their input
    size = keys.optional(*EXPERT_SIZES) or keys.whole("intermediate_size")
    for key in ("intermediate_size", "intermediate_size_mlp", "dense_intermediate_size"):
        keys.optional(key, minimum=0)  # of dense layers, which a model may describe without having any
    latent = keys.optional("moe_latent_size", "routed_expert_hidden_size")
    gate, up, down = family.matrices
    module = "" if family.ffn == "mlp" and plan.ffn == "both" else f"{family.ffn}."
    names = [gate, up, down] if family.gated else [up, down]
    experts = Experts(
        count=count,
        per_token=max(1, round(chosen * count / (count + idle))),
        inputs=latent or hidden,
        intermediate=size,
        format=_mean([builder.format(f"{module}experts.0.{name}|{module}experts.{name}", "expert") for name in names]),
        gated=family.gated,
        bias=family.expert_bias,
        by_groups=keys.text("topk_method", default=BIASED) != BIASED,
        router=builder.one("router", hidden, count + idle, f"{module}{family.router}", split="none", part="plain",
                           bias=family.expert_bias),
        shared=_shared(builder, module, size),
    )  # fmt: skip
    around: tuple[Projection, ...] = ()
    if latent:  # on the path of the routed experts, unlike shared ones
        around = (
            builder.one("latent_in", hidden, latent, f"{module}fc1_latent_proj", split="none"),
            builder.one("latent_out", latent, hidden, f"{module}fc2_latent_proj", split="none"),
        )
    extra = latent or 0 if keys.flag("latent_moe_use_norm") else 0
    return FeedForward("moe", around, experts, extra)


def _shared(builder: Builder, module: str, size: int) -> tuple[Projection, ...]:
    keys, family, hidden = builder.keys, builder.family, builder.hidden
    count = keys.whole(*SHARED_COUNTS, default=family.shared_experts, minimum=0, maximum=65536)
    gated_output = bool(keys.optional("shared_expert_intermediate_size", minimum=0)) and not count
    own = keys.optional(*SHARED_SIZES, minimum=0)
    width = own * (count or 1) if own is not None else count * size
    name = "shared_expert" if gated_output or family.shared_experts else "shared_experts"
    found: tuple[Projection, ...] = ()
    if width:
        matrices = ("gate_proj", "up_proj", "down_proj") if family.matrices == _W123 and family.ffn != "ffn" else None
        found = gated_pair(builder, "shared", f"{module}{name}", width, matrices=matrices)
        if gated_output:
            found += (builder.one("shared_gate", hidden, 1, f"{module}shared_expert_gate", split="none", part="plain"),)
    return found


def _mean(formats: list[Format]) -> Format:
    """The format of equally large matrices: theirs when equal, else the first one's name with mean bits."""
    if len(set(formats)) == 1:
        return formats[0]
    n = len(formats)
    return Format(formats[0].name, sum(f.bits for f in formats) / n, sum(f.scale_bits for f in formats) / n)
