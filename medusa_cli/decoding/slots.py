"""Which slot of the cache a prompt takes: the one whose last text begins as the prompt does, of which it is kept."""

from collections.abc import Sequence as Several
from dataclasses import dataclass, field
from itertools import takewhile

from medusa_cli.drafters.base import Drafter
from medusa_cli.engines import Cache


@dataclass
class Held:
    """What a slot held when its sequence left: the tokens in it, and the drafter's state over them."""

    tokens: list[int] = field(default_factory=list)
    drafter: Drafter | None = None

    @property
    def length(self) -> int:
        return len(self.tokens)

    def shared(self, prompt: Several[int]) -> int:
        """How many of its tokens the prompt begins with."""
        return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(self.tokens, prompt, strict=False)))


class Slots:
    """The slots of one cache: those of running sequences first, then idle ones with what they held last."""

    def __init__(self, cache: Cache) -> None:
        self.cache = cache
        self._kept = [Held() for _ in range(cache.slots)]

    @property
    def count(self) -> int:
        return self.cache.slots

    def take(self, slot: int, prompt: Several[int], drafter: Drafter | None) -> Held:
        """Bring the idle slot that suits a prompt best to the number `slot`; the part of the prompt that it holds.

        At least the prompt's last token is left to be run. ValueError where no slot is idle.
        """
        if slot >= self.count:
            raise ValueError(f"all {self.count} slots are taken")
        idle = range(slot, self.count)
        # Of slots that share nothing the emptiest is taken: what others hold may yet be asked for.
        best = max(idle, key=lambda one: (self._kept[one].shared(prompt), -self._kept[one].length))
        self.swap(slot, best)
        kept = self._kept[slot]
        shared = min(kept.shared(prompt), len(prompt) - 1)
        fork = None
        if drafter is not None:
            fork = kept.drafter if shared and kept.drafter is not None else drafter.fork()
            shared = fork.truncate(shared)
        self.cache.truncate(slot, shared)
        self._kept[slot] = Held()
        return Held(list(prompt[:shared]), fork)

    def release(self, slot: int, tokens: list[int], drafter: Drafter | None) -> None:
        """Remember what a slot holds, now that its sequence has left."""
        length = self.cache.lengths[slot]
        self._kept[slot] = Held(tokens[:length], drafter)

    def forget(self) -> None:
        """Keep nothing of what idle slots hold."""
        self._kept = [Held() for _ in self._kept]

    def swap(self, one: int, other: int) -> None:
        """Let two slots change places."""
        self.cache.swap(one, other)
        self._kept[one], self._kept[other] = self._kept[other], self._kept[one]
