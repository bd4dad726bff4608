"""The server process: one thread takes requests, another decodes; the first signal lets answers finish."""

import signal
import socket
import threading

import uvicorn

from medusa_cli.api import Medusa
from medusa_cli.errors import UsageError
from medusa_cli.serve.app import build
from medusa_cli.serve.middleware import Limits

# Bytes of a request's line and headers, and seconds that an idle connection is kept.
MAX_HEADERS, IDLE_S = 64 << 10, 30


class Server:
    """Takes requests in a thread of its own, and decodes in the one that calls `run`."""

    def __init__(self, medusa: Medusa, limits: Limits) -> None:
        app, self._scheduler = build(medusa, limits)
        config = uvicorn.Config(
            app,
            log_level="warning",
            access_log=False,
            lifespan="off",
            h11_max_incomplete_event_size=MAX_HEADERS,
            http="h11",
            timeout_keep_alive=IDLE_S,
            server_header=False,
        )
        self._web = uvicorn.Server(config)

    @property
    def started(self) -> bool:
        return self._web.started and self._scheduler.alive

    def run(self, listener: socket.socket) -> None:
        """Serves until `stop`, which SIGTERM and Ctrl-C call in the main thread."""
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGTERM, signal.SIGINT):
                signal.signal(number, lambda *_: self.stop())
        web = threading.Thread(target=self._listen, args=(listener,), name="web", daemon=True)
        web.start()
        self._scheduler.run()
        self._web.should_exit = True  # after the last lines are sent
        web.join()

    def stop(self) -> None:
        """Refuses new requests, finishes those under way, then ends; a second call raises KeyboardInterrupt."""
        if self._scheduler.closing:
            raise KeyboardInterrupt
        self._scheduler.drain()

    def _listen(self, listener: socket.socket) -> None:
        try:
            self._web.run(sockets=[listener])
        finally:
            self._scheduler.drain()


def listen(host: str, port: int) -> socket.socket:
    """Returns a bound socket; port 0 is any free one. Raises UsageError for an address that cannot be bound."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
    except (OSError, OverflowError, ValueError, TypeError) as reason:  # a host name that no address can have
        listener.close()
        fault = getattr(reason, "strerror", None) or str(reason)
        raise UsageError(
            f"@host {host} @port {port} cannot be bound: {fault}", "give another @port or @host"
        ) from reason
    return listener
