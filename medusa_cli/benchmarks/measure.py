"""Measurement: every method answers every question in turn, on the same prompts, so that drift hits all alike."""

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch

from medusa_cli.backbone import Backbone
from medusa_cli.benchmarks.methods import Method
from medusa_cli.benchmarks.questions import Question
from medusa_cli.benchmarks.tally import Tally
from medusa_cli.engines import Plan
from medusa_cli.errors import UserError

log = logging.getLogger(__name__)
WARM_UP_TOKENS = 24


@dataclass(frozen=True)
class Divergence:
    """Where a method's tokens leave plain decoding's: turn and position, both tokens, and the margin between their
    logits in the plain model (near 0: a tie that rounding decided)."""

    turn: int
    position: int
    expected: int
    actual: int
    margin: float


@dataclass
class Answers:
    """One method's answers to one question: token ids a turn, seconds in all, step sums (None for hf)."""

    turns: list[list[int]] = field(default_factory=list)
    seconds: float = 0.0
    stats: Tally | None = None
    divergence: Divergence | None = None

    @property
    def tokens(self) -> int:
        return sum(map(len, self.turns))


@dataclass(frozen=True)
class Result:
    """A question with each method's answers."""

    question: Question
    answers: dict[str, Answers]


def reference_of(names: Sequence[str]) -> str:
    """The method whose answers the others are held against: our plain loop, else hf, else the first."""
    return next((name for name in ("ar", "hf") if name in names), names[0])


def measure(
    backbone: Backbone,
    methods: Mapping[str, Method],
    questions: Sequence[Question],
    max_new_tokens: int,
    *,
    batch_size: int = 1,
    compare: bool = True,
    watch: Callable[[str, list[int]], None] = lambda name, tokens: None,
    known: Sequence[Result] = (),
) -> Iterator[Result]:
    """Answers all turns of every question with every method, yielding question by question after a warm-up.

    All methods get the same prompts: the reference's answer is the history of the next turn. The order of the
    methods rotates from question to question. watch sees new tokens as they come, [] at an answer's end.
    batch_size: questions that are put side by side, turn by turn; answers of fewer turns leave their place empty.
    compare: look for the first difference to the reference. known: what other methods answered to these questions
    before; their answers are then the history, and are compared and yielded with the others. UserError, before anything
    is measured, for a question longer than the context; later turns that answers make longer than that are left out.
    """
    _check_room(backbone, questions)
    before = list(known[0].answers) if known else []
    reference, told = reference_of([*before, *methods]), reference_of(before or list(methods))
    warm = backbone.encode_chat([{"role": "user", "content": questions[0].turns[0]}])
    for method in methods.values():
        method([warm] * min(batch_size, len(questions)), min(WARM_UP_TOKENS, max_new_tokens), lambda tokens: None)
    names = list(methods)
    for number, first in enumerate(range(0, len(questions), batch_size)):
        shift = number % max(1, len(names))
        side_by_side = [
            _Asked(one, {**(known[place].answers if known else {}), **{name: Answers() for name in names}})
            for place, one in enumerate(questions[first : first + batch_size], first)
        ]
        asked = side_by_side
        for turn in range(max(len(one.question.turns) for one in side_by_side)):
            found = [(one, one.ask(backbone, turn)) for one in asked if turn < len(one.question.turns)]
            fitting = _fitting(backbone, found, turn, warned=bool(known))  # earlier methods had the same prompts
            asked, prompts = [one for one, _ in fitting], [prompt for _, prompt in fitting]
            if not asked:
                break
            for name in names[shift:] + names[:shift]:
                given = methods[name](prompts, max_new_tokens, lambda new, name=name: watch(name, new))  # type: ignore[misc]
                watch(name, [])  # the end of these answers
                for one, (tokens, seconds, stats) in zip(asked, given, strict=True):
                    answer = one.answers[name]
                    answer.turns.append(tokens)
                    answer.seconds += seconds
                    if stats is not None:
                        answer.stats = (answer.stats or Tally()).__iadd__(stats)
            for one, prompt in zip(asked, prompts, strict=True):
                expected = one.answers[reference].turns[turn]
                for name, answer in one.answers.items():
                    if compare and name != reference and answer.divergence is None:
                        answer.divergence = diverges(backbone, prompt, expected, answer.turns[turn], turn)
                one.messages.append({"role": "assistant", "content": backbone.decode(one.answers[told].turns[turn])})
        for one in side_by_side:
            yield Result(one.question, one.answers)


@dataclass
class _Asked:
    """A question under way: every method's answers so far, and the conversation all of them see."""

    question: Question
    answers: dict[str, Answers]
    messages: list[dict[str, str]] = field(default_factory=list)

    def ask(self, backbone: Backbone, turn: int) -> list[int]:
        """The prompt of a turn, which joins the conversation."""
        self.messages.append({"role": "user", "content": self.question.turns[turn]})
        return backbone.encode_chat(self.messages)


def _check_room(backbone: Backbone, questions: Sequence[Question]) -> None:
    for question in questions:
        length = len(backbone.encode_chat([{"role": "user", "content": question.turns[0]}]))
        if length >= backbone.max_positions:
            raise UserError(
                f"@questions: question {question.id!r} has {length:,} tokens, {backbone.id!r} has a context of "
                f"{backbone.max_positions:,}",
                "leave it out, or shorten it",
            )


def _fitting(
    backbone: Backbone, found: Sequence[tuple[_Asked, list[int]]], turn: int, warned: bool
) -> list[tuple[_Asked, list[int]]]:
    """The questions and their prompts of a turn that have room in the context; warns of the others unless `warned`."""
    fitting = list[tuple[_Asked, list[int]]]()
    for one, prompt in found:
        if len(prompt) < backbone.max_positions:
            fitting.append((one, prompt))
        elif not warned:
            log.warning(
                f"turn {turn + 1} of question {one.question.id!r} has {len(prompt):,} tokens with its history, "
                f"{backbone.id!r} a context of {backbone.max_positions:,}: it is left out"
            )
    return fitting


def diverges(
    backbone: Backbone, prompt: Sequence[int], expected: list[int], actual: list[int], turn: int
) -> Divergence | None:
    """The first position at which two answers to a prompt differ, None where they are the same."""
    if expected == actual:
        return None
    same = next((i for i, (a, b) in enumerate(zip(expected, actual, strict=False)) if a != b), None)
    if same is None:  # one is the beginning of the other
        position = min(len(expected), len(actual))
        return Divergence(turn, position, *(-1, -1), margin=0.0)
    ids = torch.tensor([*prompt, *expected[:same]])
    scores = backbone.engine.forward(Plan.chain(ids), backbone.engine.new_cache()).logits[0, -1]
    margin = float(scores[expected[same]] - scores[actual[same]])
    return Divergence(turn, same, expected[same], actual[same], margin)
