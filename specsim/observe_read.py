"""Sources of observations: files (gz too), addresses and standard input, as lines or blocks of clean text.

What engines leave behind is often damaged: coloured for a terminal, cut off, half UTF-16, gigantic. A `Source` reads
all of it with bounded memory, keeps the good part and notes in `caveats` what it had to mend and where. Nothing secret
is stored: readers pass what they keep through `specsim.redaction.scrub`.
"""

from __future__ import annotations

import codecs
import http.client
import io
import json
import os
import re
import ssl
import sys
import time
import zlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from datetime import datetime, timezone
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, Protocol
from urllib import error as url_error
from urllib import parse as url_parse
from urllib import request as url_request

from specsim.errors import InputError, WorkError
from specsim.files import why
from specsim.progress import report
from specsim.redaction import KEY_VARIABLES, is_secret, plain, safe_address, scrub

if TYPE_CHECKING:
    from specsim.records import Record

BLOCK = 1 << 20
MAX_LINE = 64 << 20  # characters; a benchmark's JSON line with every token's latency reaches tens of MB
MAX_DOCUMENT = 256 << 20
MAX_DOWNLOAD = 64 << 20
MAX_CAVEATS = 50
TIMEOUT_S = 10.0
DEADLINE_S = 60.0

_ANSI = re.compile(r"\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\)|[@-Z\\-_])")
# What Docker, Kubernetes, journald and CI services write before each line.
_RUNTIME = re.compile(
    r"(?:[\w.-]+ +\| |\[pod/\S+\] |\d{4}-\d\d-\d\dT[\d:.]+(?:Z|[+-]\d\d:\d\d) (?:std(?:out|err) [FP] )?"
    r"|[A-Z][a-z]{2} [ \d]\d [\d:]{8} \S+ [\w.@-]+(?:\[\d+\])?: ){1,2}"
)
_SURROGATE = re.compile("[\udc80-\udcff]")
_OTHER_MAGIC = {
    b"PK\x03\x04": "a zip archive; unpack it first",
    b"\x28\xb5\x2f\xfd": "zstd-compressed; unpack it with `zstd -d` first",
    b"BZh": "bzip2-compressed; unpack it with `bzip2 -d` first",
    b"\xfd7zXZ": "xz-compressed; unpack it with `xz -d` first",
    b"SQLite format 3": "an SQLite database (Nsight Systems?); take a torch profile instead",
}


@dataclass
class Source:
    """One input. `name` is what the user gave, without secrets; `date` ISO 8601 (file time, or now for an address)."""

    name: str
    date: str
    open_raw: Callable[[], IO[bytes]]
    caveats: list[str] = field(default_factory=list)
    _kinds: set[str] = field(default_factory=set)

    def blocks(self) -> Iterator[bytes]:
        """The bytes, unpacked, in blocks of at most 1 MiB. A damaged end is noted, not raised."""
        done = 0
        with self.open_raw() as raw:
            size = _size(raw)
            packed = raw.read(2) == b"\x1f\x8b"
            raw.seek(0)
            try:
                for block in _unpack(raw) if packed else iter(lambda: raw.read(BLOCK), b""):
                    done += len(block)
                    if size:
                        report(raw.tell(), size, self.name)
                    yield block
            except (EOFError, zlib.error) as problem:
                self.note(f"the gzip stream breaks after {done} unpacked bytes ({problem}); the part before is used")
            except OSError as problem:
                raise InputError(f"cannot be read: {why(problem)}", where=self.name, mend="check the file") from None

    def head(self, size: int = 65536) -> bytes:
        """The first `size` unpacked bytes."""
        out = b""
        for block in self.blocks():
            out += block
            if len(out) >= size:
                break
        return out[:size]

    def note(self, message: str) -> None:
        """Keep a caveat with this source's name before it: the first of each kind, for others differ only in the place."""
        kind = re.sub(r"\d+", "#", message)
        if kind not in self._kinds and len(self._kinds) < MAX_CAVEATS:
            self._kinds.add(kind)
            self.caveats.append(f"{self.name}: {message}")

    def texts(self) -> Iterator[str]:
        """Decoded blocks. UTF-8 bytes that are wrong come as surrogates; see `clean`."""
        decoder: codecs.IncrementalDecoder | None = None
        for block in self.blocks():
            if decoder is None:
                encoding = _encoding(block[:4096])
                if encoding != "utf-8-sig":
                    self.note(f"is {encoding} text; it was converted")
                errors = "surrogateescape" if encoding == "utf-8-sig" else "replace"
                decoder = codecs.getincrementaldecoder(encoding)(errors)
            yield decoder.decode(block)
        if decoder is not None:
            yield decoder.decode(b"", final=True)

    def clean(self, line: str, number: int) -> str:
        """The line without colours, NULs and broken characters."""
        if "\x1b" in line:
            line = _ANSI.sub("", line)
        if "\0" in line:
            line = line.replace("\0", "")
        if _SURROGATE.search(line):
            self.note(f"line {number} is not UTF-8; it was read as latin-1 (so were others like it)")
            line = line.encode("utf-8", "surrogateescape").decode("latin-1")
        return line

    def lines(self) -> Iterator[tuple[int, str]]:
        """(line number from 1, text). Progress bars that return the carriage give several texts of one number."""
        pending, number, dropping = "", 1, False
        for text in self.texts():
            pieces = (pending + text).split("\n")
            pending = pieces.pop()
            for piece in pieces:
                if not dropping:
                    yield from self._parts(piece, number)
                dropping = False
                number += 1
            if len(pending) > MAX_LINE:
                self.note(f"line {number} is longer than {MAX_LINE >> 20} MiB; it was skipped")
                pending, dropping = "", True
            elif dropping:
                pending = ""
        if pending and not dropping:
            yield from self._parts(pending, number)

    def _parts(self, piece: str, number: int) -> Iterator[tuple[int, str]]:
        for part in piece.split("\r"):
            line = self.clean(part, number)
            before = _RUNTIME.match(line)
            line = line[before.end() :] if before else line
            if line.strip():
                yield number, line

    def text(self) -> str:
        """All of it as one clean text. Raises InputError above 256 MiB."""
        parts, size = [], 0
        for part in self.texts():
            size += len(part)
            if size > MAX_DOCUMENT:
                raise InputError(
                    f"one document of more than {MAX_DOCUMENT >> 20} MiB",
                    where=self.name,
                    mend="only traces may be larger",
                )
            parts.append(part)
        return self.clean("".join(parts), 1)


def _size(raw: IO[bytes]) -> int:
    """Bytes of a file; 0 for what is no file."""
    try:
        return os.fstat(raw.fileno()).st_size
    except (OSError, AttributeError):
        return 0


def _unpack(raw: IO[bytes]) -> Iterator[bytes]:
    """Unpacked blocks of a gzip stream of one or more members, as far as it is whole. Raises EOFError or zlib.error."""
    engine = zlib.decompressobj(31)
    while packed := raw.read(BLOCK >> 4):
        while packed:
            if engine.eof:
                packed = packed.lstrip(b"\0")
                if not packed:
                    break
                engine = zlib.decompressobj(31)
            if block := engine.decompress(packed, BLOCK):
                yield block
            packed = engine.unused_data if engine.eof else engine.unconsumed_tail
    if block := engine.flush():
        yield block
    if not engine.eof:
        raise EOFError("cut off")


def _encoding(head: bytes) -> str:
    if head.startswith((codecs.BOM_UTF32_LE, codecs.BOM_UTF32_BE)) and len(head) >= 8:
        return "utf-32"
    if head.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        return "utf-16"
    even, odd = head[0::2].count(0), head[1::2].count(0)
    if len(head) >= 8 and max(even, odd) > len(head) // 5 and min(even, odd) * 8 < max(even, odd):
        return "utf-16-le" if odd > even else "utf-16-be"
    return "utf-8-sig"


class Collector(Protocol):
    """Takes the lines it knows; then gives its records."""

    def feed(self, number: int, line: str) -> bool:
        """Take one line; True when it was one of this format."""

    def records(self) -> list[Record]:
        """What the lines said; empty when there was none."""


def open_sources(where: str) -> list[Source]:
    """The sources behind a path, `-` for standard input, or an http(s) address.

    A bare server address gives what the server publishes: `/get_server_info` (or `/server_info`) and `/metrics`.
    Raises InputError for what cannot be opened and WorkError when a server does not answer.
    """
    scheme = re.match(r"([A-Za-z][A-Za-z0-9+.-]*)://", where)
    if scheme and scheme.group(1).lower() not in ("http", "https"):
        raise InputError(
            f"{scheme.group(1)}:// is not read",
            where=repr(safe_address(where)),
            mend="give a file or an http(s) address",
        )
    if scheme:
        return _from_server(where)
    if where == "-":
        data = sys.stdin.buffer.read(MAX_DOCUMENT)
        return [Source("standard input", _now(), lambda: io.BytesIO(data))]
    return [_from_file(Path(where))]


def _from_file(path: Path) -> Source:
    try:
        if path.is_dir():
            raise InputError("is a folder", where=str(path), mend="give the files in it")
        if not path.exists():
            address = re.fullmatch(r"[\w.-]+:\d+(/.*)?", str(path))  # a server, without what says so
            mend = f"give http://{path} for a server" if address else "check the path"
            raise InputError("no such file", where=str(path), mend=mend)
        once = not path.is_file()  # a pipe, such as a shell's <(...), or a device
        with path.open("rb") as file:
            data = file.read(MAX_DOCUMENT if once else 16)
        if len(data) == MAX_DOCUMENT:
            raise InputError(f"is longer than {MAX_DOCUMENT >> 20} MiB", where=str(path), mend="give a file of its own")
        head = data[:16]
        changed = datetime.fromtimestamp(path.stat().st_mtime, timezone.utc)
    except (OSError, ValueError, OverflowError) as problem:  # ValueError: a null byte in the path
        raise InputError(f"cannot be read: {why(problem)}", where=repr(str(path)), mend="check the path") from None
    if not head:
        raise InputError("is empty", where=str(path), mend="check that the run wrote its output")
    for magic, what in _OTHER_MAGIC.items():
        if head.startswith(magic):
            raise InputError(f"is {what}", where=str(path))
    name, date = plain(str(path)), changed.isoformat(timespec="seconds")
    return Source(name, date, (lambda: io.BytesIO(data)) if once else lambda: path.open("rb"))


def _now() -> str:
    return datetime.now(timezone.utc).isoformat(timespec="seconds")


def _from_server(address: str) -> list[Source]:
    try:
        parts = url_parse.urlsplit(address)
    except ValueError as problem:
        raise InputError(f"is no address: {problem}", where=repr(safe_address(address))) from None
    if parts.path not in ("", "/"):
        return [_fetch(address)]
    base = address.rstrip("/")
    found, problems = [], []
    for paths in (("/get_server_info", "/server_info"), ("/metrics",)):
        for path in paths:
            try:
                found.append(_fetch(base + path))
                break
            except WorkError as problem:
                problems.append(str(problem))
    if not found:
        raise WorkError(problems[-1])
    return found


class _Redirects(url_request.HTTPRedirectHandler):
    """Follows redirects to http(s) only."""

    def redirect_request(self, req: Any, fp: Any, code: int, msg: str, headers: Any, newurl: str) -> Any:
        if url_parse.urlsplit(newurl).scheme not in ("http", "https"):
            raise url_error.URLError("redirects to something else than http(s)")
        return super().redirect_request(req, fp, code, msg, headers, newurl)


def _fetch(address: str) -> Source:
    """GET one address: 10 s without a byte, 60 s in all, 64 MiB at most. The API key, from SPECSIM_API_KEY, is sent to
    this host only (never after a redirect) and stored nowhere."""
    name = safe_address(address)
    opener = url_request.OpenerDirector()
    for handler in (
        url_request.ProxyHandler(),
        url_request.HTTPHandler(),
        url_request.HTTPSHandler(),
        url_request.HTTPDefaultErrorHandler(),
        url_request.HTTPErrorProcessor(),
        _Redirects(),
    ):
        opener.add_handler(handler)
    began = time.monotonic()
    try:
        request = url_request.Request(address, headers={"User-Agent": "specsim", "Accept-Encoding": "identity"})
        if key := os.environ.get(KEY_VARIABLES[0]):
            request.add_unredirected_header("Authorization", f"Bearer {key}")
        body, cut = bytearray(), False
        with opener.open(request, timeout=TIMEOUT_S) as answer:
            while not cut:
                try:
                    block = answer.read1(BLOCK)
                except http.client.IncompleteRead as problem:  # a chunk breaks off
                    block, cut = problem.partial, True
                if not block:
                    break
                body += block
                if len(body) > MAX_DOWNLOAD:
                    raise WorkError(f"{name}: the answer is larger than {MAX_DOWNLOAD >> 20} MiB")
                if time.monotonic() - began > DEADLINE_S:
                    raise WorkError(f"{name}: the answer took more than {DEADLINE_S:.0f} s")
            cut = cut or bool(answer.length)  # it announced more
    except WorkError:
        raise
    except url_error.HTTPError as problem:
        hint = f"; set {KEY_VARIABLES[0]}" if problem.code in (401, 403) else ""
        raise WorkError(f"{name}: the server answered {problem.code}{hint}") from None
    except (OSError, ValueError, url_error.URLError) as problem:
        reason = getattr(problem, "reason", problem)
        own = isinstance(reason, ssl.SSLCertVerificationError)
        mend = "; if the certificate is its own, set SSL_CERT_FILE to it" if own else ""
        raise WorkError(f"{name}: no answer ({' '.join(str(reason).split())}){mend}") from None
    except Exception as problem:  # http.client's own errors: bad status lines, incomplete reads, bad ports
        raise WorkError(f"{name}: no proper answer ({type(problem).__name__})") from None
    data = bytes(body)
    if not data:
        raise WorkError(f"{name}: the answer is empty")
    if data.lstrip()[:1] == b"<":
        what = "answered with a web page; is a proxy in front, or is this another kind of server?"
        raise WorkError(f"{name}: {what}")
    source = Source(name, _now(), lambda: io.BytesIO(data))
    if cut:
        source.note(f"the answer breaks off after {len(data)} bytes; the part before is used")
    return source


# Flags that can change a step's time or the acceptance; nothing else of a server's configuration is stored.
_FLAGS = re.compile(
    r"^(model(_path)?|draft_model|revision|load_format|dtype|quantization|kv_cache_dtype|device|context_length|max_model_len"
    r"|(tp|dp|ep|pp|moe_dp|attn_cp)_size|nnodes|tensor_parallel_size|pipeline_parallel_size|data_parallel_size"
    r"|enable_expert_parallel|expert_parallel_size|speculative_.*|.*cuda_?graph.*|.*cudagraph.*|enforce_eager|compilation_config"
    r"|.*attention_backend|sampling_backend|moe_.*|.*_moe_.*|.*all_?reduce.*|enable_dp_.*|enable_torch_compile"
    r"|torch_compile_max_bs|max_running_requests|max_num_seqs|max_num_batched_tokens|max_total_tokens|chunked_prefill_size"
    r"|enable_chunked_prefill|mem_fraction_static|gpu_memory_utilization|page_size|block_size|schedule_.*|async_scheduling"
    r"|disable_overlap_schedule|enable_two_batch_overlap|decode_log_interval|num_continuous_decode_steps|enable_nccl_nvls"
    r"|disable_radix_cache|enable_prefix_caching|enable_mixed_chunk|disaggregation_mode|enable_symm_mem|json_model_override_args)$"
)


def to_flags(settings: Mapping[str, Any]) -> list[str]:
    """A server's settings as launch flags: only those that matter for speed or acceptance, none that is secret."""
    flags: list[str] = []
    for key, value in settings.items():
        if not _FLAGS.match(str(key)) or is_secret(str(key)) or value is None or value is False or value == "":
            continue
        flags.append("--" + str(key).replace("_", "-"))
        if value is not True:
            clean = scrub(value)
            flags.append(json.dumps(clean, default=str) if isinstance(clean, (dict, list)) else str(clean))
    return flags


def flag_value(flags: list[str], *names: str) -> str | None:
    """The value that follows one of the flags (`--a-b`), "" for a switch, None when none is there."""
    for i, flag in enumerate(flags):
        if flag in names:
            after = flags[i + 1] if i + 1 < len(flags) else ""
            return "" if after.startswith("--") else after
    return None
