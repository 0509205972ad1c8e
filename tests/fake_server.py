"""A stand-in for SGLang and vLLM: answers as they do, in a time that is exactly a + b x steps, and replays faults.

Run as a program it takes SGLang's --port and ignores its other flags; FAKE_FAULT and FAKE_STEP_MS are read from the
environment. In tests `FakeServer(...)` runs it in a thread.
"""

from __future__ import annotations

import gzip
import json
import math
import os
import queue
import socket
import ssl
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

Answered = tuple[int, Any, str]  # HTTP status, content, its type


@dataclass
class State:
    """What the fake server does. `fault`: none, or one of those that the handler looks for."""

    fault: str = ""
    engine: str = "sglang"
    step_ms: float = 0.2
    start_ms: float = 2.0
    draft_tokens: int = 1
    accept: int = 2  # tokens a cycle when draft_tokens > 1
    share: float = 1.0  # cycles of the mean request of those of the longest
    idle: float = 0.0  # share of the cycles in which nothing is drafted
    capacity: int = 48  # requests that run at once
    tp: int = 2
    engines: int = 1  # data-parallel ones of vLLM
    info: dict[str, Any] = field(default_factory=dict)  # more of what SGLang says of itself
    info_path: str = "/server_info"
    meta: dict[str, Any] = field(default_factory=dict)  # of SGLang's answers, other than it would be; None: left out
    change: Callable[[str, Answered], Answered] | None = None  # what a path answers, and what it would answer
    batches: int = 0  # answered so far
    passes: float = 0.0
    drafts: float = 0.0
    timers: dict[str, float] = field(default_factory=dict)
    lock: threading.Lock = field(default_factory=threading.Lock)
    keys_seen: list[str] = field(default_factory=list)
    hosts_seen: set[str] = field(default_factory=set)
    prefill_ms: float = 4.0  # of one prompt, when streaming
    streamed: int = 0  # streams begun
    prompts_seen: list[tuple[float, int, int]] = field(default_factory=list)  # streams: time, hash, length
    waiting: queue.Queue[Streamed] = field(default_factory=queue.Queue)
    running: list[Streamed] = field(default_factory=list)


@dataclass
class Streamed:
    """A request in the streaming engine; what it emits goes to its handler: (tokens so far, cycles so far)."""

    tokens: int
    out: queue.Queue[tuple[int, int]] = field(default_factory=queue.Queue)
    made: int = 0
    cycles: int = 0


def engine(state: State) -> None:
    """Continuous batching by the clock: prefill whoever waits, else one step of all that run; never ends."""
    now = time.perf_counter()

    def work(ms: float) -> None:
        nonlocal now
        now = max(now, time.perf_counter() - 0.002) + ms / 1e3  # an oversleep is made up for
        if (left := now - time.perf_counter()) > 0:
            time.sleep(left)

    while True:
        if not state.running and state.waiting.empty():
            state.running.append(state.waiting.get())
            work(state.prefill_ms)
            emit(state, state.running[-1], 1)
        new = []
        while not state.waiting.empty() and len(state.running) + len(new) < state.capacity:
            new.append(state.waiting.get())
        if new:
            work(state.prefill_ms * len(new))
            for request in new:
                state.running.append(request)
                emit(state, request, 1)
        else:
            work(state.step_ms)
            shares = {"target_verify": 0.6, "eagle_draft": 0.1} if state.draft_tokens > 1 else {"decode": 0.9}
            for category, share in shares.items():
                state.timers[category] = state.timers.get(category, 0.0) + share * state.step_ms / 1e3
            for request in list(state.running):
                request.cycles += 1
                emit(state, request, state.accept if state.draft_tokens > 1 else 1)


def emit(state: State, request: Streamed, tokens: int) -> None:
    request.made = min(request.made + tokens, request.tokens)
    request.out.put((request.made, request.cycles))
    if request.made == request.tokens:
        state.running.remove(request)


class Handler(BaseHTTPRequestHandler):
    state: State
    protocol_version = "HTTP/1.1"

    def log_message(self, *args: Any) -> None:
        pass

    def send(self, status: int, content: Any, kind: str = "application/json") -> None:
        if self.state.change is not None:
            status, content, kind = self.state.change(self.path, (status, content, kind))
        body = content.encode() if isinstance(content, str) else json.dumps(content).encode()
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        if status in (301, 302):
            self.send_header("Location", "http://login.example/")
        self.end_headers()
        self.wfile.write(body)

    def do_GET(self) -> None:
        state = self.state
        state.keys_seen.append(self.headers.get("Authorization", ""))
        if state.fault == "proxy":
            return self.send(200, "<!DOCTYPE html><html>please log in</html>", "text/html")
        if state.fault == "redirect":
            return self.send(302, "")
        if state.fault == "unauthorised" and self.headers.get("Authorization") != "Bearer sesame":
            return self.send(401, {"error": "Unauthorized"})
        if self.path == "/health":
            return self.send(503 if state.fault == "unhealthy" else 200, "")
        if state.engine == "other":
            return self.send(404, {"detail": "Not Found"})
        if self.path == "/metrics":
            return self.send(200, self.metrics(), "text/plain") if state.fault != "no-metrics" else self.send(404, "")
        if state.engine == "vllm":
            if self.path == "/version":
                return self.send(200, {"version": "0.99.0"})
            if self.path == "/v1/models":
                return self.send(200, {"data": [{"id": "fake-model"}]})
            return self.send(404, {"detail": "Not Found"})
        if self.path == state.info_path and state.fault == "leaves" and max(state.batches, state.streamed):
            self.close_connection = True
            return None
        if self.path == state.info_path and state.fault == "loading":
            return self.send(503, {"error": "the model is loading"})
        if self.path == state.info_path:
            changed = state.fault == "version" and max(state.batches, state.streamed - 28) > 18
            info = {
                "version": "9.9" if changed else "0.5.16",
                "model_path": "/models/fake",
                "tp_size": state.tp,
                "api_key": "sesame",
            }
            info |= {"max_running_requests": state.capacity, "disable_cuda_graph": True, "max_total_num_tokens": 100000}
            if state.draft_tokens > 1:
                info |= {"speculative_algorithm": "EAGLE3", "speculative_num_draft_tokens": state.draft_tokens}
            if state.fault == "tells":  # what it was asked with, in everything it says of itself
                key = self.headers.get("Authorization", "")
                info |= {"version": key, "model_path": f"/models/{key}", "attention_backend": key}
            return self.send(200, info | state.info)
        return self.send(404, {"detail": "Not Found"})

    def metrics(self) -> str:
        state = self.state
        lines = ["# HELP some text"]
        for category, seconds in state.timers.items():
            for rank in (0, 1):
                lines.append(
                    f'sglang:forward_execution_seconds_total{{tp_rank="{rank}",category="{category}"}} {seconds!r}'
                )
        if state.engine == "vllm":
            for number in range(state.engines):  # all in step
                lines += [f'vllm:iteration_tokens_total_count{{engine="{number}"}} {state.passes!r}']
            if state.draft_tokens > 1:
                lines += [f'vllm:spec_decode_num_draft_tokens_total{{engine="0"}} {3 * state.drafts!r}']
            if state.draft_tokens > 1 and state.fault != "no-drafts":
                lines += [f'vllm:spec_decode_num_drafts_total{{engine="0"}} {state.drafts!r}']
            further = state.accept / state.share - state.accept
            accepted = {"0": state.drafts * (state.accept > 1), "1": state.drafts * further}
            for position, value in accepted.items() if state.draft_tokens > 1 else ():
                lines.append(
                    f'vllm:spec_decode_num_accepted_tokens_per_pos_total{{engine="0",position="{position}"}} {value!r}'
                )
        else:
            lines.append(f'sglang:cuda_graph_passes_total{{tp_rank="0",mode="decode_cuda_graph"}} {state.passes!r}')
        retracted = state.batches // 4 if state.fault == "retract" else 0
        lines.append(f'sglang:num_retracted_requests_total{{tp_rank="0"}} {retracted}')
        return "\n".join(lines) + "\n"

    def do_POST(self) -> None:
        state = self.state
        state.hosts_seen.add(self.headers.get("Host", ""))
        body = json.loads(self.rfile.read(int(self.headers.get("Content-Length", 0))) or "{}")
        if self.path == "/start_profile":
            events = [
                {"ph": "X", "cat": "kernel", "name": "gemm", "ts": i, "dur": 2.0} for i in range(body["num_steps"])
            ]
            if state.fault != "no-trace":
                with gzip.open(os.path.join(body["output_dir"], "1-TP-0.trace.json.gz"), "wt") as file:
                    json.dump({"traceEvents": events}, file)
            return self.send(200, "Start profiling.", "text/plain")
        if self.path not in ("/generate", "/v1/completions"):
            return self.send(404, {"detail": "Not Found"})
        if body.get("stream"):
            return self.stream(body)
        with state.lock:
            self.generate(body)
        return None

    def stream(self, body: dict[str, Any]) -> None:
        """Server-sent events, as SGLang and vLLM send them: one a step, with the tokens so far."""
        state = self.state
        vllm = state.engine == "vllm"
        ids = body["prompt"] if vllm else body["input_ids"]
        tokens = body["max_tokens"] if vllm else body["sampling_params"]["max_new_tokens"]
        with state.lock:
            if not state.streamed:
                threading.Thread(target=engine, args=(state,), daemon=True).start()
            state.streamed += 1
            number = state.streamed
            state.prompts_seen.append((time.perf_counter(), hash(tuple(ids)), len(ids)))
        late = number > 46  # after the warm-up and a few more
        if state.fault == "echo":
            return self.send(400, {"error": {"message": f"unknown {self.headers.get('Authorization')}"}})
        if state.fault == "stream-500" and late and number % 3 == 0:
            return self.send(500, {"error": {"message": "Internal\nServer Error"}})
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        request = Streamed(tokens)
        state.waiting.put(request)
        made = 0
        while made < tokens:
            made, cycles = request.out.get()
            if made > tokens // 2 and late:
                if state.fault == "stream-die":
                    print("RuntimeError: CUDA error: device-side assert triggered", flush=True)
                    os._exit(1)
                if state.fault == "stream-drop":
                    self.close_connection = True
                    return self.connection.close()
                if state.fault == "stream-hang":
                    time.sleep(5)
                if state.fault == "stream-abort":
                    meta = {"completion_tokens": made, "finish_reason": {"type": "abort", "message": "no memory"}}
                    self.event({"output_ids": [], "meta_info": meta})
                    return self.event("[DONE]", last=True)
                if state.fault == "stream-error":
                    return self.event({"error": {"message": "out of\nmemory", "code": 400}}, last=True)
            if state.fault == "buffer" and made < tokens:
                continue
            if vllm:
                self.event({"choices": [{"text": ""}], "usage": {"completion_tokens": made}})
                continue
            meta: dict[str, Any] = {"completion_tokens": made, "prompt_tokens": len(ids)}
            if made == tokens:
                at = time.time()
                prefill = state.prefill_ms / 1e3
                meta |= {"queue_time": 0.0, "forward_entry_time": at, "prefill_finished_time": at + prefill}
                if state.draft_tokens > 1:
                    histogram = [0] * (state.accept - 1) + [cycles]
                    meta |= {"spec_verify_ct": cycles, "spec_accept_histogram": histogram}
            self.event({"output_ids": [100] * made, "meta_info": self.told(meta)})
        self.event("[DONE]", last=True)
        return None

    def event(self, content: Any, last: bool = False) -> None:
        text = content if isinstance(content, str) else json.dumps(content)
        data = f"data: {text}\n\n".encode()
        self.wfile.write(f"{len(data):x}\r\n".encode() + data + b"\r\n" + (b"0\r\n\r\n" if last else b""))

    def generate(self, body: dict[str, Any]) -> None:
        state = self.state
        state.batches += 1
        ids = body.get("input_ids") or body.get("prompt")
        batch = len(ids)
        tokens = body["max_tokens"] if state.engine == "vllm" else body["sampling_params"]["max_new_tokens"]
        if state.fault == "die" and state.batches > 18:
            print("RuntimeError: CUDA error: device-side assert triggered", flush=True)
            os._exit(1)
        if state.fault == "drop" and state.batches in range(19, 22):
            self.close_connection = True
            return None
        if state.fault == "echo":
            return self.send(400, {"error": {"message": f"unknown {self.headers.get('Authorization')}"}})
        if state.fault == "500":
            return self.send(500, {"error": {"message": "Internal\nServer Error"}})
        if state.fault == "reject" and batch > 1:
            return self.send(400, {"error": {"message": "batch is too large"}})
        if state.fault == "slow":
            time.sleep(1)
        if state.fault == "short":
            tokens -= 1
        speculative = state.draft_tokens > 1
        each = 1 + (state.accept - 1) * (1 - state.idle)
        cycles = math.ceil((tokens - 1) / each) if speculative else tokens - 1
        rounds = -(-batch // state.capacity) if state.fault != "unsteady" else 2
        start_ms = state.start_ms * (1 + 40 * (state.batches % 3) if state.fault == "noisy" else 1)
        seconds = (start_ms + state.step_ms * cycles * rounds) / 1e3
        time.sleep(seconds)
        state.passes += cycles * rounds + 1  # and the prefill
        state.drafts += cycles * batch * state.share * (1 - state.idle) if speculative else 0
        phases = (
            {"target_verify": 0.6, "eagle_draft": 0.1, "eagle_draft_extend": 0.05} if speculative else {"decode": 0.9}
        )
        for category, share in phases.items():
            state.timers[category] = state.timers.get(category, 0.0) + share * state.step_ms * cycles / 1e3
        state.timers["extend"] = state.timers.get("extend", 0.0) + 1e-3
        if state.engine == "vllm":
            return self.send(200, {"choices": [], "usage": {"completion_tokens": tokens * batch}})
        meta: dict[str, Any] = {
            "completion_tokens": tokens,
            "e2e_latency": seconds,
            "finish_reason": {"type": "length"},
        }
        if state.fault == "nan":
            meta |= {"e2e_latency": float("nan"), "spec_accept_histogram": [1, None, "x"]}
        if state.fault == "cut":
            self.send_response(200)
            self.send_header("Content-Length", "5000")
            self.end_headers()
            self.wfile.write(b'[{"meta_info": ')
            self.close_connection = True
            return None
        if state.fault == "bare":
            return self.send(200, [{"text": "", "echo": self.headers.get("Authorization")}] * batch)
        if speculative and state.fault != "stripped":
            meta |= {"spec_verify_ct": cycles, "spec_correct_drafts_histogram": [0] * (state.accept - 1) + [cycles]}
        return self.send(200, [{"output_ids": [100] * tokens, "meta_info": self.told(meta)} for _ in range(batch)])

    def told(self, meta: dict[str, Any]) -> dict[str, Any]:
        """An answer's meta_info as the state has it."""
        return {k: v for k, v in (meta | self.state.meta).items() if v is not None}


class QuietServer(ThreadingHTTPServer):
    request_queue_size = 256

    def handle_error(self, request: Any, client_address: Any) -> None:
        pass  # a client that gave up waiting


class FakeServer:
    """The fake server in a thread, at `url`; a context manager. tls: a PEM file of certificate and key."""

    def __init__(self, host: str = "127.0.0.1", tls: Path | None = None, **state: Any) -> None:
        self.state = State(**state)
        handler = type("BoundHandler", (Handler,), {"state": self.state})
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self.httpd = type("BoundServer", (QuietServer,), {"address_family": family})((host, 0), handler)
        self.httpd.daemon_threads = True
        if tls is not None:
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            context.load_cert_chain(tls)
            self.httpd.socket = context.wrap_socket(self.httpd.socket, server_side=True)
        name = f"[{host}]" if ":" in host else host
        self.url = f"{'https' if tls else 'http'}://{name}:{self.httpd.server_address[1]}"

    def __enter__(self) -> FakeServer:
        threading.Thread(target=self.httpd.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()
        return self

    def __exit__(self, *error: object) -> None:
        self.httpd.shutdown()
        self.httpd.server_close()


def main() -> None:
    """As `python -m sglang.launch_server` would be started."""
    fault = os.environ.get("FAKE_FAULT", "")
    if fault == "start":
        print("ValueError: no such attention backend", flush=True)
        sys.exit(3)
    if os.environ.get("FAKE_CHILD_FILE"):  # a child of its own that outlives it, as a scheduler process might
        import subprocess

        child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(300)"])
        with open(os.environ["FAKE_CHILD_FILE"], "w") as file:
            file.write(str(child.pid))
    flags = sys.argv[1:]
    if "--api-key" in flags:
        print(f"server_args=ServerArgs(api_key={flags[flags.index('--api-key') + 1]!r})", flush=True)
    port = int(flags[flags.index("--port") + 1])
    tokens = (
        int(flags[flags.index("--speculative-num-draft-tokens") + 1])
        if "--speculative-num-draft-tokens" in flags
        else 1
    )
    state = State(fault=fault, step_ms=float(os.environ.get("FAKE_STEP_MS", "0.2")), draft_tokens=tokens, tp=1)
    state.prefill_ms = float(os.environ.get("FAKE_PREFILL_MS", "4"))
    handler = type("BoundHandler", (Handler,), {"state": state})
    QuietServer(("127.0.0.1", port), handler).serve_forever(poll_interval=0.02)


if __name__ == "__main__":
    main()
