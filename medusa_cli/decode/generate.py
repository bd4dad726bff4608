"""Short ways to decode with a decoder of its own."""

from collections.abc import Iterator, Sequence
from typing import Any

from medusa_cli.decode.decoder import Decoder
from medusa_cli.decode.policy import DraftPolicy
from medusa_cli.decode.sequence import Request
from medusa_cli.decode.stats import Step
from medusa_cli.drafters.base import Drafter
from medusa_cli.errors import UsageError
from medusa_cli.model import Backbone
from medusa_cli.tree import DynamicTree, Tree

Drafting = DraftPolicy | Tree | DynamicTree | None


def answer(decoder: Decoder, prompt: Sequence[int], **rules: Any) -> Iterator[Step]:
    """Yields the steps of one request, whose fields the rules are. Closing the iterator frees the slot."""
    sequence, first = decoder.admit(Request(prompt, **rules))
    try:
        yield first
        while not sequence.done:
            yield from (step for other, step in decoder.step() if other is sequence)
    finally:
        decoder.cancel(sequence)


def generate(
    backbone: Backbone, drafter: Drafter | None, policy: Drafting, prompt: Sequence[int], **rules: Any
) -> Iterator[Step]:
    """Yields the steps of one prompt; without a drafter decoding is plain."""
    yield from answer(Decoder(backbone, drafter, policy), prompt, **rules)


def generate_plain(backbone: Backbone, prompt: Sequence[int], **rules: Any) -> Iterator[Step]:
    """Yields the steps of plain decoding, the reference of every drafter."""
    yield from generate(backbone, None, None, prompt, **rules)


def generate_batch(
    backbone: Backbone,
    drafter: Drafter | None,
    policy: Drafting,
    prompts: Sequence[Sequence[int]],
    *,
    batch_size: int,
    **rules: Any,
) -> Iterator[tuple[int, Step]]:
    """Yields the steps of many prompts with their numbers, `batch_size` prompts at a time."""
    if batch_size < 1:
        raise UsageError(f"@batch_size {batch_size} is too small", "use 1 or more")
    decoder = Decoder(backbone, drafter, policy, slots=max(1, min(batch_size, len(prompts))))
    if rules.get("stop_ids") is not None:
        rules["stop_ids"] = frozenset(rules["stop_ids"])  # read by every prompt
    for sequence, step in decoder.run(Request(prompt, **rules) for prompt in prompts):
        yield sequence.number, step
