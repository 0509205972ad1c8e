"""Talking to a live inference server over HTTP: what it runs, batches of token-id requests, and its own counters.

A batch is one POST that carries all its prompts, so that its requests start together. Times are seconds. Standard
library only: measuring needs one connection at a time, and an install on a GPU box should pull in little.
"""

from __future__ import annotations

import http.client
import itertools
import json
import os
import random
import re
import socket
import ssl
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal
from urllib.parse import urlsplit

from specsim.errors import InputError, WorkError
from specsim.prometheus import LABEL, LABELS
from specsim.redaction import KEY_VARIABLES, api_key, hide, own_secrets, scrub, without_key

MAX_ANSWER = 256 * 2**20  # bytes
SKEW = 1.01  # of the time that the client waited, beyond which the server's own says that their clocks differ
FIRST_ID, LAST_ID = 10, 8000  # prompts' token ids: inside every vocabulary, away from special tokens


class _Told(WorkError):
    """What a server said, or did: without the API key, which it may send back. `status`: that of the HTTP answer, where it was
    no success."""

    def __init__(self, text: str, status: int = 0) -> None:
        super().__init__(hide(text, own_secrets()))
        self.status = status


class ServerError(_Told):
    """The server is gone, changed, or is not an inference server: nothing more can be measured."""


class BrokenError(ServerError):
    """A connection broke off: the server is gone, or something between dropped this one."""


class ChangedError(ServerError):
    """Another server answers than the one that the measurement began with: what was just measured counts for neither."""


class PointError(_Told):
    """One operating point could not be measured; others may."""


class Client:
    """HTTP to one server. The API key comes from the environment and goes into the request's header, nowhere else."""

    def __init__(self, url: str, timeout: float = 600.0) -> None:
        """Raises InputError for what is no address of a server, before anything of it is shown that may be a secret."""

        def refuse(what: str, mend: str = "write http://host:port") -> InputError:
            return InputError(what, where="--url", mend=mend)

        try:
            parts = urlsplit(url if "://" in url else f"http://{url}")
            if parts.username or parts.password:
                raise refuse("holds a user name or password", f"set {KEY_VARIABLES[0]} in the environment")
            if parts.query or parts.fragment:
                raise refuse("holds more than an address", "leave out what begins at ? or #")
            if parts.scheme not in ("http", "https") or not parts.hostname:
                raise refuse(f"{url!r} is not an HTTP address")
            self.secure, self.host = parts.scheme == "https", parts.hostname
            self.host.encode("idna")
        except ValueError:  # brackets that do not match, labels of a name that are empty or too long
            raise refuse(f"{url!r} is not an HTTP address") from None
        try:
            self.port = parts.port
        except ValueError:
            raise refuse(f"{url!r} has no valid port") from None
        if not (parts.path.isascii() and (parts.path + self.host).isprintable()) or " " in parts.path + self.host:
            raise refuse(f"{url!r} holds what no address can", "write such characters as %20")
        path = parts.path.rstrip("/")
        self.prefix = path[: -len("/v1")] if path.endswith("/v1") else path
        self.netloc = parts.netloc  # as the request's header names it
        self.url = hide(f"{parts.scheme}://{parts.netloc}{self.prefix}", own_secrets())  # for people
        self.timeout = timeout

    def ask(self, method: str, path: str, body: Any = None, timeout: float | None = None) -> bytes:
        """The answer's bytes. Raises PointError for an HTTP status from 400 on; ServerError for one that no other request would
        mend (a missing key, a redirect), and when no answer comes: BrokenError where the connection broke, a GET's twice."""
        try:
            return self._ask(method, path, body, timeout)
        except BrokenError:
            if method != "GET":
                raise
        return self._ask(method, path, body, timeout)

    def _ask(self, method: str, path: str, body: Any, timeout: float | None) -> bytes:
        limit = self.timeout if timeout is None else timeout
        headers = self.headers("application/json, text/plain")
        connect = http.client.HTTPSConnection if self.secure else http.client.HTTPConnection
        connection = connect(self.host, self.port, timeout=limit)
        try:
            connection.request(method, self.prefix + path, None if body is None else json.dumps(body), headers)
            answer = connection.getresponse()
            content = answer.read(MAX_ANSWER)
            if answer.length:  # it announced more
                raise http.client.IncompleteRead(content, answer.length)
        except TimeoutError:
            mend = "; is it stuck, or does it need a longer --request-timeout?" if limit == self.timeout else ""
            raise ServerError(f"{self.url}{path}: no answer within {limit:g} s{mend}") from None
        except ConnectionRefusedError:
            raise ServerError(
                f"{self.url}: no server answers there (connection refused); is it up, and is that its port?"
            ) from None
        except (ssl.SSLError, socket.gaierror) as error:
            raise ServerError(no_answer(self.url, path, error)) from None
        except (http.client.HTTPException, OSError, ValueError) as error:
            raise BrokenError(no_answer(self.url, path, error)) from None
        finally:
            connection.close()
        self.check(answer.status, content, path)
        return content

    def headers(self, accept: str) -> dict[str, str]:
        """Headers of a request with a JSON body; with the API key, if the environment has one."""
        headers = {"Accept": accept, "Content-Type": "application/json"}
        key, name = api_key()
        if not (key.isascii() and key.isprintable()):
            raise InputError("holds what no HTTP header can", where=name, mend="set it to the server's API key")
        return headers | ({"Authorization": f"Bearer {key}"} if key else {})

    def check(self, status: int, content: bytes, path: str) -> None:
        """Raises PointError or ServerError for an HTTP status that is no success."""
        name = api_key()[1]
        if status in (401, 403) and name:
            doubt = f"to the key in {name}; is it the server's, and does a proxy in front pass it on?"
            raise ServerError(f"{self.url}{path}: answered {status} {doubt}", status)
        if status in (401, 403):
            raise ServerError(
                f"{self.url}{path}: answered {status}; set {KEY_VARIABLES[0]} to the server's API key", status
            )
        if 300 <= status < 400:
            what = f"answered {status}, a redirect; give the address behind the proxy"
            raise ServerError(f"{self.url}{path}: {what}", status)
        if status >= 400:
            said = "a web page" if _is_page(content) else message_of(content)
            raise PointError(f"{self.url}{path}: answered {status}: {said}", status)

    def json(self, method: str, path: str, body: Any = None, timeout: float | None = None) -> Any:
        """The answer as JSON. Raises ServerError when it is something else, such as a proxy's page."""
        content = self.ask(method, path, body, timeout)
        try:
            return json.loads(content)
        except (ValueError, RecursionError):
            what = "a web page" if _is_page(content) else "something that is not JSON"
            raise ServerError(
                f"{self.url}{path}: answered with {what}; is a proxy in front, or is this another kind of server?"
            ) from None


def no_answer(url: str, path: str, error: Exception) -> str:
    """Why a connection gave no answer, in one line."""
    if isinstance(error, ssl.SSLError):
        mend = (
            "; if the certificate is its own, set SSL_CERT_FILE to it"
            if isinstance(error, ssl.SSLCertVerificationError)
            else ""
        )
        return f"{url}: its TLS certificate or protocol is refused ({error.reason or 'SSL error'}){mend}"
    if isinstance(error, socket.gaierror):
        return f"{url}: no such host"
    return f"{url}{path}: the server broke off ({type(error).__name__}); it may have died"


def _is_page(content: bytes) -> bool:
    return content.lstrip()[:1] == b"<"


def message_of(content: bytes) -> str:
    """What an error's body says, in at most 200 characters of one line."""
    text = content.decode("utf-8", "replace")
    try:
        found = json.loads(text)
        for key in ("error", "message", "detail"):
            if isinstance(found, dict) and key in found:
                found = found[key]
        text = found if isinstance(found, str) else json.dumps(found)
    except ValueError:
        pass
    return " ".join(text.split())[:200] or "nothing more"


@dataclass(frozen=True)
class Served:
    """What a server says that it runs. `info` is SGLang's server info without secrets; for vLLM, which says nothing, what
    its flags say of drafting, in SGLang's keys."""

    engine: Literal["sglang", "vllm"]
    version: str
    model: str
    info: dict[str, Any] = field(default_factory=dict)

    @property
    def speculative(self) -> bool:
        """Whether it drafts, as far as it says so."""
        return bool(self.info.get("speculative_algorithm"))

    @property
    def max_running(self) -> int | None:
        """Requests that run at once on all data-parallel ranks, where the server says so."""
        states = self.info.get("internal_states")  # a list by rank; in older releases the first rank alone
        first = states[0] if isinstance(states, list) and states else states
        own = first.get("effective_max_running_requests_per_dp") if isinstance(first, dict) else None
        found = [_count(self.info.get("max_running_requests")), _count(own) * self._ranks]
        return min((n for n in found if n), default=None)

    @property
    def kv_tokens(self) -> int | None:
        """Tokens that the KV caches of all data-parallel ranks hold, where the server says so."""
        return _count(self.info.get("max_total_num_tokens")) * self._ranks or None

    @property
    def _ranks(self) -> int:
        return _count(self.info.get("dp_size")) or 1


def _count(value: Any) -> int:
    """The value where it is a number of things, else 0."""
    return value if type(value) is int and value > 0 else 0


def identify(client: Client, timeout: float = 30.0) -> Served:
    """What the server runs. Raises ServerError when it is neither SGLang nor vLLM, or does not say."""
    faults: list[PointError] = []  # answers of a server that may be one of them, and cannot say so now

    def ask(*paths: str) -> dict[str, Any]:
        """The first object that the server answers at one of these, {} where it knows none: names change with releases."""
        for path in paths:
            try:
                found = without_key(client.json("GET", path, timeout=timeout))
            except PointError as error:
                faults.extend([error] if error.status >= 500 or error.status == 429 else [])
                continue
            if isinstance(found, dict) and found:
                return found
        return {}

    info = ask("/server_info", "/get_server_info")
    if "model_path" not in info:
        model = ask("/model_info", "/get_model_info").get("model_path")
        if model is not None and not info and not faults:
            what = (
                "is an SGLang that does not say how it was started (/server_info); is a proxy in front that hides it?"
            )
            raise ServerError(f"{client.url}: {what}")
        info = info if model is None else {**info, "model_path": model}
    if "model_path" in info:
        return Served("sglang", _line(info.get("version") or "unknown"), _line(info["model_path"]), scrub(info))
    version, models = ask("/version").get("version"), ask("/v1/models").get("data")
    model = models[0] if isinstance(models, list) and models and isinstance(models[0], dict) else {}
    if version is not None and "id" in model:
        owner = _line(model.get("owned_by") or "vllm")
        if owner != "vllm":
            raise ServerError(f"{client.url}: is neither SGLang nor vLLM: /v1/models says that it is {owner}")
        return Served("vllm", _line(version), _line(model["id"]))
    if faults:
        raise ServerError(f"{faults[0]}; is the server still loading, or behind a proxy that cannot reach it?")
    raise ServerError(f"{client.url}: is neither SGLang (no /server_info) nor vLLM (no /version with /v1/models)")


def _line(value: Any) -> str:
    """What a server says of itself, in one line."""
    return " ".join(str(value).split())


def check_same(client: Client, served: Served) -> None:
    """Raises ChangedError when another server answers now: another version, model or flags; ServerError when none does."""
    now = identify(client)
    if (now.version, now.model) != (served.version, served.model):
        what = f"{served.model} {served.version} became {now.model} {now.version}"
    elif flags_of(now) != flags_of(served):
        what = "it has other flags now"
    else:
        return
    raise ChangedError(f"the server changed while it was measured: {what}")


# Server arguments that decide speed, as SGLang's server info names them, and their launch flags.
_FLAGS = {
    "model_path": "--model-path",
    "dtype": "--dtype",
    "quantization": "--quantization",
    "kv_cache_dtype": "--kv-cache-dtype",
    "tp_size": "--tp",
    "pp_size": "--pp-size",
    "dp_size": "--dp",
    "ep_size": "--ep",
    "nnodes": "--nnodes",
    "enable_dp_attention": "--enable-dp-attention",
    "attention_backend": "--attention-backend",
    "prefill_attention_backend": "--prefill-attention-backend",
    "decode_attention_backend": "--decode-attention-backend",
    "moe_runner_backend": "--moe-runner-backend",
    "moe_a2a_backend": "--moe-a2a-backend",
    "fp8_gemm_runner_backend": "--fp8-gemm-backend",
    "page_size": "--page-size",
    "max_running_requests": "--max-running-requests",
    "max_total_tokens": "--max-total-tokens",
    "chunked_prefill_size": "--chunked-prefill-size",
    "enable_mixed_chunk": "--enable-mixed-chunk",
    "cuda_graph_max_bs": "--cuda-graph-max-bs",
    "cuda_graph_max_bs_decode": "--cuda-graph-max-bs",
    "disable_cuda_graph": "--disable-cuda-graph",
    "disable_decode_cuda_graph": "--disable-decode-cuda-graph",
    "disable_cuda_graph_padding": "--disable-cuda-graph-padding",
    "enable_torch_compile": "--enable-torch-compile",
    "disable_custom_all_reduce": "--disable-custom-all-reduce",
    "disable_overlap_schedule": "--disable-overlap-schedule",
    "disable_radix_cache": "--disable-radix-cache",
    "enable_flashinfer_allreduce_fusion": "--enable-flashinfer-allreduce-fusion",
    "flashinfer_allreduce_fusion_backend": "--flashinfer-allreduce-fusion-backend",
    "enforce_disable_flashinfer_allreduce_fusion": "--enforce-disable-flashinfer-allreduce-fusion",
    "enable_symm_mem": "--enable-symm-mem",
    "enable_torch_symm_mem": "--enable-torch-symm-mem",
    "speculative_algorithm": "--speculative-algorithm",
    "speculative_draft_model_path": "--speculative-draft-model-path",
    "speculative_num_steps": "--speculative-num-steps",
    "speculative_eagle_topk": "--speculative-eagle-topk",
    "speculative_num_draft_tokens": "--speculative-num-draft-tokens",
    "speculative_attention_mode": "--speculative-attention-mode",
    "speculative_draft_attention_backend": "--speculative-draft-attention-backend",
    "speculative_adaptive": "--speculative-adaptive",
    "speculative_ngram_max_bfs_breadth": "--speculative-ngram-max-bfs-breadth",
}
_FUSION = "flashinfer_allreduce_fusion_backend"  # as resolved: none where it is off


def flags_of(served: Served) -> list[str]:
    """The launch flags that decide speed, rebuilt from what the server says."""
    if served.engine == "vllm":
        return ["--model", served.model]
    flags: list[str] = []
    for key, flag in _FLAGS.items():
        value = served.info.get(key)
        if (
            value is None
            or value is False
            or flag in flags
            or value == "none"
            or (value == 1 and key.endswith(("_size", "nnodes")) and key != "page_size")
            or (key.startswith("speculative_") and not served.speculative)
        ):
            continue
        flags += [flag] if value is True else [flag, str(value)]
    off = _FLAGS["enforce_disable_flashinfer_allreduce_fusion"]
    if _FUSION in served.info and served.info[_FUSION] is None and off not in flags and "--tp" in flags:
        flags.append(off)  # else it would be taken for the default of the architecture
    return flags


def prompts(batch: int, context: int, seed: int = 0) -> list[list[int]]:
    """`batch` different prompts of `context` token ids; prompt i is the same in every batch, for a prefix cache."""
    return [random.Random(f"{seed} {context} {i}").choices(range(FIRST_ID, LAST_ID), k=context) for i in range(batch)]


@dataclass(frozen=True)
class Answer:
    """One batch, answered. `seconds`: the longest request, by the server's clock where it has one."""

    seconds: float
    wall_seconds: float  # by the client's clock
    new_tokens: int
    cycles: float | None  # target passes after the prefill, of the longest request; None: the server does not say
    accept_lengths: list[float]  # tokens a cycle of each request, where the server says so
    histogram: list[int]  # SGLang: how many cycles accepted 0, 1, ... drafted tokens, summed over the batch
    skewed: bool = False  # the server says that it took longer than the client waited


def generate(
    client: Client, served: Served, token_ids: list[list[int]], new_tokens: int, timeout: float | None = None
) -> Answer:
    """Send one batch and wait for all of it. Raises PointError when the server rejects it or stops early."""
    start = time.perf_counter()
    if served.engine == "vllm":
        sampling = {"temperature": 0.0, "max_tokens": new_tokens, "ignore_eos": True}
        body = {"model": served.model, "prompt": token_ids, **sampling}
        answer = client.json("POST", "/v1/completions", body, timeout)
        wall = time.perf_counter() - start
        usage = answer.get("usage") if isinstance(answer, dict) else None
        emitted = usage.get("completion_tokens") if isinstance(usage, dict) else None
        if emitted != new_tokens * len(token_ids):
            wanted = new_tokens * len(token_ids)
            unsaid = f"the answer does not say how many tokens it holds (usage), of {wanted}"
            raise PointError(
                f"{client.url}: {unsaid if emitted is None else f'emitted {emitted} tokens instead of {wanted}'}"
            )
        return Answer(wall, wall, new_tokens, None, [], [])
    sampling = {"temperature": 0.0, "max_new_tokens": new_tokens, "ignore_eos": True}
    answers = client.json("POST", "/generate", {"input_ids": token_ids, "sampling_params": sampling}, timeout)
    wall = time.perf_counter() - start
    answers = answers if isinstance(answers, list) else [answers]
    try:
        metas: list[dict[str, Any]] = [a["meta_info"] for a in answers]
        counts = [int(m["completion_tokens"]) for m in metas]
    except (KeyError, TypeError, ValueError, OverflowError):
        raise PointError(
            f"{client.url}/generate: the answer has no meta_info with completion_tokens, as SGLang's have; is a proxy in front? "
            f"({message_of(json.dumps(answers).encode())})"
        ) from None
    if len(counts) != len(token_ids) or set(counts) != {new_tokens}:
        reason = json.dumps(metas[0].get("finish_reason"))[:120] if metas else "none"
        got = f"{len(counts)} answers of {sorted(set(counts))} tokens"
        asked = f"{len(token_ids)} of {new_tokens}"
        raise PointError(f"{client.url}/generate: {got} instead of {asked} (finish reason {reason})")
    verified = [cycles for m in metas if (cycles := cycles_of(m))]
    if served.speculative and not verified:
        raise PointError(
            f"{client.url}/generate: the answers do not say how many cycles they took (spec_verify_ct); "
            "is this an old SGLang, or a proxy in front that strips them?"
        )
    cycles = max(verified) if verified else float(new_tokens - 1)
    lengths = [round((new_tokens - 1) / v, 4) for v in verified] if len(verified) == len(metas) else []
    histogram = added(histogram_of(m) for m in metas)
    times = [seconds for m in metas if (seconds := _above_0(m.get("e2e_latency")))]
    own = max(times) if len(times) == len(metas) else wall
    skewed = own > SKEW * wall
    return Answer(wall if skewed else own, wall, new_tokens, cycles, lengths, histogram, skewed)


def cycles_of(meta: dict[str, Any]) -> float | None:
    """Target passes of a request after its prefill, from SGLang's meta_info; None where it does not say."""
    return _above_0(meta.get("spec_verify_ct"))


def histogram_of(meta: dict[str, Any]) -> list[int]:
    """How many cycles of a request accepted 0, 1, ... drafted tokens; [] where its meta_info does not say."""
    return _counts(meta.get("spec_correct_drafts_histogram") or meta.get("spec_accept_histogram"))


def added(histograms: Iterable[list[int]]) -> list[int]:
    """The sum of histograms, place by place."""
    return [sum(place) for place in itertools.zip_longest(*histograms, fillvalue=0)]


def _above_0(value: Any) -> float | None:
    """The value where it is a finite number above 0."""
    return float(value) if type(value) in (int, float) and 0 < value < 1e12 else None


def _counts(value: Any) -> list[int]:
    """The value where it is a list of numbers of things; else none."""
    return value if isinstance(value, list) and all(type(n) is int and 0 <= n < 10**12 for n in value) else []


_SAMPLE = re.compile(rf"^([A-Za-z_:][\w:]*){LABELS}\s+([^\s]+)")
_RANK_LABELS = ("tp_rank", "pp_rank", "dp_rank", "moe_ep_rank")


class Counters:
    """A server's counters at one moment, from Prometheus text."""

    def __init__(self, text: str) -> None:
        self._samples: list[tuple[str, dict[str, str], float]] = []
        for line in text.splitlines():
            match = _SAMPLE.match(line)
            if match is None or line.startswith("#"):
                continue
            try:
                value = float(match[3])
            except ValueError:
                continue
            if value == value and abs(value) != float("inf"):
                self._samples.append((match[1], dict(LABEL.findall(match[2] or "")), value))

    def per_rank(self, name: str, **labels: str) -> float | None:
        """The counter's value, summed over label sets and divided by the ranks that report it; None when absent."""
        found = [
            (tuple(have.get(k, "") for k in _RANK_LABELS), value)
            for sample, have, value in self._samples
            if sample in (name, f"{name}_total") and all(have.get(k) == v for k, v in labels.items())
        ]
        return sum(v for _, v in found) / len({rank for rank, _ in found}) if found else None

    def any_of(self, prefix: str) -> bool:
        """Whether there is a counter whose name begins so."""
        return any(sample.startswith(prefix) for sample, _, _ in self._samples)

    def categories(self, name: str, label: str) -> list[str]:
        """Values that `label` takes in the counter."""
        return sorted(
            {have[label] for sample, have, _ in self._samples if sample in (name, f"{name}_total") and label in have}
        )


def counters(client: Client, timeout: float = 20.0) -> Counters | None:
    """The server's counters, or None when it has no /metrics that may be read. Raises ServerError when the server is gone."""
    try:
        content = client.ask("GET", "/metrics", timeout=timeout)
    except (PointError, ServerError) as error:
        if not error.status:
            raise
        return None
    return None if _is_page(content) else Counters(content.decode("utf-8", "replace"))


@dataclass(frozen=True)
class DecodeLine:
    """One "Decode batch" line of SGLang's log. `step_ms`: milliseconds a step or cycle over the line's interval. `rank`: of
    several data-parallel schedulers, whose requests `running` counts, "" where there is one."""

    running: int
    step_ms: float
    graph: bool
    rank: str = ""


_DECODE = re.compile(
    r"Decode batch.*?#running-req: (\d{1,9}),(?:.*?accept len: (\d{1,9}(?:\.\d+)?),)?.*? graph: (True|False),"
    r".*?gen throughput \(token/s\): (\d{1,12}(?:\.\d+)?)(?![\w.])"
)
_RANK = re.compile(r"\bDP\d+")


def decode_lines(lines: Iterator[str] | list[str]) -> list[DecodeLine]:
    """Intervals of steady decoding: those that begin at a decode line of the same batch and hold no prefill."""
    found: list[DecodeLine] = []
    before: dict[str, int] = {}  # by scheduler
    for line in lines:
        if "Prefill batch" in line:
            before.clear()
        match = _DECODE.search(line)
        if match is None or (match[2] is None and "accept len" in line):
            continue
        running, throughput = int(match[1]), float(match[4])
        rank = at[0] if (at := _RANK.search(line, 0, match.start())) else ""
        if running and running == before.get(rank) and throughput > 0:
            step_ms = 1e3 * running * float(match[2] or 1) / throughput
            found.append(DecodeLine(running, step_ms, match[3] == "True", rank))
        before[rank] = running
    return found


class LogTail:
    """What a log file gained since the last look, in whole lines."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._offset = path.stat().st_size if path.exists() else 0

    def lines(self) -> list[str]:
        try:
            with self.path.open("rb") as file:
                if file.seek(0, os.SEEK_END) < self._offset:
                    self._offset = 0  # it began again, as logs do that are rotated
                file.seek(self._offset)
                content = file.read()
        except OSError:
            return []
        whole = content[: content.rfind(b"\n") + 1]
        self._offset += len(whole)
        return whole.decode("utf-8", "replace").splitlines()
