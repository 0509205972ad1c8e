"""Set-ups: a server to start, from the command line or a YAML file, and the flags and environment that start it so."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from specsim.configs import is_preset
from specsim.errors import InputError, did_you_mean
from specsim.files import read_json, read_yaml
from specsim.load import Load
from specsim.records import Record, first_trouble
from specsim.server import MULTICAST_OFF, SAFE_FLAG

ALGORITHMS = {
    "eagle3": "EAGLE3",
    "eagle": "EAGLE",
    "mtp": "NEXTN",
    "draft-model": "STANDALONE",
    "ngram": "NGRAM",
    "none": "",
}
# Flags that a set-up gives itself, by its key: among its other flags they would leave the record, or what keeps the host safe, behind.
OWN_FLAGS = {
    "--model-path": "model", "--tp-size": "tp", "--nnodes": "", "--host": "", "--port": "",
    "--speculative-algorithm": "method", "--speculative-draft-model-path": "draft", "--speculative-num-steps": "num_steps",
    "--speculative-eagle-topk": "topk", "--speculative-num-draft-tokens": "draft_tokens",
}  # fmt: skip
Count = Annotated[int, Field(ge=1, le=4096)]
Context = Annotated[int, Field(ge=16, le=2**20)]
Word = Annotated[str, Field(pattern=r"^[^\x00]*$")]  # of a command line
Variable = Annotated[str, Field(pattern=r"^[A-Za-z_][A-Za-z0-9_]*$")]


class Setup(BaseModel):
    """One server to start and what to measure on it. Paths are relative to the scenario file."""

    model_config = ConfigDict(extra="forbid")

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$", max_length=80)]
    model: Path  # a folder with config.json, or such a file
    draft: Path | None = None
    layers: Count | None = (
        None  # of the target, fewer than its config says: a start is shorter and less memory is needed
    )
    tp: Count = 1
    method: Literal["eagle3", "eagle", "mtp", "draft-model", "ngram", "none"] = "none"
    num_steps: Count | None = None
    topk: Count = 1
    draft_tokens: Count | None = None
    accept_length: Annotated[float, Field(ge=1)] | None = None  # simulated; None: 2, or 1 when nothing more fits
    batches: Annotated[list[Count], Field(min_length=1)] = [1, 4, 16, 32]
    contexts: Annotated[list[Context], Field(min_length=1)] = [1024]
    points: Annotated[list[tuple[Count, Context]], Field(min_length=1)] | None = (
        None  # (batch, context) pairs instead of batches x contexts
    )
    load: Load | None = None  # requests by the clock; without batches or points of its own nothing else is measured
    eager: bool = False  # --disable-cuda-graph
    uniform_experts: bool | None = None  # spread dummy routing evenly; None: when the model has experts
    weights: Literal["dummy", "real"] = "dummy"
    memory: Annotated[float, Field(gt=0, lt=1)] = 0.8  # --mem-fraction-static
    flags: list[Word] = []  # further server flags, as on the command line
    env: dict[Variable, Word] = {}
    profile: bool = False  # also a kernel table of the first point
    routing: str | None = None  # told in the record when the routing is not uniform
    about: str = ""
    hardware: str | None = None  # the profile that describes the box, for the record

    @property
    def rows(self) -> int:
        """Rows a sequence in a verify pass: the draft tokens, root included."""
        if self.method == "none":
            return 1
        return self.draft_tokens or (self.num_steps or 0) + 1

    def pairs(self) -> list[tuple[int, int]]:
        if self.load is not None and not self.model_fields_set & {"batches", "contexts", "points"}:
            return []
        pairs = self.points
        if pairs is None:
            pairs = [(batch, context) for context in self.contexts for batch in self.batches]
        return list(dict.fromkeys(pairs))

    def without(self, records: Sequence[Record]) -> Setup | None:
        """What these records of earlier runs do not hold of it; None where they hold everything. A point that failed is none."""
        measured = {(p.batch, p.raw.get("prompt_tokens")) for r in records for p in r.points}
        sent = {run.rate for r in records for run in r.loads}
        points = [pair for pair in self.pairs() if pair not in measured]
        runs = [run for run in self.load.runs() if run[0] not in sent] if self.load is not None else []
        if not points and not runs:
            return None
        rates, counts = ([run[i] for run in runs] for i in (0, 1))
        load = self.load.model_copy(update={"rates": rates, "num_requests": counts}) if self.load and runs else None
        return self.model_copy(update={"points": points, "load": load})


def load_setups(path: Path) -> list[Setup]:
    """The scenarios of a YAML file: a list `scenarios:` over `defaults:`. Raises InputError naming entry and key."""
    document = read_yaml(path, "scenario file")
    if isinstance(document, list):
        document = {"scenarios": document}
    if not isinstance(document, dict) or not isinstance(document.get("scenarios"), list):
        raise InputError("has no list `scenarios`", where=str(path), mend="see validation/README.md for an example")
    unknown = set(document) - {"scenarios", "defaults"}
    if unknown:
        raise InputError(f"unknown key {min(map(str, unknown))!r}", where=str(path), mend="known: defaults, scenarios")
    if not document["scenarios"]:
        raise InputError("lists no scenario", where=str(path), mend="see validation/README.md for an example")
    defaults = _mapping(document.get("defaults"), f"{path}, defaults")
    found = []
    for number, entry in enumerate(document["scenarios"], 1):
        if not isinstance(entry, dict):
            raise InputError("is not a mapping", where=f"{path}, scenario {number}", mend="write key: value lines")
        where = f"{path}, scenario {entry.get('name', number)}"
        env = {**_mapping(defaults.get("env"), f"{path}, defaults, env"), **_mapping(entry.get("env"), f"{where}, env")}
        merged = {**defaults, **entry, "env": {k: str(v) for k, v in env.items() if v is not None}}
        for key in ("model", "draft"):
            if merged.get(key):
                merged[key] = path.parent / str(merged[key])
        found.append(make_setup(merged, where))
    names = [s.name for s in found]
    twice = {n for n in names if names.count(n) > 1}
    if twice:
        raise InputError(f"two scenarios are called {min(twice)!r}", where=str(path), mend="give each its own name")
    return found


def _mapping(value: Any, where: str) -> dict[str, Any]:
    """The value as a mapping, {} for none. Raises InputError."""
    if not isinstance(value, dict | None):
        raise InputError("is not a mapping", where=where, mend="write key: value lines")
    return value or {}


def make_setup(values: dict[str, Any], where: str) -> Setup:
    """A checked setup. Raises InputError naming the key."""
    try:
        setup = Setup.model_validate(values)
    except ValidationError as error:
        first = error.errors()[0]
        key = ".".join(map(str, first["loc"]))
        if first["type"] == "extra_forbidden":
            raise InputError(
                f"unknown key {key!r}", where=where, mend=did_you_mean(key, list(Setup.model_fields))
            ) from None
        raise InputError(first_trouble(error), where=where, mend="correct that value") from None
    if setup.method not in ("none", "ngram") and setup.num_steps is None:
        raise InputError(
            f"method {setup.method} needs num_steps", where=where, mend="give --num-steps, as SGLang has it"
        )
    if setup.method == "ngram" and setup.draft_tokens is None:
        raise InputError("method ngram needs draft_tokens", where=where, mend="give --draft-tokens")
    if setup.method in ("eagle3", "eagle", "draft-model") and setup.draft is None:
        raise InputError(f"method {setup.method} needs a draft", where=where, mend="give --draft DIR")
    if setup.method == "none" and (setup.draft or setup.num_steps or setup.draft_tokens):
        raise InputError(
            "a draft, num_steps or draft_tokens without a method", where=where, mend="give --method eagle3"
        )
    if setup.profile and not setup.pairs():
        raise InputError("a profile is of the first point, and a load has none", where=where, mend="give batches too")
    if setup.method != "none" and setup.topk > 1 and setup.draft_tokens is None:
        raise InputError("topk above 1 needs draft_tokens", where=where, mend="give --draft-tokens")
    if setup.num_steps is not None and setup.method != "ngram":
        _check_rows(setup, setup.num_steps, where)
    if setup.load is not None:
        try:
            setup.load.runs()
        except ValueError as error:
            raise InputError(f"load: {error}", where=where, mend="give one number, or one for each rate") from None
    limit = (setup.num_steps or setup.rows - 1) + 1
    if setup.method != "none" and (setup.accept_length or 1) > limit:
        raise InputError(
            f"accept_length {setup.accept_length:g} is above num_steps + 1 = {limit}", where=where, mend="lower it"
        )
    return setup


def _check_rows(setup: Setup, steps: int, where: str) -> None:
    """Raise InputError for draft tokens that SGLang would change (a chain's) or refuse (more than the tree has)."""
    if setup.topk == 1 and setup.rows != steps + 1:
        what = f"draft_tokens {setup.rows}, where SGLang verifies num_steps + 1 = {steps + 1} rows with topk 1"
        raise InputError(what, where=where, mend="leave draft_tokens out, or give topk above 1")
    most = 1 + setup.topk + (steps - 1) * setup.topk**2
    if setup.rows > most:
        what = f"draft_tokens {setup.rows} of a tree of {most}"
        raise InputError(what, where=where, mend=f"give up to {most}, or more num_steps")


def config_of(path: Path, what: str) -> dict[str, Any]:
    """The config.json in a folder, or the file itself. Raises InputError."""
    if not path.exists() and is_preset(path.name):
        mend = "a server takes the model's own: give its folder or its config.json"
        raise InputError(f"no such {what} config.json: this is the name of a preset", where=str(path), mend=mend)
    config = read_json(path / "config.json" if path.is_dir() else path, f"{what} config.json")
    if not isinstance(config, dict):
        raise InputError("is not a model's config.json", where=str(path), mend="give a folder with one, or the file")
    return config


def target_config(setup: Setup) -> dict[str, Any]:
    """The target's config.json with the layers that the setup asks for. Raises InputError when there are not so many, or
    too few are left for the dense ones or for EAGLE-3, which reads three of them."""
    config = config_of(setup.model, "target")
    if setup.layers is None:
        return config
    named = isinstance(config.get("text_config"), dict)
    inner: dict[str, Any] = dict(config["text_config"] if named else config)
    known = int(inner.get("num_hidden_layers") or 0)
    least = max(int(inner.get("first_k_dense_replace") or 0) + 1, 7 if setup.method == "eagle3" else 1)
    if not least <= setup.layers <= known:
        raise InputError(
            f"{setup.layers} layers of {known}", where=f"scenario {setup.name}", mend=f"give {least} to {known}"
        )
    inner["num_hidden_layers"] = setup.layers
    if isinstance(inner.get("layer_types"), list):
        inner["layer_types"] = inner["layer_types"][: setup.layers]
    return {**config, "text_config": inner} if named else inner


def moe_layers(config: dict[str, Any]) -> int:
    """Layers with routed experts, 0 for a dense model."""
    inner = config.get("text_config", config)
    if not any(inner.get(k) for k in ("n_routed_experts", "num_experts", "num_local_experts")):
        return 0
    return int(inner.get("num_hidden_layers", 0)) - int(inner.get("first_k_dense_replace", 0) or 0)


def server_flags(setup: Setup, model: str, draft: str | None, port: int) -> list[str]:
    """SGLang's flags for a setup."""
    flags = [
        "--model-path",
        model,
        "--host",
        "127.0.0.1",
        "--port",
        str(port),
        "--trust-remote-code",
        "--dtype",
        "bfloat16",
    ]
    flags += ["--skip-tokenizer-init", "--skip-server-warmup", "--grammar-backend", "none", "--enable-metrics"]
    flags += ["--decode-log-interval", "20", "--mem-fraction-static", f"{setup.memory:g}"]
    if setup.weights == "dummy":
        flags += ["--load-format", "dummy"]
    largest = max((batch for batch, _ in setup.pairs()), default=0)
    asked = setup.load.max_running if setup.load is not None else 0
    if asked is not None:  # else the engine's own limits, which a load shall meet
        limit = str(max(largest, asked, 8))
        flags += ["--max-running-requests", limit]
        flags += ["--disable-cuda-graph"] if setup.eager else ["--cuda-graph-max-bs", limit]
    elif setup.eager:
        flags += ["--disable-cuda-graph"]
    if setup.tp > 1:
        flags += ["--tp", str(setup.tp), SAFE_FLAG]
    if setup.method != "none":
        flags += [
            "--speculative-algorithm",
            ALGORITHMS[setup.method],
            "--speculative-num-draft-tokens",
            str(setup.rows),
        ]
        if setup.method != "ngram":
            flags += [
                "--speculative-num-steps",
                str(setup.num_steps),
                "--speculative-eagle-topk",
                str(setup.topk),
            ]
        if draft is not None:
            flags += ["--speculative-draft-model-path", draft]
    return flags + setup.flags


def server_env(setup: Setup, experts: bool) -> dict[str, str]:
    """Environment variables that the scenario sets; the user's own come after and win."""
    env = {"SGLANG_ENABLE_METRICS_DEVICE_TIMER": "1", "HF_HUB_OFFLINE": "1", **MULTICAST_OFF}
    if setup.method != "none" and (setup.weights == "dummy" or setup.accept_length is not None):
        most = (setup.num_steps or setup.rows - 1) + 1
        env["SGLANG_SIMULATE_ACC_LEN"] = f"{setup.accept_length or min(2, most):g}"
        env["SGLANG_SIMULATE_ACC_METHOD"] = "match-expected"
    if experts:
        env["SGLANG_SIMULATE_UNIFORM_EXPERTS"] = "1"
    return env | setup.env
