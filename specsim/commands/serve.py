"""specsim serve"""

from __future__ import annotations

import socket
from typing import TYPE_CHECKING, Any

import click

from specsim.commands.common import json_option, note, print_json
from specsim.commands.scenario import scenario_options

if TYPE_CHECKING:
    from specsim.web.guard import Application
    from specsim.web.planner import Planner

PORT = 8765


@click.command()
@scenario_options
@click.option(
    "--port",
    type=click.IntRange(0, 65535),
    default=PORT,
    metavar="PORT",
    help=f"Port of the page, 0 for any that is free; default {PORT}.",
)
@click.option(
    "--host",
    metavar="ADDRESS",
    default="127.0.0.1",
    help="Address to serve, where another than this machine's own needs a token; default 127.0.0.1.",
)
@click.option(
    "--token",
    metavar="TOKEN",
    envvar="SPECSIM_TOKEN",
    help="First part of every address; made up where --host needs one.",
)
@click.option("--allow-host", multiple=True, metavar="NAME", help="Another name that the page may be asked by.")
@click.option("--open", "open_page", is_flag=True, help="Open the page in the browser.")
@json_option
def command(
    port: int,
    host: str,
    token: str | None,
    allow_host: tuple[str, ...],
    open_page: bool,
    as_json: bool,
    **options: Any,
) -> None:
    """Serve the planner page: choose model, box and engine, move sliders, see what predict says at once.

    The page opens with the scenario that is given, which may name files of yours.

    The page runs on this machine, needs no internet, and asks for the same numbers as `specsim predict`. From elsewhere it
    is best reached through ssh (ssh -L 8765:127.0.0.1:8765 BOX); with --host it serves other machines, to whom its address
    holds a token.

    \b
    Examples:
      specsim serve --open
      specsim serve --model Llama-3.1-8B --hardware my-box.yaml
      specsim serve --port 0 --json
      specsim serve --host 0.0.0.0
    """
    from specsim.web.guard import is_local

    try:
        import starlette  # noqa: F401
        import uvicorn
    except ImportError as error:
        from specsim.errors import InputError

        raise InputError(f"needs {error.name}", where="specsim serve", mend="pip install 'specsim[serve]'") from None
    made = not token and not is_local(host)
    token = _token(token, made)
    run = click.get_current_context().obj or {}
    defaults = run["defaults"].note() if "defaults" in run else ""
    from specsim.web.connection import protocol
    from specsim.web.planner import Planner

    planner = Planner("specsim --no-config predict" if defaults else "specsim predict")
    planner.start_with(options)
    app = guarded(planner, host, token, allow_host, debug=bool(run.get("debug")))
    if defaults:
        note(defaults)
    listening = listen(host, port)
    address = f"http://{_shown(host)}:{listening.getsockname()[1]}/"
    with_token = f"{address}{token}/" if token else address
    # A token that the user gave is theirs to keep: it is not printed.
    printed = with_token if made or not token else f"{address}TOKEN/"
    if as_json:
        print_json({"schema": "specsim.serve/1", "address": printed})
    else:
        click.echo(f"specsim planner: {printed}  (Ctrl-C ends it)")
    if not is_local(host):
        note("warning: everybody who has this address can ask for predictions; it is not encrypted")
    if open_page:
        import webbrowser

        webbrowser.open(with_token)
    config = uvicorn.Config(
        app,
        log_level="error",
        access_log=False,
        server_header=False,
        proxy_headers=False,
        lifespan="off",
        ws="none",
        http=protocol(),
        loop="asyncio",
        limit_concurrency=100,
        timeout_keep_alive=30,
        timeout_graceful_shutdown=1,
    )
    try:
        uvicorn.Server(config).run(sockets=[listening])
    except KeyboardInterrupt:
        note("")  # a line of its own for the shell's prompt, after ^C


def guarded(
    planner: Planner, host: str, token: str | None = None, allow_host: tuple[str, ...] = (), debug: bool = False
) -> Application:
    """The application of the page, as it is served on an address."""
    from specsim.web.app import application
    from specsim.web.guard import LOCAL_NAMES, Guard, is_local

    local = is_local(host)
    names = {*LOCAL_NAMES, *allow_host, *(() if local else (host, socket.gethostname(), socket.getfqdn()))}
    return Guard(application(planner), token=token, names=names, any_address=not local, debug=debug)


def listen(host: str, port: int) -> socket.socket:
    """A socket bound to the address. Raises WorkError when it is taken, InputError when there is no such address."""
    from specsim.errors import InputError, WorkError

    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # Named as TCP, asyncio sends small packets at once; else every answer waits 40 ms for the browser's acknowledgement.
    found = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    found.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        found.bind((host, port))
        found.listen(128)
    except OSError as error:
        found.close()
        import errno

        if error.errno == errno.EADDRINUSE:
            raise WorkError(f"port {port} is taken; give another --port, or --port 0 for any that is free") from None
        if error.errno == errno.EACCES:
            raise WorkError(f"port {port} may not be used by this user; give a --port from 1024 up") from None
        mend = "give an address of this machine, or 0.0.0.0"
        raise InputError(f"{host!r}: {error.strerror or error}", where="--host", mend=mend) from None
    return found


def _token(given: str | None, wanted: bool) -> str | None:
    from specsim.errors import InputError
    from specsim.web.guard import TOKEN

    if given and not TOKEN.fullmatch(given):
        raise InputError(
            "is not 16 to 128 letters, digits, - or _", where="--token", mend="or leave it out: one is made"
        )
    if wanted:
        import secrets

        return secrets.token_urlsafe(24)
    return given or None


def _shown(host: str) -> str:
    """The address as a browser of this machine takes it, or of another where it is served to all."""
    if host in ("0.0.0.0", "::"):
        return socket.gethostname()
    return f"[{host}]" if ":" in host else host
