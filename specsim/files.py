"""Reading and writing files the safe way: YAML by the safe loader with line numbers in errors, JSON, atomic writes."""

from __future__ import annotations

import io
import json
import os
import tempfile
from pathlib import Path
from typing import Any

from specsim.errors import InputError, WorkError

MAX_BYTES = 64 * 2**20  # configs and profiles are small; a larger file is a mistake


def read_text(path: Path, what: str, limit: int = MAX_BYTES) -> str:
    """The file's text, also of a pipe or a device. Raises InputError when it is missing, a folder, larger than `limit`
    bytes (of which no more are read: a device has no size, and may have no end) or not UTF-8."""
    try:
        if path.is_dir():
            raise InputError(f"is a folder, not a {what}", where=str(path), mend="give a file")
        raw = b""
        if path.stat().st_size <= limit:
            with path.open("rb") as file:
                raw = file.read(limit + 1)
            if len(raw) <= limit:
                return io.TextIOWrapper(io.BytesIO(raw), encoding="utf-8-sig").read()
        raise InputError(f"is larger than {limit >> 20} MiB", where=str(path), mend=f"give a {what}")
    except FileNotFoundError:
        raise InputError(f"no such {what}", where=str(path), mend="check the path") from None
    except UnicodeDecodeError as error:
        raise InputError(f"is not UTF-8 text (byte {error.start})", where=str(path), mend=f"give a {what}") from None
    except (OSError, ValueError) as error:  # ValueError: a null byte in the path
        raise InputError(
            f"cannot be read: {error}", where=repr(str(path)), mend="check the path and its rights"
        ) from None


def read_json(path: Path, what: str = "JSON file") -> Any:
    """The parsed JSON. Raises InputError naming line and column."""
    try:
        return json.loads(read_text(path, what))
    except json.JSONDecodeError as error:
        where = f"{path}, line {error.lineno}, column {error.colno}"
        raise InputError(f"is not JSON: {error.msg}", where=where, mend="correct that line") from None
    except RecursionError:
        raise InputError("is nested too deeply", where=str(path), mend=f"give a {what}") from None


def read_yaml(path: Path, what: str = "YAML file") -> Any:
    """The parsed YAML, by the safe loader. Raises InputError naming the line."""
    return parse_yaml(read_text(path, what), str(path), what)


def parse_yaml(text: str, where: str, what: str = "YAML file") -> Any:
    """As `read_yaml`, from text."""
    import yaml

    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    try:
        return yaml.load(text, Loader=loader)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        place = f"{where}, line {mark.line + 1}" if mark else where
        problem = getattr(error, "problem", None) or str(error).splitlines()[0]
        raise InputError(f"is not YAML: {problem}", where=place, mend="correct that line") from None
    except (RecursionError, ValueError, OverflowError) as error:
        raise InputError(f"cannot be read: {type(error).__name__}", where=where, mend=f"give a {what}") from None


def write_atomically(path: Path, text: str) -> None:
    """Write `text` so that a reader sees the old file or the new one, never half. Raises WorkError when it cannot."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.", suffix=".tmp")
        try:
            with os.fdopen(handle, "w", encoding="utf-8") as file:
                file.write(text)
                file.flush()
                os.fsync(file.fileno())
            os.chmod(temporary, 0o644)
            os.replace(temporary, path)
        except BaseException:
            Path(temporary).unlink(missing_ok=True)
            raise
    except OSError as error:
        raise WorkError(f"{path}: cannot be written: {error.strerror or error}") from None
