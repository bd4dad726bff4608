"""The interface of engines, which run plans over a cache and return states and logits."""

import sys
from abc import ABC, abstractmethod
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from medusa_cli.engine.cache import FIRST_ROWS, Cache, Slots
from medusa_cli.engine.plan import Layout, Output, Plan, lay_out
from medusa_cli.model import Backbone
from medusa_cli.model.backbone import key_sizes
from medusa_cli.model.load import name_of_dtype
from medusa_cli.model.masks import Masks

# Rows per prefill pass: enough for full matmul speed, but few enough for a small mask.
PREFILL_ROWS = 512
# Rows per prefill pass on a GPU: fewer would not keep the GPU busy. Most prompts fit in one pass, which needs no mask.
GPU_PREFILL_ROWS = 2048
# The fp32 logits of a pass with up to this many rows lie in a buffer that every step reuses.
SCRATCH_ROWS = 256


class Engine(ABC):
    """Runs a backbone's forward passes.

    dtype: the number type of the states. head: the lm_head in that type. weight_bytes: the bytes of weights that a step
    over a few rows reads. On a CPU, the next pass may overwrite the logits of the previous pass.
    """

    name: ClassVar[str]
    dtype: torch.dtype
    head: nn.Module
    weight_bytes: int
    # The type to which the engine has quantized the weights: int8, int4 or None.
    quantize: str | None = None
    # True if a row has the same bits by itself, in a tree and in a batch. Greedy output with drafts
    # then equals that of plain decoding in every number type.
    row_invariant = False
    # True if a row also has the same bits in a prompt that runs in pieces of any size.
    prompt_invariant = False
    # The maximum depth of a tree.
    tree_depth = sys.maxsize
    # True if several prompts, padded at their ends, take less time in one pass than one by one.
    runs_packs = False

    def __init__(self, backbone: Backbone) -> None:
        self.backbone = backbone

    @property
    def title(self) -> str:
        """Returns a short description of the engine."""
        return f"{self.name} engine"

    @abstractmethod
    def new_cache(self, slots: int = 1, capacity: int = FIRST_ROWS) -> Slots:
        """Returns a cache of empty slots, each for `capacity` rows; the cache grows as needed."""

    @property
    def packed_path(self) -> Path | None:
        """Returns the file of the model's packed weights, if there is one."""
        return None

    @property
    def number_type(self) -> str:
        """Returns the weights' number type by its name in `--dtype`."""
        return name_of_dtype(self.dtype)

    def without_torch_threads(self) -> AbstractContextManager[None]:
        """Returns a context in which torch leaves the CPU cores to the engine's own threads, if it has any."""
        return nullcontext()

    @property
    def prefill_rows(self) -> int:
        """Returns the largest number of rows per prefill pass."""
        return PREFILL_ROWS if self.backbone.device.type == "cpu" else GPU_PREFILL_ROWS

    @property
    def row_bytes(self) -> int:
        """Returns the KV-cache size per token in bytes."""
        heads, dim = key_sizes(self.backbone.config)
        return 2 * self.backbone.num_layers * heads * dim * self.dtype.itemsize

    def slot_bytes(self, rows: int) -> int:
        """Returns the bytes of a slot without its tokens' rows: running states, snapshots, a tree's states.

        rows: the nodes of the largest tree.
        """
        return 0

    def states(self, tokens: Tensor, taps: Sequence[int]) -> Tensor:
        """Returns the tapped states [B, n, H * taps] of right-padded texts [B, n], which run as one batch."""
        cache = self.new_cache(*tokens.shape)
        plan = Plan(tokens, taps=tuple(taps), logits="none")
        return self.forward(plan, cache).hidden

    @torch.no_grad()
    def final_gain(self) -> Tensor | None:
        """Returns the gain [H] of the network's final norm; None if the network has no final norm."""
        norm = getattr(self.backbone.text_model, "norm", None)
        if norm is None:
            return None
        ones = torch.ones(self.backbone.hidden_size, device=self.backbone.device, dtype=self.dtype)
        gain: Tensor = norm(ones)
        return gain

    def tree_rows(self, length: int) -> int:
        """Returns the largest number of nodes for a tree after `length` tokens."""
        return self.backbone.max_positions

    @torch.inference_mode()
    def forward(self, plan: Plan, cache: Slots) -> Output:
        """Runs a plan.

        All rows of a chain stay in the cache. For a tree, `cache.keep` selects the rows that stay.
        Raises ValueError for slots or layers that do not exist.
        """
        self.backbone.check_process()
        slots, rows = plan.tokens.shape
        if plan.first + slots > cache.slots:
            raise ValueError(
                f"a plan for slot {plan.first + slots - 1} needs a cache of more slots"
            )
        if not all(-1 <= tap < self.backbone.num_layers for tap in plan.taps):
            raise ValueError(f"a plan taps layers {plan.taps} of {self.backbone.num_layers}")
        if not plan.is_chain:
            return self.run_pass(plan, cache)
        if rows > self.prefill_rows:
            return self._prefill_in_pieces(plan, cache)

        output = self.run_pass(plan, cache)
        for slot in range(plan.first, plan.first + slots):
            cache.lengths[slot] += rows
        return output

    def _prefill_in_pieces(self, plan: Plan, cache: Slots) -> Output:
        """Runs a long chain piece by piece; only the last piece has the extra rows."""
        slots, rows = plan.tokens.shape
        cache.reserve(max(cache.lengths[plan.first : plan.first + slots]) + rows)

        *pieces, last = plan.tokens.split(self.prefill_rows, dim=1)
        before = "none" if plan.logits == "last" else plan.logits
        plans = [replace(plan, tokens=piece, logits=before, extra_rows=None) for piece in pieces]
        plans.append(replace(plan, tokens=last))
        outputs = [self.forward(part, cache) for part in plans]

        scores = [out.logits for out in outputs if out.logits is not None]
        logits = torch.cat(scores, dim=1) if scores else None
        hidden = torch.cat([out.hidden for out in outputs], dim=1)
        return Output(logits, hidden, outputs[-1].extra)

    @abstractmethod
    def run_pass(self, plan: Plan, cache: Slots) -> Output:
        """Runs a plan in one pass and writes its rows' keys and values after the slots' lengths."""

    def lm_head(self, states: Tensor) -> Tensor:
        """Returns the lm_head's scores [.., V] for final states [.., H] in the engine's number type."""
        scores: Tensor = self.head(states)
        return scores


class LayoutEngine(Engine):
    """Runs layers in torch on a plan that is laid out as positions, masks and columns.

    masks: additive masks in the type of the states.
    """

    masks: Masks
    # True if steps are captured as CUDA graphs; None if that has not been tried yet.
    captures: bool | None = False
    # The exact path of steps (an ExactPath), if the engine has one; it makes the engine row-invariant.
    exact: Any = None
    # The modules that keep a running state, which the padding of a prompt would change.
    stateful: Sequence[Any] = ()
    # True if attention in CUDA graphs gets the slots' lengths as a tensor and reads no column beyond them.
    by_length = False

    def __init__(self, backbone: Backbone) -> None:
        super().__init__(backbone)
        self._scratch: Tensor | None = None

    @property
    def runs_packs(self) -> bool:  # type: ignore[override]
        return self.backbone.device.type != "cpu" and not self.stateful

    def new_cache(self, slots: int = 1, capacity: int = FIRST_ROWS) -> Cache:
        return Cache(self.backbone.num_layers, slots, capacity)

    def run_pass(self, plan: Plan, cache: Slots) -> Output:
        assert isinstance(cache, Cache)
        rows = plan.tokens.shape[1]
        tokens = plan.tokens.to(self.backbone.device)
        context = self.backbone.max_positions
        exact = self.exact is not None
        layout = lay_out(plan, cache, self.masks, context, tokens.device, exact)
        states, final = self.run(tokens, layout, cache, plan.taps)

        extra = None
        if layout.extra_rows is not None:
            states, extra = layout.extra_rows.split(states)
            final = final[:, :rows]
        if plan.logits == "none":
            return Output(None, states, extra)
        logits = self.logits(final if plan.logits == "all" else final[:, -1:])
        return Output(logits, states, extra)

    @abstractmethod
    def run(
        self, tokens: Tensor, layout: Layout, cache: Cache, taps: tuple[int, ...]
    ) -> tuple[Tensor, Tensor]:
        """Runs tokens [B, n] laid out as R rows per slot; writes keys and values after the slots' lengths.

        Returns the tapped states [B, R, H * taps] and the final states [B, R, H].
        """

    def logits(self, states: Tensor) -> Tensor:
        """Returns fp32 logits [.., V] for final states [.., H], with the model's factors and caps applied.

        On a CPU, the cast logits of up to SCRATCH_ROWS rows lie in a buffer that the next step
        overwrites. New memory would cost more than the cast, as the system zeroes each page.
        """
        scores = self.backbone.finish_logits(self.lm_head(states))
        rows = scores.numel() // scores.shape[-1]
        if scores.dtype == torch.float32 or rows > SCRATCH_ROWS or scores.device.type != "cpu":
            return scores.float()
        if self._scratch is None or len(self._scratch) < rows:
            self._scratch = torch.empty(max(64, rows), scores.shape[-1])
        return self._scratch[:rows].view(scores.shape).copy_(scores)
