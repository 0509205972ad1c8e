"""Reading files that are none: devices, pipes, what is too large or not text."""

from __future__ import annotations

import json
import os
import threading
from pathlib import Path

import numpy as np
import pytest

from specsim.configs import PRESETS, load_model
from specsim.errors import LISTED, InputError, did_you_mean
from specsim.files import parse_json, read_text, write_atomically
from specsim.profiles import load_profile
from specsim.routing import parse


@pytest.mark.parametrize("reader", [load_model, load_profile, parse])
def test_a_device_without_end_is_refused(reader: object) -> None:
    with pytest.raises(InputError, match="larger than"):
        reader("/dev/zero")  # type: ignore[operator]


def test_a_pipe_is_read(tmp_path: Path) -> None:
    """As a shell's <(...) gives it."""
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    content = (PRESETS / "Qwen3-8B.json").read_text()
    writer = threading.Thread(target=pipe.write_text, args=(content,))
    writer.start()
    model = load_model(str(pipe))
    writer.join()
    assert model.total_parameters == load_model("Qwen3-8B").total_parameters


def test_paths_need_not_be_text() -> None:
    assert load_model(PRESETS / "Qwen3-8B.json").total_parameters == load_model("Qwen3-8B").total_parameters
    for nothing in (None, 5, ""):
        for reader in (load_model, load_profile):
            with pytest.raises(InputError, match="given"):
                reader(nothing)  # type: ignore[arg-type]


def test_a_row_picks_its_experts_even_where_fewer_are_popular(tmp_path: Path) -> None:
    """One expert of 64 has all the popularity and a row picks 8: that one always, 7 of the 63 others."""
    path = tmp_path / "popularity"
    path.write_text(" ".join(["1"] + ["0"] * 63))
    routing = parse(str(path))
    assert routing.distinct(np.array([1.0, 2.0]), 64, 8) == pytest.approx([8, 1 + 63 * (1 - (1 - 7 / 63) ** 2)])


def test_half_of_a_pair_in_a_json_text_can_be_written_again(tmp_path: Path) -> None:
    """A lone surrogate is a character that no UTF-8 file holds: what was read could not be written. A whole pair stays."""
    read = parse_json('{"a": "\\ud83d", "b\\uDFFF": ["\\ud83d\\ude00"], "c": NaN}', "text")
    write_atomically(tmp_path / "again.json", json.dumps(read, ensure_ascii=False))
    assert (read["a"], read["b?"]) == ("?", ["\U0001f600"])


def test_limits_marks_and_line_ends(tmp_path: Path) -> None:
    path = tmp_path / "text"
    path.write_bytes(b"\xef\xbb\xbfa\r\nb\n")
    assert read_text(path, "text") == "a\nb\n"
    assert read_text(path, "text", limit=8) == "a\nb\n"
    with pytest.raises(InputError, match="larger"):
        read_text(path, "text", limit=7)
    path.write_bytes(b"ab\xff")
    with pytest.raises(InputError, match=r"not UTF-8 text \(byte 2\)"):
        read_text(path, "text")


def test_an_error_lists_as_many_names_as_a_line_holds() -> None:
    names = [f"name-{i}" for i in range(100)]
    listed = did_you_mean("name-99", names)
    assert "did you mean 'name-99'" in listed
    assert listed.count(",") == LISTED - 1
    assert "80 more" in listed


def test_a_part_of_a_name_finds_the_shortest_that_has_it() -> None:
    names = ["Kimi-K2-Instruct", "Kimi-K2.5", "Llama-3.1-8B"]
    assert "did you mean 'Kimi-K2.5'" in did_you_mean("kimi", names)
    assert did_you_mean("zz", names).startswith("known:")


def test_a_link_stays_one_and_a_pipe_is_written_to(tmp_path: Path) -> None:
    """A rename would put a file in the place of either; of /dev/null as well, for who may write there."""
    target, link, pipe = tmp_path / "target.yaml", tmp_path / "link.yaml", tmp_path / "pipe"
    target.write_text("old")
    link.symlink_to(target)
    write_atomically(link, "new")
    assert link.is_symlink()
    assert target.read_text() == "new"
    os.mkfifo(pipe)
    end = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    try:
        write_atomically(pipe, "through")
        assert os.read(end, 100) == b"through"
    finally:
        os.close(end)
    assert pipe.is_fifo()
