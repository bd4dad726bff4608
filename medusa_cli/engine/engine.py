"""The contract of an engine: plans in, states and logits out, over a cache."""

from abc import ABC, abstractmethod
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import ClassVar

import torch
from torch import Tensor, nn

from medusa_cli.engine.cache import FIRST_ROWS, Cache
from medusa_cli.engine.plan import Layout, Output, Plan, lay_out
from medusa_cli.model import Backbone
from medusa_cli.model.attention import Masks
from medusa_cli.model.load import DTYPES

# Rows of one prefill pass: long enough for full matmul speed, short enough that its mask stays
# small.
PREFILL_ROWS = 512
# On a GPU, whose kernels take no mask for the first piece, and which fewer rows would leave idle.
GPU_PREFILL_ROWS = 2048
# Rows of fp32 logits whose buffer is reused from step to step.
SCRATCH_ROWS = 256


class Engine(ABC):
    """Runs a backbone's passes.

    dtype: the type of its states. head: the lm_head, in that type. weight_bytes: bytes of weights
    that a step over few rows reads. On a CPU the next pass may overwrite the logits of the last
    one.
    """

    name: ClassVar[str]
    dtype: torch.dtype
    head: nn.Module
    weight_bytes: int
    # How the engine has quantized the weights: int8, int4 or None.
    quantize: str | None = None
    # True if a row of a pass has the same bits in a pass of its own, in a tree, in a batch and in a
    # prompt: then greedy output over drafts equals plain decoding's in every number type.
    row_invariant = False

    def __init__(self, backbone: Backbone) -> None:
        self.backbone = backbone

    @property
    def title(self) -> str:
        """Returns the engine in words."""
        return f"{self.name} engine"

    def new_cache(self, slots: int = 1, capacity: int = FIRST_ROWS) -> Cache:
        """Returns empty slots of `capacity` rows, which grow as needed."""
        return Cache(self.backbone.num_layers, slots, capacity)

    @property
    def number_type(self) -> str:
        """Returns the name of the weights' number type, as `--dtype` has it."""
        return next(name for name, dtype in DTYPES.items() if dtype == self.dtype)

    def without_torch_threads(self) -> AbstractContextManager[None]:
        """Returns a context in which torch leaves the processors to the engine's own threads, if it has some."""
        return nullcontext()

    @property
    def prefill_rows(self) -> int:
        """Returns the rows of one prefill pass."""
        return PREFILL_ROWS if self.backbone.device.type == "cpu" else GPU_PREFILL_ROWS

    @property
    def row_bytes(self) -> int:
        """Returns the bytes of one token's keys and values in the cache."""
        config = self.backbone.config
        heads: int = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
        dim: int = (
            getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        )
        return 2 * self.backbone.num_layers * heads * dim * self.dtype.itemsize

    @torch.no_grad()
    def final_gain(self) -> Tensor | None:
        """Returns the gain [H] of the network's last norm; None if it has none."""
        norm = getattr(self.backbone.text_model, "norm", None)
        if norm is None:
            return None
        ones = torch.ones(self.backbone.hidden_size, device=self.backbone.device, dtype=self.dtype)
        gain: Tensor = norm(ones)
        return gain

    def tree_rows(self, length: int) -> int:
        """Returns how many nodes a tree behind `length` tokens may have."""
        return self.backbone.max_positions

    @torch.inference_mode()
    def forward(self, plan: Plan, cache: Cache) -> Output:
        """Runs a plan. All rows of a chain stay in the cache; `cache.keep` names the rows of a tree that do."""
        slots, rows = plan.tokens.shape
        if not plan.is_chain:
            return self.run_pass(plan, cache)
        if rows > self.prefill_rows:
            return self._prefill_in_pieces(plan, cache)

        output = self.run_pass(plan, cache)
        for slot in range(plan.first, plan.first + slots):
            cache.lengths[slot] += rows
        return output

    def _prefill_in_pieces(self, plan: Plan, cache: Cache) -> Output:
        """Runs a long chain piece by piece; the last one has the extra rows."""
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
    def run_pass(self, plan: Plan, cache: Cache) -> Output:
        """Runs a plan in one pass, and writes the keys and values of its rows behind the slots' lengths."""

    def lm_head(self, states: Tensor) -> Tensor:
        """Returns the lm_head's scores [.., V] of final states [.., H] in the engine's type."""
        scores: Tensor = self.head(states)
        return scores


class LayoutEngine(Engine):
    """Runs layers in torch on a plan that is laid out in positions, masks and columns.

    masks: additive masks in the type of the states.
    """

    masks: Masks
    # True if steps are captured as CUDA graphs; None: not tried yet.
    captures: bool | None = False
    # True if attention in CUDA graphs reads no column behind the slots' lengths, which are data.
    by_length = False

    def __init__(self, backbone: Backbone) -> None:
        super().__init__(backbone)
        self._scratch: Tensor | None = None

    def run_pass(self, plan: Plan, cache: Cache) -> Output:
        rows = plan.tokens.shape[1]
        tokens = plan.tokens.to(self.backbone.device)
        layout = lay_out(plan, cache, self.masks, self.backbone.max_positions, tokens.device)
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
        """Runs tokens [B, n] laid out in R rows each; writes keys and values behind the slots' lengths.

        Returns tapped states [B, R, H * taps] and final ones [B, R, H].
        """

    def logits(self, states: Tensor) -> Tensor:
        """Returns the model's fp32 logits [.., V] of final states [.., H], its factors and caps included.

        A step's logits lie in a buffer that the next step overwrites: new memory costs more than
        the cast, as the system zeroes each page.
        """
        scores = self.backbone.finish_logits(self.lm_head(states))
        rows = scores.numel() // scores.shape[-1]
        if scores.dtype == torch.float32 or rows > SCRATCH_ROWS or scores.device.type != "cpu":
            return scores.float()
        if self._scratch is None or len(self._scratch) < rows:
            self._scratch = torch.empty(max(64, rows), scores.shape[-1])
        return self._scratch[:rows].view(scores.shape).copy_(scores)
