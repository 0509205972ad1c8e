"""Who may ask the planner page, and what every answer says about itself.

A page on 127.0.0.1 is reachable by every web site that its user visits. What keeps them out: the Host must be a name that
no other site can own (DNS rebinding), a request that a browser sends for another site is refused by its Origin or
Sec-Fetch-Site, answers carry no CORS header, and there is no cookie that would speak for the user. Beyond this machine every
request must carry a token, which is the first part of its path: links within the page keep it without any cookie or script.
"""

from __future__ import annotations

import hmac
import ipaddress
import json
import re
import sys
import traceback
from collections.abc import Awaitable, Callable, Collection, Mapping, MutableMapping
from typing import Any

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
Application = Callable[[Scope, Receive, Send], Awaitable[None]]

LOCAL_NAMES = ("localhost", "127.0.0.1", "::1")
TOKEN = re.compile(r"[A-Za-z0-9_-]{16,128}")
CONTENT = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; connect-src 'self'; base-uri 'none'; "
    "form-action 'none'; frame-ancestors 'none'"
)
HEADERS = [
    (b"content-security-policy", CONTENT.encode()),
    (b"x-content-type-options", b"nosniff"),
    (b"x-frame-options", b"DENY"),
    (b"referrer-policy", b"no-referrer"),
    (b"cross-origin-opener-policy", b"same-origin"),
    (b"cross-origin-resource-policy", b"same-origin"),
]


class Guard:
    """An ASGI application before another: refuses what does not belong here, and answers for what goes wrong inside.

    token: what the first part of every path must be; None on this machine alone. names: hosts that the page may be asked
    by; any_address: also by any IP address, which DNS rebinding cannot use.
    """

    def __init__(
        self,
        inner: Application,
        *,
        token: str | None = None,
        names: Collection[str] = LOCAL_NAMES,
        any_address: bool = False,
        debug: bool = False,
    ) -> None:
        self.inner, self.token, self.debug = inner, token, debug
        self.names, self.any_address = frozenset(name.lower() for name in names), any_address

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":  # there are no web sockets here
            await self._serve(scope, receive, send)

    async def _serve(self, scope: Scope, receive: Receive, send: Send) -> None:
        started = False

        async def answer(message: Message) -> None:
            nonlocal started
            if message["type"] == "http.response.start":
                started = True
                message["headers"] = [*message.get("headers", ()), *HEADERS]
            await send(message)

        status, refusal = self._refusal(scope)
        if refusal:
            await _say(answer, status, refusal)
            return
        try:
            await self.inner(self._without_token(scope), receive, answer)
        except Exception as error:
            if self.debug:
                traceback.print_exception(error)
            else:
                sys.stderr.write(f"error: unexpected {type(error).__name__} in the planner page; --debug shows more\n")
            if not started:
                await _say(answer, 500, "something went wrong in specsim: the terminal that runs it says what")

    def _refusal(self, scope: Scope) -> tuple[int, str]:
        """(status, why) of a request that is not served; why is empty for all others."""
        seen: dict[str, list[str]] = {}
        for name, value in scope["headers"]:
            seen.setdefault(name.decode("latin-1").lower(), []).append(value.decode("latin-1"))
        hosts = seen.get("host", [])
        if len(hosts) != 1 or not self._known(hosts[0]):
            return 421, "this page is not served under that host name; see specsim serve --help, --allow-host"
        if any(not _same(origin, hosts[0]) for origin in seen.get("origin", [])):
            return 403, "requests of other sites are refused"
        sites = seen.get("sec-fetch-site", [])
        visiting = scope["method"] == "GET" and seen.get("sec-fetch-mode") == ["navigate"]
        if not visiting and any(site not in ("same-origin", "none") for site in sites):
            return 403, "requests of other sites are refused"
        if self.token is not None and not hmac.compare_digest(_first(scope).encode(), self.token.encode()):
            return 403, "the address lacks the token that specsim serve printed"
        return 200, ""

    def _known(self, host: str) -> bool:
        name = _name(host)
        return name in self.names or (self.any_address and _is_address(name))

    def _without_token(self, scope: Scope) -> Scope:
        if self.token is None:
            return scope
        rest = scope["path"][len(_first(scope)) + 1 :] or "/"
        return {**scope, "path": rest, "raw_path": rest.encode()}


def is_local(address: str) -> bool:
    """Whether an address that a server binds to is reached from this machine alone."""
    return address == "localhost" or (_is_address(address) and ipaddress.ip_address(address).is_loopback)


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True


def _name(host: str) -> str:
    """The name of a Host header, without port and brackets."""
    if host.startswith("["):
        return host[1:].partition("]")[0].lower()
    return host.rpartition(":")[0].lower() if host.count(":") == 1 else host.lower()


def _same(origin: str, host: str) -> bool:
    return origin.lower() in (f"http://{host.lower()}", f"https://{host.lower()}")


def _first(scope: Mapping[str, Any]) -> str:
    """The first part of the path."""
    return str(scope["path"]).removeprefix("/").partition("/")[0]


async def _say(send: Send, status: int, text: str) -> None:
    body = json.dumps({"error": text}).encode()
    headers = [
        (b"content-type", b"application/json"),
        (b"cache-control", b"no-store"),
        (b"content-length", str(len(body)).encode()),
    ]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})
