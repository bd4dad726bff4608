"""Estimates of acceptance: how many of the expected draft tokens the model accepts."""

from dataclasses import dataclass

from medusa_cli.decode.sampling import Sampling

# Weight of a prior, in expected draft tokens; decay of older steps in a sequence, and over all sequences of a kind.
PRIOR, SEQUENCE_DECAY, KIND_DECAY = 2.0, 0.98, 0.995
# Above this temperature the acceptance prior stays the same.
MAX_TEMPERATURE = 100.0


@dataclass
class AcceptanceEstimate:
    """Compares draft tokens that were expected to be accepted with those that were."""

    expected: float
    accepted: float

    @property
    def ratio(self) -> float:
        return self.accepted / self.expected

    def update(self, expected: float, accepted: float, decay: float) -> None:
        self.expected, self.accepted = decay * self.expected + expected, decay * self.accepted + accepted

    def shrink_to_prior(self) -> None:
        """Reduces the weight of what was observed to that of the prior."""
        factor = min(1.0, PRIOR / self.expected)
        self.expected, self.accepted = factor * self.expected, factor * self.accepted


@dataclass
class SequenceAcceptance(AcceptanceEstimate):
    """Estimates acceptance of one sequence; `kind` is its kind of sampling."""

    kind: str


class AcceptancePriors:
    """Keeps one estimate per kind of sampling; a new sequence starts from the estimate of its kind."""

    def __init__(self) -> None:
        self._kinds: dict[str, AcceptanceEstimate] = {}

    def begin(self, sampling: Sampling) -> SequenceAcceptance:
        kind, prior = sampling_kind(sampling)
        estimate = self._kinds.setdefault(kind, AcceptanceEstimate(PRIOR, PRIOR * prior))
        return SequenceAcceptance(PRIOR, PRIOR * estimate.ratio, kind)

    def update(self, sequence: SequenceAcceptance, expected: float, accepted: float) -> None:
        sequence.update(expected, accepted, SEQUENCE_DECAY)
        self._kinds[sequence.kind].update(expected, accepted, KIND_DECAY)


def sampling_kind(sampling: Sampling) -> tuple[str, float]:
    """Returns a kind of sampling with similar acceptance, and the acceptance ratio to assume where nothing is known.

    Expectations come from greedy calibration. The hotter the sampling, the fewer drafts are accepted; top-p and top-k
    soften that.
    """
    if sampling.greedy:
        return "greedy", 1.0
    temperature = min(sampling.temperature, MAX_TEMPERATURE)
    rounded = round(4 * temperature) / 4
    if sampling.mode == "typical":
        return f"typical {rounded:g}", 1.0
    truncated = sampling.top_p < 1 or sampling.top_k > 0
    prior = 1 / (1 + temperature) if truncated else 1 / (1 + temperature**3)
    return f"exact {rounded:g}{' truncated' if truncated else ''}", prior
