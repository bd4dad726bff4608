"""Charts as inline SVG that take their colours from the page, so that one drawing serves light and dark."""

import io
import itertools
import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

# matplotlib wants real colours: each of these stands for a variable of the page's style sheet.
TEXT, SOFT, LINE, PAPER = "#010101", "#020202", "#030303", "#040404"
SERIES = tuple(f"#0500{number:02x}" for number in range(1, 9))
VARIABLES = {TEXT: "--ink", SOFT: "--soft", LINE: "--line", PAPER: "--card"}
VARIABLES |= {color: f"--s{number}" for number, color in enumerate(SERIES, 1)}
MARKS = "osD^vPX*"
DASHES = ("-", "--", "-.", ":")
WIDTH, HEIGHT = 5.2, 3.2  # inches; 72 units of the drawing each

STYLE = {
    "svg.fonttype": "none",  # text stays text: it is read aloud, found by a search, and small
    "svg.hashsalt": "medusa",
    "font.family": "sans-serif",
    "font.sans-serif": ["DejaVu Sans"],
    "font.size": 10.0,
    "axes.edgecolor": LINE,
    "axes.labelcolor": SOFT,
    "axes.titlecolor": TEXT,
    "axes.titlesize": 10.5,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": LINE,
    "grid.linewidth": 0.6,
    "text.color": TEXT,
    "text.parse_math": False,  # names are of people's choosing, and some hold dollars
    "xtick.color": SOFT,
    "ytick.color": SOFT,
    "legend.frameon": False,
    "legend.fontsize": 9.0,
    "figure.facecolor": "none",
    "axes.facecolor": "none",
    "lines.linewidth": 1.6,
    "lines.markersize": 4.5,
}
_numbers = itertools.count(1)


class Drawing:
    """An open drawing: `axes` to draw on, and after the block `svg`, the finished text."""

    def __init__(self, axes: Any) -> None:
        self.axes, self.svg = axes, ""


@contextmanager
def drawing(label: str, width: float = WIDTH, height: float = HEIGHT) -> Iterator[Drawing]:
    """One chart of so many inches; `label` says what it shows to those who do not see it."""
    import matplotlib
    from matplotlib.backends.backend_svg import FigureCanvasSVG
    from matplotlib.figure import Figure

    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(width, height), layout="constrained")
        canvas = FigureCanvasSVG(figure)
        drawn = Drawing(figure.subplots())
        yield drawn
        stream = io.StringIO()
        canvas.print_svg(stream, metadata=dict.fromkeys(("Date", "Creator", "Format", "Type")))
    drawn.svg = _inline(stream.getvalue(), label)


def series(number: int) -> dict[str, Any]:
    """Colour, mark and dash of the n-th series: told apart without colours too."""
    return {
        "color": SERIES[number % len(SERIES)],
        "marker": MARKS[number % len(MARKS)],
        "linestyle": DASHES[number // 2 % len(DASHES)],
    }


def _inline(text: str, label: str) -> str:
    """A standalone SVG file's drawing as an element of the page: names of its own, the page's colours and font."""
    from html import escape

    prefix = f"c{next(_numbers)}-"
    body = text[text.index("<svg") :]
    body = re.sub(r'\bid="', f'id="{prefix}', body)
    body = re.sub(r'(xlink:href="#|url\(#)', rf"\1{prefix}", body)
    for color, variable in VARIABLES.items():
        body = body.replace(color, f"var({variable})")
    body = body.replace("'DejaVu Sans'", "var(--font)")
    head, rest = body.split(">", 1)
    view = re.search(r'viewBox="([^"]+)"', head)
    assert view is not None
    width = float(view[1].split()[2])
    names = 'xmlns="http://www.w3.org/2000/svg" xmlns:xlink="http://www.w3.org/1999/xlink"'
    shape = f'viewBox="{view[1]}" style="max-width:{1.6 * width:.0f}px"'
    return f'<svg {names} {shape} role="img" aria-label="{escape(label)}">{rest.strip()}'
