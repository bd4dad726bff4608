"""The type of function to which long-running work reports its progress, and times in words."""

from typing import Protocol


class ShowProgress(Protocol):
    """Receives the name of a part of the work, the units done, their total if it is known, their unit, and a note."""

    def __call__(
        self, name: str, done: int, total: int | None, unit: str = "tokens", note: str = ""
    ) -> None: ...


def show_nothing(
    name: str, done: int, total: int | None, unit: str = "tokens", note: str = ""
) -> None:
    """Ignores the progress."""


def span(seconds: float) -> str:
    """Returns seconds as text, such as "90 s", "5 min" or "2.5 h"."""
    if seconds < 120:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"
