"""The acceptance lengths that trained drafters have reached, and the lengths to expect with other amounts of data."""

from dataclasses import dataclass
from math import log

from medusa_cli.runs.resolve import read_calibration
from medusa_cli.runs.run import Run
from medusa_cli.tree.search import Accuracies, StepTimes, budgets, expected_length, largest, search


@dataclass(frozen=True)
class Reached:
    """Holds a training of a drafter for qwen2.5-coder-0.5b (docs/training.md).

    length: the tokens per step that the drafter reached with a tree of REACHED_NODES nodes.
    """

    drafter: str
    answer_tokens: int
    positions: int
    length: float


REACHED = (
    Reached("hydra", 154_000, 150_000, 2.04),
    Reached("hydra", 407_000, 821_000, 2.27),
    Reached("hydra", 234_000, 2_000_000, 2.39),
    Reached("eagle", 154_000, 150_000, 2.07),
    Reached("eagle", 234_000, 2_000_000, 2.35),
    Reached("eagle", 5_600_000, 8_000_000, 2.89),
    Reached("eagle", 7_900_000, 21_400_000, 3.47),
)
REACHED_NODES = 64
# After training on fewer positions than this, no draft is expected to be accepted.
NOTHING = 3_000
# A related model's drafter accepts fewer tokens per step on a fine-tune than on its own model. Training on
# ADAPTED_POSITIONS positions of the fine-tune makes up this share of the difference (docs/log.md, "A fine-tune and an
# adapter"). The lengths are those with ADAPTED_NODES nodes.
ADAPTED_SHARE = 0.75
ADAPTED_POSITIONS = 50_000
ADAPTED_NODES = 8
# The included drafter whose accuracies serve as an example of how acceptance falls with position
# and rank.
TYPICAL = "qwen2.5-coder-1.5b"
# The expected time to draft a level with a drafter that is not trained yet, as a share of a plain
# step.
LEVEL = 0.06
# Number of bisection steps in the search for the factor of `scaled`.
FITTED = 16
# Expected speedups are shown as intervals, from this share below to this share above the figure.
DOUBT = 0.08


def reached(drafter: str, positions: float) -> float:
    """Returns the expected acceptance length, with REACHED_NODES nodes, of a drafter trained on `positions` positions.

    The length grows with the logarithm of the positions, up to the largest training run that was
    measured.
    """
    rows = [row for row in REACHED if row.drafter == drafter]
    points = [(NOTHING, 1.0), *((row.positions, row.length) for row in rows)]
    if positions <= NOTHING:
        return 1.0
    for (first, low), (last, high) in zip(points, points[1:], strict=False):
        if positions <= last:
            return low + (high - low) * log(positions / first) / log(last / first)
    return points[-1][1]


def typical_accuracies() -> list[list[float]]:
    """Returns the accuracies of an included drafter, which `scaled` fits to a new drafter."""
    run = Run.pretrained(TYPICAL)
    assert run is not None
    return read_calibration(run.calibration_path).accuracies


def adapted(accuracies: Accuracies, positions: float, limit: float) -> list[list[float]]:
    """Returns the expected accuracies of a related model's drafter after training on `positions` positions.

    limit: the drafter's acceptance length with ADAPTED_NODES nodes on the model for which it was trained.
    """
    share = log(max(positions, NOTHING) / NOTHING) / log(ADAPTED_POSITIONS / NOTHING)
    length = best_length(accuracies, ADAPTED_NODES)
    missing = max(0.0, limit - length)
    return scaled(accuracies, ADAPTED_NODES, length + min(1.0, ADAPTED_SHARE * share) * missing)


def scaled(accuracies: Accuracies, nodes: int, length: float) -> list[list[float]]:
    """Returns the accuracies times the factor at which the best tree of `nodes` nodes reaches a length of `length`."""

    def times(factor: float) -> list[list[float]]:
        return [[share * min(factor, 1 / max(sum(row), share)) for share in row] for row in rows]

    rows = [[max(share, 1e-6) for share in row] for row in accuracies]
    low, high = 0.0, 1 / min(map(sum, rows))
    for _ in range(FITTED):
        middle = (low + high) / 2
        if best_length(times(middle), nodes) < length:
            low = middle
        else:
            high = middle
    return times(high)


def best_length(accuracies: Accuracies, nodes: int) -> float:
    """Returns the tokens per step of the best tree with `nodes` nodes."""
    return expected_length(search(accuracies, min(nodes, largest(accuracies))), accuracies)


def speedup(accuracies: Accuracies, times: StepTimes) -> float:
    """Returns the best tree's speed over plain decoding on a machine with these step times."""
    trees = budgets(accuracies, times)
    return max(tree.tokens_per_s for tree in trees) / trees[0].tokens_per_s


def interval(figure: float) -> str:
    """Returns a speedup as text, such as "1.3 to 1.5 x"."""
    low = max(1.0, figure * (1 - DOUBT))
    return f"{low:.2f} to {max(low, figure * (1 + DOUBT)):.2f} x"
