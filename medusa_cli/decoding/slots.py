"""Which slot of the cache a prompt takes: the one whose last text begins as the prompt does, of which it is kept."""

from collections.abc import Sequence as Several
from dataclasses import dataclass, field
from itertools import takewhile

from medusa_cli.drafters.base import Confirmed, Drafter, joined
from medusa_cli.engines import Cache


@dataclass
class Held:
    """What a slot held when its sequence left: the tokens in it, the drafter's state over them, and what the drafter
    had not been told of yet."""

    tokens: list[int] = field(default_factory=list)
    drafter: Drafter | None = None
    unseen: list[Confirmed] = field(default_factory=list)

    @property
    def length(self) -> int:
        return len(self.tokens)

    def shared(self, prompt: Several[int]) -> int:
        """How many of its tokens the prompt begins with."""
        return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(self.tokens, prompt, strict=False)))


class Slots:
    """The slots of one cache, and what those that are idle held last."""

    def __init__(self, cache: Cache) -> None:
        self.cache = cache
        self._kept = [Held() for _ in range(cache.slots)]

    @property
    def count(self) -> int:
        return self.cache.slots

    def take(
        self, idle: Several[int], prompt: Several[int], drafter: Drafter | None, most: int | None = None
    ) -> tuple[int, Held]:
        """The idle slot that suits a prompt best, and the part of the prompt that it holds: at most `most` tokens.

        At least the prompt's last token is left to be run. ValueError where no slot is idle.
        """
        if not idle:
            raise ValueError(f"all {self.count} slots are taken")
        most = len(prompt) - 1 if most is None else min(most, len(prompt) - 1)
        # Of slots that share as much the emptiest is taken: what others hold may yet be asked for.
        best = max(idle, key=lambda one: (min(self._kept[one].shared(prompt), most), -self._kept[one].length))
        kept, self._kept[best] = self._kept[best], Held()
        shared = min(kept.shared(prompt), most)
        fork, unseen = None, list[Confirmed]()
        if drafter is not None:
            fork = kept.drafter if shared and kept.drafter is not None else drafter.fork()
            told = fork.truncate(shared)
            waiting = kept.unseen if kept.drafter is fork else []
            if told < shared and waiting and waiting[0].start <= told and shared <= waiting[-1].end:
                unseen = [joined(waiting).part(told, shared)]
            else:
                shared = told
        self.cache.truncate(best, shared)
        return best, Held(list(prompt[:shared]), fork, unseen)

    def release(self, slot: int, tokens: list[int], drafter: Drafter | None, unseen: Several[Confirmed] = ()) -> None:
        """Remember what a slot holds, now that its sequence has left."""
        length = self.cache.lengths[slot]
        self._kept[slot] = Held(tokens[:length], drafter, list(unseen))

    def forget(self) -> None:
        """Keep nothing of what idle slots hold."""
        self._kept = [Held() for _ in self._kept]

    def swap(self, one: int, other: int) -> None:
        """Let two slots change places."""
        self.cache.swap(one, other)
        self._kept[one], self._kept[other] = self._kept[other], self._kept[one]
