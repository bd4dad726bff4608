"""`medusa tree`: finds the draft tree with the most expected tokens, draws it and saves it."""

import shlex
from dataclasses import dataclass, field
from itertools import accumulate
from operator import mul
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from medusa_cli import console, options
from medusa_cli.errors import UsageError, UserError, in_flags
from medusa_cli.files import extras
from medusa_cli.files.catalogue import DEFAULT_MODEL
from medusa_cli.options import LoadFlags, OutputFlags, flag, refuse
from medusa_cli.runs.load_options import as_trained
from medusa_cli.runs.resolve import Calibration, find_calibration
from medusa_cli.runs.run import DEFAULT_RUN, STAMP, Run, provenance, sole_writer, stamp_of

if TYPE_CHECKING:
    from medusa_cli.tree import Tree
    from medusa_cli.tree.search import StepTimes

CALIBRATION = "A file from `medusa calibrate`. [default: the run's calibration.json]"
BUDGET = "Nodes, the root included; auto: the number with the most expected tokens per second here. [default: 64]"
CHOICES = "A file with a tree, or with a medusa_choices list, to draw and save."
SHAPE = (
    "The tree of all paths over the W1 best guesses of head 1, the W2 best guesses of head 2, ..."
)
OUTPUT = "Where to save the tree, with a picture next to it. [default: the run's tree.json]"
DEFAULT_BUDGET = 64
DRAWN_NODES = 256
# Sizes to compare with the chosen size: 1 (a plain step), and sizes that are common elsewhere.
USUAL_SIZES = (1, 4, 8, 16, 32, 64)


@dataclass(frozen=True)
class Chosen:
    """A tree, the setting and drafter that made it, and the sizes that were compared with it."""

    tree: "Tree"
    made_by: dict[str, Any]
    sizes: list[dict[str, Any]] = field(default_factory=list)


def tree(
    ctx: typer.Context,
    *,
    run: options.RunOrDefault = None,
    calibration: Annotated[
        Path | None, flag("--calibration FILE", CALIBRATION, dir_okay=False)
    ] = None,
    budget: Annotated[str | None, flag("--budget N|auto", BUDGET)] = None,
    shape: Annotated[str | None, flag("--shape W1,W2,...", SHAPE)] = None,
    choices: Annotated[Path | None, flag("--choices FILE", CHOICES, dir_okay=False)] = None,
    heads: Annotated[
        int | None, flag("--heads K", "Use only the first K heads. [default: all]")
    ] = None,
    output: Annotated[Path | None, flag("--output FILE", OUTPUT, dir_okay=False)] = None,
    measure: Annotated[
        bool, flag("--measure", "With --budget auto: time the steps again.")
    ] = False,
    loading: LoadFlags,
    printing: OutputFlags,
) -> None:
    """Find the draft tree with the highest expected acceptance length, draw it and save it.

    With --budget N, it is the best tree of N nodes for the accuracies that `medusa calibrate` measured. --budget auto
    also chooses the size, from step times measured on this machine. Without options, the accuracies are those of the
    default run, or else those of the drafter that ships; the tree for that drafter is drawn but not saved.
    """
    printing.configure()
    from medusa_cli.tree.search import expected_length

    options.check_beside_picture(output)
    _check_sources(
        {"--budget": budget, "--shape": shape, "--choices": choices}, measure, loading.given
    )
    chosen = as_given(shape, choices)
    target, known, source = find_calibration(run, calibration)
    if target is not None and output is None:
        ctx.with_resource(sole_writer(target.path, "medusa tree"))
    used = known.first(heads)
    if chosen is None and budget == "auto":
        timed = target or (Run.pretrained(DEFAULT_MODEL) if calibration is None else None)
        chosen = by_time(used, timed, loading, measure)
    elif chosen is None:
        chosen = by_budget(used, budget, source, run)
    draft_tree = chosen.tree if heads is None else chosen.tree.truncate(heads)
    console.info(f"{draft_tree.size:,} nodes for {source}; --budget N makes another size")
    notes = [in_flags(note) for note in missing_accuracies(draft_tree.widths, known)]
    for note in notes:
        console.warn(note)

    expected = expected_length(draft_tree, used.accuracies) if used.accuracies else None
    output = output or (target.tree_path if target else None)
    picture = None
    if output is not None:
        facts = {"calibration": known.path, "expected_acceptance_length": expected}
        picture = _save(draft_tree, used, output, facts | chosen.made_by)
    report = {
        "nodes": draft_tree.size,
        "nodes_per_depth": [
            draft_tree.depths.count(depth) for depth in range(draft_tree.max_depth + 1)
        ],
        "expected_acceptance_length": expected,
        "heads": used.heads,
        "calibration": known.path,
        "output": output and str(output),
        "picture": picture and str(picture),
        "warnings": notes,
        "budgets": chosen.sizes,
    }
    if printing.json:
        console.emit_json({**report, **draft_tree.to_json(), "choices": draft_tree.choices})
    else:
        show(draft_tree, used, report)


def _check_sources(sources: dict[str, Any], measure: bool, loading: list[str]) -> None:
    """Raises UsageError for a tree from two sources, and for flags that only --budget auto uses."""
    given = [name for name, value in sources.items() if value is not None]
    if len(given) > 1:
        raise UsageError(f"{' and '.join(given)} exclude each other", "give one of them")
    if sources["--budget"] != "auto":
        timing = {"--measure": measure, **dict.fromkeys(loading, True)}
        refuse(timing, "has no effect without --budget auto", "leave it out")


def _save(tree: "Tree", used: Calibration, path: Path, facts: dict[str, Any]) -> Path | None:
    """Saves a tree, and a picture next to it if matplotlib is installed; returns the picture's path."""
    from medusa_cli.tree.draw import draw_picture
    from medusa_cli.tree.io import save_tree

    save_tree(path, tree, provenance(used.backbone, **facts))
    if not extras.has_package("matplotlib"):
        return None
    picture = path.with_suffix(".png")
    draw_picture(tree, picture, used.accuracies or None)
    return picture


def show(tree: "Tree", used: Calibration, report: dict[str, Any]) -> None:
    """Draws the tree and prints its report."""
    from medusa_cli.tree.draw import draw_terminal

    if tree.size <= DRAWN_NODES:
        console.result(draw_terminal(tree, used.accuracies or None))
    else:
        console.info(f"{tree.size:,} nodes are too many to draw here; see the picture")
    ranks = ("root", *(f"top {width}" for width in tree.widths))
    rows = [
        (str(depth), str(count), ranks[depth])
        for depth, count in enumerate(report["nodes_per_depth"])
    ]
    console.result(console.grid("Nodes per depth", ("depth", "nodes", "guesses used"), rows))
    if report["budgets"]:
        form = (
            "{nodes}",
            "{depth}",
            "{expected_acceptance_length:.2f}",
            "{step_ms:.1f}",
            "{tokens_per_s:.1f}",
        )
        table = [tuple(cell.format(**row) for cell in form) for row in report["budgets"]]
        head = ("nodes", "heads used", "tokens per step", "ms per step", "tokens/s")
        console.result(console.grid("Sizes on this machine, the chosen size first", head, table))
    expected = report["expected_acceptance_length"]
    length = (
        "unknown without a calibration" if expected is None else f"{expected:.2f} tokens per step"
    )
    console.result(f"{tree.size:,} nodes, expected acceptance length: {length}")
    saved = " and ".join(path for path in (report["output"], report["picture"]) if path is not None)
    console.result(f"saved: {saved}" if saved else "not saved; give --output FILE to keep it")


def as_given(shape: str | None, choices: Path | None) -> Chosen | None:
    """Returns the tree of --shape or --choices, which belongs to no drafter; None without these flags."""
    from medusa_cli.tree import Tree
    from medusa_cli.tree.io import load_tree

    if shape is not None:
        widths = parse_shape(shape)
        return Chosen(Tree.dense(widths), {"shape": widths})
    return None if choices is None else Chosen(load_tree(choices), {"choices": str(choices)})


def by_budget(used: Calibration, budget: str | None, source: str, run: str | None) -> Chosen:
    """Returns the best tree of `budget` nodes by the accuracies. source: says in errors where these come from."""
    from medusa_cli.tree.io import MAX_NODES
    from medusa_cli.tree.search import largest, search

    try:
        nodes = None if budget is None else int(budget)
    except ValueError as reason:
        fault = f"@budget {budget!r} is not a valid number of nodes"
        raise UsageError(fault, "give an integer, or auto") from reason
    if not used.accuracies:
        raise UserError(
            f"{source} has no calibration.json",
            f"run `medusa calibrate --run {shlex.quote(run or DEFAULT_RUN)}` first, or give @shape 4,3,2",
        )
    used.check_current()
    possible = largest(used.accuracies)
    if nodes is None:
        nodes = min(DEFAULT_BUDGET, possible)
    if MAX_NODES < nodes <= possible:
        fault = f"@budget {nodes} is more than one step can verify"
        raise UsageError(fault, f"use 1 to {MAX_NODES:,}")
    return Chosen(search(used.accuracies, nodes), {"budget": nodes, STAMP: used.drafter_stamp})


def by_time(used: Calibration, run: Run | None, loading: LoadFlags, again: bool) -> Chosen:
    """Returns the tree of the size with the most expected tokens per second on this machine."""
    from medusa_cli.tree.search import budgets

    if run is None or not run.has_drafter:
        raise UserError("--budget auto needs a drafter to time", "give the --run that holds one")
    if not used.accuracies:
        fault = f"the run {run.path} has no calibration.json"
        raise UserError(fault, f"run `medusa calibrate --run {run.argument}` first")
    used.check_current()
    step_times = time_run(run, as_trained(loading, run.drafter_dir), again)
    timed = budgets(used.accuracies, step_times)
    best = max(timed, key=lambda size: size.tokens_per_s)
    made_by = {"budget": "auto", "step_ms": round(1e3 * best.seconds, 2), STAMP: used.drafter_stamp}
    sizes = [
        {
            "nodes": size.tree.size,
            "depth": size.tree.max_depth,
            "expected_acceptance_length": size.expected,
            "step_ms": 1e3 * size.seconds,
            "tokens_per_s": size.tokens_per_s,
        }
        for size in (best, *(size for size in timed if size.tree.size in USUAL_SIZES))
    ]
    return Chosen(best.tree, made_by, sizes)


def time_run(run: Run, loading: LoadFlags, again: bool) -> "StepTimes":
    """Returns the times of a run's steps on this machine; they are measured if none are stored, or if `again`."""
    from medusa_cli.decode.step_times import step_times_for
    from medusa_cli.drafters import load_drafter
    from medusa_cli.engine import load_backbone
    from medusa_cli.runs.run import describe_drafter

    model = str(describe_drafter(run.drafter_dir).provenance.identity.get("id") or DEFAULT_MODEL)
    with console.bars() as show:
        backbone = load_backbone(model, loading, adapter=run.adapter)
        drafter = load_drafter(run.drafter_dir, backbone)
        stamp = stamp_of(run.drafter_dir)
        return step_times_for(backbone, drafter, stamp, again=again, show=show)


def parse_shape(text: str) -> list[int]:
    """Returns widths such as 4,3,2; raises UsageError unless all are >= 1 and make a tree of at most MAX_NODES."""
    from medusa_cli.tree.io import MAX_NODES

    try:
        widths = [int(part) for part in text.split(",")]
    except ValueError as reason:
        fault = f"@shape {text!r} is not a valid list of numbers"
        raise UsageError(fault, "give widths such as 4,3,2") from reason
    nodes = 1 + sum(accumulate(widths, mul))
    if min(widths) < 1 or nodes > MAX_NODES:
        fault = f"@shape {text!r} is not 1 to {MAX_NODES:,} nodes"
        raise UsageError(fault, "give widths such as 4,3,2")
    return widths


def missing_accuracies(widths: tuple[int, ...], known: Calibration) -> list[str]:
    """Returns notes on accuracies that a tree needs, but that are outdated, not measured, or of a missing head."""
    notes = []
    if known.stale:
        notes.append(
            f"{known.path} was measured on an earlier drafter of this run: so is the expected length"
        )
    if known.heads is not None and len(widths) > known.heads:
        notes.append(
            f"the tree is {len(widths)} deep, there are {known.heads} heads; @heads {known.heads} truncates it"
        )
    for head, (width, row) in enumerate(zip(widths, known.accuracies, strict=False), start=1):
        if width > len(row):
            notes.append(
                f"head {head}: the tree uses {width} guesses, {len(row)} were calibrated; the others count 0"
            )
    return notes
