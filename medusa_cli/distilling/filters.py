"""Which seeds are worth an answer: one of those that ask the same."""

import unicodedata
from collections.abc import Collection, Sequence

from medusa_cli.distilling.seeds import Seed


def unique(seeds: Sequence[Seed], answered: Collection[str] = ()) -> list[Seed]:
    """The seeds in order without those that open with the same prompt as another; one answered already stays.

    Prompts are the same if they differ in case, white space and Unicode form alone.
    """
    chosen: dict[tuple[str, str], str] = {}
    for seed in sorted(seeds, key=lambda one: one.id not in answered):
        chosen.setdefault(_prompt(seed), seed.id)
    keep = set(chosen.values())
    return [seed for seed in seeds if seed.id in keep or seed.id in answered]


def _prompt(seed: Seed) -> tuple[str, str]:
    return plain(seed.system or ""), plain(seed.turns[0])


def plain(text: str) -> str:
    """A text without what does not tell two prompts apart."""
    return " ".join(unicodedata.normalize("NFKC", text).casefold().split())
