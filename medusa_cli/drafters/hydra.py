"""Hydra heads, each of which also reads the draft tokens of earlier heads."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from medusa_cli.drafters.base import Batch, NewTokens
from medusa_cli.drafters.expansion import Frontier, Guess, draft_by_level
from medusa_cli.drafters.heads import HeadDrafter, HeadsConfig, check_ranges
from medusa_cli.drafters.layers import DecoderLayer, Padding, identity_, residual_blocks
from medusa_cli.drafters.slots import NewTensors, fill_by_level
from medusa_cli.model import Backbone
from medusa_cli.tree import Draft, DynamicTree, Tree
from medusa_cli.tree.tensors import TreeTensors


@dataclass(frozen=True)
class HydraConfig(HeadsConfig):
    """Adds Hydra's settings.

    prefix_layers: the number of causal decoder layers between the accepted states and the heads. 0 is Hydra, 1 is
    Hydra++. context: the part of a text that these layers see, the "conversation" or only the "answer". raw: True if
    embeddings are not normalized and the linear path of each head's input has a bias, as in the authors' code.
    """

    prefix_layers: int = 0
    raw: bool = False
    context: Literal["conversation", "answer"] = "answer"

    def __post_init__(self) -> None:
        super().__post_init__()
        check_ranges(self, prefix_layers=(0, 4))
        # Without prefix layers, `context` has no effect. With a fixed value, equal heads get equal configs.
        if not self.prefix_layers:
            object.__setattr__(self, "context", "answer")


class HydraHead(nn.Module):
    """Computes head k: R x + SiLU(W x) for x = [h; e1; ..; ek], then L - 1 residual blocks.

    A fresh head returns h.
    """

    def __init__(self, hidden_size: int, tokens: int, layers: int, raw: bool = False) -> None:
        super().__init__()
        self.skip = nn.Linear((tokens + 1) * hidden_size, hidden_size, bias=raw)
        self.mix = nn.Linear((tokens + 1) * hidden_size, hidden_size)
        self.stack = residual_blocks(hidden_size, layers - 1)
        identity_(self.skip.weight)
        nn.init.zeros_(self.mix.weight)
        nn.init.zeros_(self.mix.bias)

    def forward(self, x: Tensor) -> Tensor:
        return self.stack(self.skip(x) + F.silu(self.mix(x)))


class HydraHeads(HeadDrafter):
    """Holds K sequentially dependent heads (Hydra, section 3).

    With prefix layers before the heads, the drafter is Hydra++ (section 4).
    """

    name = "hydra"
    drafts_in_graphs = True
    regress = 100.0
    config_class = HydraConfig
    settings = ("num_layers", "matrices", "prefix_layers", "context")
    config: HydraConfig

    def __init__(self, config: HydraConfig) -> None:
        super().__init__(config)
        size = config.hidden_size
        layers = config.num_layers
        self.prefix = nn.ModuleList(DecoderLayer(size) for _ in range(config.prefix_layers))
        heads = range(1, config.num_heads + 1)
        self.blocks = nn.ModuleList(HydraHead(size, k, layers, config.raw) for k in heads)
        self.sees_prompt = config.context == "conversation"
        self.truncate(0)

    def embed(self, backbone: Backbone, tokens: Tensor) -> Tensor:
        if self.config.raw:
            return backbone.embedding(tokens).to(self.dtype)
        return super().embed(backbone, tokens)

    @torch.inference_mode()
    def draft(
        self,
        backbone: Backbone,
        sequences: Sequence[HydraHeads],
        new: Sequence[NewTokens],
        tree: Tree | DynamicTree,
    ) -> list[Draft]:
        """Drafts level by level: each head guesses the children of a node from the path to that node."""
        states = self.read(backbone, sequences, new)
        return draft_by_level(tree, new, self._guesses(backbone, states))

    @torch.inference_mode()
    def fill(self, backbone: Backbone, new: NewTensors, trees: TreeTensors) -> None:
        x = new.hidden.to(self.dtype)
        rows = new.rows()
        for layer, cached in zip(self.prefix, new.caches, strict=True):
            assert isinstance(layer, DecoderLayer)
            x = layer.extend_slots(x, rows, cached)
        fill_by_level(trees, self.num_heads, self._guesses(backbone, new.last(x)))

    def _guesses(self, backbone: Backbone, x: Tensor) -> Guess:
        """Returns the guess function that starts from states x [B, H].

        On later levels, x is [N, (1 + depth) H] and includes the embeddings of each node's path.
        """

        def guess(
            head: int, width: int, temperature: float | None, level: Frontier
        ) -> tuple[Tensor, Tensor]:
            nonlocal x
            x = torch.cat([x[level.parent_rows], self.embed(backbone, level.tokens)], dim=-1)
            return self.guess(backbone, head, self.packed("blocks")[head](x), width, temperature)

        return guess

    @torch.inference_mode()
    def read(
        self, backbone: Backbone, sequences: Sequence[HydraHeads], new: Sequence[NewTokens]
    ) -> Tensor:
        """Adds the new tokens to the caches; returns the states [B, H] from which the heads start."""
        if not self.prefix:
            return torch.cat([tokens.hidden[-1:] for tokens in new]).to(self.dtype)
        x = torch.cat([tokens.hidden for tokens in new]).to(self.dtype)
        positions = [range(n.start, n.end) for n in new]
        for number, layer in enumerate(self.packed("prefix")):
            caches = [own.caches[number] for own in sequences]
            last = number + 1 == len(self.prefix)
            x = layer.extend(x, positions, caches, last=last)
        return x

    def head_states(self, backbone: Backbone, batch: Batch) -> Iterator[Tensor]:
        context = batch.hidden
        embedded = self.embed(backbone, batch.next).to(batch.hidden.dtype)
        if self.prefix:
            sequences = Padding(batch.attention_groups, context.device)
            x = context
            for layer in self.prefix:
                x = layer(x, sequences)
            context = x.to(context.dtype)
        x = context[batch.learned]
        for block, positions in zip(self.blocks, batch.ahead(self.num_heads), strict=False):
            x = torch.cat([x, embedded[positions]], dim=-1)
            yield block(x)
