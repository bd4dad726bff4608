"""HTTP/1.1 with deadlines: a client that sends nothing, half a head, or reads nothing loses its connection."""

from asyncio import TimerHandle, Transport
from typing import Any

from uvicorn.protocols.http.h11_impl import H11Protocol

from medusa_cli.serve.middleware import Limits

# Bytes: a client that reads less within `Limits.read_s` reads nothing.
MIN_READ = 16 << 10


class Protocol(H11Protocol):
    """uvicorn's protocol, which has no deadline but that between two requests.

    A connection beyond `Limits.max_connections` ends the one that has waited longest for a whole request.
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
        transport.set_write_buffer_limits(high=1, low=0)  # `pause_writing` then reports every answer that is not read
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
        super().connection_lost(exc)  # resumes writing
        if self._head is not None:
            self._head.cancel()

    def _unsupported_upgrade_warning(self) -> None:
        """Logs nothing: a server may answer a request to upgrade as any other."""

    def _make_room(self) -> None:
        others: list[Any] = [other for other in self.connections if not other.transport.is_closing()]
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
