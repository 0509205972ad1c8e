"""Reading a JSON object key by key: every value is checked, every key that was read is remembered."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

from specsim.errors import InputError

MAX_LAYERS = 10_000
MAX_SIZE = 10**8  # no dimension of a model comes near this


class Keys:
    """A checked view of one JSON object.

    `where` is the file for error messages and `prefix` the path of this object in it ("text_config."). A null value
    means that the key is absent. Every method raises InputError that names file and key.
    """

    layers = 0  # set once the number of layers is known: a list of so many equal numbers is that number

    def __init__(self, values: Mapping[str, Any], where: str, prefix: str = "", used: set[str] | None = None) -> None:
        self.values = values
        self.where = where
        self.prefix = prefix
        self.used: set[str] = set() if used is None else used  # full paths, shared with nested objects

    def fail(self, key: str, what: str, mend: str) -> InputError:
        return InputError(what, where=f"{self.where}, key {_clip(self.prefix + key)!r}", mend=mend)

    def has(self, key: str) -> bool:
        """Whether the key is there and not null. Does not count as reading it."""
        return self.values.get(key) is not None

    def get(self, key: str) -> Any:
        """The raw value, None when absent."""
        self.used.add(self.prefix + key)
        return self.values.get(key)

    def whole(self, *names: str, default: int | None = None, minimum: int = 1, maximum: int = MAX_SIZE) -> int:
        """The whole number under the first name that is present; all present names must agree.

        Without a default the key is required.
        """
        found = self.optional(*names, minimum=minimum, maximum=maximum)
        if found is not None:
            return found
        if default is None:
            others = f" (or {', '.join(names[1:])})" if len(names) > 1 else ""
            raise self.fail(names[0], "the key is missing", f"add {names[0]}{others} as the model's publisher gives it")
        return default

    def optional(self, *names: str, minimum: int = 1, maximum: int = MAX_SIZE) -> int | None:
        """As `whole`, None when no name is present."""
        found: int | None = None
        first = ""
        for name in names:
            value = self.get(name)
            if value is None:
                continue
            number = self._check(name, value, minimum, maximum)
            if found is not None and number != found:
                raise self.fail(name, f"is {number}, but {first} is {found}", "make the two agree")
            found, first = number, first or name
        return found

    def _check(self, name: str, value: Any, minimum: int, maximum: int) -> int:
        if (
            isinstance(value, list)
            and self.layers
            and len(value) == self.layers
            and value.count(value[0]) == len(value)
        ):
            value = value[0]
        if isinstance(value, float) and value.is_integer():  # as writers without whole numbers have them
            value = int(value)
        if isinstance(value, bool) or not isinstance(value, int):
            raise self.fail(name, f"is {_clip(value)!r}, not a whole number", "write a whole number, without quotes")
        if not minimum <= value <= maximum:
            raise self.fail(name, f"is {_clip(value)}", f"give a whole number from {minimum} to {maximum}")
        return value

    def flag(self, name: str, default: bool = False) -> bool:
        value = self.get(name)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise self.fail(name, f"is {_clip(value)!r}", "write true or false")
        return value

    def text(self, *names: str, default: str = "") -> str:
        for name in names:
            value = self.get(name)
            if value is None:
                continue
            if not isinstance(value, str):
                raise self.fail(name, f"is {_clip(value)!r}, not text", "write a text in quotes")
            return value
        return default

    def number(self, name: str) -> float | None:
        value = self.get(name)
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < 1e9 or math.isnan(value):
            raise self.fail(name, f"is {_clip(value)!r}", "give a number above 0")
        return float(value)

    def items(self, name: str, length: int | None = None) -> list[Any] | None:
        """The list, None when absent. A known length is checked; a longer list is cut, for it may cover MTP layers."""
        value = self.get(name)
        if value is None:
            return None
        if not isinstance(value, list):
            raise self.fail(name, f"is {_clip(value)!r}, not a list", "write a list with one entry a layer")
        if length is not None and len(value) < length:
            raise self.fail(name, f"has {len(value)} entries for {length} layers", "give one entry a layer")
        return value if length is None else value[:length]

    def numbers(self, name: str, length: int | None = None, minimum: int = 0) -> list[int] | None:
        """A list of whole numbers, None when absent."""
        found = self.items(name, length)
        return None if found is None else [self._check(name, v, minimum, MAX_SIZE) for v in found]

    def first(self, name: str) -> str:
        """The first text of a list, "" where there is none."""
        value = self.get(name)
        return value[0] if isinstance(value, list) and value and isinstance(value[0], str) else ""

    def nested(self, name: str) -> Keys | None:
        """The object under the key, None when absent."""
        value = self.get(name)
        if value is None:
            return None
        if not isinstance(value, dict):
            raise self.fail(name, f"is {_clip(value)!r}, not an object", "write an object in braces")
        return Keys(value, self.where, f"{self.prefix}{name}.", self.used)

    def unread(self, skip: frozenset[str] = frozenset(), depth: int = 4) -> Iterator[tuple[str, Any]]:
        """(path, value) of each value that nothing read, nested objects walked; `skip` names keys to leave out."""
        for key, value in self.values.items():
            if value is None or key in skip or key.startswith("_"):
                continue
            if isinstance(value, dict) and depth:
                yield from Keys(value, self.where, f"{self.prefix}{key}.", self.used).unread(skip, depth - 1)
            elif self.prefix + key not in self.used:
                yield self.prefix + key, value


def _clip(value: Any) -> Any:
    """The value as an error line shows it: long texts, lists and numbers are cut."""
    if isinstance(value, bool | float) or value is None:
        return value
    if isinstance(value, int):
        return value if abs(value) < 10**18 else f"a number of {len(hex(value))} hex digits"
    text = value if isinstance(value, str) else type(value).__name__
    return text if len(text) <= 60 else text[:57] + "..."
