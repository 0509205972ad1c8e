"""Whether the GPUs of this box read each other's memory right: a copy of 1 MB between every pair, compared value by value.

    python -m specsim.calibration.peers      one line a pair: FROM TO PEER_ACCESS WRONG_VALUES

Nothing is timed. Some boxes return wrong data over peer access, mostly because of the IOMMU or PCIe access control.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import tempfile
import threading
import time

from specsim.calibration.children import running

BYTES = 2**20


def main() -> int:
    import torch

    if not torch.cuda.is_available():
        sys.stderr.write("PyTorch sees no GPU\n")
        return 1
    count = torch.cuda.device_count()
    pattern = torch.arange(BYTES, dtype=torch.int32).remainder(251).to(torch.uint8)
    for source in range(count):
        sent = pattern.to(torch.device("cuda", source))
        for target in range(count):
            if source == target:
                continue
            got = torch.zeros(BYTES, dtype=torch.uint8, device=torch.device("cuda", target))
            got.copy_(sent)
            torch.cuda.synchronize(target)
            wrong = int((got.cpu() != pattern).sum())
            access = torch.cuda.can_device_access_peer(source, target)
            sys.stdout.write(f"{source} {target} {int(access)} {wrong}\n")
            sys.stdout.flush()
    return 0


class Check:
    """The check in a process of its own, so that a hanging driver cannot take this one along."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        try:
            # a pipe that nobody empties would stop the check
            self.said = tempfile.TemporaryFile("w+", errors="replace")  # noqa: SIM115
            self.process = subprocess.Popen(
                running("specsim.calibration.peers"), stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE, stderr=self.said, text=True, errors="replace", start_new_session=True,
                env={"CUDA_DEVICE_ORDER": "PCI_BUS_ID", **os.environ},  # GPU numbers as nvidia-smi has them
            )  # fmt: skip
        except OSError as error:
            raise RuntimeError(f"cannot start: {error.strerror}") from None
        self.reader = threading.Thread(target=self._read, daemon=True)
        self.reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.lines.append(line)

    def finish(self, until: float) -> tuple[dict[str, int], str]:
        """Wrong values by pair "0-1" (from, to) checked by time.monotonic() `until`, and why some are missing ("" if none)."""
        why = ""
        try:
            code = self.process.wait(timeout=max(0.1, until - time.monotonic()))
            self.said.seek(0)
            said = self.said.read().strip().splitlines()
            why = (said[-1][:160] if said else f"it ended with code {code}") if code else ""
        except subprocess.TimeoutExpired:
            why = "it took too long"
        finally:
            self.process.kill()
            with contextlib.suppress(subprocess.TimeoutExpired):  # a driver that hangs holds even a killed process
                self.process.wait(timeout=1.0)
            self.reader.join(timeout=0.5)
            self.said.close()
            if self.process.stdout is not None and not self.reader.is_alive():
                self.process.stdout.close()
        found: dict[str, int] = {}
        for line in self.lines:
            words = line.split()
            if len(words) == 4 and all(w.isdigit() for w in words):
                found[f"{words[0]}-{words[1]}"] = int(words[3])
        return found, why


if __name__ == "__main__":
    sys.exit(main())
