"""The answers of all methods to a bench's questions: interleaved, timed, and compared by the model's logits."""

import logging
import math
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch

from medusa_cli.bench.methods import Method
from medusa_cli.bench.stats import Measurement, Result, reference_of
from medusa_cli.decode.answer import likelihoods
from medusa_cli.decode.ngram import shared_length
from medusa_cli.engine import Plan
from medusa_cli.errors import UserError
from medusa_cli.model import Backbone

WARM_UP_TOKENS = 24
log = logging.getLogger(__name__)

# Receives a method's name, the results of the questions that the method is answering, and new
# tokens. An empty list of tokens means that the answers to this turn are complete.
OnTokens = Callable[[str, list[Result], list[int]], None]
# Returns the context manager for a run of methods that share a backbone; receives the number of
# turns that they answer.
Watch = Callable[[Backbone, int], AbstractContextManager[OnTokens]]


def unwatched(backbone: Backbone, turns: int) -> AbstractContextManager[OnTokens]:
    return nullcontext(lambda name, results, tokens: None)


class Clock:
    """Times an answer, and passes its new tokens on."""

    def __init__(self, on_tokens: Callable[[list[int]], None]) -> None:
        self._on_tokens = on_tokens
        self._start = time.perf_counter()
        self._reports: list[float] = []

    def __call__(self, tokens: list[int]) -> None:
        self._reports.append(self.seconds())
        self._on_tokens(tokens)

    def seconds(self) -> float:
        return time.perf_counter() - self._start

    def first_token_s(self, tokens: int) -> list[float]:
        """Returns the seconds until the first of `tokens` tokens, in a list; an empty list if all came in one piece."""
        in_parts = len(self._reports) > 1 or tokens <= 1
        return [*self._reports, self.seconds()][:1] if in_parts else []


def answer_all(
    backbone: Backbone,
    methods: Mapping[str, Method],
    results: list[Result],
    max_new_tokens: int,
    batch_size: int = 1,
    cached: bool = False,
    watch: Watch = unwatched,
) -> None:
    """Adds each method's answers to the results after a warm-up; the order of methods rotates between batches.

    All methods get the same prompts, in which the reference method's answers are the history of later turns. Results
    that other methods have already answered keep their prompts. A batch of questions is answered turn by turn, and the
    time of a turn is divided in proportion to tokens. Raises UserError before any measurement if a question is longer
    than the context. Later turns that are longer than the context are left out.
    """
    names = list(methods)
    fresh = not results[0].prompts
    if not names:
        return
    for result in results if fresh else ():
        _add_prompt(backbone, result, 0, "")
    _warm_up(methods, results, min(WARM_UP_TOKENS, max_new_tokens), batch_size, cached)
    turns = sum(len(result.question.turns) for result in results)
    with watch(backbone, turns * len(names)) as on_tokens:
        for number, first in enumerate(range(0, len(results), batch_size)):
            group = results[first : first + batch_size]
            shift = number % len(names)
            for result in group:
                result.answers |= {name: Measurement() for name in names}
            for turn in range(max(len(result.question.turns) for result in group)):
                for result in group if turn and fresh else ():
                    _add_prompt(backbone, result, turn, reference_of(names))
                asked = [result for result in group if len(result.prompts) > turn]
                for name in names[shift:] + names[:shift] if asked else ():
                    report = partial(on_tokens, name, asked)
                    answers = _timed(methods[name], asked, turn, max_new_tokens, report)
                    for result, answer in zip(asked, answers, strict=True):
                        result.answers[name].extend(answer)
                    report([])


def _warm_up(
    methods: Mapping[str, Method], results: list[Result], tokens: int, batch_size: int, cached: bool
) -> None:
    """Lets each method begin to answer the first prompt, as a single sequence and in a batch."""
    prompt = results[0].prompts[0]
    if cached:
        # Only the second half is run, because a run of the whole prompt would leave the prompt in
        # the prefix cache.
        prompt = prompt[len(prompt) // 2 :]
    for method in methods.values():
        # A batch may be decoded without drafts. A single sequence drafts, which also packs the
        # drafter's weights.
        for together in sorted({1, min(batch_size, len(results))}):
            method([prompt] * together, tokens, lambda new: None)


def _timed(
    method: Method,
    results: list[Result],
    turn: int,
    max_new_tokens: int,
    on_tokens: Callable[[list[int]], None],
) -> list[Measurement]:
    """Returns a method's answers to the prompts of a turn; the time is divided among the answers by their tokens."""
    clock = Clock(on_tokens)
    answers = method([result.prompts[turn] for result in results], max_new_tokens, clock)
    seconds = clock.seconds() / max(sum(answer.tokens for answer in answers), 1)
    if len(answers) == 1 and not answers[0].first_token_s:
        answers[0].first_token_s = clock.first_token_s(answers[0].tokens)
    for answer in answers:
        answer.seconds = seconds * answer.tokens
    return answers


def _add_prompt(backbone: Backbone, result: Result, turn: int, reference: str) -> None:
    """Adds a turn's prompt if the question has this turn, and if its prompt and the earlier prompts fit in the context.

    Raises UserError if a first turn does not fit.
    """
    question = result.question
    if len(result.prompts) < turn or len(question.turns) <= turn:
        return
    answered = result.answers[reference].turns if turn else []
    answers = [backbone.decode(tokens) for tokens in answered]
    messages = [] if question.system is None else [{"role": "system", "content": question.system}]
    for asked, answer in zip(question.turns[:turn], answers, strict=True):
        messages += [{"role": "user", "content": asked}, {"role": "assistant", "content": answer}]
    prompt = backbone.encode_chat([*messages, {"role": "user", "content": question.turns[turn]}])
    if len(prompt) < backbone.max_positions:
        result.prompts.append(prompt)
        return
    text = (
        f"turn {turn + 1} of question {question.id!r} has {len(prompt):,} tokens with its history, "
    )
    text += f"the context of {backbone.id!r} is {backbone.max_positions:,}"
    if turn == 0:
        raise UserError(f"@questions: {text}", "leave it out, or shorten it")
    log.warning("%s: it is left out", text)


def first_difference(
    backbone: Backbone, result: Result, name: str, reference: str
) -> dict[str, Any] | None:
    """Returns where a method's tokens first differ from the reference's, or None if they are identical.

    margin: the difference between the model's logits of the two tokens. If the margin is near 0, rounding decided a
    tie.
    """
    pairs = zip(result.answers[reference].turns, result.answers[name].turns, strict=True)
    for turn, (expected, actual) in enumerate(pairs):
        if expected == actual:
            continue
        place: dict[str, Any] = {"question": result.question.id, "turn": turn}
        same = shared_length(expected, actual)
        if same == min(len(expected), len(actual)):  # one is a prefix of the other
            return place | {"position": same, "margin": 0.0}
        ids = torch.tensor([*result.prompts[turn], *expected[:same]])
        # [V]
        logits = backbone.engine.forward(Plan.chain(ids), backbone.engine.new_cache()).logits[0, -1]
        tokens = {"expected": expected[same], "actual": actual[same]}
        margin = float(logits[expected[same]] - logits[actual[same]])
        return place | {"position": same, **tokens, "margin": margin}
    return None


def likelihood(backbone: Backbone, results: Sequence[Result]) -> dict[str, dict[str, float]]:
    """Returns how likely each method's first-turn answers are under the model's distribution at temperature 1.

    nll: the negative log-likelihood in nats per token. perplexity: the exponential of nll. agreement: the share of
    tokens that are the model's first choice.
    """
    quality = {}
    for name in results[0].answers:
        nll = 0.0
        same = 0
        count = 0
        for result in results:
            prompt = result.prompts[0]
            answer = result.answers[name].turns[0]
            cache = backbone.engine.new_cache()
            # Only the prompt's last position gives logits, because logits of the whole prompt would
            # take gigabytes.
            if len(prompt) > 1:
                backbone.engine.forward(Plan.chain(prompt[:-1], logits="none"), cache)
            rest = Plan.chain([prompt[-1], *answer[:-1]], logits="all")
            logits = backbone.engine.forward(rest, cache).logits[0]
            for token in likelihoods(logits, answer, 1):
                nll -= token.logprob
                same += token.token == token.top[0][0]
            count += len(answer)
        mean = nll / max(count, 1)
        quality[name] = {
            "nll": mean,
            "perplexity": math.exp(mean),
            "agreement": same / max(count, 1),
            "tokens": count,
        }
    return quality
