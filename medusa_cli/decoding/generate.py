"""One answer, or many side by side, as their steps come."""

from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, TypedDict

from medusa_cli.backbone import Backbone
from medusa_cli.decoding.decoder import Decoder
from medusa_cli.decoding.lookup import Lookup
from medusa_cli.decoding.pace import Pace
from medusa_cli.decoding.sampling import Sampling
from medusa_cli.decoding.types import Step
from medusa_cli.drafters.base import Drafter
from medusa_cli.errors import UsageError
from medusa_cli.tree import Growth, Tree

if TYPE_CHECKING:
    from typing_extensions import Unpack

    Shape = Tree | Growth | Pace | Lookup | None


class Limit(TypedDict):
    max_new_tokens: int


class AnswerRules(Limit, total=False):
    """How an answer is made, as Decoder.admit takes it."""

    sampling: Sampling | None
    stop_ids: Iterable[int] | None
    stop_strings: Sequence[str]


def answer(decoder: Decoder, prompt: Sequence[int], **rules: "Unpack[AnswerRules]") -> Iterator[Step]:
    """Continue a prompt of token ids step by step; the tokens of all steps together are the answer.

    A caller that stops listening frees the slot. Errors as Decoder.admit raises them.
    """
    sequence, first = decoder.admit(prompt, **rules)
    try:
        yield first
        while not sequence.done:
            yield from (step for one, step in decoder.step() if one is sequence)
    finally:
        decoder.cancel(sequence)


def generate(
    backbone: Backbone, drafter: Drafter | None, shape: "Shape", prompt: Sequence[int], **rules: "Unpack[AnswerRules]"
) -> Iterator[Step]:
    """Continue one prompt with a decoder of its own; without a drafter this is plain decoding."""
    yield from answer(Decoder(backbone, drafter, shape), prompt, **rules)


def generate_plain(backbone: Backbone, prompt: Sequence[int], **rules: "Unpack[AnswerRules]") -> Iterator[Step]:
    """Continue a prompt one token a step: the reference that every drafter is held against."""
    yield from generate(backbone, None, None, prompt, **rules)


def generate_batch(
    backbone: Backbone,
    drafter: Drafter | None,
    shape: "Shape",
    prompts: Sequence[Sequence[int]],
    *,
    batch_size: int,
    **rules: "Unpack[AnswerRules]",
) -> Iterator[tuple[int, Step]]:
    """Continue many prompts, `batch_size` at a time; yields each one's steps with its number, in no fixed order.

    Every prompt gets what it would get alone, drawn with the seed plus its number.
    """
    if batch_size < 1:
        raise UsageError(f"@batch_size {batch_size} is too small", "use 1 or more")
    stop_ids = rules.get("stop_ids")
    rules["stop_ids"] = None if stop_ids is None else frozenset(stop_ids)  # read by every prompt
    decoder = Decoder(backbone, drafter, shape, slots=max(1, min(batch_size, len(prompts))))
    for number, prompt in enumerate(prompts):
        while not decoder.room:
            yield from ((sequence.number, step) for sequence, step in decoder.step())
        yield number, decoder.admit(prompt, number=number, **rules)[1]
    while decoder.rows:
        yield from ((sequence.number, step) for sequence, step in decoder.step())
