"""One answer, or many side by side, as their steps come."""

from collections.abc import Iterable, Iterator, Sequence

from medusa_cli.backbone import Backbone
from medusa_cli.decoding.decoder import Decoder
from medusa_cli.decoding.pace import Pace
from medusa_cli.decoding.sampling import Sampling
from medusa_cli.decoding.types import Step
from medusa_cli.drafters.base import Drafter
from medusa_cli.errors import UsageError
from medusa_cli.tree import Growth, Tree


def answer(
    decoder: Decoder,
    prompt: Sequence[int],
    *,
    max_new_tokens: int,
    sampling: Sampling | None = None,
    stop_ids: Iterable[int] | None = None,
    stop_strings: Sequence[str] = (),
) -> Iterator[Step]:
    """Continue a prompt of token ids step by step; the tokens of all steps together are the answer.

    A caller that stops listening frees the slot. Errors as Decoder.admit raises them.
    """
    sequence, first = decoder.admit(
        prompt, max_new_tokens=max_new_tokens, sampling=sampling, stop_ids=stop_ids, stop_strings=stop_strings
    )
    try:
        yield first
        while not sequence.done:
            yield from (step for one, step in decoder.step() if one is sequence)
    finally:
        decoder.cancel(sequence)


def generate(
    backbone: Backbone,
    drafter: Drafter | None,
    tree: Tree | Growth | Pace | None,
    prompt: Sequence[int],
    *,
    max_new_tokens: int,
    sampling: Sampling | None = None,
    stop_ids: Iterable[int] | None = None,
    stop_strings: Sequence[str] = (),
) -> Iterator[Step]:
    """Continue one prompt with a decoder of its own; without a drafter this is plain decoding."""
    decoder = Decoder(backbone, drafter, tree)
    yield from answer(
        decoder,
        prompt,
        max_new_tokens=max_new_tokens,
        sampling=sampling,
        stop_ids=stop_ids,
        stop_strings=stop_strings,
    )


def generate_plain(
    backbone: Backbone,
    prompt: Sequence[int],
    *,
    max_new_tokens: int,
    sampling: Sampling | None = None,
    stop_ids: Iterable[int] | None = None,
    stop_strings: Sequence[str] = (),
) -> Iterator[Step]:
    """Continue a prompt one token a step: the reference that every drafter is held against."""
    yield from generate(
        backbone,
        None,
        None,
        prompt,
        max_new_tokens=max_new_tokens,
        sampling=sampling,
        stop_ids=stop_ids,
        stop_strings=stop_strings,
    )


def generate_batch(
    backbone: Backbone,
    drafter: Drafter | None,
    tree: Tree | Growth | Pace | None,
    prompts: Sequence[Sequence[int]],
    *,
    batch_size: int,
    max_new_tokens: int,
    sampling: Sampling | None = None,
    stop_ids: Iterable[int] | None = None,
    stop_strings: Sequence[str] = (),
) -> Iterator[tuple[int, Step]]:
    """Continue many prompts, `batch_size` at a time; yields each one's steps with its number, in no fixed order.

    Every prompt gets what it would get alone, drawn with the seed plus its number.
    """
    if batch_size < 1:
        raise UsageError(f"@batch_size {batch_size} is too small", "use 1 or more")
    stop_ids = None if stop_ids is None else frozenset(stop_ids)  # read by every prompt
    decoder = Decoder(backbone, drafter, tree, slots=max(1, min(batch_size, len(prompts))))
    for number, prompt in enumerate(prompts):
        while not decoder.room:
            yield from ((sequence.number, step) for sequence, step in decoder.step())
        _, first = decoder.admit(
            prompt,
            max_new_tokens=max_new_tokens,
            sampling=sampling,
            number=number,
            stop_ids=stop_ids,
            stop_strings=stop_strings,
        )
        yield number, first
    while decoder.rows:
        yield from ((sequence.number, step) for sequence, step in decoder.step())
