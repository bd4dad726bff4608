"""EAGLE-3: one decoder layer over fused states of three layers (arXiv:2503.01840).

The module also holds the base class that EAGLE-3 and MTP share.
"""

from __future__ import annotations

import copy
from abc import abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from medusa_cli.device import upload
from medusa_cli.drafters.base import Batch, NewTokens, check_layers, with_last_layer
from medusa_cli.drafters.expansion import Frontier, draft_by_level
from medusa_cli.drafters.heads import HeadDrafter, HeadsConfig
from medusa_cli.drafters.layer_rows import LayerRows
from medusa_cli.drafters.layers import DecoderLayer, Padding, SlotRows, identity_, normed
from medusa_cli.drafters.slots import NewTensors, fill_by_level
from medusa_cli.engine.linear import NativeDecoderLayer, NativeLevels, NativeLinear
from medusa_cli.model import Backbone
from medusa_cli.tree import Draft, DynamicTree, Tree
from medusa_cli.tree.tensors import TreeTensors

if TYPE_CHECKING:
    from typing import Self

# The number of trained positions that attend together to their conversation.
BLOCK = 64


@dataclass(frozen=True)
class EagleConfig(HeadsConfig):
    """Adds EAGLE-3's settings. num_heads: the number of steps in the training-time test.

    The other fields are named as in the configs of serving engines. taps: for each state that is
    read, the number of backbone layers below it. Training also reads the state of the last layer.
    norm_before_residual: True if attention is added to the layer's normalized input. norm_before_fc:
    True if the states are normalized before they are fused.
    """

    taps: tuple[int, ...] = ()
    num_attention_heads: int = 1
    head_dim: int = 64
    intermediate_size: int = 64
    rms_norm_eps: float = 1e-6
    rope_theta: float = 10_000.0
    norm_before_residual: bool = False
    norm_before_fc: bool = False


def widest(size: int | Sequence[int]) -> int:
    """Returns a width, or the largest width if each layer has its own."""
    return size if isinstance(size, int) else max(size)


class LayerDrafter(HeadDrafter):
    """Runs one decoder layer repeatedly: head k scores the next token by the layer's state after k draft tokens.

    A row sees itself and the rows of the conversation's earlier tokens. In a draft, it also sees the
    rows of its node's ancestors.
    """

    reads_next = sees_prompt = True

    @abstractmethod
    def enter(self, backbone: Backbone, hidden: Tensor) -> Tensor:
        """Returns the states [n, H] that enter the layer, computed from the backbone's states [n, H * taps]."""

    @abstractmethod
    def extend(
        self,
        states: Tensor,
        positions: Sequence[Sequence[int]],
        caches: Sequence[LayerRows],
        embedded: Tensor,
        *,
        masks: Sequence[Tensor] | None = None,
        last: bool = False,
    ) -> Tensor:
        """Adds rows to the caches of B sequences; see `DecoderLayer.extend`."""

    @property
    def final_norm(self) -> nn.RMSNorm | None:
        """Returns the norm between the layer's states and the matrix that scores tokens, if there is one."""
        return None

    @property
    def native_layer(self) -> NativeDecoderLayer | None:
        """Returns the layer if the native library runs it, else None."""
        return None

    @torch.inference_mode()
    def draft(
        self,
        backbone: Backbone,
        sequences: Sequence[Self],
        new: Sequence[NewTokens],
        tree: Tree | DynamicTree,
    ) -> list[Draft]:
        """Drafts level by level; the layer and the matrix process the rows of all sequences at once."""
        states = self.read(backbone, sequences, new)  # [B, H], then [N, H]
        caches = [own.caches[0] for own in sequences]
        native = None
        layer = self.native_layer
        head = self._scorer(backbone, 0)
        if layer is not None and isinstance(head, NativeLinear):
            native = NativeLevels(
                layer,
                head,
                self.final_norm,
                self.draft_ids,
                backbone.embedding,
                states,
                caches,
                starts=[tokens.end for tokens in new],
            )
        # For each node: the rows of the tree that are its ancestors.
        ancestors = [torch.zeros(1, 0, dtype=torch.bool, device=states.device) for _ in new]

        def guess(
            head: int, width: int, temperature: float | None, level: Frontier
        ) -> tuple[Tensor, Tensor]:
            nonlocal states, ancestors
            if head and native is not None:
                return native.extend(head, level.counts, *level.lists, width, temperature)
            if head:
                ancestors = _extend_ancestor_masks(ancestors, level)
                positions = [tokens.end + head - 1 for tokens in new]
                places = [
                    [position] * count
                    for position, count in zip(positions, level.counts, strict=True)
                ]
                embedded = self.embed(backbone, level.tokens)
                states = self.extend(
                    states[level.parent_rows], places, caches, embedded, masks=ancestors
                )
            return self.guess(backbone, 0, states, width, temperature, self.final_norm)

        try:
            return draft_by_level(tree, new, guess)
        finally:
            for cache, tokens in zip(caches, new, strict=True):
                cache.truncate(tokens.end)

    @torch.inference_mode()
    def read(
        self, backbone: Backbone, sequences: Sequence[Self], new: Sequence[NewTokens]
    ) -> Tensor:
        """Adds the new tokens to the cache of each sequence.

        Returns the states [B, H] of the last tokens.
        """
        entering = self.enter(backbone, torch.cat([tokens.hidden for tokens in new]))
        embedded = self.embed(backbone, torch.cat([tokens.following for tokens in new]))
        places = [range(tokens.start, tokens.end) for tokens in new]
        caches = [own.caches[0] for own in sequences]
        return self.extend(entering, places, caches, embedded, last=True)

    def embed(self, backbone: Backbone, tokens: Tensor) -> Tensor:
        """Returns the backbone's embeddings as they are, because the layer's norm converts and scales them."""
        embedded: Tensor = backbone.embedding(tokens)
        return embedded


class Eagle(LayerDrafter):
    """Drafts with EAGLE-3's layer, which reads the fused states of some backbone layers."""

    name = "eagle"
    drafts_in_graphs = True
    weights_file = "model.safetensors"
    learning_rate = 1e-3
    regress = 0.0
    config_class = EagleConfig
    settings = ("matrices", "taps", "intermediate_size", "norm_before_residual")
    vocabularies = ("draft", "own")
    config: EagleConfig
    levels: Tensor  # [H * taps], factors for the states to fuse; all ones in a file
    input_norm: nn.RMSNorm | None

    def __init__(self, config: EagleConfig) -> None:
        super().__init__(config)
        self.taps = with_last_layer(config.taps)
        size = config.hidden_size
        self.register_buffer("levels", torch.ones(len(config.taps) * size), persistent=False)
        self.input_norm = None
        if config.norm_before_fc:
            self.input_norm = nn.RMSNorm(len(config.taps) * size, eps=config.rms_norm_eps)
        self.fc = nn.Linear(len(config.taps) * size, size, bias=False)
        self.midlayer = DecoderLayer(
            size,
            config.num_attention_heads,
            config.head_dim,
            config.intermediate_size,
            embeddings=True,
            eps=config.rms_norm_eps,
            rope_theta=config.rope_theta,
            norm_before_residual=config.norm_before_residual,
        )
        self.norm = nn.RMSNorm(size, eps=config.rms_norm_eps)
        nn.init.zeros_(self.fc.weight)
        identity_(self.fc.weight[:, -size:])  # a fresh drafter passes the highest layer's state on
        self.truncate(0)

    @classmethod
    def create(cls, backbone: Backbone, *settings: Any, **named: Any) -> Eagle:
        # All steps run the same layer, so a matrix for "each" head is a single matrix.
        named["matrices"] = "none" if named.get("matrices") == "none" else "one"
        drafter = super().create(backbone, *settings, **named)
        # The matrix is the lm_head or starts as its copy, so the matrix's input is normalized like
        # the lm_head's input.
        gain = backbone.engine.final_gain()
        if gain is not None:
            drafter.norm.weight.data.copy_(gain)
        return drafter

    @classmethod
    def fields_of_model(cls, backbone: Backbone, num_heads: int) -> dict[str, Any]:
        config = backbone.config
        size = backbone.hidden_size
        # Pure Mamba has no attention heads.
        heads = getattr(config, "num_attention_heads", None) or max(1, size // 64)
        return {
            "num_layers": 1,
            "taps": default_taps(backbone.num_layers),
            "num_attention_heads": heads,
            "head_dim": getattr(config, "head_dim", None) or size // heads,
            "intermediate_size": widest(getattr(config, "intermediate_size", None) or 4 * size),
        }

    @classmethod
    def check_fit(cls, config: Any, backbone: Backbone) -> None:
        check_layers(config.taps, backbone.num_layers, "drafter.taps")

    @property
    def final_norm(self) -> nn.RMSNorm:
        return self.norm

    @property
    def native_layer(self) -> NativeDecoderLayer | None:
        layer = self.packed("midlayer")
        return layer if isinstance(layer, NativeDecoderLayer) else None

    def enter(self, backbone: Backbone, hidden: Tensor) -> Tensor:
        entering: Tensor = self.packed("fc")(self._lower(hidden))
        return entering

    def extend(
        self,
        states: Tensor,
        positions: Sequence[Sequence[int]],
        caches: Sequence[LayerRows],
        embedded: Tensor,
        **rows: Any,
    ) -> Tensor:
        extended: Tensor = self.packed("midlayer").extend(
            states, positions, caches, embedded, **rows
        )
        return extended

    @torch.inference_mode()
    def fill(self, backbone: Backbone, new: NewTensors, trees: TreeTensors) -> None:
        """Drafts level by level; each level computes all nodes.

        After level k, the states of nodes down to depth k are right, because their parents' states were
        right after level k - 1.
        """
        layer = self.midlayer
        (cached,) = new.caches
        size = len(new.hidden)
        fused = self.enter(backbone, new.hidden)
        embedded = self.embed(backbone, new.following)
        last = new.last(layer.extend_slots(fused, new.rows(), cached, embedded))  # [B, H]
        states = last  # then [B * N, H]
        rows: SlotRows | None = None

        def guess(
            head: int, width: int, temperature: float | None, level: Frontier
        ) -> tuple[Tensor, Tensor]:
            nonlocal states, rows
            if head:
                if rows is None or trees.grows:
                    rows = new.nodes(trees)
                above = states[level.parent_rows].unflatten(0, (size, -1))
                embedded = self.embed(backbone, level.tokens).view_as(above)
                below = layer.extend_slots(above, rows, cached, embedded)
                below[:, 0] = last
                states = below.flatten(0, 1)
            return self.guess(backbone, 0, states, width, temperature, self.final_norm)

        fill_by_level(trees, self.num_heads, guess)

    def _lower(self, hidden: Tensor) -> Tensor:
        """Returns the states to fuse, times `levels`; the last layer's states are left out."""
        levels = self.levels
        return self._fused(hidden).to(levels.dtype) * levels

    def _fused(self, hidden: Tensor) -> Tensor:
        """Returns the states to fuse, normalized if the config says so."""
        lower = hidden[..., : -self.config.hidden_size]
        return lower if self.input_norm is None else normed(self.input_norm, lower)

    @torch.no_grad()
    def level(self, hidden: Tensor) -> None:
        """Makes `levels` divide each tap by its root mean square over states [n, H * taps] from answers.

        Raw states of the taps differ tenfold in size, and training would need thousands of steps to
        compensate for this difference.
        """
        size = self.config.hidden_size
        squares = self._fused(hidden).float().square().unflatten(-1, (-1, size)).mean((0, 2))
        self.levels.copy_(squares.clamp(min=1e-12).rsqrt().repeat_interleave(size))

    @torch.no_grad()
    def start_from(self, trained: HeadDrafter) -> None:
        super().start_from(trained)
        self.fc.weight.div_(self.levels)  # files hold the weight for raw states

    def head_states(self, backbone: Backbone, batch: Batch) -> Iterator[Tensor]:
        fused = self.fc(self._lower(batch.hidden))
        embedded = self.embed(backbone, batch.next)
        for states in training_time_test(self.midlayer, fused, embedded, batch, self.num_heads):
            yield normed(self.norm, states).to(batch.hidden.dtype)

    def for_files(self) -> Eagle:
        """Returns a drafter that reads raw states, with the levels folded into `fc`."""
        folded = copy.deepcopy(self)
        with torch.no_grad():
            folded.fc.weight.mul_(folded.levels)
            folded.levels.fill_(1.0)
        return folded

    def named_weights(self) -> dict[str, Tensor]:
        """Returns the weights under the names that serving engines expect."""
        renamed = {"matrices.0": "lm_head.weight"}
        return {renamed.get(name, name): weight for name, weight in self.named_parameters()}


def default_taps(depth: int) -> tuple[int, ...]:
    """Returns a low, a middle and a high layer of a model, as in EAGLE-3.

    For a shallow model, returns its last layers below the top layer, at most three.
    """
    taps = (2, depth // 2, depth - 3)
    return taps if taps == tuple(sorted(set(taps))) else tuple(range(1, depth))[-3:]


def _extend_ancestor_masks(ancestors: Sequence[Tensor], level: Frontier) -> list[Tensor]:
    """Returns the masks of a level's nodes by sequence: each node sees what its parent sees, and itself."""
    masks = []
    start = 0
    for own, parent_rows in zip(ancestors, level.parent_rows.split(level.counts), strict=True):
        itself = torch.eye(len(parent_rows), dtype=torch.bool, device=parent_rows.device)
        masks.append(torch.cat([own[parent_rows - start], itself], dim=1))
        start += len(own)
    return masks


def training_time_test(
    layer: DecoderLayer, states: Tensor, embedded: Tensor, batch: Batch, steps: int
) -> Iterator[Tensor]:
    """Yields the states [n, H] of steps 1, 2 and so on at the n trained positions (training-time test).

    states, embedded [P, H]: the fused states and the embeddings of the next tokens. Step 1 reads
    the true states at positions 0 .. p. Step k stands for level k of a draft made after position p:
    its row is at position p + k - 1, and reads the previous step's state and the true embedding at
    that position. The row sees the true rows 0 .. p and this draft's rows of steps 2 .. k, but no row
    of another position's draft.
    """
    device = states.device
    learned = batch.learned
    true = Padding(batch.attention_groups, device)
    # Every later step adds a column for each row, which only that row sees. Rows attend in blocks, so
    # that few columns are masked.
    numbers = true.numbers[batch.learned_on_host]
    rows = torch.arange(len(numbers)) - torch.searchsorted(numbers, numbers)
    own = Padding(numbers * len(true.numbers) + rows // BLOCK, device)
    position = true.position[learned]
    q, key, value = layer.attention_inputs(layer.reads(states, embedded), true.position)
    known = true.pad(torch.stack([key, value], dim=2).transpose(0, 1))  # [S, L, heads, 2, D]
    sequence = numbers.new_empty(own.shape[0]).index_copy(0, own.numbers, numbers)
    if not torch.equal(sequence, torch.arange(len(known))):
        known = known.index_select(0, upload(sequence, device))
    keys, values = known.permute(3, 0, 2, 1, 4)  # [S, heads, L, D] each, by block
    # Each of the W rows sees the columns up to its own position, and its own column of every later step.
    later = torch.arange(keys.shape[2], device=device) > own.pad(position)[..., None]
    wide = own.shape[1]
    others = ~torch.eye(wide, dtype=torch.bool, device=device).expand(len(later), -1, -1)
    hidden = torch.cat([later, *[others] * (steps - 1)], dim=-1)
    mask = torch.zeros_like(hidden, dtype=keys.dtype).masked_fill_(hidden, -torch.inf)[:, None]
    states = states[learned]
    for step, token in enumerate(batch.ahead(steps - 1)):
        if step:
            read = layer.reads(states, embedded.index_select(0, token))
            inputs = torch.stack(layer.attention_inputs(read, position + step), dim=2)
            q, key, value = own.pad(inputs.transpose(0, 1)).permute(3, 0, 2, 1, 4)
            keys = torch.cat([keys, key], dim=2)
            values = torch.cat([values, value], dim=2)
        else:
            q = own.pad(q[:, learned].transpose(0, 1)).transpose(1, 2)
        seen = F.scaled_dot_product_attention(q, keys, values, mask[..., : keys.shape[2]])
        states = layer.leave(states, own.unpad(seen.transpose(1, 2)).transpose(0, 1))
        yield states
