"""The base class of response formats with one answer, which is sent whole or as a stream of lines."""

import json
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, AsyncIterator, Iterable
from contextlib import aclosing
from typing import Any

from medusa_cli.serve.refusals import Refusal, failure
from medusa_cli.serve.scheduler import WAITING, Event, Ticket

# A comment; clients of server-sent events skip comments.
KEEP_ALIVE = ": keep-alive\n\n"


def sse(data: dict[str, Any], name: str | None = None) -> str:
    """Returns a server-sent event."""
    head = "" if name is None else f"event: {name}\n"
    # ASCII, because JSON may contain U+2028 and similar characters, which many clients mistake for
    # the end of a line.
    return f"{head}data: {json.dumps(data)}\n\n"


class AnswerFormat(ABC):
    """Formats the answer of one ticket.

    media: the media type of a stream. keep_alive: the line that a stream sends while the answer has nothing new, or "".
    """

    media = "text/event-stream"
    keep_alive = KEEP_ALIVE

    def __init__(self, ticket: Ticket) -> None:
        self._ticket = ticket

    @abstractmethod
    def whole(self) -> dict[str, Any]:
        """Returns the response body with the finished answer."""

    def begin(self) -> Iterable[str]:
        """Returns the lines of a stream before the first event."""
        return ()

    @abstractmethod
    def read(self, event: Event) -> Iterable[str]:
        """Returns the lines of a stream for an event; for the last event, also the lines that end the stream."""

    def failed(self, reason: Refusal) -> str:
        """Returns the line with which a stream reports a failure."""
        return sse(reason.body)

    async def stream(self, events: AsyncGenerator[tuple[int, Event]]) -> AsyncIterator[str]:
        """Yields the answer line by line."""
        async with aclosing(events):
            for line in self.begin():
                yield line
            async for _, event in events:
                if event.error is not None:
                    yield self.failed(failure(event.error))
                    return
                lines = [self.keep_alive] if event is WAITING else self.read(event)
                for line in filter(None, lines):
                    yield line
