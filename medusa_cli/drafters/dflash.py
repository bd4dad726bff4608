"""DFlash and DSpark, which draft all levels in one pass over a block: the root and mask tokens."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from medusa_cli.device import upload
from medusa_cli.drafters.base import Batch, NewTokens, check_layers, with_last_layer
from medusa_cli.drafters.expansion import draft_by_level, roots_of
from medusa_cli.drafters.heads import HeadsConfig, check_ranges
from medusa_cli.drafters.layers import Padding
from medusa_cli.drafters.mtp import LayerParts, TransformersDrafter
from medusa_cli.model import Backbone
from medusa_cli.model.grouped_attention import cache_name
from medusa_cli.model.masks import additive
from medusa_cli.tree import Draft, DynamicTree, Tree

# The number of blocks per pass in calibration, which is limited because the pass has a dense mask.
BLOCKS = 64


@dataclass(frozen=True)
class DflashConfig(HeadsConfig):
    """Adds DFlash's settings.

    num_heads: the number of draft tokens on a path. conditional: the rank of DSpark's Markov head.
    text: the config of the drafter's layers, in transformers' form. taps: for each state that is
    read, the number of backbone layers below it. sample_from_anchor: if True, row k of the block
    drafts the token after row k, and the root's row drafts, too. Otherwise, row k drafts its own token.
    """

    text: dict[str, Any] = field(default_factory=dict)
    taps: tuple[int, ...] = ()
    block_size: int = 8
    mask_token_id: int = 0
    sample_from_anchor: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        check_ranges(
            self,
            num_layers=(1, 16),
            block_size=(1, 64),
            mask_token_id=(0, self.vocab_size - 1),
            num_heads=(1, self.block_size - (not self.sample_from_anchor)),
        )


class KnownRows:
    """Puts the keys and values of a layer's context before those of the block.

    known: the context's keys and values [heads, m_i, D] for each of B sequences. size: the number of rows per block.
    """

    def __init__(self, known: Sequence[tuple[Tensor, Tensor]], size: int) -> None:
        self._known = known
        self._size = size

    def update(
        self, keys: Tensor, values: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Returns the keys and values [1, heads, M, D] of all sequences, each context before its block."""
        parts = zip(
            self._known, keys[0].split(self._size, 1), values[0].split(self._size, 1), strict=True
        )
        pairs = [
            (torch.cat([context[0], own_keys], 1), torch.cat([context[1], own_values], 1))
            for context, own_keys, own_values in parts
        ]
        every = [torch.cat(rows, dim=1)[None] for rows in zip(*pairs, strict=True)]
        return every[0], every[1]


class Dflash(TransformersDrafter):
    """Drafts a block of rows, which see each other and the fused states of all tokens before the root.

    The scores of a level do not depend on draft tokens, except for DSpark's bias from the parent.
    Drafting a tree therefore takes no more passes than drafting a chain.
    """

    name = "dflash"
    weights_file = "model.safetensors"
    config_class = DflashConfig
    settings = ()
    vocabularies = ("draft", "own", "shared")
    sees_prompt = True
    config: DflashConfig

    def __init__(self, config: DflashConfig) -> None:
        super().__init__(config)
        self.taps = with_last_layer(config.taps)
        size = config.hidden_size
        parts = LayerParts.of(config.text, config.num_layers)
        norm = parts.norm
        eps = parts.config.rms_norm_eps
        self.fc = nn.Linear(len(config.taps) * size, size, bias=False)
        self.hidden_norm = norm(size, eps=eps)
        self.layers = nn.ModuleList(
            parts.layer(parts.config, index) for index in range(config.num_layers)
        )
        self.norm = norm(size, eps=eps)
        # In a tuple, rotary embeddings are no submodule, so changes of dtype leave their rates in fp32.
        with torch.device("cpu"):
            self._rotary = (parts.rotary(parts.config),)
        self._cache = cache_name(parts.layer.forward)
        self.truncate(0)

    @classmethod
    def check_fit(cls, config: Any, backbone: Backbone) -> None:
        check_layers(config.taps, backbone.num_layers, "drafter.taps")

    @property
    def decoder_layers(self) -> list[Any]:
        return list(self.layers)

    def embed(self, backbone: Backbone, tokens: Tensor) -> Tensor:
        """Returns the backbone's embeddings unchanged."""
        return backbone.embedding(tokens).to(self.dtype)

    @torch.inference_mode()
    def draft(
        self,
        backbone: Backbone,
        sequences: Sequence[Dflash],
        new: Sequence[NewTokens],
        tree: Tree | DynamicTree,
    ) -> list[Draft]:
        """Adds the new states to the caches, runs one block per sequence, and drafts the trees from the blocks."""
        self._add_context(sequences, new)
        known = [[cache.filled() for cache in own.caches] for own in sequences]
        starts = [tokens.end for tokens in new]
        states = self._run_blocks(backbone, known, roots_of(new), starts)  # [B, heads, H]

        def compute(states: Tensor) -> list[Tensor]:
            return [self.score(backbone, 0, states[:, head]) for head in range(tree.max_depth)]

        return draft_by_level(tree, new, self.at_once(tree.max_depth, compute, states))

    def _add_context(self, sequences: Sequence[Dflash], new: Sequence[NewTokens]) -> None:
        context = self._fuse(torch.cat([tokens.hidden for tokens in new]))
        counts = [len(tokens.tokens) for tokens in new]
        places = [range(tokens.start, tokens.end) for tokens in new]
        positions = upload([place for own in places for place in own], context.device)
        for index, (keys, values) in enumerate(self._keys_values(context, positions)):
            parts = zip(
                sequences, keys.split(counts, 1), values.split(counts, 1), places, strict=True
            )
            for own, own_keys, own_values, at in parts:
                own.caches[index].append(own_keys, own_values, at)

    def _fuse(self, hidden: Tensor) -> Tensor:
        """Returns the states [n, H] from which the layers' keys and values are computed."""
        lower = hidden[..., : -self.config.hidden_size].to(self.dtype)
        fused: Tensor = self.hidden_norm(self.packed("fc")(lower))
        return fused

    def _keys_values(self, context: Tensor, positions: Tensor) -> list[tuple[Tensor, Tensor]]:
        """Returns each layer's keys and values [heads, n, D] for context states [n, H] at positions [n]."""
        cos, sin = (table[0] for table in self._rotary[0](context, positions[None]))
        pairs = []
        for layer in self.packed("layers"):
            attention = layer.self_attn
            keys = attention.k_proj(context).unflatten(-1, (-1, attention.head_dim))
            values = attention.v_proj(context).unflatten(-1, (-1, attention.head_dim))
            if hasattr(attention, "k_norm"):
                keys = attention.k_norm(keys)
            keys = keys.transpose(0, 1)
            low, high = keys.chunk(2, dim=-1)
            turned = keys * cos + torch.cat([-high, low], dim=-1) * sin
            pairs.append((turned.to(values.dtype), values.transpose(0, 1)))
        return pairs

    def _run_blocks(
        self,
        backbone: Backbone,
        known: Sequence[Sequence[tuple[Tensor, Tensor]]],
        roots: Tensor,
        starts: Sequence[int],
    ) -> Tensor:
        """Returns the final states [B, heads, H] of the rows that draft, with one block per sequence.

        known: for each sequence, the keys and values of its context in every layer. roots [B] are
        at positions `starts` [B].
        """
        size = self.config.block_size
        device = roots.device
        tokens = roots.new_full((len(roots), size), self.config.mask_token_id)
        tokens[:, 0] = roots
        layers = self.packed("layers")
        x = self.embed(backbone, tokens.flatten())[None].to(next(layers.parameters()).dtype)
        positions = (upload(starts, device)[:, None] + torch.arange(size, device=device)).flatten()
        seen = [torch.ones(size, own[0][0].shape[1] + size, device=device) for own in known]
        mask = additive(torch.block_diag(*seen).bool(), x.dtype)[None, None]
        tables = self._rotary[0](x, positions[None])
        for index, layer in enumerate(layers):
            rows = KnownRows([own[index] for own in known], size)
            out = layer(
                x,
                attention_mask=mask,
                position_embeddings=tables,
                position_ids=positions[None],
                **{self._cache: rows},
            )
            x = out[0] if isinstance(out, tuple) else out
        states: Tensor = self.norm(x)[0].unflatten(0, (-1, size))
        first = 0 if self.config.sample_from_anchor else 1
        return states[:, first : first + self.num_heads]

    def head_states(self, backbone: Backbone, batch: Batch) -> Iterator[Tensor]:
        padding = Padding(batch.attention_groups, batch.hidden.device)
        context = self._fuse(batch.hidden)
        layers = self._keys_values(context, padding.position)
        pieces = []
        for places in batch.learned.split(BLOCKS):
            ends = places.tolist()
            firsts = (places - padding.position[places]).tolist()
            known = [
                [(keys[:, first : end + 1], values[:, first : end + 1]) for keys, values in layers]
                for first, end in zip(firsts, ends, strict=True)
            ]
            starts = (padding.position[places] + 1).tolist()
            pieces.append(self._run_blocks(backbone, known, batch.next[places], starts))
        states = torch.cat(pieces)
        yield from states.to(batch.hidden.dtype).unbind(1)

    def named_weights(self) -> dict[str, Tensor]:
        """Returns the weights under the names that speculators uses."""
        names = {
            "matrices.0": "lm_head.weight",
            "conditional.before": "markov_head.markov_w1.weight",
            "conditional.after": "markov_head.markov_w2.weight",
        }
        return {names.get(name, name): weight for name, weight in self.named_parameters()}
