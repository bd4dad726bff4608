"""Texts of people's choosing in a page of Markdown, shown as they are."""

from collections.abc import Sequence

MARKS = {"&": "&amp;", "<": "&lt;", ">": "&gt;", "|": "\\|"}


def escaped(text: str) -> str:
    """A text on one line, in which nothing is read as HTML or ends a table's cell."""
    return "".join(MARKS.get(one, one) for one in " ".join(text.split()))


def row_of(cells: Sequence[str]) -> str:
    """A table's row of texts."""
    return "| " + " | ".join(map(escaped, cells)) + " |"
