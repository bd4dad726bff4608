"""Hydra heads: head k also sees the tokens drafted before its own, so that guesses along a path fit together."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any, Literal

import torch
from msgspec import Meta
from torch import Tensor, nn
from torch.nn import functional as F

from medusa_cli.drafters.base import Batch, Draft, HeadsConfig, NewTokens, roots_of, with_last_layer
from medusa_cli.drafters.heads import HeadDrafter, levels
from medusa_cli.drafters.layers import DecoderLayer, Fuse, LayerCache, Stack, by_sequence, truncated
from medusa_cli.errors import UserError
from medusa_cli.model import Backbone
from medusa_cli.tree import DynamicTree, Tree, TreeBuilder


@dataclass(frozen=True)
class HydraConfig(HeadsConfig):
    """prefix_layers: causal decoder layers over the confirmed states before the heads; 0 is Hydra, 1 Hydra++.

    context: what they see: the "conversation", or the "answer" alone, as drafters of earlier versions do. taps: after
    how many of the backbone's layers states are read too, beside the final ones. raw: embeddings as the model has them,
    and a bias beside the linear path of each head's input, as the authors' code trains them.
    """

    prefix_layers: Annotated[int, Meta(ge=0, le=4)] = 0
    taps: Annotated[tuple[Annotated[int, Meta(ge=1)], ...], Meta(max_length=8)] = ()
    raw: bool = False
    context: Literal["conversation", "answer"] = "answer"

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "taps", tuple(self.taps))  # whoever makes one may give a list
        if not self.prefix_layers:  # nothing sees anything: such heads fit one another whatever was asked for
            object.__setattr__(self, "context", "answer")


class HydraHead(nn.Module):
    """Head k: [h; e1; ..; ek] -> R x + SiLU(W x), then L - 1 residual blocks; a fresh head gives h back."""

    def __init__(self, hidden_size: int, tokens: int, layers: int, raw: bool = False) -> None:
        super().__init__()
        self.skip = nn.Linear((tokens + 1) * hidden_size, hidden_size, bias=raw)
        self.mix = nn.Linear((tokens + 1) * hidden_size, hidden_size)
        self.stack = Stack(hidden_size, layers - 1)
        nn.init.zeros_(self.skip.weight)
        nn.init.eye_(self.skip.weight[:, :hidden_size])
        nn.init.zeros_(self.mix.weight)
        nn.init.zeros_(self.mix.bias)

    def forward(self, x: Tensor) -> Tensor:
        return self.stack(self.skip(x) + F.silu(self.mix(x)))


class HydraHeads(HeadDrafter):
    """K sequentially dependent heads (Hydra, section 3); with prefix layers before them, Hydra++ (section 4)."""

    name = "hydra"
    autoregressive = True
    regress = 100.0
    config_class = HydraConfig
    settings = ("prefix_layers", "taps", "context")
    config: HydraConfig

    def __init__(self, config: HydraConfig) -> None:
        super().__init__(config)
        size = config.hidden_size
        self.taps = with_last_layer(config.taps)
        self.fuse = Fuse(size, len(self.taps)) if config.taps else nn.Identity()
        self.prefix = nn.ModuleList(DecoderLayer(size) for _ in range(config.prefix_layers))
        self.blocks = nn.ModuleList(
            HydraHead(size, k, config.num_layers, config.raw) for k in range(1, config.num_heads + 1)
        )
        self.truncate(0)

    @classmethod
    def sees_prompt(cls, settings: Any) -> bool:
        return bool(settings.prefix_layers) and settings.context == "conversation"

    @classmethod
    def check_fit(cls, config: Any, backbone: Backbone) -> None:
        taps = config.taps
        if list(taps) != sorted(set(taps)) or any(layer >= backbone.num_layers for layer in taps):
            raise UserError(
                f"the drafter reads states after the layers {list(taps)}, the model has {backbone.num_layers} layers",
                "give the drafter's own @model",
            )

    def embed(self, backbone: Backbone, tokens: Tensor) -> Tensor:
        return backbone.embedding(tokens).to(self.dtype) if self.config.raw else super().embed(backbone, tokens)

    def truncate(self, length: int) -> int:
        if not length or self.config.context == "answer":  # every prompt begins another answer
            self._caches = [LayerCache() for _ in self.prefix]
            return length
        return truncated(self._caches, length, length)

    @torch.inference_mode()
    def draft(
        self,
        backbone: Backbone,
        sequences: "Sequence[HydraHeads]",
        confirmed: Sequence[NewTokens],
        shape: Tree | DynamicTree,
    ) -> list[Draft]:
        """Draft level by level: a node's children are the best guesses of the next head after the node's path.

        Each sequence brings its own prefix layers' state; the heads then draft static trees of all at once.
        """
        roots = roots_of(confirmed, backbone.device)
        states = torch.cat([own._context(one) for own, one in zip(sequences, confirmed, strict=True)])
        if not shape.max_depth:
            return [Draft(root, Tree.root_only()) for root in roots[:, None]]
        if isinstance(shape, DynamicTree):
            each = zip(states.split(1), confirmed, strict=True)
            return [self._grow(backbone, state, shape, one.root) for state, one in each]
        return [Draft(tokens, shape) for tokens in self._fill(backbone, shape, states, roots)]

    def _fill(self, backbone: Backbone, tree: Tree, states: Tensor, roots: Tensor) -> Tensor:
        """Tokens [B, N] for B sequences, level by level, from their states [B, H] and roots [B]."""
        tokens = roots[:, None].repeat(1, tree.size)
        for head, level in enumerate(levels(tree, backbone.device)):
            width = min(4 ** math.ceil(math.log(level.width, 4)), len(self.draft_ids))  # few widths, so few traces
            guess = partial(self._guesses, backbone, head, width)
            best = self.repeated(("guesses", head, width), guess, tokens[:, level.paths], states)
            tokens[:, level.nodes] = best[:, level.rows, level.ranks]
        return tokens

    def _guesses(self, backbone: Backbone, head: int, width: int, said: Tensor, states: Tensor) -> Tensor:
        """A head's best tokens [B, n, width] after paths of tokens [B, n, head + 1] from states [B, H]."""
        return self.draft_ids[self._scores(backbone, head, said, states).topk(width, dim=-1).indices]

    def _scores(self, backbone: Backbone, head: int, said: Tensor, states: Tensor) -> Tensor:
        """A head's scores [B, n, M] after paths of tokens [B, n, head + 1] from states [B, H]."""
        embedded = self.embed(backbone, said).flatten(2)
        paths = torch.cat([states[:, None].expand(-1, said.shape[1], -1), embedded], dim=-1)
        return self.score(backbone, head, self.fast("blocks")[head](paths))

    def _grow(self, backbone: Backbone, state: Tensor, growth: DynamicTree, root: int) -> Draft:
        growing, nodes, said = TreeBuilder(growth, root), [0], [[root]]
        for head in range(growth.max_depth):
            paths = torch.tensor([said], device=state.device)
            scores = self.repeated(("scores", head), partial(self._scores, backbone, head), paths, state)
            path = dict(zip(nodes, said, strict=True))
            nodes = growing.extend(nodes, *self.confidences(head, scores[0], growth))
            if not nodes:
                break
            said = [[*path[growing.parents[node]], growing.tokens[node]] for node in nodes]
        tree, chosen = growing.tree()
        return Draft(torch.tensor(chosen, device=state.device), tree)

    def _context(self, confirmed: NewTokens) -> Tensor:
        """The state [1, H] that the heads start from."""
        if not self.prefix:
            confirmed = confirmed.last()
        x = confirmed.hidden.to(self.dtype)
        if self.config.taps:
            x = self.repeated("fuse", self.fast("fuse"), x)
        for layer, cache in zip(self.fast("prefix"), self._caches, strict=True):
            x = layer.extend(x, cache, confirmed.start, self.repeated)
        return x[-1:]

    def head_states(self, backbone: Backbone, batch: Batch, rows: Sequence[Tensor]) -> Iterator[Tensor]:
        embedded = self.embed(backbone, batch.next).to(batch.hidden.dtype)
        context = self.fuse(batch.hidden).to(batch.hidden.dtype)
        if self.prefix:
            x, places = by_sequence(context, batch.attention_groups)
            for layer in self.prefix:
                x = layer(x)
            context = x.flatten(0, 1)[places].to(batch.hidden.dtype)
        last = len(batch.next) - 1  # positions too near the end have no target for a head and may read any token
        for head, positions in enumerate(rows):
            tokens = [embedded[(positions + i).clamp(max=last)] for i in range(head + 1)]
            yield self.blocks[head](torch.cat([context[positions], *tokens], dim=-1))
