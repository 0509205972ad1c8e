"""Models from config.json: presets, folders and files, read into a `Model`.

`load_model` finds and reads; `model_from_config` reads. The parts are in `keys` (checked access), `patterns` (which
layer is what), `families` (one function a layer family), `formats` (quantisation) and `drafters`.
"""

from __future__ import annotations

import functools
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from specsim.drafters import Drafter, draft_kind, read_drafter
from specsim.errors import InputError, did_you_mean
from specsim.families import EXPERT_COUNTS, FAMILIES, Builder, Family
from specsim.files import parse_json, read_json, read_text
from specsim.formats import Scheme, read_dtype, read_expert_dtype, read_scheme
from specsim.keys import Keys
from specsim.models import BF16, FP32, DraftShape, Layer, Model, Projection
from specsim.patterns import mtp_plans, plan_layers

PRESETS = Path(__file__).parent / "presets"
MAX_DEPTH = 50
TEXT_CONFIGS = ("text_config", "llm_config", "language_config", "thinker_config", "transformer_layer_config")
QUANTISATIONS = ("quantization_config", "compression_config")
HEAD_MODULES = ("lm_head", "language_model.lm_head", "model.lm_head", "head")
EMBEDDING_MODULES = ("model.embed_tokens", "language_model.model.embed_tokens", "model.language_model.embed_tokens",
                     "backbone.embeddings", "embed")  # fmt: skip

# Objects that do not describe the language model's layers.
_ASIDE = frozenset({"vision_config", "audio_config", "video_config", "vision_tower", "visual", "quantization_config",
                    "compression_config", "quantization", "rope_scaling", "rope_parameters", "auto_map",
                    "generation_config", "talker_config", "token2wav_config", "audio_encoder_config", "id2label",
                    "label2id", "task_specific_params", "img_token_compression_config", "speculators_config"})  # fmt: skip
_EXPERT_WORD = re.compile(r"expert|moe|mixture|router|routed", re.IGNORECASE)
_NAME_WORD = re.compile(r"name|path|class|target|verifier|model|version|repo|url")  # "ffn_type": "moe" is none
# Expert keys that change how experts are trained or chosen, not how many or how large they are.
_HARMLESS = re.compile(
    r"coef|factor|scal|softcap|loss|dtype|activation|func|bias|norm|temperature|jitter|eps|group|capacity|noise|init|scor|"
    r"overlap|drop|seed|alpha|beta|backend|z_loss|method|limit|balanc|moe_router_type|router_logits|implementation",
    re.IGNORECASE,
)
_RECURRENT = re.compile(
    r"(^|\.)(mamba_|ssm_|rwkv|kda_|linear_num|linear_key|linear_value|lightning|time_mix|retention)"
)
_SHAPE_WORD = re.compile(
    r"lora_rank$|(^|\.)num_\w*layers$|_hidden_size$|(^|\.)\w*_heads$|intermediate_size|head_dim$|_rank$|_latent_|"
    r"(^|\.)(altup|laurel)_|(^|\.)d_model$|(^|\.)n_(embd|inner|head)$"
)
_LAYER_LIST = re.compile(r"(^|\.)(?!no_rope)\w*(layers|layer_ids|layer_indices|layer_idxs)$")
_KNOWN_SHAPES = re.compile(
    r"max_window_layers|num_target_layers|qk_head_dim|rotary|rope|use_mtp|num_reward_heads|num_hash_layers|pretraining|"
    r"prediction_heads|projector_hidden_size|target_hidden_size|attn_res_block|num_attention_heads_in|"
    r"global_head_dim|num_global_key_value_heads|_layers_enum|time_step"
)


@dataclass(frozen=True)
class Preset:
    """A config.json that ships with specsim. `drafts` are the presets that draft for it, the usual one first."""

    name: str
    hf_id: str  # the repository on Hugging Face whose shape it has; `same_shape` are others
    role: str  # target or draft
    drafts: tuple[str, ...] = ()
    mtp: bool = False  # has built-in next-token-prediction layers
    source: str = ""
    same_shape: tuple[str, ...] = ()


# --- finding ---


def list_presets() -> list[Preset]:
    """All presets, targets first, by name."""
    return list(_presets())


@functools.cache
def _presets() -> tuple[Preset, ...]:
    raw = {path.stem: read_json(path, "preset") for path in sorted(PRESETS.glob("*.json"))}
    drafts = {d for config in raw.values() for d in config.get("_drafts", ())}
    found = []
    for name, config in raw.items():
        text = config.get("text_config", config)
        mtp = any(text.get(k) for k in ("num_nextn_predict_layers", "num_mtp_modules", "mtp_num_hidden_layers"))
        role = "draft" if name in drafts else "target"
        found.append(Preset(name, config.get("_hf_id", ""), role, tuple(config.get("_drafts", ())), mtp,
                            config.get("_source", ""), tuple(config.get("_same_shape", ()))))  # fmt: skip
    return tuple(sorted(found, key=lambda p: (p.role != "target", p.name.lower())))


def public_drafts(target_name: str) -> tuple[str, ...]:
    """The presets that draft for a target preset, the usual one first; none for what is no preset."""
    stem = _preset_stem(target_name)
    return _drafts(stem) if stem else ()


@functools.cache
def _drafts(stem: str) -> tuple[str, ...]:
    return tuple(read_json(PRESETS / f"{stem}.json", "preset").get("_drafts", ()))


def default_draft(target_name: str) -> str | None:
    """The preset that usually drafts for a target preset; None when it has none, or is no preset."""
    return next(iter(public_drafts(target_name)), None)


def is_preset(name: str) -> bool:
    """Whether a preset has this name, in any case, or this Hugging Face id."""
    return _preset_stem(name) is not None


def load_config(name_or_path: str | os.PathLike[str]) -> dict[str, Any]:
    """The raw config of a preset, a folder or a file. Raises InputError when there is none, or it is no object."""
    return _as_object(read_json(_locate(name_or_path), "model config"), str(name_or_path))


def load_model(name_or_path: str | os.PathLike[str]) -> Model:
    """The model of a preset (its name in any case, or its Hugging Face id), of a folder with config.json, or of a file.

    A hf_quant_config.json beside the config is read when the config itself declares no quantisation.
    Raises InputError when it cannot be found or understood.
    """
    path = _locate(name_or_path)
    if path.parent == PRESETS and path.suffix == ".json":
        return _preset(path.stem)
    return parse_model(read_text(path, "model config"), str(path), _called(path), side_quant=_side_quant(path))


def _called(path: Path) -> str:
    """What the model of a file is called: as its folder is, in Hugging Face's cache (models--OWNER--NAME/snapshots/COMMIT) as the
    model is, or as the file."""
    if path.name != "config.json":
        return path.stem
    folder = path.parent.resolve()
    cached = re.fullmatch(r"models--.+?--(.+)", folder.parent.parent.name)
    return cached[1] if cached and folder.parent.name == "snapshots" else folder.name


def parse_model(text: str, where: str, name: str, side_quant: dict[str, Any] | None = None) -> Model:
    """The model of a config.json's text, for which errors say `where`. Raises InputError when it cannot be understood."""
    config = _as_object(parse_json(text, where, "model config"), where)
    return model_from_config(config, name=name, source=where, side_quant=side_quant)


def load_preset(name: str) -> Model:
    """The model of a preset, by its name in any case or its Hugging Face id; no file of that name is looked at.

    Raises InputError, with the nearest name.
    """
    stem = _preset_stem(name)
    if stem is None:
        names = tuple(p.name for p in _presets())
        raise InputError(f"no model {name[:80]!r} ships with specsim", mend=did_you_mean(name[:80], names))
    return _preset(stem)


@functools.cache
def _preset(stem: str) -> Model:
    path = PRESETS / f"{stem}.json"
    return model_from_config(read_json(path, "model config"), name=stem, source=f"preset {stem}")


def _locate(given: str | os.PathLike[str]) -> Path:
    name_or_path = os.fspath(given) if isinstance(given, os.PathLike) else given
    if not isinstance(name_or_path, str) or not name_or_path.strip():
        raise InputError("no model was given", where="model", mend="give a preset's name, a folder or a config.json")
    path = Path(name_or_path)
    try:
        if path.is_dir():
            if not (path / "config.json").is_file():
                cached = sorted(path.glob("snapshots/*/config.json"), key=lambda found: found.stat().st_mtime)
                if cached:  # Hugging Face's cache, the newest commit
                    return cached[-1]
                raise InputError("the folder holds no config.json", where=name_or_path, mend="give the model's folder")
            return path / "config.json"
        if path.exists():  # a pipe too, as a shell's <(...) gives it
            return path
    except (OSError, ValueError):  # too long a name, a null byte
        raise InputError("is no path", where=repr(name_or_path[:60]), mend="give a preset's name or a path") from None
    preset = _preset_stem(name_or_path)
    if preset is not None:
        return PRESETS / f"{preset}.json"
    if path.suffix == ".json":
        raise InputError("no such file", where=name_or_path, mend="check the path")
    if name_or_path.startswith(("/", "./", "../", "~")):
        raise InputError(
            "no such folder or file",
            where=name_or_path[:80],
            mend="give a preset or the folder of a config.json, by --model or --draft where a launch line names this path",
        )
    names = tuple(p.stem for p in sorted(PRESETS.glob("*.json")))
    mend = did_you_mean(name_or_path[:80], names)
    if re.fullmatch(r"[\w.-]+/[\w.-]+", name_or_path):  # as Hugging Face calls one
        near = f"{mend.split(' (')[0]} else " if mend.startswith("did") else ""
        mend = f"{near}save huggingface.co/{name_or_path[:80]}/raw/main/config.json and give that file"
    raise InputError(f"no model {name_or_path[:80]!r}: no preset, folder or file", mend=mend)


def _preset_stem(name: str) -> str | None:
    """The preset of that name, else the one with that Hugging Face id (with or without its owner), in any case."""
    wanted = name.lower()
    return _preset_names().get(wanted) or _preset_ids().get(wanted)


@functools.cache
def _preset_names() -> Mapping[str, str]:
    return {path.stem.lower(): path.stem for path in PRESETS.glob("*.json")}


@functools.cache
def _preset_ids() -> Mapping[str, str]:
    found: dict[str, str] = {}
    for preset in sorted(_presets(), key=lambda p: p.name):  # the first of several with one id
        for each in (preset.hf_id, *preset.same_shape):
            for part in (each, each.rsplit("/", 1)[-1]) if each else ():
                found.setdefault(part.lower(), preset.name)
    return found


def _side_quant(path: Path) -> dict[str, Any] | None:
    for side in (path.with_name(f"{path.stem}__hf_quant_config.json"), path.with_name("hf_quant_config.json")):
        if side.is_file():
            return _as_object(read_json(side, "quantisation config"), str(side))
    return None


def _as_object(value: Any, where: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        kind = {dict: "an object", list: "a list", str: "a text", bool: "true or false", type(None): "null"}
        raise InputError(
            f"is {kind.get(type(value), 'a number')}, not an object", where=where, mend="give a model's config.json"
        )
    return value


# --- reading ---


def model_from_config(
    config: dict[str, Any], *, name: str, source: str = "", side_quant: dict[str, Any] | None = None
) -> Model:
    """The model that a Hugging Face config describes.

    `source` names the file in error messages; `side_quant` is the content of a hf_quant_config.json, used when the
    config declares no quantisation. Raises InputError for whatever is missing, impossible or not supported: above all
    for a key about experts that was not understood, since a MoE read as dense would be wrong everywhere.
    """
    _check_depth(config, source or name)
    root = Keys(config, source or name)
    if "quantization" in config and not ({"hidden_size", "model_type", "architectures", *TEXT_CONFIGS} & set(config)):
        raise InputError(
            "is a quantisation config, not a model's", where=root.where, mend="give the config.json beside it"
        )
    text, wrapped = _unwrap(root)
    model_type, family, warnings = _family(root, text)
    text.values = {**family.defaults, **text.values}
    base = read_dtype([text, root]) or BF16
    if base == FP32:
        base = BF16
        warnings.append(
            "its weights are stored in 32 bits; engines serve them in 16 (--dtype auto), and so they are priced"
        )
    scheme = _scheme(root, text, base, side_quant)
    hidden = text.whole("hidden_size")
    vocab = _vocabulary(root, text)
    kind = draft_kind(root, text)
    if kind:
        family = replace(family, moe=False)
    builder = Builder(text, family, scheme, hidden, wrapped=wrapped)
    plans = plan_layers(text, family, drafter=bool(kind))
    drafter: Drafter | None = None
    mtp: list[Layer] = []
    if kind:
        drafter = read_drafter(kind, root, builder, plans, vocab)
        layers = drafter.layers
        text.get("num_nextn_predict_layers")
    else:
        layers = []
        for i, plan in enumerate(plans):
            builder.layer = i
            layers.append(_cached(builder, plan, i))
        for j, plan in enumerate(mtp_plans(text, family, plans)):
            builder.layer, builder.aliases = len(plans) + j, (f"mtp.layers.{j}.", f"model.mtp.layers.{j}.", "mtp.")
            mtp.append(builder.build(plan))
        builder.aliases = ()
    tied = _tied(root, text, family)
    head = Projection("lm_head", hidden, drafter.head_outputs if drafter else vocab,
                      scheme.format(HEAD_MODULES, part="plain"))  # fmt: skip
    others, other_warnings = _other_parameters(root, text, len(plans), hidden)
    _refuse_unread_experts(root, any(layer.experts for layer in layers))
    _refuse_unread_recurrence(root, layers)
    warnings += other_warnings + _unread_shapes(root)
    if scheme.label == "none" and (said := re.search(r"nvfp4|mxfp4|fp8|int4|w4a16|awq|gptq", name, re.IGNORECASE)):
        warnings.append(f"the name says {said[0]}, but neither the config nor a hf_quant_config.json beside it does")
    return Model(
        name=name,
        architecture=_architecture(root, text) or model_type,
        hidden=hidden,
        vocab=vocab,
        layers=_runs(layers),
        head=head,
        tied=drafter.borrows_head if drafter else tied,
        embedding_format=scheme.format(EMBEDDING_MODULES, part="plain"),
        activation=base if base.bits >= 16 else BF16,
        kv_format=scheme.kv or (base if base.bits >= 16 else BF16),
        max_context=text.optional("max_position_embeddings", maximum=10**9) or 0,
        final_norm_parameters=hidden * (drafter.norms if drafter else 1),
        other_parameters=others,
        other_bytes=others * base.bytes,
        embedding_parameters=0 if drafter and drafter.borrows_embedding else None,
        mtp_layers=_runs(mtp),
        draft=drafter.shape if drafter else None,
        quantisation=scheme.label,
        warnings=tuple(warnings),
        source=source,
    )


@functools.lru_cache(maxsize=64)
def mtp_draft(model: Model) -> Model:
    """The drafter built into a target: one next-token-prediction module, which shares embedding and head with it.

    Its fc joins the embedding of the last token and the target's last hidden state, each normed first. Raises
    InputError when the model has no such layers.
    """
    if not model.mtp_layers:
        raise InputError("has no next-token-prediction (MTP) layers", where=f"model {model.name}",
                         mend="use another method, or a config with num_nextn_predict_layers")  # fmt: skip
    fc = Projection("eh_proj", 2 * model.hidden, model.hidden, model.activation, "none")
    return Model(
        name=f"{model.name} MTP",
        architecture=model.architecture,
        hidden=model.hidden,
        vocab=model.vocab,
        layers=tuple((layer, 1) for layer, _ in model.mtp_layers),
        head=model.head,
        tied=True,
        embedding_format=model.embedding_format,
        activation=model.activation,
        kv_format=model.kv_format,
        max_context=model.max_context,
        final_norm_parameters=3 * model.hidden,
        embedding_parameters=0,
        draft=DraftShape("mtp", fc, model.hidden),
        quantisation=model.quantisation,
        source=model.source,
    )


def _cached(builder: Builder, plan: Any, index: int) -> Layer:
    key = (plan, builder.scheme.layer_key(index))
    if key not in builder.built:
        builder.built[key] = builder.build(plan)
    return builder.built[key]


def _runs(layers: Sequence[Layer]) -> tuple[tuple[Layer, int], ...]:
    counts: dict[Layer, int] = {}
    for layer in layers:
        counts[layer] = counts.get(layer, 0) + 1
    return tuple(counts.items())


def _check_depth(config: dict[str, Any], where: str) -> None:
    """Refuse what is nested so deeply that reading it would fail."""
    level: list[Any] = [config]
    for _ in range(MAX_DEPTH):
        level = [v for x in level for v in (x.values() if isinstance(x, dict) else x) if isinstance(v, dict | list)]
        if not level:
            return
    raise InputError("is nested too deeply", where=where, mend="give a model's config.json")


def _unwrap(root: Keys) -> tuple[Keys, bool]:
    """The object that describes the language model, and whether it lies inside another."""
    keys, wrapped = root, False
    for _ in range(3):
        name = next((n for n in TEXT_CONFIGS if isinstance(keys.values.get(n), dict) and keys.values[n]), None)
        if name is None or (keys.has("hidden_size") and not (keys.values[name]).get("hidden_size")):
            break
        inner = keys.nested(name)
        assert inner is not None
        keys, wrapped = inner, True
    return keys, wrapped


def _architecture(root: Keys, text: Keys) -> str:
    return root.first("architectures") or text.first("architectures")


def _family(root: Keys, text: Keys) -> tuple[str, Family, list[str]]:
    """(model type, family, warnings). An unknown type is read as a Llama, with a warning."""
    named = text.text("model_type") or root.text("model_type")
    if named in FAMILIES:
        family = FAMILIES[named]
        architectures = f"{_architecture(root, text)} {_architecture(text, root)}".lower()
        uncounted = "moe" in architectures and not any(text.has(n) for n in EXPERT_COUNTS)
        return named, replace(family, moe=True) if uncounted else family, []
    plain = {key.replace("_", ""): key for key in FAMILIES}
    for name in (_architecture(text, root), _architecture(root, text)):
        short = re.sub(r"(Text|Flash)?(ForCausalLM|ForConditionalGeneration).*|Sparse.*|Model$", "", name).lower()
        if short in plain:
            return named or plain[short], FAMILIES[plain[short]], []
    gated = text.text("hidden_act") not in ("relu2", "xielu")
    family = Family(moe="moe" in f"{named} {_architecture(root, text)}".lower(), gated=gated)
    shown = named or _architecture(root, text) or "none given"
    return named, family, [f"model type {shown[:60]!r} is not known; it is read by its keys as a Llama-like model"]


def _scheme(root: Keys, text: Keys, base: Any, side_quant: dict[str, Any] | None) -> Scheme:
    found = next((q for keys in (root, text) for n in QUANTISATIONS if (q := keys.nested(n)) and q.values), None)
    side = Keys(side_quant, f"hf_quant_config.json of {root.where}") if side_quant is not None else None
    if base.bits < 16:
        base = BF16
    return read_scheme(found, base, side, read_expert_dtype(text))


def _vocabulary(root: Keys, text: Keys) -> int:
    found = text.optional("vocab_size")
    if found is None and text is not root:
        found = root.optional("vocab_size")
    return found if found is not None else text.whole("vocab_size")


def _tied(root: Keys, text: Keys, family: Family) -> bool:
    for keys in (text, root):
        for name in ("tie_word_embeddings", "tie_embedding"):
            if keys.has(name):
                return keys.flag(name)
    return family.tied


# --- what is beside the decoder layers ---


def _other_parameters(root: Keys, text: Keys, layers: int, hidden: int) -> tuple[int, list[str]]:
    """(parameters in memory that a decode step does not read, warnings): vision tower, per-layer embeddings."""
    warnings: list[str] = []
    total = 0
    for name in ("vision_config", "visual"):
        value = root.values.get(name)
        if isinstance(value, dict) and value:
            vision = vision_parameters(Keys(value, root.where, f"{name}."), hidden)
            if vision is None:
                warnings.append(f"the parameters of {name} are not counted: its sizes are not given")
            total += vision or 0
    if isinstance(root.values.get("audio_config"), dict):
        warnings.append("the audio tower's parameters are not counted")
    width = text.optional("hidden_size_per_layer_input", minimum=0)
    if width:
        # Gemma-3n has none of its media tokens in there.
        entries = text.optional("vocab_size_per_layer_input") or text.whole("vocab_size")
        total += entries * layers * width
    streams = text.optional("altup_num_inputs", maximum=64)
    if streams:
        total += 2 * (streams - 1) * hidden * hidden
        warnings.append("AltUp projections count as memory, not as time")
    return total, warnings


def vision_parameters(vision: Keys, text_hidden: int) -> int | None:
    """Parameters of a vision transformer with its merger, None when its sizes are not given.

    A layer has 4 h^2 of attention and 2 h i of feed-forward with biases and two norms; the patch embedding is
    channels x frames x patch^2 x h; the merger joins merge^2 patches by two matrices.
    """
    hidden = vision.optional("vt_hidden_size", "hidden_size", "embed_dim", "width")
    depth = vision.optional("vt_num_hidden_layers", "num_hidden_layers", "depth", "layers", maximum=1000)
    if hidden is None or depth is None:
        return None
    inner = vision.optional("vt_intermediate_size", "intermediate_size") or 4 * hidden
    heads = vision.optional("vt_num_attention_heads", "num_attention_heads", "num_heads", maximum=65536)
    attention = vision.optional("qkv_hidden_size") or (heads or 0) * (vision.optional("head_dim") or 0) or hidden
    patch = vision.optional("patch_size", maximum=4096) or 14
    channels = vision.optional("in_channels", "num_channels", "in_chans", maximum=4096) or 3
    frames = vision.optional("temporal_patch_size", maximum=4096) or 1
    gated = 3 if vision.text("hidden_act") == "silu" or re.match("gemma4|pixtral", vision.text("model_type")) else 2
    layer = 4 * hidden * attention + gated * hidden * inner + 3 * attention + inner + 6 * hidden
    positions = vision.optional("num_position_embeddings", "position_embedding_size") or 0
    if not positions and vision.has("init_pos_emb_height"):
        positions = vision.whole("init_pos_emb_height") * vision.whole("init_pos_emb_width")
    kernel = vision.get("merge_kernel_size")
    merge = kernel[0] if isinstance(kernel, list) and kernel and isinstance(kernel[0], int) else None
    merge = merge or vision.optional("spatial_merge_size", maximum=64) or 1
    joined = hidden * merge * merge
    out = vision.optional("out_hidden_size", "text_hidden_size", "projection_dim", "vision_output_dim") or text_hidden
    mergers = 1 + len(vision.items("deepstack_visual_indexes") or ())
    merger = joined * joined + joined * out if joined != hidden else hidden * out
    return depth * layer + channels * frames * patch * patch * hidden + positions * hidden + mergers * merger


# --- nothing is dropped silently ---


def _refuse_unread_experts(root: Keys, has_experts: bool) -> None:
    """Refuse a key about experts that no reader used and that would change the model."""
    for path, value in _walk(root):
        key = path.rsplit(".", 1)[-1]
        said = isinstance(value, str) and not has_experts and _EXPERT_WORD.search(value) and not _NAME_WORD.search(key)
        if not (said or _EXPERT_WORD.search(path)) or _HARMLESS.search(key):
            continue
        if isinstance(value, bool):
            matters = value and not has_experts
        elif isinstance(value, int | float):
            matters = value > 1
        elif isinstance(value, str):
            matters = bool(re.fullmatch(r"[\d\s,;:-]+", value)) or (bool(value) and not has_experts)
        else:
            matters = isinstance(value, list) and any(not isinstance(v, int | float) or v > 1 for v in value)
        if matters:
            raise InputError("this key about experts is not understood", where=f"{root.where}, key {path[:80]!r}",
                             mend="its model family is not supported, or the key is misspelt")  # fmt: skip


def _refuse_unread_recurrence(root: Keys, layers: Sequence[Layer]) -> None:
    """Refuse keys of state-space layers in a model that was read without any."""
    if any(layer.attention and layer.attention.kind in ("linear", "conv") for layer in layers):
        return
    for path, value in _walk(root):
        if _RECURRENT.search(path) and not isinstance(value, str | bool | float):
            raise InputError("speaks of recurrent layers, but the keys that place them are missing or not supported",
                             where=f"{root.where}, key {path[:80]!r}", mend="add layer_types, or use a supported model")  # fmt: skip


def _unread_shapes(root: Keys) -> list[str]:
    """Warnings for keys that look like sizes, or single out layers, and were not used."""
    found = []
    for path, value in _walk(root):
        numbers = isinstance(value, list) and value and all(type(each) is int for each in value)
        if numbers and _LAYER_LIST.search(path):
            found.append(f"key {path[:80]!r} singles out layers and is not used")
        if isinstance(value, int) and not isinstance(value, bool) and value > 0:
            key = path.rsplit(".", 1)[-1]
            if _SHAPE_WORD.search(key) and not _KNOWN_SHAPES.search(key):
                found.append(f"key {path[:80]!r} looks like a size and is not used")
    return found[:8]


def _walk(root: Keys) -> Iterator[tuple[str, Any]]:
    return root.unread(_ASIDE)
