"""The rows of a sweep, one a configuration, in the columns of a prediction: as arrays, CSV or Parquet.

Numbers in CSV have six significant digits, as `specsim predict --json` prints them; Parquet holds them in full. An accept
length that a setting cannot reach has no row. Empty (CSV) or nan: there is none.
"""

from __future__ import annotations

import csv
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from specsim.errors import InputError
from specsim.files import in_place_of
from specsim.quantities import six
from specsim.sweeps import Block, Spec, Task, blocks

TEXT = ("model", "draft", "hardware", "engine", "method")
WHOLE = ("tp", "ep", "dp_attention", "num_steps", "topk", "batch", "context", "draft_tokens")
COLUMNS = (
    "model", "draft", "hardware", "engine", "tp", "ep", "dp_attention", "method", "num_steps", "topk", "batch", "context",
    "draft_tokens", "accept_rate", "accept_length", "decode_ms", "cycle_ms", "decode_tokens_per_s", "spec_tokens_per_s",
    "speedup", "tpot_ms", "breakeven_accept_length", "breakeven_accept_rate", "fits",
)  # fmt: skip


def columns(b: Block) -> dict[str, NDArray[Any]]:
    """Every column of a block's rows, each broadcasting to (cell, acceptance, setting).

    tpot_ms: milliseconds a token of one sequence, cycle / accept length, or the decode step without speculation.
    """
    settings = b.case.settings
    off = np.asarray([s.method == "none" for s in settings])
    labels = b.case.labels()
    batch, decode = b.batch[:, None, None], b.decode[:, None, None]
    cycle = b.cycle[:, None, :]
    lengths = b.lengths.T[None]

    def of_setting(name: str) -> NDArray[Any]:
        return np.asarray([getattr(s, name) for s in settings], dtype=object if name in TEXT else None)[None, None, :]

    def speculative(values: NDArray[Any]) -> NDArray[Any]:
        return np.where(off, np.nan, values)

    with np.errstate(invalid="ignore"):
        return {
            **{k: np.asarray(v, dtype=object if k in TEXT else None).reshape(1, 1, 1) for k, v in labels.items()},
            **{k: of_setting(k) for k in ("draft", "method", "num_steps", "topk", "draft_tokens")},
            "batch": b.batch.astype(np.int64)[:, None, None],
            "context": b.context.astype(np.int64)[:, None, None],
            "accept_rate": speculative(b.rates.T[None]),
            "accept_length": speculative(lengths),
            "decode_ms": decode * 1e3,
            "cycle_ms": speculative(cycle * 1e3),
            "decode_tokens_per_s": batch / decode,
            "spec_tokens_per_s": speculative(batch * lengths / cycle),
            "speedup": speculative(b.speedup),
            "tpot_ms": cycle * 1e3 / lengths,
            "breakeven_accept_length": speculative(b.needed[:, None, :]),
            "breakeven_accept_rate": b.breakeven_rate[:, None, :],
            "fits": b.fits[:, None, :-1],
        }


def _kept(b: Block, spec: Spec) -> NDArray[np.bool_] | None:
    """Which rows there are, flat; None: all."""
    if not spec.kind or not np.isnan(b.lengths).any():
        return None
    shape = (len(b.batch), b.lengths.shape[1], b.lengths.shape[0])
    return np.broadcast_to(~np.isnan(b.lengths.T)[None], shape).reshape(-1)


def tables(spec: Spec, task: Task) -> Iterator[dict[str, NDArray[Any]]]:
    """The rows of a task as flat columns in full precision, block by block."""
    for b in blocks(spec, task):
        shape = (len(b.batch), b.lengths.shape[1], b.lengths.shape[0])
        kept = _kept(b, spec)
        flat = {name: np.broadcast_to(v, shape).reshape(-1) for name, v in columns(b).items()}
        yield {name: flat[name] if kept is None else flat[name][kept] for name in COLUMNS}


def records(spec: Spec, task: Task) -> Iterator[dict[str, Any]]:
    """The rows of a task as dictionaries, six significant digits, None for none."""
    for table in tables(spec, task):
        for row in zip(*(table[name].tolist() for name in COLUMNS), strict=True):
            yield {k: _rounded(v) for k, v in zip(COLUMNS, row, strict=True)}


def _rounded(value: Any) -> Any:
    if isinstance(value, float):
        return None if np.isnan(value) else six(value)
    return None if value == "" else value


# --- files ----------------------------------------------------------------------------------------------------------


def check_target(path: Path) -> str:
    """ "csv" or "parquet", by the file's name. Raises InputError for another name, no such folder, or no pyarrow."""
    kind = path.suffix.lower().lstrip(".")
    if kind not in ("csv", "parquet"):
        raise InputError(f"{path} is neither .csv nor .parquet", where="--out", mend="name the file results.csv or results.parquet")  # fmt: skip
    if not path.absolute().parent.is_dir():
        raise InputError(f"{path.absolute().parent} is no folder", where="--out", mend="make it first")
    if kind == "parquet":
        _pyarrow()
    return kind


def _pyarrow() -> Any:
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError:
        raise InputError(
            "Parquet needs pyarrow", where="--out", mend="pip install 'specsim[parquet]', or name a .csv file"
        ) from None
    return pyarrow


def write_part(spec: Spec, task: Task, path: Path) -> None:
    """The rows of one task as a file of the kind of its name; it appears whole or not at all. Raises WorkError."""
    with in_place_of(path) as unfinished:
        if path.suffix == ".csv":
            _write_csv(spec, task, unfinished)
        else:
            _write_parquet(spec, task, unfinished)


def _write_csv(spec: Spec, task: Task, path: Path) -> None:
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        for b in blocks(spec, task):
            shape = (len(b.batch), b.lengths.shape[1], b.lengths.shape[0])
            kept = _kept(b, spec)
            made = columns(b)
            flat = [np.broadcast_to(_texts(made[name]), shape).reshape(-1) for name in COLUMNS]
            writer.writerows(zip(*((v if kept is None else v[kept]).tolist() for v in flat), strict=True))


def _texts(values: NDArray[Any]) -> NDArray[Any]:
    """Each number as CSV shows it, before it is repeated over the other axes."""
    if values.dtype != np.float64:
        return values.astype(str).astype(object) if values.dtype == bool else values
    out = np.empty(values.shape, dtype=object)
    out.reshape(-1)[:] = [("" if x != x else f"{x:.6g}") for x in values.reshape(-1).tolist()]
    return out


def _write_parquet(spec: Spec, task: Task, path: Path) -> None:
    pa = _pyarrow()
    schema = pa.schema([(name, _arrow_type(pa, name)) for name in COLUMNS])
    with pa.parquet.ParquetWriter(path, schema) as writer:
        for table in tables(spec, task):
            writer.write_table(pa.table({name: pa.array(table[name], _arrow_type(pa, name)) for name in COLUMNS}))


def _arrow_type(pa: Any, name: str) -> Any:
    return (
        pa.string() if name in TEXT else pa.int64() if name in WHOLE else pa.bool_() if name == "fits" else pa.float64()
    )


def join_parts(parts: Sequence[Path], target: Path) -> None:
    """One file of all parts, in order; it appears whole or not at all. Raises WorkError."""
    with in_place_of(target) as unfinished:
        if target.suffix.lower() == ".csv":
            with unfinished.open("wb") as file:
                file.write((",".join(COLUMNS) + "\n").encode())
                for part in parts:
                    with part.open("rb") as rows:
                        shutil.copyfileobj(rows, file, 2**20)
            return
        pa = _pyarrow()
        schema = pa.schema([(name, _arrow_type(pa, name)) for name in COLUMNS])
        with pa.parquet.ParquetWriter(unfinished, schema) as writer:
            for part in parts:
                opened = pa.parquet.ParquetFile(part)
                for group in range(opened.num_row_groups):
                    writer.write_table(opened.read_row_group(group))
