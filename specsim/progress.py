"""How far long work is, for whoever wants to know. Work says it by `track` and `report`; nothing is printed here.

    with listening(lambda done, total, now: ...):
        for record in track(records, "records"): ...

Only the outermost `track` is heard, so that shares go from 0 to 1 whatever runs inside.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TypeVar

T = TypeVar("T")
Listener = Callable[[float, float, str], None]
_listener: ContextVar[Listener | None] = ContextVar("listener", default=None)


@contextmanager
def listening(listener: Listener | None) -> Iterator[None]:
    """Have `listener` called with what is done, what there is (0: not known) and what runs now."""
    token = _listener.set(listener)
    try:
        yield
    finally:
        _listener.reset(token)


def report(done: float, total: float, now: str = "") -> None:
    """Say how far it is."""
    listener = _listener.get()
    if listener is not None:
        listener(done, total, now)


def track(items: Sequence[T], now: str = "") -> Iterator[T]:
    """The items, each reported when its turn comes."""
    for i, item in enumerate(items):
        report(i, len(items), now)
        outer = _listener.get()
        _listener.set(None)
        try:
            yield item
        finally:
            _listener.set(outer)
