"""The sampling options of a request."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from functools import cached_property

from medusa_cli.errors import UsageError

MODES = ("greedy", "exact", "typical")
# Dividing logits by a lower temperature may overflow fp32.
MIN_TEMPERATURE = 1e-6
# The acceptance prior is the same for all temperatures above this.
MAX_TEMPERATURE = 100.0


@dataclass(frozen=True)
class Sampling:
    """Holds the mode, the temperature, the truncation (top_p, top_k, min_p) and the seed.

    min_p: None selects the value in the model's generation config. epsilon, delta: the limits of typical acceptance.
    """

    mode: str = "greedy"
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    epsilon: float = 0.09
    delta: float = 0.3
    seed: int = 0
    min_p: float | None = None

    def __post_init__(self) -> None:
        if self.mode not in MODES:
            fault = f"@sampling {self.mode!r} is unknown"
            raise UsageError(fault, f"use one of {', '.join(MODES)}")
        if not 0 <= self.temperature < float("inf"):
            fault = f"@temperature {self.temperature} is not valid"
            raise UsageError(fault, "use 0 for greedy, or a positive number")
        if not 0 < self.top_p <= 1:
            fault = f"@top_p {self.top_p} is not valid"
            raise UsageError(fault, "use a number above 0 and at most 1")
        if self.top_k < 0:
            fault = f"@top_k {self.top_k} is not valid"
            raise UsageError(fault, "use 0 for no cut, or a positive number")
        if self.min_p is not None and not 0 <= self.min_p <= 1:
            raise UsageError(f"@min_p {self.min_p} is not valid", "use a number from 0 to 1")
        for name, value in cuts(self.top_p, self.top_k, self.min_p).items():
            if self.mode == "typical":
                fault = (
                    f"{name} {value} has no effect with @sampling typical, which has its own rule"
                )
                raise UsageError(fault, f"leave {name} out, or use @sampling exact")
        if not 0 < self.epsilon <= 1 or not self.delta > 0:
            fault = f"epsilon {self.epsilon} and delta {self.delta} are not valid"
            raise UsageError(fault, "use 0 < epsilon <= 1 and delta > 0")

    @classmethod
    def by_name(cls, temperature: float, name: str) -> Sampling:
        """Returns exact sampling with a seed derived from a name, or greedy sampling at temperature 0."""
        if temperature == 0:
            return cls()
        return cls(
            "exact",
            temperature,
            seed=int.from_bytes(hashlib.sha256(name.encode()).digest()[:7], "big"),
        )

    @cached_property
    def greedy(self) -> bool:
        """Returns True if every token is the most likely one.

        Temperature 0 is greedy in every mode.
        """
        return self.mode == "greedy" or self.temperature < MIN_TEMPERATURE

    @cached_property
    def exact(self) -> bool:
        """Returns True if tokens are drawn from the model's distribution after temperature and truncation."""
        return self.mode == "exact" and not self.greedy


def cuts(top_p: float, top_k: int, min_p: float | None) -> dict[str, float]:
    """Returns the active truncation settings (top-p, top-k, min-p) by option name."""
    return {
        **({"@top_p": top_p} if top_p < 1 else {}),
        **({"@top_k": top_k} if top_k else {}),
        **({"@min_p": min_p} if min_p else {}),
    }


def sampling_of(
    mode: str | None,
    temperature: float | None,
    top_p: float,
    top_k: int,
    random_seed: int | None,
    min_p: float | None = None,
) -> Sampling:
    """Returns the sampling for these options. A temperature above 0 without a mode selects exact sampling.

    Raises UsageError for a temperature with the mode "greedy", and for top-p, top-k or min-p without
    a temperature, because greedy decoding ignores them.
    """
    if temperature is None:
        temperature = 0.7 if mode in ("exact", "typical") else 0.0
        for name, value in cuts(top_p, top_k, min_p).items():
            if not temperature:
                fault = f"{name} {value} has no effect without a temperature"
                raise UsageError(fault, f"give @temperature, or leave {name} out")
    if mode == "greedy" and temperature > 0:
        fault = f"@temperature {temperature} has no effect with @sampling greedy"
        raise UsageError(fault, "leave one of them out")
    mode = mode or ("exact" if temperature > 0 else "greedy")
    return Sampling(mode, temperature, top_p, top_k, seed=random_seed or 0, min_p=min_p)


def sampling_kind(sampling: Sampling) -> tuple[str, float]:
    """Returns the name of the sampling's kind, and the prior acceptance ratio of this kind.

    Sampling options of one kind have similar acceptance. The ratio is relative to the acceptance in
    calibration, which is greedy. At higher temperatures, fewer draft tokens are accepted. Top-p, top-k
    and min-p weaken this effect.
    """
    if sampling.greedy:
        return "greedy", 1.0
    temperature = min(sampling.temperature, MAX_TEMPERATURE)
    rounded = round(4 * temperature) / 4
    if sampling.mode == "typical":
        return f"typical {rounded:g}", 1.0
    truncated = bool(cuts(sampling.top_p, sampling.top_k, sampling.min_p))
    prior = 1 / (1 + temperature) if truncated else 1 / (1 + temperature**3)
    return f"exact {rounded:g}{' truncated' if truncated else ''}", prior
