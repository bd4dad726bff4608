"""Reports: saved benches as one HTML page that needs no network, and as Markdown."""

import io
import itertools
import re
import textwrap
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from html import escape
from pathlib import Path
from typing import Any, NamedTuple

from medusa_cli import __version__
from medusa_cli.errors import UserError, first_line
from medusa_cli.runs.io import Document, read_object, write_atomic
from medusa_cli.tree.draw import draw_nodes
from medusa_cli.tree.tree import Tree

MARKERS = "osD^vPX*"
LISTED = 40  # differences in the table
Interval = tuple[float, float] | None
Curve = Sequence[tuple[float, float, Interval]]  # x, y and y's interval
LENGTH = "acceptance length (tokens a step)"


class SavedBench(NamedTuple):
    """A saved bench with the sweeps beside it; `name` tells it from the report's other benches."""

    name: str
    document: Document
    sweeps: list[Document]


class Chart(NamedTuple):
    """A drawing on matplotlib's axes, made when the page is."""

    title: str
    draw: Callable[[Any], None]
    width: float = 5.2  # inches
    height: float = 3.4


class Table(NamedTuple):
    head: list[str]
    rows: list[list[str]]
    caption: str = ""


@dataclass
class Section:
    title: str
    words: str = ""
    tables: list[Table] = field(default_factory=list)
    charts: list[Chart] = field(default_factory=list)


def read_bench(path: Path) -> Document:
    """Reads a saved bench; raises UserError for a file that holds none."""
    document = read_object(path, "the bench")
    if not isinstance(document.get("methods"), dict) or not document["methods"] or "baseline" not in document:
        raise UserError(f"{path} is not a bench", "give a run, or a JSON file that `medusa bench` wrote")
    return document


def write_report(paths: Mapping[str, Path], page: Path, with_page: bool = True) -> list[Path]:
    """Writes the page of benches by name, unless it is not wanted, and the Markdown beside it; returns their paths.

    Raises UserError for figures that no bench writes: a file may hold anything.
    """
    try:
        benches = []
        for name, path in paths.items():
            sweeps = [read_object(sweep, "the sweep") for sweep in sorted(path.parent.glob("sweep-*.json"))]
            benches.append(SavedBench(name, read_bench(path), sweeps))
        sections = list(itertools.chain.from_iterable(part(benches) for part in PARTS))
        texts = {page: html(benches, sections)} if with_page else {}
        texts[page.with_suffix(".md")] = markdown(benches, sections)
    except (LookupError, TypeError, ValueError, AttributeError, ArithmeticError) as reason:
        files, text = " or ".join(map(str, paths.values())), f"{type(reason).__name__}: {first_line(reason)}"
        raise UserError(f"{files} holds figures that no bench writes ({text})", "run `medusa bench` again") from reason
    for path, content in texts.items():
        write_atomic(path, content)
    return list(texts)


def html(benches: Sequence[SavedBench], sections: Sequence[Section]) -> str:
    """Returns the page; style and charts are in it, so it opens offline and can be sent by mail."""
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    folder = FileSystemLoader(Path(__file__).parent)
    jinja = Environment(loader=folder, autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    numbers = itertools.count(1)
    drawn = [(section, [svg(chart, next(numbers)) for chart in section.charts]) for section in sections]
    template = jinja.get_template("page.html.jinja")
    return template.render(title=_title(benches), benches=benches, parts=drawn, version=__version__)


def markdown(benches: Sequence[SavedBench], sections: Sequence[Section]) -> str:
    """Returns the same words and tables; charts are in the page only."""
    lines = [f"# {_inline(_title(benches))}", ""]
    for bench in benches:
        name = f"**{_inline(bench.name)}.** " if len(benches) > 1 else ""
        lines += [name + _inline(" ".join(bench.document["facts"])), ""]
    for section in sections:
        lines += [f"## {_inline(section.title)}", "", *([_inline(section.words), ""] if section.words else [])]
        for table in section.tables:
            lines += [f"{_inline(table.caption)}:", ""] if table.caption else []
            rows = [table.head, ["---"] * len(table.head), *table.rows]
            lines += ["| " + " | ".join(map(_inline, row)) + " |" for row in rows] + [""]
    return "\n".join(lines).rstrip() + "\n"


def _inline(text: str) -> str:
    """Returns a text on one line, in which nothing reads as HTML or ends a table's cell."""
    return escape(" ".join(text.split()), quote=False).replace("|", "\\|")


def _title(benches: Sequence[SavedBench]) -> str:
    titles = ", ".join(dict.fromkeys(str(bench.document["title"]) for bench in benches))
    return titles if len(benches) == 1 else f"{titles}: {', '.join(bench.name for bench in benches)}"


def svg(chart: Chart, number: int) -> str:
    """Returns a chart as inline SVG: text stays text, and its ids are unlike those of the page's other charts."""
    import matplotlib
    from matplotlib.figure import Figure

    # Names are of people's choosing, and some hold dollars: no text is mathematics.
    style = {"svg.fonttype": "none", "text.parse_math": False, "axes.spines.top": False, "axes.spines.right": False}
    with matplotlib.rc_context({**style, "axes.grid": True, "grid.alpha": 0.3, "font.size": 10.0}):
        figure = Figure(figsize=(chart.width, chart.height), layout="constrained")
        axes = figure.subplots()
        axes.set_axisbelow(True)
        axes.set_title(textwrap.fill(chart.title, int(10.4 * chart.width)), fontsize=10.5)
        chart.draw(axes)
        handles = dict(zip(*reversed(axes.get_legend_handles_labels()), strict=True))
        if len(handles) > 1:
            place: Any = {"loc": "outside lower center", "ncols": min(3, len(handles)), "fontsize": 9, "frameon": False}
            figure.legend(handles.values(), handles.keys(), **place)
        stream = io.StringIO()
        figure.savefig(stream, format="svg", metadata=dict.fromkeys(("Date", "Creator", "Format", "Type")))
    text = stream.getvalue()
    text = re.sub(r'(\bid="|href="#|url\(#)', rf"\1c{number}-", text[text.index("<svg") :])
    return text.replace("<svg ", f'<svg role="img" aria-label="{escape(chart.title)}" ', 1)


def bars(
    title: str, groups: Mapping[str, Mapping[str, Mapping[str, Any]]], key: str, unit: str, order: list[str]
) -> Chart:
    """Returns a chart of a figure of methods by group: horizontal bars with whiskers, a dotted line at 1."""

    def draw(axes: Any) -> None:
        y, ticks = 0.0, []
        for group, methods in groups.items():
            ticks.append((y + (len(methods) - 1) / 2, group))
            for name, figures in methods.items():
                value, interval = figures[key], figures[f"{key}_95"] or (figures[key], figures[key])
                axes.barh(y, value, 0.8, color=f"C{order.index(name) % 10}", label=name)
                whiskers = [[max(value - interval[0], 0)], [max(interval[1] - value, 0)]]
                axes.errorbar(value, y, xerr=whiskers, color="black", capsize=2.5, linewidth=1)
                end = (max(value, interval[1]), y)
                axes.annotate(f"{value:.2f}", end, (4, 0), textcoords="offset points", va="center")
                y += 1
            y += 0.6
        axes.axvline(1, color="gray", linewidth=0.8, linestyle=":")
        axes.set_yticks(*zip(*ticks, strict=True))
        axes.invert_yaxis()
        axes.margins(x=0.14)
        axes.set_xlabel(unit)

    return Chart(title, draw, height=1.4 + 0.27 * sum(len(methods) + 0.6 for methods in groups.values()))


def draw_curves(axes: Any, curves: Mapping[str, Curve], x: str, y: str, log: bool = False) -> None:
    """Draws lines with their intervals as bands. log: the x axis doubles between ticks."""
    for number, (name, points) in enumerate(curves.items()):
        marks = {"marker": MARKERS[number % len(MARKERS)], "linestyle": ("-", "--", "-.", ":")[number // 8 % 4]}
        color = f"C{number % 10}"
        axes.plot([p[0] for p in points], [p[1] for p in points], color=color, label=name, markersize=4, **marks)
        bands = [(p[0], *p[2]) for p in points if p[2] is not None]
        if len(bands) > 1:
            axes.fill_between(*zip(*bands, strict=True), color=color, alpha=0.16, linewidth=0)
    ticks = sorted({point[0] for points in curves.values() for point in points})
    if log:
        axes.set_xscale("log", base=2)
        axes.minorticks_off()
    if log and len(ticks) <= 12 or all(tick == int(tick) for tick in ticks) and len(ticks) <= 8:
        axes.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
    axes.set_ylim(bottom=0)
    axes.set(xlabel=x, ylabel=y)


def _with_interval(figures: Mapping[str, Any], key: str, form: str = ".2f") -> str:
    value, interval = figures[key], figures[f"{key}_95"]
    return f"{value:{form}}" if interval is None else f"{value:{form}} ({interval[0]:{form}} to {interval[1]:{form}})"


def _cell(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)


def _methods(benches: Sequence[SavedBench]) -> Iterator[tuple[str, Document, str, dict[str, Any]]]:
    """Yields every method with its name in the report, its bench's document, its name there, and its figures."""
    for bench in benches:
        for method, figures in bench.document["methods"].items():
            yield (method if len(benches) == 1 else f"{bench.name}: {method}"), bench.document, method, figures


def gains(benches: Sequence[SavedBench]) -> Iterator[Section]:
    rows = []
    for name, document, method, figures in _methods(benches):
        identical = "-" if figures["identical"] is None else f"{figures['identical']}/{figures['questions']}"
        if figures["identical"] is not None and method == document["reference"]:
            identical = "reference"
        row = [name, _with_interval(figures, "tokens_per_s", ".1f"), _with_interval(figures, "speedup")]
        row += [_with_interval(figures, "acceptance_length") if figures["step_ms"] is not None else "-"]
        row += [_cell(figures["overhead"], ".2f"), _cell(figures["step_ms"], ".1f")]
        rows.append([*row, _cell(figures["draft_share"], ".1%"), identical, f"{figures['tokens']:,}"])
    head = ["method", "tokens/s", "speedup", "acceptance length", "overhead", "step, ms", "drafting"]
    base = ", ".join(dict.fromkeys(str(bench.document["baseline"]) for bench in benches))
    words = (
        f"Speedup is tokens/s over those of {base} in the same run. The acceptance length is the tokens a verified "
        "step gives, the model's own included. Overhead is the time of such a step over a plain step. In brackets and "
        "as whiskers: 95 % bootstrap intervals over questions."
    )
    groups = {bench.name: bench.document["methods"] for bench in benches}
    order = list(dict.fromkeys(name for methods in groups.values() for name in methods))
    chart = bars(f"Speedup over {base}", groups, "speedup", "x", order)
    yield Section("What it gains", words, [Table([*head, "identical answers", "tokens"], rows)], [chart])


def categories(benches: Sequence[SavedBench]) -> Iterator[Section]:
    every = list(_methods(benches))
    known = list(dict.fromkeys(category for *_, figures in every for category in figures["per_category"]))
    faster = {name: f["per_category"] for name, document, method, f in every if method != document["baseline"]}
    drafted = {name: f["per_category"] for name, document, method, f in every if method in document["drafting"]}
    for title, key, unit, methods in (
        ("Speedup", "speedup", "x", faster),
        ("Acceptance length", "acceptance_length", LENGTH, drafted),
    ):
        if len(known) < 2 or not methods:
            continue
        groups = {}
        for category in known:
            if part := {name: figures[category] for name, figures in methods.items() if category in figures}:
                groups[f"{category} ({max(figures['questions'] for figures in part.values())})"] = part
        rows = [
            [c, *(_with_interval(part[n], key) if n in part else "-" for n in methods)] for c, part in groups.items()
        ]
        chart = bars(f"{title} by category (questions)", groups, key, unit, list(methods))
        yield Section(f"{title} by category", "", [Table(["category (questions)", *methods], rows)], [chart])


def decomposition(benches: Sequence[SavedBench]) -> Iterator[Section]:
    rows = []
    for name, document, _, figures in _methods(benches):
        if "ar" in document["methods"] and figures["overhead"] is not None:
            length, overhead = figures["acceptance_length"], figures["overhead"]
            engine, drafts = document["methods"]["ar"]["speedup"], length / overhead
            values = (engine, length, overhead, drafts, figures["speedup"] / (engine * drafts), figures["speedup"])
            rows.append([name, *(f"{value:.2f}" for value in values)])
    if rows:
        head = ["method", "engine: ar over baseline", "acceptance length", "overhead", "length / overhead"]
        words = (
            "Drafts gain acceptance length / overhead. The engine's own gain is that of our plain loop over the "
            "baseline. The rest is the prefill, which drafts do not shorten, and the time between steps."
        )
        table = Table([*head, "prefill and the rest", "speedup over baseline"], rows)
        yield Section("Where the gain comes from", words, [table])


def positions(benches: Sequence[SavedBench]) -> Iterator[Section]:
    curves: dict[str, Curve] = {}
    rows = []
    for name, document, method, figures in _methods(benches):
        if method in document["drafting"] or method == "lookup":
            shares = figures["by_position"]
            curves[name] = [(0, 1.0, None), *((k, s["reached"], s["reached_95"]) for k, s in enumerate(shares, 1))]
            cells = [[str(k), f"{s['reached']:.1%}", f"{s['after']:.1%}"] for k, s in enumerate(shares, 1)]
            rows += [[name, *row, f"{sum(figures['depths']):,}"] for row in cells]
    if rows:
        words = (
            "Share of steps that accepted a draft token at position k: of all steps, as vLLM and SPEED-Bench count; of "
            "those that had accepted position k - 1, EAGLE's k-alpha."
        )
        draw = partial(draw_curves, curves=curves, x="k, position of the draft token", y="share of steps")
        table = Table(["method", "position", "of all steps", "of those before", "steps"], rows)
        chart = Chart("Steps that accepted at least k draft tokens", draw)
        yield Section("Acceptance by position", words, [table], [chart])


def trees(benches: Sequence[SavedBench]) -> Iterator[Section]:
    charts = []
    for name, document, method, figures in _methods(benches):
        saved, hits = document["drafting"].get(method, {}).get("static_tree"), figures["hits"]
        if saved is not None and len(saved["parents"]) == len(hits):
            tree = Tree.from_json(saved)
            draw = partial(draw_nodes, tree=tree, values=[count / max(hits[0], 1) for count in hits])
            width = max(5.2, 0.3 * len(tree.leaves) + 1.2)
            charts.append(Chart(f"{name}: {hits[0]:,} steps", draw, width, 0.9 + 0.85 * tree.max_depth))
    if charts:
        words = "Static trees; the darker a node, the more steps accepted it. Numbers are ranks."
        yield Section("Which nodes of the tree were accepted", words, charts=charts)


def passes(benches: Sequence[SavedBench]) -> Iterator[Section]:
    section = Section("What a step costs", "The weights are read once a pass: at the bandwidth of a copy, no faster.")
    for bench in benches:
        if not (rows := bench.document.get("rows")):
            continue
        times = sorted((int(count), ms) for count, ms in rows["step_ms"].items())
        limit = 1e3 * rows["weight_bytes"] / rows["copy_bytes_per_s"]
        cells = [[str(count), f"{ms:.1f}", f"{ms / times[0][1]:.2f}", f"{limit:.1f}"] for count, ms in times]
        head = ["rows", "ms a pass", "over one row", "reading the weights, ms"]
        section.tables.append(Table(head, cells, f"{bench.name}: {rows['engine']}"))
        curves = {rows["engine"]: [(count, ms, None) for count, ms in times]}
        curves["reading the weights"] = [(count, limit, None) for count, _ in times]
        title = f"{bench.name}: a pass by rows, {rows['context']} tokens in the cache, median of {rows['rounds']}"
        draw = partial(draw_curves, curves=curves, x="rows (nodes)", y="ms a pass", log=True)
        section.charts.append(Chart(title, draw))
    if section.charts:
        yield section


def sweeps(benches: Sequence[SavedBench]) -> Iterator[Section]:
    section = Section("Sweeps")
    for name, sweep in [(bench.name, sweep) for bench in benches for sweep in bench.sweeps]:
        rows = []
        for point in sweep["points"]:
            row = [point["series"], f"{point['x']:g}", _with_interval(point, "tokens_per_s", ".1f")]
            row += [_with_interval(point, "acceptance_length"), _cell(point["nll"], ".3f"), str(point["questions"])]
            rows.append(row)
        head = ["series", sweep["unit"], "tokens/s", "acceptance length", "nats a token", "questions"]
        section.tables.append(Table(head, rows, f"{name}: {sweep['axis']}, measured {sweep['created'][:10]}"))
        for key, y in (("acceptance_length", LENGTH), ("tokens_per_s", "tokens/s"), ("nll", "nats a token")):
            curves: dict[str, list[tuple[float, float, Interval]]] = {}
            for point in sweep["points"]:
                if point[key] is not None:
                    curves.setdefault(point["series"], []).append((point["x"], point[key], point.get(f"{key}_95")))
            log = sweep["axis"] in ("nodes", "batch", "context")
            draw = partial(draw_curves, curves=curves, x=sweep["unit"], y=y, log=log)
            if curves:
                section.charts.append(Chart(f"{name}: {y} by {sweep['axis']}", draw))
    if section.tables:
        yield section


def quality(benches: Sequence[SavedBench]) -> Iterator[Section]:
    rows, judged = [], []
    for bench in benches:
        for method, part in (bench.document.get("quality") or {}).items():
            cells = [f"{part['nll']:.3f}", f"{part['perplexity']:.2f}", f"{part['agreement']:.1%}"]
            rows.append([bench.name, method, *cells, f"{part['tokens']:,}"])
        judge = bench.document.get("judge") or {"single": {}, "pairs": {}}
        for method, grade in judge["single"].items():
            judged.append([bench.name, method, f"{grade['score']:.2f}", "-", "-", "-", str(grade["answers"])])
        for method, pairs in judge["pairs"].items():
            counts = [str(pairs[key]) for key in ("wins", "ties", "losses", "answers")]
            judged.append([bench.name, f"{method} against {judge['reference']}", "-", *counts])
    head = ["run", "method", "nats a token", "perplexity", "is the model's first choice", "tokens"]
    tables = [Table(head, rows, "First turns' answers under the plain model, at temperature 1")] if rows else []
    head = ["run", "judged", "score, of 10", "wins", "ties", "losses", "answers"]
    tables += [Table(head, judged, "Scores, and pairs in both orders: a pair counts if both agree")] if judged else []
    if tables:
        yield Section("Quality", "", tables)


def differences(benches: Sequence[SavedBench]) -> Iterator[Section]:
    compared = [(name, figures) for name, *_, figures in _methods(benches) if figures["identical"] is not None]
    rows = [
        [name, str(part["question"]), str(part["turn"] + 1), str(part["position"]), f"{part['margin']:.4f}"]
        for name, figures in compared
        for part in figures["differences"]
    ]
    words = "All answers are token for token the same."
    if rows:
        words = (
            "The first token at which an answer differs from the reference's, and the margin between the model's "
            f"logits of both: near 0, rounding decided a tie. {min(LISTED, len(rows))} of {len(rows)} are listed."
        )
    table = Table(["method", "question", "turn", "token", "logit margin"], rows[:LISTED])
    if compared:
        yield Section("Identity with plain decoding", words, [table] if rows else [])


def setting(benches: Sequence[SavedBench]) -> Iterator[Section]:
    columns = {}
    for name, document, _ in benches:
        facts = {"measured": document["created"], "medusa": document["version"], "model": document["backbone"]["id"]}
        facts |= {key: document[key] for key in ("dtype", "engine", "kernel", "device", "max_new_tokens", "batch_size")}
        facts |= {f"sampling {key}": value for key, value in document["sampling"].items()} | document["environment"]
        columns[name] = facts
    keys = list(dict.fromkeys(key for facts in columns.values() for key in facts))
    rows = [[key, *(str(facts.get(key, "-")) for facts in columns.values())] for key in keys]
    yield Section("Environment and versions", "", [Table(["", *columns], rows)])


PARTS = (gains, categories, decomposition, positions, trees, passes, sweeps, quality, differences, setting)
