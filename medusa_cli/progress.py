"""The type of function to which long-running work reports its progress."""

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
