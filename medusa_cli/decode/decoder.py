"""The decoder: sequences side by side in one cache, and the step that all decoding consists of."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from collections.abc import Sequence as Several

import torch

from medusa_cli.decode.accept import accept
from medusa_cli.decode.cuda_graph import CudaGraphs, captures
from medusa_cli.decode.ngram import add_paths
from medusa_cli.decode.policy import ROOT, DraftPlan, DraftPolicy, StaticTreePolicy
from medusa_cli.decode.sequence import Request, Sequence
from medusa_cli.decode.stats import Accepted, Likelihood, Step, likelihoods
from medusa_cli.drafters.base import Drafter, NewTokens
from medusa_cli.engine import Output, Plan
from medusa_cli.engine.autotune import synchronize
from medusa_cli.model import Backbone
from medusa_cli.tree import Draft, DynamicTree, Tree
from medusa_cli.tree.tree import batch_drafts


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
        self.cuda_graphs = CudaGraphs(self.engine, self.cache, self.taps) if graphs else None
        if self.cuda_graphs is not None:
            self.cuda_graphs.warm_up()
        self._slots: list[Sequence | None] = [None] * slots  # running, or done and a prefix for others

    @property
    def sequences(self) -> list[Sequence]:
        """Returns the running sequences."""
        return [sequence for sequence in self._slots if sequence is not None and not sequence.done]

    @property
    def free_slots(self) -> int:
        return len(self._slots) - len(self.sequences)

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
                sequence.cancelled = True

    @torch.inference_mode()
    def admit(self, request: Request, number: int = 0) -> tuple[Sequence, Step]:
        """Runs the prompt of a request; returns its sequence and the step with the answer's first token.

        `number` selects the sequence's random stream. Raises UserError for a prompt longer than the context, UsageError
        for limits that cannot be.
        """
        started = self._clock()
        sequence = Sequence(self.backbone, request, number, self.policy.begin(request.sampling))
        slot = self._take_slot(sequence)
        tokens = torch.tensor(list(request.prompt[sequence.reused :]), device=self.backbone.device)
        extra_rows = None if self.drafter is None else self.drafter.extra_rows(self.policy.max_depth)
        out = self.engine.forward(Plan.chain(tokens, slot=slot, taps=self.taps, pseudo=extra_rows), self.cache)
        root = sequence.sampler.choose(out.logits[0, -1])
        extra = None if out.ahead is None else out.ahead[0, -1]
        new = sequence.prefill(NewTokens(tokens, out.hidden[0], root, sequence.reused, extra))
        likely = () if request.top is None else likelihoods(out.logits[0, -1:], new, request.top)
        self._slots[slot] = sequence
        return sequence, Step(new, verify_s=self._clock() - started, likelihoods=likely)

    @torch.inference_mode()
    def step(self) -> list[tuple[Sequence, Step]]:
        """Drafts, verifies, accepts and keeps for every running sequence; returns what each gained.

        Seconds are each sequence's share.
        """
        sequences, started = self._running_first(), self._clock()
        if not sequences:
            return []
        plans = self.policy.next(sequences)
        drafts, drafted = self._draft(sequences, plans), self._clock()
        accepted: list[Accepted] | None = None
        if self.cuda_graphs is not None and self.cuda_graphs.supports(sequences, drafts):
            accepted = self.cuda_graphs.verify([sequence.sampler for sequence in sequences], drafts)
        if accepted is None:
            depth = max(tree.max_depth for tree, _ in plans)
            extra_rows = None if self.drafter is None else self.drafter.extra_rows(depth)
            out = self.engine.forward(Plan(*batch_drafts(drafts), 0, self.taps, "all", extra_rows), self.cache)
            accepted = self._accept(sequences, drafts, out)
        tokens = [s.commit(draft, kept) for s, draft, kept in zip(sequences, drafts, accepted, strict=True)]
        count, kept_at = len(sequences), self._clock()
        seconds = (drafted - started) / count, (kept_at - drafted) / count
        steps = [
            Step(new, draft.tree.size, tuple(kept.path), *seconds, kept.likelihoods[: len(new)], draft.looked_up)
            for new, draft, kept in zip(tokens, drafts, accepted, strict=True)
        ]
        self.policy.record(sequences, steps)
        return list(zip(sequences, steps, strict=True))

    def _draft(self, sequences: Several[Sequence], plans: Several[DraftPlan]) -> list[Draft]:
        """Drafts for every sequence, as much as fits into the context and into a pass of the engine."""
        levels = [self.backbone.max_positions - len(sequence.tokens) - 1 for sequence in sequences]
        trees = [tree.truncate(depth) for (tree, _), depth in zip(plans, levels, strict=True)]
        drafts: dict[int, Draft] = {}
        for tree in dict.fromkeys(trees):  # one call of the drafter for all sequences of a tree
            alike = [i for i, other in enumerate(trees) if other == tree]
            drafts.update(zip(alike, self._draft_tree([sequences[i] for i in alike], tree), strict=True))
        rows = [self.engine.tree_rows(len(sequence.tokens)) for sequence in sequences]
        return [
            add_paths(drafts[i], [path[: levels[i]] for path in paths]).first(rows[i])
            for i, (_, paths) in enumerate(plans)
        ]

    def _draft_tree(self, sequences: Several[Sequence], tree: Tree | DynamicTree) -> list[Draft]:
        """Returns drafts over one tree; a root alone needs no drafter."""
        if self.drafter is None or not tree.max_depth:
            roots = torch.tensor([sequence.root for sequence in sequences], device=self.backbone.device)
            return [Draft(root, ROOT) for root in roots.split(1)]
        forks = [sequence.drafter for sequence in sequences if sequence.drafter is not None]
        return self.drafter.draft(self.backbone, forks, [sequence.read() for sequence in sequences], tree)

    def _accept(self, sequences: Several[Sequence], drafts: Several[Draft], out: Output) -> list[Accepted]:
        """Accepts a path of each draft and keeps its rows in the cache."""
        assert out.logits is not None
        accepted = []
        samplers = [sequence.sampler for sequence in sequences]
        for slot, (path, bonus) in enumerate(accept(out.logits, drafts, samplers)):
            self.cache.keep(slot, path)
            rows, likely = torch.tensor(path, device=out.hidden.device), tuple[Likelihood, ...]()
            extra = None if out.ahead is None else out.ahead[slot, path[-1]]
            if (top := sequences[slot].request.top) is not None:
                new = [*drafts[slot].tokens[rows[1:]].tolist(), bonus]
                likely = likelihoods(out.logits[slot, rows], new, top)
            accepted.append(Accepted(path, bonus, out.hidden[slot, rows], extra, likely))
        return accepted

    def cancel(self, sequence: Sequence) -> None:
        """Ends a sequence early and frees its slot."""
        sequence.cancelled = True

    def forget(self) -> None:
        """Drops the cached prefixes of idle slots."""
        self._slots = [None if previous is None or previous.done else previous for previous in self._slots]

    def _take_slot(self, sequence: Sequence) -> int:
        """Returns the idle slot that shares most with the sequence's prompt; the sequence takes over what it holds.

        At least the prompt's last token is left to run. Raises ValueError where no slot is idle.
        """
        prompt, reuse = sequence.request.prompt, sequence.request.reuse
        limit = len(prompt) - 1 if reuse is None else min(reuse, len(prompt) - 1)
        idle = [(slot, previous) for slot, previous in enumerate(self._slots) if previous is None or previous.done]
        if not idle:
            raise ValueError(f"all {len(self._slots)} slots are taken")
        # Of slots that share as much the emptiest is taken: the text of another may yet be asked for.
        shares = [
            (min(previous.common_length(prompt), limit), -len(previous.tokens)) if previous else (0, 0)
            for _, previous in idle
        ]
        best = max(range(len(idle)), key=shares.__getitem__)
        slot, previous = idle[best]
        self._slots[slot] = None
        sequence.continue_from(previous, shares[best][0], self.drafter)
        self.cache.truncate(slot, sequence.reused)
        return slot

    def _running_first(self) -> list[Sequence]:
        """Moves running sequences from the last slots into idle ones before them: a pass runs over the first slots."""
        running = self.sequences
        for slot in range(len(running)):
            previous = self._slots[slot]
            if previous is None or previous.done:
                last = self._slots.index(running[-1])
                self.cache.swap(slot, last)
                self._slots[slot], self._slots[last] = self._slots[last], previous
                running = self.sequences
        return running

    def _clock(self) -> float:
        """Returns the time in seconds, once the device has finished its work."""
        synchronize(self.backbone.device)
        return time.perf_counter()
