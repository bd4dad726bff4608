"""The report of one or more benches: one HTML page that needs nothing beside it, and Markdown."""

from collections.abc import Sequence
from pathlib import Path

from medusa_cli import __version__
from medusa_cli.benchmarks import background, sections
from medusa_cli.benchmarks.escaped import escaped, row_of
from medusa_cli.benchmarks.pieces import SavedBench, Section, Table
from medusa_cli.benchmarks.trade_off import trade_off


def contents(sources: Sequence[SavedBench]) -> list[Section]:
    """Everything that can be said of these runs, in reading order."""
    found = [
        sections.headline(sources),
        *sections.categories(sources),
        sections.decomposition(sources),
        trade_off(sources),
        sections.depths(sources),
        sections.trees(sources),
        background.step_costs(sources),
        background.sweeps(sources),
        background.quality(sources),
        sections.parting(sources),
        background.heads(sources),
        background.training(sources),
        sections.setting(sources),
    ]
    return [one for one in found if one is not None]


def html(sources: Sequence[SavedBench], parts: Sequence[Section] | None = None) -> str:
    """The page: style, charts and the sorting of tables are in it, so it opens offline and can be sent by mail."""
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    place = Environment(
        loader=FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    return place.get_template("page.html.jinja").render(
        title=title_of(sources), sources=sources, parts=parts or contents(sources), version=__version__
    )


def markdown(sources: Sequence[SavedBench], parts: Sequence[Section] | None = None) -> str:
    """The same words and tables; the charts are in the page alone."""
    lines = [f"# {escaped(title_of(sources))}", ""]
    for source in sources:
        label = f"**{escaped(source.name)}.** " if len(sources) > 1 else ""
        lines += [label + escaped(" ".join(source.document["facts"])), ""]
    for part in parts or contents(sources):
        lines += [f"## {escaped(part.title)}", ""]
        lines += [escaped(part.words), ""] if part.words else []
        for table in part.tables:
            lines += [f"{escaped(table.caption)}:", ""] if table.caption else []
            lines += [*_grid(table), ""]
    return "\n".join(lines).rstrip() + "\n"


def title_of(sources: Sequence[SavedBench]) -> str:
    """The questions' name, and the runs' where there are several."""
    titles = ", ".join(dict.fromkeys(str(source.document["title"]) for source in sources))
    return titles if len(sources) == 1 else f"{titles}: {', '.join(source.name for source in sources)}"


def _grid(table: Table) -> list[str]:
    rows = [table.head, ["---"] * len(table.head), *table.rows]
    return list(map(row_of, rows))
