"""Figures of a bench: speed and acceptance, with bootstrap intervals over questions."""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from medusa_cli.bench.questions import Question
from medusa_cli.decode import Stats, Step

ROUNDS = 2000
LEVEL = 0.95
Sums = NDArray[np.float64]


@dataclass
class Measurement:
    """Holds a method's answer to a question: token ids of each turn, seconds, and sums over steps.

    Only our loop records steps. depths: the number of steps by the number of draft tokens that they accepted. The
    prefill is not a step. first_token_s: seconds until the first token of each turn; empty if not known. cached: the
    number of cached tokens in each turn's prompt; empty if not known.
    """

    turns: list[list[int]] = field(default_factory=list)
    seconds: float = 0.0
    first_token_s: list[float] = field(default_factory=list)
    cached: list[int] = field(default_factory=list)
    stats: Stats = field(default_factory=Stats)
    depths: Counter[int] = field(default_factory=Counter)

    @property
    def tokens(self) -> int:
        return sum(map(len, self.turns))

    def add(self, step: Step) -> None:
        """Adds a step to the last turn."""
        self.turns[-1] += step.tokens
        self.stats.add(step)
        if step.path:
            self.depths[len(step.path) - 1] += 1

    def extend(self, turn: "Measurement") -> None:
        """Appends `turn`, which holds the answer to the next turn."""
        self.turns += turn.turns
        self.seconds += turn.seconds
        self.first_token_s += turn.first_token_s
        self.cached += turn.cached
        self.stats += turn.stats
        self.depths += turn.depths


@dataclass
class Result:
    """Holds a question, the prompt of each turn, and each method's answer."""

    question: Question
    prompts: list[list[int]] = field(default_factory=list)
    answers: dict[str, Measurement] = field(default_factory=dict)


def reference_of(names: Sequence[str]) -> str:
    """Returns the method whose answers the others must match: our plain loop, otherwise hf, otherwise the first."""
    return next((name for name in ("ar", "hf") if name in names), names[0])


def baseline_of(names: Sequence[str]) -> str:
    """Returns the method to which speedups are relative: hf, otherwise our plain loop, otherwise the first."""
    return next((name for name in ("hf", "ar") if name in names), names[0])


def summarize(
    results: Sequence[Result],
    differences: Mapping[str, Sequence[Any]] | None,
    plain: Mapping[str, str | None] | None = None,
) -> dict[str, Any]:
    """Returns the figures of every method by name; docs/measuring.md explains each figure.

    differences: for each method, the first difference in every answer that differs from the
    reference's; None if answers are not compared. plain: for each method, the method that decodes
    the same way but without drafts.
    """
    names = list(results[0].answers)
    baseline = baseline_of(names)
    categories: dict[str, list[Result]] = {}
    for result in results:
        categories.setdefault(result.question.category, []).append(result)
    totals = {name: _total(results, name) for name in names}
    plain_step = totals["ar"].step_s if "ar" in names else 0.0
    methods = {}
    for name, stats in totals.items():
        answers = [result.answers[name] for result in results]
        different = None if differences is None else differences[name]
        own_plain = None if plain is None or different is None else plain.get(name)
        seconds = stats.draft_s + stats.verify_s
        methods[name] = {
            **_rates(results, name, baseline),
            **_generation(results, name, baseline),
            "overhead": stats.step_s / plain_step if stats.steps and plain_step else None,
            "step_ms": 1e3 * stats.step_s if stats.steps else None,
            "draft_share": stats.draft_s / seconds if stats.steps else None,
            "identical": None if different is None else len(results) - len(different),
            "differences": different or [],
            "own_plain": _own_plain(results, name, own_plain),
            "tokens": sum(answer.tokens for answer in answers),
            "seconds": sum(answer.seconds for answer in answers),
            "by_position": by_position([answer.depths for answer in answers]),
            "answers": [
                {
                    "question": result.question.id,
                    "tokens": answer.tokens,
                    "seconds": answer.seconds,
                    **{key: getattr(answer.stats, key) for key in ("steps", "drafted", "accepted")},
                }
                for result, answer in zip(results, answers, strict=True)
            ],
            "per_category": {
                category: _rates(part, name, baseline) for category, part in categories.items()
            },
        }
    return {"baseline": baseline, "reference": reference_of(names), "methods": methods}


def _own_plain(results: Sequence[Result], name: str, plain: str | None) -> dict[str, Any] | None:
    """Returns how many answers equal those of the same program without drafts; None if there is no such method.

    drafted: the number of draft tokens, or None if the program does not report it.
    """
    if plain is None:
        return None
    pairs = [(result.answers[name], result.answers[plain]) for result in results]
    drafted = sum(own.stats.drafted for own, _ in pairs)
    same = sum(own.turns == other.turns for own, other in pairs)
    return {"method": plain, "identical": same, "drafted": drafted or None}


def _total(results: Sequence[Result], name: str) -> Stats:
    total = Stats()
    for result in results:
        total += result.answers[name].stats
    return total


def _rates(results: Sequence[Result], name: str, baseline: str) -> dict[str, Any]:
    """Returns tokens/s, speedup and acceptance length over some questions, with their 95 % intervals."""
    pairs = [(result.answers[name], result.answers[baseline]) for result in results]
    times = np.array(
        [[own.tokens, own.seconds, plain.tokens, plain.seconds] for own, plain in pairs], float
    )
    stats = [own.stats for own, _ in pairs if own.stats.steps]
    steps = np.array([[part.accepted + part.steps, part.steps] for part in stats], float).reshape(
        -1, 2
    )
    # Other programs report no steps. Their names say whether they draft (llama.cpp-ngram).
    reports = any(own.stats.tokens for own, _ in pairs)
    unmeasured = None if reports or "-" in name else 1.0
    return {
        "questions": len(results),
        "tokens_per_s": float(rate(times.sum(axis=0))),
        "tokens_per_s_95": bootstrap(times, rate),
        "speedup": float(ratio_of_rates(times.sum(axis=0))),
        "speedup_95": None if name == baseline else bootstrap(times, ratio_of_rates),
        "acceptance_length": float(rate(steps.sum(axis=0))) if len(steps) else unmeasured,
        "acceptance_length_95": bootstrap(steps, rate),
    }


def _generation(results: Sequence[Result], name: str, baseline: str) -> dict[str, Any]:
    """Returns the time to the first token, and tokens/s and speedup (with its 95 % interval) after the first token.

    A figure is None if a method that it needs reported its answers in one piece.
    """
    figures: dict[str, Any] = dict.fromkeys(
        ("first_token_s", "generation_per_s", "generation_speedup", "generation_speedup_95")
    )
    own = _after_first([result.answers[name] for result in results])
    if own is None:
        return figures
    figures["first_token_s"] = float(rate(own[:, 2:].sum(axis=0)))
    figures["generation_per_s"] = float(rate(own[:, :2].sum(axis=0)))
    plain = _after_first([result.answers[baseline] for result in results])
    if plain is None:
        return figures
    pairs = np.hstack([own[:, :2], plain[:, :2]])
    figures["generation_speedup"] = float(ratio_of_rates(pairs.sum(axis=0)))
    if name != baseline:
        figures["generation_speedup_95"] = bootstrap(pairs, ratio_of_rates)
    return figures


def _after_first(answers: Sequence[Measurement]) -> Sums | None:
    """Returns [Q, 4]: tokens and seconds after the first token, seconds until the first token, and turns.

    Returns None if the time of a first token is not known, or no answer has a second token.
    """
    rows = []
    for answer in answers:
        if len(answer.first_token_s) < len(answer.turns):
            return None
        first = sum(answer.first_token_s)
        turns = len(answer.turns)
        after = sum(max(len(tokens) - 1, 0) for tokens in answer.turns)
        rows.append([after, answer.seconds - first, first, turns])
    table = np.array(rows, float)
    return table if table[:, 0].any() else None


def by_turn(results: Sequence[Result], name: str) -> list[dict[str, float]]:
    """Returns, for each turn, the mean time to its first token, length of its prompt and cached share of the prompt.

    Returns an empty list for a method that does not report these figures.
    """
    rows = []
    for turn in range(max(len(result.prompts) for result in results)):
        asked = [result for result in results if len(result.prompts) > turn]
        answers = [result.answers[name] for result in asked]
        if any(min(len(own.first_token_s), len(own.cached)) <= turn for own in answers):
            return []
        tokens = sum(len(result.prompts[turn]) for result in asked)
        rows.append(
            {
                "first_token_s": sum(own.first_token_s[turn] for own in answers) / len(asked),
                "prompt_tokens": tokens / len(asked),
                "cached": sum(own.cached[turn] for own in answers) / tokens,
            }
        )
    return rows


def by_position(
    answers: Sequence[Mapping[int, int]],
) -> list[dict[str, float | tuple[float, float] | None]]:
    """Returns the acceptance at draft positions 1, 2, ... from each answer's number of steps by accepted depth.

    reached: the share of all steps that accepted the position (as in vLLM and SPEED-Bench), with its interval. after:
    the share of the steps that accepted the previous position (EAGLE's k-alpha).
    """
    width = 1 + max((depth for depths in answers for depth in depths), default=0)
    table = np.array([[depths.get(k, 0) for k in range(width)] for depths in answers], float)
    counts = table[:, ::-1].cumsum(axis=1)[:, ::-1]  # [answers, at least k accepted]
    total = counts.sum(axis=0)
    return [
        {
            "reached": float(total[k] / total[0]),
            "reached_95": bootstrap(counts[:, [k, 0]], rate),
            "after": float(total[k] / total[k - 1]),
        }
        for k in range(1, width)
    ]


def bootstrap(
    columns: Sequence[Sequence[float]] | Sums, figure: Callable[[Sums], Sums]
) -> tuple[float, float] | None:
    """Returns the 95 % interval of a figure over questions drawn with replacement.

    columns [Q, C]: the contribution of each question to the sums. figure: maps sums [..., C] to the
    figure [...]. The columns of two methods are in one row, so that their ratio is resampled in
    pairs. Returns None for fewer than two questions.
    """
    table = np.asarray(columns, dtype=np.float64)
    if len(table) < 2:
        return None
    draws = np.random.default_rng(0).multinomial(
        len(table), np.full(len(table), 1 / len(table)), size=ROUNDS
    )
    with np.errstate(divide="ignore", invalid="ignore"):
        values = figure(draws @ table)  # [rounds]
    values = values[np.isfinite(values)]  # a sample with only empty answers has no rate
    if not len(values):
        return None
    low, high = np.quantile(values, [(1 - LEVEL) / 2, (1 + LEVEL) / 2])
    return float(low), float(high)


def rate(sums: Sums) -> Sums:
    """Returns column 0 divided by column 1."""
    return sums[..., 0] / sums[..., 1]


def ratio_of_rates(sums: Sums) -> Sums:
    """Returns (column 0 / column 1) / (column 2 / column 3)."""
    return rate(sums) / rate(sums[..., 2:])
