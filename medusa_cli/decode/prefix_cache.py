"""The prefix cache: idle slots keep the rows of their last text for prompts that begin alike."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import takewhile

from medusa_cli.drafters.base import Drafter, NewTokens, concat
from medusa_cli.engine import Cache


@dataclass
class CachedPrefix:
    """The tokens in a slot, the drafter's state over them, and the tokens that the drafter has not read."""

    tokens: list[int] = field(default_factory=list)
    drafter: Drafter | None = None
    pending: list[NewTokens] = field(default_factory=list)

    @property
    def length(self) -> int:
        return len(self.tokens)

    def common_length(self, prompt: Sequence[int]) -> int:
        """Returns how many tokens the prompt shares with the beginning of this prefix."""
        return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(self.tokens, prompt, strict=False)))


class PrefixCache:
    """The slots of one cache and the prefixes that idle ones hold."""

    def __init__(self, cache: Cache) -> None:
        self.cache = cache
        self._prefixes = [CachedPrefix() for _ in range(cache.slots)]

    @property
    def count(self) -> int:
        return self.cache.slots

    def take(
        self, idle: Sequence[int], prompt: Sequence[int], drafter: Drafter | None, limit: int | None = None
    ) -> tuple[int, CachedPrefix]:
        """Returns the idle slot that shares most with a prompt, truncated to that, at most to `limit` tokens.

        At least the prompt's last token is left to run. Raises ValueError where no slot is idle.
        """
        if not idle:
            raise ValueError(f"all {self.count} slots are taken")
        limit = len(prompt) - 1 if limit is None else min(limit, len(prompt) - 1)
        # Of slots that share as much the emptiest is taken: the text of another may yet be asked for.
        best = max(
            idle,
            key=lambda slot: (min(self._prefixes[slot].common_length(prompt), limit), -self._prefixes[slot].length),
        )
        prefix, self._prefixes[best] = self._prefixes[best], CachedPrefix()
        shared = min(prefix.common_length(prompt), limit)
        fork, pending = None, list[NewTokens]()
        if drafter is not None:
            fork = prefix.drafter if shared and prefix.drafter is not None else drafter.fork()
            known = fork.truncate(shared)  # positions that the drafter has read
            waiting = prefix.pending if prefix.drafter is fork else []
            if known < shared and waiting and waiting[0].start <= known and shared <= waiting[-1].end:
                pending = [concat(waiting).part(known, shared)]
            else:
                shared = known
        self.cache.truncate(best, shared)
        return best, CachedPrefix(list(prompt[:shared]), fork, pending)

    def release(self, slot: int, tokens: list[int], drafter: Drafter | None, pending: Sequence[NewTokens] = ()) -> None:
        """Keeps the prefix of a slot whose sequence has left."""
        self._prefixes[slot] = CachedPrefix(tokens[: self.cache.lengths[slot]], drafter, list(pending))

    def forget(self) -> None:
        """Drops all prefixes of idle slots."""
        self._prefixes = [CachedPrefix() for _ in self._prefixes]

    def swap(self, slot: int, other: int) -> None:
        """Exchanges two slots."""
        self.cache.swap(slot, other)
        self._prefixes[slot], self._prefixes[other] = self._prefixes[other], self._prefixes[slot]
