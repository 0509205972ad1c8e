"""Lists and ranges on the command line, and the values they stand for.

    1,2,8        these                        2:9              2, 3, ... 9, both ends included
    1:256:x2     1, 2, 4, ... 256             0.3:0.95:0.05    0.3, 0.35, ... 0.95, without rounding error
    1k,8k,64k    k is 1,024, m is 1,024 k     1,4:8,16:64:x2   any mixture
    60%          0.6, where a number need not be whole

Values keep their order; repeated ones count once. `x` steps of whole numbers are rounded: 1:10:x1.5 is 1,2,3,5,8.
"""

from __future__ import annotations

import math
import re
from decimal import Decimal, DecimalException

from specsim.errors import InputError

MOST = 1_000_000  # values of one option
_NUMBER = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)(e[+-]?\d{1,3})?", re.IGNORECASE | re.ASCII)
_FACTORS = {"k": Decimal(1024), "m": Decimal(1024**2), "%": Decimal("0.01")}
_MEND = "give a list or a range, for example 1,2,8 or 2:9 or 1:256:x2"


def whole_numbers(text: str, option: str) -> tuple[int, ...]:
    """The whole numbers that `text` lists. Raises InputError naming `option`."""
    values = _values(text, option, whole=True)
    return tuple(dict.fromkeys(int(v) for v in values))


def numbers(text: str, option: str) -> tuple[float, ...]:
    """The numbers that `text` lists. Raises InputError naming `option`."""
    return tuple(dict.fromkeys(float(v) for v in _values(text, option, whole=False)))


def share(text: str) -> float:
    """The number that a text such as 0.6 or 60% says. Raises ValueError."""
    stripped = text.strip()
    return float(_scaled(stripped)) if stripped.endswith("%") else float(stripped)


def words(text: str, option: str, separator: str = ",") -> tuple[str, ...]:
    """The words that `text` lists. Raises InputError when one is empty."""
    found = tuple(dict.fromkeys(word.strip() for word in text.split(separator)))
    if not all(found):
        raise InputError(f"{text!r} has an empty place", where=option, mend=f"put one {separator!r} between two values")
    return found


def _values(text: str, option: str, *, whole: bool) -> list[Decimal]:
    out: list[Decimal] = []
    for part in words(text, option):
        if whole and "%" in part:
            raise InputError(f"{part!r} is not a whole number or a range of them", where=option, mend=_MEND)
        out += _range(part, option, MOST - len(out), whole)
    for value in out:
        if whole and value != value.to_integral_value():
            raise InputError(f"{value} is not a whole number", where=option, mend=_MEND)
    return out


def _range(part: str, option: str, room: int, whole: bool) -> list[Decimal]:
    pieces = [p.strip() for p in part.split(":")]
    if len(pieces) > 3:
        raise InputError(f"{part!r} has too many colons", where=option, mend=_MEND)
    first = _number(pieces[0], part, option)
    if len(pieces) == 1:
        return [first]
    last = _number(pieces[1], part, option)
    step = pieces[2] if len(pieces) == 3 else "1"
    if last < first:
        raise InputError(f"{part!r} goes down", where=option, mend="give the smaller end first")
    if step[:1].lower() in ("x", "*"):
        values = _geometric(first, last, _number(step[1:], part, option), part, option, room)
        return [v.to_integral_value() for v in values] if whole else values
    by = _number(step, part, option)
    if len(pieces) == 2 and (last - first) % 1:
        raise InputError(
            f"{part!r} takes steps of 1, which miss its end", where=option, mend=f"give a step: {part}:0.1"
        )
    if by <= 0:
        raise InputError(f"{part!r} never ends", where=option, mend="give a step above 0")
    count = (last - first) / by + 1
    if count >= room + 1:
        raise InputError(f"{part!r} has more than {MOST:,} values", where=option, mend="give a larger step")
    return [first + i * by for i in range(int(count))]


def _geometric(first: Decimal, last: Decimal, factor: Decimal, part: str, option: str, room: int) -> list[Decimal]:
    if factor <= 1 or first <= 0:
        raise InputError(f"{part!r} never ends", where=option, mend="give a factor above 1 and a start above 0")
    if math.log(last / first) >= room * math.log(factor):
        raise InputError(f"{part!r} has more than {MOST:,} values", where=option, mend="give a larger factor")
    out = []
    value = first
    while value <= last:
        out.append(value)
        value *= factor
    return out


def _number(text: str, part: str, option: str) -> Decimal:
    try:
        value = _scaled(text)
    except ValueError:
        raise InputError(f"{part!r} is not a number or a range", where=option, mend=_MEND) from None
    if abs(value) > Decimal(2**53):
        raise InputError(f"{part!r} is out of range", where=option, mend="give less than 2^53")
    return value


def _scaled(text: str) -> Decimal:
    """A number with its suffix. Raises ValueError."""
    factor = _FACTORS.get(text[-1:].lower())
    digits = text[:-1].rstrip() if factor else text
    if not _NUMBER.fullmatch(digits):
        raise ValueError(f"{text!r} is not a number")
    try:
        return Decimal(digits) * (factor or 1)
    except DecimalException:
        raise ValueError(f"{text!r} is not a number") from None
