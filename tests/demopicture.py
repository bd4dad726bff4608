"""Draws what `medusa demo` prints into a terminal as an SVG: python -m tests.demopicture > docs/images/demo.svg."""

import io
import os
import pty
import re
import subprocess
import sys

from rich.console import Console
from rich.text import Text

COLUMNS = 118
# Rich's SVGs fetch a font from the network; the viewer's own does as well.
FONT = re.compile(r"@font-face\s*\{.*?\}\s*", re.DOTALL)


def in_terminal(words: list[str]) -> str:
    """Returns what a command prints into a terminal; raises CalledProcessError if it fails."""
    ours, theirs = pty.openpty()
    environment = {**os.environ, "COLUMNS": str(COLUMNS), "LINES": "200", "TERM": "xterm-256color"}
    process = subprocess.Popen(words, stdin=theirs, stdout=theirs, env=environment)
    os.close(theirs)
    printed = b""
    while True:
        try:
            part = os.read(ours, 1 << 16)
        except OSError:  # the other end is closed
            break
        if not part:
            break
        printed += part
    if code := process.wait():
        raise subprocess.CalledProcessError(code, words)
    return printed.decode().replace("\r\n", "\n")


def main() -> None:
    text = in_terminal([sys.executable, "-m", "medusa_cli", "demo", "--quiet", *sys.argv[1:]])
    console = Console(record=True, width=COLUMNS, file=io.StringIO(), force_terminal=True)
    console.print(Text.from_ansi(text.strip("\n")), soft_wrap=True)
    print(FONT.sub("", console.export_svg(title="medusa demo")))


if __name__ == "__main__":
    main()
