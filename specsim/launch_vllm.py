"""What vLLM makes of a launch line's values (engine/arg_utils.py and config/; docs/engines.md names the files)."""

from __future__ import annotations

import re
from typing import Any

from specsim.errors import InputError
from specsim.launch_flags import BY_BATCH, Reader, plain, present, whole

METHODS = {
    "eagle": "eagle",
    "eagle3": "eagle3",
    "mtp": "mtp",
    "draft_model": "draft-model",
    "ngram": "ngram",
    "[ngram]": "ngram",
    "ngram_gpu": "ngram",
    "suffix": "ngram",
}


def vllm(read: Reader) -> dict[str, Any]:
    tp, dp = read.whole("--tp-size") or 1, read.whole("--dp-size") or 1
    experts = read.on("--enable-expert-parallel")
    options = plain("vllm", read)
    if read.text("--max-model-len") not in (None, "auto", "-1"):
        options["context_length"] = read.whole("--max-model-len")
    if isinstance(backend := read.json("--attention-config").get("backend"), str):
        options.setdefault("attention_backend", backend)
    if "VLLM_ATTENTION_BACKEND" in read.env:
        options.setdefault("attention_backend", read.env["VLLM_ATTENTION_BACKEND"])
    if dp > 1 and experts:
        options.update({"tp": tp * dp, "dp_attention": dp})
        read.note(
            f"--data-parallel-size {dp} with expert parallelism: {tp * dp} GPUs, attention on {dp} groups of {tp}, "
            f"experts over all; read as tp {tp * dp}, dp_attention {dp}"
        )
    elif dp > 1:
        read.note(
            f"--data-parallel-size {dp}: {dp} copies of {tp} GPUs for a dense model; "
            "a mixture of experts cuts its experts over all of them"
        )
    if experts:
        options["ep"] = tp * dp
    options.update(_graphs(read))
    _speculation(options, read)
    return options


def _graphs(read: Reader) -> dict[str, Any]:
    config = read.json("--compilation-config") if not _is_level(read.text("--compilation-config")) else {}
    mode = str(config.get("cudagraph_mode", "")).upper()
    sizes = read.wholes("--cudagraph-capture-sizes")
    if sizes is None and config.get("cudagraph_capture_sizes") is not None:
        given = config["cudagraph_capture_sizes"]
        if not isinstance(given, list) or not given:
            where = "--compilation-config cudagraph_capture_sizes"
            raise InputError("is not a list of sizes", where=where, mend="give whole numbers")
        sizes = sorted({whole(size, "cudagraph_capture_sizes", 1) for size in given})
    largest = read.whole("--max-cudagraph-capture-size", 0)
    if largest is None and config.get("max_cudagraph_capture_size") is not None:
        largest = whole(config["max_cudagraph_capture_size"], "max_cudagraph_capture_size", 0)
    eager = read.on("--enforce-eager")
    off = eager or mode == "NONE" or read.text("--optimization-level") == "0" or largest == 0
    if eager and (sizes or largest or mode not in ("", "NONE")):
        read.note("--enforce-eager: wins over the compilation config; nothing runs in CUDA graphs")
    if "PIECEWISE" in mode and "FULL" not in mode:
        read.note(f"cudagraph_mode {mode}: attention runs outside the graphs, one launch a layer and piece")
    if off:
        read.note("CUDA graphs are off: decode and verify are launched kernel by kernel")
    return present({"cuda_graph_max_bs": largest or None, "captured_sizes": sizes, "disable_cuda_graph": off or None})


def _is_level(text: str | None) -> bool:
    return text is not None and re.fullmatch(r"[0-3]", text.strip()) is not None


def _speculation(options: dict[str, Any], read: Reader) -> None:
    where = "--speculative-config"
    config = read.json(where)
    for flag, key in (
        ("--spec-method", "method"),
        ("--spec-model", "model"),
        ("--spec-tokens", "num_speculative_tokens"),
    ):
        if read.on(flag):
            if key in config:
                raise InputError(f"{key} is given twice", where=flag, mend=f"leave it out here or in {where}")
            config[key] = read.text(flag)
    if not config:
        options["method"] = "none"
        return
    method, draft = config.get("method"), config.get("model")
    for key, value in (("method", method), ("model", draft)):
        if value is not None and not isinstance(value, str):
            raise InputError(f"{key} is not a text", where=where, mend=f'give "{key}": "..."')
    name = _method(read, method, draft)
    tokens = config.get("num_speculative_tokens")
    if tokens is not None:
        tokens = whole(tokens, f"{where} num_speculative_tokens", 1)
    elif name == "mtp":
        tokens = 1
        read.note("num_speculative_tokens is missing: vLLM takes the model's number of next-token layers; read as 1")
    elif name == "suffix":
        tokens = 24
        read.note("num_speculative_tokens is missing: suffix decoding verifies up to 24")
    else:
        raise InputError("num_speculative_tokens is missing", where=where, mend="give how many tokens to draft")
    options["method"] = METHODS.get(name, name)
    options.update({"num_steps": tokens, "topk": 1, "draft_tokens": tokens + 1})
    if draft is not None and name not in ("ngram", "ngram_gpu", "suffix"):
        options["draft"] = draft
    if name == "suffix":
        read.note("suffix: the number of verified tokens changes from step to step; the largest is used")
    if name not in METHODS:
        read.note(f"speculative method {name!r} has no cost model here")
    if config.get("num_speculative_tokens_per_batch_size"):
        read.note(f"num_speculative_tokens_per_batch_size: {BY_BATCH}")
    if config.get("speculative_token_tree") is not None:
        read.note("speculative_token_tree: not read; a chain is assumed")
    if config.get("enforce_eager") is True:
        read.note("speculative enforce_eager: the draft is launched kernel by kernel")
    if config.get("use_heterogeneous_vocab") is True:
        options["heterogeneous_vocab"] = True
    draft_tp = config.get("draft_tensor_parallel_size")
    if draft_tp is not None:
        draft_tp = whole(draft_tp, f"{where} draft_tensor_parallel_size", 1)
        target = options.get("tp", 1) // (options.get("dp_attention") or 1)
        if draft_tp not in (1, target):
            read.note(f"draft_tensor_parallel_size {draft_tp}: vLLM takes only 1 or the target's {target}")
        options["draft_tp"] = draft_tp


def _method(read: Reader, method: str | None, draft: str | None) -> str:
    """The method as vLLM deduces it: its own name, then the draft's name, then a whole draft model."""
    name = method or ("ngram" if draft in ("ngram", "[ngram]") else "draft_model")
    if name != "mtp" and name.endswith("_mtp"):
        read.note(f"method {name!r}: vLLM's old name of mtp")
        name = "mtp"
    if draft is None:
        if name in ("eagle", "eagle3", "draft_model", "dflash", "medusa"):
            mend = 'add "model": "..."'
            raise InputError(f"method {name!r} without a draft model", where="--speculative-config", mend=mend)
        return name
    if name in ("eagle", "eagle3", "dflash", "ngram", "[ngram]", "ngram_gpu", "suffix", "extract_hidden_states"):
        return name
    lower = draft.lower()
    named = "eagle" if "eagle-" in lower else "eagle3" if "eagle3" in lower else "dflash" if "dflash" in lower else name
    if named != name or method is None:
        read.note(f"method deduced from the draft's name {draft!r}: {named}")
    if named == "draft_model":
        read.note("vLLM also looks into the draft's config: a next-token (MTP) or Medusa type there wins")
    return named
