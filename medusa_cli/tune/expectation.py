"""The acceptance lengths that trained drafters have reached, and what to expect of other amounts of data."""

from collections.abc import Mapping
from dataclasses import dataclass
from math import log

from medusa_cli.tree.search import interpolate


@dataclass(frozen=True)
class Reached:
    """A drafter of qwen2.5-coder-0.5b in the table of docs/training.md, with its tokens per step at 64 nodes."""

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
# With fewer positions, no draft is expected to be accepted.
NOTHING = 3_000
# A drafter of the model before its fine-tuning: how much its accepted draft tokens grow by training on so many
# positions (docs/training.md, "A fine-tune": from 1.69 to 1.87 tokens per step).
ADAPTED_POSITIONS = 220_000
ADAPTED_GAIN = 0.87 / 0.69
# The share of the accepted draft tokens at 64 nodes that smaller trees keep, by the included calibrations.
KEPT = {
    2: 0.27,
    3: 0.42,
    4: 0.50,
    6: 0.62,
    8: 0.68,
    12: 0.75,
    16: 0.80,
    24: 0.87,
    32: 0.91,
    64: 1.0,
}
# The time of drafting, as a share of a plain step.
DRAFTING = 0.16
# A figure is given as an interval of this share below and above it.
DOUBT = 0.08


def reached(drafter: str, positions: float) -> float:
    """Returns the acceptance length at 64 nodes to expect of a drafter that is trained on so many positions.

    It grows with the logarithm of the positions, up to the largest training that was measured.
    """
    rows = [row for row in REACHED if row.drafter == drafter]
    points = [(NOTHING, 1.0), *((row.positions, row.length) for row in rows)]
    if positions <= NOTHING:
        return 1.0
    for (first, low), (last, high) in zip(points, points[1:], strict=False):
        if positions <= last:
            return low + (high - low) * log(positions / first) / log(last / first)
    return points[-1][1]


def adapted(length: float, positions: float) -> float:
    """Returns the acceptance length to expect of a related model's drafter after training on so many positions."""
    share = log(max(positions, NOTHING) / NOTHING) / log(ADAPTED_POSITIONS / NOTHING)
    return 1 + (length - 1) * (1 + (ADAPTED_GAIN - 1) * min(share, 1.5))


def speedup(length: float, verify: Mapping[int, float]) -> float:
    """Returns the speed over plain decoding with the best tree, given the acceptance length at 64 nodes.

    verify: the seconds of a verify pass by its number of rows.
    """
    plain = verify[1]
    sizes = [size for size in KEPT if size <= max(verify)]
    # A larger pass only seems faster where the machine was busy.
    overheads = {size: max(1.0, interpolate(verify, size) / plain) + DRAFTING for size in sizes}
    ratios = [(1 + (length - 1) * KEPT[size]) / overheads[size] for size in sizes]
    return max([1.0, *ratios])


def interval(figure: float) -> str:
    """Returns a speedup as text, such as "1.3 to 1.5 x"."""
    low = max(1.0, figure * (1 - DOUBT))
    return f"{low:.2f} to {max(low, figure * (1 + DOUBT)):.2f} x"
