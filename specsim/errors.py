"""The errors that reach people: one line that says what is wrong, where, and the mend.

SpecsimError
 ├── InputError   bad input: exit code 2
 │    └── InputErrors   several of them, a line each
 └── WorkError    the work could not be done (a server died, a GPU is broken): exit code 1
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

LISTED = 20  # names that an error line lists at most


class SpecsimError(Exception):
    """Base of all errors that the command line prints as one line."""

    exit_code = 1


class InputError(SpecsimError):
    """Input that cannot be used. `where` is a file, key, line or option; `mend` what to do about it."""

    exit_code = 2

    def __init__(self, what: str, *, where: str = "", mend: str = "") -> None:
        self.what, self.where, self.mend = what, where, mend
        message = f"{where}: {what}" if where else what
        super().__init__(" ".join(f"{message}; {mend}".split()) if mend else " ".join(message.split()))


class InputErrors(InputError):
    """Several wrong options, told together: `errors` has each, and what the first says is said of them all."""

    def __init__(self, errors: Sequence[InputError]) -> None:
        self.errors = tuple(errors)
        first = self.errors[0]
        super().__init__(first.what, where=first.where, mend=first.mend)
        self.args = ("; and ".join(str(error) for error in self.errors),)


class WorkError(SpecsimError):
    """The input was fine and the work failed."""


def together(first: InputError, others: Iterable[InputError]) -> InputError:
    """The first error with those of the others that speak of something else."""
    told = [first]
    for other in others:
        if all(str(other) != str(one) and (not other.where or other.where != one.where) for one in told):
            told.append(other)
    return first if len(told) == 1 else InputErrors(told)


def did_you_mean(name: str, known: list[str] | tuple[str, ...]) -> str:
    """The mend for an unknown name: the nearest known one, or the shortest that it is a part of, and the known ones, as many
    as a line holds."""
    import difflib

    part_of = [one for one in known if len(name) > 2 and name.lower() in one.lower()]
    near = difflib.get_close_matches(name, known, n=1, cutoff=0.5) or sorted(part_of, key=len)
    listing = ", ".join(known[:LISTED]) + (f" and {len(known) - LISTED} more" if len(known) > LISTED else "")
    return f"did you mean {near[0]!r}? (known: {listing})" if near else f"known: {listing}"


def as_fraction(wrong: float) -> str:
    """The mend for a share out of range, which may have been meant as per cent."""
    return f"for {wrong:g} % give {wrong / 100:g}" if 2.0 <= wrong <= 100.0 else "give a fraction between 0 and 1"
