"""Rebuild the measured profiles from their recorded samples: 1x-h200, 2x-h200 and 2x-h200-no-p2p.

    python benchmarks/refit_profiles.py

What one GPU does alone was measured on a machine with one H200 (`1x-h200`, and `1x-h200-blockwise` for products of fp8
weights scaled in blocks), DeepGEMM's experts and products of small inner width on others (`1x-h200-deepgemm`,
`1x-h200-deepseek-v2-lite`); products, attention and small kernels again on another, where attention over one row is timed as
SGLang runs it and an elementwise kernel is the engine's (`1x-h200-again`); fp8 experts of one shape again, where some sizes had taken
a sixth longer (`1x-h200-qwen3-30b-a3b-fp8`). Since then products of many rows are timed with pauses as in a server (`1x-h200-gemm`),
experts at a prefill's rows too (`1x-h200-experts`), and those with MXFP4 weights for the first time (`1x-h200-mxfp4`); and products of the shapes of seven models and their drafters,
whole and cut in two (`1x-h200-models`, `1x-h200-models-tp2`). What is measured
again takes the place of what was. A machine with two was calibrated as it is
(`2x-h200`), again to show how far two agree, and with peer access off: all-reduces and copies are of these, FlashInfer's
of another (`2x-h200-flashinfer`). Those called "-earlier" are of other machines, by earlier releases, and those of a model's
own shapes are compared in docs/accuracy.md.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from specsim.calibrate import rebuild
from specsim.class_fits import FITTED
from specsim.profiles import dump_profile, load_profile
from specsim.records import Record

ROOT = Path(__file__).resolve().parents[1]
SUSTAINED = 256  # rows from which products are timed with pauses


def read(name: str) -> dict[str, Any]:
    document: dict[str, Any] = json.loads((ROOT / "validation" / "calibration" / f"{name}.record.json").read_text())
    return document


def together(documents: list[dict[str, Any]]) -> None:
    """Products that several machines measured stay side by side: they differ by 2 to 5 %, and the profile is of any of them. Those of
    many rows that were timed without pauses are left out."""
    for document in documents:
        kept = []
        for sample in document["samples"]:
            if sample["measure"] == "gemm":
                if sample["params"]["rows"] >= SUSTAINED and "burst" not in sample["extras"]:
                    continue
                sample["key"] += f"@{document['name']}"
            kept.append(sample)
        document["samples"] = kept


def main() -> None:
    names = ("1x-h200", "1x-h200-blockwise", "1x-h200-deepgemm", "1x-h200-deepseek-v2-lite", "1x-h200-again",
             "1x-h200-qwen3-30b-a3b-fp8", "1x-h200-gemm", "1x-h200-experts", "1x-h200-mxfp4", "1x-h200-deepseek-v2-lite-experts",
             "1x-h200-models", "1x-h200-models-tp2", "1x-h200-llama-3.1-8b")  # fmt: skip
    alone = [read(name) for name in names]
    kept = {
        "1x-h200-deepseek-v2-lite": {"gemm_bf16"},
        "1x-h200-llama-3.1-8b": {"gemm_bf16"},
        "1x-h200-qwen3-30b-a3b-fp8": {"moe_fp8", "gemm_fp8_triton", "gemm_fp8_deepgemm"},
    }
    for document in alone:
        if operators := kept.get(document["name"]):
            document["samples"] = [s for s in document["samples"] if s["operator"] in operators]
    together(alone)
    two, off, fused = read("2x-h200"), read("2x-h200-no-p2p"), read("2x-h200-flashinfer")
    for box in (two, off):
        box["samples"] = [s for s in box["samples"] if s["measure"] not in FITTED]
    published = [load_profile("1x-h200-published"), load_profile("2x-h200-published")]
    for document, *more in (alone, (two, *alone, fused), (off, *alone)):
        result = rebuild([Record.model_validate(d) for d in (document, *more)], published)
        target = ROOT / "hardware" / f"{document['name']}.yaml"
        # Servers were watched on more hosts than calibrations were made on.
        profile = result.profile.model_copy(update={"host": load_profile(document["name"]).host})
        target.write_text(dump_profile(profile), encoding="utf-8")
        print(f"wrote {target}")


if __name__ == "__main__":
    main()
