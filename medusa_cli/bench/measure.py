"""The measurement: all methods answer all questions in turns; identity with plain decoding; every figure."""

import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol

import numpy as np
import torch

from medusa_cli.bench.methods import Answer, Method
from medusa_cli.bench.questions import Question
from medusa_cli.bench.stats import PathStats, bootstrap, by_position, rate, ratio_of_rates
from medusa_cli.engine import Plan
from medusa_cli.errors import UserError
from medusa_cli.model import Backbone

WARM_UP_TOKENS = 24
log = logging.getLogger(__name__)


@dataclass
class Result:
    """A question, the prompt of each turn, and each method's answer."""

    question: Question
    prompts: list[list[int]] = field(default_factory=list)
    answers: dict[str, Answer] = field(default_factory=dict)


class Watcher(Protocol):
    """Sees methods at work."""

    def begin(self, backbone: Backbone, names: Sequence[str]) -> None:
        """The methods of these names are about to answer all questions."""

    def tokens(self, name: str, new: list[int]) -> None:
        """A method gave new tokens; none: its answer has ended."""

    def answered(self, result: Result) -> None:
        """The methods have answered a question."""


class Silent:
    """A watcher that shows nothing."""

    def begin(self, backbone: Backbone, names: Sequence[str]) -> None: ...

    def tokens(self, name: str, new: list[int]) -> None: ...

    def answered(self, result: Result) -> None: ...


SILENT = Silent()


def reference_of(names: Sequence[str]) -> str:
    """Returns the method whose answers the others must equal: our plain loop, else hf, else the first."""
    return next((name for name in ("ar", "hf") if name in names), names[0])


def baseline_of(names: Sequence[str]) -> str:
    """Returns the method that speedups are over: hf, else our plain loop, else the first."""
    return next((name for name in ("hf", "ar") if name in names), names[0])


def measure(
    backbone: Backbone,
    methods: Mapping[str, Method],
    results: Sequence[Result],
    max_new_tokens: int,
    *,
    batch_size: int = 1,
    watcher: Watcher = SILENT,
) -> None:
    """Adds each method's answers to the results, after a warm-up. The order of methods rotates between questions.

    All methods get the same prompts: the reference's answer is the history of the next turn. Results that other methods
    have answered before keep their prompts. `batch_size` questions are answered side by side, turn by turn. Raises
    UserError, before anything is measured, for a question longer than the context; later turns that are longer than the
    context are left out.
    """
    names, fresh = list(methods), not results[0].prompts
    for result in results if fresh else ():
        result.prompts.append(_first_prompt(backbone, result.question))
    watcher.begin(backbone, names)
    for method in methods.values():
        warm_up = [results[0].prompts[0]] * min(batch_size, len(results))
        method(warm_up, min(WARM_UP_TOKENS, max_new_tokens), lambda tokens: None)
    for number, first in enumerate(range(0, len(results), batch_size)):
        group, shift = results[first : first + batch_size], number % len(names)
        for result in group:
            result.answers |= {name: Answer() for name in names}
        for turn in range(max(len(result.question.turns) for result in group)):
            if turn and fresh:
                for result in group:
                    _add_prompt(backbone, result, turn, reference_of(names))
            asked = [result for result in group if len(result.prompts) > turn]
            if not asked:
                break
            for name in names[shift:] + names[:shift]:
                prompts = [result.prompts[turn] for result in asked]
                answers = methods[name](prompts, max_new_tokens, partial(watcher.tokens, name))
                watcher.tokens(name, [])
                for result, answer in zip(asked, answers, strict=True):
                    result.answers[name].extend(answer)
        for result in group:
            watcher.answered(result)


def _first_prompt(backbone: Backbone, question: Question) -> list[int]:
    prompt = backbone.encode_chat([{"role": "user", "content": question.turns[0]}])
    if len(prompt) >= backbone.max_positions:
        raise UserError(
            f"@questions: question {question.id!r} has {len(prompt):,} tokens, {backbone.id!r} has a context of "
            f"{backbone.max_positions:,}",
            "leave it out, or shorten it",
        )
    return prompt


def _add_prompt(backbone: Backbone, result: Result, turn: int, reference: str) -> None:
    """Adds the prompt of a turn after the answered ones, if there is such a turn and it fits into the context."""
    if len(result.prompts) < turn or len(result.question.turns) <= turn:
        return
    answers = [backbone.decode(tokens) for tokens in result.answers[reference].turns]
    messages = []
    for question, answer in zip(result.question.turns[:turn], answers, strict=True):
        messages += [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
    prompt = backbone.encode_chat([*messages, {"role": "user", "content": result.question.turns[turn]}])
    if len(prompt) < backbone.max_positions:
        result.prompts.append(prompt)
    else:
        log.warning(
            f"turn {turn + 1} of question {result.question.id!r} is left out: it has {len(prompt):,} tokens with its "
            f"history, {backbone.id!r} has a context of {backbone.max_positions:,}"
        )


def first_difference(backbone: Backbone, result: Result, name: str, reference: str) -> dict[str, Any] | None:
    """Returns where a method's tokens leave the reference's, None if they are the same.

    margin: between the logits of both tokens in the model; near 0, rounding decided a tie.
    """
    pairs = zip(result.answers[reference].turns, result.answers[name].turns, strict=True)
    for turn, (expected, actual) in enumerate(pairs):
        if expected == actual:
            continue
        place: dict[str, Any] = {"question": result.question.id, "turn": turn}
        shorter = min(len(expected), len(actual))
        same = next((i for i in range(shorter) if expected[i] != actual[i]), shorter)
        if same == shorter:  # one is the beginning of the other
            return place | {"position": same, "margin": 0.0}
        ids = torch.tensor([*result.prompts[turn], *expected[:same]])
        logits = backbone.engine.forward(Plan.chain(ids), backbone.engine.new_cache()).logits[0, -1]  # [V]
        tokens = {"expected": expected[same], "actual": actual[same]}
        return place | {"position": same, **tokens, "margin": float(logits[expected[same]] - logits[actual[same]])}
    return None


@torch.inference_mode()
def likelihood(backbone: Backbone, results: Sequence[Result]) -> dict[str, dict[str, float]]:
    """Returns each method's answers to first turns under the model's own distribution at temperature 1.

    nll: nats a token; perplexity: its exponential; agreement: share of tokens that are the model's first choice.
    """
    quality = {}
    for name in results[0].answers:
        nll, same, count = 0.0, 0, 0
        for result in results:
            prompt, answer = result.prompts[0], result.answers[name].turns[0]
            ids = torch.tensor([*prompt, *answer], device=backbone.device)
            logits = backbone.engine.forward(Plan.chain(ids, logits="all"), backbone.engine.new_cache()).logits[0]
            log_p = logits[len(prompt) - 1 : -1].float().log_softmax(-1)  # [T, V], the rows that emit the answer
            emitted = ids[len(prompt) :]
            nll -= float(log_p.gather(1, emitted[:, None]).sum())
            same += int((log_p.argmax(-1) == emitted).sum())
            count += len(answer)
        mean = nll / max(count, 1)
        quality[name] = {"nll": mean, "perplexity": math.exp(mean), "agreement": same / max(count, 1), "tokens": count}
    return quality


def summarise(results: Sequence[Result], differences: Mapping[str, Sequence[Any]] | None) -> dict[str, Any]:
    """Returns every method's figures, by name; the README says what each means.

    differences: of each method, the first difference of every question that has one; None: not compared.
    """
    names = list(results[0].answers)
    baseline, reference = baseline_of(names), reference_of(names)
    plain_step = total_stats(results, "ar").step_s if "ar" in names else None
    methods = {}
    for name in names:
        answers, stats = [result.answers[name] for result in results], total_stats(results, name)
        parted = None if differences is None else list(differences.get(name, ()))
        categories = dict.fromkeys(result.question.category for result in results)
        methods[name] = {
            **_figures(results, name, baseline),
            "overhead": stats.step_s / plain_step if stats.steps and plain_step else None,
            "step_ms": 1e3 * stats.step_s if stats.steps else None,
            "draft_share": stats.draft_s / (stats.draft_s + stats.verify_s) if stats.steps else None,
            "identical": None if parted is None else len(results) - len(parted),
            "differences": parted or [],
            "tokens": sum(answer.tokens for answer in answers),
            "seconds": sum(answer.seconds for answer in answers),
            "depths": stats.by_depth(),
            "by_position": by_position([answer.stats.by_depth() for answer in answers if answer.stats is not None]),
            "hits": stats.tree_hits(),
            "answers": [_sums(result, name) for result in results],
            "per_category": {
                category: _figures([part for part in results if part.question.category == category], name, baseline)
                for category in categories
            },
        }
    return {"baseline": baseline, "reference": reference, "methods": methods}


def total_stats(results: Sequence[Result], name: str) -> PathStats:
    total = PathStats()
    for result in results:
        if (stats := result.answers[name].stats) is not None:
            total += stats
    return total


def _figures(results: Sequence[Result], name: str, baseline: str) -> dict[str, Any]:
    """Returns tokens/s, speedup and acceptance length over some questions, with their 95 % intervals."""
    answers = [result.answers[name] for result in results]
    plain = [result.answers[baseline] for result in results]
    times = np.array([[a.tokens, a.seconds, b.tokens, b.seconds] for a, b in zip(answers, plain, strict=True)], float)
    stats = [answer.stats for answer in answers if answer.stats is not None and answer.stats.steps]
    steps = np.array([[part.accepted + part.steps, part.steps] for part in stats], float).reshape(-1, 2)
    return {
        "questions": len(results),
        "tokens_per_s": float(rate(times.sum(axis=0))),
        "tokens_per_s_95": bootstrap(times, rate),
        "speedup": float(ratio_of_rates(times.sum(axis=0))),
        "speedup_95": None if name == baseline else bootstrap(times, ratio_of_rates),
        "acceptance_length": float(rate(steps.sum(axis=0))) if len(steps) else 1.0,
        "acceptance_length_95": bootstrap(steps, rate),
    }


def _sums(result: Result, name: str) -> dict[str, Any]:
    """Returns what one question adds to a method's sums."""
    answer = result.answers[name]
    row: dict[str, Any] = {"question": result.question.id, "tokens": answer.tokens, "seconds": answer.seconds}
    if answer.stats is not None:
        row |= {key: getattr(answer.stats, key) for key in ("steps", "drafted", "accepted")}
    return row
