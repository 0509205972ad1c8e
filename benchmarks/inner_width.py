"""Does walking the inner width take time, and does it overlap with streaming? Fits of recorded samples, three ways.

    python benchmarks/inner_width.py

For each class: without it; inside the root with the other limits, as products have it; beside the fixed time, as fused
experts and MLA (parts of its cache) have it. Errors on the samples fitted, and on shapes that the fit has not seen: experts of
4096 x 192 and 2048 x 1408, the products of Llama-3.1-8B, and MLA of 16 heads, timed back to back (validation/calibration).
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

from specsim.class_fits import DEFAULT_EFFICIENCY, READING, Fit, fit, points
from specsim.ops import operator_seconds

ROOT = Path(__file__).resolve().parents[1] / "validation" / "calibration"
BANDWIDTH, PEAK = 4.27e12, 680e12  # of this GPU: a copy, a bf16 product
FITTED = ("1x-h200", "1x-h200-blockwise", "1x-h200-deepseek-v2-lite")
UNSEEN = {
    "moe_bf16": ("1x-h200-experts-4096", "1x-h200-deepseek-v2-lite"),
    "gemm_bf16": ("1x-h200-llama-3.1-8b",),
    "attention_mla": ("1x-h200-deepseek-v2-lite",),
}
LITE = {"moe_bf16": {"intermediate": 1408}, "attention_mla": {"heads": 16}}
CLASSES = (
    "gemm_bf16",
    "gemm_fp8",
    "gemm_fp8_deepgemm",
    "gemm_fp8_triton",
    "moe_bf16",
    "moe_fp8",
    "moe_int4",
    "attention_mla",
)


def samples(*names: str) -> list[dict[str, Any]]:
    found: dict[str, dict[str, Any]] = {}
    for name in names:
        for s in json.loads((ROOT / f"{name}.record.json").read_text())["samples"]:
            if s["status"] == "done":
                found[s["key"]] = {**s, "extras": s.get("extras", s)}
    return list(found.values())


def errors(f: Fit, seconds: Any, nbytes: Any, flops: Any, inner: Any, staged: bool) -> Any:
    walk = inner * f.inner_s
    peak = f.flops_per_s or DEFAULT_EFFICIENCY * PEAK
    return operator_seconds(f.fixed_s, nbytes / f.bytes_per_s, flops / peak, walk, staged=staged) / seconds - 1


def said(e: Any) -> str:
    worst = e[np.argmax(np.abs(e))]
    return f"median {np.median(np.abs(e)):5.1%}  worst {worst:+6.0%}  rms {np.sqrt(np.mean(e**2)):5.1%}"


def main() -> None:
    for name in CLASSES:
        # experts and attention of DeepSeek-V2-Lite are kept for the test
        taken = [
            s
            for s in samples(*FITTED)
            if not (s["operator"] in LITE and LITE[s["operator"]].items() <= s["params"].items())
        ]
        seen = points(taken, name)
        unseen = np.hstack([np.empty((4, 0)), *(points(samples(record), name) for record in UNSEEN.get(name, ()))])
        for way, staged in (("without", False), ("inside", False), ("beside", True)):
            inner = None if way == "without" else seen[3]
            f = fit(*seen[:3], bandwidth=0.9 * BANDWIDTH, peak=DEFAULT_EFFICIENCY * PEAK, inner=inner, staged=staged, fastest=READING * BANDWIDTH)  # fmt: skip
            line = f"{name:18} {way:8} {f.fixed_s * 1e6:5.1f} us {f.inner_s * 1e9:5.2f} ns {f.bytes_per_s / 1e9:5.0f} GB/s  {said(errors(f, *seen, staged))}"
            print(line + (f"  unseen: {said(errors(f, *unseen, staged))}" if unseen.size else ""))


if __name__ == "__main__":
    main()
