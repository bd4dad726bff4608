"""Medusa heads: K residual heads on the last hidden state."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from medusa_cli.drafters.base import Batch, NewTokens
from medusa_cli.drafters.expansion import Guess, draft_by_level
from medusa_cli.drafters.heads import HeadDrafter, HeadsConfig
from medusa_cli.drafters.layers import residual_blocks
from medusa_cli.drafters.slots import NewTensors, fill_by_level
from medusa_cli.model import Backbone
from medusa_cli.tree import Draft, DynamicTree, Tree
from medusa_cli.tree.tensors import TreeTensors


class MedusaHeads(HeadDrafter):
    """Holds K heads of L residual blocks; head k drafts the token k places after the next token (section 3.1.1)."""

    name = "medusa"
    drafts_in_graphs = True
    weights_file = "medusa_lm_head.safetensors"
    settings = ("num_layers", "matrices", "conditional")

    def __init__(self, config: HeadsConfig) -> None:
        super().__init__(config)
        size = config.hidden_size
        layers = config.num_layers
        self.blocks = nn.ModuleList(residual_blocks(size, layers) for _ in range(config.num_heads))

    @torch.inference_mode()
    def draft(
        self,
        backbone: Backbone,
        sequences: Sequence[MedusaHeads],
        new: Sequence[NewTokens],
        tree: Tree | DynamicTree,
    ) -> list[Draft]:
        hidden = torch.cat([tokens.hidden[-1:] for tokens in new])
        return draft_by_level(tree, new, self._guesses(backbone, hidden, tree.max_depth))

    @torch.inference_mode()
    def fill(self, backbone: Backbone, new: NewTensors, trees: TreeTensors) -> None:
        guess = self._guesses(backbone, new.last(new.hidden), self.num_heads)
        fill_by_level(trees, self.num_heads, guess)

    def _guesses(self, backbone: Backbone, hidden: Tensor, depth: int) -> Guess:
        def compute(states: Tensor) -> list[Tensor]:
            blocks = self.packed("blocks")
            return [self.score(backbone, head, blocks[head](states)) for head in range(depth)]

        return self.at_once(depth, compute, hidden.to(self.dtype))

    def head_states(self, backbone: Backbone, batch: Batch) -> Iterator[Tensor]:
        states = batch.hidden[batch.learned]
        for block in self.blocks:
            yield block(states)

    def named_weights(self) -> dict[str, Tensor]:
        """Returns the weights under the names that serving engines expect.

        The names are "{k}.{layer}.linear.weight" and ".bias", and "{k}.{L}.weight" for the vocabulary matrix.
        """
        weights: dict[str, Tensor] = {}
        for name, weight in self.named_parameters():
            part, _, rest = name.partition(".")
            matrix = f"{rest}.{self.config.num_layers}.weight"
            weights[{"blocks": rest, "matrices": matrix}.get(part, name)] = weight
        return weights

    def config_json(self) -> dict[str, Any]:
        config = super().config_json()
        counts = {f"medusa_{key}": config.pop(key) for key in ("num_heads", "num_layers")}
        # Without medusa_fc_bias, engines that read this layout silently drop the biases.
        return {**counts, "medusa_fc_bias": True, **config}

    @classmethod
    def read_config(cls, data: dict[str, Any]) -> dict[str, Any]:
        counts = {
            key: data[f"medusa_{key}"]
            for key in ("num_heads", "num_layers")
            if f"medusa_{key}" in data
        }
        # Checkpoints from other tools do not name a vocabulary: their heads score all tokens.
        return {"vocabulary": "own", **data, **counts}
