"""A step's pass, acceptance and compaction as one function of tensors alone, captured as CUDA graphs.

A graph is made for each tree, each number of columns that attention reads, and each kind of choosing tokens. Without
CUDA the same function runs as it is, which is how it is tested.
"""

import logging
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from medusa_cli.decoding.choosing import FIELDS, GREEDY, choose, demands, kind_of
from medusa_cli.decoding.sampling import Rule
from medusa_cli.decoding.types import Settled
from medusa_cli.drafters.base import Draft
from medusa_cli.engines import Cache, Engine, Pseudo
from medusa_cli.engines.layout import lay_out_at
from medusa_cli.tree.tree import Tree

# Attention reads a multiple of so many columns: few graphs, and little read for nothing.
COLUMNS = 512
# Passes before a capture, so that libraries have chosen their kernels and made their workspaces.
WARM_UPS = 2
log = logging.getLogger(__name__)


class Captured:
    """Steps over a cache by its first B slots; each reads one small tensor back from the device."""

    def __init__(self, engine: Engine, cache: Cache, taps: tuple[int, ...]) -> None:
        self._engine, self._cache, self._taps = engine, cache, taps
        self._lengths = torch.zeros(cache.slots, dtype=torch.long, device=engine.backbone.device)
        self._steps: dict[tuple[Tree, int, int, str], _FixedStep] = {}
        self._buffer = 0  # where the cache lay when the graphs were made
        # One step runs at a time, so all graphs may use the same memory.
        on_device = engine.backbone.device.type == "cuda"
        self._pool = torch.cuda.graph_pool_handle() if on_device else None

    def can(self, drafts: Sequence[Draft], rules: Sequence[Rule], pseudo: Pseudo | None) -> bool:
        """Whether a step is of a kind that runs so: greedy or exact, over one tree for all, no pseudo rows."""
        alike = all(draft.tree is drafts[0].tree for draft in drafts)
        fits = alike and pseudo is None and all(rule.greedy or rule.sampling.mode == "exact" for rule in rules)
        if not fits:
            log.debug("this step runs uncaptured")
        return fits

    def verify(self, tokens: Tensor, tree: Tree, rules: Sequence[Rule]) -> list[Settled]:
        """Verify tokens [B, N] over a tree and keep each sequence's accepted path."""
        cache, size, kind = self._cache, len(tokens), kind_of(rules)
        wide = -(-(max(cache.lengths[:size]) + tree.size) // COLUMNS) * COLUMNS
        cache.reserve(wide)
        assert cache.values is not None
        if cache.values.data_ptr() != self._buffer:
            self._steps, self._buffer = {}, cache.values.data_ptr()
        self._lengths.copy_(torch.tensor(cache.lengths))
        key = (tree, wide, size, kind)
        if key not in self._steps:
            self._steps[key] = _FixedStep(self._engine, cache, self._lengths[:size], tree, wide, self._taps, kind)
        found, hidden = self._steps[key](tokens, demands(rules, tree, kind), self._pool)
        settled = []
        for slot, (count, bonus, *path) in enumerate(found.tolist()):
            cache.lengths[slot] += count
            rules[slot].used(count)
            # The graph's next run overwrites its states.
            settled.append(Settled(path[:count], bonus, hidden[slot, :count].clone()))
        return settled


class _FixedStep:
    """One step for one tree, one number of columns and one number of sequences."""

    def __init__(
        self, engine: Engine, cache: Cache, lengths: Tensor, tree: Tree, wide: int, taps: tuple[int, ...], kind: str
    ) -> None:
        device, size = engine.backbone.device, tree.size
        self._kind = kind
        self._engine, self._cache, self._lengths, self._wide, self._taps = engine, cache, lengths, wide, taps
        self._tokens = torch.zeros(len(lengths), size, dtype=torch.long, device=device)
        # Of each sequence how it chooses, and the random numbers of its next tokens.
        numbers = FIELDS + tree.max_depth + 1 if kind != GREEDY else 0
        self._demands = torch.zeros(len(lengths), numbers, dtype=torch.double, device=device)
        self._depth, self._sees = tree.depth.to(device), tree.mask.to(device)
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
    def __call__(self, tokens: Tensor, demands: Tensor | None, pool: Any) -> tuple[Tensor, Tensor]:
        """Tokens [B, N] to (accepted rows, bonus, path) [B, 2 + P] and the path's states [B, P, H * taps].

        demands: what `choosing.demands` says of the sequences; pool: the graphs' memory, None runs without a graph.
        """
        self._tokens.copy_(tokens)
        if demands is not None:
            self._demands.copy_(demands)
        if pool is None:
            return self._run()
        if self._graph is None:
            self._capture(pool)
        assert self._graph is not None and self._out is not None
        self._graph.replay()
        return self._out

    def _capture(self, pool: Any) -> None:
        lengths, device = self._lengths.clone(), self._tokens.device
        with torch.cuda.device(device):
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
        engine, positions = self._engine, self._engine.backbone.max_positions
        layout = lay_out_at(self._lengths, self._sees[None], self._depth[None], engine.masks, positions, 0, self._wide)
        states, final = engine.run(self._tokens, layout, self._cache, self._taps)
        chosen = choose(engine.lm_head(final).float(), self._demands, self._depth, self._kind)  # [B, N]
        right = (chosen[:, self._parents] == self._tokens) | self._root
        stands = (right[:, None] | ~self._sees).all(-1)  # every ancestor was right too
        # No torch.where with a number: it would be copied from the host, which no capture allows.
        best = self._worth.expand_as(stands).masked_fill(~stands, -1).argmax(-1, keepdim=True)  # [B, 1]
        path = self._paths[best[:, 0]]  # [B, P]
        self._cache.compact(self._lengths, path)
        count = self._depth[best] + 1
        self._lengths += count[:, 0]
        found = torch.cat([count, chosen.gather(1, best), path], dim=1)
        return found, states.gather(1, path[..., None].expand(-1, -1, states.shape[-1]))
