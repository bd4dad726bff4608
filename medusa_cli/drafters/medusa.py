"""Medusa heads: K residual heads on the final hidden state, head k guessing the token k places past the next one."""

from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import Any

import torch
from torch import Tensor, nn

from medusa_cli.drafters.base import Batch, Draft, HeadsConfig, NewTokens, roots_of
from medusa_cli.drafters.heads import HeadDrafter, drafts_of
from medusa_cli.drafters.layers import Stack
from medusa_cli.model import Backbone
from medusa_cli.tree import DynamicTree, Tree


class MedusaHeads(HeadDrafter):
    """K heads of L residual blocks on the final hidden state, each with its own weights.

    Medusa, section 3.1.1; its sections and equations are numbered here as in arXiv:2401.10774.
    """

    name = "medusa"
    weights_file = "medusa_lm_head.safetensors"
    settings = ("conditional",)

    def __init__(self, config: HeadsConfig) -> None:
        super().__init__(config)
        self.blocks = nn.ModuleList(Stack(config.hidden_size, config.num_layers) for _ in range(config.num_heads))

    @torch.inference_mode()
    def draft(
        self,
        backbone: Backbone,
        sequences: "Sequence[MedusaHeads]",
        confirmed: Sequence[NewTokens],
        shape: Tree | DynamicTree,
    ) -> list[Draft]:
        """All heads guess from the last confirmed states, those of all sequences at once."""
        states, roots = torch.cat([one.hidden[-1:] for one in confirmed]), roots_of(confirmed, backbone.device)
        return drafts_of(self, lambda last: self._scores(backbone, last, shape.max_depth), [states], shape, roots)

    def _scores(self, backbone: Backbone, states: Tensor, heads: int) -> list[Tensor]:
        """Scores [B, M] of the first heads for states [B, H]."""
        states, blocks = states.to(self.dtype), self.fast("blocks")
        return [self.score(backbone, head, blocks[head](states)) for head in range(heads)]

    def head_states(self, backbone: Backbone, batch: Batch, rows: Sequence[Tensor]) -> Iterator[Tensor]:
        for block, positions in zip(self.blocks, rows, strict=False):
            yield block(batch.hidden[positions])

    def named_weights(self) -> dict[str, Tensor]:
        """The layout that serving engines read: "{k}.{layer}.linear.weight" and ".bias", "{k}.{L}.weight"."""
        weights: dict[str, Tensor] = {}
        for k, block in enumerate(self.blocks):
            weights |= {f"{k}.{name}": tensor for name, tensor in block.named_parameters()}
        weights |= {f"{k}.{self.config.num_layers}.weight": matrix for k, matrix in enumerate(self.matrices)}
        weights |= {f"{k}.{self.config.num_layers}.factor": factor for k, factor in enumerate(self.factors)}
        return weights | {name: one for name, one in self.named_parameters() if name.startswith("conditional.")}

    def config_json(self) -> dict[str, Any]:
        shared = {k: v for k, v in asdict(self.config).items() if k not in ("num_heads", "num_layers")}
        return {
            "medusa_num_heads": self.config.num_heads,
            "medusa_num_layers": self.config.num_layers,
            # Without this key, engines that read this layout drop the biases silently.
            "medusa_fc_bias": True,
            **shared,
        }

    @classmethod
    def read_config(cls, data: dict[str, Any]) -> dict[str, Any]:
        counts = {key: data[f"medusa_{key}"] for key in ("num_heads", "num_layers") if f"medusa_{key}" in data}
        # Checkpoints of other tools name no vocabulary: their heads score all of it.
        return {"vocabulary": "own", **data, **counts}
