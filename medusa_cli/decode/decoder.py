"""The decoder, which holds sequences in the slots of one cache and advances them step by step."""

from __future__ import annotations

import time
from collections.abc import Generator, Iterable, Iterator
from dataclasses import replace

import torch

from medusa_cli.decode.accept import accept
from medusa_cli.decode.answer import Accepted, Likelihood, Step, likelihoods
from medusa_cli.decode.cuda_graph import CudaGraphs
from medusa_cli.decode.graph_trial import captures
from medusa_cli.decode.policy import (
    ROOT,
    DraftPolicy,
    DynamicTreePolicy,
    Proposal,
    StaticTreePolicy,
    complete,
)
from medusa_cli.decode.prefill import Prefill
from medusa_cli.decode.prefix_cache import PrefixCache
from medusa_cli.decode.prefix_store import PrefixStore
from medusa_cli.decode.sequence import Request, Sequence
from medusa_cli.device import free_memory, upload
from medusa_cli.drafters.base import Drafter, NewTokens
from medusa_cli.engine import Output, Plan
from medusa_cli.engine.cache import FIRST_ROWS
from medusa_cli.errors import UserError, is_out_of_memory
from medusa_cli.model import Backbone
from medusa_cli.tree import Draft
from medusa_cli.tree.tree import batch_drafts

# The maximum number of prompts that a GPU runs in one pass.
PROMPTS = 16
# A drafter that has missed a part of a text reads at most this many of the text's last tokens.
# Running more tokens again would take longer than it would save.
CATCH_UP_TOKENS = 8
# The share of the free memory that a request may take while other requests run.
MEMORY_SHARE = 0.9


class Decoder:
    """Runs sequences in the slots of one cache; `step` advances each of them.

    Without a drafter, decoding is plain, except for n-gram matches that the policy drafts. Greedy
    and exact sampling give the same tokens as plain decoding, and so the same distribution. The
    rows of a finished sequence stay in its slot as a cached prefix.
    """

    def __init__(
        self,
        backbone: Backbone,
        drafter: Drafter | None = None,
        policy: DraftPolicy | None = None,
        *,
        slots: int = 1,
        cuda_graphs: bool | None = None,
        taps: tuple[int, ...] = (-1,),
        context: int | None = None,
        store: PrefixStore | None = None,
    ) -> None:
        """Creates a cache with `slots` slots.

        cuda_graphs: None lets a trial decide. taps: the layers whose hidden states a sequence keeps if there is no
        drafter. context: the expected maximum length of a sequence, for which CUDA graphs reserve memory; None: that of
        the model. store: cached prefixes on disk. Raises UserError in a fork of the process that loaded the model.
        """
        backbone.check_process()
        self.backbone = backbone
        self.engine = backbone.engine
        self.drafter = drafter
        self.policy = policy or StaticTreePolicy(ROOT)
        self.taps = taps if drafter is None else drafter.taps
        # The drafter reads only the states of the last step, which every verify pass returns.
        self._reads_last_step = drafter is not None and (
            self.taps == (-1,) and not drafter.fork().reads_every_step
        )
        self.cache = self.engine.new_cache(slots)
        self.prefixes = PrefixCache(self.cache, drafter, self.engine.row_bytes, store)
        self._prefill = Prefill(backbone, drafter, self.cache, self.prefixes, self.taps)
        self._keeping = False  # a step has begun to accept tokens
        graphs = captures(self.engine) if cuda_graphs is None else cuda_graphs
        self.cuda_graphs: CudaGraphs | None = None
        if graphs and not (drafter is not None and drafter.uses_verify_pass):
            limits = self.policy.tree if isinstance(self.policy, DynamicTreePolicy) else None
            self.cuda_graphs = CudaGraphs(
                self.engine, self.cache, self.taps, drafter, limits, context=context
            )
            self.cuda_graphs.warm_up(drafting=self.policy.size > 1 or self.policy.ngrams)

    def _keeps_states(self, batch: int) -> bool:
        """Returns True if passes over a batch of this size keep the states that the drafter reads.

        If drafts do not pay in the batch, passes keep no states, and steps are the same as without a drafter. The final
        states of the last step are available anyway, and CUDA graphs always return the states.
        """
        if self.drafter is None or self.cuda_graphs is not None or self._reads_last_step:
            return True
        return self.policy.reads_states(batch)

    @property
    def sequences(self) -> list[Sequence]:
        """Returns the running sequences whose prefill is complete."""
        return self.prefixes.running

    @property
    def free_slots(self) -> int:
        return self.prefixes.free

    def run(self, requests: Iterable[Request]) -> Iterator[tuple[Sequence, Step]]:
        """Decodes requests, as many at a time as there are slots.

        Request i becomes the sequence with number i. A request's answer does not depend on the
        other requests. Closing the iterator cancels the running sequences.
        """
        try:
            for number, request in enumerate(requests):
                while not self.free_slots:
                    yield from self.step()
                yield self.admit(request, number)
            while self.sequences:
                yield from self.step()
        finally:
            for sequence in self.sequences:
                sequence.cancel()

    def admit(self, request: Request, number: int = 0) -> tuple[Sequence, Step]:
        """Runs the prompt of a request.

        Returns its sequence and the step that contains the first token of the answer.
        """
        *_, (sequence, step) = self.prefill(request, number)
        assert step is not None
        return sequence, step

    @torch.inference_mode()
    def prefill(
        self, request: Request | Sequence, number: int = 0, piece_s: float | None = None
    ) -> Generator[tuple[Sequence, Step | None]]:
        """Assigns a slot to a request and runs its prompt in pieces; yields an item before and after each piece.

        The last item contains the step with the first token. Between items, other sequences may take steps, and other
        prompts may run. request: a request, or a sequence that was created from it earlier, as creation takes time.
        `number` selects the sequence's random stream. piece_s: the seconds that a piece should take, which has no
        effect if the size of pieces would change the results' bits. Raises UserError for a prompt longer than the
        context, and UsageError for invalid limits.
        """
        self.backbone.check_process()
        sequence = request
        if isinstance(sequence, Request):
            sequence = Sequence(self.backbone, sequence, number)
        self._take_slot(sequence)
        try:
            yield sequence, None
            yield from self.prefixes.restore(sequence)
            keep_states = self._keeps_states(len(self.prefixes.taken))
            depth = self.policy.max_depth
            step = yield from self._prefill.run(sequence, piece_s, keep_states, depth)
            if piece_s is not None and self.cuda_graphs is None:
                yield from self._prefill.read(sequence)
            sequence.prefilled = True
        except BaseException as reason:  # an error, or the caller closed the iterator
            sequence.cancel()
            # A pass that failed halfway may have advanced the slot's running states.
            if self.cache.stateful and not isinstance(reason, GeneratorExit):
                self.prefixes.drop(sequence)
            raise
        yield sequence, step

    def _take_slot(self, sequence: Sequence) -> None:
        """Assigns a slot to a sequence that is not running yet."""
        request = sequence.request
        sequence.draft = self.policy.begin(request.sampling)
        sequence.draft.speculative = request.speculative
        slot = self._check_memory(request)
        # A lazy cache gets all rows now: they take no memory until they are written, and each growth of the
        # cache would copy the rows in use.
        rows = self._rows(sequence.longest) if self.cache.lazy else len(request.prompt)
        self.cache.reserve(rows)
        self.prefixes.take(sequence, slot)

    @property
    def prompts_at_once(self) -> int:
        """Returns how many prompts `admit_all` can run in one pass: 1, for example, if a drafter reads the prompts."""
        together = self.engine.runs_packs and self.drafter is None and self.taps[-1] == -1
        return PROMPTS if together else 1

    @torch.inference_mode()
    def admit_all(self, requests: list[Request], numbers: list[int]) -> list[tuple[Sequence, Step]]:
        """Runs the prompts of requests, in one pass if possible; returns each request's sequence and first step."""
        if self.prompts_at_once == 1:
            return [self.admit(*each) for each in zip(requests, numbers, strict=True)]
        self.backbone.check_process()
        first = len(self.prefixes.move_running_first())
        pack: list[Sequence] = []
        try:
            for request, number in zip(requests, numbers, strict=True):
                pack.append(Sequence(self.backbone, request, number))
                self._take_slot(pack[-1])
            self.prefixes.move_to(first, pack)
            return self._prefill.run_pack(first, pack)
        except BaseException:
            for sequence in pack:
                sequence.cancel()
            raise

    @torch.inference_mode()
    def step(self) -> list[tuple[Sequence, Step]]:
        """Drafts, verifies, accepts and keeps tokens for every running sequence; returns each sequence and its step.

        A step's seconds are its sequence's share of the total. On a GPU, the drafting time is only the host's, which
        does not wait for the draft. An error or an interruption cancels the sequences. If memory is too small for the
        pass, only the longest sequence is cancelled, and the others continue without drafts. The error is still raised.
        """
        self.backbone.check_process()
        sequences = self.prefixes.move_running_first()
        if not sequences:
            return []
        try:
            with self.engine.without_torch_threads():
                return self._advance(sequences)
        except BaseException as reason:
            self._cancel(sequences, refused=is_out_of_memory(reason) and not self._keeping)
            raise
        finally:
            self._keeping = False

    def _cancel(self, sequences: list[Sequence], *, refused: bool) -> None:
        """Cancels the sequences of a failed step. refused: the pass found no memory, and did not change the cache."""
        if refused and not self.cache.stateful and self.cuda_graphs is None:
            for sequence in sequences:
                # The drafter may already have read the tokens that its next draft would read.
                sequence.draft.speculative = False
            sequences = [max(sequences, key=lambda sequence: len(sequence.tokens))]
        # After any other failure, the cache may hold rows that no sequence has recorded.
        for sequence in sequences:
            sequence.cancel()

    def _advance(self, sequences: list[Sequence]) -> list[tuple[Sequence, Step]]:
        """Advances all running sequences by one step, with a CUDA graph if a graph supports the step."""
        started = time.perf_counter()
        proposals = self._fit(sequences, self.policy.next(sequences))
        keep_states = self._keeps_states(len(sequences))
        graphs = self.cuda_graphs
        if graphs is not None and not graphs.supports(sequences):
            graphs = None
        drafted: dict[int, Draft] | None = None  # None if a graph drafts
        if graphs is None or not graphs.drafts:
            drafted = self._draft(sequences, proposals)
        drafted_at = time.perf_counter()
        result = None if graphs is None else graphs.step(sequences, proposals, drafted)
        drafts, accepted = result or self._plain_step(sequences, proposals, drafted, keep_states)
        tokens = [
            sequence.commit(kept, keep_states)
            for sequence, kept in zip(sequences, accepted, strict=True)
        ]
        kept_at = time.perf_counter()

        draft_s = (drafted_at - started) / len(sequences)
        verify_s = (kept_at - drafted_at) / len(sequences)
        steps = [
            Step(
                new,
                nodes=draft.tree.size,
                path=tuple(kept.path),
                draft_s=draft_s,
                verify_s=verify_s,
                likelihoods=kept.likelihoods[: len(new)],
                looked_up=draft.looked_up,
                growth=draft.growth,
            )
            for new, draft, kept in zip(tokens, drafts, accepted, strict=True)
        ]
        self.policy.record(sequences, steps)
        return list(zip(sequences, steps, strict=True))

    def _plain_step(
        self,
        sequences: list[Sequence],
        proposals: list[Proposal],
        drafted: dict[int, Draft] | None,
        keep_states: bool,
    ) -> tuple[list[Draft], list[Accepted]]:
        """Takes a step without a CUDA graph.

        drafted: the drafter's drafts, or None if it has not drafted yet.
        """
        if drafted is None:
            drafted = self._draft(sequences, proposals)
        roots = [upload([sequence.root], self.backbone.device) for sequence in sequences]
        known = [drafted.get(i) or Draft(root, ROOT) for i, root in enumerate(roots)]
        drafts = complete(self.engine, sequences, proposals, known)
        out = self._verify(drafts, proposals, self.taps if keep_states else (-1,))
        self._keeping = True
        assert out.logits is not None
        paths = accept(out.logits, drafts, [sequence.sampler for sequence in sequences], out.best)
        accepted = [
            self._keep(slot, sequence, draft, out, *path)
            for slot, (sequence, draft, path) in enumerate(
                zip(sequences, drafts, paths, strict=True)
            )
        ]
        return drafts, accepted

    def _draft(self, sequences: list[Sequence], proposals: list[Proposal]) -> dict[int, Draft]:
        """Returns the drafter's drafts by sequence index; a sequence that drafts only the root has none."""
        if self.drafter is None:
            return {}
        drafts: dict[int, Draft] = {}
        trees = [tree for tree, _ in proposals]
        for tree in dict.fromkeys(trees):  # one call for all sequences with the same tree
            if not tree.max_depth:
                continue
            alike = [i for i, other in enumerate(trees) if other == tree]
            forks = [drafter for i in alike if (drafter := sequences[i].drafter) is not None]
            for i in alike:
                if sequences[i].missed:
                    self._catch_up(i, sequences[i])
            new = [sequences[i].take_unread() for i in alike]
            if self.drafter.reads_cache:  # running sequences are in the first slots
                new = [
                    replace(tokens, cache=self.cache, slot=i)
                    for i, tokens in zip(alike, new, strict=True)
                ]
            drafts.update(zip(alike, forks[0].draft(self.backbone, forks, new, tree), strict=True))
        for i, draft in drafts.items():
            # A custom drafter that changes the root would otherwise change the answer.
            draft.tokens[0] = sequences[i].root
        return drafts

    @torch.inference_mode()
    def _catch_up(self, slot: int, sequence: Sequence) -> None:
        """Provides the states of a sequence's last tokens to a drafter that has missed them.

        The model runs the tokens again, which writes their rows in the cache again. If passes over a prompt give other
        bits than steps, the old rows are put back. Of a long text, only the last tokens are run: a drafter may skip
        positions.
        """
        sequence.missed = False
        end = len(sequence.tokens)
        start = max(sequence.read, end - CATCH_UP_TOKENS)
        if sequence.unread and sequence.unread[0].start <= start:
            return
        start = self.cache.reusable(slot, min(start, end - 1))
        differs = self.engine.row_invariant and not self.engine.prompt_invariant
        rows = self.cache.rows(slot, start, end) if differs else None
        try:
            self.cache.truncate(slot, start)
            tokens = upload(sequence.tokens[start:], self.backbone.device)
            parts = [
                self.engine.forward(
                    Plan.chain(chunk, slot=slot, taps=self.taps, logits="none"), self.cache
                ).hidden[0]
                for chunk in tokens.split(self.engine.prefill_rows)
            ]
            if rows is not None:
                self.cache.fill(slot, start, end, rows)
        except BaseException:  # the slot has fewer rows than the sequence has tokens
            self.prefixes.drop(sequence)
            raise
        new = NewTokens(tokens, torch.cat(parts), sequence.root, start)
        sequence.unread = [new.part(max(start, sequence.read), end)]

    def _verify(
        self, drafts: list[Draft], proposals: list[Proposal], taps: tuple[int, ...]
    ) -> Output:
        """Runs the verify pass over B drafts; smaller trees are padded at the end."""
        depth = max(tree.max_depth for tree, _ in proposals)
        extra_rows = None if self.drafter is None else self.drafter.extra_rows(depth)
        plan = Plan(*batch_drafts(drafts), 0, taps, "all", extra_rows)
        return self.engine.forward(plan, self.cache)

    def _keep(
        self, slot: int, sequence: Sequence, draft: Draft, out: Output, path: list[int], bonus: int
    ) -> Accepted:
        """Keeps the rows of an accepted path in a slot of the cache.

        Returns the path with its hidden states.
        """
        assert out.logits is not None
        self.cache.keep(slot, path)
        rows = upload(path, self.backbone.device)
        tokens = [draft.ids[node] for node in path]
        ids = draft.tokens.to(rows.device)[rows]
        reported: tuple[Likelihood, ...] = ()
        if sequence.request.top is not None:
            reported = likelihoods(
                out.logits[slot, rows], [*tokens[1:], bonus], sequence.request.top
            )
        extra = None if out.extra is None else out.extra[slot, path[-1]]
        return Accepted(path, tokens, ids, bonus, out.hidden[slot, rows], extra, reported)

    def _fit(self, sequences: list[Sequence], proposals: list[Proposal]) -> list[Proposal]:
        """Truncates trees and n-gram paths to the positions left in the context and to the engine's maximum depth."""
        fitting: list[Proposal] = []
        for sequence, (tree, paths) in zip(sequences, proposals, strict=True):
            left = self.backbone.max_positions - len(sequence.tokens) - 1
            depth = min(left, self.engine.tree_depth)
            if tree.max_depth > depth:
                tree = tree.truncate(depth)
            fitting.append((tree, [path[:depth] for path in paths]))
        return fitting

    def has_room(self, request: Request) -> bool:
        """Returns True if a slot is free and the running sequences leave enough memory.

        Each sequence counts with its maximum length. If no sequence is running, the result is True
        even for a request that can never fit; `prefill` refuses such a request.
        """
        if not self.free_slots:
            return False
        _, needed, free = self._memory_for(request, MEMORY_SHARE)
        return needed <= free or not self.prefixes.taken

    def _check_memory(self, request: Request) -> int:
        """Returns the slot for a request.

        Raises UserError if running sequences leave too little memory for the cache to grow.
        """
        slot, needed, free = self._memory_for(request)
        if needed > free:
            tokens = self._longest(request)
            raise UserError(
                f"a prompt and answer of up to {tokens:,} tokens need a cache of {needed / 1e9:.1f} GB, "
                f"and {self.backbone.device} has {free / 1e9:.1f} GB left",
                "use a smaller @max_new_tokens, a shorter prompt or fewer sequences at once",
            )
        return slot

    def _memory_for(self, request: Request, share: float = 1) -> tuple[int, int, int]:
        """Returns the slot for a request, the bytes by which the cache must grow, and `share` of the free bytes.

        If there is too little memory, cached prefixes that the request does not share are dropped first.
        """
        slot = self.prefixes.choose(request)
        taken = {slot: self._rows(own.longest) for slot, own in self.prefixes.taken.items()}

        def bytes_and_free() -> tuple[int, int]:
            rows = {**taken, slot: self._rows(self._longest(request))}
            needed = self.cache.missing_rows(rows) * self.engine.row_bytes
            fixed = self.engine.slot_bytes(self.policy.size)
            needed += sum(max(0, fixed - self.cache.held_bytes(own)) for own in rows)
            return needed, int(share * free_memory(self.backbone.device)) if needed else 0

        needed, free = bytes_and_free()
        if needed > free:
            slot = self.prefixes.choose(request, copies=False)
            needed, free = bytes_and_free()
        while needed > free and self.prefixes.evict(but=slot):
            needed, free = bytes_and_free()
        if needed > free and not self.prefixes.taken and self.cuda_graphs is None:
            # No sequence runs, so the cache can be emptied: an empty cache keeps no old buffers while it grows.
            self.prefixes.clear()
            self.cache.resize(FIRST_ROWS)
            needed, free = bytes_and_free()
        return slot, needed, free

    def _longest(self, request: Request) -> int:
        """Returns the maximum length of a request's prompt and answer."""
        return min(len(request.prompt) + request.max_new_tokens, self.backbone.max_positions)

    def _rows(self, tokens: int) -> int:
        """Returns the number of rows for a sequence of this length and its drafts. The last token is not run."""
        return tokens - 1 + self.policy.size
