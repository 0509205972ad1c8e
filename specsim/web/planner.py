"""What the planner page asks: a prediction of options given as text, by the parser, resolver and equations of `predict`.

A request is `{"options": {"batch": "8", ...}, "files": {"model": ID, ...}}`: options carry the command line's names and
texts, files are those that were dropped on the page and are known by what `add_file` called them. Names in options are
those of shipped models and boxes; no request makes specsim open a file.
"""

from __future__ import annotations

import csv
import dataclasses
import hashlib
import io
import json
from collections import OrderedDict
from collections.abc import Container, Iterable, Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import click
from pydantic_core import PydanticSerializationError, to_json

from specsim import text
from specsim.acceptance import list_profiles as acceptance_profiles
from specsim.chart_predict import prediction_charts
from specsim.charts import Chart, charts_for
from specsim.commands.common import usage
from specsim.commands.scenario import options_of, scenario_options
from specsim.configs import list_presets, load_model, load_preset, parse_model
from specsim.engines import Engine, load_engine
from specsim.errors import InputError, did_you_mean, together
from specsim.files import as_text
from specsim.launch_lines import sglang_line, vllm_config, vllm_line
from specsim.machine import SHAPED, Machine
from specsim.machine import build as build_machine
from specsim.models import Model
from specsim.names import ENGINES, METHODS
from specsim.prediction import SAMPLES, Prediction, Priced, price
from specsim.profiles import Profile, list_profiles, load_profile, load_shipped, parse_profile
from specsim.quantities import Quantity
from specsim.scenarios import Scenario, build, wrong_alone
from specsim.sweep_run import run
from specsim.sweeps import Spec

PREDICT = "specsim predict"
KINDS = ("model", "draft", "hardware")
FILE_BYTES = 2**20  # of a dropped file
FILES, ANSWERS, AROUND, MACHINES, PRICED = 32, 32, 32, 16, 32  # kept, the least recently used go first
OPTION_LENGTH, LINE_LENGTH = 2_000, 10_000  # characters of an option, and of a launch line
BATCHES, CONTEXTS, LENGTHS = (1, 2, 4, 8, 16, 32, 64), (1024, 4096, 16384, 65536), tuple(range(2, 9))  # of `around`
ACCEPTANCE = ("accept-rate", "accept-length", "accept-per-position", "accept-profile")
SWEPT = ("batch", "context", "draft_tokens", "num_steps", *(name.replace("-", "_") for name in ACCEPTANCE))
KEPT = (
    2**17
)  # characters of what is kept of a file, and of a profile's samples; shipped ones have two thirds of it at most
TREE = 1024  # candidates of a draft tree: larger ones take seconds, and hold up everybody's page


class Missing(InputError):
    """Files that the planner does not have (any more): the page sends them again, or asks for them."""

    def __init__(self, kinds: list[str]) -> None:
        self.kinds = kinds
        files, them = ("file is", "it") if len(kinds) == 1 else ("files are", "them")
        super().__init__(f"the dropped {' and '.join(kinds)} {files} not here", mend=f"drop {them} again")


@click.command("predict", add_help_option=False)
@scenario_options
def _options(**values: Any) -> None:
    """The scenario options of the command line."""


_CONTEXT = click.Context(_options, info_name="predict")
NAMES = {option.opts[0].lstrip("-"): option for option in _options.params if isinstance(option, click.Option)}


class Asked(NamedTuple):
    """A request in order, so that equal ones are equal: (name, value) of its options, and (kind, ID) of its files."""

    options: tuple[tuple[str, Any], ...]
    files: tuple[tuple[str, str], ...]

    def without(self, names: Container[str]) -> Asked:
        """The request without some options."""
        return Asked(tuple(option for option in self.options if option[0] not in names), self.files)


@dataclasses.dataclass(frozen=True)
class Kept:
    """What was read of a file, and what a command line calls it."""

    read: Model | Profile
    file: str

    def json(self, digest: str) -> dict[str, Any]:
        """As the page knows it."""
        return {
            "id": digest,
            "name": self.read.name,
            "file": Path(self.file).name,
            "about": _about(self.read),
            "drafter": _drafts(self.read),
        }


class Planner:
    """Answers requests. Bounded: it keeps some files, machines and answers, and nothing else between requests."""

    def __init__(self, command: str = PREDICT) -> None:
        """command: what the commands that the page shows begin with."""
        self.command = command
        self.start: dict[str, Any] = {"options": {}, "files": {}}
        self._own: dict[str, Kept] = {}  # of the one who serves: never forgotten
        self._files: OrderedDict[str, Kept] = OrderedDict()
        self._machine = lru_cache(MACHINES)(self._build_machine)
        self._priced: OrderedDict[Asked, Priced] = OrderedDict()  # one serves all acceptances
        self._answer = lru_cache(ANSWERS)(self._make_answer)
        self._around = lru_cache(AROUND)(self._make_around)

    def choices(self) -> dict[str, Any]:
        """What the page offers to choose from."""
        boxes = [load_shipped(name) for name in list_profiles()]
        return {
            "models": [{"name": p.name, "role": p.role, "drafts": p.drafts, "mtp": p.mtp} for p in list_presets()],
            "boxes": [{"name": b.name, "gpus": b.gpus, "gpu": b.gpu.name, "link": b.link} for b in boxes],
            "engines": [{"name": name, "version": load_engine(name).version} for name in ENGINES],
            "methods": METHODS,
            "acceptance": acceptance_profiles(),
            "start": self.start,
        }

    def start_with(self, values: Mapping[str, Any]) -> None:
        """Let the page open with scenario options as the command line read them; here names may be paths.

        Raises InputError when they are no scenario that the page can show.
        """
        options: dict[str, Any] = {}
        files: dict[str, Any] = {}
        for name, option in NAMES.items():
            value = values.get(str(option.name))
            if value is None or value == ():
                continue
            read = None
            if name in KINDS:
                read = load_profile(value) if name == "hardware" else load_model(value)
            if read is not None and Path(value).exists():
                digest = hashlib.sha256("".join(_content(read)).encode()).hexdigest()[:32]
                self._own[digest] = Kept(read, value)
                files[name] = self._own[digest].json(digest)
            else:
                options[name] = list(value) if name == "eager" else _text(value)
        self.start = {"options": options, "files": files}
        self.answer({"options": options, "files": {kind: file["id"] for kind, file in files.items()}})

    def add_file(self, kind: str, name: str, raw: bytes) -> dict[str, Any]:
        """Read a dropped file and keep it; what it is called from now on, and what was read. Raises InputError."""
        if kind not in KINDS:
            raise InputError(f"no files of kind {kind[:40]!r}", mend=did_you_mean(kind[:40], KINDS))
        shown = " ".join(name.replace("\\", "/").rsplit("/", 1)[-1].split())[:80] or "file"
        digest = hashlib.sha256(json.dumps([kind, shown]).encode() + raw).hexdigest()[:32]
        read: Model | Profile
        if kind == "hardware":
            box = parse_profile(as_text(raw, shown, "hardware profile"), shown)
            timed = {name: table for name, table in box.samples.items() if name.split("_")[0] in SHAPED}
            read = box.model_copy(update={"samples": timed, "environment": {}})  # the rest no prediction needs
        else:
            read = parse_model(as_text(raw, shown, "model config"), shown, shown.rsplit(".", 1)[0])
            if shown == "config.json":  # as every model's is called: it goes by a folder of its kind
                role = "draft" if kind == "draft" or _drafts(read) else "model"
                shown = f"{role}/{shown}"
                read = dataclasses.replace(read, name=role, source=shown)
        if max(map(len, _content(read))) > KEPT:  # what is read costs memory and time in every prediction
            raise InputError(
                "holds too many different layers, operators or curves", where=shown, mend="use specsim predict"
            )
        self._files[digest] = Kept(read, shown)
        self._files.move_to_end(digest)
        while len(self._files) > FILES:
            self._files.popitem(last=False)
        return self._files[digest].json(digest)

    def answer(self, request: Any) -> bytes:
        """All that the page shows of a request, as JSON. Raises InputError, with the text of the command line."""
        return self._answer(_checked(request))

    def around(self, request: Any) -> bytes:
        """The chart of draft lengths over batches and contexts, as JSON: the best at the request's acceptance, or what
        breaks even without one. Raises InputError."""
        return self._around(_checked(request).without(("batch", "context")))

    def document(self, request: Any) -> str:
        """What `predict --json` prints, to the byte."""
        return json.dumps(self.predict(request).json(), indent=2, allow_nan=False) + "\n"

    def table(self, request: Any) -> str:
        """The prediction as CSV."""
        return as_csv(self.predict(request))

    def predict(self, request: Any) -> Prediction:
        """The prediction of a request. Raises InputError."""
        return self._predict(_checked(request))

    def _predict(self, asked: Asked) -> Prediction:
        scenario, _ = self._scenario(asked)
        costs = asked.without(ACCEPTANCE)
        found = self._priced.pop(costs, None)
        if found is None:
            box = dict(asked.files).get("hardware") or scenario.profile.name
            found = price(scenario, self._machine(box, scenario.engine))
        self._priced[costs] = found
        while len(self._priced) > PRICED:
            self._priced.popitem(last=False)
        return found.accepting(scenario)

    def _make_answer(self, asked: Asked) -> bytes:
        p = self._predict(asked)
        document = p.json(sources=False)
        lines = {"sglang": sglang_line(p.scenario), "vllm": vllm_line(p.scenario)}
        config = vllm_config(p.scenario)
        shown = {
            "headline": document["title"],
            "verdict": document["verdict"],
            "mood": mood(p),
            "figures": figures(p),
            "rows": text.sourced_rows(p),
            "charts": [chart.json() for chart in prediction_charts(document)],  # no text of a file is in them
            **{key: document[key] for key in ("scenario", "accept_rate", "accept_length", "warnings")},
            "command": self.command + str(document["command"]).removeprefix(PREDICT),
            "launch": {**lines, "vllm_config": None if config is None else json.dumps(config)},
            "gpus": p.scenario.profile.gpus,
        }
        return _json(shown)

    def _make_around(self, asked: Asked) -> bytes:
        scenario, arguments = self._scenario(asked)
        charts: list[Chart] = []
        if scenario.method != "none" and scenario.topk == 1:
            rates = scenario.acceptance.rates if scenario.acceptance else (None,)
            spec = Spec(
                make=lambda axes: build(**{k: v for k, v in arguments.items() if k not in SWEPT}, **axes),
                batch=BATCHES,
                context=CONTEXTS,
                draft_tokens=LENGTHS,
                kind="" if not scenario.acceptance else "rate" if len(rates) == 1 else "per_position",
                acceptance=rates if len(rates) == 1 else (rates,),
            )
            charts = charts_for(run(spec).json())
        shown = [chart.json() for chart in charts if chart.key in ("best", "breakeven")][:1]
        return _json({"charts": shown})

    def _scenario(self, asked: Asked) -> tuple[Scenario, dict[str, Any]]:
        """The scenario, and the arguments of `build` that made it."""
        kept = {kind: self._file(digest) for kind, digest in asked.files}
        dropped = {kind: file for kind, file in kept.items() if file is not None}
        if len(dropped) < len(kept):
            raise Missing([kind for kind in kept if kind not in dropped])
        values = _read(asked.options)
        try:
            return self._build(values, dropped)
        except InputError as error:
            no_paths = {
                name: value
                for name, value in values.items()
                if name not in KINDS and (name != "routing" or str(value).startswith("zipf:"))
            }
            raise together(error, wrong_alone(no_paths)) from None

    def _build(self, values: dict[str, Any], dropped: dict[str, Kept]) -> tuple[Scenario, dict[str, Any]]:
        resolved, notes = options_of(values)
        said = {**resolved.get("asked", resolved), **{kind: file.file for kind, file in dropped.items()}}
        resolved.update({kind: file.read for kind, file in dropped.items()}, asked=said)
        for kind in KINDS:
            if isinstance(resolved.get(kind), str):
                resolved[kind] = _shipped(kind, resolved[kind])
        _check(resolved)
        return build(**resolved).noted(notes), resolved

    def _file(self, digest: str) -> Kept | None:
        """A kept file, which counts as used now."""
        if digest in self._files:
            self._files.move_to_end(digest)
        return self._own.get(digest) or self._files.get(digest)

    def _build_machine(self, box: str, engine: Engine) -> Machine:
        kept = self._file(box)
        found = kept.read if kept else load_shipped(box)
        assert isinstance(found, Profile)
        return build_machine(found, engine, samples=SAMPLES)


def _json(shown: dict[str, Any]) -> bytes:
    """As the page takes it, by pydantic's writer, which takes a third of the time of Python's own."""
    try:
        written = to_json(shown)
    except PydanticSerializationError:  # half a character in a name, which is no UTF-8 but can be escaped
        written = b""
    if (
        not written or b"NaN" in written or b"Infinity" in written
    ):  # a number that JSON has not, or a name: Python's tells
        return json.dumps(shown, allow_nan=False).encode()
    return written


def _drafts(read: Model | Profile) -> bool:
    """Whether a file is a drafter's, wherever it was dropped."""
    return isinstance(read, Model) and read.draft is not None and read.draft.kind != "model"


def _about(read: Model | Profile) -> str:
    """What a file holds, in a few words."""
    if isinstance(read, Profile):
        return f"{read.gpus} x {read.gpu.name}, {read.link}"
    return f"{read.architecture or 'model'}, {read.total_parameters / 1e9:,.2f} B parameters"


def _content(read: Model | Profile) -> tuple[str, ...]:
    """All that was read of a file; a profile's samples apart."""
    if not isinstance(read, Profile):
        return (repr(dataclasses.astuple(read)),)
    return read.model_copy(update={"samples": {}}).model_dump_json(), json.dumps(read.samples, default=str)


def _text(value: Any) -> str:
    """An option's value as the line has it."""
    if isinstance(value, tuple):
        return ",".join(map(repr, value))
    return "on" if value is True else str(value)


def _checked(request: Any) -> Asked:
    """The request: known names, texts of bounded length, files by their digest. Raises InputError."""
    if not isinstance(request, dict) or not set(request) <= {"options", "files"}:
        raise InputError("a request has options and files", where="request")
    options, files = request.get("options", {}), request.get("files", {})
    if not isinstance(options, dict) or not isinstance(files, dict):
        raise InputError("options and files are objects", where="request")
    for name, value in options.items():
        if name not in NAMES:
            raise InputError(f"no option --{name[:40]}", mend=did_you_mean(name[:40], list(NAMES)))
        texts = value if isinstance(value, list) and name == "eager" else [value]
        longest = LINE_LENGTH if name.endswith("-args") else OPTION_LENGTH
        if len(texts) > 8 or not all(isinstance(x, str) and len(x) <= longest for x in texts):
            raise InputError(f"is no text of at most {longest:,} characters", where=f"--{name}", mend="shorten it")
    for kind, digest in files.items():
        if kind not in KINDS or not isinstance(digest, str) or len(digest) > 64:
            raise InputError("files are named by kind", where="request", mend=f"kinds: {', '.join(KINDS)}")
    if "eager" in options:
        eager = options["eager"]
        options = {**options, "eager": (eager,) if isinstance(eager, str) else tuple(eager)}
    return Asked(tuple((n, options[n]) for n in NAMES if n in options), tuple(sorted(files.items())))


def _read(given: Iterable[tuple[str, Any]]) -> dict[str, Any]:
    """The values of options, read as the command line reads them. Raises InputError."""
    read: dict[str, Any] = {}
    wrong: list[InputError] = []
    for name, value in given:
        try:
            read[str(NAMES[name].name)] = NAMES[name].process_value(_CONTEXT, value)
        except click.ClickException as error:
            wrong.append(InputError(usage(error)))
    if wrong:
        raise together(wrong[0], wrong[1:])
    return read


def _shipped(kind: str, name: str) -> Model | Profile:
    """The shipped model or box of that name. Raises InputError."""
    try:
        return load_shipped(name) if kind == "hardware" else load_preset(name)
    except InputError as error:
        what = {"hardware": "its profile's YAML", "draft": "the draft's config.json"}.get(kind, "its config.json")
        near = error.mend.partition("?")[0] if error.mend.startswith("did you mean") else "choose another"
        raise InputError(error.what, where=f"--{kind}", mend=f"{near}, or drop {what} on the page") from None


def _check(options: Mapping[str, Any]) -> None:
    """Raise InputError for what the command line takes and a page that others share does not."""
    routing = options.get("routing")
    if routing is not None and routing != "uniform" and not routing.startswith("zipf:"):
        raise InputError(
            f"{routing[:40]!r} is neither uniform nor zipf:S", where="--routing", mend="for example zipf:0.8"
        )
    topk, steps = options.get("topk") or 1, options.get("num_steps") or 1
    if topk > 1 and topk + (steps - 1) * topk * topk > TREE:
        raise InputError(f"the tree has more than {TREE:,} candidates", where="--topk", mend="use specsim predict")


def mood(p: Prediction) -> str:
    """The verdict as one word, for its colour: unfit, gain, loss, either, open (no acceptance given) or none."""
    if not p.fits:
        return "unfit"
    if p.breakeven_length is None:
        return "none"
    if not p.reachable:
        return "loss"
    if p.speedup is None:
        return "open"
    if p.speedup.low > 1 or p.speedup.high < 1:
        return "gain" if p.speedup.value > 1 else "loss"
    return "either"


def figures(p: Prediction) -> list[dict[str, str]]:
    """The few numbers that the page shows large."""
    memory = p.memory

    def figure(name: str, q: Quantity | None, unit: str = "") -> list[dict[str, str]]:
        return [] if q is None else [{"name": name, "value": str(q), "unit": unit, "interval": q.interval}]

    out = figure("speedup", p.speedup, "x")
    out += figure("break-even rate", p.breakeven_rate) + figure("break-even length", p.breakeven_length, "tokens")
    if p.accept_length is not None:
        rate = "" if p.accept_rate is None else f"accept rate {p.accept_rate:.2f}"
        out.append({"name": "this drafter", "value": f"{p.accept_length:.2f}", "unit": "tokens", "interval": rate})
    out += figure("plain decoding", p.decode_tokens_per_s, "tok/s") + figure(
        "speculative", p.spec_tokens_per_s, "tok/s"
    )
    out += figure("decode step", p.decode_ms, "ms") + figure("verify", p.verify_ms, "ms")
    out += figure("cycle", p.cycle_ms, "ms")
    if memory is not None:
        used = f"{(memory.weights + memory.kv) / 1e9:,.0f}"
        fits = "fits" if memory.fits else "does not fit"
        out.append(
            {
                "name": "memory a GPU",
                "value": used,
                "unit": "GB",
                "interval": f"{fits} in {memory.capacity / 1e9:,.0f} GB",
            }
        )
    return out


def as_csv(p: Prediction) -> str:
    """Every number of a prediction, a row each; numbers as in its JSON document."""
    document = p.json()
    rows: list[tuple[Any, ...]] = [("table", "name", "value", "low", "high", "unit", "calls", "bytes", "origin")]
    rows += [("scenario", name, value) for name, value in document["scenario"].items()]
    for key, _, unit, phases in text.QUANTITIES:
        found = getattr(p, key)
        if isinstance(found, Quantity):
            rows.append(("result", key, *found.json().values(), unit, "", "", text.origin(p, phases)))
        elif found is not None:
            rows.append(("result", key, found, "", "", unit, "", "", "given"))
    for point in document["speedup_by_accept_rate"]:
        rows.append(("speedup by accept rate", point["accept_rate"], *point["speedup"].values(), "x"))
    for part in document["breakdown"]:
        name = f"{part['phase']} {part['component']}"
        rows.append(("breakdown", name, part["ms"], "", "", "ms", part["count"], part["bytes"], part["source"]))
    rows += [("memory", name, value) for name, value in (document["memory"] or {}).items()]
    rows += [("note", warning) for warning in document["warnings"]]
    file = io.StringIO()
    csv.writer(file, lineterminator="\n").writerows([_cell(value) for value in row] for row in rows)
    return file.getvalue()


def _cell(value: Any) -> Any:
    """A text that no spreadsheet takes for a formula."""
    return f"'{value}" if isinstance(value, str) and value[:1] in ("=", "+", "-", "@", "\t", "\r") else value
