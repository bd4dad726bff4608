"""The step-cost curve: seconds of a whole decoding step against the nodes of its tree."""

import statistics
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from medusa_cli.backbone import Backbone
from medusa_cli.decoding.accept import accept
from medusa_cli.decoding.generate import Clock
from medusa_cli.decoding.sampling import Sampling
from medusa_cli.drafters import Confirmed, Drafter
from medusa_cli.run import replacing
from medusa_cli.tree import Tree
from medusa_cli.tree.budget import Budget, StepCost

SIZES = (1, 4, 8, 12, 16, 24, 32, 48, 64)
CONTEXT = 384
ROUNDS = 15


def measure_costs(
    backbone: Backbone,
    drafter: Drafter,
    trees: Sequence[Tree],
    *,
    context: int = CONTEXT,
    rounds: int = ROUNDS,
    on_progress: Callable[[int], None] = lambda steps: None,
) -> list[StepCost]:
    """Time a step of each tree after `context` tokens, in turn, `rounds` times over; medians, by rising size.

    Tokens and states are whatever the model makes of arbitrary ids: a step's time does not depend on them.
    """
    context = min(context, backbone.max_positions - max(tree.max_depth for tree in trees) - 1)
    cache = backbone.new_cache(context + max(tree.size for tree in trees))
    ids = torch.arange(context, device=backbone.device) % backbone.vocab_size
    hidden = backbone.forward(ids, cache, taps=drafter.taps, logits="none").hidden
    sampling = Sampling()
    generator = sampling.generator(backbone.device)
    seconds: dict[int, list[float]] = {tree.size: [] for tree in trees}
    drafter.reset()
    drafter.draft(backbone, cache, Confirmed(ids, hidden, 0, 0), trees[-1])
    for number in range(rounds + 2):
        for tree in trees:
            clock = Clock(backbone)
            last = Confirmed(ids[-1:], hidden[-1:], number % backbone.vocab_size, context - 1)
            draft = drafter.draft(backbone, cache, last, tree)
            out = backbone.forward(draft.tokens, cache, draft.tree, taps=drafter.taps)
            assert out.logits is not None
            cache.keep(context, accept(out.logits, draft, sampling, generator).path)
            lap = clock.lap()
            if number >= 2:  # the first rounds warm up
                seconds[tree.size].append(lap)
            cache.truncate(context)
            on_progress(1)
    return [StepCost(nodes, statistics.median(laps)) for nodes, laps in sorted(seconds.items())]


def draw_costs(costs: Sequence[StepCost], shown: Sequence[Budget], chosen: Budget, path: Path) -> None:
    """Milliseconds a step and expected tokens a second against nodes, the chosen size marked."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4), layout="constrained")
    FigureCanvasAgg(figure)
    left = figure.subplots()
    left.plot([one.nodes for one in costs], [1e3 * one.seconds for one in costs], "o-", color="C0")
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
