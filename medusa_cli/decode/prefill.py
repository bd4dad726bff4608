"""Prefill: the passes over the prompts of sequences."""

from __future__ import annotations

import math
import time
from collections.abc import Generator, Iterator

import torch
from torch import Tensor

from medusa_cli.decode.accept import accept
from medusa_cli.decode.answer import Likelihood, Step, likelihoods
from medusa_cli.decode.policy import ROOT
from medusa_cli.decode.prefix_cache import PrefixCache
from medusa_cli.decode.sequence import Sequence
from medusa_cli.device import numbered, upload
from medusa_cli.drafters.base import Drafter, NewTokens
from medusa_cli.engine import Output, Plan, Slots
from medusa_cli.model import Backbone
from medusa_cli.tree import Draft, Tree

# Rows per pass over a prompt whose log probabilities are requested.
PROMPT_ROWS = 256
# For prompts whose pieces are timed, the rows of the first piece, and the minimum rows of a piece:
# fewer rows would take nearly as long.
FIRST_PIECE = 16
MIN_PIECE = 8
# Rows of a prompt that a drafter reads at a time. After each reading, it drafts one token.
DRAFTER_ROWS = 128
ONE_GUESS = Tree.chain(1)


def rows_within(seconds: float, rows: int, taken: float) -> int:
    """Returns how many rows to run in `seconds`, if `rows` rows took `taken` seconds: from rows / 4 to 4 * rows."""
    return max(MIN_PIECE, min(4 * rows, max(rows // 4, int(rows * seconds / taken))))


class Prefill:
    """Runs the prompts of sequences that have a slot: one prompt in pieces, or several prompts in one pass.

    taps: the layers whose hidden states the drafter reads.
    """

    def __init__(
        self,
        backbone: Backbone,
        drafter: Drafter | None,
        cache: Slots,
        prefixes: PrefixCache,
        taps: tuple[int, ...],
    ) -> None:
        self._backbone = backbone
        self._engine = backbone.engine
        self._drafter = drafter
        self._cache = cache
        self._prefixes = prefixes
        self._taps = taps
        self._first_piece = FIRST_PIECE  # of the next prompt's first piece

    def run_pack(self, first: int, pack: list[Sequence]) -> list[tuple[Sequence, Step]]:
        """Runs the prompts of sequences in consecutive slots from `first` on, padded to the longest prompt."""
        texts = [torch.tensor(own.request.prompt[own.reused :]) for own in pack]
        counts = [len(text) for text in texts]
        padded = torch.nn.utils.rnn.pad_sequence(texts, batch_first=True)
        tokens = upload(padded, self._backbone.device)
        plan = Plan(tokens, first=first, taps=self._taps, logits="none")
        hidden = self._engine.forward(plan, self._cache).hidden  # [B, n, H * taps]
        last = upload([count - 1 for count in counts], tokens.device)
        final = hidden[numbered(len(pack), tokens.device), last, -self._backbone.hidden_size :]
        logits = self._engine.logits(final)[:, None]  # [B, 1, V]
        root_only = Draft(torch.zeros(1, dtype=torch.long), ROOT)
        chosen = accept(logits, [root_only] * len(pack), [own.sampler for own in pack])
        steps = []
        for row, (sequence, count, (_, root)) in enumerate(zip(pack, counts, chosen, strict=True)):
            self._cache.truncate(first + row, sequence.reused + count)  # drops the padding
            sequence.tokens = list(sequence.request.prompt)
            states = hidden[row, :count]
            new = NewTokens(tokens[row, :count], states, root, sequence.reused)
            steps.append(Step(sequence.finish_prefill(new)))
            sequence.prefilled = True
        return list(zip(pack, steps, strict=True))

    def run(
        self, sequence: Sequence, piece_s: float | None, keep_states: bool, depth: int
    ) -> Generator[tuple[Sequence, None], None, Step]:
        """Runs a prompt piece by piece; returns the step that contains the first token of the answer.

        piece_s: the seconds that a piece should take; it has no effect if the size of pieces would
        change the results' bits. depth: the maximum depth of draft trees.
        """
        request = sequence.request
        prompt = list(request.prompt)
        if not self._engine.prompt_invariant:
            piece_s = None
        limit = PROMPT_ROWS if request.scores_prompt else self._engine.prefill_rows
        rows = limit if piece_s is None else min(limit, self._first_piece)
        reported = [Likelihood(prompt[0], math.nan)] if request.scores_prompt else []
        hidden: list[Tensor] = []
        # The position of the first token whose states are kept.
        first_kept = 0 if self._drafter is None else len(prompt) - self._drafter.prompt_tokens
        seconds = 0.0

        start = sequence.reused
        while start < len(prompt):
            started = time.perf_counter()
            chunk = prompt[start : start + rows]
            last = start + rows >= len(prompt)
            keeps = keep_states and start + len(chunk) > first_kept
            plan = self._chunk_plan(sequence, chunk, depth if last else None, keeps)
            out = self._engine.forward(plan, self._cache)
            if keeps:
                hidden.append(out.hidden[0])
            sequence.tokens += chunk
            if request.scores_prompt and out.logits is not None:
                following = prompt[start + 1 : start + 1 + rows]
                reported += likelihoods(out.logits[0], following, request.top or 0)
            taken = time.perf_counter() - started
            seconds += taken
            if piece_s is not None and len(chunk) == rows:
                rows = min(limit, rows_within(piece_s, rows, taken))
                if start == sequence.reused:
                    self._first_piece = rows
            start += len(chunk)
            if not last:
                yield sequence, None

        assert out.logits is not None
        new = self._finish(sequence, out, hidden, keep_states)
        if request.top is not None:
            reported += likelihoods(out.logits[0, -1:], new, request.top)
        return Step(new, verify_s=seconds, likelihoods=tuple(reported))

    def _finish(
        self, sequence: Sequence, out: Output, hidden: list[Tensor], keep_states: bool
    ) -> list[int]:
        """Chooses the first token of the answer from a prompt's last pass; returns it in a list.

        hidden: by piece, the states of the prompt's last tokens, which the drafter reads.
        """
        assert out.logits is not None
        prompt = sequence.request.prompt
        root = sequence.sampler.choose(out.logits[0, -1])
        extra = None if out.extra is None else out.extra[0, -1]
        states = torch.cat(hidden) if hidden else out.hidden[0, -1:]
        start = len(prompt) - len(states)
        tokens = upload(list(prompt[start:]), self._backbone.device)
        return sequence.finish_prefill(NewTokens(tokens, states, root, start, extra), keep_states)

    def read(self, sequence: Sequence) -> Iterator[tuple[Sequence, None]]:
        """Lets the drafter read a long prompt, except its last rows, piece by piece before the first draft."""
        if self._drafter is None or not sequence.draft.speculative:
            return
        fork = sequence.drafter
        assert fork is not None
        while not sequence.done and (part := sequence.take_unread_part(DRAFTER_ROWS)) is not None:
            fork.draft(self._backbone, [fork], [part], ONE_GUESS)
            yield sequence, None

    def _chunk_plan(
        self, sequence: Sequence, chunk: list[int], depth: int | None, keep_states: bool
    ) -> Plan:
        """Returns the plan of a pass over a prompt's chunk. depth: that of draft trees; None before the last chunk."""
        extra_rows = None
        logits = "none" if depth is None else "last"
        if depth is not None and self._drafter is not None:
            extra_rows = self._drafter.extra_rows(depth)
        if sequence.request.scores_prompt:
            logits = "all"
        slot = self._prefixes.slot_of(sequence)  # steps of other sequences may have moved it
        tokens = upload(chunk, self._backbone.device)
        taps = self._taps if keep_states else (-1,)
        return Plan.chain(tokens, slot=slot, taps=taps, logits=logits, extra_rows=extra_rows)
