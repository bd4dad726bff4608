"""A line of distill.jsonl: the one declaration that those who write it and those who read it share."""

import json
from dataclasses import asdict, dataclass
from typing import Annotated, Any

import msgspec
from msgspec import Meta

Count = Annotated[int, Meta(ge=0, lt=2**48)]


@dataclass(frozen=True)
class Line:
    """A conversation: id, token ids, answers' spans [start, end), its state rows (first, count) and their seal."""

    id: str | int | None = None
    messages: Any = ()
    tokens: list[Count] = ()  # type: ignore[assignment]
    spans: list[tuple[Count, Count]] = ()  # type: ignore[assignment]
    state_rows: tuple[Count, Annotated[int, Meta(ge=1, lt=2**48)]] | None = None
    seal: str | None = None

    def to_json(self) -> str:
        """The line, without what the conversation has not."""
        return json.dumps({key: one for key, one in asdict(self).items() if one is not None}, ensure_ascii=False)


@dataclass(frozen=True)
class Dropped:
    """A line of distill-dropped.jsonl: a conversation that was not kept, and the tokens of its shortest answer."""

    id: str
    tokens: Count


def as_line(data: Any) -> Line:
    """Parsed JSON as a line; ValueError where a field is of another type."""
    return msgspec.convert(data, Line)
