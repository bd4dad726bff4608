"""The decode loop for many prompts at once: every slot holds one, at its own length, and takes the next when done."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch

from medusa_cli.backbone import Backbone, SlotCache
from medusa_cli.decoding.accept import accept
from medusa_cli.decoding.clock import Clock
from medusa_cli.decoding.ending import Ending, fitting
from medusa_cli.decoding.sampling import Sampling, choose
from medusa_cli.decoding.types import Step
from medusa_cli.drafters.base import Confirmed, Draft, Drafter
from medusa_cli.errors import UsageError
from medusa_cli.tree import Growth, Tree


@dataclass
class _Row:
    """A prompt under way: its number, when it ends, its random numbers, its drafter's state, what was settled."""

    number: int
    ending: Ending
    generator: torch.Generator
    drafter: Drafter | None
    confirmed: Confirmed


def generate_batch(
    backbone: Backbone,
    drafter: Drafter | None,
    tree: Tree | Growth | None,
    prompts: Sequence[Sequence[int]],
    *,
    batch_size: int,
    max_new_tokens: int,
    sampling: Sampling | None = None,
    stop_ids: Iterable[int] | None = None,
    stop_strings: Sequence[str] = (),
) -> Iterator[tuple[int, Step]]:
    """Continue many prompts, `batch_size` at a time; yields each one's steps with its number, in no fixed order.

    Every prompt gets what generate gives it alone, or without a drafter what generate_plain does. A step's seconds
    are its share of the pass over all rows. Raises UsageError for a dynamic tree and for a drafter whose rows ride in
    the backbone's pass, UserError as generate does.
    """
    if isinstance(tree, Growth):
        raise UsageError("--tree dynamic grows another tree for each row", "use a static tree, or --batch-size 1")
    if batch_size < 1:
        raise UsageError(f"--batch-size {batch_size} is too small", "use 1 or more")
    shape = tree if drafter is not None and tree is not None else Tree.root_only()
    if drafter is not None and drafter.pseudo(shape.max_depth) is not None:
        raise UsageError(f"{drafter.name} drafts for one sequence at a time", "use --batch-size 1, or another drafter")
    stops = None if stop_ids is None else frozenset(stop_ids)
    waiting = [Ending(backbone, prompt, max_new_tokens, stops, stop_strings) for prompt in prompts]
    longest = max((ending.room for ending in waiting), default=0)
    cache = backbone.new_slots(min(batch_size, len(prompts)), longest + shape.size)
    work = _Batch(backbone, drafter, shape, cache, sampling or Sampling())
    for number, (prompt, ending) in enumerate(zip(prompts, waiting, strict=True)):
        yield number, work.begin(number, prompt, ending)
        while len(work.rows) == len(cache.slots):
            yield from work.step()
    while work.rows:
        yield from work.step()


class _Batch:
    """The rows under way, in the first slots of the cache, and one step for all of them."""

    def __init__(
        self, backbone: Backbone, drafter: Drafter | None, tree: Tree, cache: SlotCache, sampling: Sampling
    ) -> None:
        self.backbone, self.drafter, self.tree, self.cache, self.sampling = backbone, drafter, tree, cache, sampling
        self.taps = (-1,) if drafter is None else drafter.taps
        self.rows: list[_Row] = []

    def begin(self, number: int, prompt: Sequence[int], ending: Ending) -> Step:
        """Prefill a prompt into the next slot and take the answer's first token."""
        clock = Clock(self.backbone)
        slot = self.cache.slots[len(self.rows)]
        slot.truncate(0)
        generator = self.sampling.generator(self.backbone.device)
        tokens = torch.tensor(list(prompt), device=self.backbone.device)
        out = self.backbone.forward(tokens, slot, taps=self.taps, logits="last")
        assert out.logits is not None
        root = choose(out.logits[-1], self.sampling, generator)
        fork = None if self.drafter is None else self.drafter.fork()
        row = _Row(number, ending, generator, fork, Confirmed(tokens, out.hidden, root, 0))
        fresh = ending.cut([root])
        if not ending.done:
            self.rows.append(row)
        return Step(fresh, 0, 0, 0.0, clock.lap(), prefill=True)

    def step(self) -> Iterator[tuple[int, Step]]:
        """Draft, verify, accept and keep for every row; rows that end leave, and the last row moves up."""
        clock, starts = Clock(self.backbone), [slot.length for slot in self.cache.slots[: len(self.rows)]]
        # Positions end with the context: near it, one row cuts the tree for all.
        tree = fitting(self.tree, self.backbone.max_positions - max(starts))
        assert isinstance(tree, Tree)
        tokens = self._draft(tree)  # [B, N]
        draft_s = clock.lap() / len(self.rows)
        out = self.backbone.forward_slots(tokens, self.cache, tree, taps=self.taps)
        assert out.logits is not None
        verdicts = [
            accept(scores, Draft(drafted, tree), self.sampling, row.generator)
            for scores, drafted, row in zip(out.logits, tokens, self.rows, strict=True)
        ]
        self.cache.keep([verdict.path for verdict in verdicts])
        settled = []
        for index, (row, verdict) in enumerate(zip(self.rows, verdicts, strict=True)):
            path = torch.tensor(verdict.path, device=tokens.device)
            row.confirmed = Confirmed(tokens[index, path], out.hidden[index, path], verdict.bonus, starts[index])
            settled.append(row.ending.cut([*row.confirmed.tokens[1:].tolist(), verdict.bonus]))
        verify_s = clock.lap() / len(self.rows)
        for row, fresh in zip(list(self.rows), settled, strict=True):
            yield row.number, Step(fresh, tree.size - 1, len(fresh) - 1, draft_s, verify_s)
        self._drop_finished()

    def _draft(self, tree: Tree) -> torch.Tensor:
        confirmed = [row.confirmed for row in self.rows]
        if self.drafter is None:
            return torch.tensor([[one.root] for one in confirmed], device=self.backbone.device)
        sequences = [row.drafter for row in self.rows if row.drafter is not None]
        return self.drafter.draft_rows(self.backbone, self.cache, sequences, confirmed, tree)

    def _drop_finished(self) -> None:
        for index in reversed(range(len(self.rows))):
            if self.rows[index].ending.done:
                last = self.rows.pop()
                if index < len(self.rows):
                    self.cache.move(len(self.rows), index)
                    self.rows[index] = last
