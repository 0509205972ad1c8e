"""Rebuild the measured profiles from their recorded samples: 1x-h200, 2x-h200 and 2x-h200-no-p2p.

    python benchmarks/refit_profiles.py

One machine with two H200 was calibrated as it is, again, and with peer access off (validation/calibration, all by
benchmarks/whole_box.py). What one GPU alone does was measured in the first of these; `1x-h200` is that part, and
`2x-h200-no-p2p` joins it with the all-reduces of the last. The second is there to show how far two agree, and those
called "-earlier" are of other machines, by earlier releases. DeepGEMM's products joined from another such machine
(`1x-h200-deepgemm`).
"""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

from specsim.calibrate import rebuild
from specsim.profiles import dump_profile, load_profile
from specsim.records import Record

ROOT = Path(__file__).resolve().parents[1]


def read(name: str) -> dict[str, Any]:
    document: dict[str, Any] = json.loads((ROOT / "validation" / "calibration" / f"{name}.record.json").read_text())
    return document


def main() -> None:
    two, off, deepgemm = read("2x-h200"), read("2x-h200-no-p2p"), read("1x-h200-deepgemm")
    one = copy.deepcopy(two)
    one["name"] = one["hardware"] = "1x-h200"
    alone = [s for s in one["samples"] if s["measure"] == "peak" or s.get("ranks", 1) == 1]
    one["samples"] = [s for s in alone if s.get("rank", 0) == 0]
    one["environment"]["plan"] |= {"ranks": 1, "nvlink": False}
    one["environment"]["ranks"], one["caveats"] = 1, []
    published = [load_profile("1x-h200-published"), load_profile("2x-h200-published")]
    for document, *more in ((one, deepgemm), (two, deepgemm), (off, one, deepgemm)):
        result = rebuild([Record.model_validate(d) for d in (document, *more)], published)
        target = ROOT / "hardware" / f"{document['name']}.yaml"
        target.write_text(dump_profile(result.profile), encoding="utf-8")
        print(f"wrote {target}")


if __name__ == "__main__":
    main()
