"""Decoding steps of fixed shapes: forward, greedy acceptance and compaction on the device, captured as CUDA graphs.

A step is a function of tensors alone, so that it can be captured once for each tree and each number of columns that
attention reads. Without CUDA the same function runs as it is.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from medusa_cli.backbone import Backbone, Output, SlotCache
from medusa_cli.backbone.slots import run_slots
from medusa_cli.tree import Tree

# Attention reads a multiple of so many columns: few graphs, and little read for nothing.
COLUMNS = 512
# Passes before a capture, so that libraries have chosen their kernels and made their workspaces.
WARM_UPS = 2


@dataclass(frozen=True)
class Settled:
    """A step's outcome for one sequence: accepted tokens [A+1], their tapped states [A+1, H * taps], what follows.

    The states are overwritten by the next step.
    """

    tokens: list[int]
    hidden: Tensor
    bonus: int


class StaticDecoder:
    """B sequences over a cache that never moves; each step reads one small tensor back from the device."""

    def __init__(self, backbone: Backbone, capacity: int, *, sequences: int = 1, taps: Sequence[int] = (-1,)) -> None:
        self._backbone, self.taps = backbone, tuple(taps)
        self.cache = backbone.new_slots(sequences, -(-capacity // COLUMNS) * COLUMNS)
        self._lengths = torch.zeros(sequences, dtype=torch.long, device=backbone.device)
        self._steps: dict[tuple[Tree, int], StaticStep] = {}
        # One step runs at a time, so all graphs may use the same memory.
        self._pool = torch.cuda.graph_pool_handle() if backbone.device.type == "cuda" else None

    def prefill(self, tokens: Tensor, sequence: int = 0) -> Output:
        """Append a prompt [n]; the last row's logits [1, V] and all tapped states [n, H * taps]."""
        slot = self.cache.slots[sequence]
        out = self._backbone.forward(tokens, slot, taps=self.taps, logits="last")
        self._lengths[sequence] = slot.length
        return out

    def truncate(self, length: int, sequence: int = 0) -> None:
        """Forget a sequence's rows from `length` on."""
        self.cache.slots[sequence].truncate(length)
        self._lengths[sequence] = self.cache.slots[sequence].length

    def step(self, tokens: Tensor, tree: Tree, *, capture: bool = True) -> list[Settled]:
        """Verify tokens [B, N] over a tree and keep each sequence's accepted path.

        capture False runs a tree that will not come again without a graph of its own.
        """
        needed = max(slot.length for slot in self.cache.slots) + tree.size
        if needed > self.cache.capacity:
            raise ValueError(f"a cache of {self.cache.capacity} rows cannot hold {needed}")
        key = (tree, -(-needed // COLUMNS) * COLUMNS)
        if key not in self._steps:
            self._steps[key] = StaticStep(self._backbone, self.cache, self._lengths, *key, self.taps)
        found, hidden = self._steps[key](tokens, self._pool if capture else None)
        settled = []
        for slot, (count, bonus, *path), states in zip(self.cache.slots, found.tolist(), hidden, strict=True):
            slot.length += count
            settled.append(Settled(path[:count], states[:count], bonus))
        return settled


class StaticStep:
    """One step for one tree and one number of columns."""

    def __init__(
        self, backbone: Backbone, cache: SlotCache, lengths: Tensor, tree: Tree, columns: int, taps: tuple[int, ...]
    ) -> None:
        device, size = backbone.device, tree.size
        self._backbone, self._cache, self._lengths, self._columns, self._taps = backbone, cache, lengths, columns, taps
        self._tokens = torch.zeros(len(cache.slots), size, dtype=torch.long, device=device)
        self._depth, self._among = tree.depth.to(device), tree.mask.to(device)
        self._parents = torch.tensor([max(parent, 0) for parent in tree.parents], device=device)
        self._root = torch.arange(size, device=device) == 0
        # The deepest node wins, of equals the first.
        self._worth = self._depth * size + torch.arange(size - 1, -1, -1, device=device)
        # Beyond a path's end every row stays where it is.
        full = list(range(tree.max_depth + 1))
        paths = [tree.path(node) for node in range(size)]
        self._paths = torch.tensor([path + full[len(path) :] for path in paths], device=device)  # [N, P]
        self._graph: torch.cuda.CUDAGraph | None = None
        self._out: tuple[Tensor, Tensor] | None = None

    @torch.inference_mode()
    def __call__(self, tokens: Tensor, pool: Any) -> tuple[Tensor, Tensor]:
        """Tokens [B, N] to (accepted rows, bonus, tokens of the path) [B, 2 + P] and the path's states [B, P, H].

        pool: the graphs' memory; None runs without a graph.
        """
        self._tokens.copy_(tokens)
        if pool is None:
            return self._run()
        if self._graph is None:
            self._capture(pool)
        assert self._graph is not None and self._out is not None
        self._graph.replay()
        return self._out

    def _capture(self, pool: Any) -> None:
        lengths = self._lengths.clone()
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(WARM_UPS):
                self._run()
                self._lengths.copy_(lengths)  # what a pass writes behind them, the next one writes again
        torch.cuda.current_stream().wait_stream(side)
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._graph, pool=pool):
            self._out = self._run()

    def _run(self) -> tuple[Tensor, Tensor]:
        """The step itself: no value of a tensor is looked at."""
        self._cache.aim(self._lengths, len(self._depth), self._columns)
        states = run_slots(
            self._backbone, self._tokens, self._cache, self._lengths, self._depth, self._among, self._taps
        )
        chosen = self._backbone.lm_head(states[..., -self._backbone.hidden_size :]).float().argmax(-1)  # [B, N]
        right = (chosen[:, self._parents] == self._tokens) | self._root
        stands = (right[:, None] | ~self._among).all(-1)  # every ancestor was right too
        # No torch.where with a number: it would be copied from the host, which no capture allows.
        best = self._worth.expand_as(stands).masked_fill(~stands, -1).argmax(-1, keepdim=True)  # [B, 1]
        path = self._paths[best[:, 0]]  # [B, P]
        self._compact(path)
        count = self._depth[best] + 1
        self._lengths += count[:, 0]
        found = torch.cat([count, chosen.gather(1, best), self._tokens.gather(1, path)], dim=1)
        return found, states.gather(1, path[..., None].expand(-1, -1, states.shape[-1]))

    def _compact(self, path: Tensor) -> None:
        """Move each slot's rows length + path[i] to length + i; gathering first makes overlaps safe."""
        buffer = self._cache.buffer
        assert buffer is not None
        shape = (*buffer.shape[:4], path.shape[1], buffer.shape[5])
        first = self._lengths[:, None]
        places = first + torch.arange(path.shape[1], device=path.device)
        source, target = ((one[:, None, :, None]).expand(shape) for one in (first + path, places))
        buffer.scatter_(4, target, buffer.gather(4, source))


@contextmanager
def borrowed(backbone: Backbone, capacity: int, taps: Sequence[int]) -> Iterator[StaticDecoder]:
    """A decoder with an empty cache of this capacity at least; it goes back, with its graphs, for the next answer."""
    idle = backbone.idle_decoders
    fit = next((one for one in idle if one.taps == tuple(taps) and one.cache.capacity >= capacity), None)
    if fit is not None:
        idle.remove(fit)
        fit.truncate(0)
    else:
        idle.clear()  # their caches would take the memory of the larger one
        # A power of two also serves somewhat longer answers, but none is longer than the context.
        spare = min(1 << (capacity - 1).bit_length(), backbone.max_positions)
        fit = StaticDecoder(backbone, max(capacity, spare), taps=taps)
    try:
        yield fit
    finally:
        idle.append(fit)
