"""Reports of saved benches, as one HTML page that needs no network and as Markdown."""

import base64
import io
import textwrap
from collections.abc import Callable, Iterator, Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any, NamedTuple

from medusa_cli import __version__
from medusa_cli.errors import UserError, first_line
from medusa_cli.files.io import Document, read_object, write_atomic

BY_TURN = "Milliseconds to the first token by turn, and the cached share of the prompt"
LISTED = 40  # rows in the table of differences
SETTINGS = ("dtype", "engine", "kernel", "device", "max_new_tokens", "batch_size")
Interval = tuple[float, float] | None
Curves = Mapping[str, Sequence[tuple[float, float, Interval]]]  # by name: (x, y, interval of y)


class SavedBench(NamedTuple):
    """Holds a saved bench and the sweeps next to it; `name` identifies it in the report."""

    name: str
    document: Document
    sweeps: list[Document]


class Table(NamedTuple):
    head: list[str]
    rows: list[list[str]]
    caption: str = ""


class Section(NamedTuple):
    """Holds a section's text, its tables, and its SVG charts by title."""

    title: str
    words: str
    tables: list[Table]
    charts: dict[str, str]


def read_bench(path: Path) -> Document:
    """Reads a saved bench; raises UserError if the file is not a bench."""
    document = read_object(path, "the bench")
    methods = document.get("methods")
    if not isinstance(methods, dict) or not methods or "baseline" not in document:
        fault = f"{path} is not a bench"
        raise UserError(fault, "give a run, or a JSON file that `medusa bench` wrote")
    return document


def write_report(paths: Mapping[str, Path], page: Path) -> list[Path]:
    """Writes benches as a self-contained HTML page, and as Markdown next to it; returns both paths.

    paths: the files of the benches by name. Raises UserError if a file holds figures that no bench writes.
    """
    from jinja2 import Environment, FileSystemLoader

    try:
        benches = []
        for name, path in paths.items():
            files = sorted(path.parent.glob("sweep-*.json"))
            sweeps = [read_object(file, "the sweep") for file in files]
            benches.append(SavedBench(name, read_bench(path), sweeps))
        title = ", ".join(dict.fromkeys(str(bench.document["title"]) for bench in benches))
        if len(benches) > 1:
            title += f": {', '.join(paths)}"
        facts = {bench.name: " ".join(bench.document["facts"]) for bench in benches}
        sections = [section for part in PARTS for section in part(benches)]
        folder = FileSystemLoader(Path(__file__).parent)
        jinja = Environment(loader=folder, autoescape=True, trim_blocks=True, lstrip_blocks=True)
        template = jinja.get_template("page.html.jinja")
        html = template.render(title=title, facts=facts, sections=sections, version=__version__)
        texts = {page: html, page.with_suffix(".md"): markdown(title, facts, sections)}
    except (LookupError, TypeError, ValueError, AttributeError, ArithmeticError) as reason:
        names = " or ".join(map(str, paths.values()))
        text = f"{type(reason).__name__}: {first_line(reason)}"
        fault = f"{names} holds figures that are not from `medusa bench` ({text})"
        raise UserError(fault, "run it again") from reason
    for path, content in texts.items():
        write_atomic(path, content)
    return list(texts)


def markdown(title: str, facts: Mapping[str, str], sections: Sequence[Section]) -> str:
    """Returns the text and tables of a report in Markdown; charts are only in the HTML page."""

    def inline(text: str) -> str:
        """Returns a text on one line, escaped so that nothing reads as HTML or ends a table cell."""
        return escape(" ".join(text.split()), quote=False).replace("|", "\\|")

    lines = [f"# {inline(title)}", ""]
    for name, text in facts.items():
        lines += [(f"**{inline(name)}.** " if len(facts) > 1 else "") + inline(text), ""]
    for section in sections:
        lines += [f"## {inline(section.title)}", ""]
        lines += [inline(section.words), ""] if section.words else []
        for table in section.tables:
            lines += [f"{inline(table.caption)}:", ""] if table.caption else []
            rows = [table.head, ["---"] * len(table.head), *table.rows]
            lines += ["| " + " | ".join(map(inline, row)) + " |" for row in rows] + [""]
    return "\n".join(lines).rstrip() + "\n"


def chart(title: str, draw: Callable[[Any], object], height: float = 3.4) -> dict[str, str]:
    """Returns, under its title, the chart that `draw` makes on matplotlib's axes, as the data URL of an SVG image."""
    import matplotlib
    from matplotlib.figure import Figure

    # Users choose the names, so dollar signs in them must not be parsed as math. Ids are not
    # random, so that the same bench gives the same page.
    style = {
        "svg.hashsalt": "medusa",
        "svg.fonttype": "none",
        "text.parse_math": False,
        "axes.spines.top": False,
        "axes.spines.right": False,
        "axes.grid": True,
        "axes.axisbelow": True,
        "grid.alpha": 0.3,
    }
    with matplotlib.rc_context(style):
        figure = Figure(figsize=(5.2, height), layout="constrained")
        axes = figure.subplots()
        axes.set_title(textwrap.fill(title, 54), fontsize=10.5)
        draw(axes)
        handles = dict(zip(*reversed(axes.get_legend_handles_labels()), strict=True))
        if len(handles) > 1:
            figure.legend(
                handles.values(),
                handles.keys(),
                loc="outside lower center",
                ncols=min(3, len(handles)),
                fontsize=9,
                frameon=False,
            )
        stream = io.BytesIO()
        nothing = dict.fromkeys(("Date", "Creator", "Format", "Type"))
        figure.savefig(stream, format="svg", metadata=nothing)
    return {title: f"data:image/svg+xml;base64,{base64.b64encode(stream.getvalue()).decode()}"}


def bars(
    title: str, groups: Mapping[str, Mapping[str, Mapping[str, Any]]], key: str, unit: str
) -> dict[str, str]:
    """Returns a horizontal bar chart of one figure of each group's methods, with intervals and a dotted line at 1."""
    groups = {
        group: {name: own for name, own in methods.items() if own[key] is not None}
        for group, methods in groups.items()
    }
    names = list(dict.fromkeys(name for methods in groups.values() for name in methods))

    def draw(axes: Any) -> None:
        y = 0.0
        ticks = []
        for group, methods in groups.items():
            ticks.append((y + (len(methods) - 1) / 2, group))
            for name, figures in methods.items():
                value = figures[key]
                interval = figures[f"{key}_95"] or (figures[key], figures[key])
                whiskers = [[max(value - interval[0], 0)], [max(interval[1] - value, 0)]]
                color = f"C{names.index(name) % 10}"
                axes.barh(
                    y, value, 0.8, color=color, label=name, xerr=whiskers, error_kw={"capsize": 2.5}
                )
                end = (max(value, interval[1]), y)
                axes.annotate(f"{value:.2f}", end, (4, 0), textcoords="offset points", va="center")
                y += 1
            y += 0.6
        axes.axvline(1, color="gray", linewidth=0.8, linestyle=":")
        axes.set_yticks(*zip(*ticks, strict=True))
        axes.invert_yaxis()
        axes.margins(x=0.14)
        axes.set_xlabel(unit)

    return chart(title, draw, 1.4 + 0.27 * sum(len(methods) + 0.6 for methods in groups.values()))


def lines(title: str, curves: Curves, x: str, y: str, log: bool = False) -> dict[str, str]:
    """Returns a line chart with intervals as bands; log: the x axis is logarithmic with base 2."""

    def draw(axes: Any) -> None:
        for number, (name, points) in enumerate(curves.items()):
            color = f"C{number % 10}"
            style = ("-", "--", "-.", ":")[number // 10 % 4]
            own = [p[0] for p in points], [p[1] for p in points]
            axes.plot(*own, style, label=name, color=color, marker="o", markersize=4)
            bands = [(p[0], *p[2]) for p in points if p[2] is not None]
            if bands:
                axes.fill_between(*zip(*bands, strict=True), color=color, alpha=0.16, linewidth=0)
        ticks = sorted({point[0] for points in curves.values() for point in points})
        if log:
            axes.set_xscale("log", base=2)
            axes.minorticks_off()
        if log or all(tick == int(tick) for tick in ticks):
            axes.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
        axes.set_ylim(bottom=0)
        axes.set(xlabel=x, ylabel=y)

    return chart(title, draw)


def _with_interval(figures: Mapping[str, Any], key: str, form: str = ".2f") -> str:
    text = _cell(figures[key], form)
    if (interval := figures[f"{key}_95"]) is None:
        return text
    return f"{text} ({interval[0]:{form}} to {interval[1]:{form}})"


def _cell(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)


def _methods(benches: Sequence[SavedBench]) -> Iterator[tuple[str, Document, str, dict[str, Any]]]:
    """Yields each method's name in the report, its bench document, its name in that document, and its figures."""
    for bench in benches:
        for method, figures in bench.document["methods"].items():
            name = method if len(benches) == 1 else f"{bench.name}: {method}"
            yield name, bench.document, method, figures


def gains_table(document: Document) -> tuple[list[str], list[list[str]]]:
    """Returns the header and rows of the table that `medusa bench` prints at the end."""
    rows = []
    for name, figures in document["methods"].items():
        interval = figures["speedup_95"]
        same = figures["identical"]
        identical = "-" if same is None else f"{same}/{figures['questions']}"
        cells = [name, f"{figures['tokens_per_s']:.1f}", f"{figures['speedup']:.2f}"]
        cells += ["-" if interval is None else f"{interval[0]:.2f}-{interval[1]:.2f}"]
        cells += [_cell(figures[key], ".2f") for key in ("acceptance_length", "overhead")]
        if name == document["reference"] and same is not None:
            identical = "reference"
        own = figures.get("own_plain")
        own_cell = f"{own['identical']}/{figures['questions']} of {own['method']}" if own else "-"
        rows.append([*cells, identical, own_cell])
    base = f"speedup over {document['baseline']}"
    head = ["method", "tokens/s", base, "95 %", "acceptance length", "overhead", "identical"]
    return [*head, "own plain"], rows


def parts_table(document: Document) -> tuple[list[str], list[list[str]]]:
    """Returns the header and rows of the table of prompts and generation; without figures, there are no rows."""
    rows = [
        [
            name,
            f"{1e3 * figures['first_token_s']:.0f}",
            f"{figures['generation_per_s']:.1f}",
            _with_interval(figures, "generation_speedup"),
        ]
        for name, figures in document["methods"].items()
        if figures.get("first_token_s") is not None
    ]
    base = f"speedup over {document['baseline']}"
    return ["method", "first token, ms", "tokens/s after it", base], rows


def turns_table(document: Document) -> tuple[list[str], list[list[str]]]:
    """Returns the header and rows of the table of times to the first token by turn; without figures, no rows."""
    rows = []
    for name, figures in document["methods"].items():
        if turns := figures.get("by_turn"):
            cells = (f"{1e3 * own['first_token_s']:.0f} ({own['cached']:.0%})" for own in turns)
            rows.append([name, *cells])
    count = max(map(len, rows), default=1)
    return ["method", *(f"turn {turn}" for turn in range(1, count))], rows


def gains(benches: Sequence[SavedBench]) -> Iterator[Section]:
    words = (
        "Speedup is tokens/s over the baseline's in the same run, with its 95 % bootstrap interval over "
        "questions. The acceptance length is the tokens a verified step gives, the model's own included. Overhead is "
        "the time of such a step over a plain step. Identical answers are the reference's, in the last column "
        "those of the same program without its drafts. The second table leaves the prompts out."
    )
    tables = []
    for bench in benches:
        caption = bench.name if len(benches) > 1 else ""
        tables.append(Table(*gains_table(bench.document), caption))
        if (parts := parts_table(bench.document))[1]:
            tables.append(Table(*parts, f"{caption} Prompts and generation apart".strip()))
        if (turns := turns_table(bench.document))[1]:
            tables.append(Table(*turns, f"{caption} {BY_TURN}".strip()))
    groups = {bench.name: bench.document["methods"] for bench in benches}
    yield Section("What it gains", words, tables, bars("Speedup", groups, "speedup", "x"))


def categories(benches: Sequence[SavedBench]) -> Iterator[Section]:
    every = _methods(benches)
    methods = {
        name: f["per_category"]
        for name, document, method, f in every
        if method != document["baseline"]
    }
    known = list(dict.fromkeys(category for parts in methods.values() for category in parts))
    if len(known) < 2:
        return
    groups = {
        category: {n: parts[category] for n, parts in methods.items() if category in parts}
        for category in known
    }
    tables = []
    charts = dict[str, str]()
    for title, key, unit in (
        ("Speedup", "speedup", "x"),
        ("Acceptance length", "acceptance_length", "tokens per step"),
    ):
        rows = [
            [category, *(_with_interval(part[n], key) if n in part else "-" for n in methods)]
            for category, part in groups.items()
        ]
        tables.append(Table(["category", *methods], rows, title))
        charts |= bars(f"{title} by category", groups, key, unit)
    yield Section("By category", "", tables, charts)


def positions(benches: Sequence[SavedBench]) -> Iterator[Section]:
    curves: dict[str, list[tuple[float, float, Interval]]] = {}
    rows = []
    for name, document, method, figures in _methods(benches):
        if method in document["drafting"] or method == "lookup":
            shares = list(enumerate(figures["by_position"], 1))
            curves[name] = [(0.0, 1.0, None)]
            for k, share in shares:
                curves[name].append((k, share["reached"], share["reached_95"]))
                rows.append([name, str(k), f"{share['reached']:.1%}", f"{share['after']:.1%}"])
    if rows:
        words = (
            "Share of steps that accepted a draft token at position k: of all steps, as vLLM and SPEED-Bench count; of "
            "those that had accepted position k - 1, EAGLE's k-alpha."
        )
        table = Table(["method", "position", "of all steps", "of those before"], rows)
        title = "Steps that accepted at least k draft tokens"
        x = "k, position of the draft token"
        yield Section(
            "Acceptance by position", words, [table], lines(title, curves, x, "share of steps")
        )


def sweeps(benches: Sequence[SavedBench]) -> Iterator[Section]:
    tables = []
    charts = dict[str, str]()
    for name, sweep in [(bench.name, sweep) for bench in benches for sweep in bench.sweeps]:
        rows = []
        for point in sweep["points"]:
            row = [point["series"], f"{point['x']:g}", _with_interval(point, "tokens_per_s", ".1f")]
            row += [_with_interval(point, "acceptance_length"), _cell(point["nll"], ".3f")]
            rows.append([*row, str(point["questions"])])
        head = ["series", sweep["unit"], "tokens/s", "acceptance length"]
        caption = f"{name}: {sweep['axis']}, measured {sweep['created'][:10]}"
        tables.append(Table([*head, "nats a token", "questions"], rows, caption))
        for key, y in (
            ("acceptance_length", "tokens per step"),
            ("tokens_per_s", "tokens/s"),
            ("nll", "nats a token"),
        ):
            curves: dict[str, list[tuple[float, float, Interval]]] = {}
            for point in sweep["points"]:
                if point[key] is not None:
                    place = (point["x"], point[key], point.get(f"{key}_95"))
                    curves.setdefault(point["series"], []).append(place)
            if curves:
                log = sweep["axis"] == "nodes"
                charts |= lines(f"{name}: {y} by {sweep['axis']}", curves, sweep["unit"], y, log)
    if tables:
        yield Section("Sweeps", "", tables, charts)


def quality(benches: Sequence[SavedBench]) -> Iterator[Section]:
    rows = []
    judged = []
    for bench in benches:
        for method, part in (bench.document.get("quality") or {}).items():
            cells = [f"{part['nll']:.3f}", f"{part['perplexity']:.2f}", f"{part['agreement']:.1%}"]
            rows.append([bench.name, method, *cells, f"{part['tokens']:,}"])
        judge = bench.document.get("judge") or {"single": {}, "pairs": {}}
        for method, grade in judge["single"].items():
            judged.append(
                [bench.name, method, f"{grade['score']:.2f}", "-", "-", "-", str(grade["answers"])]
            )
        for method, pairs in judge["pairs"].items():
            counts = [str(pairs[key]) for key in ("wins", "ties", "losses", "answers")]
            judged.append([bench.name, f"{method} against {judge['reference']}", "-", *counts])
    head = ["run", "method", "nats a token", "perplexity", "is the model's first choice", "tokens"]
    likelihoods = Table(head, rows, "First turns' answers under the plain model, at temperature 1")
    head = ["run", "judged", "score, of 10", "wins", "ties", "losses", "answers"]
    grades = Table(head, judged, "Scores, and pairs in both orders: a pair counts if both agree")
    if tables := [table for table in (likelihoods, grades) if table.rows]:
        yield Section("Quality", "", tables, {})


def differences(benches: Sequence[SavedBench]) -> Iterator[Section]:
    rows = []
    for name, _, _, figures in _methods(benches):
        for part in figures["differences"]:
            place = (part["question"], part["turn"] + 1, part["position"])
            rows.append([name, *map(str, place), f"{part['margin']:.4f}"])
    words = (
        "The first token at which an answer differs from the reference's, and the margin between the model's logits of "
        f"both: near 0, rounding decided a tie. {min(LISTED, len(rows))} of {len(rows)} are listed."
    )
    if rows:
        table = Table(["method", "question", "turn", "token", "logit margin"], rows[:LISTED])
        yield Section("Answers that differ from plain decoding", words, [table], {})


def setting(benches: Sequence[SavedBench]) -> Iterator[Section]:
    columns = {}
    for name, document, _ in benches:
        facts = {"measured": document["created"], "medusa": document["version"]}
        facts["model"] = document["backbone"]["id"]
        facts |= {key: document[key] for key in SETTINGS}
        facts |= {f"sampling {key}": value for key, value in document["sampling"].items()}
        columns[name] = facts | document["environment"]
    keys = list(dict.fromkeys(key for facts in columns.values() for key in facts))
    rows = [[key, *(str(facts.get(key, "-")) for facts in columns.values())] for key in keys]
    yield Section("Environment and versions", "", [Table(["", *columns], rows)], {})


PARTS = (gains, categories, positions, sweeps, quality, differences, setting)
