"""Quantisation: bits by hand, every dialect, and which parts it covers."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from specsim.asked import scenario
from specsim.configs import list_presets, load_config, load_model, model_from_config
from specsim.errors import InputError
from specsim.formats import Patterns, fp8_block, integer, quantised_online, read_scheme
from specsim.keys import Keys
from specsim.models import BF16, Layer, Model

DENSE: dict[str, Any] = {
    "model_type": "llama", "hidden_size": 256, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "intermediate_size": 512, "vocab_size": 1000, "tie_word_embeddings": False,
}  # fmt: skip
MOE: dict[str, Any] = {
    "model_type": "deepseek_v3", "hidden_size": 256, "num_hidden_layers": 3, "first_k_dense_replace": 1,
    "num_attention_heads": 4, "q_lora_rank": 64, "kv_lora_rank": 32, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8,
    "v_head_dim": 16, "intermediate_size": 512, "moe_intermediate_size": 128, "n_routed_experts": 8,
    "n_shared_experts": 1, "num_experts_per_tok": 2, "vocab_size": 1000, "tie_word_embeddings": False,
    "num_nextn_predict_layers": 1,
}  # fmt: skip
NVFP4 = {"type": "float", "num_bits": 4, "group_size": 16}
FP8 = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}


def read(config: dict[str, Any], quantisation: dict[str, Any] | None = None, **options: Any) -> Model:
    config = config if quantisation is None else {**config, "quantization_config": quantisation}
    return model_from_config(config, name="test", source="test.json", **options)


def formats(layer: Layer) -> dict[str, str]:
    """The format's name of each projection of a layer, routed experts as "experts"."""
    found = {p.name: p.format.name for p in layer.projections()}
    return found | ({"experts": layer.experts.format.name} if layer.experts else {})


def bits(quantisation: dict[str, Any], config: dict[str, Any] = DENSE) -> float:
    """Bits a weight, scales included, of the first layer's output projection."""
    found = read(config, quantisation).layers[0][0].mixer[-1].format
    return found.bits + found.scale_bits


def compressed(weights: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {"quant_method": "compressed-tensors", "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights}},
            **more}  # fmt: skip


def quark(weight: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {"quant_method": "quark", "global_quant_config": {"weight": weight, "bias": None}, **more}


@pytest.mark.parametrize(
    ("quantisation", "expected"),
    [
        (FP8, 8 + 32 / (128 * 128)),
        ({"quant_method": "fp8"}, 8),
        ({"quant_method": "fbgemm_fp8"}, 8),
        (compressed({"type": "int", "num_bits": 4, "group_size": 32, "symmetric": True}), 4 + 16 / 32),
        (compressed({"type": "int", "num_bits": 4, "group_size": 128, "symmetric": False}), 4 + 16 / 128 + 4 / 128),
        (compressed({"type": "int", "num_bits": 8, "strategy": "channel"}), 8),
        (compressed({"type": "float", "num_bits": 8, "strategy": "channel"}), 8),
        (compressed({"type": "float", "num_bits": 8, "strategy": "block", "block_structure": [128, 128]}), 8 + 32 / 16384),
        (compressed({"type": "float", "num_bits": 4, "group_size": 16}), 4 + 8 / 16),
        (compressed({"type": "float", "num_bits": 4, "group_size": 32}, format="mxfp4-pack-quantized"), 4 + 8 / 32),
        ({"quant_method": "modelopt", "quant_algo": "NVFP4"}, 4 + 8 / 16),
        ({"quant_algo": "FP8"}, 8),
        ({"quant_method": "modelopt", "quant_algo": "FP8_PB_WO"}, 8 + 32 / 16384),
        ({"quant_method": "modelopt", "quant_algo": "W4A16_AWQ", "group_size": 64}, 4 + 16 / 64),
        ({"quant_method": "modelopt", "quant_algo": "MXFP8"}, 8 + 8 / 32),
        ({"quant_method": "awq", "bits": 4, "group_size": 128, "zero_point": True, "version": "gemm",
          "modules_to_not_convert": None}, 4 + 16 / 128 + 4 / 128),
        ({"quant_method": "awq", "w_bit": 4, "q_group_size": 64, "zero_point": False}, 4 + 16 / 64),
        ({"quant_method": "gptq", "bits": 4, "group_size": 128, "desc_act": False, "sym": True}, 4 + 16 / 128 + 4 / 128),
        ({"quant_method": "gptq", "bits": 8, "group_size": -1}, 8),
        ({"quant_method": "auto-round", "bits": 4, "group_size": 128, "sym": True}, 4 + 16 / 128),
        ({"quant_method": "bitsandbytes", "load_in_4bit": True}, 4 + 32 / 64),
        ({"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_use_double_quant": True},
         4 + 8 / 64 + 32 / (64 * 256)),
        ({"quant_method": "bitsandbytes", "load_in_8bit": True}, 8),
        ({"quant_method": "bitsandbytes"}, 16),
        (quark({"dtype": "fp4", "group_size": 32}), 4 + 8 / 32),
        (quark({"dtype": "fp8_e4m3", "qscheme": "per_tensor"}), 8),
        (quark({"dtype": "uint4", "group_size": 128}), 4 + 16 / 128),
        (quark({"dtype": "fp4", "group_size": 32}, exclude=["*self_attn*"]), 16),
        (quark({"dtype": "fp4"}, layer_quant_config={"*o_proj": {"weight": {"dtype": "fp8_e4m3"}}}), 8),
        ({"quant_method": "mxfp4"}, 16),  # experts only, and there are none
        ({}, 16),
    ],
)  # fmt: skip
def test_bits_a_weight(quantisation: dict[str, Any], expected: float) -> None:
    """4-bit codes in groups of 32 with 16-bit scales are 4.5 bits; a block of 128 x 128 has one 32-bit scale; and so on."""
    assert bits(quantisation) == pytest.approx(expected, rel=1e-12)


def test_helpers() -> None:
    assert fp8_block(128, 128).bytes == pytest.approx(1.000244140625)
    assert integer(4, 32).bytes == 4.5 / 8
    assert integer(4, -1).bytes == 0.5


@pytest.mark.parametrize("key", ["quantization_config", "compression_config"])
@pytest.mark.parametrize("inside", [True, False])
def test_every_place(key: str, inside: bool) -> None:
    """At the top level or inside the text config."""
    text = {**DENSE, key: FP8} if inside else DENSE
    model = read({"model_type": "x", "text_config": text} | ({} if inside else {key: FP8}))
    assert formats(model.layers[0][0]) == {"qkv": "fp8", "o": "fp8", "ffn_gate_up": "fp8", "ffn_down": "fp8"}


def test_a_cache_of_quark_is_in_the_format_that_its_projections_give_out() -> None:
    caches = {"*k_proj": {"output_tensors": {"dtype": "fp8_e4m3"}, "weight": {"dtype": "fp8_e4m3"}}}
    found = read(DENSE, quark({"dtype": "fp8_e4m3"}, kv_cache_quant_config=caches))
    assert (found.kv_format.name, found.head.format, found.quantisation) == ("fp8", BF16, "quark fp8")
    with pytest.raises(InputError, match=r"global_quant_config.weight.dtype'.*fp6_e3m2.*supported: fp4, fp8"):
        read(DENSE, quark({"dtype": "fp6_e3m2"}))


def test_side_file(tmp_path: Path) -> None:
    """A hf_quant_config.json beside the config counts when the config declares nothing, under either of its names."""
    side = {"producer": {"name": "modelopt"}, "quantization": {"quant_algo": "FP8", "kv_cache_quant_algo": "FP8",
                                                               "exclude_modules": ["lm_head"]}}  # fmt: skip
    for config, beside in (("config.json", "hf_quant_config.json"), ("org--x.json", "org--x__hf_quant_config.json")):
        (tmp_path / config).write_text(json.dumps(DENSE))
        (tmp_path / beside).write_text(json.dumps(side))
        model = load_model(str(tmp_path / config))
        assert (model.layers[0][0].mixer[0].format.name, model.kv_format.name) == ("fp8", "fp8")
        assert (model.head.format, model.embedding_format, model.activation) == (BF16, BF16, BF16)
    (tmp_path / "config.json").write_text(json.dumps({**DENSE, "quantization_config": {"quant_method": "fp8"}}))
    assert load_model(str(tmp_path)).kv_format == BF16
    with pytest.raises(InputError, match="quantisation config, not a model's"):
        load_model(str(tmp_path / "hf_quant_config.json"))


def test_kimi_keeps_all_but_routed_experts_in_bf16() -> None:
    model = load_model("Kimi-K2.5")
    (dense, _), (moe, _) = model.layers
    assert set(formats(dense).values()) == {"bf16"}
    assert {k: v for k, v in formats(moe).items() if v != "bf16"} == {"experts": "int4"}
    assert moe.experts is not None
    assert moe.experts.bytes_each == 3 * 7168 * 2048 * 4.5 / 8
    assert (model.head.format.name, model.embedding_format.name, model.activation.name) == ("bf16",) * 3


def test_fp8_keeps_router_head_and_embedding() -> None:
    model = read(MOE, FP8)
    moe = model.layers[1][0]
    assert {k for k, v in formats(moe).items() if v == "bf16"} == {"router"}
    assert (model.head.format, model.embedding_format) == (BF16, BF16)
    assert formats(model.mtp_layers[0][0])["experts"] == "fp8"


def test_ignore_lists_act_layer_by_layer() -> None:
    """NVFP4 with the first layer, all attention of layer 1 and the MTP layer (number 3) left alone."""
    ignore = ["lm_head", "model.layers.0*", "model.layers.1.self_attn*", "model.layers.*.mlp.shared_experts*",
              "model.layers.3*"]  # fmt: skip
    quantisation = {"quant_method": "modelopt", "quant_algo": "NVFP4", "ignore": ignore,
                    "config_groups": {"group_0": {"targets": ["Linear"], "weights": NVFP4}}}  # fmt: skip
    model = read(MOE, quantisation)
    first, second, third = (layer for layer, _ in model.layers)
    assert set(formats(first).values()) == {"bf16"}
    assert {k for k, v in formats(second).items() if v == "nvfp4"} == {"experts"}
    assert {k for k, v in formats(third).items() if v == "bf16"} == {"router", "shared_gate_up", "shared_down"}
    assert set(formats(model.mtp_layers[0][0]).values()) == {"bf16"}


def test_wildcards_do_not_run_over_layer_numbers() -> None:
    config = {**DENSE, "num_hidden_layers": 12}
    model = read(config, {"quant_method": "modelopt", "quant_algo": "FP8", "exclude_modules": ["model.layers.1.*"]})
    assert sorted((formats(layer)["o"], n) for layer, n in model.layers) == [("bf16", 1), ("fp8", 11)]


def test_a_part_left_alone_is_not_fused_with_the_rest() -> None:
    quantisation = {**FP8, "modules_to_not_convert": ["v_proj", "mlp.gate_proj"]}
    (layer, _) = read(DENSE, quantisation).layers[0]
    assert formats(layer) == {"q_proj": "fp8", "k_proj": "fp8", "v_proj": "bf16", "o": "fp8",
                              "gate_proj": "bf16", "up_proj": "fp8", "ffn_down": "fp8"}  # fmt: skip
    kv = {p.name: (p.kv_outputs, p.kv_heads) for p in layer.mixer}
    assert kv == {"q_proj": (0, 0), "k_proj": (128, 2), "v_proj": (128, 2), "o": (0, 0)}


def test_groups_with_targets() -> None:
    """Two groups by name, and the head named among them."""
    groups = {
        "group_0": {"targets": ["re:.*self_attn.*"], "weights": {"type": "float", "num_bits": 8}},
        "group_1": {"targets": ["lm_head", "re:.*mlp.*"], "weights": NVFP4},
    }
    model = read(DENSE, {"quant_method": "compressed-tensors", "config_groups": groups})
    assert formats(model.layers[0][0]) == {"qkv": "fp8", "o": "fp8", "ffn_gate_up": "nvfp4", "ffn_down": "nvfp4"}
    assert model.head.format.name == "nvfp4"


def test_mixed_precision_by_layer() -> None:
    layers = {f"model.layers.{i}.mlp.{m}_proj": {"quant_algo": "W4A16_NVFP4", "group_size": 16}
              for i in (0, 1) for m in ("gate", "up", "down")}  # fmt: skip
    layers["model.layers.2.self_attn.o_proj"] = {"quant_algo": "FP8"}
    model = read(DENSE, {"quant_method": "modelopt", "quant_algo": "MIXED_PRECISION", "quantized_layers": layers})
    assert [(formats(layer)["ffn_down"], formats(layer)["o"], n) for layer, n in model.layers] == [
        ("nvfp4", "bf16", 2),
        ("bf16", "fp8", 1),
    ]


def test_fp8_checkpoint_with_experts_of_their_own() -> None:
    """DeepSeek-V4: experts FP4 by `expert_dtype`, or NVFP4 by a list whose ignore patterns speak of NVFP4 alone."""
    model = read({**MOE, "expert_dtype": "fp4"}, FP8)
    assert (formats(model.layers[1][0])["experts"], formats(model.layers[1][0])["o"]) == ("mxfp4", "fp8")
    layers = {f"model.layers.{i}.mlp.experts": {"quant_algo": "NVFP4", "group_size": 16} for i in (1, 2)}
    model = read(MOE, {**FP8, "quant_algo": "MIXED_PRECISION", "quantized_layers": layers, "ignore": ["*.self_attn.*"]})
    assert (formats(model.layers[1][0])["experts"], formats(model.layers[1][0])["o"]) == ("nvfp4", "fp8")


def test_gptq_dynamic_rules() -> None:
    dynamic = {"-:.*layers\\.0\\..*": {}, "+:.*o_proj.*": {"bits": 8, "group_size": 64}}
    model = read(DENSE, {"quant_method": "gptq", "bits": 4, "group_size": 128, "dynamic": dynamic, "lm_head": True})
    assert [(formats(layer)["qkv"], formats(layer)["o"], n) for layer, n in model.layers] == [
        ("bf16", "bf16", 1),
        ("int4", "int8", 2),
    ]
    assert model.head.format.name == "int4"


@pytest.mark.parametrize(
    ("more", "name"),
    [({"kv_cache_scheme": {"type": "float", "num_bits": 8}}, "fp8"), ({"kv_cache_scheme": {"type": "int", "num_bits": 8}}, "int8"),
     ({"kv_cache_quant_algo": "FP8"}, "fp8"), ({"kv_cache_quant_algo": "NVFP4"}, "nvfp4"), ({"kv_cache_scheme": None}, "bf16"),
     ({}, "bf16")],
)  # fmt: skip
def test_kv_cache_format(more: dict[str, Any], name: str) -> None:
    assert read(DENSE, {"quant_method": "modelopt", "quant_algo": "FP8", **more}).kv_format.name == name


def test_unquantised_dtypes() -> None:
    for dtype, size in (("bfloat16", 2), ("torch.float16", 2), ("float32", 2), (None, 2), ("auto", 2)):
        model = read({**DENSE, "torch_dtype": dtype})
        assert model.layers[0][0].mixer[0].format.bytes == size
    assert read({**DENSE, "dtype": "float16"}).activation.name == "fp16"


def test_a_name_that_promises_quantisation_warns() -> None:
    model = model_from_config(DENSE, name="Some-Model-NVFP4")
    assert "NVFP4" in model.warnings[0]


@pytest.mark.parametrize(
    ("quantisation", "words"),
    [
        ({"quant_method": "quip"}, ["quant_method", "quip", "supported"]),
        ({"bits": 4}, ["not supported"]),
        ({"quant_method": "modelopt", "quant_algo": "FP3"}, ["quant_algo", "FP3"]),
        ({"quant_method": "modelopt", "quant_algo": "MIXED_PRECISION"}, ["quantized_layers", "missing"]),
        (
            {"quant_method": "modelopt", "quant_algo": "MIXED_PRECISION", "quantized_layers": {"a": 3}},
            ["quantized_layers.a"],
        ),
        (compressed({"type": "float", "num_bits": 6}), ["num_bits", "6 bits"]),
        (compressed({"type": "int"}), ["num_bits", "missing"]),
        (compressed({"type": "int", "num_bits": 4}, ignore=["re:(unclosed"]), ["pattern", "unclosed"]),
        (compressed({"type": "int", "num_bits": 4}, ignore="lm_head"), ["ignore", "list"]),
        ({"quant_method": "awq", "bits": 64}, ["bits", "64"]),
        ({"quant_method": "gptq", "bits": 4, "dynamic": {"+:(": {}}}, ["pattern"]),
        ({"quant_method": "fp8", "weight_block_size": [128]}, ["weight_block_size"]),
        ({"quant_method": "fp8", "weight_block_size": [0, 128]}, ["weight_block_size"]),
        (
            {"quant_method": "modelopt", "quant_algo": "FP8", "kv_cache_quant_algo": "FP2"},
            ["kv_cache_quant_algo", "FP2"],
        ),
        ({"quant_method": 5}, ["quant_method"]),
    ],
)
def test_what_is_not_supported_is_named(quantisation: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(InputError) as caught:
        read(DENSE, quantisation)
    assert all(word in str(caught.value) for word in ["test.json", *words]), str(caught.value)


def test_patterns() -> None:
    """Plain names match whole components, wildcards the whole name and what is below, expressions from the start."""

    def matches(pattern: str, name: str, layer: int = 3) -> bool:
        return Patterns([pattern]).match([name], layer)

    name = "model.layers.3.mlp.experts.0.gate_proj"
    assert matches("mlp.experts", name)
    assert matches("model.layers.3", name)
    assert not matches("gate", name)
    assert not matches("layers.30", name)
    assert matches("model.layers.*.mlp", name)
    assert matches("model.layers.3.mlp*", name)
    assert not matches("model.layers.30.mlp*", name, 3)
    assert matches("re:.*experts.*", name)
    assert not matches("re:experts", name)
    assert not matches(r"re:.*mlp\.(gate|up|down)_proj.*", name)
    assert not Patterns([])


def test_a_scheme_of_nothing_leaves_all_alone() -> None:
    scheme = read_scheme(None, BF16)
    assert scheme.format(["lm_head"]) == BF16
    assert scheme.label == "none"
    assert read_scheme(Keys({}, "x"), BF16).label == "none"


JUNK = st.one_of(
    st.none(), st.booleans(), st.integers(-3, 200), st.just(10**30), st.floats(), st.text(max_size=8),
    st.lists(st.one_of(st.integers(-1, 130), st.text(max_size=4)), max_size=3),
    st.dictionaries(st.text(max_size=4), st.one_of(st.integers(), st.text(max_size=4)), max_size=2),
)  # fmt: skip
DIALECTS: list[dict[str, Any]] = [
    {**FP8, "modules_to_not_convert": ["lm_head"]},
    {**compressed({"type": "int", "num_bits": 4, "group_size": 32, "symmetric": True}), "ignore": ["re:.*attn.*"],
     "kv_cache_scheme": {"type": "float", "num_bits": 8}},
    {"quant_method": "modelopt", "quant_algo": "NVFP4", "group_size": 16, "exclude_modules": ["model.layers.0*"]},
    {"quant_method": "modelopt", "quant_algo": "MIXED_PRECISION",
     "quantized_layers": {"model.layers.0.mlp.up_proj": {"quant_algo": "NVFP4", "group_size": 16}}},
    {"quant_method": "awq", "bits": 4, "group_size": 128, "zero_point": True, "modules_to_not_convert": ["v_proj"]},
    {"quant_method": "gptq", "bits": 4, "group_size": 128, "dynamic": {"-:x": {}, "+:y": {"bits": 8}}, "lm_head": True},
    {"quant_method": "bitsandbytes", "load_in_4bit": True},
]  # fmt: skip


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_a_damaged_quantisation_is_read_or_refused(data: st.DataObject) -> None:
    quantisation = copy.deepcopy(data.draw(st.sampled_from(DIALECTS)))
    holder: Any = quantisation
    for _ in range(data.draw(st.integers(1, 4))):  # a walk down to some value
        keys = list(holder) if isinstance(holder, dict) else list(range(len(holder)))
        key = data.draw(st.sampled_from(keys))
        if isinstance(holder[key], dict | list) and holder[key] and data.draw(st.booleans()):
            holder = holder[key]
            continue
        holder[key] = data.draw(JUNK)
        break
    side = {"quantization": quantisation} if data.draw(st.booleans()) else None
    try:
        model = read(MOE, None if side else quantisation, side_quant=side)
    except InputError as error:
        message = str(error)
        assert "\n" not in message and len(message) < 600  # noqa: PT018
        return
    assert 0 < model.weight_bytes < 20 * model.total_parameters


@pytest.mark.parametrize(
    "pattern",
    [r"re:(a+)+$", r"re:(.*.*)*x$", r"re:([a-z_.0-9]+)+#", "re:(a|a)*$", "re:((a?)){50}", "re:(?:x(?:y|z))*b", "re:" + ".*a" * 7,
     "*a" * 7],
)  # fmt: skip
def test_a_pattern_that_could_take_forever_is_refused(pattern: str) -> None:
    with pytest.raises(InputError, match="take forever"):
        Patterns([pattern])


@pytest.mark.parametrize(
    "pattern",
    [r"re:.*mlp\.(gate|up|gate_up|down)_proj.*", r"re:model\.layers\.(?:[0-9]|1[0-9])\..*", r"re:.*\.(?:1[0-9]|2[0-9])\..*(?:down|up).*",
     r"re:.*\*+\(x\)*", r"re:[(*+|)]*x", "****a****b***", "model.layers.*.mlp.experts.*"],
)  # fmt: skip
def test_patterns_as_checkpoints_have_them_are_not(pattern: str) -> None:
    assert Patterns([pattern])


def test_too_many_patterns_are_refused() -> None:
    with pytest.raises(InputError, match="more than 1000 patterns"):
        Patterns([f"*l{i}*" for i in range(1001)])
    assert Patterns([f"model.layers.{i}.*" for i in range(5000)])


UNQUANTISED = [p.name for p in list_presets() if p.role == "target" and load_model(p.name).quantisation == "none"]


@pytest.mark.parametrize("name", UNQUANTISED)
def test_what_is_quantised_while_it_is_loaded_is_stored_as_such_a_checkpoint(name: str) -> None:
    """--quantization fp8 leaves alone what a checkpoint in fp8 does, of every model that ships unquantised."""
    config = load_config(name)
    plain = model_from_config(config, name="test")
    stored = model_from_config({**config, "quantization_config": {"quant_method": "fp8"}}, name="test")
    made = quantised_online(plain, "fp8")
    assert (made.layers, made.mtp_layers, made.head) == (stored.layers, stored.mtp_layers, stored.head)
    assert made.weight_bytes == stored.weight_bytes


def test_a_launch_line_that_quantises_halves_the_weights() -> None:
    """Llama-3.1-8B: 6.98 B parameters in layers take one byte instead of two, 1.05 B of embedding and head stay."""
    line = "--model-path meta-llama/Llama-3.1-8B --quantization"
    eight, other = (scenario(hardware="1x-h200", sglang_args=f"{line} {how}") for how in ("fp8", "bitsandbytes"))
    assert eight.model.weight_bytes == pytest.approx(6.98e9 + 2 * 1.05e9, rel=1e-3)
    assert not [w for w in eight.warnings if "quantization" in w]
    assert other.model.weight_bytes == pytest.approx(2 * 8.03e9, rel=1e-3)
    assert [w for w in other.warnings if "--quantization bitsandbytes of unquantised weights is not modelled" in w]
