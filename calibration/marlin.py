"""INT4 weights as Marlin kernels keep them: 16 x 64 tiles of values in the order in which tensor cores take them up.

`random` draws weights in that layout directly; an expert of them reads back as floats, to check a kernel's output with.
The layout is GPTQ-Marlin's for 4 bits, symmetric (a value v of 0 to 15 stands for v - 8), scales shared by GROUP inputs.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

GROUP = 32  # inputs that share a bf16 scale
TILE = 16
PACK = 8  # values in an int32, the lowest bits first
SCALES = [i + 8 * j for i in range(8) for j in range(8)]  # order of the scales of 64 outputs


@dataclass(frozen=True)
class Weights:
    """packed int32 [experts, inputs / 16, outputs x 2]; scales bf16 [experts, inputs / GROUP, outputs], in Marlin's order."""

    packed: Any
    scales: Any

    def __getitem__(self, expert: int) -> Any:
        """Float32 [outputs, inputs] of one expert."""
        values = unpack(self.packed[expert]).float() - 8
        scales = self.scales[expert].float()
        plain = scales.new_empty(scales.shape).view(-1, len(SCALES))
        plain[:, SCALES] = scales.view(-1, len(SCALES))
        return (values * plain.view(scales.shape).repeat_interleave(GROUP, dim=0)).T


def random(experts: int, outputs: int, inputs: int, device: Any) -> Weights:
    """Weights of any value, each output about as large as an input. Raises ValueError for sizes that have no such layout."""
    import torch

    if inputs % GROUP or inputs == GROUP or outputs % 64:
        raise ValueError(
            f"Marlin's layout needs outputs of whole 64 and inputs of whole {GROUP}, not {outputs} x {inputs}"
        )
    shape = (experts, inputs // TILE, outputs * TILE // PACK)
    packed = torch.randint(-(2**31), 2**31 - 1, shape, device=device, dtype=torch.int32)
    spread = torch.rand(experts, inputs // GROUP, outputs, device=device) + 0.5
    return Weights(packed, (spread * 0.2 * inputs**-0.5).to(torch.bfloat16))


def unpack(packed: Any) -> Any:
    """Values 0 to 15, int32 [inputs, outputs], of one expert's packed [inputs / 16, outputs x 2]."""
    import torch

    shifts = torch.arange(0, 32, 32 // PACK, device=packed.device, dtype=torch.int32)
    values = ((packed[..., None] >> shifts) & 15).view(-1, 1024)
    plain = torch.empty_like(values)
    plain[:, _order()] = values
    rows, columns = packed.shape[0], packed.shape[1] * PACK // TILE
    return plain.view(rows, columns // TILE, TILE, TILE).transpose(1, 2).reshape(rows * TILE, columns)


def _order() -> list[int]:
    """Position in four 16 x 16 tiles, row by row, of each of the 1,024 values in turn.

    A thread of 32 holds, of each tile, the values at rows 2 (i mod 4) + 0, 1, 8, 9 and columns i div 4 and that plus 8; even
    ones come before odd ones within an int32.
    """
    found = []
    for thread in range(32):
        rows = [2 * (thread % 4) + r for r in (0, 1, 8, 9)]
        mine = [TILE * row + thread // 4 + 8 * block for block in (0, 1) for row in rows]
        found += [256 * tile + mine[at] for tile in range(4) for at in (0, 2, 4, 6, 1, 3, 5, 7)]
    return found
