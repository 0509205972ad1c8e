"""What SGLang makes of a launch line's values (server_args.py and what it calls; docs/engines.md names the files)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from specsim.engines import load_engine
from specsim.errors import InputError, did_you_mean
from specsim.launch_flags import BY_BATCH, Reader, plain, present, whole


def sglang(read: Reader) -> dict[str, Any]:
    tp, dp = read.whole("--tp-size") or 1, read.whole("--dp-size") or 1
    options = plain("sglang", read)
    options.update(present({"chunked_prefill_size": read.whole("--chunked-prefill-size", -1)}))
    if read.on("--flashinfer-allreduce-fusion-backend") or read.on("--enable-flashinfer-allreduce-fusion"):
        options["flashinfer_allreduce_fusion"] = True
    if read.on("--enforce-disable-flashinfer-allreduce-fusion"):
        options["flashinfer_allreduce_fusion"] = False
    if read.on("--enable-symm-mem") or read.on("--enable-torch-symm-mem"):
        options["symmetric_memory"] = True
    options.update(_graphs(read))
    options.update(_prefill_graphs(read))
    if read.on("--enable-dp-attention"):
        if tp % dp:
            raise InputError(f"{dp} does not divide --tp-size {tp}", where="--dp-size", mend="give a divisor")
        options["dp_attention"] = dp if dp > 1 else False
        if dp == 1:
            read.note("--enable-dp-attention: has no effect without --dp-size above 1")
    elif dp > 1:
        read.note(f"--dp-size {dp} without --enable-dp-attention: {dp} independent copies of {tp} GPUs each")
    if options.get("moe_a2a_backend", "none") not in ("none", "ascend_tp") and options.get("ep", 1) != tp:
        options["ep"] = tp
        read.note(f"--moe-a2a-backend {options['moe_a2a_backend']}: experts are spread over all {tp} ranks")
    _speculation(options, read)
    _environment(options, read)
    return options


def _graphs(read: Reader) -> dict[str, Any]:
    """Captured batches. JSON wins over per-phase flags, those over the global switch; a list over a largest size."""
    decode = read.json("--cuda-graph-config").get("decode")
    decode = decode if isinstance(decode, dict) else {}
    backend = decode.get("backend") or read.text("--cuda-graph-backend-decode")
    off = read.on("--disable-cuda-graph") or read.on("--disable-decode-cuda-graph")
    sizes = decode.get("bs") or read.wholes("--cuda-graph-bs-decode")
    sizes = _captured(sizes, "decode")
    largest = read.whole("--cuda-graph-max-bs-decode")
    if decode.get("max_bs") is not None:
        largest = whole(decode["max_bs"], "--cuda-graph-config", 1)
    if sizes and largest and largest != sizes[-1]:
        read.note(f"--cuda-graph-max-bs {largest}: the list of batch sizes wins, so the largest is {sizes[-1]}")
    largest = sizes[-1] if sizes else largest
    if read.on("--disable-cuda-graph-padding") and largest and not sizes:
        sizes = list(range(1, min(largest, 4096) + 1))
    disabled = backend == "disabled" or (off and backend is None)
    if off and backend not in (None, "disabled"):
        read.note(f"--disable-cuda-graph: the decode backend {backend!r} wins over it, so decode runs in graphs")
    if disabled:
        read.note("CUDA graphs are off: decode, draft, verify and draft extend are all launched kernel by kernel")
    return present({"cuda_graph_max_bs": largest, "captured_sizes": sizes, "disable_cuda_graph": disabled or None})


def _captured(sizes: Any, phase: str) -> list[int] | None:
    """Sizes that a phase of --cuda-graph-config or a flag lists, ascending; None where neither does. Raises InputError."""
    if sizes is None:
        return None
    if not isinstance(sizes, list) or not sizes:
        raise InputError(f"{phase}.bs is not a list", where="--cuda-graph-config", mend="give whole numbers")
    return sorted({whole(size, "--cuda-graph-config", 1) for size in sizes})


# Flags that stand for a --cuda-graph-backend-prefill.
PREFILL_BACKENDS = {
    "--enable-breakable-cuda-graph": "breakable",
    "--enforce-piecewise-cuda-graph": "tc_piecewise",
    "--disable-piecewise-cuda-graph": "disabled",
}


def _prefill_graphs(read: Reader) -> dict[str, Any]:
    """Captured numbers of prompt tokens, by the same order of precedence; flags of two generations."""
    prefill = read.json("--cuda-graph-config").get("prefill")
    prefill = prefill if isinstance(prefill, dict) else {}
    flag = "--cuda-graph-backend-prefill"
    given = {name: kind for name, kind in PREFILL_BACKENDS.items() if read.on(name)}
    given |= {flag: str(read.text(flag))} if read.on(flag) else {}
    backend = prefill.get("backend")
    if backend is None and read.release < (0, 5, 14):  # switches of their own: that which enforces wins
        backend = next(
            (given[name] for name in (flag, *PREFILL_BACKENDS) if name in given and given[name] != "breakable"), None
        )
    elif backend is None:  # all write one option: the last on the line wins
        backend = next((given[name] for name in reversed(read.values) if name in given), None)
    kinds = (*PREFILL_BACKENDS.values(), "full")
    if backend is not None and backend not in kinds:
        raise InputError(
            f"{str(backend)[:40]!r} is no backend of prefill graphs", where=flag, mend=f"give one of {', '.join(kinds)}"
        )
    off = [read.on(flag) for flag in ("--disable-cuda-graph", "--disable-prefill-cuda-graph")]
    flags = (read.wholes("--cuda-graph-bs-prefill"), read.wholes("--piecewise-cuda-graph-tokens"))
    sizes = prefill["bs"] if prefill.get("bs") is not None else flags[0] or flags[1]
    sizes = _captured(sizes, "prefill")
    most = [read.whole(flag) for flag in ("--cuda-graph-max-bs-prefill", "--piecewise-cuda-graph-max-tokens")]
    largest = whole(prefill["max_bs"], "--cuda-graph-config", 1) if prefill.get("max_bs") is not None else None
    on = backend != "disabled" if backend else False if any(off) else None
    largest = largest or next((size for size in most if size), None)
    return present({"prefill_graphs": on, "prefill_graph_tokens": largest, "prefill_graph_sizes": sizes})


METHODS = {
    "EAGLE3": "eagle3",
    "NEXTN": "mtp",
    "STANDALONE": "draft-model",
    "NGRAM": "ngram",
    "LOOKAHEAD": "ngram",
    "FROZEN_KV_MTP": "mtp",
    "DFLASH": "dflash",
    "DSPARK": "dspark",
    "UNO": "uno",
}


def _speculation(options: dict[str, Any], read: Reader) -> None:
    algorithm = read.text("--speculative-algorithm")
    steps = read.whole("--speculative-num-steps", 0)
    topk = read.whole("--speculative-eagle-topk")
    tokens = read.whole("--speculative-num-draft-tokens")
    if algorithm is None:
        options["method"] = "none"
        if any(flag.startswith("--speculative") for flag in read.values):
            read.note("--speculative-* without --speculative-algorithm: SGLang does not speculate")
        return
    name = algorithm.upper()
    if name != "EAGLE" and name not in METHODS:
        known = ("EAGLE", *METHODS)
        raise InputError(
            f"unknown algorithm {algorithm!r}", where="--speculative-algorithm", mend=did_you_mean(name, known)
        )
    method = METHODS.get(name) or ("eagle" if "draft" in options else "mtp")
    if name == "NEXTN":
        read.note("--speculative-algorithm NEXTN: the same as EAGLE, with the model's own next-token layer as draft")
    elif name == "EAGLE" and method == "mtp":
        read.note("--speculative-algorithm EAGLE without a draft path: the model's own next-token layer (MTP) drafts")
    elif name == "LOOKAHEAD":
        read.note("--speculative-algorithm LOOKAHEAD: its name is NGRAM in described releases")
    options["method"] = method
    if name in ("DFLASH", "DSPARK", "UNO"):
        # SGLang calls the one pass over a block one step; a scenario's num_steps is the depth, which follows the block
        block = read.whole(f"--speculative-{name.lower()}-block-size") or tokens
        options.update(present({"topk": 1, "draft_tokens": block}))
        said = "" if block else ", and verified whole: the drafter's config says how long it is"
        read.note(f"--speculative-algorithm {name}: a block is drafted in one pass{said}")
    elif method == "ngram":
        tokens = tokens or 12
        breadth = read.whole("--speculative-ngram-max-bfs-breadth") or 10
        options.update({"num_steps": tokens - 1, "topk": 1, "draft_tokens": tokens})
        read.note(
            f"NGRAM: {tokens} tokens are verified, found on the host in a tree of breadth up to {breadth}; "
            f"read as a chain of {tokens}"
        )
    else:
        options.update(_chain(read, options, steps, topk, tokens))
    if read.on("--speculative-adaptive"):
        read.note(f"--speculative-adaptive: {BY_BATCH}")
    _limits(options, read, name)


def _chain(
    read: Reader, options: Mapping[str, Any], steps: int | None, topk: int | None, tokens: int | None
) -> dict[str, int]:
    """Steps, topk and draft tokens of EAGLE, EAGLE-3, MTP and STANDALONE (speculative_hook.py)."""
    if steps is None and topk is None and tokens is None:
        named = str(options.get("model", "")).lower()
        tree = read.architecture in ("LlamaForCausalLM", "Grok1ForCausalLM", "Grok1VForCausalLM")
        tree = (tree or (read.architecture is None and ("llama-" in named or "grok" in named))) and options[
            "method"
        ] != "draft-model"
        steps, topk, tokens = (5, 4, 8) if tree else (3, 1, 4)
        why = read.architecture or (f"{options['model']}, judged by its name" if named else "an unknown architecture")
        read.note(
            f"no steps, topk or draft tokens given: SGLang chooses by architecture; for {why} "
            f"{steps} steps, topk {topk}, {tokens} draft tokens"
        )
        return {"num_steps": steps, "topk": topk, "draft_tokens": tokens}
    if steps is None:
        steps = max(1, (tokens or 4) - 1)
        read.note(
            f"--speculative-num-steps is missing: SGLang refuses topk or draft tokens without it; read as {steps} steps"
        )
    if topk is None:
        topk = 1
        read.note("--speculative-eagle-topk is missing: SGLang fails at start without it; read as 1")
    if topk == 1 and tokens != steps + 1:
        if tokens is not None:
            read.note(f"--speculative-num-draft-tokens {tokens}: with topk 1 SGLang sets it to steps + 1 = {steps + 1}")
        tokens = steps + 1
    elif tokens is None:
        tokens = steps + 1
        read.note(f"--speculative-num-draft-tokens is missing: SGLang fails with topk {topk}; read as {tokens}")
    most = 1 + topk + max(0, steps - 1) * topk**2
    if tokens > most:
        read.note(f"--speculative-num-draft-tokens {tokens}: the tree has at most {most} tokens; SGLang fails")
    return {"num_steps": steps, "topk": topk, "draft_tokens": tokens}


def _limits(options: dict[str, Any], read: Reader, name: str) -> None:
    """What SGLang changes elsewhere because it speculates."""
    cap = load_engine("sglang").running_cap_speculative
    if "max_running_requests" not in options:  # the scenario's own default, where it still speculates
        read.note(f"speculation caps running requests at {cap} unless --max-running-requests is given")
    if read.on("--enable-mixed-chunk"):
        read.note("--enable-mixed-chunk: SGLang turns it off when it speculates")
    if options.get("dp_attention") and name in ("STANDALONE", "NGRAM", "LOOKAHEAD", "DFLASH"):
        read.note(f"--enable-dp-attention: SGLang {name} does not support it and refuses to start")
    topk = options.get("topk", 1)
    spec_v1 = read.release < (0, 5, 13) and name not in ("NGRAM", "LOOKAHEAD") and topk > 1
    synchronous = name in ("NGRAM", "LOOKAHEAD", "DFLASH") and read.release < (0, 5, 14)
    if (spec_v1 or synchronous) and not options.get("disable_overlap"):
        options["disable_overlap"] = True
        read.note(f"overlap scheduling is off: in this release it does not work with {name} and topk {topk}")
    mode = options.get("speculative_attention_mode")
    if mode is not None and mode not in ("prefill", "decode"):
        raise InputError(f"{mode!r} is not a mode", where="--speculative-attention-mode", mend="give prefill or decode")
    if mode is not None:
        read.note(
            "--speculative-attention-mode only chooses the attention backend of verify and draft extend; "
            "it does not decide whether they run in CUDA graphs"
        )
    trtllm = [key for key in options if key.endswith("attention_backend") and options[key] == "trtllm_mha"]
    if trtllm and topk > 1:
        read.note("trtllm_mha supports topk 1 only when speculating; SGLang refuses to start")


def _environment(options: dict[str, Any], read: Reader) -> None:
    length = read.env.get("SGLANG_SIMULATE_ACC_LEN")
    if length is not None:
        try:
            simulated = float(length)
        except ValueError:
            simulated = float("nan")
        if not simulated < 1e6:
            raise InputError(f"{length[:40]!r} is not a number", where="SGLANG_SIMULATE_ACC_LEN", mend="give one")
        if simulated > 0:
            options["simulated_accept_length"] = simulated
            read.note(f"SGLANG_SIMULATE_ACC_LEN: acceptance is simulated, {simulated:g} tokens a cycle")
    if "SGLANG_ENABLE_SPEC_V2" in read.env:
        value = read.env["SGLANG_ENABLE_SPEC_V2"].lower()
        if read.release >= (0, 5, 14):
            read.note("SGLANG_ENABLE_SPEC_V2: removed in 0.5.14; the overlapped worker always runs")
        elif value in ("0", "false", "no", "off") and options.get("method") not in (None, "none"):
            options["disable_overlap"] = True
            read.note("SGLANG_ENABLE_SPEC_V2=0: speculation runs without overlap scheduling")
    if read.env.get("SGLANG_ENABLE_PCIE_IPC_ALLREDUCE", "0").lower() in ("1", "true", "yes", "on") and read.release < (
        0,
        5,
        21,
    ):
        read.note("SGLANG_ENABLE_PCIE_IPC_ALLREDUCE: exists from 0.5.21 on; ignored by this release")
