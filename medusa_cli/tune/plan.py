"""Plans how the time is divided between distilling and training, by the speeds measured on this machine."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import accumulate

from medusa_cli.errors import UsageError
from medusa_cli.tree.search import Accuracies, StepTimes
from medusa_cli.tune.expectation import REACHED_NODES, adapted, reached, scaled, speedup

# The planned number of passes over the data, and the maximum if the data ends before the time.
EPOCHS = 3
MAX_EPOCHS = 8
# The last comparison has more methods than the first one, and the drafter is calibrated before it.
END = 1.7
# The speed of training EAGLE over that of training Hydra, which is measured (docs/training.md).
EAGLE_SPEED = 560 / 1501
# Of the gains of a drafter and of n-gram matches, this share of the smaller adds to the larger. Measured: 1.64 x and
# 1.34 x give 1.66 x together, and 1.66 x and 1.44 x give 1.82 x.
MATCHED = 0.3
# Time that gains less than this share of speed is not used.
WORTH = 0.01
MIN_S = 1
MAX_S = 30 * 24 * 3600


@dataclass(frozen=True)
class Measured:
    """Figures of this machine.

    plain_per_s: tokens/s of plain decoding. speedups: the speed over it by method. lengths: the acceptance lengths by
    method. verify: the seconds of verify passes by their number of rows. draft: the seconds of drafting by number of
    levels. accuracies: those of the drafter that is trained further, on this model's answers, or typical ones.
    answer_s: the seconds of distilling an answer token. position_s: the seconds of training on a position. compare_s:
    the seconds of the first comparison. memory: the peak of training, in bytes. start: the folder of the related
    model's drafter that is trained further, if any. limit: its acceptance length on that model.
    """

    plain_per_s: float
    speedups: Mapping[str, float]
    lengths: Mapping[str, float]
    verify: tuple[tuple[int, float], ...]
    draft: tuple[tuple[int, float], ...]
    accuracies: list[list[float]]
    answer_s: float
    position_s: float
    compare_s: float
    memory: int = 0
    start: str | None = None
    limit: float = 0.0

    @property
    def step_times(self) -> StepTimes:
        """Returns the step times; a larger pass only seems faster where the machine was busy."""
        rows, seconds = zip(*sorted(self.verify), strict=True)
        return StepTimes(dict(zip(rows, accumulate(seconds, max), strict=True)), dict(self.draft))

    @property
    def end_s(self) -> float:
        """Returns the seconds that calibration and the last comparison take."""
        return END * self.compare_s


@dataclass(frozen=True)
class Plan:
    """Holds the division of a time, and the expected speedup.

    drafter: "start" if a related model's drafter is trained further, else the kind. tokens: the
    answer tokens to distill, without the known ones.
    """

    time_s: float
    drafter: str
    tokens: int
    positions: int
    distill_s: float
    train_s: float
    expected: float


def plan(time_s: float, used_s: float, measured: Measured, known: int = 0) -> Plan:
    """Returns the plan for a time, of which `used_s` seconds have passed.

    known: the number of answer tokens that the data already has. The plan is shorter if the second
    half of the time would bring less than WORTH.
    """
    whole = _plan(time_s, used_s, measured, known)
    while True:
        half = _plan(whole.time_s / 2, used_s, measured, known)
        if not half.positions or whole.expected > half.expected * (1 + WORTH):
            return whole
        whole = half


def _plan(time_s: float, used_s: float, measured: Measured, known: int) -> Plan:
    left = max(time_s - used_s - measured.end_s, 0.0)
    training_s = EPOCHS * measured.position_s  # of an answer token
    tokens = max(left - known * training_s, 0.0) / (measured.answer_s + training_s)
    distill_s = tokens * measured.answer_s
    positions = min((left - distill_s) / measured.position_s, MAX_EPOCHS * (tokens + known))
    train_s = positions * measured.position_s
    drafter = "start"
    if measured.start is None:
        drafter = "hydra"
        as_eagle = EAGLE_SPEED * positions
        if reached("eagle", as_eagle) > reached("hydra", positions):
            drafter = "eagle"
            positions = as_eagle
    return Plan(
        time_s,
        drafter,
        round(tokens),
        round(positions),
        distill_s,
        train_s,
        expected_speedup(drafter, positions, measured),
    )


def expected_speedup(drafter: str, positions: float, measured: Measured) -> float:
    """Returns the expected speed over plain decoding of a drafter that is trained on `positions` positions.

    It is that of the tree with the most tokens per second, by the step times of this machine. For a drafter that is
    trained further, the gain is added to its measured figures. Plain decoding is chosen if it is faster.
    """
    lookup = max(1.0, measured.speedups.get("lookup", 1.0))

    def with_matches(accuracies: Accuracies) -> float:
        gains = [speedup(accuracies, measured.step_times), lookup]
        return max(gains) + MATCHED * (min(gains) - 1)

    now = measured.accuracies
    if drafter != "start":
        return with_matches(scaled(now, REACHED_NODES, reached(drafter, positions)))
    gain = with_matches(adapted(now, positions, measured.limit)) / with_matches(now)
    return max(1.0, measured.speedups["start"] * gain)


def parse_time(text: str) -> float:
    """Returns the seconds of a time such as 90s, 30m or 1h30m; raises UsageError for other texts."""
    match = re.fullmatch(r"(?:(\d{1,4})h)?(?:(\d{1,5})m)?(?:(\d{1,7})s)?", text.strip().lower())
    seconds = 0
    if match is not None:
        seconds = sum(
            int(count or 0) * unit
            for count, unit in zip(match.groups(), (3600, 60, 1), strict=True)
        )
    if not MIN_S <= seconds <= MAX_S:
        raise UsageError(f"@time {text!r} is not valid", "give a time such as 90s, 30m or 1h30m")
    return float(seconds)
