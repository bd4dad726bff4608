"""Which records of a file can be used, and of the others how many cannot, and why."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar


class Malformed(ValueError):
    """A record that cannot be used; the text is the reason it is counted under."""


@dataclass
class ReadReport:
    """How many conversations were read and skipped, by reason."""

    read: int = 0
    skipped: dict[str, int] = field(default_factory=dict)

    def skip(self, reason: str) -> None:
        self.skipped[reason] = self.skipped.get(reason, 0) + 1

    def __str__(self) -> str:
        parts = [f"{self.read:,} conversations read"]
        return ", ".join(parts + [f"{count:,} skipped ({why})" for why, count in sorted(self.skipped.items())])


class Named(Protocol):
    """What has an id."""

    @property
    def id(self) -> str: ...


One = TypeVar("One", bound=Named)


def usable(found: Iterable[Any], make: Callable[[Any], One], report: ReadReport) -> list[One]:
    """What `make` makes of values, each id once; the report counts those it calls Malformed and those that repeat."""
    made: dict[str, One] = {}
    for raw in found:
        try:
            one = make(raw)
        except Malformed as reason:
            report.skip(str(reason))
            continue
        if one.id in made:
            report.skip("same id as an earlier one")
            continue
        made[one.id] = one
        report.read += 1
    return list(made.values())
