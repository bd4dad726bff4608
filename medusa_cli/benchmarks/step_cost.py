"""The step-cost curve: seconds of a whole decoding step against the nodes of its tree."""

import statistics
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from medusa_cli.backbone import Backbone
from medusa_cli.decoding import Decoder
from medusa_cli.decoding.clock import Clock
from medusa_cli.drafters import Drafter
from medusa_cli.runs.files import replacing
from medusa_cli.tree import Tree
from medusa_cli.tree.budget import Budget, StepCost, curve

SIZES = (1, 4, 8, 12, 16, 24, 32, 48, 64)
CONTEXT = 384
ROUNDS = 15


def measure_costs(
    backbone: Backbone,
    drafter: Drafter,
    trees: Mapping[tuple[int, int], Tree],
    *,
    context: int = CONTEXT,
    rounds: int = ROUNDS,
    on_progress: Callable[[int], None] = lambda steps: None,
) -> list[StepCost]:
    """Time a step of each tree (by heads and nodes) after `context` tokens, in turn, `rounds` times over; medians.

    Tokens and states are whatever the model makes of arbitrary ids: a step's time does not depend on them.
    """
    deepest = max(tree.max_depth for tree in trees.values())
    context = min(context, backbone.max_positions - 2 * (deepest + 1) * len(trees))
    prompt = (torch.arange(context) % backbone.vocab_size).tolist()
    decoder = Decoder(backbone, drafter, next(iter(trees.values())))
    seconds: dict[tuple[int, int], list[float]] = {name: [] for name in trees}
    for number in range(rounds + 2):
        # The prompt is still there from the round before: only its last token is run again.
        sequence, _ = decoder.admit(prompt, max_new_tokens=backbone.max_positions, stop_ids=())
        for name, tree in trees.items():
            decoder.draft_over(tree)
            clock = Clock(backbone)
            decoder.step()
            lap = clock.lap()
            if number >= 2:  # the first rounds warm up
                seconds[name].append(lap)
            on_progress(1)
        decoder.cancel(sequence)
    return [StepCost(heads, nodes, statistics.median(laps)) for (heads, nodes), laps in sorted(seconds.items())]


def draw_costs(costs: Sequence[StepCost], shown: Sequence[Budget], chosen: Budget, path: Path) -> None:
    """Milliseconds a step, by heads, and the best expected tokens a second against nodes, the chosen size marked."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4), layout="constrained")
    FigureCanvasAgg(figure)
    left = figure.subplots()
    most = max(one.heads for one in costs)
    for heads in range(1, most + 1):
        points = curve(costs, heads)
        shade: dict[str, Any] = {"color": "C0", "alpha": 0.25 + 0.75 * heads / most, "label": f"{heads} heads"}
        left.plot([one.nodes for one in points], [1e3 * one.seconds for one in points], "o-", markersize=3, **shade)
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
