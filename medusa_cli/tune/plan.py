"""Plans how the time is divided between distilling and training, by the speeds measured on this machine."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import accumulate

from medusa_cli.errors import UsageError
from medusa_cli.tree.search import Accuracies, StepTimes
from medusa_cli.tune.expectation import REACHED_NODES, adapted, reached, scaled, speedup

# The planned number of passes over the data, and the maximum number of passes if time is left.
EPOCHS = 3
MAX_EPOCHS = 8
# Calibration and the last comparison take this many times as long as the first comparison, which
# has fewer methods.
END = 1.7
# Ratio of EAGLE's training speed to Hydra's (docs/training.md). Only Hydra's is measured on this
# machine.
EAGLE_SPEED = 560 / 1501
# The gain of a drafter together with n-gram matches is the larger of their two gains plus this share of the smaller.
# Measured without prompts: 1.86 x and 1.35 x give 1.90 x together, 1.94 and 1.56 give 2.13, 2.71 and 1.22 give 2.81,
# 2.33 and 1.15 give 2.35, 1.69 and 1.29 give 1.95, 1.75 and 1.18 give 1.92. The share is the median of the six.
MATCHED = 0.4
# The largest speedup without prompts that is believed, because measured times are noisy.
FASTEST = 10.0
# The smallest gain for which the second half of the time, or the rest of a training, is used.
WORTH = 0.01
MIN_S = 1
MAX_S = 30 * 24 * 3600


@dataclass(frozen=True)
class Measured:
    """Holds the figures measured on this machine.

    plain_per_s: tokens/s of plain decoding. speedups: each method's speed over plain decoding. lengths: each method's
    acceptance length. verify: the seconds of a verify pass by its number of rows. draft: the seconds of drafting by the
    number of levels. accuracies: on this model's answers, those of the drafter that is trained further; typical
    accuracies if there is no such drafter. answer_s: the seconds to distill an answer token. position_s: the seconds to
    train on a position. answer_tokens: the maximum length of an answer in a comparison. compare_s: the seconds of the
    first comparison. memory: the peak of training, in bytes. start: the folder of the related model's drafter that is
    trained further, if any. limit: that drafter's acceptance length on the related model.
    """

    plain_per_s: float
    speedups: Mapping[str, float]
    lengths: Mapping[str, float]
    verify: tuple[tuple[int, float], ...]
    draft: tuple[tuple[int, float], ...]
    accuracies: list[list[float]]
    answer_s: float
    position_s: float
    answer_tokens: int
    compare_s: float
    memory: int = 0
    start: str | None = None
    limit: float = 0.0

    @property
    def prompt_share(self) -> float:
        """Returns the share of plain decoding's time that prompts take."""
        return max(0.0, 1 - self.plain_per_s * self.plain_s)

    @property
    def plain_s(self) -> float:
        """Returns the seconds of a plain step."""
        return dict(self.verify)[1]

    @property
    def step_times(self) -> StepTimes:
        """Returns the step times, in which no pass is faster than a smaller pass."""
        rows, seconds = zip(*sorted(self.verify), strict=True)
        return StepTimes(dict(zip(rows, accumulate(seconds, max), strict=True)), dict(self.draft))

    @property
    def end_s(self) -> float:
        """Returns the seconds that calibration and the last comparison take."""
        return END * self.compare_s


@dataclass(frozen=True)
class Plan:
    """Holds how the time is divided, and the expected speedup.

    drafter: "start" if a related model's drafter is trained further, otherwise the kind of the new
    drafter. tokens: the number of answer tokens to distill, in addition to those that the data has.
    """

    time_s: float
    drafter: str
    tokens: int
    positions: int
    distill_s: float
    train_s: float
    expected: float


def plan(time_s: float, used_s: float, measured: Measured, known: int = 0) -> Plan:
    """Returns the plan for `time_s` seconds, of which `used_s` have passed.

    known: the number of answer tokens that the data already has. The time is halved as long as its
    second half would gain less than WORTH.
    """
    whole = _plan(time_s, used_s, measured, known)
    while True:
        half = _plan(whole.time_s / 2, used_s, measured, known)
        if not half.positions or whole.expected > half.expected * (1 + WORTH):
            return whole
        whole = half


def _plan(time_s: float, used_s: float, measured: Measured, known: int) -> Plan:
    left = max(time_s - used_s - measured.end_s, 0.0)
    training_s = EPOCHS * measured.position_s  # per answer token
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

    The speed is that of the tree with the most tokens per second, by the step times of this machine. For a drafter that
    is trained further, it is the measured speed times the expected gain. Prompts take as long as in plain decoding. If
    plain decoding is faster, the result is 1.
    """
    prompts = measured.prompt_share

    def without_prompts(speedup: float) -> float:
        return (1 - prompts) / max(1 / speedup - prompts, (1 - prompts) / FASTEST)

    lookup = without_prompts(max(1.0, measured.speedups.get("lookup", 1.0)))

    def with_matches(accuracies: Accuracies) -> float:
        gains = [speedup(accuracies, measured.step_times), lookup]
        return max(gains) + MATCHED * (min(gains) - 1)

    now = measured.accuracies
    if drafter == "start":
        gain = with_matches(adapted(now, positions, measured.limit)) / with_matches(now)
        faster = gain * without_prompts(measured.speedups["start"])
    else:
        faster = with_matches(scaled(now, REACHED_NODES, reached(drafter, positions)))
    return max(1.0, 1 / (prompts + (1 - prompts) / faster))


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
