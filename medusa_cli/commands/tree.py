"""`medusa tree`: accuracies and a budget of nodes in, the tree out: drawn, saved and judged."""

from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table

from medusa_cli import console, extras, options
from medusa_cli.commands.groups import Said, Where, but
from medusa_cli.errors import UsageError, in_flags
from medusa_cli.runs.accuracies import STAMP, Heads, find_heads
from medusa_cli.runs.lock import sole_writer
from medusa_cli.runs.reading import Document
from medusa_cli.runs.run import provenance

DRAWN_NODES = 256
PICTURES = (".png", ".svg")


def tree(
    asked: typer.Context,
    *,
    run: options.RunOrDefault = None,
    calibration: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", dir_okay=False, help="From `medusa calibrate`. [default: the run's calibration.json]"
        ),
    ] = None,
    budget: Annotated[
        str | None,
        typer.Option(
            metavar="N|auto",
            help="Nodes of the tree, the root included; auto times steps here and takes the size that is expected "
            "to give most tokens a second. [default: 64]",
        ),
    ] = None,
    shape: Annotated[
        str | None,
        typer.Option(metavar="W1,W2,...", help="All paths over the best W1 guesses of head 1, W2 of head 2, ..."),
    ] = None,
    choices: Annotated[
        Path | None,
        typer.Option(metavar="FILE", dir_okay=False, help="A tree file or medusa_choices list to draw and save."),
    ] = None,
    heads: Annotated[int | None, typer.Option(metavar="K", help="Use the first K heads only. [default: all]")] = None,
    output: Annotated[
        Path | None,
        typer.Option(metavar="FILE", dir_okay=False, help="Where to save it. [default: the run's tree.json]"),
    ] = None,
    picture: Annotated[
        Path | None,
        typer.Option(metavar="FILE", dir_okay=False, help="Where to draw it, .png or .svg. [default: beside the tree]"),
    ] = None,
    measure: Annotated[
        bool, typer.Option("--measure", help="With --budget auto: time the steps again though the run has them.")
    ] = False,
    place: Annotated[Where, but("load_in_4bit", "load_in_8bit")],
    said: Said,
) -> None:
    """Find the tree of guesses that is expected to accept most, draw it and save it.

    With --budget, the best tree of that many nodes for the accuracies `medusa calibrate` measured; with --budget
    auto the size, too, is found, from the time that steps take on this machine. Typed bare it takes the accuracies
    of the default run, or else of the drafter that ships, whose tree is drawn but not saved.
    """
    said.configure()
    from medusa_cli.tree.asked import lacks, make_tree, parse_budget, parse_shape

    ways = {"--budget": budget, "--shape": shape, "--choices": choices}
    given = [flag for flag, value in ways.items() if value is not None]
    if len(given) > 1:
        raise UsageError(f"{' and '.join(given)} exclude each other", "give one of them")
    if picture is not None and picture.suffix.lower() not in PICTURES:
        raise UsageError(f"--picture {str(picture)!r} is no {' or '.join(PICTURES)} file", "give such a name")
    widths = parse_shape(shape) if shape is not None else None
    if picture is not None:
        extras.need("plot", "--picture")
    target, known, source = find_heads(run, calibration)
    if target is not None and output is None:
        asked.with_resource(sole_writer(target.path, "medusa tree", console.warn))
    used = known.first(heads)
    if budget == "auto":
        from medusa_cli.commands.budget import find_budget

        found = find_budget(target, used, calibration, measure, place)
        made, recipe = found.chosen.tree, {"budget": "auto", "step_ms": round(1e3 * found.chosen.seconds, 2)}
        recipe["break_even"] = round(found.break_even, 4)
    else:
        found = None
        made, recipe = make_tree(used, parse_budget(budget), widths, choices, source, run)
    if heads is not None and made.max_depth > heads:
        made = made.cut(heads)
    console.info(_first_line(made.size, recipe, used, source))
    notes = [in_flags(note) for note in lacks(made.widths, known)]
    for note in notes:
        console.warn(note)

    from medusa_cli.tree.draw import draw_picture, draw_terminal
    from medusa_cli.tree.saved import save_tree
    from medusa_cli.tree.search import expected_length

    expected = expected_length(made, used.accuracies) if used.accuracies else None
    measured = str(known.source) if known.source else None
    output = output or (target.tree_path if target else None)
    picture = picture or (output.with_suffix(".png") if output and extras.has("matplotlib") else None)
    if output is not None:
        facts = {"calibration": measured, "expected_acceptance_length": expected, **recipe}
        searched = widths is None and choices is None
        save_tree(output, made, provenance(known.backbone, **facts, **({STAMP: known.drafter} if searched else {})))
    if picture is not None:
        draw_picture(made, picture, used.accuracies or None)
    per_depth = [made.depths.count(depth) for depth in range(made.max_depth + 1)]
    if said.json:
        report = {
            "nodes": made.size,
            "nodes_per_depth": per_depth,
            "expected_acceptance_length": expected,
            "heads": used.count,
            "calibration": measured,
            "output": str(output) if output else None,
            "picture": str(picture) if picture else None,
            "warnings": notes,
        }
        if found is not None:
            report["budgets"] = found.rows()
        console.emit_json({**report, **made.to_json(), "choices": made.choices})
        return
    if made.size <= DRAWN_NODES:
        console.result(draw_terminal(made, used.accuracies or None))
    else:
        console.info(f"{made.size:,} nodes are too many to draw here; see the picture")
    console.result(_table(per_depth, made.widths))
    if found is not None:
        console.result(found.table())
    length = "unknown without a calibration" if expected is None else f"{expected:.2f} tokens a step"
    console.result(f"{made.size:,} nodes, expected acceptance length: {length}")
    saved = " and ".join(str(path) for path in (output, picture) if path is not None)
    console.result(f"saved: {saved}" if saved else "not saved; give --output FILE or --picture FILE to keep it")


def _first_line(nodes: int, recipe: Document, used: Heads, source: str) -> str:
    way, value = next(iter(recipe.items()))
    shown = ",".join(map(str, value)) if isinstance(value, list) else value
    whose = "" if used.count is None else f" for {source}: {used.count} heads"
    measured = f"top {max(map(len, used.accuracies))}" if used.accuracies else "not calibrated"
    return f"{nodes:,} nodes (--{way} {shown}){whose}, {measured}; --budget N makes another size"


def _table(per_depth: list[int], widths: tuple[int, ...]) -> Table:
    used = ["root", *(f"top {width}" for width in widths)]
    rows = ((str(depth), str(count), used[depth]) for depth, count in enumerate(per_depth))
    return console.grid("Nodes per depth", ("depth", "nodes", "guesses used"), rows)
