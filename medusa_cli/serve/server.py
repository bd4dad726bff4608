"""Listening until told to stop: the first signal lets answers finish, the second does not."""

import signal
import socket
import threading

import uvicorn

from medusa_cli.api import Medusa
from medusa_cli.errors import UsageError
from medusa_cli.serve.app import build
from medusa_cli.serve.limits import Limits
from medusa_cli.serve.scheduler import Scheduler

# The largest line and headers of a request, and how long an idle connection is kept.
MOST_HEADERS, IDLE_S = 64 << 10, 30


class Server:
    """Requests are taken by a thread of their own and decoded in the one that calls `run`."""

    def __init__(self, config: uvicorn.Config, scheduler: Scheduler) -> None:
        self._web, self._scheduler = uvicorn.Server(config), scheduler

    @property
    def started(self) -> bool:
        return self._web.started and self._scheduler.alive

    def run(self, door: socket.socket) -> None:
        """Serve until told to stop; in the main thread SIGTERM and Ctrl-C do."""
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGTERM, signal.SIGINT):
                signal.signal(number, lambda *_: self.stop())
        web = threading.Thread(target=self._listen, args=(door,), name="web", daemon=True)
        web.start()
        self._scheduler.run()
        self._web.should_exit = True  # when the last lines have been sent
        web.join()

    def stop(self) -> None:
        """Answer 503 from now on, finish what is under way, then end; a second time KeyboardInterrupt ends it all."""
        if self._scheduler.closing:
            raise KeyboardInterrupt
        self._scheduler.drain()

    def _listen(self, door: socket.socket) -> None:
        try:
            self._web.run(sockets=[door])
        finally:
            self._scheduler.drain()


def listen(host: str, port: int) -> socket.socket:
    """A bound socket; UsageError for an address that cannot be had. Port 0 is any free one."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    door = socket.socket(family, socket.SOCK_STREAM)
    door.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        door.bind((host, port))
    except (OSError, OverflowError, ValueError, TypeError) as reason:  # of names that no address can have
        door.close()
        said = getattr(reason, "strerror", None) or str(reason)
        raise UsageError(f"@host {host} @port {port} cannot be had: {said}", "give another @port or @host") from reason
    return door


def prepare(medusa: Medusa, limits: Limits, *, log_level: str = "warning") -> Server:
    """A server, ready to run."""
    app, scheduler = build(medusa, limits)
    config = uvicorn.Config(
        app,
        log_level=log_level,
        access_log=False,
        lifespan="off",
        h11_max_incomplete_event_size=MOST_HEADERS,
        http="h11",
        timeout_keep_alive=IDLE_S,
        server_header=False,
    )
    return Server(config, scheduler)
