"""`medusa tree`: finds the draft tree with the most expected tokens, draws it and saves it."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from medusa_cli import assets, console, options
from medusa_cli.assets import DEFAULT_MODEL
from medusa_cli.errors import UsageError, UserError, in_flags
from medusa_cli.options import LoadFlags, OutputFlags, flag
from medusa_cli.runs.resolve import as_trained, find_calibration
from medusa_cli.runs.run import STAMP, Run, provenance, sole_writer, stamp_of

if TYPE_CHECKING:
    from medusa_cli.tree.search import StepTimes

CALIBRATION = "From `medusa calibrate`. [default: the run's calibration.json]"
BUDGET = "Nodes, the root included; auto: the size with most expected tokens a second on this machine. [default: 64]"
CHOICES = "A tree file or medusa_choices list to draw and save."
OUTPUT = "Where to save it, and a picture beside it. [default: the run's tree.json]"
DRAWN_NODES = 256
# Sizes that are shown beside the chosen one: a plain step, and those that are usual elsewhere.
USUAL_SIZES = (1, 4, 8, 16, 32, 64)


def tree(
    ctx: typer.Context,
    *,
    run: options.RunOrDefault = None,
    calibration: Annotated[Path | None, flag("--calibration FILE", CALIBRATION, dir_okay=False)] = None,
    budget: Annotated[str | None, flag("--budget N|auto", BUDGET)] = None,
    shape: Annotated[str | None, flag("--shape W1,W2,...", "All paths over the best W1 guesses of head 1, ...")] = None,
    choices: Annotated[Path | None, flag("--choices FILE", CHOICES, dir_okay=False)] = None,
    heads: Annotated[int | None, flag("--heads K", "Use the first K heads only. [default: all]")] = None,
    output: Annotated[Path | None, flag("--output FILE", OUTPUT, dir_okay=False)] = None,
    measure: Annotated[bool, flag("--measure", "With --budget auto: time the steps again.")] = False,
    loading: LoadFlags,
    printing: OutputFlags,
) -> None:
    """Find the tree of guesses that is expected to accept most, draw it and save it.

    With --budget, the best tree of that many nodes for the accuracies `medusa calibrate` measured; with --budget
    auto the size, too, is found, from the time that steps take on this machine. Typed bare it takes the accuracies
    of the default run, or else of the drafter that ships, whose tree is drawn but not saved.
    """
    printing.configure()
    from medusa_cli.tree import search
    from medusa_cli.tree.draw import draw_picture, draw_terminal
    from medusa_cli.tree.io import save_tree

    sources = {"--budget": budget, "--shape": shape, "--choices": choices}
    given = [flag for flag, value in sources.items() if value is not None]
    if len(given) > 1:
        raise UsageError(f"{' and '.join(given)} exclude each other", "give one of them")
    widths = search.parse_shape(shape) if shape is not None else None
    target, known, source = find_calibration(run, calibration)
    if target is not None and output is None:
        ctx.with_resource(sole_writer(target.path, "medusa tree"))
    used, sizes = known.first(heads), list[dict[str, Any]]()
    if budget == "auto":
        timed = target or (Run.pretrained(DEFAULT_MODEL) if calibration is None else None)
        if timed is None or not (timed.drafter_dir / "config.json").is_file():
            raise UserError("--budget auto needs a drafter to time", "give the --run that holds one")
        if not used.accuracies:
            raise UserError(f"the run {timed.path} has no calibration.json", "run `medusa calibrate` first")
        used.check_current()
        step_times = time_run(timed, as_trained(loading, timed.drafter_dir), measure)
        budgets = search.budgets(used.accuracies, step_times)
        best = max(budgets, key=lambda size: size.tokens_per_s)
        chosen, chance = best.tree, round(search.break_even(best, step_times), 4)
        recipe = {"budget": "auto", "step_ms": round(1e3 * best.seconds, 2), "break_even": chance}
        for size in (best, *(size for size in budgets if size.tree.size in USUAL_SIZES)):
            row = {"nodes": size.tree.size, "depth": size.tree.max_depth, "expected_acceptance_length": size.expected}
            sizes.append({**row, "step_ms": 1e3 * size.seconds, "tokens_per_s": size.tokens_per_s})
    else:
        chosen, recipe = search.make_tree(used, search.parse_budget(budget), widths, choices, source, run)
    if heads is not None and chosen.max_depth > heads:
        chosen = chosen.truncate(heads)
    console.info(f"{chosen.size:,} nodes for {source}; --budget N makes another size")
    notes = [in_flags(note) for note in search.missing_accuracies(chosen.widths, known)]
    for note in notes:
        console.warn(note)

    expected = search.expected_length(chosen, used.accuracies) if used.accuracies else None
    calibrated = known.path
    output = output or (target.tree_path if target else None)
    picture = output.with_suffix(".png") if output and assets.has_package("matplotlib") else None
    if output is not None:
        facts = {"calibration": calibrated, "expected_acceptance_length": expected, **recipe}
        stamp = {STAMP: known.drafter_stamp} if widths is None and choices is None else {}  # a shape is no drafter's
        save_tree(output, chosen, provenance(known.backbone, **facts, **stamp))
    if picture is not None:
        draw_picture(chosen, picture, used.accuracies or None)
    per_depth = [chosen.depths.count(depth) for depth in range(chosen.max_depth + 1)]
    if printing.json:
        report = {
            "nodes": chosen.size,
            "nodes_per_depth": per_depth,
            "expected_acceptance_length": expected,
            "heads": used.heads,
            "calibration": calibrated,
            "output": str(output) if output else None,
            "picture": str(picture) if picture else None,
            "warnings": notes,
            "budgets": sizes,
        }
        console.emit_json({**report, **chosen.to_json(), "choices": chosen.choices})
        return
    if chosen.size <= DRAWN_NODES:
        console.result(draw_terminal(chosen, used.accuracies or None))
    else:
        console.info(f"{chosen.size:,} nodes are too many to draw here; see the picture")
    ranks = ("root", *(f"top {width}" for width in chosen.widths))
    rows = [(str(depth), str(count), ranks[depth]) for depth, count in enumerate(per_depth)]
    console.result(console.grid("Nodes per depth", ("depth", "nodes", "guesses used"), rows))
    if sizes:
        form = ("{nodes}", "{depth}", "{expected_acceptance_length:.2f}", "{step_ms:.1f}", "{tokens_per_s:.1f}")
        table = [tuple(cell.format(**row) for cell in form) for row in sizes]
        head = ("nodes", "heads used", "tokens a step", "ms a step", "tokens/s")
        console.result(console.grid("Sizes on this machine, the chosen size first", head, table))
    length = "unknown without a calibration" if expected is None else f"{expected:.2f} tokens a step"
    console.result(f"{chosen.size:,} nodes, expected acceptance length: {length}")
    saved = " and ".join(str(path) for path in (output, picture) if path is not None)
    console.result(f"saved: {saved}" if saved else "not saved; give --output FILE to keep it")


def time_run(run: Run, loading: LoadFlags, again: bool) -> "StepTimes":
    """Returns the times of a run's steps on this machine; they are timed unless they are kept, or `again`."""
    from medusa_cli.decode.step_times import step_times_for
    from medusa_cli.drafters import load_drafter
    from medusa_cli.engine import load_backbone
    from medusa_cli.runs.run import describe_drafter

    model = str(describe_drafter(run.drafter_dir).provenance.identity.get("id") or DEFAULT_MODEL)
    with console.progress("timing", unit="steps") as advance:
        backbone = load_backbone(model, loading, adapter=run.adapter)
        drafter = load_drafter(run.drafter_dir, backbone)
        return step_times_for(backbone, drafter, stamp_of(run.drafter_dir), again=again, on_progress=advance)
