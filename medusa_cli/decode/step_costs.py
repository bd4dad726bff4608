"""Step costs: measured step times, corrected by the steps that decoding takes."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

from medusa_cli.tree.search import StepTimes

# The evidence for a correction loses weight by this factor with each later step. A correction that
# rests on many steps follows the latest step at a rate of 1 - DECAY.
DECAY = 0.93
# The minimum weight of older evidence, in steps. It is higher for plain steps, because these come one
# at a time, and their evidence loses weight in the many steps between them.
PLAIN_WEIGHT = 2.0
DRAFTS_WEIGHT = 1.0
# Plain steps are repeated until a step changes their expected time by less than this share.
SETTLED = 0.05
# A step that takes more than this multiple of its expected time is an outlier, unless the next step
# is slow, too.
OUTLIER_RATIO = 1.5
# After this many steps, the time of plain steps is out of date, and a plain step is due. FIRST_CHECK
# applies once at the beginning, CHECK_STEPS later.
FIRST_CHECK = 16
CHECK_STEPS = 64
# A plain step is due at once if a step with drafts takes less time than a plain step by this share.
QUICKER = 0.1
# The minimum time of an additional row, as a share of a plain step. Measured times may be lower, but
# later steps correct them.
MIN_ROW = 0.002
# The smallest factor by which the time that drafts add is corrected.
MIN_CORRECTION = 0.05
# A step is full evidence of the time that drafts add if its drafts add this share to a plain step, or more. With
# less, the step tells mostly noise.
TELLING_SHARE = 0.25
# The weight of the measured times, in steps, before the first step with drafts.
MEASURED_WEIGHT = 0.1
# Text lengths are rounded to multiples of this number to look up times.
LENGTH = 256


class Correction:
    """Estimates the ratio of observed to measured seconds. The older the evidence, the more a new step counts.

    least: the minimum weight of older evidence, in steps. weight: the weight of the first value.
    """

    def __init__(self, least: float, weight: float = 0.0) -> None:
        self.value = 1.0
        self._least = least
        self._weight = weight  # in steps
        self._seen = 0  # the step at which the ratio was last observed

    def update(self, ratio: float, step: int, evidence: float = 1.0) -> float:
        """Learns a ratio observed at a step, which counts as `evidence` steps; returns the change of the value."""
        known = self._weight * DECAY ** (step - self._seen)
        self._weight = evidence + min(max(known, self._least), self._weight)
        self._seen = step
        change = (ratio - self.value) * evidence / self._weight
        self.value += change
        return change


class StepCosts:
    """Holds the step costs of all batch sizes. Several decoders may share and correct these costs."""

    def __init__(self, step_times: StepTimes) -> None:
        self.measured = step_times.step
        self._batches: dict[int, BatchCosts] = {}

    def of_batch(self, batch: int) -> BatchCosts:
        """Returns the costs at a batch size; later steps correct them."""
        if batch not in self._batches:
            self._batches[batch] = BatchCosts(self.measured, batch)
        return self._batches[batch]


class BatchCosts:
    """Estimates the times of steps at one batch size.

    Two corrections apply to the measured times: one to the time of a plain step, and one to the
    time that drafts add. So a few steps with one tree correct the times of all trees.
    """

    def __init__(self, measured: Callable[[int, int, int, int], float], batch: int) -> None:
        self._batch = batch
        self._times = measured
        self._measured = cache(self._measure)
        self._plain = Correction(PLAIN_WEIGHT)
        self._drafts = Correction(DRAFTS_WEIGHT, MEASURED_WEIGHT)
        self._steps = 0
        self._since_plain = CHECK_STEPS - FIRST_CHECK
        self._slow = False  # the last step took much longer than expected
        self._added = 0.0  # the measured seconds that the last step's drafts added

    def _measure(self, nodes: int, depth: int, length: int) -> tuple[float, float]:
        """Returns the measured seconds of a plain step, and the seconds that drafts add."""
        plain = self._times(1, 0, self._batch, length)
        added = self._times(nodes, depth, self._batch, length) - plain
        return plain, max(added, MIN_ROW * (nodes - 1) * plain)

    def _parts(self, nodes: int, depth: int, length: float) -> tuple[float, float]:
        return self._measured(nodes, depth, LENGTH * round(length / LENGTH))

    def seconds(self, nodes: int, depth: int, length: float = 0) -> float:
        """Returns the expected duration of a step after texts of this mean length."""
        plain, added = self._parts(nodes, depth, length)
        return self._plain.value * plain + max(self._drafts.value, MIN_CORRECTION) * added

    def added(self, nodes: int, depth: int, length: float = 0) -> float:
        """Returns the seconds that drafts are expected to add to a plain step."""
        return max(self._drafts.value, MIN_CORRECTION) * self._parts(nodes, depth, length)[1]

    @property
    def plain_is_old(self) -> bool:
        """Returns True if the last plain step was long ago, so that drafts may have become slower than plain steps."""
        return self._since_plain >= CHECK_STEPS

    def record(self, nodes: int, depth: int, length: float, seconds: float) -> None:
        """Corrects the times by the duration of a step, but ignores a single slow step, which may be an outlier."""
        if seconds <= 0:  # a coarse clock
            return
        plain, added = self._parts(nodes, depth, length)
        self._steps += 1
        self._since_plain += 1
        after_slow = self._slow
        self._slow = seconds > OUTLIER_RATIO * self.seconds(nodes, depth, length)
        if self._slow and not after_slow:
            return
        if added:
            expected = self._plain.value * plain
            self._drafts.update(
                (seconds - expected) / added, self._steps, evidence_of(added, plain)
            )
            if self._drafts.value * added < -QUICKER * expected:
                self._since_plain = CHECK_STEPS  # plain steps must also have become quicker
        else:
            self._record_plain(plain, seconds)
        self._added = added

    def _record_plain(self, plain: float, seconds: float) -> None:
        before = self._plain.value
        change = self._plain.update(seconds / plain, self._steps)
        if abs(change) < SETTLED * before:
            self._since_plain = 0
        # If the machine's speed has changed, drafts take longer or less long by the same factor.
        correction = self._drafts.value * self._plain.value / before
        if self._added:
            # The last step drafted, so its whole time is known: what a plain step takes more, its drafts took less.
            from_last = self._drafts.value - change * plain / self._added
            correction += evidence_of(self._added, plain) * (from_last - correction)
        self._drafts.value = correction


def evidence_of(added: float, plain: float) -> float:
    """Returns how much a step tells about the time that drafts take, from 0 to 1.

    added: the measured seconds that the step's drafts add to a plain step of `plain` seconds. The times of all steps
    are equally noisy. So the less the drafts add, the noisier is the ratio of the observed to the measured addition.
    Least squares weighs the ratio by the square of `added`.
    """
    return min(1.0, (added / (TELLING_SHARE * plain)) ** 2)
