"""Listening until told to stop: the first signal lets answers finish, the second does not."""

import socket
from types import FrameType

import uvicorn

from medusa_cli.api import Medusa
from medusa_cli.errors import UsageError
from medusa_cli.serving.app import build
from medusa_cli.serving.scheduler import Scheduler
from medusa_cli.serving.settings import Settings

# The largest line and headers of a request, and how long an idle connection is kept.
MOST_HEADERS, IDLE_S = 64 << 10, 30


class Server(uvicorn.Server):
    """Answers 503 from the first signal on, and ends when the last answer has been sent."""

    def __init__(self, config: uvicorn.Config, scheduler: Scheduler) -> None:
        super().__init__(config)
        self._scheduler = scheduler

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        if self._scheduler.closing:
            super().handle_exit(sig, frame)
        else:
            self.stop()

    def stop(self) -> None:
        """Finish what is under way, then end."""

        def leave() -> None:
            self.should_exit = True

        self._scheduler.drain(leave)


def listen(host: str, port: int) -> socket.socket:
    """A bound socket; UsageError for an address that cannot be had. Port 0 is any free one."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    door = socket.socket(family, socket.SOCK_STREAM)
    door.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        door.bind((host, port))
    except (OSError, OverflowError) as reason:
        door.close()
        said = getattr(reason, "strerror", None) or str(reason)
        raise UsageError(
            f"--host {host} --port {port} cannot be had: {said}", "give another --port or --host"
        ) from reason
    return door


def prepare(medusa: Medusa, settings: Settings, *, log_level: str = "warning") -> Server:
    """A server that `run(sockets=[...])` lets answer; its decoding thread runs already."""
    app, scheduler = build(medusa, settings)
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
    scheduler.start()
    return Server(config, scheduler)
