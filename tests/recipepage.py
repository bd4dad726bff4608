"""Writes the recipe's keys into docs/training.md: python -m tests.recipepage."""

import re
from pathlib import Path

from medusa_cli.runs.recipe import meanings

PAGE = Path(__file__).parent.parent / "docs" / "training.md"
TABLES = re.compile(r"(?<=<!-- recipe keys -->\n).*(?=<!-- end of recipe keys -->)", re.DOTALL)


def tables() -> str:
    """Returns a table of keys, defaults and meanings for each section of a recipe."""
    rows: dict[str, list[str]] = {}
    for key, (default, meaning) in meanings().items():
        section, _, name = key.rpartition(".")
        rows.setdefault(section, []).append(f"| `{name}` | {default} | {meaning} |")
    text = ""
    for section, table in rows.items():
        title = f"{section} key" if section else "key"
        text += "\n".join(["", f"| {title} | default | meaning |", "|---|---|---|", *table, ""])
    return f"{text}\n"


def page() -> str:
    """Returns the page with these tables in the place of its own."""
    return TABLES.sub(lambda _: tables(), PAGE.read_text(encoding="utf-8"))


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
