"""What reads the HTTP of the planner page: httptools, in a third of the CPU time of h11, which is Python."""

from __future__ import annotations

from typing import Any

UNREAD_BYTES = 2**16  # as h11 has it
WAITING = 16  # requests that a connection sends ahead of its answers


def protocol() -> Any:
    """uvicorn's `http`: a class of connections, or the name of the reader that uvicorn brings, where httptools is missing."""
    try:
        from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol
    except ImportError:
        return "h11"

    class Connection(HttpToolsProtocol):
        """Closed when it sends more than UNREAD_BYTES of which none is a body or the end of a request, or more than WAITING
        requests ahead: the parser keeps whatever comes."""

        unread = 0

        def data_received(self, data: bytes) -> None:
            self.unread += len(data)
            super().data_received(data)
            if self.unread > UNREAD_BYTES and not self.transport.is_closing():
                self.send_400_response("Too much before a body.")

        def on_message_begin(self) -> None:
            if len(self.pipeline) > WAITING:
                raise ValueError("too many requests ahead")  # the parser stops, and the connection with it
            super().on_message_begin()

        def on_body(self, body: bytes) -> None:
            self.unread = 0
            super().on_body(body)

        def on_message_complete(self) -> None:
            self.unread = 0
            super().on_message_complete()

    return Connection
