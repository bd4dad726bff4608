"""Bootstrap intervals over questions: how far a figure would move with other questions of the same kind."""

from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

ROUNDS = 2000
SHARE = 0.95

Sums = NDArray[np.float64]


def bootstrap(
    columns: Sequence[Sequence[float]], figure: Callable[[Sums], Sums], *, rounds: int = ROUNDS, seed: int = 0
) -> tuple[float, float] | None:
    """The interval that holds 95 % of a figure over questions drawn again with replacement; None below two questions.

    columns [Q, C]: what each question adds to the sums; figure: from sums [..., C] to the figure [...]. Methods that
    answered the same questions stand in one row, so that a ratio of theirs is drawn in pairs.
    """
    table = np.asarray(columns, dtype=np.float64)
    if len(table) < 2:
        return None
    draws = np.random.default_rng(seed).multinomial(len(table), np.full(len(table), 1 / len(table)), size=rounds)
    with np.errstate(divide="ignore", invalid="ignore"):
        values = figure(draws @ table)  # [rounds]
    values = values[np.isfinite(values)]  # a draw of empty answers alone has no rate
    if not len(values):
        return None
    low, high = np.quantile(values, [(1 - SHARE) / 2, (1 + SHARE) / 2])
    return float(low), float(high)


def rate(sums: Sums) -> Sums:
    """Column 0 over column 1."""
    return sums[..., 0] / sums[..., 1]


def ratio_of_rates(sums: Sums) -> Sums:
    """Columns 0 over 1, over columns 2 over 3."""
    return rate(sums) / rate(sums[..., 2:])
