"""Which layer of a model is of which kind: the many keys by which configs say so, read into one `Plan` a layer."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from specsim.errors import InputError
from specsim.families import EXPERT_COUNTS, EXPERTS_PER_TOKEN, Family, Plan
from specsim.keys import MAX_LAYERS, Keys

# Names in layer_types, layers_block_type and hybrid_override_pattern -> mixer; local ones read a window.
MIXER_NAMES = {
    "full_attention": "full",
    "attention": "full",
    "full": "full",
    "global_attention": "full",
    "deepseek_sparse_attention": "full",
    "sliding_attention": "sliding",
    "sliding": "sliding",
    "local_attention": "sliding",
    "chunked_attention": "chunked",
    "linear_attention": "linear",
    "kda": "kda",
    "mamba": "mamba",
    "conv": "conv",
    "compressed_sparse_attention": "full",
    "heavily_compressed_attention": "full",
}
PATTERN_LETTERS = {"M": "mamba", "*": "attention", "-": "mlp", "E": "moe"}
BLOCKS = {"mamba": ("mamba2", ""), "attention": ("gqa", ""), "mlp": ("", "dense"), "moe": ("", "moe")}


def layer_count(keys: Keys) -> int:
    """The number of decoder layers. Raises InputError when it is missing or beyond `MAX_LAYERS`."""
    blocks = keys.values.get("layers_block_type")
    if not keys.has("num_hidden_layers") and isinstance(blocks, list) and 0 < len(blocks) <= MAX_LAYERS:
        return len(blocks)
    return keys.whole("num_hidden_layers", "n_layer", "num_layers", maximum=MAX_LAYERS)


def has_experts(keys: Keys, family: Family) -> bool:
    """Whether the model has routed experts. A count of 0 or 1 says no, where the family has dense models at all.

    Raises InputError for a MoE whose experts cannot be counted.
    """
    counts = [n for n in EXPERT_COUNTS if keys.has(n)]
    if any(keys.whole(n, minimum=0, maximum=65536) > 1 for n in counts):
        keys.whole(*counts, minimum=0, maximum=65536)  # all must agree
        if keys.values.get("enable_moe_block") is None or keys.flag("enable_moe_block"):
            return True
        raise keys.fail("enable_moe_block", "is false, but the config counts experts", "correct one of them")
    least = 2 if counts else 1
    chosen = next((n for n in EXPERTS_PER_TOKEN if (keys.optional(n, minimum=0) or 0) >= least), "")
    if keys.flag("enable_moe_block"):
        chosen = "enable_moe_block"
    moe = family.moe or (not counts and "moe" in keys.text("model_type").lower())
    if chosen or moe:
        key, state = (counts[0], f"is {keys.get(counts[0])}") if counts else (EXPERT_COUNTS[1], "the key is missing")
        reason = f"{chosen} says that this one has" if chosen else "its architecture has them"
        raise keys.fail(key, f"{state}: experts cannot be counted, but {reason}",
                        f"give the number of experts ({', '.join(EXPERT_COUNTS)})")  # fmt: skip
    return False


def plan_layers(keys: Keys, family: Family, *, drafter: bool = False) -> list[Plan]:
    """One plan a layer; a drafter's layers may be dense where its target's have experts.

    Raises InputError for a layer kind that is not known, naming it.
    """
    n = layer_count(keys)
    keys.layers = n
    if keys.has("hybrid_override_pattern") or (keys.has("layers_block_type") and family.attention == "mixer"):
        return _block_plans(keys, n)
    if keys.has("block_configs"):
        return _searched_plans(keys, n)
    mixers = _mixers(keys, family, n)
    ffns = _ffns(keys, family, n, drafter)
    widths = (
        keys.numbers("intermediate_size", n, minimum=1)
        if isinstance(keys.values.get("intermediate_size"), list)
        else [0] * n
    )
    plans = [replace(m, ffn=ffn, intermediate=w) for m, ffn, w in zip(mixers, ffns, widths or [], strict=True)]
    if family.twofold:
        return [replace(plan, ffn=ffn) for plan in plans for ffn in ("dense", "both")]
    return plans


def mtp_plans(keys: Keys, family: Family, plans: list[Plan]) -> list[Plan]:
    """The plans of the built-in next-token-prediction layers, all modules in order; empty when there are none."""
    modules = _mtp_modules(keys)
    if not modules:
        return []
    letters = keys.text("mtp_hybrid_override_pattern")
    names = [PATTERN_LETTERS.get(c, c) for c in letters] or keys.items("mtp_layers_block_type")
    if names:
        return [_block(keys, "mtp_layers_block_type", name) for name in names] * modules
    last = plans[-1]
    dense = (p for p in reversed(plans) if p.mixer in ("gqa", "mla", "csa") and not p.local)
    mixer = next(dense, last)
    if mixer.mixer == "csa":
        mixer = replace(mixer, ratio=0)
    ffn = "moe" if any(p.ffn == "moe" for p in plans) else last.ffn
    return [replace(mixer, ffn=ffn, indexer="full" if mixer.indexer else "", shares_kv=False)] * modules


def _mtp_modules(keys: Keys) -> int:
    named = keys.optional("num_nextn_predict_layers", "mtp_num_hidden_layers", "mtp_num_layers", minimum=0, maximum=64)
    modules = keys.optional("num_mtp_modules", minimum=0, maximum=64)
    each = keys.optional("mtp_transformer_layers", minimum=1, maximum=64) or 1
    if named is not None:
        return named
    return (modules or 0) * each if keys.flag("use_mtp", default=True) else 0


def _block(keys: Keys, key: str, name: Any) -> Plan:
    if not isinstance(name, str) or name not in BLOCKS:
        raise _unknown(keys, key, name, BLOCKS)
    mixer, ffn = BLOCKS[name]
    return Plan(mixer=mixer, ffn=ffn)


def _unknown(keys: Keys, key: str, name: Any, known: dict[str, Any]) -> InputError:
    shown = name[:40] if isinstance(name, str) else type(name).__name__
    return keys.fail(key, f"unknown layer kind {shown!r}", f"supported: {', '.join(known)}")


def _block_plans(keys: Keys, n: int) -> list[Plan]:
    """Nemotron-H: each layer is a mixer or a feed-forward, by letters or by names."""
    key = "hybrid_override_pattern" if keys.has("hybrid_override_pattern") else "layers_block_type"
    names: list[Any]
    if key == "hybrid_override_pattern":
        letters = keys.text(key)
        for letter in letters:
            if letter not in PATTERN_LETTERS:
                raise _unknown(keys, key, letter, PATTERN_LETTERS)
        names = [PATTERN_LETTERS[letter] for letter in letters]
        keys.get("layers_block_type")
    else:
        names = keys.items(key) or []
    if len(names) != n:
        raise keys.fail(key, f"describes {len(names)} layers, but num_hidden_layers is {n}", "correct one of them")
    return [_block(keys, key, name) for name in names]


def _searched_plans(keys: Keys, n: int) -> list[Plan]:
    """Nemotron-NAS: each block has its own KV heads and feed-forward width, or drops either."""
    plans = []
    hidden = keys.whole("hidden_size")
    heads = keys.whole("num_attention_heads", maximum=65536)
    for i, raw in enumerate(keys.items("block_configs", n) or []):
        if not isinstance(raw, dict):
            raise keys.fail("block_configs", f"entry {i} is not an object", "write one object a layer")
        block = Keys(raw, keys.where, f"{keys.prefix}block_configs.{i}.", keys.used)
        attention, ffn = block.nested("attention"), block.nested("ffn")
        if attention is None or ffn is None:
            raise block.fail("attention", "attention or ffn is missing", "describe both in each block")
        for part in (attention, ffn):
            if part.flag("replace_with_linear"):
                raise part.fail("replace_with_linear", "linear replacements are not supported", "use another model")
        mixer = "" if attention.flag("no_op") else "gqa"
        group = attention.optional("n_heads_in_group", maximum=65536) or 1
        if heads % group:
            raise attention.fail("n_heads_in_group", f"{group} does not divide {heads} heads", "correct it")
        width = ffn.optional("intermediate_size")
        if width is None and not ffn.flag("no_op"):
            multiple = ffn.number("ffn_mult")
            if multiple is None:
                raise ffn.fail("ffn_mult", "the key is missing", "add ffn_mult or intermediate_size")
            width = -(-int(2 * multiple * hidden / 3) // 256) * 256
        if ffn.flag("no_op"):
            width = 0
        window = attention.optional("window_length")
        plans.append(
            Plan(
                mixer, "dense" if width else "", window, bool(window), kv_heads=heads // group, intermediate=width or 0
            )
        )
    return plans


def _mixers(keys: Keys, family: Family, n: int) -> list[Plan]:
    """Plans without their feed-forwards."""
    if keys.has("linear_attn_config"):
        return _kda_plans(keys, n)
    if keys.has("compress_ratios"):
        ratios = keys.numbers("compress_ratios", n) or []
        keys.get("layer_types")
        return [Plan("csa", ratio=r) for r in ratios]
    if keys.has("kv_lora_rank"):
        types = keys.items("layer_types", n)
        for name in types or ():
            if name not in ("deepseek_sparse_attention", "full_attention"):
                raise _unknown(keys, "layer_types", name, {"deepseek_sparse_attention": 0, "full_attention": 0})
        indexers = keys.items("indexer_types", n) or ["full"] * n
        for name in indexers:
            if name not in ("full", "shared"):
                raise _unknown(keys, "indexer_types", name, {"full": 0, "shared": 0})
        return [Plan("mla", indexer=name) for name in indexers]
    kinds = _kinds(keys, family, n)
    window = _window(keys, "sliding_window", "sliding_window_size")
    chunk = keys.optional("attention_chunk_size")
    if "sliding" in kinds and window is None:
        raise keys.fail("sliding_window", "the key is missing, but there are sliding layers", "add sliding_window")
    if "chunked" in kinds and chunk is None:
        raise keys.fail("attention_chunk_size", "the key is missing, but there are chunked layers", "add it")
    mamba = "mamba1" if keys.has("mamba_dt_rank") and not keys.has("mamba_n_heads") else "mamba2"
    shared = keys.optional("num_kv_shared_layers", minimum=0, maximum=MAX_LAYERS) or 0
    group = keys.whole("cla_share_factor", default=2, maximum=MAX_LAYERS) if keys.flag("use_cla") else 1  # Hunyuan
    sparse = _sparse_layers(keys, n)
    plans = []
    for i, kind in enumerate(kinds):
        shares, indexer = i >= n - shared or i % group > 0, "full" if sparse[i] else ""
        if kind in ("full", "sliding", "chunked"):
            width = {"full": None, "sliding": window, "chunked": chunk}[kind]
            local = kind == "sliding"
            plans.append(Plan("gqa", "", width, local, kind == "chunked", shares, indexer=indexer))
        else:
            plans.append(Plan({"mamba": mamba, "linear": family.linear}.get(kind, kind), ""))
    return plans


def _kinds(keys: Keys, family: Family, n: int) -> list[str]:
    """full, sliding, chunked, linear, kda, mamba or conv for each layer."""
    for key in ("layer_types", "layers_block_type"):
        names = keys.items(key, n)
        if names is not None:
            for name in names:
                if not isinstance(name, str) or name not in MIXER_NAMES:
                    raise _unknown(keys, key, name, MIXER_NAMES)
            return [MIXER_NAMES[name] for name in names]
    if (interval := keys.optional("full_attention_interval", maximum=MAX_LAYERS)) is not None:
        return ["full" if (i + 1) % interval == 0 else "linear" for i in range(n)]
    if family.linear == "lightning" and (group := keys.optional("layer_group_size", maximum=MAX_LAYERS)) is not None:
        # Ring-linear: the last of each group, and what is left over behind the last group
        return ["full" if (i + 1) % group == 0 or i >= n - n % group else "linear" for i in range(n)]
    if (indices := keys.numbers("full_attn_idxs")) is not None:
        return ["full" if i in set(indices) else "conv" for i in range(n)]
    if (period := keys.optional("attn_layer_period", maximum=MAX_LAYERS)) is not None:
        offset = keys.whole("attn_layer_offset", default=0, minimum=0)
        return ["full" if i % period == offset else "mamba" for i in range(n)]
    if (indices := keys.numbers("attn_layer_indices")) is not None:
        return ["full" if i in set(indices) else "mamba" for i in range(n)]
    if (types := keys.numbers("attn_type_list", n)) is not None and any(t != 1 for t in types):
        if family.linear != "lightning" or set(types) - {0, 1}:
            raise keys.fail("attn_type_list", "has layers of a kind that this family has not", "1 is full attention, and 0"
                            " lightning attention of MiniMax-01 and -M1")  # fmt: skip
        return ["full" if t else "linear" for t in types]
    if (pattern := keys.numbers("hybrid_layer_pattern", n)) is not None:
        return ["sliding" if p else "full" for p in pattern]
    if keys.has("attention_chunk_size") and not keys.has("swa_num_key_value_heads"):  # Llama-4
        no_rope = keys.numbers("no_rope_layers") or []
        interval = keys.whole("no_rope_layer_interval", default=4, maximum=MAX_LAYERS)
        if len(no_rope) >= n:  # 1: rotary and chunked, 0: neither
            return ["chunked" if r else "full" for r in no_rope[:n]]
        return ["chunked" if (i + 1) % interval else "full" for i in range(n)]
    return _window_kinds(keys, family, n)


def _window(keys: Keys, *names: str) -> int | None:
    """The tokens of a window; 0 and -1 say, as no key does, that there is none."""
    found = keys.optional(*names, minimum=-1)
    return found if found is not None and found > 0 else None


def _window_kinds(keys: Keys, family: Family, n: int) -> list[str]:
    window = _window(keys, "sliding_window")
    pattern = keys.get("sliding_window_pattern")
    if isinstance(pattern, int) and not isinstance(pattern, bool) and pattern > 0 and window:
        return ["sliding" if (i + 1) % pattern else "full" for i in range(n)]
    if isinstance(pattern, str) and pattern and set(pattern) <= {"L", "G"} and window:
        return ["sliding" if pattern[i % len(pattern)] == "L" else "full" for i in range(n)]
    if not window:
        return ["full"] * n
    if family.windows == "alternate":
        return ["sliding" if i % 2 == 0 else "full" for i in range(n)]
    if keys.has("use_sliding_window") or keys.has("max_window_layers"):
        first = keys.optional("max_window_layers", minimum=0)
        if not keys.flag("use_sliding_window"):
            return ["full"] * n
        return ["sliding" if i >= (first or 0) else "full" for i in range(n)]
    return ["sliding"] * n


def _kda_plans(keys: Keys, n: int) -> list[Plan]:
    """Kimi Linear and K3: layers counted from 1 in two lists, full ones with MLA."""
    config = keys.nested("linear_attn_config")
    assert config is not None
    full, linear = config.numbers("full_attn_layers") or [], config.numbers("kda_layers") or []
    if sorted(full + linear) != list(range(1, n + 1)):
        raise config.fail(
            "kda_layers", f"with full_attn_layers does not cover layers 1 to {n} once", "correct the lists"
        )
    chosen = set(full)
    return [Plan("mla" if i in chosen else "kda", "") for i in range(1, n + 1)]


def _sparse_layers(keys: Keys, n: int) -> list[bool]:
    """Which layers have MiniMax-M3's block-sparse indexer."""
    config = keys.nested("sparse_attention_config")
    if config is None or not config.flag("use_sparse_attention", default=True):
        return [False] * n
    return [bool(x) for x in config.numbers("sparse_attention_freq", n) or [1] * n]


def _ffns(keys: Keys, family: Family, n: int, drafter: bool) -> list[str]:
    """dense, moe or both for each layer."""
    if not has_experts(keys, family):
        return ["dense"] * n
    if keys.flag("enable_moe_block") or keys.flag("residual_moe"):  # Gemma-4, Grok-2
        return ["both"] * n
    for name in ("use_residual", "parallel_attn_mlp_res"):  # Arctic
        if keys.flag(name):
            raise keys.fail(name, "a dense feed-forward beside the experts is not supported", "use another model")
    moe = [True] * n
    if (types := keys.items("mlp_layer_types", n)) is not None:
        for name in types:
            if name not in ("dense", "sparse"):
                raise _unknown(keys, "mlp_layer_types", name, {"dense": 0, "sparse": 0})
        moe = [name == "sparse" for name in types]
    first = keys.optional("first_k_dense_replace", "num_dense_layers", minimum=0, maximum=MAX_LAYERS) or 0
    moe = [m and i >= first for i, m in enumerate(moe)]
    moe = [a and b for a, b in zip(moe, _frequency(keys, n, first), strict=True)]
    step = keys.optional("decoder_sparse_step", maximum=MAX_LAYERS) or 1
    only_dense = set(keys.numbers("mlp_only_layers") or ())
    moe = [m and (i + 1) % step == 0 and i not in only_dense for i, m in enumerate(moe)]
    if (listed := keys.numbers("moe_layers")) is not None:
        moe = [i in set(listed) for i in range(n)]
        keys.get("interleave_moe_layer_step")
    elif (step_ := keys.optional("interleave_moe_layer_step", maximum=MAX_LAYERS)) is not None:
        moe = [(i + 1) % step_ == 0 for i in range(n)]
    if (period := keys.optional("expert_layer_period", maximum=MAX_LAYERS)) is not None:
        offset = keys.whole("expert_layer_offset", default=0, minimum=0)
        moe = [i % period == offset for i in range(n)]
    start = keys.optional("moe_layer_start_index", minimum=0, maximum=MAX_LAYERS)
    end = keys.optional("moe_layer_end_index", minimum=-1, maximum=MAX_LAYERS)
    interval = keys.optional("moe_layer_interval", maximum=MAX_LAYERS) or 1
    if start is not None:
        last = n - 1 if end is None or end < 0 else end
        moe = [m and start <= i <= last and (i + 1) % interval == 0 for i, m in enumerate(moe)]
    enumerated = keys.text("moe_layers_enum")
    if enumerated:
        parts = [p.strip() for p in enumerated.split(",")]
        if not all(p.isdecimal() and len(p) < 6 for p in parts):
            raise keys.fail("moe_layers_enum", "is not a list of layer numbers", 'write it as "3,4,5"')
        chosen = {int(p) for p in parts}
        moe = [i in chosen for i in range(n)]
    if not any(moe) and drafter:
        return ["dense"] * n
    if not any(moe):
        raise keys.fail(EXPERT_COUNTS[0], "the model has experts, but by its other keys no layer uses them",
                        "correct the keys that say which layers are MoE")  # fmt: skip
    return ["moe" if m else "dense" for m in moe]


def _frequency(keys: Keys, n: int, first: int) -> list[bool]:
    """`moe_layer_freq`: one number for all (every k-th layer), or one flag a layer."""
    value = keys.get("moe_layer_freq")
    if isinstance(value, list):
        return [bool(x) for x in keys.numbers("moe_layer_freq", n) or []]
    every = keys.optional("moe_layer_freq", maximum=MAX_LAYERS) or 1
    return [i % every == 0 for i in range(n)]
