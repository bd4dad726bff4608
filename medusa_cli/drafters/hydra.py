"""Hydra heads: head k also sees the tokens drafted before its own, so that guesses along a path fit together."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Annotated, Any

import torch
from msgspec import Meta
from torch import Tensor, nn
from torch.nn import functional as F

from medusa_cli.backbone import Backbone
from medusa_cli.drafters.base import Batch, Confirmed, Draft, beside_final, roots_of
from medusa_cli.drafters.blocks import DecoderLayer, Fuse, LayerCache, Stack, by_sequence
from medusa_cli.drafters.config import HeadsConfig
from medusa_cli.drafters.heads import Encoded, HeadDrafter
from medusa_cli.errors import UserError
from medusa_cli.tree import Growing, Growth, Tree


@dataclass(frozen=True)
class HydraConfig(HeadsConfig):
    """prefix_layers: causal decoder layers over the confirmed states before the heads; 0 is Hydra, 1 Hydra++.

    taps: after how many of the backbone's layers states are read too, beside the final ones. raw: embeddings as the
    model has them, and a bias beside the linear path of each head's input, as the authors' code trains them.
    """

    prefix_layers: Annotated[int, Meta(ge=0, le=4)] = 0
    taps: Annotated[tuple[Annotated[int, Meta(ge=1)], ...], Meta(max_length=8)] = ()
    raw: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "taps", tuple(self.taps))  # whoever makes one may give a list


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
    """K sequentially dependent heads (Hydra, section 3); with prefix layers over the answer, Hydra++ (section 4).

    The prefix layers see the states from the last prompt token on: training knows the states of answers alone.
    """

    name = "hydra"
    regress = 100.0
    told = math.inf
    config_class = HydraConfig
    settings = ("prefix_layers", "taps")
    config: HydraConfig

    def __init__(self, config: HydraConfig) -> None:
        super().__init__(config)
        size = config.hidden_size
        self.taps = beside_final(config.taps)
        self.fuse = Fuse(size, len(self.taps)) if config.taps else nn.Identity()
        self.prefix = nn.ModuleList(DecoderLayer(size) for _ in range(config.prefix_layers))
        self.blocks = nn.ModuleList(
            HydraHead(size, k, config.num_layers, config.raw) for k in range(1, config.num_heads + 1)
        )
        self.truncate(0)

    @classmethod
    def check_fit(cls, config: Any, backbone: Backbone) -> None:
        taps = config.taps
        if list(taps) != sorted(set(taps)) or any(layer >= backbone.num_layers for layer in taps):
            raise UserError(
                f"the drafter reads states after the layers {list(taps)}, the model has {backbone.num_layers} layers",
                "give the drafter's own --model",
            )

    def embed(self, backbone: Backbone, tokens: Tensor) -> Tensor:
        return backbone.embedding(tokens).to(self.dtype) if self.config.raw else super().embed(backbone, tokens)

    def truncate(self, length: int) -> None:
        # Its layers know the answer alone, and every prompt begins another one.
        self._caches = [LayerCache() for _ in self.prefix]

    @torch.inference_mode()
    def draft(
        self,
        backbone: Backbone,
        sequences: "Sequence[HydraHeads]",
        confirmed: Sequence[Confirmed],
        shape: Tree | Growth,
    ) -> list[Draft]:
        """Draft level by level: a node's children are the best guesses of the next head after the node's path.

        Each sequence brings its own prefix layers' state; the heads then draft static trees of all at once.
        """
        roots = roots_of(confirmed, backbone.device)
        states = torch.cat([own._context(one) for own, one in zip(sequences, confirmed, strict=True)])
        if not shape.max_depth:
            return [Draft(root, Tree.root_only()) for root in roots[:, None]]
        if isinstance(shape, Growth):
            paths = torch.cat([states, self.embed(backbone, roots)], dim=-1)
            each = zip(paths.split(1), confirmed, strict=True)
            return [self._grow(backbone, path, shape, one.root) for path, one in each]
        return [Draft(tokens, shape) for tokens in self._fill(backbone, states, roots, shape)]

    def _fill(self, backbone: Backbone, states: Tensor, roots: Tensor, tree: Tree) -> Tensor:
        """Tokens [B, N] for B sequences, level by level, from their states [B, H] and roots [B]."""
        blocks, tokens = self.fast("blocks"), roots[:, None].repeat(1, tree.size)
        paths = torch.cat([states, self.embed(backbone, roots)], dim=-1)[:, None]  # [B, 1, 2H]: what head 1 reads
        for head, level in enumerate(_levels(tree, backbone.device)):
            best = self.score(backbone, head, blocks[head](paths)).topk(level.width, dim=-1).indices
            drafted = self.draft_ids[best[:, level.rows, level.ranks]]
            tokens[:, level.nodes] = drafted
            if len(level.inner):
                embedded = self.embed(backbone, drafted[:, level.inner])
                paths = torch.cat([paths[:, level.rows[level.inner]], embedded], dim=-1)
        return tokens

    def _grow(self, backbone: Backbone, paths: Tensor, growth: Growth, root: int) -> Draft:
        blocks, growing, nodes = self.fast("blocks"), Growing(growth, root), [0]
        for head in range(growth.max_depth):
            log_p, tokens = self.confidences(head, self.score(backbone, head, blocks[head](paths)), growth)
            row = {node: place for place, node in enumerate(nodes)}
            nodes = growing.extend(nodes, log_p, tokens)
            if not nodes:
                break
            if head + 1 < growth.max_depth:
                above = torch.tensor([row[growing.parents[node]] for node in nodes], device=paths.device)
                drafted = torch.tensor([growing.tokens[node] for node in nodes], device=paths.device)
                paths = torch.cat([paths[above], self.embed(backbone, drafted)], dim=-1)
        tree, chosen = growing.tree()
        return Draft(torch.tensor(chosen, device=paths.device), tree)

    def _context(self, confirmed: Confirmed) -> Tensor:
        """The state [1, H] that the heads start from."""
        hidden = confirmed.hidden.to(self.dtype)
        # Of a prompt only the last state has a counterpart in training.
        if not self.prefix or not self._caches[0].length:
            hidden = hidden[-1:]
        hidden = self.fast("fuse")(hidden)
        if not self.prefix:
            return hidden
        x = hidden[None]
        for layer, cache in zip(self.fast("prefix"), self._caches, strict=True):
            x = layer(x, cache)
        return x[0, -1:]

    def encode(self, backbone: Backbone, batch: Batch) -> Encoded:
        embedded = self.embed(backbone, batch.next).to(batch.hidden.dtype)
        context = self.fuse(batch.hidden).to(batch.hidden.dtype)
        if self.prefix:
            x, places = by_sequence(context, batch.segment)
            for layer in self.prefix:
                x = layer(x)
            context = x.flatten(0, 1)[places].to(batch.hidden.dtype)
        last = len(batch.next) - 1

        def states(head: int, rows: Tensor) -> Tensor:
            # Rows too near the end have no target for this head: what they read does not matter.
            before = [embedded[(rows + i).clamp(max=last)] for i in range(head + 1)]
            return self.blocks[head](torch.cat([context[rows], *before], dim=-1))

        return states


@dataclass(frozen=True)
class _Level:
    """The nodes of one depth: their ids, the rows of their parents' paths, ranks [n], and those with children."""

    nodes: Tensor
    rows: Tensor
    ranks: Tensor
    inner: Tensor
    width: int


@lru_cache(maxsize=64)
def _levels(tree: Tree, device: torch.device) -> list[_Level]:
    levels = []
    row = {0: 0}  # nodes of the level above that have children -> row of their path
    for depth in range(1, tree.max_depth + 1):
        nodes = [node for node in range(tree.size) if tree.depths[node] == depth]
        inner = [i for i, node in enumerate(nodes) if tree.children[node]]
        rows = torch.tensor([row[tree.parents[node]] for node in nodes], device=device)
        ranks = torch.tensor([tree.ranks[node] for node in nodes], device=device)
        inside = torch.tensor(inner, dtype=torch.long, device=device)
        levels.append(_Level(torch.tensor(nodes, device=device), rows, ranks, inside, tree.widths[depth - 1]))
        row = {nodes[i]: place for place, i in enumerate(inner)}
    return levels
