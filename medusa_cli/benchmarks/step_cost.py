"""The step-cost curve, drawn: milliseconds of a step against the nodes of its tree, and what sizes promise."""

from collections.abc import Sequence
from pathlib import Path

from medusa_cli.runs.files import replacing
from medusa_cli.tree.budget import Budget, Costs


def draw_costs(costs: Costs, shown: Sequence[Budget], chosen: Budget, path: Path) -> None:
    """Milliseconds a step, and the best expected tokens a second against nodes, the chosen size marked."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4), layout="constrained")
    FigureCanvasAgg(figure)
    left = figure.subplots()
    sizes = sorted(costs.verify)
    left.plot(sizes, [1e3 * costs.verify[nodes] for nodes in sizes], "o-", markersize=3, color="C0", label="verifying")
    sizes = [one.tree.size for one in shown]
    left.plot(sizes, [1e3 * one.seconds for one in shown], "o:", markersize=2, color="C0", label="with drafting")
    left.legend(loc="lower right")
    left.set(xlabel="nodes of the tree, root included", ylabel="ms a step", ylim=(0, None))
    left.yaxis.label.set_color("C0")
    right = left.twinx()
    right.plot([one.tree.size for one in shown], [one.tokens_per_s for one in shown], "s--", color="C1")
    right.plot([chosen.tree.size], [chosen.tokens_per_s], "*", markersize=16, color="C3")
    right.set(ylabel="expected tokens/s", ylim=(0, None))
    right.yaxis.label.set_color("C1")
    left.set_title(f"{chosen.tree.size} nodes pay best: {chosen.expected:.2f} tokens in {1e3 * chosen.seconds:.1f} ms")
    left.grid(alpha=0.3)
    with replacing(path) as part:
        figure.savefig(part, format="png", dpi=110)
