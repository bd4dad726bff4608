"""`medusa tree --budget auto`: measure what steps cost here, once a run, and find the tree that pays best."""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.table import Table

from medusa_cli import console, extras, options
from medusa_cli.assets import DEFAULT_MODEL
from medusa_cli.errors import UsageError, UserError, in_flags
from medusa_cli.options import LoadFlags, OutputFlags, follow
from medusa_cli.runs.accuracies import STAMP, Heads, check_current, find_heads, stamp_of
from medusa_cli.runs.io import Document
from medusa_cli.runs.provenance import describe_drafter
from medusa_cli.runs.run import Run, provenance, sole_writer

if TYPE_CHECKING:
    from medusa_cli.tree.search import Budget, Costs

# Shown beside the choice: a plain step, and the sizes that are fixed elsewhere.
BESIDE = (1, 4, 8, 16, 32, 64)


@dataclass(frozen=True)
class BudgetChoice:
    """The budget chosen, those shown beside it, and what dynamic trees go by."""

    chosen: "Budget"
    beside: "list[Budget]"
    break_even: float  # the chance from which on a further node pays

    def rows(self) -> list[dict[str, float]]:
        """Nodes, expected tokens a step, milliseconds a step and tokens a second of each, the chosen one first."""
        return [
            {
                "nodes": one.tree.size,
                "depth": one.tree.max_depth,
                "expected_acceptance_length": one.expected,
                "step_ms": 1e3 * one.seconds,
                "tokens_per_s": one.tokens_per_s,
            }
            for one in (self.chosen, *self.beside)
        ]

    def table(self) -> Table:
        table = Table(title="What sizes are expected to give on this machine")
        for column in ("nodes", "heads used", "tokens a step", "ms a step", "tokens/s"):
            table.add_column(column, justify="right")
        for number, row in enumerate(self.rows()):
            cells = (f"{row['nodes']}", f"{row['depth']}", f"{row['expected_acceptance_length']:.2f}")
            more = (f"{row['step_ms']:.1f}", f"{row['tokens_per_s']:.1f}")
            table.add_row(*cells, *more, style="bold green" if number == 0 else None)
        return table


def find_budget(
    target: Run | None, heads: Heads, calibration: Path | None, again: bool, place: LoadFlags
) -> BudgetChoice:
    """The best budget for the heads of a run (None: those that ship), steps timed unless the run has their times.

    UserError without accuracies or without a drafter to time.
    """
    from medusa_cli.tree.search import break_even, budgets

    source = target or (Run.pretrained(DEFAULT_MODEL) if calibration is None else None)
    if source is None or not (source.drafter_dir / "config.json").is_file():
        raise UserError("--budget auto needs a drafter to time", "give the --run that holds one")
    if not heads.accuracies:
        raise UserError(f"the run {source.path} has no calibration.json", "run `medusa calibrate` first")
    check_current(heads)
    costs = _costs(source, again, place)
    shown = budgets(heads.accuracies, costs)
    chosen = max(shown, key=lambda one: one.tokens_per_s)
    beside = [one for one in shown if one.tree.size in BESIDE]
    if target is not None:
        from medusa_cli.tree.draw import draw_costs

        if extras.has("matplotlib"):
            draw_costs(costs, shown, chosen, target.path / "step_cost.png")
    return BudgetChoice(chosen, beside, break_even(chosen, costs))


def _costs(source: Run, again: bool, place: LoadFlags) -> "Costs":
    """Load model and drafter; what their steps cost here."""
    from medusa_cli.decode.costs import ROUNDS, SIZES, costs_for
    from medusa_cli.drafters import load_drafter
    from medusa_cli.engine import load_backbone

    model = str(describe_drafter(source.drafter_dir).provenance.identity.get("id") or DEFAULT_MODEL)
    console.info(f"Timing steps of {place.of(model)}")
    backbone = load_backbone(model, follow(source.drafter_dir, place), adapter=source.adapter)
    drafter = load_drafter(source.drafter_dir, backbone)
    total = (ROUNDS + 1) * (len(SIZES) + drafter.num_heads)
    with console.progress("timing", total=total, unit="steps") as bar:
        return costs_for(backbone, drafter, stamp_of(source.drafter_dir), again=again, on_progress=bar.advance)


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
    place: LoadFlags,
    said: OutputFlags,
) -> None:
    """Find the tree of guesses that is expected to accept most, draw it and save it.

    With --budget, the best tree of that many nodes for the accuracies `medusa calibrate` measured; with --budget
    auto the size, too, is found, from the time that steps take on this machine. Typed bare it takes the accuracies
    of the default run, or else of the drafter that ships, whose tree is drawn but not saved.
    """
    said.configure()
    from medusa_cli.tree.search import make_tree, missing_accuracies, parse_budget, parse_shape

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
        found = find_budget(target, used, calibration, measure, place)
        made, recipe = found.chosen.tree, {"budget": "auto", "step_ms": round(1e3 * found.chosen.seconds, 2)}
        recipe["break_even"] = round(found.break_even, 4)
    else:
        found = None
        made, recipe = make_tree(used, parse_budget(budget), widths, choices, source, run)
    if heads is not None and made.max_depth > heads:
        made = made.truncate(heads)
    console.info(_first_line(made.size, recipe, used, source))
    notes = [in_flags(note) for note in missing_accuracies(made.widths, known)]
    for note in notes:
        console.warn(note)

    from medusa_cli.tree.draw import draw_picture, draw_terminal
    from medusa_cli.tree.io import save_tree
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
