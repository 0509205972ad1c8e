"""The command line as a whole: wrong lines, odd streams, completion, and the examples of every --help."""

from __future__ import annotations

import contextlib
import gzip
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path

import click
import pytest
from test_diagnose import log
from test_importers import HEAD, ROWS

from specsim.cli import COMMANDS, group, main
from specsim.commands.common import InFile, usage

ROOT = Path(__file__).resolve().parent.parent
VALIDATION = ROOT / "validation"


def specsim(*line: str, **settings: object) -> subprocess.CompletedProcess[str]:
    """The command in a process of its own."""
    command = [sys.executable, "-m", "specsim", *line]
    return subprocess.run(command, capture_output=True, text=True, check=False, **settings)  # type: ignore[call-overload,no-any-return]


def walk(command: click.Command, path: str, context: click.Context) -> Iterator[tuple[str, click.Command]]:
    yield path, command
    if isinstance(command, click.Group):
        for name in command.list_commands(context):
            found = command.get_command(context, name)
            assert found is not None
            yield from walk(found, f"{path} {name}", context)


TREE = dict(walk(group, "specsim", click.Context(group, info_name="specsim")))

# --- wrong lines ------------------------------------------------------------------------------------------------------

# What was typed, and what the one line of the answer says: what is wrong and the mend.
WRONG = {
    "predikt": "did you mean 'predict'",
    "hardware lst": "did you mean 'list'",
    "models shw": "did you mean 'show'",
    "--no-config": "no command; one of predict, calibrate,",
    "predict --bach 3": "no option '--bach'; did you mean",
    "predict --batch": "requires an argument",
    "predict --batch x": "'x' is not a whole number; for example 4",
    "predict --batch 1,2k": "--batch: '1,2k' is several values where one is needed; specsim sweep takes them",
    "predict --accept-rate 0.5:0.9:0.1": "--accept-rate: '0.5:0.9:0.1' is several values where one is needed; specsim sweep",
    "predict --batch 1.5": "'1.5' is not a whole number",
    "predict --batch 0": "--batch: 0 is out of range; give 1 to",
    "predict --batch 1000000": "--batch: 1,000,000 is out of range; give 1 to",
    "predict --model qwen3-8b-eagle3": "--model: qwen3-8b-eagle3 drafts by eagle3 and is no target; give it as --draft",
    "predict --context -5": "--context: -5 is out of range; give 0 to",
    "predict --accept-rate 60": "--accept-rate: 60 is not in [0, 1]",
    "predict --accept-rate x": "--accept-rate: 'x' is not a number; for example 0.6 or 60%",
    "predict --accept-rate 160%": "--accept-rate: 1.6 is not in [0, 1]",
    "predict --accept-rate 50%,60%": "--accept-rate: '50%,60%' is several values where one is needed; specsim sweep",
    "sweep --batch 100%:200%": "--batch: '100%:200%' is not a whole number",
    "predict --accept-length 9": "--accept-length: 9.0 is not in [1, 3]",
    "predict --accept-rate .5 --accept-length 2": "acceptance is stated twice; give one of them",
    "predict --accept-per-position a,b": "for example 0.7,0.6,0.5",
    "predict --accept-profile kimi-k2.5-eagle3/gsm": "did you mean 'kimi-k2.5-eagle3/gsm8k'",
    "predict --model Kimi-K25": "did you mean 'Kimi-K2.5'",
    "predict --model me/my-8b": "no preset, folder or file; save huggingface.co/me/my-8b/raw/main/config.json and give that file",
    "predict --model Qwen/Qwen3-8C": "did you mean 'Qwen3-8B'? else save huggingface.co/Qwen/Qwen3-8C/raw/main/config.json",
    "predict --engine vllm --sglang-args '--tp 2'": "--engine: vllm, and the launch line is of sglang; leave it out, or give --vllm-args",
    "predict --model nowhere/config.json": "nowhere/config.json: no such file",
    "predict --draft kimi-k2.5-eagle": "did you mean 'kimi-k2.5-eagle3'",
    "predict --hardware 8x-h10": "did you mean '8x-h100'",
    "predict --hardware nowhere.yaml": "nowhere.yaml: no such hardware profile",
    "predict --engine sglan": "did you mean 'sglang'",
    "predict --method eagel3": "did you mean 'eagle3'",
    "predict --eager verfy": "did you mean 'verify'",
    "predict --eager decode,verify": "give one at a time: --eager decode --eager verify",
    "predict --routing unifrom": "did you mean 'uniform'",
    "predict --routing zipf:x": "for example zipf:0.8",
    "predict --tp 3": "--tp: tp 3 does not divide 64 attention heads of Kimi-K2.5; one of 1, 2, 4, 8 would\n",
    "predict --tp 6 --dp-attention 2": "--tp: tp 6 over 2 attention groups does not divide 64 attention heads of Kimi-K2.5; one of 2, 4, 8 would\n",
    "predict --tp 16": "tp up to 8, or another --hardware",
    "predict --dp-attention maybe": "neither a number nor 'on'",
    "predict --topk 4": "give --num-steps beside --topk",
    "predict --draft-tokens 1": "--draft-tokens: 1 is out of range; give 2 to 512",
    "predict --sglang-args ''": "--sglang-args: is empty",
    "predict --sglang-args '--tp x'": "'x' is not a whole number",
    "predict --sglang-args --foo --vllm-args --bar": "two launch lines; give one of them",
    "predict --sglang-args \"server_args=ServerArgs(model_path='m')\"": "is what a server prints, not what starts it",
    "models Mixtral-8x7B": "no command 'Mixtral-8x7B'; `specsim models show Mixtral-8x7B` shows one; known: list, show",
    "hardware shwo": "no command 'shwo'; did you mean 'show'?",
    "predict extra": "specsim predict: 'extra' stands alone; --help lists the options that take a value",
    "predict qwen3-8b": "'qwen3-8b' stands alone; write --model qwen3-8b",
    "sweep 8x-h100 more": "'8x-h100' stands alone; write --hardware 8x-h100",
    "report result.json -o x.html": "'result.json' stands alone; write --from result.json",
    "report result.json": "'result.json' stands alone; write --from result.json",
    "report": "missing option '-o'",
    "report -o nowhere/x.html": "there is no folder 'nowhere'; make it first, or name another",
    "predict --plot nowhere/x.svg": "there is no folder 'nowhere'; make it first, or name another",
    "sweep --out nowhere/x.csv": "there is no folder 'nowhere'; make it first, or name another",
    "plan --policy nowhere/x.json": "there is no folder 'nowhere'; make it first, or name another",
    "simulate --requests-out nowhere/x.csv": "there is no folder 'nowhere'; make it first, or name another",
    "fit --records validation -o nowhere/x.yaml": "there is no folder 'nowhere'; make it first, or name another",
    "hardware import x --into 1x-h200 -o nowhere/x.yaml": "there is no folder 'nowhere'; make it first, or name another",
    "calibrate -o nowhere/x.yaml": "there is no folder 'nowhere'; make it first, or name another",
    "report -o /": "--output: '/' is a folder; name a file",
    "report -o -": "--output: '-' is no file; name one, or /dev/stdout",
    "sweep --batch 1:2:3:4": "give a list or a range",
    "sweep --batch 5:1": "give the smaller end first",
    "sweep --out rows.txt": "name the file results.csv or results.parquet",
    "sweep --jobs 0": "give 1 or more, or -1",
    "sweep --cluster nowhere": "give dask://HOST:PORT or ray",
    "plan": "give --rate, or --trace",
    "plan --rate 0": "give a rate above 0",
    "plan --rate 1 --batch 3": "--batch: the load and --draft-tokens set it; leave it out",
    "plan --rate 1 --ttft-ms -1": "give milliseconds above 0",
    "plan --rate 1 --seed 3": "--seed: is about the simulation; give --simulate, or leave it out",
    "plan --rate 1 --num-requests 10": "--num-requests: is about the simulation; give --simulate, or leave it out",
    "plan --trace t.csv --simulate --num-requests 10": "leave --num-requests out",
    "plan --rate 1 --headroom 10": "--headroom: '10' is out of range; write 10% or 0.1",
    "plan --rate 1 --hysteresis 3": "--hysteresis: 3 is not in [0, 1); for 3 % give 0.03",
    "plan --rate 1 --prefix-rate 50": "--prefix-rate: 50 is not in [0, 1); for 50 % give 0.5",
    "simulate": "give --rate, --concurrency or --trace",
    "simulate --concurrency 0": "--concurrency: 0 is out of range",
    "simulate --rate 1 --batch 4": "--batch: the load sets it; leave it out",
    "simulate --rate 1 --context 1k,2k": "--context: the load sets it; leave it out",
    "simulate --rate inf --burstiness 2": "--burstiness: is about a rate",
    "simulate --rate 1 --method none --range-ratio 50": "--range-ratio: 50 is not in [0, 1]; for 50 % give 0.5",
    "simulate --rate 1 --accept-rate 0.5 --accept-histogram 1,2": "acceptance is stated twice; give one of them",
    "sweep --accept-rate 50:60": "--accept-rate: 50 is not in [0, 1]; for 50 % give 0.5",
    "calibrate --cpu --only peak --experts 64,64,8,2": "--experts: is about moe; add it to --only, or leave --experts out",
    "validate --launch --model Qwen3-8B --only x": "--only: says nothing with --launch; it is for --scenarios",
    "calibrate --cpu --master box:1": "--master: is about several nodes; give --nnodes too, or leave it out",
    "simulate --rate 1 --trace t.csv": "leave --rate out",
    "diagnose": "give --decode-ms and --verify-ms, or a log",
    "diagnose nowhere.log": "nowhere.log: no such file",
    "diagnose --decode-ms 0": "--decode-ms: 0 is out of range",
    "diagnose --decode-ms 12 --verify-ms 29 --result grap-flag=yes": "did you mean 'graph-flag'",
    "diagnose --decode-ms 12 --decode-at x": "for example",
    "observe": "give a log, a benchmark file",
    "observe nowhere": "nowhere: no such file",
    "validate": "give one of --url, --launch, --scenarios and --records",
    "validate --records nowhere": "give a folder of records",
    "validate --method eagel3 --launch": "did you mean 'eagle3'",
    "fit": "missing option '--records'",
    "fit --records nowhere": "give a folder of records",
    "fit --records {validation} --engine sglang --terms draft_stp": "did you mean 'draft_step'",
    "fit --records {validation} --engine sglng": "did you mean 'sglang'",
    "hardware show": "missing argument 'NAME'",
    "hardware import nowhere": "nowhere: no such file",
    "models show Lama-3.1-8B": "did you mean 'Llama-3.1-8B'",
    "completion bsh": "did you mean 'bash'",
    "calibrate --gpus 0": "--gpus: 0 is out of range; give 1 to 1,024",
    "serve --port 99999999": "99999999 is out of range; give 0 to 65,535",
    "simulate --rate 1 --seed 1.5": "--seed: '1.5' is not a whole number; give 0 or more",
    "report -o x.html --from nowhere.json": "nowhere.json: no such",
    "report -o x.html --from /dev/null": "/dev/null: is empty; give a result",
    "--config nowhere.yaml predict": "nowhere.yaml: no such file of defaults",
    "--confg x predict": "--config",
}


@pytest.mark.parametrize("line", WRONG)
def test_a_wrong_line_is_answered_with_one_line_and_its_mend(
    line: str, capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as stop:
        main(shlex.split(line.format(validation=VALIDATION)))
    out, err = capsys.readouterr()
    assert (stop.value.code, out) == (2, ""), err
    assert err.startswith("error: ")
    assert err.count("\n") == 1
    assert WRONG[line] in err
    assert not list(tmp_path.iterdir()), "nothing is left behind"


# Every option that reads files or writes a folder, on a line that has all else it needs.
READS = [
    "plan --rate 2 --method none --trace",
    "simulate --method none --trace",
    "simulate --rate 2 --policy",
    "report -o x.html --from",
    "validate --scenarios",
    "validate --url http://127.0.0.1:9 --server-log",
    "calibrate --refit",
]
READS_FOLDERS_TOO = [
    "validate --records",
    "validate --launch --model",
    "validate --launch --model config.json --method eagle3 --num-steps 3 --draft",
    "fit --records",
]
READS_NAMES_TOO = [
    "predict --routing", "predict --hardware", "hardware show", "hardware import nccl.txt --into",
    "hardware import --into 8x-h100 -o x.yaml", "observe", "diagnose",
]  # fmt: skip
WRITES_FOLDERS = ["validate --url http://127.0.0.1:9 --output", "calibrate --cpu --out", "observe nccl.txt --output"]


def _asked(line: str, capsys: pytest.CaptureFixture[str]) -> str:
    with pytest.raises(SystemExit) as stop:
        main(shlex.split(line))
    out, err = capsys.readouterr()
    assert (stop.value.code, out) == (2, ""), err
    assert err.startswith("error: ")
    assert err.count("\n") == 1
    assert "Errno" not in err
    return err


def test_the_lines_name_every_option_that_reads_files_or_writes_a_folder() -> None:
    lines = [*READS, *READS_FOLDERS_TOO, *READS_NAMES_TOO, *WRITES_FOLDERS]
    named = {f"specsim {line.split()[0]} {line.split()[-1]}" for line in lines}
    typed = {
        f"{path} {param.opts[-1]}"
        for path, command in TREE.items()
        for param in command.params
        if isinstance(param.type, InFile)
    }
    assert typed <= named


@pytest.fixture
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("folder").mkdir()
    Path("nccl.txt").write_text("".join([HEAD, *ROWS]))
    shutil.copy(ROOT / "specsim" / "presets" / "Qwen3-8B.json", "config.json")


@pytest.mark.parametrize("line", [*READS, *READS_NAMES_TOO])
def test_a_folder_for_a_file_is_told_as_any_other_error(
    line: str, files: None, capsys: pytest.CaptureFixture[str]
) -> None:
    assert re.search(r"folder: is a folder(, not a [a-z ]+; give a file|; give the files in it)\n$", _asked(f"{line} ./folder", capsys))  # fmt: skip


@pytest.mark.parametrize("line", [*READS, *READS_FOLDERS_TOO])
def test_a_file_that_is_not_there_and_an_empty_name_are_told(
    line: str, files: None, capsys: pytest.CaptureFixture[str]
) -> None:
    assert re.search(r"nowhere.x: (no such [a-z. ]+; check the path|does not exist; give)", _asked(f"{line} nowhere.x", capsys))  # fmt: skip
    assert f"{line.split()[-1]}: is empty; give a path, or leave it out" in _asked(f"{line} ''", capsys)


@pytest.mark.parametrize("line", WRITES_FOLDERS)
def test_a_file_for_a_folder_to_write_is_told_before_any_work(
    line: str, files: None, capsys: pytest.CaptureFixture[str]
) -> None:
    for given in ("nccl.txt", "nccl.txt/below"):
        assert f"{line.split()[-1]}: 'nccl.txt' is a file; name a folder" in _asked(f"{line} {given}", capsys)


@pytest.mark.parametrize(
    ("line", "said"),
    [
        (
            "predict --batch x --contxt 4 --accept-rate y --draft-tokens 3",
            ["--batch: 'x' is not", "--accept-rate: 'y' is not", "predict: no option '--contxt'; did you mean '--cont"],
        ),
        (
            "predict --tp 3 --batch 0 --accept-rate 60 --routing zipf",
            ["--tp: tp 3 does", "--batch: 0 is", "--accept-rate: 60 is", "--routing: 'zipf' is neither"],
        ),
        (
            "simulate --rate 2 --hardware 8x-h10 --model Kimi-K25 --method ngram --accept-rate 2",
            ["no hardware profile '8x-h10'", "no model 'Kimi-K25'", "--accept-rate: 2 is"],
        ),
        ("validate --url x --batch 0,1 --rate z", ["--batch: '0,1' holds", "--rate: 'z' is not"]),
        ("predict --batch x --plot nowhere/x.svg", ["--batch: 'x' is", "--plot: there is no folder 'nowhere'"]),
        ("hardware show 1x-h200 --plt x --jsn", ["no option '--plt'", "no option '--jsn'"]),
    ],
)
def test_all_that_is_wrong_with_a_line_is_told_at_once(
    line: str, said: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    """One line each."""
    with pytest.raises(SystemExit) as stop:
        main(shlex.split(line))
    out, err = capsys.readouterr()
    assert (stop.value.code, out) == (2, "")
    lines = err.splitlines()
    assert all(one.startswith("error: ") for one in lines)
    for part in said:
        assert [one for one in lines if part in one], err
    assert len(lines) == len(said)


def test_a_rate_may_be_a_percentage_wherever_one_is_taken(capsys: pytest.CaptureFixture[str]) -> None:
    """60.5% is 0.605, and lists and ranges of percentages are those of fractions."""

    def printed(line: str) -> str:
        with pytest.raises(SystemExit) as done:
            main(shlex.split(line))
        assert not done.value.code
        return capsys.readouterr().out

    for line, same in (
        ("predict --accept-rate 60.5%", "predict --accept-rate 0.605"),
        ("predict --accept-per-position '70%, 0.5'", "predict --accept-per-position 0.7,0.5"),
        (
            "sweep --accept-rate 30%:60%:10%,0.9 --draft-tokens 2:4",
            "sweep --accept-rate 0.3:0.6:0.1,90% --draft-tokens 2:4",
        ),
        (
            "diagnose --decode-ms 12.1 --verify-ms 29.5 --noise 8%",
            "diagnose --decode-ms 12.1 --verify-ms 29.5 --noise .08",
        ),
    ):
        assert printed(line) == printed(same)


NUMBERS = (click.types.IntParamType, click.types.FloatParamType)
TAKES_A_NUMBER = [
    (f"{path} {param.opts[0]}", command, param)
    for path, command in TREE.items()
    for param in command.params
    if isinstance(getattr(param.type, "kind", param.type), NUMBERS)
]


@pytest.mark.parametrize(
    ("command", "param"), [case[1:] for case in TAKES_A_NUMBER], ids=[c[0] for c in TAKES_A_NUMBER]
)
def test_a_wrong_number_is_told_in_our_own_words(command: click.Command, param: click.Parameter) -> None:
    """Whatever type an option has: `x` is no number, and the mend is a number that it takes."""
    with pytest.raises(click.BadParameter) as wrong:
        param.type_cast_value(click.Context(command), "x")
    said = usage(wrong.value)
    assert re.match(rf"{param.opts[0]}: 'x' is not a (whole )?number; (for example|give) [\d.]", said), said


@pytest.mark.parametrize(
    "line",
    [
        "sweep --batch 1 --out {missing}/x.csv",
        "observe {log} -o {file}/x",
        "simulate --concurrency 1 --method none --num-requests 1 --requests-out {file}/x.csv",
    ],
)
def test_output_that_cannot_be_written_is_one_line(line: str, tmp_path: Path) -> None:
    """A file where a folder should be stands for a folder that may not be written: tests may run as root."""
    (tmp_path / "file").touch()
    (tmp_path / "server.log").write_text(log(graph=True))
    places = {
        "missing": tmp_path / "missing",
        "file": tmp_path / "file",
        "log": tmp_path / "server.log",
        "validation": VALIDATION,
    }
    done = specsim(*shlex.split(line.format(**places)))
    assert done.returncode in (1, 2)
    assert "Traceback" not in done.stderr
    assert [text for text in done.stderr.splitlines() if text.startswith("error: ")] == done.stderr.splitlines()[-1:]


def _leaves(command: click.Command) -> Iterator[click.Command]:
    """The commands that do something: the command, or those below it."""
    below = getattr(command, "commands", {}).values()
    yield from (leaf for one in below for leaf in _leaves(one)) if below else (command,)


@pytest.mark.parametrize("name", sorted(set(COMMANDS) - {"completion"}))
def test_every_answer_comes_as_json_too(name: str) -> None:
    found = import_module(f"specsim.commands.{name}").command
    assert all("--json" in [flag for param in leaf.params for flag in param.opts] for leaf in _leaves(found))


@pytest.mark.parametrize(
    ("line", "same"),
    [
        ("hardware --json", "hardware list --json"),
        ("models --json", "models list --json"),
        ("hardware", "hardware list"),
        ("hardware --json show 1x-h200", "hardware show 1x-h200 --json"),
        ("--json models show Qwen3-8B", "models show Qwen3-8B --json"),
        ("--no-config --json hardware", "hardware list --json"),
    ],
)
def test_json_may_stand_before_a_command_and_a_group_alone_lists(
    line: str, same: str, capsys: pytest.CaptureFixture[str]
) -> None:
    said = []
    for one in (line, same):
        with pytest.raises(SystemExit) as ended:
            main(one.split())
        said.append((ended.value.code, capsys.readouterr().out))
    assert said[0] == said[1]
    assert said[0][0] == 0
    assert len(said[0][1]) > 1000


def test_every_group_says_in_its_help_that_it_gives_json() -> None:
    groups = [command for command in TREE.values() if isinstance(command, click.Group)]
    assert len(groups) > 2
    assert all("--json" in command.get_help(click.Context(command)) for command in groups)


def test_a_report_says_as_json_which_file_it_wrote(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["report", "--json", "-o", str(tmp_path / "x.html")])
    assert json.loads(capsys.readouterr().out) == {"schema": "specsim.report/1", "report": str(tmp_path / "x.html")}
    assert (tmp_path / "x.html").stat().st_size > 10_000


# --- streams ------------------------------------------------------------------------------------------------------------


def test_streams_of_every_kind(tmp_path: Path) -> None:
    """A reader that closes early is no error, a closed or full output is one line, and no name breaks an ASCII locale."""
    shell = "{python} -m specsim predict --explain | head -1; echo ${{PIPESTATUS[0]}}; {python} -m specsim predict >&-; echo $?"
    bash = subprocess.run(
        ["bash", "-c", shell.format(python=sys.executable)], capture_output=True, text=True, check=True, cwd=tmp_path
    )
    assert bash.stdout.splitlines()[1:] == ["0", "1"]
    assert bash.stderr == "error: standard output is closed\n"
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [sys.executable, "-m", "specsim", "models", "list"], stdout=full, stderr=subprocess.PIPE, check=False
        )
    assert (done.returncode, done.stderr) == (1, b"error: the output cannot be written: No space left on device\n")
    (tmp_path / "Modell µ×").mkdir()
    shutil.copy(ROOT / "specsim" / "presets" / "Qwen3-8B.json", tmp_path / "Modell µ×" / "config.json")
    bare = {"LC_ALL": "C", "PYTHONIOENCODING": "ascii", "PATH": os.environ["PATH"]}  # and no HOME
    done = specsim("models", "show", "Modell µ×", cwd=tmp_path, env=bare)
    assert done.returncode == 0, done.stderr
    assert "Modell \\xb5\\xd7" in done.stdout


def test_windows_line_ends_are_read(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for source, name in (("hardware/8x-h100.yaml", "box.yaml"), ("specsim/presets/Qwen3-8B.json", "model.json")):
        Path(name).write_bytes((ROOT / source).read_bytes().replace(b"\n", b"\r\n"))
    Path("specsim.yaml").write_bytes(b"scenario:\r\n  tp: 4\r\n")
    with pytest.raises(SystemExit) as stop:
        main(["predict", "--hardware", "box.yaml", "--model", "model.json"])
    assert not stop.value.code
    assert capsys.readouterr().out.startswith("model on 8x-h100, sglang 0.5.16, TP 4")


# --- completion -----------------------------------------------------------------------------------------------------------


def completed(line: str) -> list[str]:
    """What a shell offers after the line, whose last word is being typed."""
    words = line.split(" ")
    asked = {"COMP_WORDS": " ".join(words), "COMP_CWORD": str(len(words) - 1), "_SPECSIM_COMPLETE": "bash_complete"}
    done = specsim(env={**os.environ, **asked})
    assert done.stderr == ""
    return [entry.partition(",")[2] for entry in done.stdout.splitlines()]


def test_a_shell_completes_commands_options_and_names() -> None:
    assert completed("specsim pred") == ["predict"]
    assert completed("specsim hardware sh") == ["show"]
    assert completed("specsim predict --accept-pr") == ["--accept-profile"]
    assert completed("specsim predict --model kimi-k2.5-eagle3-") == ["kimi-k2.5-eagle3-mla"]
    assert completed("specsim sweep --hardware 8x-h100,1x-rtx-5") == ["8x-h100,1x-rtx-5090"]
    assert completed("specsim predict --method dr") == ["draft-model"]
    assert completed("specsim predict --accept-profile kimi-k2.5-eagle3/h") == ["kimi-k2.5-eagle3/humaneval"]
    assert completed("specsim models show gpt-oss-20b-") == ["gpt-oss-20b-eagle3"]
    assert completed("specsim nonsense --x") == []


@pytest.mark.parametrize(("shell", "answer"), [("zsh", ["plain", "8x-l40s", "_"]), ("fish", ["plain,8x-l40s"])])
def test_every_shell_is_answered_in_its_own_form(shell: str, answer: list[str]) -> None:
    """zsh reads kind, value and help on a line each; fish kind, value and help in one."""
    asked = {"COMP_WORDS": "specsim predict --hardware 8x-l", "COMP_CWORD": "3" if shell == "zsh" else "8x-l"}
    done = specsim(env={**os.environ, **asked, "_SPECSIM_COMPLETE": f"{shell}_complete"})
    assert (done.stdout.splitlines(), done.stderr) == (answer, "")


@pytest.mark.parametrize(
    ("shell", "typed"),
    [
        ("zsh", "autoload -Uz compinit; compinit -u -D; source {script}; echo $_comps[specsim]"),
        ("fish", 'source {script}; complete -C "specsim predict --hardware 8x-l"'),
    ],
)
def test_the_scripts_of_other_shells_load(shell: str, typed: str, tmp_path: Path) -> None:
    """Where the shell is here: fish is asked to complete a line, zsh whom it would ask."""
    if not shutil.which(shell):
        pytest.skip(f"there is no {shell} here")
    script = tmp_path / "script"
    script.write_text(specsim("completion", shell).stdout)
    (tmp_path / "specsim").write_text(f'#!/bin/sh\nexec {sys.executable} -m specsim "$@"\n')
    (tmp_path / "specsim").chmod(0o755)
    environment = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}", "HOME": str(tmp_path)}
    line = [shell, "-c", typed.format(script=script)]
    done = subprocess.run(line, capture_output=True, text=True, check=False, env=environment)
    assert done.stdout.split()[-1:] == ["_specsim_completion" if shell == "zsh" else "8x-l40s"], done.stderr


def test_completion_loads_nothing_heavy() -> None:
    """It answers at every key: click, a list of files, and no numpy, pydantic or the like."""
    script = """
import os, sys
os.environ |= {"COMP_WORDS": "specsim predict --model K", "COMP_CWORD": "3", "_SPECSIM_COMPLETE": "bash_complete"}
from specsim.cli import main
try:
    main([])
except SystemExit:
    pass
print({"numpy", "pydantic", "yaml", "scipy", "matplotlib"} & set(sys.modules), file=sys.stderr)
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stderr.strip() == "set()"


@pytest.mark.skipif(not shutil.which("bash"), reason="there is no bash here")
def test_the_script_works_in_bash(tmp_path: Path) -> None:
    script = tmp_path / "completion.bash"
    script.write_text(specsim("completion", "bash").stdout)
    (tmp_path / "specsim").write_text(f'#!/bin/sh\nexec {sys.executable} -m specsim "$@"\n')
    (tmp_path / "specsim").chmod(0o755)
    typed = 'COMP_WORDS=(specsim predict --hardware 8x-l); COMP_CWORD=3; _specsim_completion specsim; echo "${COMPREPLY[@]}"'
    environment = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}"}
    done = subprocess.run(
        ["bash", "-c", f"source {script}; {typed}"], capture_output=True, text=True, check=False, env=environment
    )
    assert done.stdout.split()[-1:] == ["8x-l40s"], done.stderr


# --- help -----------------------------------------------------------------------------------------------------------------


def examples(command: click.Command) -> list[str]:
    """The commands that a --help shows."""
    text = re.sub(r"\\\n\s*", "", f"{command.help or ''}\n{command.epilog or ''}")
    found = re.findall(r"^\s*(?:Examples?:\s+)?(specsim .*)$", text, re.MULTILINE)
    return [line.strip() for line in found]


@pytest.mark.parametrize("path", TREE)
def test_every_help_has_an_example_and_fits_80_columns(path: str) -> None:
    command = TREE[path]
    assert examples(command), "no example"
    context = command.context_class(command, info_name=path, terminal_width=80, max_content_width=100)
    text = command.get_help(context)
    assert max(map(len, text.splitlines())) <= 80, [line for line in text.splitlines() if len(line) > 80]
    assert "\u2011" not in text
    whole = set(re.findall(r"[\w./-]*\w-\w[\w./-]*", f"{command.help} {' '.join(getattr(p, 'help', '') or '' for p in command.params)}"))  # fmt: skip
    assert all(name in text for name in whole - {"8x-gpu"} if "\\" not in name and not command_hides(command, name)), (
        "a name is broken"
    )


def command_hides(command: click.Command, name: str) -> bool:
    return any(
        getattr(p, "hidden", False) and name in (p.help or "") for p in command.params if isinstance(p, click.Option)
    )


@pytest.mark.parametrize("path", TREE)
def test_options_say_units_and_defaults_in_one_style(path: str) -> None:
    """A value has a name or a unit of its own (MS, TOKENS, FILE), its default stands in the sentence, which ends in a dot."""
    for option in TREE[path].params:
        if not isinstance(option, click.Option) or option.hidden:
            continue
        assert option.help, option.name
        assert option.help.endswith("."), option.name
        assert option.show_default in (None, False), option.name
        assert not re.search(r"default:|default is|by default|\[default|\bDefault\b", option.help), option.help
        if option.is_flag:
            continue
        metavar = option.metavar or option.type.name
        assert metavar not in (
            "text",
            "integer",
            "float",
            "integer range",
            "float range",
            "path",
            "file",
            "directory",
        ), option.name
        if isinstance(option.default, (int, float, str, Path)) and option.default != "":
            assert re.search(r"\bdefault ", option.help), option.help
        for unit, named in (("_ms", "MS"), ("_us", "US"), ("_mb", "MB")):
            assert not str(option.name).endswith(unit) or option.metavar == named, option.name


# Examples that need what a test has not: a GPU, a server, a browser, a package of measurements.
NOT_RUN = ("calibrate", "doctor", "serve", "validate --url", "validate --launch", "validate --scenarios", "observe http", "hardware import aiconfigurator")  # fmt: skip
CHEAPER = {
    "1:256:x2": "1:4:x2",
    "--jobs 2": "--jobs 1",
    "--leave-one-out": "",
    "--simulate": "",
    "llama8b-*": "llama8b-base",
}
RUN = [
    line
    for command in TREE.values()
    for line in examples(command)
    if not line.removeprefix("specsim ").startswith(NOT_RUN)
]


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with the files that the examples name."""
    monkeypatch.chdir(tmp_path)
    for name in ("server.log", "baseline.log", "speculative.log"):
        Path(name).write_text(log(graph=True))
    Path("bench.jsonl").write_text('{"backend": "sglang", "max_concurrency": 1, "completed": 8, "output_throughput": 80.0, "mean_tpot_ms": 12.1, "random_input_len": 1024}\n')  # fmt: skip
    event = {"name": "nvjet", "cat": "kernel", "ph": "X", "ts": 1, "dur": 5, "args": {"stream": 7}}
    with gzip.open("TP-0.trace.json.gz", "wt") as file:
        file.write(str({"traceEvents": [{**event, "ts": 10 * i} for i in range(50)]}).replace("'", '"'))
    recorded = ("llama8b-base", "llama8b-e3-s3")
    for folder, names in (("runs", recorded), ("validation", (*recorded, "llama8b-base-eager"))):
        Path(folder).mkdir()
        for name in names:
            record = json.loads((VALIDATION / f"{name}.json").read_text())
            Path(folder, f"{name}.json").write_text(json.dumps({**record, "samples": []}))
    Path("azure.csv").write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n" + "".join(f"2023-11-16 18:17:{s:02}.0,{300 + s},40\n" for s in range(0, 60, 5)))  # fmt: skip
    Path("all_reduce.txt").write_text(HEAD.format(graph=1) + ROWS)
    for name in ("monday.yaml", "friday.yaml"):
        shutil.copy(ROOT / "hardware" / "1x-h200.yaml", name)
    Path("path/to").mkdir(parents=True)
    shutil.copy(ROOT / "specsim" / "presets" / "Qwen3-8B.json", "path/to/config.json")
    return tmp_path


@pytest.mark.parametrize("line", sorted({line.split(">")[0].strip() for line in RUN}))
def test_every_example_of_a_help_runs(line: str, place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for costly, cheap in CHEAPER.items():
        line = line.replace(costly, cheap)
    if "sweep.json" in line:
        with contextlib.suppress(SystemExit):
            main(["sweep", "--batch", "1,2", "--draft-tokens", "2:3", "--accept-rate", "0.5", "--json"])
        Path("sweep.json").write_text(capsys.readouterr().out)
    with pytest.raises(SystemExit) as stop:
        main(shlex.split(line)[1:])
    out, err = capsys.readouterr()
    assert not stop.value.code, err
    assert out or any(path.stat().st_mtime for path in place.iterdir())


def test_every_command_stands_in_the_help() -> None:
    assert set(COMMANDS) <= {path.split()[1] for path in TREE if " " in path}


# --- progress -------------------------------------------------------------------------------------------------------------


class _Clock:
    """Seconds that pass when they are told to."""

    def __init__(self) -> None:
        self.now = 0.0

    def monotonic(self) -> float:
        return self.now


def test_progress_away_from_a_terminal_is_a_line_every_five_seconds(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """40 pieces of 0.5 s: at 5 s a quarter is done and 15 s are left, and so on. What runs inside is not heard."""
    from specsim.commands import common
    from specsim.progress import track

    clock = _Clock()
    monkeypatch.setattr(common, "time", clock)
    with common.Meter("work"):
        for _ in track(range(40), "pieces"):
            clock.now += 0.25
            for _ in track(range(2), "inside"):
                clock.now += 0.125
    out, err = capsys.readouterr()
    assert out == ""
    assert err.splitlines() == [
        "work: 25%, about 15 s left; pieces",
        "work: 50%, about 10 s left; pieces",
        "work: 75%, about 5 s left; pieces",
    ]
    with common.Meter("work"):
        for _ in track(range(3)):
            clock.now += 0.3
    assert capsys.readouterr().err == "", "nothing in the first second"


def test_nothing_is_said_where_nobody_listens() -> None:
    from specsim.progress import report, track

    report(1, 2)
    assert list(track([1, 2])) == [1, 2]


@pytest.mark.parametrize(
    ("line", "told"),
    [
        ("sweep --batch x --context y --bogus 3", ["--batch: 'x' is not", "--context: 'y' is not", "specsim sweep: no option '--bogus'"]),
        ("plan --rate x --tp 1:z --bogus", ["--rate: 'x' is not", "--tp: '1:z' is not", "specsim plan: no option '--bogus'"]),
        ("predict --plot a.foo --bogus", ["--plot: .foo is no picture format", "specsim predict: no option '--bogus'"]),
    ],
)  # fmt: skip
def test_wrong_names_and_wrong_values_are_told_in_one_round(
    line: str, told: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(line.split())
    errors = capsys.readouterr().err.splitlines()
    assert ended.value.code == 2
    assert len(errors) == len(told)
    for said in told:
        assert any(error.startswith(f"error: {said}") for error in errors), (said, errors)
