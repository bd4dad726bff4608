"""`medusa tree --budget auto`: measure what steps cost here, once a run, and find the tree that pays best."""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from rich.table import Table

from medusa_cli import console, extras
from medusa_cli.assets import DEFAULT_MODEL
from medusa_cli.commands.groups import Where
from medusa_cli.commands.loading import follow
from medusa_cli.errors import UserError
from medusa_cli.runs.accuracies import Heads, check_current, stamp_of
from medusa_cli.runs.made import describe_drafter
from medusa_cli.runs.run import Run

if TYPE_CHECKING:
    from medusa_cli.tree.budget import Budget, Costs

# Shown beside the choice: a plain step, and the sizes that are fixed elsewhere.
BESIDE = (1, 4, 8, 16, 32, 64)


@dataclass(frozen=True)
class Found:
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


def find_budget(target: Run | None, heads: Heads, calibration: Path | None, again: bool, place: Where) -> Found:
    """The best budget for the heads of a run (None: those that ship), steps timed unless the run has their times.

    UserError without accuracies or without a drafter to time.
    """
    from medusa_cli.tree.budget import break_even, budgets

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
        from medusa_cli.benchmarks.step_cost import draw_costs

        if extras.has("matplotlib"):
            draw_costs(costs, shown, chosen, target.path / "step_cost.png")
    return Found(chosen, beside, break_even(chosen, costs))


def _costs(source: Run, again: bool, place: Where) -> "Costs":
    """Load model and drafter; what their steps cost here."""
    from medusa_cli.decoding.costs import ROUNDS, SIZES, costs_for
    from medusa_cli.drafters import load_drafter
    from medusa_cli.engines import load_backbone

    model = str(describe_drafter(source.drafter_dir).provenance.identity.get("id") or DEFAULT_MODEL)
    console.info(f"Timing steps of {place.of(model)}")
    backbone = load_backbone(model, **follow(source.drafter_dir, place).loading, adapter=source.adapter)
    drafter = load_drafter(source.drafter_dir, backbone)
    total = (ROUNDS + 1) * (len(SIZES) + drafter.num_heads)
    with console.progress("timing", total=total, unit="steps") as bar:
        return costs_for(backbone, drafter, stamp_of(source.drafter_dir), again=again, on_progress=bar.advance)
