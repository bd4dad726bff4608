"""`medusa tree --budget auto`: measure what steps cost here, once a run, and find the tree that pays best."""

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from medusa_cli import console
from medusa_cli.assets import DEFAULT_MODEL
from medusa_cli.commands.heads import Heads, check_current, stamp_of
from medusa_cli.errors import UserError
from medusa_cli.runs.files import read_object, write_json
from medusa_cli.runs.run import Run, provenance

if TYPE_CHECKING:
    from medusa_cli.tree.budget import Budget

COSTS = "step_cost.json"
# Shown beside the choice: a plain step, and the sizes that are fixed elsewhere.
BESIDE = (1, 16, 32, 64)


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

    def table(self) -> Any:
        from rich.table import Table

        table = Table(title="What sizes are expected to give on this machine")
        for column in ("nodes", "heads used", "tokens a step", "ms a step", "tokens/s"):
            table.add_column(column, justify="right")
        for number, row in enumerate(self.rows()):
            cells = (f"{row['nodes']}", f"{row['depth']}", f"{row['expected_acceptance_length']:.2f}")
            more = (f"{row['step_ms']:.1f}", f"{row['tokens_per_s']:.1f}")
            table.add_row(*cells, *more, style="bold green" if number == 0 else None)
        return table


def find_budget(
    target: Run | None, heads: Heads, calibration: Path | None, again: bool, place: dict[str, Any]
) -> Found:
    """The best budget for the heads of a run (None: those that ship), steps timed unless the run has their times.

    UserError without accuracies or without a drafter to time.
    """
    from medusa_cli.tree.budget import best_budget, best_of_size, break_even
    from medusa_cli.tree.search import largest

    source = target or (Run.pretrained(DEFAULT_MODEL) if calibration is None else None)
    if source is None or not (source.drafter_dir / "config.json").is_file():
        raise UserError("--budget auto needs a drafter to time", "give the --run that holds one")
    if not heads.accuracies:
        raise UserError(f"the run {source.path} has no calibration.json", "run `medusa calibrate` first")
    check_current(heads)
    costs = None if again or target is None else _cached(target, len(heads.accuracies), place)
    if costs is None:
        costs = _measure(source, target, heads, place)
    chosen = best_budget(heads.accuracies, costs)
    most = min(max(one.nodes for one in costs), largest(heads.accuracies))
    beside = [best_of_size(heads.accuracies, nodes, costs) for nodes in BESIDE if nodes <= most]
    found = Found(chosen, beside, break_even(chosen, costs))
    if target is not None:
        from medusa_cli.benchmarks.step_cost import draw_costs

        shown = [best_of_size(heads.accuracies, nodes, costs) for nodes in sorted({one.nodes for one in costs})]
        draw_costs(costs, shown, chosen, target.path / "step_cost.png")
    return found


def _cached(target: Run, heads: int, place: dict[str, Any]) -> Any:
    """The run's step times for so many heads, if they were taken for this drafter in this place."""
    from medusa_cli.tree.budget import StepCost

    path = target.path / COSTS
    if not path.is_file():
        return None
    data = read_object(path, "the step times")
    if data.get("asked") != place or data.get("drafter") != stamp_of(target.drafter_dir):
        return None
    costs = [StepCost(**one) for one in data["costs"]]
    if max(one.heads for one in costs) < heads:
        return None
    console.info(f"step times from {path}; --measure takes them again")
    return [one for one in costs if one.heads <= heads]


def _measure(source: Run, target: Run | None, heads: Heads, place: dict[str, Any]) -> Any:
    """Load model and drafter and time a step of every size; kept in the run where there is one."""
    from medusa_cli.benchmarks.step_cost import CONTEXT, ROUNDS, SIZES, measure_costs
    from medusa_cli.drafters import load_drafter
    from medusa_cli.engines import load_backbone
    from medusa_cli.tree.search import largest, search

    config = read_object(source.drafter_dir / "config.json", "the drafter's config")
    model = config.get("provenance", {}).get("backbone", {}).get("id", DEFAULT_MODEL)
    backbone = load_backbone(model, **place, adapter=source.adapter)
    drafter = load_drafter(source.drafter_dir, backbone)
    kind = str(backbone.dtype).removeprefix("torch.")
    console.info(
        f"timing steps of {model} in {kind} on {backbone.device}, {backbone.engine.title}, {CONTEXT} tokens in"
    )
    trees = {
        (count, nodes): search(heads.accuracies[:count], nodes)
        for count in range(1, len(heads.accuracies) + 1)
        for nodes in SIZES
        if nodes <= largest(heads.accuracies[:count])
    }
    with console.progress("timing", total=(ROUNDS + 2) * len(trees), unit="steps") as bar:
        costs = measure_costs(backbone, drafter, trees, on_progress=bar.advance)
    if target is not None:
        made = {**provenance(backbone.identity), "asked": place, "drafter": stamp_of(target.drafter_dir)}
        facts = {"device": str(backbone.device), "dtype": kind, "engine": backbone.engine.title, "context": CONTEXT}
        write_json(target.path / COSTS, {**made, **facts, "costs": [asdict(one) for one in costs]})
    return costs
