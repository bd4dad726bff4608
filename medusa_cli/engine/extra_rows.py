"""FIRP's extra rows: predicted states of future tokens that join a forward pass at a middle layer."""

from collections.abc import Callable
from dataclasses import dataclass
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch.nn import functional as F
from transformers.cache_utils import DynamicCache

from medusa_cli.device import upload
from medusa_cli.errors import OTHER_THAN_FIRP, UserError, first_line
from medusa_cli.model.backbone import Backbone, Layers, Unsupported, padded_pass
from medusa_cli.model.checks import FAULTS, PROBE, difference, probe_tokens
from medusa_cli.model.grouped_attention import Attend, cache_name

# The number of positions whose extra rows attend together; with more, more columns would be masked.
CHUNK = 32


@dataclass(frozen=True)
class ExtraRows:
    """Holds K maps [.., H] -> [.., H], which turn a row's state after some layer into the row's K extra rows.

    Extra row k (1 .. K) is maps[k - 1] of the row's state after the first layers[k - 1] layers. If the
    row is at position p, extra row k has the position p + k. It sees the columns that its row sees, the
    row's earlier extra rows and itself. Only the row's later extra rows see it. `layers` must not
    decrease (FIRP, section 3.2).
    """

    layers: tuple[int, ...]
    maps: tuple[Callable[[Tensor], Tensor], ...]

    def entering(self, layer: int) -> list[Callable[[Tensor], Tensor]]:
        """Returns the maps whose extra rows enter before a layer."""
        return [apply for at, apply in zip(self.layers, self.maps, strict=True) if at == layer]

    def step_mask(self, device: torch.device) -> Tensor:
        """Returns the bool mask [K, K] by which the extra rows of a row see each other."""
        return torch.ones(
            len(self.layers), len(self.layers), dtype=torch.bool, device=device
        ).tril()


class ExtraRowStates:
    """The extra rows of a pass over B sequences of n rows: K * m per sequence, made from rows `sources` [m]."""

    def __init__(self, rows: ExtraRows, sources: Tensor) -> None:
        self.rows = rows
        self.sources = sources

    def extend(self, tree_mask: Tensor, depth: Tensor) -> tuple[Tensor, Tensor]:
        """Returns the mask [B, n + K m, n + K m] and the depths [B, n + K m] of rows and extra rows."""
        m = len(self.sources)
        steps = len(self.rows.layers)
        count = steps * m
        # An extra row sees the rows that its source sees, and the source's extra rows up to itself.
        same_source = torch.eye(m, dtype=torch.bool, device=tree_mask.device)
        step_mask = self.rows.step_mask(tree_mask.device)
        among = (step_mask[:, None, :, None] & same_source[None, :, None]).view(count, count)
        of_sources = tree_mask[:, self.sources].repeat(1, steps, 1)
        below = torch.cat([of_sources, among.expand(len(tree_mask), -1, -1)], dim=2)
        above = F.pad(tree_mask, (0, count), value=False)
        depths = [depth[:, self.sources] + k for k in range(1, steps + 1)]
        return torch.cat([above, below], dim=1), torch.cat([depth, *depths], dim=1)

    def enter(self, layer: int, x: Tensor) -> Tensor:
        """Appends the extra rows that enter before a layer to the states x [B, rows, H]."""
        entering = [apply(x[:, self.sources]) for apply in self.rows.entering(layer)]
        return torch.cat([x, *entering], dim=1) if entering else x

    def split(self, states: Tensor) -> tuple[Tensor, Tensor]:
        """Splits final states [B, n + K m, H] into those of rows [B, n, H] and of extra rows [B, m, K, H]."""
        m = len(self.sources)
        steps = len(self.rows.layers)
        rows, extra = states.split([states.shape[1] - steps * m, steps * m], dim=1)
        return rows, extra.unflatten(1, (steps, m)).transpose(1, 2)


@dataclass(frozen=True)
class Trace:
    """The states [B, L, H] and each layer's keys and values [B, KV, L, D] in a pass over padded sequences.

    states: the states before each layer; states[-1] are those after the final norm.
    """

    states: tuple[Tensor, ...]
    keys: tuple[Tensor, ...]
    values: tuple[Tensor, ...]


@torch.no_grad()
def trace(backbone: Backbone, tokens: Tensor) -> Trace:
    """Runs a pass over tokens [B, L] and returns everything that extra rows need for training."""
    cache = DynamicCache()
    name = cache_name(type(backbone.model).forward)
    out = padded_pass(backbone, tokens, use_cache=True, output_hidden_states=True, **{name: cache})
    states = (*out.hidden_states[: backbone.num_layers], out.last_hidden_state)
    return Trace(states, *zip(*((layer.keys, layer.values) for layer in cache.layers), strict=True))


def extra_row_states(
    backbone: Backbone, traced: Trace, extra_rows: ExtraRows, rows: Tensor
) -> Tensor:
    """Returns the final states [P, K, H] of the extra rows of P positions in a trace.

    rows [P]: ascending indices among the trace's B * L positions, on the host. The states equal those
    of a forward pass. Gradients reach the maps through the layers above them.
    """
    parts = layers_one_by_one(backbone)
    size, length = traced.states[-1].shape[:2]
    device = traced.states[-1].device
    padded, places = _by_sequence(rows, size, length)  # [P], indices into B * W; [B, W]
    # Chunks of positions end at columns that the host must know.
    ends = [min(int(part.max()) + 1, length) for part in places.split(CHUNK, dim=1)]
    padded, positions = upload(padded, device), upload(places, device)
    # [B, W, steps, H]: `steps` grows where extra rows enter
    x = traced.states[-1].new_zeros(*positions.shape, 0, backbone.hidden_size)
    chunks: dict[str, list[tuple[int, Tensor]]] = {}
    for index, layer in enumerate(parts.layers):
        maps = extra_rows.entering(index)
        if maps:
            below = traced.states[index].gather(
                1, positions[..., None].expand(-1, -1, backbone.hidden_size)
            )
            x = torch.cat(
                [x, torch.stack([apply(below) for apply in maps], dim=2).to(x.dtype)], dim=2
            )
            chunks = {}
        steps = x.shape[2]
        if not steps:
            continue

        kind = backbone.masks.layer_type(index)
        if kind not in chunks:
            step_mask = extra_rows.step_mask(positions.device)[:steps, :steps]
            chunks[kind] = [
                (end, _chunk_mask(backbone, kind, part, step_mask, end))
                for end, part in zip(ends, positions.split(CHUNK, dim=1), strict=True)
            ]
        ahead_of = positions[..., None] + torch.arange(1, steps + 1, device=positions.device)
        ahead_of = ahead_of.clamp(max=backbone.max_positions - 1).flatten(1)  # [B, W * steps]
        out = layer(
            x.flatten(1, 2),
            attention_mask=_attend_to(
                chunks[kind], CHUNK * steps, traced.keys[index], traced.values[index]
            ),
            position_embeddings=parts.rotary(x, ahead_of, parts.kinds[index]),
            position_ids=ahead_of,
            use_cache=False,
        )
        x = out.view(x.shape)
    return parts.norm(x).flatten(0, 1)[padded]


_ONE_BY_ONE: WeakKeyDictionary[Backbone, Layers] = WeakKeyDictionary()


def layers_one_by_one(backbone: Backbone) -> Layers:
    """Returns the parts of a network whose layers can run one by one; raises UserError for any other network.

    Some networks scale their embeddings outside the layers, or pass more than states to the layers.
    A pass over a few tokens detects such networks.
    """
    if backbone not in _ONE_BY_ONE:
        try:
            parts = Layers(backbone.model)
            parts.refuse_special_layers()
            _compare_layers(backbone, parts)
        except torch.OutOfMemoryError:
            raise
        except (Unsupported, *FAULTS) as reason:
            raise UserError(
                f"the layers of the model {backbone.id!r} cannot be run one by one: {first_line(reason)}",
                OTHER_THAN_FIRP,
            ) from reason
        _ONE_BY_ONE[backbone] = parts
    return _ONE_BY_ONE[backbone]


@torch.no_grad()
def _compare_layers(backbone: Backbone, parts: Layers) -> None:
    """Raises Unsupported unless layers that run one by one reproduce the network's states for a few tokens."""
    tokens = probe_tokens(backbone.vocab_size, device=backbone.device)[None]
    positions = torch.arange(PROBE, device=backbone.device)[None]
    own = padded_pass(backbone, tokens).last_hidden_state
    masks = backbone.masks.causal(PROBE, backbone.device)
    x = parts.base.embed_tokens(tokens)
    for index, (layer, kind) in enumerate(zip(parts.layers, parts.kinds, strict=True)):
        x = layer(
            x,
            attention_mask=masks[backbone.masks.layer_type(index)][:, None],
            position_embeddings=parts.rotary(x, positions, kind),
            position_ids=positions,
            use_cache=False,
        )
    error = difference(parts.norm(x)[0].float(), own[0].float())
    if error > (1e-3 if own.dtype == torch.float32 else 0.1):
        raise Unsupported(
            f"layers run one by one give states that differ from its own by {error:.2%}"
        )


def _by_sequence(rows: Tensor, size: int, length: int) -> tuple[Tensor, Tensor]:
    """Groups flat rows [P] by sequence: returns their places [P] among size * W positions, and the positions [size, W].

    W is the largest number of rows in a sequence; other sequences are padded with zeros. Both tensors are on the host.
    """
    owner = rows // length
    counts = torch.bincount(owner, minlength=size)
    wide = int(counts.max())
    first = counts.cumsum(0) - counts
    index = owner * wide + torch.arange(len(rows)) - first[owner]
    return index, rows.new_zeros(size * wide).index_copy(0, index, rows % length).view(size, wide)


def _chunk_mask(
    backbone: Backbone, kind: str, positions: Tensor, step_mask: Tensor, end: int
) -> Tensor:
    """Returns the mask [B, 1, W * steps, end + W * steps] of the extra rows of positions [B, W].

    Of the first `end` real columns, an extra row sees those up to its source's position. Of the
    source's extra rows, it sees those that step_mask [steps, steps] marks. A dense mask over the extra
    rows of all positions would be mostly empty.
    """
    steps = len(step_mask)
    size, wide = positions.shape
    device = positions.device
    far = torch.arange(1, steps + 1, device=device)
    columns = torch.arange(end, device=device)
    real = (columns <= positions[..., None])[:, :, None].expand(-1, -1, steps, -1).flatten(1, 2)
    real = backbone.masks.visible(kind, real, (positions[..., None] + far).flatten(1), columns)
    own = torch.eye(wide, dtype=torch.bool, device=device)
    near = backbone.masks.visible(kind, step_mask, far, far)
    own = (own[:, None, :, None] & near[None, :, None]).view(wide * steps, -1)
    return torch.cat([real, own.expand(size, -1, -1)], dim=2)[:, None]


def _attend_to(
    chunks: list[tuple[int, Tensor]], split: int, keys: Tensor, values: Tensor
) -> Attend:
    """Returns an attention function for chunks of `split` extra rows.

    A chunk attends to real keys and values [B, KV, L, D] and to those of its own rows.
    """

    def attend(query: Tensor, key: Tensor, value: Tensor, scaling: float | None) -> Tensor:
        batch, heads, _, dim = query.shape
        groups = heads // key.shape[1]
        parts = (x.split(split, 2) for x in (query, key, value))
        attended = []
        for (end, mask), q, k, v in zip(chunks, *parts, strict=True):
            part = F.scaled_dot_product_attention(
                q.reshape(batch, -1, groups * q.shape[2], dim),
                torch.cat([keys[:, :, :end].to(q.dtype), k.to(q.dtype)], dim=2),
                torch.cat([values[:, :, :end].to(q.dtype), v.to(q.dtype)], dim=2),
                attn_mask=mask.repeat(1, 1, groups, 1),
                scale=scaling,
            )
            attended.append(part.reshape(batch, heads, -1, dim))
        return torch.cat(attended, dim=2).transpose(1, 2).contiguous()

    return attend
