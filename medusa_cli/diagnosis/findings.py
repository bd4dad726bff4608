"""What an examination finds, and how several findings come to one."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from medusa_cli.diagnosis.case import Case

# From good to bad; what could not be looked at is worse than nothing amiss, and no fault.
VERDICTS = ("ok", "unknown", "warn", "bad")


@dataclass(frozen=True)
class Finding:
    """One check's outcome: its verdict, what was seen in words, the figures behind them, and a command that helps."""

    name: str
    verdict: str
    seen: str
    remedy: str = ""
    figures: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Check:
    """A check's name, what looks, and whether it decodes or times steps, which takes most of an examination."""

    name: str
    look: "Callable[[Case], Finding]"
    decodes: bool = False


def worst(findings: Sequence[Finding]) -> str:
    """The worst verdict of several findings."""
    return max((one.verdict for one in findings), key=VERDICTS.index, default="unknown")


def graded(value: float, warn: float, bad: float) -> str:
    """The verdict on a value that is the worse the larger it is."""
    return "bad" if value >= bad else "warn" if value >= warn else "ok"
