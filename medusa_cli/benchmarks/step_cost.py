"""The step-cost curve: seconds of a whole decoding step against the nodes of its tree."""

import statistics
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from medusa_cli.backbone import Backbone
from medusa_cli.decoding.accept import accept
from medusa_cli.decoding.clock import Clock
from medusa_cli.decoding.sampling import Sampling
from medusa_cli.drafters import Confirmed, Drafter
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
    context = min(context, backbone.max_positions - deepest - 1)
    cache = backbone.new_cache(context + max(tree.size for tree in trees.values()))
    ids = torch.arange(context, device=backbone.device) % backbone.vocab_size
    first = backbone.forward(ids, cache, taps=drafter.taps, logits="none", pseudo=drafter.pseudo(deepest))
    hidden, ahead = first.hidden, first.ahead_of(-1)
    sampling = Sampling()
    generator = sampling.generator(backbone.device)
    seconds: dict[tuple[int, int], list[float]] = {name: [] for name in trees}
    drafter.reset()
    drafter.draft(backbone, cache, Confirmed(ids, hidden, 0, 0, ahead), next(iter(trees.values())))
    for number in range(rounds + 2):
        for name, tree in trees.items():
            pseudo = drafter.pseudo(tree.max_depth)
            clock = Clock(backbone)
            last = Confirmed(ids[-1:], hidden[-1:], number % backbone.vocab_size, context - 1, ahead)
            draft = drafter.draft(backbone, cache, last, tree)
            out = backbone.forward(draft.tokens, cache, draft.tree, taps=drafter.taps, pseudo=pseudo)
            assert out.logits is not None
            cache.keep(context, accept(out.logits, draft, sampling, generator).path)
            lap = clock.lap()
            if number >= 2:  # the first rounds warm up
                seconds[name].append(lap)
            cache.truncate(context)
            on_progress(1)
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
