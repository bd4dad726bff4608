"""The decoder: sequences side by side in one cache, and the step that all decoding consists of."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from collections.abc import Sequence as Several

import torch

from medusa_cli.decode.accept import accept
from medusa_cli.decode.cuda_graph import CudaGraphs, captures
from medusa_cli.decode.ngram import add_paths
from medusa_cli.decode.policy import DraftPlan, DraftPolicy, DynamicTreePolicy, StaticTreePolicy
from medusa_cli.decode.prefix_cache import CachedPrefix, PrefixCache
from medusa_cli.decode.sequence import Request, Sequence
from medusa_cli.decode.stats import Accepted, Step
from medusa_cli.drafters.base import Draft, Drafter, NewTokens
from medusa_cli.engine import Engine, ExtraRows, Plan
from medusa_cli.engine.autotune import synchronize
from medusa_cli.model import Backbone
from medusa_cli.tree import DynamicTree, Tree
from medusa_cli.tree.tree import batch_trees

PLAIN = StaticTreePolicy(Tree.root_only())


def uses_cuda_graphs(engine: Engine, policy: DraftPolicy) -> bool:
    """Returns True if steps replay CUDA graphs: where that is faster, and with fixed trees."""
    return policy.fixed_trees and captures(engine)


def allows_ngrams(drafter: Drafter | None, cuda_graphs: bool) -> bool:
    """Returns True if n-gram drafts may be added: not with CUDA graphs (fixed trees), not with FIRP (each node costs
    extra rows)."""
    return not cuda_graphs and not (drafter is not None and drafter.uses_verify_pass)


class Decoder:
    """Runs sequences in the slots of one cache; `step` advances each of them.

    The policy decides what is drafted; a tree stands for the policy that drafts it. Without a drafter, or a policy,
    decoding is plain. Greedy and exact sampling give what plain decoding gives: the same tokens, the same distribution.
    A slot keeps its rows when its sequence leaves: a prompt with the same beginning runs only the rest.
    """

    def __init__(
        self,
        backbone: Backbone,
        drafter: Drafter | None = None,
        policy: DraftPolicy | Tree | DynamicTree | None = None,
        *,
        slots: int = 1,
        cuda_graphs: bool | None = None,
        taps: tuple[int, ...] = (-1,),
    ) -> None:
        """Prepares a cache of `slots` sequences.

        cuda_graphs: None decides by a trial. taps: layers whose hidden states a sequence keeps without a drafter.
        """
        policy = policy_of(policy)
        if drafter is None and policy.max_depth:
            policy = PLAIN
        graphs = uses_cuda_graphs(backbone.engine, policy.without_ngrams()) if cuda_graphs is None else cuda_graphs
        self.backbone, self.engine, self.drafter = backbone, backbone.engine, drafter
        self.policy = policy if allows_ngrams(drafter, graphs) else policy.without_ngrams()
        self.taps = taps if drafter is None else drafter.taps
        # Steps of one row read keys as they come, steps of several rows read transposed ones.
        self.slots = PrefixCache(self.engine.new_cache(slots, plain=drafter is None and not policy.drafts))
        self.cuda_graphs = CudaGraphs(self.engine, self.slots.cache, self.taps) if graphs else None
        self._by_slot: list[Sequence | None] = []  # None: its sequence left, and the next prompt takes the slot
        # FIRP drafts a tree from extra rows of the pass before its step.
        self._next_tree: Tree | DynamicTree | None = None
        self._extra_rows: ExtraRows | None = None

    @property
    def sequences(self) -> list[Sequence]:
        """Returns the running sequences."""
        return [sequence for sequence in self._by_slot if sequence is not None]

    @property
    def free_slots(self) -> int:
        return self.slots.count - len(self.sequences)

    def use_tree(self, tree: Tree | DynamicTree) -> None:
        """Drafts `tree` from the next step on (FIRP: one step later, it drafts during verification)."""
        self.policy = policy_of(tree)

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
                self.cancel(sequence)

    @torch.inference_mode()
    def admit(self, request: Request, number: int = 0) -> tuple[Sequence, Step]:
        """Runs the prompt of a request; returns its sequence and the step with the answer's first token.

        `number` selects the sequence's random stream. Raises UserError for a prompt longer than the context, UsageError
        for limits that cannot be.
        """
        started = self._clock()
        sequence = Sequence(self.backbone, request, number, self.policy.begin(request.sampling))
        if not self.sequences:
            self._plan_extra_rows([sequence])
        slot, prefix = self._take_slot(request)
        tokens = torch.tensor(list(request.prompt[prefix.length :]), device=self.backbone.device)
        out = self.engine.forward(
            Plan.chain(tokens, slot=slot, taps=self.taps, pseudo=self._extra_rows), self.slots.cache
        )
        root = sequence.sampler.choose(out.logits[0, -1])
        extra = None if out.ahead is None else out.ahead[0, -1]
        new = NewTokens(tokens, out.hidden[0], root, prefix.length, extra)
        sequence.start(prefix.length, prefix.drafter, prefix.pending, new)
        self._by_slot[slot : slot + 1] = [sequence]
        step = Step(
            sequence.stop.truncate([root]),
            verify_s=self._clock() - started,
            prefill=True,
            likelihoods=sequence.likelihoods(out.logits[0, -1:], [root]),
        )
        self._release_done()
        return sequence, step

    @torch.inference_mode()
    def step(self, drafts: list[Draft] | None = None) -> list[tuple[Sequence, Step]]:
        """Drafts, verifies, accepts and keeps for every sequence; returns what each gained. Done sequences leave.

        Seconds are each sequence's share. drafts: one a sequence, made elsewhere.
        """
        self._close_gaps()
        sequences, started = self.sequences, self._clock()
        if not sequences:
            return []
        drafts = drafts or self._draft(sequences)
        drafted = self._clock()
        self._plan_extra_rows(sequences)
        accepted = self._verify(sequences, drafts)
        steps = self._keep(sequences, drafts, accepted, (drafted - started) / len(sequences), drafted)
        self.policy.record(sequences, steps)
        self._release_done()
        return list(zip(sequences, steps, strict=True))

    def _draft(self, sequences: Several[Sequence]) -> list[Draft]:
        """Drafts for every sequence; near the end of the context its tree is truncated to what fits."""
        ahead = self._next_tree
        plans: list[DraftPlan] = self.policy.next(sequences) if ahead is None else [(ahead, []) for _ in sequences]
        free = [self.backbone.max_positions - length for length in self.slots.cache.lengths[: len(sequences)]]
        trees = [tree.truncate_to(positions) for (tree, _), positions in zip(plans, free, strict=True)]
        drafts: dict[int, Draft] = {}
        for tree in dict.fromkeys(trees):  # one call of the drafter for all sequences of a tree
            alike = [i for i, other in enumerate(trees) if other == tree]
            drafts.update(zip(alike, self._draft_tree([sequences[i] for i in alike], tree), strict=True))
        return [add_paths(drafts[i], [path[: free[i] - 1] for path in plans[i][1]]) for i in range(len(sequences))]

    def _draft_tree(self, sequences: Several[Sequence], tree: Tree | DynamicTree) -> list[Draft]:
        """Returns drafts over one tree; a root alone needs no drafter."""
        if self.drafter is None or not tree.max_depth:
            roots = torch.tensor([sequence.root for sequence in sequences], device=self.backbone.device)
            return [Draft(root, PLAIN.tree) for root in roots.split(1)]
        states = [sequence.drafter for sequence in sequences if sequence.drafter is not None]
        drafts = self.drafter.draft(self.backbone, states, [sequence.pending for sequence in sequences], tree)
        for sequence in sequences:
            sequence.drafter_up_to_date = True
        return drafts

    def _verify(self, sequences: Several[Sequence], drafts: Several[Draft]) -> list[Accepted]:
        """Runs all drafts in one pass and keeps the rows of each accepted path in the cache."""
        tokens, depth, sees = batch_trees([draft.tokens for draft in drafts], [draft.tree for draft in drafts])
        samplers, extra_rows = [sequence.sampler for sequence in sequences], self._extra_rows
        wanted = [sequence.request.top is not None for sequence in sequences]
        if self.cuda_graphs is not None and not any(wanted) and self.cuda_graphs.supports(drafts, samplers, extra_rows):
            return self.cuda_graphs.verify(tokens, drafts[0].tree, samplers)
        out = self.engine.forward(Plan(tokens, depth, sees, 0, self.taps, "all", extra_rows), self.slots.cache)
        accepted = []
        for slot, (path, bonus) in enumerate(accept(out.logits, drafts, samplers)):
            self.slots.cache.keep(slot, path)
            rows = torch.tensor(path, device=tokens.device)
            extra_hidden = None if out.ahead is None else out.ahead[slot, path[-1]]
            logits = out.logits[slot, rows] if wanted[slot] else None
            accepted.append(Accepted(path, bonus, out.hidden[slot, rows], extra_hidden, logits))
        return accepted

    def _keep(
        self,
        sequences: Several[Sequence],
        drafts: Several[Draft],
        accepted: Several[Accepted],
        draft_s: float,
        drafted: float,
    ) -> list[Step]:
        """Commits each accepted path to its sequence; returns the steps."""
        tokens, likelihoods = [], []
        for sequence, draft, kept in zip(sequences, drafts, accepted, strict=True):
            path = draft.tokens[torch.tensor(kept.path, device=draft.tokens.device)]
            new = NewTokens(path, kept.hidden, kept.bonus, len(sequence.tokens), kept.extra_hidden)
            tokens.append(sequence.stop.truncate(sequence.commit(new)))
            likelihoods.append(sequence.likelihoods(kept.logits, tokens[-1]))
        verify_s = (self._clock() - drafted) / len(sequences)
        return [
            Step(
                new,
                drafted=draft.tree.size - 1,
                accepted=len(new) - 1,
                draft_s=draft_s,
                verify_s=verify_s,
                path=tuple(kept.path),
                nodes=draft.tree.size,
                likelihoods=likely,
                looked_up=draft.looked_up,
            )
            for new, draft, kept, likely in zip(tokens, drafts, accepted, likelihoods, strict=True)
        ]

    def cancel(self, sequence: Sequence) -> None:
        """Ends a sequence early and frees its slot."""
        sequence.cancelled = True
        self._release_done()

    def forget(self) -> None:
        """Drops the cached prefixes of idle slots."""
        self.slots.forget()

    def _plan_extra_rows(self, sequences: Several[Sequence]) -> None:
        """Chooses the tree of the step after the coming pass, if the drafter drafts it in that pass (FIRP)."""
        if self.drafter is not None and self.drafter.uses_verify_pass:
            self._next_tree = self.policy.next(sequences)[0][0]
            self._extra_rows = self.drafter.extra_rows(self._next_tree.max_depth)

    def _take_slot(self, request: Request) -> tuple[int, CachedPrefix]:
        """Returns a slot among those that left or right behind the running ones, and the prefix it holds."""
        running = {slot for slot, sequence in enumerate(self._by_slot) if sequence is not None}
        idle = [slot for slot in range(self.slots.count) if slot not in running]
        slot, prefix = self.slots.take(idle, request.prompt, self.drafter, request.reuse)
        if slot > len(self._by_slot):
            self.slots.swap(slot, len(self._by_slot))
            slot = len(self._by_slot)
        return slot, prefix

    def _release_done(self) -> None:
        """Frees the slots of sequences that are done; the slots remember their rows."""
        for slot, sequence in enumerate(self._by_slot):
            if sequence is not None and sequence.done:
                self.slots.release(slot, sequence.tokens, sequence.drafter, sequence.pending_tokens)
                self._by_slot[slot] = None

    def _close_gaps(self) -> None:
        """Moves the last sequences into freed slots: a pass runs over the first slots."""
        while None in self._by_slot:
            last = self._by_slot.pop()
            if last is not None:
                gap = self._by_slot.index(None)
                self.slots.swap(gap, len(self._by_slot))
                self._by_slot[gap] = last

    def _clock(self) -> float:
        """Returns the time in seconds, once the device has finished its work."""
        synchronize(self.backbone.device)
        return time.perf_counter()


def policy_of(policy: DraftPolicy | Tree | DynamicTree | None) -> DraftPolicy:
    """Returns the policy itself, or the one that drafts a tree; None is plain decoding."""
    if isinstance(policy, Tree):
        return StaticTreePolicy(policy)
    if isinstance(policy, DynamicTree):
        return DynamicTreePolicy(policy)
    return policy or PLAIN
