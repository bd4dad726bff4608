"""The base class of formats with one answer: the answer whole, or line by line as it comes."""

import json
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, AsyncIterator, Iterable
from contextlib import aclosing
from typing import Any

from medusa_cli.serve.refusals import Refusal, failure
from medusa_cli.serve.scheduler import WAITING, Event, Ticket

# A comment, which clients of server-sent events skip.
KEEP_ALIVE = ": keep-alive\n\n"


def sse(data: dict[str, Any], name: str | None = None) -> str:
    """Returns a server-sent event."""
    head = "" if name is None else f"event: {name}\n"
    # ASCII, because JSON may contain U+2028 and similar characters, which many clients mistake for
    # the end of a line.
    return f"{head}data: {json.dumps(data)}\n\n"


class AnswerFormat(ABC):
    """Formats the answer of one ticket.

    media: the type of a stream. keep_alive: the line that is sent while there is nothing else, "" for none.
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
        """Returns the lines of a stream for an event; after the last one, those that end the stream."""

    def failed(self, reason: Refusal) -> str:
        """Returns the line of a stream for a failure."""
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
