"""The slots of a cache: each holds a running sequence, or a finished one as a cached prefix."""

from __future__ import annotations

from medusa_cli.decode.ngram import shared_length
from medusa_cli.decode.sequence import Request, Sequence
from medusa_cli.drafters.base import Drafter
from medusa_cli.engine import Cache


class PrefixCache:
    """Assigns the slots of a cache to sequences.

    If a prompt begins with the same tokens as a slot's text, only the rest of the prompt is run.
    """

    def __init__(self, cache: Cache, drafter: Drafter | None) -> None:
        self._cache = cache
        self._drafter = drafter
        self._slots: list[Sequence | None] = [None] * cache.slots

    @property
    def running(self) -> list[Sequence]:
        """Returns the running sequences whose prefill is complete, in slot order."""
        return [sequence for sequence in self._slots if sequence is not None and sequence.decoding]

    @property
    def free(self) -> int:
        """Returns the number of slots without a running sequence."""
        return sum(sequence is None or sequence.done for sequence in self._slots)

    @property
    def taken(self) -> dict[int, Sequence]:
        """Returns the running sequences by slot, including those whose prefill is not complete."""
        slots = enumerate(self._slots)
        return {slot: sequence for slot, sequence in slots if sequence and not sequence.done}

    def slot_of(self, sequence: Sequence) -> int:
        """Returns the slot of a sequence. A step may move the sequence to another slot."""
        return self._slots.index(sequence)

    def take(self, sequence: Sequence) -> None:
        """Assigns an idle slot to a sequence, which takes over the rows of the prefix that both share.

        At least the last token of the prompt is left to run. Raises ValueError if no slot is idle.
        """
        slot, saved = self.choose(sequence.request)
        sequence.reuse_prefix(self._slots[slot], saved, self._drafter)
        # The drafter may have state for fewer tokens, and a recurrent state can be restored at only
        # a few positions.
        while (shared := self._cache.reusable(slot, sequence.reused)) < sequence.reused:
            sequence.reuse_prefix(self._slots[slot], shared, self._drafter)
        self._cache.truncate(slot, sequence.reused)
        self._slots[slot] = sequence

    def choose(self, request: Request) -> tuple[int, int]:
        """Returns the idle slot for a request, and how many tokens of its prompt the slot may save.

        It is the slot that saves most tokens, less those that a later request could have reused.
        Raises ValueError if no slot is idle.
        """
        prompt = request.prompt
        reuse = 0 if request.scores_prompt else request.reuse
        limit = len(prompt) - 1 if reuse is None else min(reuse, len(prompt) - 1)

        def share(slot: int) -> tuple[int, int]:
            """Returns the number of tokens saved, less those lost, and the number saved."""
            previous = self._slots[slot]
            if previous is None:
                return 0, 0
            common = shared_length(previous.tokens, prompt)
            saved = self._cache.reusable(slot, min(common, limit))
            return saved - (len(previous.tokens) - common), saved

        idle = [
            slot for slot, previous in enumerate(self._slots) if previous is None or previous.done
        ]
        if not idle:
            raise ValueError(f"all {len(self._slots)} slots are taken")
        slot = max(idle, key=share)
        return slot, share(slot)[1]

    def move_running_first(self) -> list[Sequence]:
        """Moves the running sequences to the first slots, because passes run over these.

        Returns the running sequences in slot order.
        """
        while (running := self.running) != self._slots[: len(running)]:
            slot = next(i for i, sequence in enumerate(self._slots) if sequence is not running[i])
            last = self._slots.index(running[-1])
            self._cache.swap(slot, last)
            self._slots[slot], self._slots[last] = self._slots[last], self._slots[slot]
        return running

    def drop(self, sequence: Sequence) -> None:
        """Empties the slot of a sequence."""
        slot = self.slot_of(sequence)
        self._slots[slot] = None
        self._cache.truncate(slot, 0)

    def clear(self, but: int | None = None) -> None:
        """Drops the cached prefixes of idle slots, except one slot's, and frees their memory."""
        for slot, previous in enumerate(self._slots):
            if previous is not None and previous.done and slot != but:
                self._slots[slot] = None
                self._cache.release(slot)
