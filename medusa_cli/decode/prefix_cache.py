"""The slots of a cache: each holds a running sequence, or a finished sequence as a cached prefix."""

from __future__ import annotations

import copy
import time
from collections.abc import Generator, Iterator
from concurrent.futures import Future, wait
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from medusa_cli.decode.ngram import shared_length
from medusa_cli.decode.prefix_file import Rows
from medusa_cli.decode.prefix_store import BLOCK, MIN_GAIN, MIN_TOKENS, PrefixStore, Segment
from medusa_cli.decode.sequence import Request, Sequence
from medusa_cli.drafters.base import Drafter
from medusa_cli.engine import Slots
from medusa_cli.errors import is_out_of_memory

# With every period of this many seconds, a cached prefix becomes half as likely to be continued.
HALF_LIFE_S = 600.0
# The cost of copying a token's rows, as a share of the cost of running the token.
COPY_COST = 1 / 64
# The maximum number of seconds that other sequences wait for a file before each of their steps.
READING_S = 0.002


@dataclass(frozen=True)
class Part:
    """Holds rows of a prompt from token `start` on, of which only those of tokens start .. end - 1 are used."""

    start: int
    end: int
    rows: Rows


class PrefixCache:
    """Assigns the slots of a cache to sequences.

    If a prompt begins with the same tokens as the text of a slot, or as a text in the store, only
    the rest of the prompt is run. row_bytes: the bytes of a token's rows.
    """

    def __init__(
        self,
        cache: Slots,
        drafter: Drafter | None,
        row_bytes: int = 1,
        store: PrefixStore | None = None,
    ) -> None:
        self._cache = cache
        self._drafter = drafter
        self._row_bytes = row_bytes
        self._store = store
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

    @property
    def tokens(self) -> int:
        """Returns the number of tokens in all slots."""
        return sum(self._cache.lengths)

    def slot_of(self, sequence: Sequence) -> int:
        """Returns the slot of a sequence. A step may move the sequence to another slot."""
        return self._slots.index(sequence)

    def take(self, sequence: Sequence, slot: int) -> None:
        """Assigns an idle slot to a sequence, which takes over the rows of the prefix that it shares with the slot.

        At least the last token of the prompt is left to run. The rows that the slot loses are written to the store.
        """
        saved, _ = self._shared(slot, sequence.request)
        previous = self._slots[slot]
        if previous is not None and len(previous.tokens) >= saved + MIN_GAIN:
            self._save(previous, self._store)
        sequence.reuse_prefix(previous, saved, self._drafter)
        # The drafter may have states for fewer tokens, and a running state can be restored at only
        # a few positions.
        while (shared := self._cache.reusable(slot, sequence.reused)) < sequence.reused:
            sequence.reuse_prefix(previous, shared, self._drafter)
        self._cache.truncate(slot, sequence.reused)
        self._slots[slot] = sequence
        sequence.taken_at = time.monotonic()

    def _shared(self, slot: int, request: Request) -> tuple[int, int]:
        """Returns how many of the prompt's tokens a slot holds, and how many tokens of its text would be lost."""
        previous = self._slots[slot]
        if previous is None:
            return 0, 0
        common = shared_length(previous.tokens, request.prompt)
        saved = self._cache.reusable(slot, min(common, _limit(request))) if common else 0
        return saved, len(previous.tokens) - common

    def choose(self, request: Request, *, copies: bool = True) -> int:
        """Returns the idle slot for a request.

        The choice maximizes the saved tokens minus the worth of the lost tokens, which a later request
        could have reused. copies: also consider copies from other slots, which save nearly as many
        tokens but need memory. Raises ValueError if no slot is idle.
        """
        shared = [self._shared(slot, request) for slot in range(len(self._slots))]
        longest = max(saved for saved, _ in shared)
        copied = (1 - COPY_COST) * longest if copies and longest >= MIN_GAIN else 0

        def gain(slot: int) -> float:
            previous = self._slots[slot]
            saved, lost = shared[slot]
            return max(saved, copied) - (lost * _worth(previous) if previous is not None else 0)

        idle = [
            slot for slot, previous in enumerate(self._slots) if previous is None or previous.done
        ]
        if not idle:
            raise ValueError(f"all {len(self._slots)} slots are taken")
        return max(idle, key=gain)

    def restore(self, sequence: Sequence) -> Iterator[tuple[Sequence, None]]:
        """Fills a sequence's slot with rows of its prompt from another slot and the store; yields after each part."""
        yield from self._fill(sequence, self._copied(sequence))
        if self._store is not None:
            before = sequence.reused
            yield from self._fill(sequence, self._stored(sequence, self._store))
            sequence.restored = max(0, sequence.reused - before)

    def _fill(
        self, sequence: Sequence, parts: Generator[Part | None]
    ) -> Iterator[tuple[Sequence, None]]:
        """Puts consecutive parts of a prompt into its sequence's slot; a part that is None has not been read yet."""
        prompt = list(sequence.request.prompt)
        filled = complete = False
        try:
            for part in parts:
                if part is not None:
                    filled = True
                    try:
                        complete = self._put(sequence, part)
                    except ValueError as reason:
                        complete = not self._cache.stateful
                        with suppress(StopIteration):
                            parts.throw(reason)
                        break
                    sequence.tokens = prompt[: part.end]
                yield sequence, None
        finally:
            # Without the running states after them, the rows are useless.
            if filled and not complete:
                self._cache.truncate(self.slot_of(sequence), 0)
                sequence.reuse_prefix(None, 0, self._drafter)
        if filled and complete:
            self._resume(sequence)

    def _put(self, sequence: Sequence, part: Part) -> bool:
        """Puts a part into the sequence's slot; returns True if the slot is now as if the part's tokens had been run.

        Raises ValueError if the rows do not fit the cache.
        """
        rows = part.rows
        slot = self.slot_of(sequence)
        self._cache.fill(slot, part.start, part.start + rows.tokens, rows.rows)
        if rows.states:
            self._cache.set_states(slot, rows.states)
        elif not self._cache.stateful:
            self._cache.truncate(slot, part.end)
        return bool(rows.states) or not self._cache.stateful

    def _resume(self, sequence: Sequence) -> None:
        """Lets a sequence continue after the rows that were put into its slot."""
        held = copy.copy(sequence)
        held.unread = []
        sequence.reuse_prefix(held, len(sequence.tokens), self._drafter)
        self._cache.truncate(self.slot_of(sequence), sequence.reused)

    def _copied(self, sequence: Sequence) -> Generator[Part | None]:
        """Yields rows of the prompt from another slot, if that slot has more of them than the sequence's own slot."""
        limit = _limit(sequence.request)
        others = [
            (shared_length(other.tokens[:limit], sequence.request.prompt), slot)
            for slot, other in enumerate(self._slots)
            if other is not None and other is not sequence
        ]
        common, slot = max(others, default=(0, 0))
        shared = self._cache.reusable(slot, common) if common else 0
        if shared < sequence.reused + MIN_GAIN:
            return
        states = self._cache.states_after(slot, shared)
        if states is None:
            return
        source = self._slots[slot]
        for start in range(sequence.reused // BLOCK * BLOCK, shared, BLOCK):
            # Since the last part, other requests may have taken or moved the slot.
            if source is None or source not in self._slots:
                return
            end = min(start + BLOCK, shared)
            yield Part(start, end, self._rows(source, start, end, states if end == shared else []))

    def _stored(self, sequence: Sequence, store: PrefixStore) -> Generator[Part | None]:
        """Yields rows of the prompt from the store, if the store has more of them than the slot."""
        prompt = sequence.request.prompt[: _limit(sequence.request)]
        if len(prompt) < sequence.reused + MIN_GAIN:
            return
        finding = store.find(prompt, sequence.reused, self._cache.stateful)
        yield from self._until(finding)
        segments = finding.result()
        ahead = [store.read(segment) for segment in segments[:1]]
        for number, segment in enumerate(segments):
            reading = ahead[number]
            ahead += [store.read(later) for later in segments[number + 1 : number + 2]]
            yield from self._until(reading)
            rows = reading.result()
            if rows is None:
                return
            try:
                yield Part(segment.start, segment.end, rows)
            except ValueError:
                store.drop(segment)
                return

    def _until(self, future: Future[Any]) -> Iterator[None]:
        """Yields until a future is done; meanwhile, other sequences may take steps."""
        while not future.done():
            wait([future], READING_S if self.running else None)
            yield None

    def _rows(self, sequence: Sequence, start: int, end: int, states: list[Tensor]) -> Rows:
        """Returns copies of a sequence's rows start .. end - 1."""
        return Rows(end - start, self._cache.rows(self.slot_of(sequence), start, end), states)

    # Writing to the store

    @torch.inference_mode()
    def store_next(self) -> bool:
        """Gives the store one segment of a text that the store lacks; a thread writes the segment.

        Returns False if the store lacks nothing or is busy, or if memory is short.
        """
        if self._store is None or self._store.busy:
            return False
        try:
            for sequence in self._slots:
                if sequence is not None and (sequence.done or sequence.prefilled):
                    segment = next(self._lacking(sequence, self._store, ended=False), None)
                    if segment is not None:
                        self._write(sequence, self._store, segment)
                        return True
        except Exception as reason:
            if not is_out_of_memory(reason):
                raise
        return False

    @torch.inference_mode()
    def save(self) -> None:
        """Gives the store all segments that it lacks, and waits until they are written."""
        if self._store is None:
            return
        for sequence in self._slots:
            if sequence is not None:
                self._save(sequence, self._store, waits=True)
        self._store.finish()

    def _save(self, sequence: Sequence, store: PrefixStore | None, *, waits: bool = False) -> None:
        """Gives the store the segments of a text that it lacks. waits: wait for a busy store, instead of giving up."""
        if store is None:
            return
        for segment in self._lacking(sequence, store, ended=True):
            if store.busy:
                if not waits:
                    return
                store.finish()
            self._write(sequence, store, segment)

    def _lacking(self, sequence: Sequence, store: PrefixStore, *, ended: bool) -> Iterator[Segment]:
        """Yields the segments of a text that the store lacks. ended: include the last segment, which may be short.

        Running states are stored after the prompt and after the whole text.
        """
        block = store.block
        tokens = sequence.tokens
        keys = sequence.stored
        if not keys:
            keys.append(store.root)
        while (start := (len(keys) - 1) * block) + block <= len(tokens):
            segment = Segment.of(tuple(keys), start, tokens[start : start + block])
            if store.has(segment):
                keys.append(segment.key)
                continue
            yield segment
            if keys[-1] != segment.key:
                return
        ends = {len(tokens)} if ended else set[int]()
        if self._cache.stateful and sequence.prefilled and not sequence.stored_prompt:
            ends.add(len(sequence.request.prompt))
        for end in sorted(ends):
            start = end // block * block
            if MIN_TOKENS <= end <= len(tokens) and (start < end or self._cache.stateful):
                segment = Segment.of(tuple(keys[: start // block + 1]), start, tokens[start:end])
                if not store.has(segment):
                    yield segment

    def _write(self, sequence: Sequence, store: PrefixStore, segment: Segment) -> None:
        """Gives the store copies of a segment's rows, unless the running states after the segment are lost."""
        slot = self.slot_of(sequence)
        states: list[Tensor] | None = []
        if len(segment.ids) == store.block:
            sequence.stored.append(segment.key)
        else:
            states = self._cache.states_after(slot, segment.end)
        if segment.end == len(sequence.request.prompt):
            sequence.stored_prompt = True
        if states is not None:
            rows = self._rows(sequence, segment.start, segment.end, states)
            store.write(segment, rows)

    # Slots

    def move_running_first(self) -> list[Sequence]:
        """Moves the running sequences to the first slots, because passes run over the first slots.

        Returns the running sequences in slot order.
        """
        while (running := self.running) != self._slots[: len(running)]:
            slot = next(i for i, sequence in enumerate(self._slots) if sequence is not running[i])
            self._swap(slot, self._slots.index(running[-1]))
        return running

    def move_to(self, first: int, sequences: list[Sequence]) -> None:
        """Moves sequences to consecutive slots from `first` on, after the slots of running sequences."""
        for slot, sequence in enumerate(sequences, first):
            self._swap(slot, self._slots.index(sequence))

    def _swap(self, slot: int, other: int) -> None:
        if slot != other:
            self._cache.swap(slot, other)
            self._slots[slot], self._slots[other] = self._slots[other], self._slots[slot]

    def drop(self, sequence: Sequence) -> None:
        """Empties the slot of a sequence."""
        slot = self.slot_of(sequence)
        self._slots[slot] = None
        self._cache.truncate(slot, 0)

    def evict(self, but: int | None = None) -> bool:
        """Drops the cached prefix with the least worth per byte; returns False if there is no prefix to drop.

        The prefix is written to the store, and its memory is freed. but: a slot that keeps its prefix.
        """
        values = dict[int, float]()
        for slot, previous in enumerate(self._slots):
            if previous is not None and previous.done and slot != but:
                tokens = len(previous.tokens)
                size = tokens * self._row_bytes + self._cache.held_bytes(slot)
                values[slot] = tokens * _worth(previous) / max(1, size)
        if not values:
            return False
        slot = min(values, key=lambda slot: values[slot])
        previous = self._slots[slot]
        assert previous is not None
        self._save(previous, self._store)
        self._slots[slot] = None
        self._cache.release(slot)
        return True

    def clear(self) -> None:
        """Drops the cached prefixes of all idle slots, and frees their memory."""
        while self.evict():
            pass


def _limit(request: Request) -> int:
    """Returns how many tokens of a prompt may be reused. At least the last token must be run."""
    reuse = 0 if request.scores_prompt else request.reuse
    limit = len(request.prompt) - 1
    return limit if reuse is None else min(reuse, limit)


def _worth(previous: Sequence) -> float:
    """Returns how likely the text of a finished sequence is to be continued: 1 at first, less as it ages."""
    return 0.5 ** ((time.monotonic() - previous.taken_at) / HALF_LIFE_S)
