"""Amphista: two adaptation layers with caches, and heads that see each other and draft in parallel."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn

from medusa_cli.device import upload
from medusa_cli.drafters.base import Batch, NewTokens
from medusa_cli.drafters.expansion import Guess, draft_by_level
from medusa_cli.drafters.heads import HeadDrafter, HeadsConfig, check_ranges
from medusa_cli.drafters.layers import (
    DecoderLayer,
    HeadAttention,
    Padding,
    identity_,
    last_of,
    residual_blocks,
)
from medusa_cli.drafters.slots import NewTensors, fill_by_level
from medusa_cli.model import Backbone
from medusa_cli.tree import Draft, DynamicTree, Tree
from medusa_cli.tree.tensors import TreeTensors


@dataclass(frozen=True)
class AmphistaConfig(HeadsConfig):
    """Adds Amphista's settings.

    attention_layers: the number of self-attention layers over the heads. 2 is the paper's alpha
    variant (appendix A.2.3). context: the part of a text that the adaptation layers see, the
    "conversation" (section 3.1: positions 1 .. t - 1) or the "answer".
    """

    attention_layers: int = 1
    context: Literal["conversation", "answer"] = "answer"

    def __post_init__(self) -> None:
        super().__post_init__()
        check_ranges(self, attention_layers=(0, 4))


class AdaptationLayer(nn.Module):
    """Applies fc and a causal decoder layer to states h and embeddings e (section 3.1); a fresh layer returns h."""

    def __init__(self, hidden_size: int) -> None:
        super().__init__()
        self.fc = nn.Linear(2 * hidden_size, hidden_size)
        self.layer = DecoderLayer(hidden_size)
        identity_(self.fc.weight)
        nn.init.zeros_(self.fc.bias)

    def join(self, hidden: Tensor, embedded: Tensor) -> Tensor:
        """Returns the decoder layer's input [.., H], computed from states and the next tokens' embeddings."""
        joined: Tensor = self.fc(torch.cat([hidden, embedded], dim=-1))
        return joined


class Amphista(HeadDrafter):
    """Holds Amphista's K heads (section 3).

    The first half of the heads reads the output of the first adaptation layer, and the second half
    reads the output of the second layer.
    """

    name = "amphista"
    drafts_in_graphs = True
    learning_rate = 1e-3
    config_class = AmphistaConfig
    settings = ("num_layers", "matrices", "attention_layers", "context", "conditional")
    reads_next = True
    config: AmphistaConfig

    def __init__(self, config: AmphistaConfig) -> None:
        super().__init__(config)
        size = config.hidden_size
        heads = config.num_heads
        self.stages = nn.ModuleList(AdaptationLayer(size) for _ in range(2))
        self.blocks = nn.ModuleList(residual_blocks(size, config.num_layers) for _ in range(heads))
        self.position = nn.Parameter(torch.zeros(heads, size))
        self.attention = nn.ModuleList(HeadAttention(size) for _ in range(config.attention_layers))
        self.sees_prompt = config.context == "conversation"
        self.truncate(0)

    @torch.inference_mode()
    def draft(
        self,
        backbone: Backbone,
        sequences: Sequence[Amphista],
        new: Sequence[NewTokens],
        tree: Tree | DynamicTree,
    ) -> list[Draft]:
        """Adapts the new states of each sequence, lets the heads see each other, and scores all levels at once."""
        adapted = self.read(backbone, sequences, new)
        return draft_by_level(tree, new, self._guesses(backbone, adapted, tree.max_depth))

    @torch.inference_mode()
    def fill(self, backbone: Backbone, new: NewTensors, trees: TreeTensors) -> None:
        x = new.hidden.to(self.dtype)
        rows = new.rows()
        embedded = self.embed(backbone, new.following)
        adapted = []
        for stage, cached in zip(self.stages, new.caches, strict=True):
            assert isinstance(stage, AdaptationLayer)
            x = stage.layer.extend_slots(stage.join(x, embedded), rows, cached)
            adapted.append(new.last(x))
        fill_by_level(trees, self.num_heads, self._guesses(backbone, adapted, self.num_heads))

    def _guesses(self, backbone: Backbone, adapted: Sequence[Tensor], depth: int) -> Guess:
        def compute(*adapted: Tensor) -> list[Tensor]:
            # [B, K, H]
            states = self._together(adapted, self.packed("blocks"), self.packed("attention"))
            return [self.score(backbone, head, states[:, head]) for head in range(depth)]

        return self.at_once(depth, compute, *adapted)

    @torch.inference_mode()
    def read(
        self, backbone: Backbone, sequences: Sequence[Amphista], new: Sequence[NewTokens]
    ) -> list[Tensor]:
        """Adds the new states to the caches of each sequence.

        Returns the states [B, H] of each stage at the sequences' last new positions.
        """
        x = torch.cat([tokens.hidden for tokens in new]).to(self.dtype)
        positions = [range(n.start, n.end) for n in new]
        embedded = self.embed(backbone, torch.cat([tokens.following for tokens in new]))
        last = upload(last_of([len(own) for own in positions]), x.device)
        adapted = []
        for number, stage in enumerate(self.packed("stages")):
            caches = [own.caches[number] for own in sequences]
            x = stage.layer.extend(stage.join(x, embedded), positions, caches)
            adapted.append(x[last])
        return adapted

    def _together(
        self, adapted: Sequence[Tensor], blocks: nn.ModuleList, attention: nn.ModuleList
    ) -> Tensor:
        """Returns the states [P, K, H] of the heads, given the states of the two stages [P, H]."""
        half = self.num_heads // 2
        apart = [block(adapted[head >= half]) for head, block in enumerate(blocks)]
        x = torch.stack(apart, dim=1) + self.position
        for layer in attention:
            x = layer(x)
        return x

    def head_states(self, backbone: Backbone, batch: Batch) -> Iterator[Tensor]:
        sequences = Padding(batch.attention_groups, batch.hidden.device)
        learned = batch.learned
        x = batch.hidden
        embedded = self.embed(backbone, batch.next).to(batch.hidden.dtype)
        adapted = []
        for stage in self.stages:
            assert isinstance(stage, AdaptationLayer)
            x = stage.layer(stage.join(x, embedded), sequences)
            adapted.append(x[learned])
        states = self._together(adapted, self.blocks, self.attention)  # [n, K, H], trained rows
        yield from states.to(batch.hidden.dtype).unbind(1)
