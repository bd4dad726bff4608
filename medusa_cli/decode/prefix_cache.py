"""The slots of a cache: each holds a running sequence, or a done one as a cached prefix."""

from __future__ import annotations

from medusa_cli.decode.ngram import shared_length
from medusa_cli.decode.sequence import Sequence
from medusa_cli.drafters.base import Drafter
from medusa_cli.engine import Cache


class PrefixCache:
    """Gives sequences slots of a cache.

    A prompt with the same beginning as a slot's text runs only the rest.
    """

    def __init__(self, cache: Cache, drafter: Drafter | None) -> None:
        self._cache = cache
        self._drafter = drafter
        self._slots: list[Sequence | None] = [None] * cache.slots

    @property
    def running(self) -> list[Sequence]:
        """Returns the running sequences whose prompts are through, by slot."""
        return [sequence for sequence in self._slots if sequence is not None and sequence.decoding]

    @property
    def free(self) -> int:
        """Returns the number of slots without a running sequence."""
        return sum(sequence is None or sequence.done for sequence in self._slots)

    def slot_of(self, sequence: Sequence) -> int:
        """Returns the slot of a sequence; steps may move it."""
        return self._slots.index(sequence)

    def take(self, sequence: Sequence) -> None:
        """Gives a sequence the idle slot that shares most with its prompt.

        It takes over those rows. At least the prompt's last token is left to run. Raises ValueError
        if no slot is idle.
        """
        prompt = sequence.request.prompt
        reuse = 0 if sequence.request.scores_prompt else sequence.request.reuse
        limit = len(prompt) - 1 if reuse is None else min(reuse, len(prompt) - 1)

        def share(slot: int) -> tuple[int, int]:
            previous = self._slots[slot]
            if previous is None:
                return 0, 0
            return min(shared_length(previous.tokens, prompt), limit), -len(previous.tokens)

        idle = [
            slot for slot, previous in enumerate(self._slots) if previous is None or previous.done
        ]
        if not idle:
            raise ValueError(f"all {len(self._slots)} slots are taken")
        # Among slots that share as much, `share` prefers the emptiest: a later request may begin
        # with another's text.
        slot = max(idle, key=share)
        shared = self._cache.reusable(slot, share(slot)[0])
        sequence.reuse_prefix(self._slots[slot], shared, self._drafter)
        # The drafter may know less, and a running state can return to few positions.
        while (shared := self._cache.reusable(slot, sequence.reused)) < sequence.reused:
            sequence.reuse_prefix(self._slots[slot], shared, self._drafter)
        self._slots[slot] = sequence
        self._cache.truncate(slot, sequence.reused)

    def move_running_first(self) -> list[Sequence]:
        """Moves running sequences to the first slots, over which passes run.

        Returns the running sequences by slot.
        """
        while (running := self.running) != self._slots[: len(running)]:
            slot = next(i for i, sequence in enumerate(self._slots) if sequence is not running[i])
            last = self._slots.index(running[-1])
            self._cache.swap(slot, last)
            self._slots[slot], self._slots[last] = self._slots[last], self._slots[slot]
        return running

    def clear(self) -> None:
        """Drops the cached prefixes of idle slots."""
        self._slots = [
            None if previous is None or previous.done else previous for previous in self._slots
        ]
