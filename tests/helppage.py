"""Prints docs/commands.md, the help of every command: python -m tests.helppage > docs/commands.md."""

import os
import re

from medusa_cli import cli

WIDTH = 110
HEAD = """\
# Commands

Generated from the commands' `--help` by `make help-page`; do not edit.
"""


def help_of(name: str) -> str:
    """Returns a command's help text, WIDTH columns wide, without colors."""
    command = cli.load_command(name)
    context = command.make_context(
        f"medusa {name}", [], resilient_parsing=True, terminal_width=WIDTH
    )
    text = re.sub(r"\x1b\[[0-9;]*m", "", command.get_help(context))
    return "\n".join(line.rstrip() for line in text.splitlines())


def page() -> str:
    """Returns the page as Markdown, one section a command."""
    os.environ.pop("MEDUSA_HOME", None)
    return "\n".join(
        [HEAD, *(f"## {name}\n\n```text\n{help_of(name)}\n```\n" for name in cli.COMMANDS)]
    )


if __name__ == "__main__":
    print(page(), end="")
