"""The decoder: sequences side by side in one cache, and the step that all decoding consists of."""

from __future__ import annotations

import math
import time
from collections.abc import Generator, Iterable, Iterator
from collections.abc import Sequence as Several

import torch
from torch import Tensor

from medusa_cli.decode.accept import accept
from medusa_cli.decode.answer import Accepted, Likelihood, Step, likelihoods
from medusa_cli.decode.cuda_graph import CudaGraphs, captures
from medusa_cli.decode.ngram import add_paths, shared_length
from medusa_cli.decode.policy import ROOT, DraftPolicy, DynamicTreePolicy, Proposal, StaticTreePolicy
from medusa_cli.decode.sequence import Request, Sequence
from medusa_cli.device import free_memory, upload
from medusa_cli.drafters.base import Drafter, NewTokens
from medusa_cli.engine import Plan
from medusa_cli.errors import UserError
from medusa_cli.model import Backbone
from medusa_cli.tree import Draft
from medusa_cli.tree.tensors import outline
from medusa_cli.tree.tree import batch_drafts, unread_draft

# Rows of a pass over a prompt whose tokens' log probabilities are wanted.
PROMPT_ROWS = 256


class Decoder:
    """Runs sequences in the slots of one cache; `step` advances each of them.

    Without a drafter decoding is plain, but for the n-gram matches that the policy may draft. Greedy and exact sampling
    give what plain decoding gives: the same tokens, the same distribution. A slot keeps its rows when its sequence is
    done: a prompt with the same beginning runs only the rest.
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
    ) -> None:
        """Prepares a cache of `slots` sequences.

        cuda_graphs: None decides by a trial. taps: layers whose hidden states a sequence keeps without a drafter.
        """
        self.backbone, self.engine, self.drafter = backbone, backbone.engine, drafter
        self.policy = policy or StaticTreePolicy(ROOT)
        self.taps = taps if drafter is None else drafter.taps
        self.cache = self.engine.new_cache(slots)
        graphs = captures(self.engine) if cuda_graphs is None else cuda_graphs
        graphs = graphs and not (drafter is not None and drafter.uses_verify_pass)
        limits = self.policy.tree if isinstance(self.policy, DynamicTreePolicy) else None
        self.cuda_graphs = CudaGraphs(self.engine, self.cache, self.taps, drafter, limits) if graphs else None
        if self.cuda_graphs is not None:
            self.cuda_graphs.warm_up()
        self._slots: list[Sequence | None] = [None] * slots  # running, or done and a prefix for others

    @property
    def sequences(self) -> list[Sequence]:
        """Returns the running sequences, whose prompts are through."""
        return [
            s for s in self._slots if s is not None and not s.stop.reason and len(s.tokens) >= len(s.request.prompt)
        ]

    @property
    def free_slots(self) -> int:
        return sum(sequence is None or sequence.done for sequence in self._slots)

    def run(self, requests: Iterable[Request]) -> Iterator[tuple[Sequence, Step]]:
        """Decodes requests, as many at once as there are slots; request i becomes the sequence of number i.

        A request gets the same answer whatever runs beside it. Closing the iterator cancels what is running.
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
        """Runs the prompt of a request; returns its sequence and the step with the answer's first token."""
        *_, (sequence, step) = self.prefill(request, number)
        assert step is not None
        return sequence, step

    @torch.inference_mode()
    def prefill(self, request: Request, number: int = 0) -> Iterator[tuple[Sequence, Step | None]]:
        """Gives a request a slot and runs its prompt, a piece an item; the last one has the answer's first token.

        Other sequences may take steps in between. `number` selects the sequence's random stream. Raises UserError for a
        prompt longer than the context, UsageError for limits that cannot be.
        """
        sequence = Sequence(self.backbone, request, number, self.policy.begin(request.sampling))
        self._check_memory(len(request.prompt) + sequence.stop.left)
        self.cache.reserve(len(request.prompt))
        self._take_slot(sequence)
        try:
            step = yield from self._run_prompt(sequence)
        except BaseException:  # an error, or nobody asks for the rest
            sequence.cancel()
            raise
        yield sequence, step

    def _run_prompt(self, sequence: Sequence) -> Generator[tuple[Sequence, None], None, Step]:
        request, device, seconds = sequence.request, self.backbone.device, 0.0
        prompt, hidden = list(request.prompt), list[Tensor]()
        scores_prompt = request.scores_prompt
        likely = [Likelihood(prompt[0], math.nan)] if scores_prompt else []
        rows = PROMPT_ROWS if scores_prompt else self.engine.prefill_rows
        for start in range(sequence.reused, len(prompt), rows):
            started, piece = time.perf_counter(), prompt[start : start + rows]
            last = start + rows >= len(prompt)
            extra_rows = self.drafter.extra_rows(self.policy.max_depth) if last and self.drafter is not None else None
            logits = "all" if scores_prompt else "last" if last else "none"
            slot = self._slots.index(sequence)  # steps of others may have moved it
            plan = Plan.chain(upload(piece, device), slot=slot, taps=self.taps, logits=logits, extra_rows=extra_rows)
            out = self.engine.forward(plan, self.cache)
            hidden.append(out.hidden[0])
            sequence.tokens += piece
            if scores_prompt and out.logits is not None:
                following = prompt[start + 1 : start + 1 + rows]
                likely += likelihoods(out.logits[0], following, request.top or 0)
            seconds += time.perf_counter() - started
            if not last:
                yield sequence, None
        assert out.logits is not None
        root = sequence.sampler.choose(out.logits[0, -1])
        extra = None if out.extra is None else out.extra[0, -1]
        tokens = upload(prompt[sequence.reused :], device)
        new = sequence.finish_prefill(NewTokens(tokens, torch.cat(hidden), root, sequence.reused, extra))
        if request.top is not None:
            likely += likelihoods(out.logits[0, -1:], new, request.top)
        return Step(new, verify_s=seconds, likelihoods=tuple(likely))

    @torch.inference_mode()
    def step(self) -> list[tuple[Sequence, Step]]:
        """Drafts, verifies, accepts and keeps for every running sequence; returns what each gained.

        Seconds are each sequence's share. On a GPU those of drafting are the host's, which does not wait for the draft.
        An error or an interruption cancels the sequences.
        """
        sequences = self._running_first()
        if not sequences:
            return []
        try:
            with self.engine.alone():
                return self._advance(sequences)
        except BaseException:  # the cache may hold rows whose tokens no sequence has taken
            for sequence in sequences:
                sequence.cancel()
            raise

    def _advance(self, sequences: Several[Sequence]) -> list[tuple[Sequence, Step]]:
        """Returns what a step gives to each of these sequences, all that run."""
        started = time.perf_counter()
        proposals = self._fit(sequences, self.policy.next(sequences))
        graphs = self.cuda_graphs if self.cuda_graphs is not None and self.cuda_graphs.supports(sequences) else None
        guesses = None if graphs is not None and graphs.drafts else self._draft(sequences, proposals)
        drafted = time.perf_counter()
        result = None if graphs is None else self._run_graph(graphs, sequences, proposals, guesses)
        drafts, accepted = result or self._run_pass(sequences, proposals, guesses)
        tokens = [sequence.commit(kept) for sequence, kept in zip(sequences, accepted, strict=True)]
        count, kept_at = len(sequences), time.perf_counter()
        seconds = (drafted - started) / count, (kept_at - drafted) / count
        steps = [
            Step(new, draft.tree.size, tuple(kept.path), *seconds, kept.likelihoods[: len(new)], draft.looked_up)
            for new, draft, kept in zip(tokens, drafts, accepted, strict=True)
        ]
        self.policy.record(sequences, steps)
        return list(zip(sequences, steps, strict=True))

    def _run_graph(
        self,
        graphs: CudaGraphs,
        sequences: Several[Sequence],
        proposals: Several[Proposal],
        guesses: dict[int, Draft] | None,
    ) -> tuple[list[Draft], list[Accepted]] | None:
        """Returns drafts and what a CUDA graph accepts of them; None if it cannot run them.

        The host does not read what a drafter drafts. Without `guesses` the graph drafts.
        """
        if guesses is None:
            trees, guesses = [outline(tree) for tree, _ in proposals], {}
        else:
            trees = [guesses[i].tree if i in guesses else ROOT for i in range(len(sequences))]
        unread = [unread_draft(s.root, tree) for s, tree in zip(sequences, trees, strict=True)]
        drafts = self._complete(proposals, unread, sequences)
        accepted = graphs.verify(sequences, drafts, guesses)
        return None if accepted is None else (drafts, accepted)

    def _run_pass(
        self, sequences: Several[Sequence], proposals: Several[Proposal], guesses: dict[int, Draft] | None
    ) -> tuple[list[Draft], list[Accepted]]:
        """Returns drafts and what a pass without a graph accepts of them, whose rows stay in the cache.

        Without `guesses` it drafts first.
        """
        guesses, device = self._draft(sequences, proposals) if guesses is None else guesses, self.backbone.device
        known = [guesses.get(i) or Draft(upload([s.root], device), ROOT) for i, s in enumerate(sequences)]
        drafts = self._complete(proposals, known, sequences)
        depth = max(tree.max_depth for tree, _ in proposals)
        extra_rows = None if self.drafter is None else self.drafter.extra_rows(depth)
        out = self.engine.forward(Plan(*batch_drafts(drafts), 0, self.taps, "all", extra_rows), self.cache)
        assert out.logits is not None
        accepted, samplers = [], [sequence.sampler for sequence in sequences]
        for slot, (path, bonus) in enumerate(accept(out.logits, drafts, samplers, out.best)):
            self.cache.keep(slot, path)
            rows, likely = upload(path, device), tuple[Likelihood, ...]()
            extra = None if out.extra is None else out.extra[slot, path[-1]]
            tokens = [drafts[slot].ids[node] for node in path]
            if (top := sequences[slot].request.top) is not None:
                likely = likelihoods(out.logits[slot, rows], [*tokens[1:], bonus], top)
            accepted.append(Accepted(path, tokens, bonus, out.hidden[slot, rows], extra, likely))
        return drafts, accepted

    def _check_memory(self, tokens: int) -> None:
        """Raises UserError for a text that the cache cannot grow to hold in the device's memory."""
        capacity = self.cache.grown(tokens + self.policy.size)
        if capacity == self.cache.capacity:
            return
        needed = capacity * self.cache.slots * self.engine.row_bytes  # the old cache is held while it is copied
        if needed > (free := free_memory(self.backbone.device)):
            raise UserError(
                f"a prompt and answer of up to {tokens:,} tokens need a cache of {needed / 1e9:.1f} GB, "
                f"and {self.backbone.device} has {free / 1e9:.1f} GB left",
                "use a smaller @max_new_tokens, a shorter prompt or fewer sequences at once",
            )

    def _fit(self, sequences: Several[Sequence], proposals: Several[Proposal]) -> list[Proposal]:
        """Returns the proposals as far as they fit into the context."""
        levels = [self.backbone.max_positions - len(sequence.tokens) - 1 for sequence in sequences]
        return [
            (tree if tree.max_depth <= depth else tree.truncate(depth), [path[:depth] for path in paths])
            for (tree, paths), depth in zip(proposals, levels, strict=True)
        ]

    def _draft(self, sequences: Several[Sequence], proposals: Several[Proposal]) -> dict[int, Draft]:
        """Returns the drafter's drafts by the sequence's index; a root alone needs none."""
        drafts: dict[int, Draft] = {}
        trees = [tree if self.drafter is not None and tree.max_depth else ROOT for tree, _ in proposals]
        for tree in dict.fromkeys(tree for tree in trees if tree is not ROOT):  # one call for all sequences of a tree
            alike = [i for i, other in enumerate(trees) if other == tree]
            forks = [drafter for i in alike if (drafter := sequences[i].drafter) is not None]
            new = [sequences[i].take_unread() for i in alike]
            drafts.update(zip(alike, forks[0].draft(self.backbone, forks, new, tree), strict=True))
        return drafts

    def _complete(
        self, proposals: Several[Proposal], drafts: Several[Draft], sequences: Several[Sequence]
    ) -> list[Draft]:
        """Adds n-gram matches to drafts, and cuts these to what a pass of the engine takes."""
        complete = []
        for draft, (_, paths), sequence in zip(drafts, proposals, sequences, strict=True):
            draft = add_paths(draft, paths) if paths else draft
            nodes = self.engine.tree_rows(len(sequence.tokens))
            complete.append(draft.first(nodes) if draft.tree.size > nodes else draft)
        return complete

    def clear_prefix_cache(self) -> None:
        """Drops the cached prefixes of idle slots."""
        self._slots = [None if previous is None or previous.done else previous for previous in self._slots]

    def _take_slot(self, sequence: Sequence) -> None:
        """Gives a sequence the idle slot that shares most with its prompt; it takes over what that holds.

        At least the prompt's last token is left to run. Raises ValueError where no slot is idle.
        """
        prompt, reuse = sequence.request.prompt, 0 if sequence.request.scores_prompt else sequence.request.reuse
        limit = len(prompt) - 1 if reuse is None else min(reuse, len(prompt) - 1)

        def share(slot: int) -> tuple[int, int]:
            previous = self._slots[slot]
            if previous is None:
                return 0, 0
            return min(shared_length(previous.tokens, prompt), limit), -len(previous.tokens)

        idle = [slot for slot, previous in enumerate(self._slots) if previous is None or previous.done]
        if not idle:
            raise ValueError(f"all {len(self._slots)} slots are taken")
        # Of slots that share as much the emptiest is taken: the text of another may yet be asked for.
        slot = max(idle, key=share)
        shared = self.cache.reusable(slot, share(slot)[0])
        sequence.reuse_prefix(self._slots[slot], shared, self.drafter)
        # The drafter may know less, and a running state goes back to few places.
        while (shared := self.cache.reusable(slot, sequence.reused)) < sequence.reused:
            sequence.reuse_prefix(self._slots[slot], shared, self.drafter)
        self._slots[slot] = sequence
        self.cache.truncate(slot, sequence.reused)

    def _running_first(self) -> list[Sequence]:
        """Moves running sequences from the last slots into idle ones before them: a pass runs over the first slots."""
        while (running := self.sequences) != self._slots[: len(running)]:
            slot = next(i for i, sequence in enumerate(self._slots) if sequence is not running[i])
            last = self._slots.index(running[-1])
            self.cache.swap(slot, last)
            self._slots[slot], self._slots[last] = self._slots[last], self._slots[slot]
        return running
