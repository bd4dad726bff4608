"""Amphista: two adaptation layers with caches of their own, and heads that see one another, all drafted at once."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import torch
from msgspec import Meta
from torch import Tensor, nn

from medusa_cli.drafters.base import Batch, Draft, HeadsConfig, NewTokens, roots_of
from medusa_cli.drafters.heads import HeadDrafter, drafts_of
from medusa_cli.drafters.layers import DecoderLayer, HeadAttention, LayerCache, Stack, by_sequence, truncated
from medusa_cli.model import Backbone
from medusa_cli.tree import DynamicTree, Tree


@dataclass(frozen=True)
class AmphistaConfig(HeadsConfig):
    """attention_layers: self-attention layers over the heads; 2 is the paper's alpha variant (appendix A.2.3).

    context: what the adaptation layers see: the "conversation" (section 3.1: positions 1 .. t - 1), or the "answer"
    alone, as drafters of earlier versions do.
    """

    attention_layers: Annotated[int, Meta(ge=0, le=4)] = 1
    context: Literal["conversation", "answer"] = "answer"


class AdaptationLayer(nn.Module):
    """fc([h; e]) and a causal decoder layer (section 3.1); a fresh one passes h on."""

    def __init__(self, hidden_size: int) -> None:
        super().__init__()
        self.fc = nn.Linear(2 * hidden_size, hidden_size)
        self.layer = DecoderLayer(hidden_size)
        nn.init.zeros_(self.fc.weight)
        nn.init.eye_(self.fc.weight[:, :hidden_size])
        nn.init.zeros_(self.fc.bias)

    def forward(self, hidden: Tensor, embedded: Tensor) -> Tensor:
        """Sequences [B, n, H] of states and of the next tokens' embeddings -> [B, n, H]."""
        return self.layer(self.join(hidden, embedded))

    def join(self, hidden: Tensor, embedded: Tensor) -> Tensor:
        """What the decoder layer reads [.., H]."""
        return self.fc(torch.cat([hidden, embedded], dim=-1))


class Amphista(HeadDrafter):
    """K heads: the first half reads the first adaptation layer's state, the others the second's (section 3)."""

    name = "amphista"
    learning_rate = 1e-3
    config_class = AmphistaConfig
    settings = ("attention_layers", "context", "conditional")
    config: AmphistaConfig

    def __init__(self, config: AmphistaConfig) -> None:
        super().__init__(config)
        size, heads = config.hidden_size, config.num_heads
        self.stages = nn.ModuleList(AdaptationLayer(size) for _ in range(2))
        self.blocks = nn.ModuleList(Stack(size, config.num_layers) for _ in range(heads))
        self.position = nn.Parameter(torch.zeros(heads, size))
        self.attention = nn.ModuleList(HeadAttention(size) for _ in range(config.attention_layers))
        self.truncate(0)

    @classmethod
    def sees_prompt(cls, settings: Any) -> bool:
        return bool(settings.context == "conversation")

    def truncate(self, length: int) -> int:
        if not length or self.config.context == "answer":  # every prompt begins another answer
            self._caches = [LayerCache() for _ in self.stages]
            return length
        return truncated(self._caches, length - 1, length)

    @torch.inference_mode()
    def draft(
        self,
        backbone: Backbone,
        sequences: "Sequence[Amphista]",
        confirmed: Sequence[NewTokens],
        shape: Tree | DynamicTree,
    ) -> list[Draft]:
        """Adapt each sequence's confirmed states, let the heads see one another, and fill every node at once."""
        each = [own._adapt(backbone, one) for own, one in zip(sequences, confirmed, strict=True)]
        adapted = [torch.cat(stage) for stage in zip(*each, strict=True)]
        roots = roots_of(confirmed, backbone.device)
        return drafts_of(self, lambda *stages: self._scores(backbone, stages, shape.max_depth), adapted, shape, roots)

    def _adapt(self, backbone: Backbone, confirmed: NewTokens) -> list[Tensor]:
        """The last adapted state [1, H] of each stage, the confirmed ones added to this sequence's caches."""
        embedded = self.embed(backbone, confirmed.following)
        stages, adapted, x = self.fast("stages"), [], confirmed.hidden.to(self.dtype)
        for stage, one in zip(stages, self._caches, strict=True):
            x = stage.layer.extend(stage.join(x, embedded), one, confirmed.start, self.repeated)
            adapted.append(x[-1:])
        return adapted

    def _scores(self, backbone: Backbone, adapted: Sequence[Tensor], heads: int) -> list[Tensor]:
        """Scores [B, M] of the first heads from the stages' states, [B, H] each."""
        states = self._together(adapted, self.fast("blocks"), self.fast("attention"))  # [B, K, H]
        return [self.score(backbone, head, states[:, head]) for head in range(heads)]

    def _together(self, adapted: Sequence[Tensor], blocks: nn.ModuleList, attention: nn.ModuleList) -> Tensor:
        """The heads' states [P, K, H] from those of the two stages, [P, H] each."""
        half = self.num_heads // 2
        apart = [block(adapted[head >= half]) for head, block in enumerate(blocks)]
        x = torch.stack(apart, dim=1) + self.position
        for layer in attention:
            x = layer(x)
        return x

    def head_states(self, backbone: Backbone, batch: Batch, rows: Sequence[Tensor]) -> Iterator[Tensor]:
        hidden, places = by_sequence(batch.hidden, batch.attention_groups)
        embedded, _ = by_sequence(self.embed(backbone, batch.next).to(batch.hidden.dtype), batch.attention_groups)
        adapted, x, learnt = [], hidden, batch.learnt
        for stage in self.stages:
            x = stage(x, embedded)
            adapted.append(x.flatten(0, 1)[places[learnt]])
        states = self._together(adapted, self.blocks, self.attention)  # [n, K, H] of those that are learnt
        for head, positions in enumerate(rows):
            yield states[batch.learnt_index[positions], head].to(batch.hidden.dtype)
