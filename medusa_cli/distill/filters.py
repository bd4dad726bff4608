"""Seeds to answer: their order, and those that ask what no other asks."""

import random
import unicodedata
from collections.abc import Collection, Sequence

from medusa_cli.data.conversation import Conversation

# Seeds are sorted by length within windows of this many batches: neighbours in the batch then have like lengths
# (attention runs to the longest), while the order over all windows stays mixed.
WINDOW = 8


def in_order(
    seeds: Sequence[Conversation], random_seed: int, batch_size: int, max_samples: int | None = None
) -> list[Conversation]:
    """Shuffles seeds, takes max_samples and sorts them by length within windows; the same for every resume."""
    mixed = list(seeds)
    random.Random(random_seed).shuffle(mixed)
    mixed = mixed[:max_samples]
    size = WINDOW * batch_size
    windows = [mixed[start : start + size] for start in range(0, len(mixed), size)]
    return [seed for window in windows for seed in sorted(window, key=lambda seed: sum(map(len, seed.turns)))]


def unique(seeds: Sequence[Conversation], answered: Collection[str] = ()) -> list[Conversation]:
    """Returns the seeds in order, one of those that open with the same prompt; one answered already stays.

    Prompts are the same if they differ in case, white space and Unicode form alone.
    """
    first: dict[tuple[str, str], str] = {}
    for seed in sorted(seeds, key=lambda seed: seed.id not in answered):
        first.setdefault((normalise(seed.system or ""), normalise(seed.turns[0])), seed.id)
    kept = set(first.values())
    return [seed for seed in seeds if seed.id in kept or seed.id in answered]


def normalise(text: str) -> str:
    """Returns a text without what does not tell two prompts apart."""
    return " ".join(unicodedata.normalize("NFKC", text).casefold().split())
