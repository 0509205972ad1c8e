"""Reading and writing files the safe way: YAML by the safe loader with line numbers in errors, JSON, atomic writes."""

from __future__ import annotations

import io
import json
import os
import re
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from specsim.errors import InputError, WorkError

MAX_BYTES = 64 * 2**20  # configs and profiles are small; a larger file is a mistake
MAX_VALUES = 4_000_000  # in a YAML file, keys and aliases counted
MAX_DIGITS = 400  # of a number in a YAML file
_HALF = re.compile(r"\\u[dD][89a-fA-F]")


def read_text(path: Path, what: str, limit: int = MAX_BYTES) -> str:
    """The file's text, also of a pipe or a device. Raises InputError when it is missing, a folder, larger than `limit`
    bytes (of which no more are read: a device has no size, and may have no end) or not UTF-8."""
    with opening(path, what):
        raw = b""
        if path.stat().st_size <= limit:
            with path.open("rb") as file:
                raw = file.read(limit + 1)
            if len(raw) <= limit:
                return as_text(raw, str(path), what)
    raise InputError(f"is larger than {limit >> 20} MiB", where=str(path), mend=f"give a {what}")


@contextmanager
def opening(path: Path, what: str, where: str = "") -> Iterator[None]:
    """Around the opening of a file that a user named: raises InputError, always in the same words, when it is missing, a folder, or
    not to be opened. where: the option, if that helps."""
    where = f"{where} {path}".strip()
    try:
        if path.is_dir():
            raise InputError(f"is a folder, not a {what}", where=where, mend="give a file")
        yield
    except FileNotFoundError:
        raise InputError(f"no such {what}", where=where, mend="check the path") from None
    except (OSError, ValueError) as error:  # ValueError: a null byte in the path
        mend = "check the path and its rights"
        raise InputError(f"cannot be read: {why(error)}", where=repr(where), mend=mend) from None


def why(error: Exception) -> str:
    """What the system or a reader says of a file, without the number and the path, which a line about a file says already."""
    said = getattr(error, "strerror", None) or str(error)
    return f"{said[:1].lower()}{said[1:]}"


def as_text(raw: bytes, where: str, what: str) -> str:
    """A file's bytes as text, line ends as \\n. Raises InputError when they are not UTF-8."""
    try:
        return io.TextIOWrapper(io.BytesIO(raw), encoding="utf-8-sig").read()
    except UnicodeDecodeError as error:
        raise InputError(f"is not UTF-8 text (byte {error.start})", where=where, mend=f"give a {what}") from None


def read_json(path: Path, what: str = "JSON file") -> Any:
    """The parsed JSON. Raises InputError naming line and column."""
    return parse_json(read_text(path, what), str(path), what)


def parse_json(text: str, where: str, what: str = "JSON file") -> Any:
    """As `read_json`, from text."""
    if not text.strip():  # what a command that failed has printed
        raise InputError("is empty", where=where, mend=f"give a {what}")
    try:
        found = json.loads(text)
        if _HALF.search(text):  # half of a pair of surrogates by itself is a character that nothing can write
            found = json.loads(json.dumps(found, ensure_ascii=False).encode("utf-8", "replace"))
        return found
    except json.JSONDecodeError as error:
        place = f"{where}, line {error.lineno}, column {error.colno}"
        raise InputError(f"is not JSON: {error.msg}", where=place, mend="correct that line") from None
    except RecursionError:
        raise InputError("is nested too deeply", where=where, mend=f"give a {what}") from None
    except ValueError:  # Python refuses to read whole numbers of thousands of digits
        raise InputError("holds a number of too many digits", where=where, mend=f"give a {what}") from None


def read_kept(path: Path) -> dict[str, Any] | None:
    """The JSON object that a run before left in its work folder; None where it is not there, or damaged: it is made again."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) else None


def read_yaml(path: Path, what: str = "YAML file") -> Any:
    """The parsed YAML, by the safe loader. Raises InputError naming the line."""
    return parse_yaml(read_text(path, what), str(path), what)


def parse_yaml(text: str, where: str, what: str = "YAML file") -> Any:
    """As `read_yaml`, from text.

    YAML lets a repeated key silently replace the first, and a few lines of aliases and merges grow without bound: both
    are refused before any value is made.
    """
    import yaml

    try:
        loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)(text)
        try:
            node = loader.get_single_node()
            if node is None:
                return None
            _refuse_tricks(node, where, what)
            return loader.construct_document(node)
        finally:
            loader.dispose()
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        place = f"{where}, line {mark.line + 1}" if mark else where
        problem = getattr(error, "problem", None) or str(error).splitlines()[0]
        raise InputError(f"is not YAML: {problem}", where=place, mend="correct that line") from None
    except RecursionError:
        raise InputError("is nested too deeply", where=where, mend=f"give a {what}") from None
    except (ValueError, OverflowError) as error:
        raise InputError(f"cannot be read: {type(error).__name__}", where=where, mend=f"give a {what}") from None


def _refuse_tricks(root: Any, where: str, what: str) -> None:
    """Raise InputError, with the line, for keys given twice, values that contain themselves, more values than MAX_VALUES
    once aliases are written out, and numbers so long that reading them takes for ever."""
    import yaml

    sizes: dict[int, int] = {}  # values below each node, aliases written out; 0 while inside it

    def size(node: Any) -> int:
        line = f"{where}, line {node.start_mark.line + 1}"
        if isinstance(node, yaml.ScalarNode):
            if len(node.value) > MAX_DIGITS and node.tag.endswith((":int", ":float")):
                raise InputError("is a number of too many digits", where=line, mend="write a shorter one")
            return 1
        if id(node) not in sizes:
            sizes[id(node)] = 0
            if isinstance(node, yaml.MappingNode):
                seen: set[str] = set()
                for key, _ in node.value:
                    if isinstance(key, yaml.ScalarNode):
                        if key.value in seen:
                            line = f"{where}, line {key.start_mark.line + 1}"
                            raise InputError(f"key {key.value[:60]!r} is given twice", where=line, mend="keep one")
                        seen.add(key.value)
                items = [item for pair in node.value for item in pair]
            else:
                items = node.value
            sizes[id(node)] = 1 + sum(size(item) for item in items)
        elif not sizes[id(node)]:
            raise InputError("a value contains itself", where=line, mend="write the values out")
        if sizes[id(node)] > MAX_VALUES:
            raise InputError(f"holds more than {MAX_VALUES:,} values", where=line, mend=f"give a {what}")
        return sizes[id(node)]

    size(root)


def path_of(given: Any, where: str) -> Path:
    """The path that a caller in Python gave. Raises InputError for what is none."""
    if not isinstance(given, (str, os.PathLike)):
        raise InputError(f"{given!r} is no path", where=where, mend="give that of a file or a folder")
    return Path(given)


def no_folder(path: Path) -> str:
    """What is wrong with the folder that a file would be written to, and the mend; empty where it is there."""
    return "" if path.parent.is_dir() else f"there is no folder {str(path.parent)!r}; make it first, or name another"


@contextmanager
def in_place_of(path: Path, *, make_folder: bool = False) -> Iterator[Path]:
    """A file to write beside `path`, which takes its place once the block is done, so that a reader sees the old file or the new
    one, never half. A link stays one, and a pipe or a device (/dev/stdout, /dev/null) is written to itself. Raises WorkError when it
    cannot be."""
    try:
        if path.exists() and not path.is_file() and not path.is_dir():
            yield path
            return
        path = Path(os.path.realpath(path))
        if make_folder:
            path.parent.mkdir(parents=True, exist_ok=True)
        handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.", suffix=".tmp")
        os.close(handle)
        unfinished = Path(temporary)
        try:
            yield unfinished
            with unfinished.open("rb") as file:
                os.fsync(file.fileno())
            unfinished.chmod(0o644)
            unfinished.replace(path)
        finally:
            unfinished.unlink(missing_ok=True)
    except OSError as error:
        raise WorkError(f"{path}: cannot be written: {error.strerror or error}") from None


def write_atomically(path: Path, content: str | bytes) -> None:
    """Write text or bytes by `in_place_of`. Makes the folder, for work folders; a file that a user names is checked first
    (`no_folder`). Raises WorkError when it cannot."""
    with in_place_of(path, make_folder=True) as unfinished:
        unfinished.write_bytes(content.encode() if isinstance(content, str) else content)
