"""The server process: one thread accepts requests, another decodes; the first signal lets answers finish."""

import asyncio
import logging
import os
import resource
import signal
import socket
import ssl
import sys
import threading
import time
from asyncio import TimerHandle, Transport
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, cast

import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from medusa_cli.api import Medusa
from medusa_cli.decode.grammar import Grammar, matcher_of
from medusa_cli.errors import UsageError, UserError
from medusa_cli.loading import LoadedModel
from medusa_cli.serve.app import build
from medusa_cli.serve.middleware import Limits
from medusa_cli.serve.record import Recorder
from medusa_cli.serve.templates import TemplateProcess

MAX_HEADERS = 64 << 10  # bytes of a request's first line and headers
BACKLOG = 128  # connections that wait to be accepted
# The maximum number of open files of a process on macOS, from its syslimits.h.
MAC_FILES = 10240
SEND_BUFFER = 32 << 10  # bytes of an answer that the system buffers for a client that does not read
# A client that reads fewer bytes than this within `Limits.read_s` is disconnected.
MIN_READ = 16 << 10
# Logs to which any client can make the server write.
LOGS = ("uvicorn.error", "asyncio", "medusa_cli.serve.scheduler")


class Server:
    """Accepts requests in a separate thread, and decodes in the thread that calls `run`."""

    def __init__(
        self,
        medusa: Medusa,
        limits: Limits,
        recorder: Recorder | None = None,
        load: Callable[[], LoadedModel] | None = None,
    ) -> None:
        """Prepares to serve. recorder: records answers. load: loads the drafter again, at SIGHUP."""
        self._load = load
        # A terminal that is closed also sends SIGHUP.
        self._in_terminal = os.isatty(0)
        self._templates = TemplateProcess(medusa.backbone, limits.template_s)
        # Reading the vocabulary takes a second in which no other thread runs, so it is read before serving.
        with suppress(UserError):
            matcher_of(medusa.backbone, Grammar("regex", "a"))
        app, self._scheduler = build(medusa, limits, self._templates)
        self._scheduler.recorder = recorder
        self._head_s = limits.head_s
        # A quarter of the limit on open files is left for the listener, the log, the model and other files.
        limits = replace(limits, max_connections=min(limits.max_connections, file_limit() * 3 // 4))
        config = uvicorn.Config(
            app,
            log_level="warning",
            access_log=False,
            lifespan="off",
            h11_max_incomplete_event_size=MAX_HEADERS,
            http=cast(Any, partial(Protocol, limits)),
            ws="none",
            timeout_keep_alive=limits.idle_s,
            backlog=BACKLOG,
            server_header=False,
            ssl_certfile=limits.ssl_certfile,
            ssl_keyfile=limits.ssl_keyfile,
        )
        for name in LOGS:
            logging.getLogger(name).addFilter(_once_a_minute)
        self._web = uvicorn.Server(config)

    @property
    def started(self) -> bool:
        return self._web.started and self._scheduler.alive

    @property
    def connections(self) -> int:
        return len(self._web.server_state.connections)

    def run(self, listener: socket.socket) -> None:
        """Serves until `stop`, which SIGTERM and Ctrl-C call in the main thread."""
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGTERM, signal.SIGINT):
                signal.signal(number, lambda *_: self.stop())
            signal.signal(signal.SIGHUP, lambda *_: self.reload())
        web = threading.Thread(target=self._listen, args=(listener,), name="web", daemon=True)
        web.start()
        self._scheduler.run()
        self._web.should_exit = True  # uvicorn first sends the last lines
        web.join()
        self._templates.close()

    def reload(self) -> None:
        """Loads the drafter again, and opens the file of records again; ends the server if its terminal was closed."""
        if self._in_terminal and not os.isatty(0):
            self.stop()
            return
        if self._scheduler.recorder is not None:
            self._scheduler.recorder.reopen()
        if self._load is not None:
            self._scheduler.reload(self._load)

    def stop(self) -> None:
        """Refuses new requests, and ends the server after the last answer; a second call raises KeyboardInterrupt."""
        if self._scheduler.closing:
            raise KeyboardInterrupt
        self._scheduler.drain()

    def _listen(self, listener: socket.socket) -> None:
        try:
            asyncio.run(self._serve(listener))
        finally:
            self._scheduler.drain()

    async def _serve(self, listener: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        if self._web.config.is_ssl:  # uvicorn keeps asyncio's handshake limit of one minute
            loop.create_server = partial(loop.create_server, ssl_handshake_timeout=self._head_s)  # type: ignore
        await self._web.serve(sockets=[listener])


class Protocol(H11Protocol):
    """Adds deadlines to uvicorn's protocol, which only limits the time between two requests.

    If there are more connections than `Limits.max_connections`, the connection that has gone longest without a
    complete request is closed.
    """

    def __init__(self, limits: Limits, **options: Any) -> None:
        super().__init__(**options)
        self._limits = limits
        self._head: TimerHandle | None = None
        self._reading: TimerHandle | None = None

    @property
    def _answering(self) -> bool:
        return self.cycle is not None and not self.cycle.response_complete

    def connection_made(self, transport: Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._waiting_since = self.loop.time()
        # `pause_writing` is then called for every answer that the client does not read.
        transport.set_write_buffer_limits(high=1, low=0)
        self._expect_head()
        if len(self.connections) > self._limits.max_connections:
            self._make_room()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if not self._answering:
            self._expect_head()
        elif self._head is not None:
            self._head.cancel()
            self._head = None

    def on_response_complete(self) -> None:
        self._waiting_since = self.loop.time()
        super().on_response_complete()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._expect_reading()

    def resume_writing(self) -> None:
        super().resume_writing()
        if self._reading is not None:
            self._reading.cancel()

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)  # also resumes writing
        if self._head is not None:
            self._head.cancel()

    def _unsupported_upgrade_warning(self) -> None:
        """Logs nothing, because a server may answer an upgrade request like any other request."""

    def _make_room(self) -> None:
        others: list[Any] = [
            other for other in self.connections if not other.transport.is_closing()
        ]
        waiting = [other for other in others if not other._answering or other.cycle.more_body]
        if len(others) > self._limits.max_connections:
            min(waiting, key=lambda other: other._waiting_since).transport.abort()

    def _expect_head(self) -> None:
        if self._head is None:
            self._head = self.loop.call_later(self._limits.head_s, self.transport.abort)

    def _expect_reading(self) -> None:
        unread = self.transport.get_write_buffer_size()
        self._reading = self.loop.call_later(self._limits.read_s, self._check_reading, unread)

    def _check_reading(self, before: int) -> None:
        if before - self.transport.get_write_buffer_size() < MIN_READ:
            self.transport.abort()
        else:
            self._expect_reading()


class OnceAMinute(logging.Filter):
    """Passes on similar messages at most once per minute, with the number of messages that were dropped in between.

    An OSError is logged without its traceback.
    """

    def __init__(self, period_s: float = 60) -> None:
        super().__init__()
        self._period_s = period_s
        # By a message's first 40 characters: when such a message last passed, and how many were dropped since.
        self._passed = dict[str, tuple[float, int]]()

    def filter(self, record: logging.LogRecord) -> bool:
        now = time.monotonic()
        text = record.getMessage().split("\n")[0]
        last, dropped = self._passed.get(text[:40], (-self._period_s, 0))
        if now - last < self._period_s:
            self._passed[text[:40]] = (last, dropped + 1)
            return False
        self._passed[text[:40]] = (now, 0)
        if isinstance(record.exc_info, tuple) and isinstance(record.exc_info[1], OSError):
            record.msg = f"{text}: {record.exc_info[1]}"
            record.args = ()
            record.exc_info = None
        if dropped:
            record.msg = f"{record.getMessage()} ({dropped:,} more like it before)"
            record.args = ()
        return True


_once_a_minute = OnceAMinute()


def file_limit() -> int:
    """Raises this process's limit on open files as far as possible, and returns the limit."""
    limit, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    # macOS reports no limit, but refuses more files than its OPEN_MAX.
    for wanted in (hard, MAC_FILES):
        with suppress(ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
            limit = wanted
            break
    return sys.maxsize if limit == resource.RLIM_INFINITY else limit


def check_certificate(certificate: Path | None, key: Path | None) -> None:
    """Raises UsageError for files unsuitable for HTTPS: missing, not PEM, not a pair, or with a password."""
    if certificate is None:
        if key is not None:
            raise UsageError(
                f"@ssl_keyfile {key} has no effect without a certificate",
                "give its @ssl_certfile, too",
            )
        return
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(certificate, key, password="")
    except (OSError, ValueError) as reason:
        fault = getattr(reason, "strerror", None) or str(reason)
        files = f"@ssl_certfile {certificate}" + (f" @ssl_keyfile {key}" if key else "")
        remedy = "give a certificate and its key as PEM, without a password"
        raise UsageError(f"{files} cannot be used: {fault}", remedy) from reason


def listen(host: str, port: int, uds: Path | None = None) -> socket.socket:
    """Returns a socket bound to an address, or to the Unix socket `uds`; port 0 means any free port.

    Raises UsageError for an address that cannot be bound.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    if uds:
        family = socket.AF_UNIX
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BUFFER)
    try:
        if uds and uds.is_socket() and not _is_served(uds):
            uds.unlink()
        listener.bind(str(uds) if uds else (host, port))
    # TypeError, ValueError: an invalid host name.
    except (OSError, OverflowError, ValueError, TypeError) as reason:
        listener.close()
        fault = getattr(reason, "strerror", None) or str(reason)
        place = f"@host {host} @port {port}"
        remedy = "give another @port or @host"
        if uds:
            place = f"@uds {uds}"
            remedy = "give another file"
        raise UsageError(f"{place} cannot be bound: {fault}", remedy) from reason
    return listener


def file_identity(path: Path) -> tuple[int, int] | None:
    """Returns an identity that differs for a later file at the same path; None if there is no file."""
    if not path.exists():
        return None
    status = path.stat()
    return status.st_ino, status.st_mtime_ns


def _is_served(path: Path) -> bool:
    """Returns False for a Unix socket that a killed server left behind."""
    with socket.socket(socket.AF_UNIX) as client:
        return client.connect_ex(str(path)) == 0
