"""Pseudo rows: guessed states of tokens yet to come, which join a forward pass in a middle layer."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from transformers.cache_utils import DynamicCache

from medusa_cli.engine.kernels import Product
from medusa_cli.errors import UserError
from medusa_cli.model.backbone import Backbone, Layers, padded_pass


@dataclass(frozen=True)
class ExtraRows:
    """K maps [.., H] -> [.., H]: map k makes a row's k-th pseudo row of its state after layers[k] layers.

    Pseudo row k (from 1) of a row at position p stands at p + k. It sees what that row sees, itself and, unless
    `masked`, the row's pseudo rows before it; no other row sees it. layers do not decrease (FIRP, section 3.2).
    """

    layers: tuple[int, ...]
    maps: tuple[Callable[[Tensor], Tensor], ...]
    masked: bool = False

    def entering(self, layer: int) -> list[Callable[[Tensor], Tensor]]:
        """The maps whose rows enter before the layer of this index (from 0)."""
        return [one for at, one in zip(self.layers, self.maps, strict=True) if at == layer]

    def sees(self, device: torch.device) -> Tensor:
        """Which pseudo rows of one row see which others, bool [K, K]."""
        steps = len(self.layers)
        every = torch.ones(steps, steps, dtype=torch.bool, device=device)
        return torch.eye(steps, dtype=torch.bool, device=device) if self.masked else every.tril()


class ExtraRowStates:
    """The pseudo rows of one pass over B sequences of n rows, made of `sources` [m] of these: m rows a map."""

    def __init__(self, pseudo: ExtraRows, sources: Tensor) -> None:
        self.pseudo, self.sources = pseudo, sources

    @property
    def count(self) -> int:
        """How many a sequence has in the last layer."""
        return len(self.pseudo.layers) * len(self.sources)

    def place(self, sees: Tensor, depth: Tensor) -> tuple[Tensor, Tensor]:
        """Who sees whom among rows and pseudo rows [B, n + K m, n + K m], and their depths [B, n + K m]."""
        batch, m, steps = len(sees), len(self.sources), len(self.pseudo.layers)
        own = torch.eye(m, dtype=torch.bool, device=sees.device)
        ahead = (self.pseudo.sees(sees.device)[:, None, :, None] & own[None, :, None]).view(steps * m, steps * m)
        unseen = sees.new_zeros(*sees.shape[:2], steps * m)
        below = torch.cat([sees[:, self.sources].repeat(1, steps, 1), ahead.expand(batch, -1, -1)], dim=2)
        places = [depth[:, self.sources] + k for k in range(1, steps + 1)]
        return torch.cat([torch.cat([sees, unseen], dim=2), below], dim=1), torch.cat([depth, *places], dim=1)

    def enter(self, layer: int, x: Tensor) -> Tensor:
        """The states [B, rows, H] before a layer with those that enter there appended."""
        fresh = [apply(x[:, self.sources]) for apply in self.pseudo.entering(layer)]
        return torch.cat([x, *fresh], dim=1) if fresh else x

    def part(self, states: Tensor) -> tuple[Tensor, Tensor]:
        """Part final states [B, n + K m, H] into the rows' [B, n, H] and their pseudo rows' [B, m, K, H]."""
        batch, m, steps = len(states), len(self.sources), len(self.pseudo.layers)
        rows, ahead = states.split([states.shape[1] - steps * m, steps * m], dim=1)
        return rows, ahead.reshape(batch, steps, m, -1).transpose(1, 2)


# Positions whose pseudo rows attend together: few, so that they see few columns they have to mask.
CHUNK = 32


@dataclass(frozen=True)
class Trace:
    """What a pass over padded sequences [B, L] left: states [B, L, H] before each layer and after the last norm
    (states[-1]), and each layer's keys and values [B, KV, L, D]."""

    states: tuple[Tensor, ...]
    keys: tuple[Tensor, ...]
    values: tuple[Tensor, ...]


@torch.no_grad()
def trace(backbone: Backbone, tokens: Tensor) -> Trace:
    """A pass without gradients that keeps everything pseudo rows need; only an eager backbone can make one."""
    cache = DynamicCache()
    out = padded_pass(backbone, tokens, use_cache=True, past_key_values=cache, output_hidden_states=True)
    states = (*out.hidden_states[: backbone.num_layers], out.last_hidden_state)
    return Trace(states, *zip(*((layer.keys, layer.values) for layer in cache.layers), strict=True))


def ahead(backbone: Backbone, made: Trace, pseudo: ExtraRows, rows: Tensor) -> Tensor:
    """The final states [P, K, H] of the pseudo rows of P positions, rows [P] of a trace's B * L in rising order.

    The same as riding in a forward pass; gradients reach the maps, through the layers above them.
    """
    parts = Layers(backbone.model)
    if torch.is_grad_enabled() and any(isinstance(one, Product) for one in parts.layers.modules()):
        raise UserError("internal: packed weights lose gradients; load the backbone with gradients=True")
    size, length = made.states[-1].shape[:2]
    places, where = _side_by_side(rows, size, length)  # [P] in B * W, positions [B, W]
    x = made.states[-1].new_zeros(*where.shape, 0, backbone.hidden_size)  # [B, W, steps so far, H]
    sights: dict[str, _Sight] = {}
    for index, layer in enumerate(parts.layers):
        maps = pseudo.entering(index)
        if maps:
            below = made.states[index].gather(1, where[..., None].expand(-1, -1, backbone.hidden_size))
            x = torch.cat([x, torch.stack([apply(below) for apply in maps], dim=2).to(x.dtype)], dim=2)
            sights = {}
        steps = x.shape[2]
        if not steps:
            continue
        kind = backbone.masks.kind_of(index)
        if kind not in sights:
            sights[kind] = _Sight(backbone, kind, where, pseudo.sees(where.device)[:steps, :steps], length)
        positions = where[..., None] + torch.arange(1, steps + 1, device=where.device)
        positions = positions.clamp(max=backbone.max_positions - 1).flatten(1)  # [B, W * steps]
        out = layer(
            x.flatten(1, 2),
            attention_mask=sights[kind].over(made.keys[index], made.values[index]),
            position_embeddings=parts.rotary(x, positions, parts.kinds[index]),
            position_ids=positions,
            past_key_values=None,
            use_cache=False,
        )
        x = out.view(x.shape)
    return parts.base.norm(x).flatten(0, 1)[places]


def _side_by_side(rows: Tensor, size: int, length: int) -> tuple[Tensor, Tensor]:
    """Flat rows [P] of sequences [size, length] as padded positions [size, W], and where each went in size * W."""
    owner = rows // length
    counts = torch.bincount(owner, minlength=size)
    wide = int(counts.max())
    first = counts.cumsum(0) - counts
    places = owner * wide + torch.arange(len(rows), device=rows.device) - first[owner]
    where = rows.new_zeros(size * wide).index_copy(0, places, rows % length).view(size, wide)
    return places, where


class _Sight:
    """What pseudo rows see in layers of one kind: the real columns up to their own position, and one another.

    A dense mask over all positions' pseudo rows would be mostly empty: chunks of positions attend by themselves.
    """

    def __init__(self, backbone: Backbone, kind: str, where: Tensor, sees: Tensor, length: int) -> None:
        self._steps = len(sees)
        self._chunks: list[tuple[int, Tensor]] = []
        far = torch.arange(1, self._steps + 1, device=where.device)
        for chunk in where.split(CHUNK, dim=1):
            size, wide = chunk.shape
            end = min(int(chunk.max()) + 1, length)
            columns = torch.arange(end, device=where.device)
            at = (chunk[..., None] + far).flatten(1)  # [B, wide * steps]
            real = (columns <= chunk[..., None])[:, :, None].expand(-1, -1, self._steps, -1).flatten(1, 2)
            real = backbone.masks.visible(kind, real, at, columns)
            near = backbone.masks.visible(kind, sees, far, far)
            own = torch.eye(wide, dtype=torch.bool, device=where.device)
            own = (own[:, None, :, None] & near[None, :, None]).view(wide * self._steps, -1)
            self._chunks.append((end, torch.cat([real, own.expand(size, -1, -1)], dim=2)[:, None]))

    def over(self, keys: Tensor, values: Tensor) -> Any:
        """Attention of pseudo rows to one layer's real keys and values [B, KV, L, D] and to their own."""

        def attend(query: Tensor, key: Tensor, value: Tensor, scaling: float | None) -> Tensor:
            batch, heads, _, dim = query.shape
            groups = heads // key.shape[1]
            split = CHUNK * self._steps
            found = []
            for (end, mask), q, k, v in zip(
                self._chunks, query.split(split, 2), key.split(split, 2), value.split(split, 2), strict=True
            ):
                rows = q.shape[2]
                seen = F.scaled_dot_product_attention(
                    q.reshape(batch, -1, groups * rows, dim),
                    torch.cat([keys[:, :, :end].to(q.dtype), k.to(q.dtype)], dim=2),
                    torch.cat([values[:, :, :end].to(q.dtype), v.to(q.dtype)], dim=2),
                    attn_mask=mask.repeat(1, 1, groups, 1),
                    scale=scaling,
                )
                found.append(seen.reshape(batch, heads, rows, dim))
            return torch.cat(found, dim=2).transpose(1, 2).contiguous()

        return attend
