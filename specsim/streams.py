"""Many streamed requests at once, each sent by the clock: when its chunks came, and how late the client itself was.

One thread and one selector. A chunk's time is the moment when the poll that found it returned, so that parsing the
streams before it does not count. What a chunk may have waited before that poll is bounded by the time since the poll
before, and is kept as the client's lag. Standard library only.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import selectors
import ssl
import time
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from specsim.live import Client, PointError, Served, ServerError, message_of, no_answer
from specsim.quantities import counted
from specsim.redaction import hide, own_secrets

_TOKENS = re.compile(rb'"completion_tokens":\s*(\d{1,12})\b')


@dataclass
class Stream:
    """One request as the client saw it. Times in seconds since the first one was due; None until they happen."""

    due: float
    sent: float | None = None
    chunk_s: array[float] = field(default_factory=lambda: array("d"))  # when each chunk came
    chunk_tokens: array[int] = field(default_factory=lambda: array("q"))  # tokens received by then
    last: dict[str, Any] = field(default_factory=dict)  # the last event
    error: str = ""

    @property
    def meta(self) -> dict[str, Any]:
        """What SGLang says of the request in its last event, {} where it says nothing."""
        meta = self.last.get("meta_info")
        return meta if isinstance(meta, dict) else {}

    @property
    def tokens(self) -> int:
        return self.chunk_tokens[-1] if self.chunk_tokens else 0


@dataclass
class Sent:
    """All streams of a run, and how late the client was: `lag_s` of each chunk at most, `late_s` of each sending."""

    streams: list[Stream]
    lag_s: array[float]


class _Poll(selectors.DefaultSelector):
    """The platform's selector, which knows when it last woke and how long what it found may have waited."""

    def __init__(self) -> None:
        super().__init__()
        self.woke = time.perf_counter()
        self.waited = 0.0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        found = super().select(0)
        woke = time.perf_counter()
        self.waited = woke - self.woke
        if not found and (timeout is None or timeout > 0):
            found = super().select(timeout)  # nothing was there yet, so what this finds has not waited
            woke, self.waited = time.perf_counter(), 0.0
        self.woke = woke
        return found


class _Receiver(asyncio.Protocol):
    """Reads one HTTP answer that is a stream of server-sent events."""

    def __init__(self, stream: Stream, request: bytes, run: _Run) -> None:
        self.stream, self.request, self.run = stream, request, run
        self.closed = asyncio.get_running_loop().create_future()
        self.raw, self.text = bytearray(), bytearray()
        self.status, self.chunked, self.done = 0, False, False
        self.event = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        transport.write(self.request)

    def data_received(self, data: bytes) -> None:
        self.raw += data
        if not self.status and not self._head():
            return
        if self.chunked:
            self._unchunk()
        else:
            self.text += self.raw
            self.raw.clear()
        if self.status == 200:
            self._events()

    def connection_lost(self, error: Exception | None) -> None:
        if not self.closed.done():
            self.closed.set_result(error)

    def _head(self) -> bool:
        end = self.raw.find(b"\r\n\r\n")
        if end < 0:
            return False
        head = bytes(self.raw[:end])
        words = head.split(None, 2)
        self.status = int(words[1]) if len(words) > 1 and words[1].isdigit() else 599
        self.chunked = b"transfer-encoding: chunked" in head.lower()
        del self.raw[: end + 4]
        return True

    def _unchunk(self) -> None:
        at = 0
        while (end := self.raw.find(b"\r\n", at)) >= 0:
            try:
                size = int(self.raw[at:end].split(b";")[0], 16)
            except ValueError:
                size = -1
            if size < 0:
                self.status = 599
                return
            if len(self.raw) < end + size + 4:
                break
            self.text += self.raw[end + 2 : end + 2 + size]
            at = end + size + 4
        del self.raw[:at]

    def _events(self) -> None:
        end = self.text.rfind(b"\n") + 1
        if not end:
            return
        lines = bytes(self.text[:end]).splitlines()
        del self.text[:end]
        for line in lines:
            if line == b"data: [DONE]":
                self.done = True
            elif line.startswith(b"data:"):
                self.event = line
        found = _TOKENS.search(self.event, max(self.event.rfind(b'"completion_tokens"'), 0)) if lines else None
        if found and int(found[1]) > self.stream.tokens:
            self.run.lag_s.append(self.run.poll.waited)
            self.stream.chunk_s.append(self.run.poll.woke - self.run.start)
            self.stream.chunk_tokens.append(int(found[1]))

    def outcome(self, wanted: int) -> str:
        """Why the request failed, without the API key; empty when it did not."""
        return hide(self._outcome(wanted), own_secrets())

    def _outcome(self, wanted: int) -> str:
        try:
            if self.status == 0:
                return f"{self.run.client.url}: the server broke off; it may have died"
            self.run.client.check(self.status, bytes(self.text), self.run.path)
            self.stream.last = json.loads(self.event[len(b"data:") :]) if self.event else {}
        except (PointError, ServerError) as error:
            return str(error)
        except (ValueError, RecursionError):
            return f"{self.run.client.url}{self.run.path}: a broken event"
        if not isinstance(self.stream.last, dict):
            self.stream.last = {}
        if "error" in self.stream.last:
            return f"{self.run.client.url}: {message_of(json.dumps(self.stream.last).encode())}"
        if not self.done:
            return f"{self.run.client.url}: a stream broke off after {counted(self.stream.tokens, 'token')}"
        if self.stream.tokens != wanted:
            reason = json.dumps(self.stream.meta.get("finish_reason"))[:120]
            return f"{self.run.client.url}: {counted(self.stream.tokens, 'token')} instead of {wanted} (finish reason {reason})"
        return ""


class _Run:
    def __init__(self, client: Client, path: str, poll: _Poll) -> None:
        self.client, self.path, self.poll = client, path, poll
        self.lag_s: array[float] = array("d")
        self.start = time.perf_counter()
        self.dead = ""

    async def one(self, stream: Stream, request: bytes, wanted: int) -> None:
        wait = self.start + stream.due - time.perf_counter()
        if wait > 0:
            await asyncio.sleep(wait)
        if self.dead:
            return
        loop = asyncio.get_running_loop()
        stream.sent = time.perf_counter() - self.start
        context = ssl.create_default_context() if self.client.secure else None
        port = self.client.port or (443 if self.client.secure else 80)
        transport = None
        try:
            transport, receiver = await loop.create_connection(
                lambda: _Receiver(stream, request, self), self.client.host, port, ssl=context
            )
            await asyncio.wait_for(receiver.closed, self.client.timeout)
            stream.error = receiver.outcome(wanted)
        except ConnectionRefusedError:
            self.dead = stream.error = (
                f"{self.client.url}: no server answers there (connection refused); is it up, and is that its port?"
            )
        except (TimeoutError, asyncio.TimeoutError):
            stream.error = f"{self.client.url}: no answer within {self.client.timeout:g} s"
        except OSError as error:
            stream.error = no_answer(self.client.url, self.path, error)
        finally:
            if transport is not None:
                transport.abort()

    async def all(self, streams: list[Stream], requests: Sequence[bytes], wanted: int) -> None:
        self.start = time.perf_counter() + 0.05
        await asyncio.gather(*(self.one(s, r, wanted) for s, r in zip(streams, requests, strict=True)))


def send(
    client: Client, served: Served, due_s: Sequence[float], prompts: Sequence[Sequence[int]], new_tokens: int
) -> Sent:
    """Send prompt i of token ids `due_s[i]` seconds after the start, and stream `new_tokens` tokens of each.

    A request that fails says why in its `error`. When nobody listens any more the rest is not sent.
    """
    path = "/v1/completions" if served.engine == "vllm" else "/generate"
    head = client.headers("text/event-stream") | {"Host": client.netloc, "Connection": "close"}
    requests = []
    for ids in prompts:
        content = json.dumps(_body(served, ids, new_tokens)).encode()
        lines = "".join(f"{k}: {v}\r\n" for k, v in {**head, "Content-Length": str(len(content))}.items())
        requests.append(f"POST {client.prefix}{path} HTTP/1.1\r\n{lines}\r\n".encode() + content)
    streams = [Stream(float(due)) for due in due_s]
    _allow_files(len(streams))
    poll = _Poll()
    loop = asyncio.SelectorEventLoop(poll)
    try:
        run = _Run(client, path, poll)
        loop.run_until_complete(run.all(streams, requests, new_tokens))
    finally:
        loop.run_until_complete(_cancel_rest())  # of which there are some after Ctrl-C
        loop.close()
    return Sent(streams, run.lag_s)


def _allow_files(count: int) -> None:
    """Raise the limit of open files for so many connections, as far as the system allows."""
    with contextlib.suppress(ImportError, ValueError, OSError):  # Windows has no such limit
        import resource

        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        wanted = count + 256 if hard == resource.RLIM_INFINITY else min(count + 256, hard)
        if soft != resource.RLIM_INFINITY and soft < wanted:
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


async def _cancel_rest() -> None:
    rest = asyncio.all_tasks() - {asyncio.current_task()}
    for task in rest:
        task.cancel()
    await asyncio.gather(*rest, return_exceptions=True)


def _body(served: Served, ids: Sequence[int], new_tokens: int) -> dict[str, Any]:
    if served.engine == "vllm":
        sampling = {"temperature": 0.0, "max_tokens": new_tokens, "ignore_eos": True}
        usage = {"include_usage": True, "continuous_usage_stats": True}
        return {"model": served.model, "prompt": list(ids), "stream": True, "stream_options": usage, **sampling}
    sampling = {"temperature": 0.0, "max_new_tokens": new_tokens, "ignore_eos": True}
    return {"input_ids": list(ids), "sampling_params": sampling, "stream": True}
