"""What people ask by options, on a command line or in Python: a launch line fills in what they leave out."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Set
from contextlib import suppress
from dataclasses import fields
from inspect import signature
from numbers import Integral, Real
from pathlib import Path
from typing import Any

import numpy as np

from specsim.acceptance import Acceptance
from specsim.configs import load_model, load_preset
from specsim.errors import InputError, did_you_mean, together
from specsim.files import path_of
from specsim.models import Model
from specsim.names import flag_of
from specsim.prediction import SAMPLES, Prediction
from specsim.prediction import predict as predict_scenario
from specsim.profiles import Profile, load_profile
from specsim.routing import Routing
from specsim.scenarios import Scenario, build, wrong_alone

LAUNCH_LINES = {"sglang_args": "sglang", "vllm_args": "vllm"}
# Settings of an engine that costs depend on, by what they are: on a command line they stand in a launch line.
WORDS = {
    "attention_backend", "draft_attention_backend", "fp8_gemm_backend", "kv_cache_dtype", "moe_a2a_backend", "moe_runner_backend",
    "quantization", "version",
}  # fmt: skip
SWITCHES = {
    "disable_cuda_graph", "disable_custom_all_reduce", "disable_overlap", "flashinfer_allreduce_fusion", "p2p", "prefill_graphs",
}  # fmt: skip
COUNTS = {
    "chunked_prefill_size", "cuda_graph_max_bs", "max_num_batched_tokens", "max_running_requests", "nodes", "prefill_graph_tokens",
}  # fmt: skip
SETTINGS = WORDS | SWITCHES | COUNTS | {"captured_sizes", "env", "prefill_graph_sizes"}
SEQUENCES = ("accept_per_position", "captured_sizes", "prefill_graph_sizes")  # one value of these is several numbers
_BUILT = {p.name for p in signature(build).parameters.values() if p.kind is p.KEYWORD_ONLY} - {"asked"}
NAMES = _BUILT | SETTINGS | set(LAUNCH_LINES)
LENGTHS = ("num_steps", "topk", "draft_tokens")
DRAFTLESS = ("none", "ngram", "mtp")  # methods that name no draft model
A_FILE = (str, os.PathLike)
KINDS: dict[str, tuple[type, ...]] = {
    **dict.fromkeys((*WORDS, *LAUNCH_LINES, "engine", "method", "accept_profile"), (str,)),
    **dict.fromkeys(SWITCHES, (bool, np.bool_)),
    "model": (*A_FILE, Model),
    "draft": (*A_FILE, Model),
    "hardware": (*A_FILE, Profile),
    "acceptance": (Acceptance,),
    "env": (Mapping,),
    "routing": (str, Routing),
    "eager": (str, tuple, list, Set),
    "dp_attention": (bool, Integral),
}
FILES: dict[str, Callable[[str], Model | Profile]] = {
    "model": load_model,
    "draft": load_model,
    "hardware": load_profile,
}


def scenario_of(values: Mapping[str, Any]) -> Scenario:
    """The scenario of options by name; None and () are options left out. Raises InputError."""
    try:
        options, notes = options_of(values)
        return build(**options).noted(notes)
    except InputError as error:
        raise together(error, wrong_alone(values)) from None


AModel = str | os.PathLike[str] | Model  # a name, a folder, a config.json, or what `load_model` gave


def scenario(model: AModel | None = None, /, **options: Any) -> Scenario:
    """A scenario from a model and the options of `specsim predict`, with underscores: hardware, tp, batch (sequences),
    context (tokens a sequence), draft_tokens (rows a sequence, root included), accept_rate (0 to 1), sglang_args, ... and
    from settings of the engine: max_running_requests, attention_backend, disable_cuda_graph, version, ...

        >>> s = scenario("Llama-3.1-8B", hardware="1x-h200", batch=[1, 8], draft_tokens=4)
        >>> s.method, s.batch.tolist()
        ('eagle3', [1.0, 8.0])

    batch, context, draft_tokens, num_steps and accept_rate may be arrays, for `specsim.evaluate`. Raises InputError, for
    names that are no option as well.
    """
    return _known(with_model(model, options))


def with_model(given: Any, options: dict[str, Any], *, several: bool = False) -> dict[str, Any]:
    """The options with the model that was given before them; `several`: it may be a list. Raises InputError when it is
    no model, or stated twice."""
    if given is None:
        return options
    models = list(given) if several and isinstance(given, (list, tuple)) else [given]
    for each in models:
        if not isinstance(each, (str, os.PathLike, Model)):
            what = f"a {type(each).__name__} where a model is expected"
            raise InputError(what, mend="give a name, a folder or a config.json first, and all else as keywords")
    if options.get("model") is not None:
        raise InputError("the model is stated twice", where="model", mend="give it first, or as a keyword")
    names = [each if isinstance(each, Model) else os.fspath(each) for each in models]
    return {**options, "model": names if several else names[0]}


def _known(options: Mapping[str, Any]) -> Scenario:
    for name in options:
        if name not in NAMES:
            raise InputError(f"no option {name!r}", mend=did_you_mean(name, sorted(NAMES)))
    return scenario_of(options)


def predict(
    scenario: Scenario | AModel | None = None, /, *, samples: int = SAMPLES, seed: int = 0, **options: Any
) -> Prediction:
    """Predict one scenario, or what a model and options say: those of `specsim predict`, with underscores.

        >>> p = predict(draft_tokens=3, accept_rate=0.6)
        >>> p.reachable, p.accept_length
        (True, 1.96)
        >>> predict("Qwen3-8B", hardware="1x-h200", batch=8).scenario.method
        'eagle3'

    Times of the prediction are in ms, rates in tokens a second over the batch. samples: parameter samples that the 80 % intervals come from; 0 is faster and has none. Raises InputError.
    """
    if isinstance(scenario, Scenario):
        if options:
            raise InputError("a scenario and options", where="predict", mend="give one of them")
        return predict_scenario(scenario, samples=samples, seed=seed)
    return predict_scenario(_known(with_model(scenario, options)), samples=samples, seed=seed)


def options_of(values: Mapping[str, Any]) -> tuple[dict[str, Any], tuple[str, ...]]:
    """The arguments of `specsim.scenarios.build` for options by name, and notes on the launch line among them.

    Raises InputError.
    """
    options = {k: v for k, v in values.items() if not _left_out(v) and k not in LAUNCH_LINES}
    lines = [(engine, str(values[name])) for name, engine in LAUNCH_LINES.items() if values.get(name) is not None]
    for name, value in values.items():
        if isinstance(value, str) and not value.strip():  # a shell variable that is not set
            raise InputError("is empty", where=flag_of(name), mend="give a value, or leave it out")
    check_kinds(values)
    if isinstance(options.get("eager"), str):
        options["eager"] = (options["eager"],)
    for name in ("captured_sizes", "prefill_graph_sizes"):
        sizes = options.get(name, ())
        check_numbers(
            name,
            sizes if isinstance(sizes, Iterable) and not isinstance(sizes, (str, bytes)) else [repr(sizes)],
            whole=True,
        )
    if len(lines) > 1:
        raise InputError("two launch lines", where="--sglang-args and --vllm-args", mend="give one of them")
    notes: tuple[str, ...] = ()
    for engine, line in lines:
        if options.get("engine", engine) != engine:
            what = f"{options['engine']}, and the launch line is of {engine}"
            raise InputError(what, where="--engine", mend=f"leave it out, or give --{options['engine']}-args")
        from specsim.launch import read_launch  # a start-up without a launch line does not pay for it
        from specsim.redaction import without_secrets

        launch = read_launch(engine, line)
        launch.refuse_slips(f"--{engine}-args")
        asked = {**options, f"{engine}_args": without_secrets(line)}
        notes = (*launch.notes, *overruled(launch.options, options))
        said = {"tp": 1, "method": "none", **launch.options}  # the engines' own defaults
        options = {**beside(said, options), "flags": launch.flags, "engine": engine, "asked": asked}
        if "model" not in options:
            notes = (*notes, "the launch line names no model: the default one is priced")
        if options.get("method") == "none" and "method" not in asked and "draft_tokens" in asked:
            notes = (
                *notes,
                "the launch line drafts nothing, nor does the server that is priced: give --method or --draft as well",
            )
        if launch.unknown:
            notes = (*notes, f"flags not known, left out: {', '.join(launch.unknown)}")
    return options, notes


def beside(said: Mapping[str, Any], given: Mapping[str, Any]) -> dict[str, Any]:
    """What a launch line says with the options beside it, which win, and take with them what it says of the same."""
    gone = {name for by in given for name in _displaced(by, given, said)}
    return {**{name: value for name, value in said.items() if name not in gone}, **given}


def _displaced(by: str, options: Mapping[str, Any], said: Mapping[str, Any]) -> tuple[str, ...]:
    """What else a launch line says that goes with what an option beside it replaces: a drafter its method, a method without a
    draft model the draft, no method and another than n-gram their lengths, and one length of a chain the other."""
    if by in ("method", "draft"):
        method = options.get("method")
        alone = ("method",) if by == "draft" else ("draft",) if method in DRAFTLESS else ()
        of_another = method == "none" or (said.get("method") == "ngram" and method != "ngram")
        return (*alone, *(LENGTHS if of_another else ()))
    chain = bool(np.all(np.equal(options.get("topk", said.get("topk", 1)), 1)))
    other = {"draft_tokens": "num_steps", "num_steps": "draft_tokens"}.get(by)
    return (other,) if other and chain else ()


def overruled(said: Mapping[str, Any], given: Mapping[str, Any]) -> tuple[str, ...]:
    """Notes on what a launch line says and options beside it say otherwise: they win, so that a server can be asked about as it
    might be. said, given: by option; several values of one are several questions."""
    if given.get("dp_attention") is True:  # a group a rank
        given = {**given, "dp_attention": given.get("tp", said.get("tp", 1))}
    values = {name: said[name] for name in given if name in said}
    if "draft" in given and said.get("method") in DRAFTLESS:  # a drafter decides the method
        values["draft"] = said["method"]
    return tuple(
        f"{flag_of(name)} wins over the launch line's {value}{', root included' if name == 'draft_tokens' else ''}"
        for name, value in values.items()
        if value is not False
        and not (name in ("method", "draft") and value == "none")
        and not _same(given[name], value)
    )


def _same(given: Any, said: Any) -> bool:
    """Whether an option and a launch line say one thing; models go by their names."""
    if isinstance(said, (str, Mapping)):
        return bool(_named(given) == _named(said))
    return set(np.ravel(given).tolist()) == set(np.ravel(said).tolist())


def _named(value: Any) -> Any:
    if not isinstance(value, (*A_FILE, Model)):
        return value
    name = value.name if isinstance(value, Model) else os.fspath(value)
    with suppress(InputError):
        name = load_preset(name).name
    return Path(name).name.casefold()


def check_kinds(values: Mapping[str, Any]) -> None:
    """Raise InputError for a value of an option that is not of its kind: "no" for a switch, which would count as true."""
    for name, value in values.items():
        kinds = KINDS.get(name)
        if value is not None and kinds and not isinstance(value, kinds):
            known = " or ".join("True or False" if k is bool else k.__name__ for k in kinds if k is not np.bool_)
            raise InputError(f"{value!r} is no value of it", where=flag_of(name), mend=f"give {known}")
        if value is not None and name in COUNTS:
            check_numbers(name, [value], whole=True)
            if value < 1 and name != "chunked_prefill_size":  # -1: off
                raise InputError(f"{value} is out of range", where=flag_of(name), mend="give 1 or more")


def check_numbers(name: str, values: Iterable[Any], whole: bool = False) -> None:
    """Raise InputError, in the words of the command line, for a value of an option that is no (whole) number."""
    what = "whole number" if whole else "number"
    if not isinstance(values, Iterable):
        raise InputError(f"{values!r} is no list of {what}s", where=flag_of(name), mend="give a list")
    for value in values:
        if not isinstance(value, Real) or isinstance(value, bool) or (whole and value % 1):
            raise InputError(f"{value!r} is no {what}", where=flag_of(name), mend=f"give a {what}")


def check_fields(options: Any) -> None:
    """`check_numbers` of a dataclass of options, by the types of its fields; a seed is not negative. What may be said in another type
    (2.0 requests, a path as text) gets its own."""
    for field in fields(options):
        value, kind = getattr(options, field.name), str(field.type).partition(" ")[0]
        if value is None:
            continue
        if kind in ("int", "float"):
            check_numbers(field.name, [value], whole=kind == "int")
        if kind in ("int", "Path"):
            given = int(value) if kind == "int" else path_of(value, flag_of(field.name))
            object.__setattr__(options, field.name, given)
        if field.name == "seed" and value < 0:
            raise InputError(f"{value} is out of range", where="--seed", mend="give 0 or more")


def sharing_a_name(kind: str, values: Iterable[Any]) -> list[str]:
    """The files among the values of --model, --draft or --hardware whose names do not tell them from the others: two folders
    `ckpt`, two states of one box. They go by their paths."""
    given = [os.fspath(value) for value in values if isinstance(value, (str, os.PathLike))]
    names = {}
    for value in given if len(given) > 1 else ():
        with suppress(InputError):  # told when it is built
            names[value] = FILES[kind](value).name
    shared = [value for value, name in names.items() if list(names.values()).count(name) > 1]
    return [value for value in shared if Path(value).exists()]


def _left_out(value: Any) -> bool:
    return value is None or (isinstance(value, tuple) and not value)
