"""Which weights are stored how: the quantisation that a config declares, wherever and in whatever dialect it does.

A `Scheme` answers one question: the format of a weight, given its Hugging Face module names. The dialects are
fp8 (block and tensor), compressed-tensors, modelopt (its own file beside the config included), AWQ, GPTQ, MXFP4, Quark and
bitsandbytes. Scales and zero points are counted as stored: INT4 in groups of 32 with 16-bit scales is 4 + 16/32 bits.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from specsim.errors import InputError
from specsim.keys import Keys
from specsim.models import BF16, FP32, Format, Layer, Model, Projection

MAX_REPEATS = 6  # in one pattern of module names
MAX_PATTERNS = 1000

FP16 = Format("fp16", 16)
FP8 = Format("fp8", 8)
MXFP4 = Format("mxfp4", 4, 8 / 32)
MXFP8 = Format("fp8", 8, 8 / 32)
NVFP4 = Format("nvfp4", 4, 8 / 16)

DTYPES = {
    "bfloat16": BF16,
    "bf16": BF16,
    "float16": FP16,
    "half": FP16,
    "fp16": FP16,
    "float32": FP32,
    "float": FP32,
    "fp32": FP32,
    "float8_e4m3fn": FP8,
    "fp8": FP8,
}
# What engines make of unquantised weights while they load them, by --quantization (SGLang `Fp8Config` and `W8A8Fp8Config`, vLLM
# `Fp8Config`, each with a checkpoint that is not serialised in fp8), and the matrices that they leave alone then.
ONLINE = {"fp8": FP8, "w8a8_fp8": FP8}
LEFT_ALONE = frozenset({"router", "shared_gate", "index_weights", "per_layer_in"})
METHODS = "fp8, fbgemm_fp8, compressed-tensors, modelopt, awq, gptq, auto-round, mxfp4, mxfp8, quark, bitsandbytes"


def fp8_block(rows: int, columns: int) -> Format:
    """FP8 with one 32-bit scale a block of rows x columns."""
    return Format("fp8", 8, 32 / (rows * columns))


def integer(bits: int, group: int, *, zero_points: bool = False) -> Format:
    """Integers with one 16-bit scale a group, and a zero point of `bits` when stored; group -1 or 0: one a channel."""
    scale = 0.0 if group <= 0 else (16 + (bits if zero_points else 0)) / group
    return Format(f"int{bits}", bits, scale)


def quantised_online(model: Model, wanted: str) -> Model:
    """An unquantised model as an engine holds it that was told to quantise it (`wanted`, of `ONLINE`): its layers' matrices and
    experts, not routers, embedding and head."""
    found = ONLINE[wanted]

    def stored(p: Projection) -> Projection:
        return p if p.name in LEFT_ALONE else replace(p, format=found)

    def held(layer: Layer) -> Layer:
        e = layer.experts
        experts = e and replace(e, format=found, shared=tuple(map(stored, e.shared)))
        return replace(layer, mixer=tuple(map(stored, layer.mixer)), ffn=tuple(map(stored, layer.ffn)), experts=experts)

    return replace(
        model,
        layers=tuple((held(layer), n) for layer, n in model.layers),
        mtp_layers=tuple((held(layer), n) for layer, n in model.mtp_layers),
        quantisation=f"{wanted} (as it is loaded)",
    )


class Patterns:
    """Module-name patterns as quantisation configs write them.

    A plain name stands for that module and all below it, wherever it occurs ("lm_head", "mlp.gate",
    "model.layers.3.self_attn"); "*" and "?" are wildcards over the whole name; "re:" starts a regular expression
    matched from the start of the name.
    """

    def __init__(self, patterns: Iterable[str], where: str = "") -> None:
        self.names: set[str] = set()
        self.layers: dict[int, list[re.Pattern[str]]] = {}  # wildcards that name one layer
        self.general: list[re.Pattern[str]] = []
        self.singled_out: set[int] = set()  # layers named one by one; all others are alike
        self.alike = True  # False when layers may differ in another way, too
        for pattern in patterns:
            self._note_layers(pattern)
            if pattern.startswith("re:"):
                self.general.append(_compile(pattern[3:], where))
            elif "*" in pattern or "?" in pattern:
                expression = re.escape(re.sub(r"\*+", "*", pattern)).replace(r"\*", ".*").replace(r"\?", ".")
                compiled = _compile(rf"(?:{expression})(?:\..*)?\Z", where)
                layer = re.search(r"\blayers\.(\d{1,6})(?=\.)", pattern)
                (self.layers.setdefault(int(layer[1]), []) if layer else self.general).append(compiled)
            else:
                self.names.add(pattern)
        if len(self.general) > MAX_PATTERNS:
            raise InputError(
                f"has more than {MAX_PATTERNS} patterns", where=where, mend="name modules or layers instead"
            )

    def _note_layers(self, pattern: str) -> None:
        """Note which layers a pattern tells apart. A number that is not plainly one layer's may be any layer's."""
        expression = pattern.startswith("re:")
        if not expression:
            self.singled_out.update(int(n) for n in re.findall(r"\blayers\.(\d{1,6})(?=\.|$)", pattern))
            pattern = re.sub(r"\blayers\.\d{1,6}(?=\.|$)", "", pattern)
        if re.search(r"\d" if expression else r"(?<![A-Za-z_])\d", pattern):
            self.alike = False

    def __bool__(self) -> bool:
        return bool(self.names or self.layers or self.general)

    def match(self, names: Sequence[str], layer: int | None) -> bool:
        """Whether any of a module's names is meant; `layer` is its layer number."""
        if self.names:
            for name in names:
                parts = name.split(".")
                for start in range(len(parts)):
                    run = parts[start]
                    if run in self.names:
                        return True
                    for part in parts[start + 1 :]:
                        run = f"{run}.{part}"
                        if run in self.names:
                            return True
        expressions = self.general + (self.layers.get(layer, []) if layer is not None else [])
        return any(e.match(name) for e in expressions for name in names)


def _compile(expression: str, where: str) -> re.Pattern[str]:
    if _explosive(expression):
        raise InputError(f"module pattern {expression[:60]!r} could take forever", where=where,
                         mend=f"write it without repeated groups and with at most {MAX_REPEATS} repeats")  # fmt: skip
    try:
        return re.compile(expression)
    except (re.error, RecursionError, OverflowError) as error:
        raise InputError(f"bad module pattern {expression[:60]!r}: {error}", where=where, mend="correct it") from None


def _explosive(expression: str) -> bool:
    """Whether matching may take exponential time: repeats or alternatives in a repeated group, or too many repeats."""
    plain = re.sub(
        r"\\.|\[\^?\]?(?:\\.|[^\]\\])*\]", "x", expression
    )  # escapes and character classes are one character
    plain = re.sub(r"\(\?(?:P?<\w+>|[aiLmsux-]*:|[=!]|<[=!])", "(", plain)
    repeats = re.compile(r"[*+]|\{\d*,?\d*\}")
    if len(repeats.findall(plain)) > MAX_REPEATS:
        return True
    while found := re.search(r"\(([^()]*)\)", plain):  # innermost groups first
        inner = found[1]
        varies = bool(re.search(r"[*+?{|]", inner))
        if varies and repeats.match(plain, found.end()):
            return True
        plain = plain[: found.start()] + ("x?" if varies else "x") + plain[found.end() :]
    return False


NOTHING = Patterns(())


@dataclass(frozen=True)
class Scheme:
    """The quantisation of a whole model.

    `base` is the format of what is left alone, `ignore` what is left alone by name, `targets` what is quantised by
    name, `linear` the format of every other linear layer (None: left alone), `experts` that of routed experts when it
    differs. `kv` is the KV cache's format, None for `base`.
    """

    label: str
    base: Format
    linear: Format | None = None
    experts: Format | None = None
    targets: tuple[tuple[Patterns, Format], ...] = ()
    ignore: Patterns = NOTHING
    kv: Format | None = None

    def layer_key(self, layer: int) -> int | None:
        """A number by which layers that are otherwise alike may be stored differently; None for "like most"."""
        every = (self.ignore, *(patterns for patterns, _ in self.targets))
        return layer if any(not p.alike or layer in p.singled_out for p in every) else None

    def format(self, names: Sequence[str], layer: int | None = None, *, part: str = "linear") -> Format:
        """The format of the weight known by any of `names`.

        part: "linear", "expert", or "plain" for weights that stay as they are unless named (routers, head, embedding).
        """
        if self.ignore and self.ignore.match(names, layer):
            return self.base
        for patterns, found in self.targets:
            if patterns.match(names, layer):
                return found
        if part == "plain":
            return self.base
        if part == "expert" and self.experts is not None:
            return self.experts
        return self.linear or self.base


def read_dtype(keys: Sequence[Keys]) -> Format | None:
    """The dtype that the first of the objects declares, None when none does. Raises InputError for an unknown one."""
    for each in keys:
        for key in ("dtype", "torch_dtype"):
            name = each.text(key).removeprefix("torch.")
            if name and name != "auto":
                if name not in DTYPES:
                    raise each.fail(key, f"unknown dtype {name[:40]!r}", f"known: {', '.join(DTYPES)}")
                return DTYPES[name]
    return None


def read_expert_dtype(keys: Keys) -> Format | None:
    """The format that `expert_dtype` gives to routed experts in an FP8 checkpoint; None when they are FP8 too."""
    name = keys.text("expert_dtype").lower()
    if not name or name.startswith("fp8"):
        return None
    if name in ("fp4", "mxfp4"):
        return MXFP4
    raise keys.fail("expert_dtype", f"{name[:40]!r} is not supported", "supported: fp4, fp8")


def read_scheme(config: Keys | None, base: Format, side: Keys | None = None, experts: Format | None = None) -> Scheme:
    """The scheme that a quantization_config (or a hf_quant_config.json, `side`) declares; both None: unquantised.

    `experts` is the routed experts' format in an FP8 checkpoint that stores them in another one.

    Raises InputError for a method, an algorithm or a value that is not supported, naming it.
    """
    if config is None and side is not None:
        config = side.nested("quantization") or side
    if config is None or not config.values:
        return Scheme("none", base)
    method = config.text("quant_method", "quantization_method").lower().replace("_", "-")
    algorithm = config.text("quant_algo")
    kv = _kv_cache(config)
    if not method and config.has("config_groups"):
        method = "compressed-tensors"
    if not method and (algorithm or config.has("kv_cache_quant_algo")):
        method = "modelopt"
    if method == "fp8" and config.has("quantized_layers"):
        return _fp8_with_layers(config, base, kv, experts)
    if method in ("fp8", "fbgemm-fp8"):
        found = _fp8(config)
        label = method + (" in blocks" if found.scale_bits else "") + (f" + experts {experts.name}" if experts else "")
        return Scheme(label, base, found, experts, (), _ignored(config), kv)
    if method == "compressed-tensors":
        return _compressed(config, base, kv)
    if method.startswith("modelopt"):
        return _modelopt(config, base, kv, algorithm)
    if method in ("awq", "gptq", "auto-round", "auto-gptq", "intel/auto-round", "gptq-marlin", "awq-marlin"):
        return _integer_method(config, base, kv, method)
    if method in ("mxfp8", "nvfp4"):
        return Scheme(method, base, MXFP8 if method == "mxfp8" else NVFP4, None, (), _ignored(config), kv)
    if method == "mxfp4":
        return Scheme("mxfp4 (experts)", base, None, MXFP4, (), _ignored(config), kv)
    if method == "quark":
        return _quark(config, base, kv)
    if method == "bitsandbytes":
        return _bitsandbytes(config, base, kv)
    where = "quant_method" if method else "quant_algo"
    raise config.fail(where, f"quantisation {(method or algorithm)[:40]!r} is not supported", f"supported: {METHODS}")


def _strings(config: Keys, *names: str) -> list[str]:
    found: list[str] = []
    for name in names:
        value = config.get(name)
        if isinstance(value, dict):
            value = list(value)
        if value is None:
            continue
        if not isinstance(value, list) or not all(isinstance(v, str) for v in value):
            raise config.fail(name, "is not a list of module names", "write a list of texts")
        found += value
    return found


def _ignored(config: Keys) -> Patterns:
    names = _strings(config, "ignore", "modules_to_not_convert", "exclude_modules", "ignored_layers", "exclude",
                     "llm_int8_skip_modules")  # fmt: skip
    return Patterns(names, config.where)


def _fp8(config: Keys) -> Format:
    block = config.numbers("weight_block_size", minimum=1)
    if block is None:
        return FP8
    if len(block) != 2:
        raise config.fail("weight_block_size", "does not have two entries", "write [rows, columns]")
    return fp8_block(*block)


def _fp8_with_layers(config: Keys, base: Format, kv: Format | None, experts: Format | None) -> Scheme:
    """An FP8 checkpoint of which some layers were quantised again (DeepSeek-V4 NVFP4): `ignore` speaks of those only."""
    ignored = Patterns(_strings(config, "modules_to_not_convert"), config.where)
    targets = _quantised_layers(config)
    return Scheme("fp8 + " + _names(targets), base, _fp8(config), experts, targets, ignored, kv)


def _names(targets: Iterable[tuple[Patterns, Format]]) -> str:
    return " + ".join(dict.fromkeys(found.name for _, found in targets))


def _compressed(config: Keys, base: Format, kv: Format | None) -> Scheme:
    groups = config.nested("config_groups")
    if groups is None:
        return Scheme("none", base, kv=kv)
    linear: Format | None = None
    targets: list[tuple[Patterns, Format]] = []
    outer = config.text("format")
    for name in groups.values:
        group = groups.nested(name)
        weights = group.nested("weights") if group else None
        if group is None or weights is None:
            continue
        found = _compressed_format(weights, group.text("format", default=outer))
        named = _strings(group, "targets")
        if not named or "Linear" in named:
            linear = found
        patterns = Patterns([t for t in named if t != "Linear"], config.where)
        if patterns:
            targets.append((patterns, found))
    if linear is None and not targets:
        return Scheme("none", base, kv=kv)
    kinds = dict.fromkeys([*([linear.name] if linear else []), *(f.name for _, f in targets)])
    return Scheme(f"compressed-tensors {' + '.join(kinds)}", base, linear, None, tuple(targets), _ignored(config), kv)


def _compressed_format(weights: Keys, layout: str) -> Format:
    bits = weights.whole("num_bits", minimum=2, maximum=16)
    kind = weights.text("type", default="int")
    group = weights.optional("group_size", minimum=-1)
    if kind == "float" and bits == 4:
        return MXFP4 if layout.startswith("mxfp4") or group == 32 else NVFP4
    if kind == "float" and bits == 8:
        block = weights.numbers("block_structure", minimum=1)
        if block is not None and len(block) == 2:
            return fp8_block(*block)
        return MXFP8 if layout.startswith("mxfp8") else FP8
    if kind == "int" and bits <= 8:
        return integer(bits, group or -1, zero_points=not weights.flag("symmetric", default=True))
    raise weights.fail("num_bits", f"weights of type {kind[:20]!r} with {bits} bits are not supported",
                       "supported: int up to 8 bits, float with 4 or 8")  # fmt: skip


def _modelopt_format(keys: Keys, algorithm: str, group: int | None) -> Format:
    name = algorithm.upper()
    if group is not None and group <= 0:
        group = None
    if "NVFP4" in name:
        return Format("nvfp4", 4, 8 / (group or 16))
    if name.startswith(("MXFP4", "W4A8_MXFP4", "W4A16_MXFP4")):
        return MXFP4
    if name.startswith("MXFP8"):
        return MXFP8
    if name.startswith(("FP8_PB", "FP8_BLOCK")):
        return fp8_block(128, 128)
    if name.startswith("FP8"):
        return FP8
    if name.startswith(("W4A16", "W4A8", "INT4")):
        return integer(4, group or 128)
    if name.startswith(("W8A8", "W8A16", "INT8")):
        return integer(8, group or -1)
    raise keys.fail("quant_algo", f"{algorithm[:40]!r} is not supported",
                    "supported: NVFP4, FP8, FP8_PB_WO, MXFP4, MXFP8, W4A16, W4A8, INT8, MIXED_PRECISION")  # fmt: skip


def _quantised_layers(config: Keys) -> tuple[tuple[Patterns, Format], ...]:
    layers = config.nested("quantized_layers")
    if layers is None:
        raise config.fail("quantized_layers", "the key is missing", "MIXED_PRECISION needs one entry a module")
    names: dict[Format, list[str]] = {}
    known: dict[tuple[Any, Any], Format] = {}
    for name, value in layers.values.items():
        if not isinstance(value, dict):
            raise layers.fail(name, "is not an object", "write {quant_algo: ...}")
        algorithm, group = value.get("quant_algo"), value.get("group_size")
        if isinstance(algorithm, list | dict) or isinstance(group, list | dict):
            raise layers.fail(name, "has a list or object as value", 'write {"quant_algo": ..., "group_size": ...}')
        if (algorithm, group) not in known:
            entry = Keys(value, layers.where, f"{layers.prefix}{name}.")
            known[algorithm, group] = _modelopt_format(entry, entry.text("quant_algo"), entry.optional("group_size"))
        names.setdefault(known[algorithm, group], []).append(name)
    return tuple((Patterns(each, config.where), found) for found, each in names.items())


def _modelopt(config: Keys, base: Format, kv: Format | None, algorithm: str) -> Scheme:
    ignored = _ignored(config)
    if algorithm.upper() == "MIXED_PRECISION":
        targets = _quantised_layers(config)
        return Scheme(f"modelopt mixed ({_names(targets)})", base, None, None, targets, ignored, kv)
    if not algorithm and config.has("config_groups"):
        found = _compressed(config, base, kv)
        return Scheme(found.label.replace("compressed-tensors", "modelopt"), base, found.linear, None, found.targets,
                      ignored, kv)  # fmt: skip
    if not algorithm:
        return Scheme("none", base, kv=kv)
    group = config.optional("group_size", minimum=-1)
    return Scheme(f"modelopt {algorithm}", base, _modelopt_format(config, algorithm, group), None, (), ignored, kv)


def _integer_method(config: Keys, base: Format, kv: Format | None, method: str) -> Scheme:
    bits = config.whole("bits", "w_bit", "num_bits", minimum=2, maximum=8)
    group = config.whole("group_size", "q_group_size", default=128, minimum=-1)
    gptq = "gptq" in method
    zeros = gptq or config.flag("zero_point", default="awq" in method or not config.flag("sym", default=True))
    found = integer(bits, group, zero_points=zeros)
    ignored = _strings(config, "modules_to_not_convert", "ignore", "exclude_modules")
    targets: list[tuple[Patterns, Format]] = []
    dynamic = config.nested("dynamic")
    for rule in dynamic.values if dynamic else ():
        expression = "re:" + re.sub(r"^[+-]:", "", rule)
        if rule.startswith("-:"):
            ignored.append(expression)
        elif dynamic is not None and (entry := dynamic.nested(rule)) is not None:
            own = integer(entry.whole("bits", default=bits, minimum=2, maximum=8),
                          entry.whole("group_size", default=group, minimum=-1), zero_points=zeros)  # fmt: skip
            targets.append((Patterns([expression], config.where), own))
    if config.flag("lm_head"):
        targets.append((Patterns(["lm_head"]), found))
    label = f"{method} {found.name}" + (f" g{group}" if group > 0 else "")
    return Scheme(label, base, found, None, tuple(targets), Patterns(ignored, config.where), kv)


def _quark(config: Keys, base: Format, kv: Format | None) -> Scheme:
    """AMD's Quark: one format for all, others for what `layer_quant_config` names, none for what `exclude` does."""
    every, layers = config.nested("global_quant_config"), config.nested("layer_quant_config")
    linear = _quark_format(every) if every else None
    named: list[tuple[Patterns, Format]] = []
    for name in layers.values if layers else ():
        entry = layers.nested(name) if layers else None
        if entry is not None and (found := _quark_format(entry)) is not None:
            named.append((Patterns([name], config.where), found))
    caches = config.nested("kv_cache_quant_config")
    for name in caches.values if caches and kv is None else ():
        entry = caches.nested(name) if caches else None
        out = entry.nested("output_tensors") if entry else None
        kv = FP8 if out is not None and out.text("dtype").startswith("fp8") else kv
    names = dict.fromkeys([*([linear.name] if linear else []), *(found.name for _, found in named)])
    if not names:
        return Scheme("none", base, kv=kv)
    return Scheme(f"quark {' + '.join(names)}", base, linear, None, tuple(named), _ignored(config), kv)


def _quark_format(entry: Keys) -> Format | None:
    """What a part of a Quark config makes of weights, None for nothing."""
    weight = entry.nested("weight")
    if weight is None:
        return None
    dtype, group = weight.text("dtype"), weight.optional("group_size", minimum=-1)
    if dtype == "mx":
        dtype = weight.text("mx_element_dtype")
    if dtype == "fp4":
        return MXFP4
    if dtype.startswith("fp8"):
        return FP8
    if found := re.fullmatch(r"u?int([48])", dtype):
        return integer(int(found[1]), group or -1)
    raise weight.fail("dtype", f"{dtype[:40]!r} is not supported", "supported: fp4, fp8, int8, int4")


def _bitsandbytes(config: Keys, base: Format, kv: Format | None) -> Scheme:
    if config.flag("load_in_4bit"):
        # One scale for 64 values: 32 bits, or with double quantisation 8 bits and 32 more for 256 scales.
        scale = 8 / 64 + 32 / (64 * 256) if config.flag("bnb_4bit_use_double_quant") else 32 / 64
        found = Format("int4", 4, scale)
    elif config.flag("load_in_8bit"):
        found = Format("int8", 8)
    else:
        return Scheme("none", base, kv=kv)
    return Scheme(f"bitsandbytes {found.name}", base, found, None, (), _ignored(config), kv)


def _kv_cache(config: Keys) -> Format | None:
    algorithm = config.text("kv_cache_quant_algo").upper()
    scheme = config.nested("kv_cache_scheme") if isinstance(config.get("kv_cache_scheme"), dict) else None
    if scheme is not None:
        bits = scheme.whole("num_bits", default=8, minimum=4, maximum=16)
        kind = scheme.text("type", default="float")
        known = {(8, "float"): FP8, (8, "int"): Format("int8", 8), (4, "float"): NVFP4, (16, "float"): None}
        if (bits, kind) not in known:
            raise scheme.fail("num_bits", f"a KV cache of {bits} bits is not supported", "supported: 4, 8 or 16")
        return known[bits, kind]
    if not algorithm or algorithm in ("NONE", "AUTO"):
        return None
    caches = {"FP8": FP8, "INT8": Format("int8", 8), "NVFP4": NVFP4}
    if algorithm not in caches:
        raise config.fail(
            "kv_cache_quant_algo", f"{algorithm[:40]!r} is not supported", f"supported: {', '.join(caches)}"
        )
    return caches[algorithm]
