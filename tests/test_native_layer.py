"""A drafter's decoder layer in the native library against the plain one."""

import copy
from typing import Any

import pytest
import torch

from medusa_cli.drafters.layer_rows import LayerRows
from medusa_cli.drafters.layers import DecoderLayer
from medusa_cli.engine import native_layer
from medusa_cli.engine.linear import packed_copy
from medusa_cli.engine.native_layer import FIRST_POSITIONS, NativeDecoderLayer
from medusa_cli.native import Format, RawMatrix


def busy_layer(size: int = 64, **own: Any) -> DecoderLayer:
    """Returns a decoder layer whose output differs from its input."""
    torch.manual_seed(0)
    layer = DecoderLayer(size, **own).requires_grad_(False)
    for weight in layer.parameters():
        weight.copy_(weight + 0.2 * torch.randn_like(weight))
    return layer


def with_packed_weights(layer: DecoderLayer) -> DecoderLayer:
    """Returns the layer with the numbers that its weights have in 4 bits."""
    layer = copy.deepcopy(layer)
    for name in ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"):
        linear = (layer.self_attn if name in layer.self_attn else layer.mlp)[name]
        raw = RawMatrix.of(linear.weight.numpy()).rounded(Format.Q4_1)
        linear.weight.copy_(torch.from_numpy(raw.floats())[:, : linear.in_features])
    return layer


LAYERS: list[dict[str, Any]] = [
    {},
    {"embeddings": True},
    {"embeddings": True, "norm_before_residual": True},
    {"heads": 3, "head_dim": 48, "wide": 96, "embeddings": True, "rope_theta": 500.0},
    {"wide": 100},
]


@pytest.mark.quick("own0", "own2")
@pytest.mark.parametrize("own", LAYERS)
def test_a_native_layer_computes_what_the_plain_one_does(own: dict[str, Any]) -> None:
    plain = with_packed_weights(busy_layer(**own))
    native = packed_copy(plain)
    assert isinstance(native, NativeDecoderLayer)
    extra = 1 + bool(own.get("embeddings"))

    def run(layer: Any) -> list[torch.Tensor]:
        """Reads prompts, drafts trees of two levels, forgets them, and reads further tokens.

        The caches grow, and the last positions are beyond the first rotary table.
        """
        torch.manual_seed(1)
        caches = [LayerRows() for _ in range(3)]
        counts = [5, 70, 1]
        places = [range(count) for count in counts]
        outs = [
            layer.extend(first, places, caches, *rest, last=True) for first, *rest in [rows(76)]
        ]
        ends = [[count] for count in counts]
        above = [torch.eye(2, dtype=torch.bool)] * 3
        first, *rest = rows(6)
        outs.append(layer.extend(first, [end * 2 for end in ends], caches, *rest, masks=above))
        below = torch.tensor([[1, 0, 1, 0, 0], [0, 1, 0, 1, 0], [0, 1, 0, 0, 1]]).bool()
        first, *rest = rows(9)
        later = [[end[0] + 1] * 3 for end in ends]
        outs.append(layer.extend(first, later, caches, *rest, masks=[below] * 3))
        # The second tree does not grow further.
        first, *rest = rows(3)
        counts = [1, 0, 2]
        last = [[end[0] + 2] * count for end, count in zip(ends, counts, strict=True)]
        lowest = torch.tensor([[1, 0, 1, 0, 0, 1, 0], [0, 1, 0, 1, 0, 0, 1]]).bool()
        masks = [lowest[:1, :6], lowest[:0, :5], lowest]
        outs.append(layer.extend(first, last, caches, *rest, masks=masks))
        for cache, (end,) in zip(caches, ends, strict=True):
            cache.truncate(end)
        first, *rest = rows(450)
        more = [range(end + FIRST_POSITIONS, end + FIRST_POSITIONS + 150) for (end,) in ends]
        outs.append(layer.extend(first, more, caches, *rest))
        return outs

    def rows(count: int) -> list[torch.Tensor]:
        return list(torch.randn(extra, count, 64))

    for ours, theirs in zip(run(native), run(plain), strict=True):
        assert ours.shape == theirs.shape
        assert (ours - theirs).norm() < 0.03 * theirs.norm()


def test_a_native_layer_gives_a_sequence_the_same_bits_in_a_batch() -> None:
    layer = packed_copy(busy_layer(embeddings=True))
    first, second, embedded, others = torch.randn(4, 20, 64)
    alone = layer.extend(first, [range(20)], [LayerRows()], embedded)
    places, caches = [range(20), range(20)], [LayerRows(), LayerRows()]
    batch = layer.extend(torch.cat([second, first]), places, caches, torch.cat([others, embedded]))
    assert torch.equal(batch[20:], alone)


def test_long_chains_are_added_in_pieces_with_the_same_bits(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    layer = packed_copy(busy_layer(embeddings=True))
    states, embedded = torch.randn(2, 45, 64)
    places = [range(5), range(40)]
    outputs, ends, caches = [], [], []
    for rows in (100, 8):
        monkeypatch.setattr(native_layer, "ROWS_AT_ONCE", rows)
        caches.append([LayerRows(), LayerRows()])
        outputs.append(layer.extend(states, places, caches[-1], embedded))
        fresh = [LayerRows(), LayerRows()]
        ends.append(layer.extend(states, places, fresh, embedded, last=True))
    assert torch.equal(*outputs) and torch.equal(*ends)
    assert torch.equal(ends[0], outputs[0][[4, 44]])
    for whole, in_pieces in zip(*caches, strict=True):
        assert whole.length == in_pieces.length


def test_a_layer_whose_sizes_fill_no_tiles_is_not_native() -> None:
    plain = busy_layer(48, heads=2, head_dim=24)
    packed = packed_copy(plain)
    assert isinstance(packed, DecoderLayer)
    states = torch.randn(5, 48)
    ours, theirs = (part.extend(states, [range(5)], [LayerRows()]) for part in (packed, plain))
    assert (ours - theirs).norm() < 0.2 * theirs.norm()


def test_rows_beyond_a_cache_are_refused() -> None:
    layer = packed_copy(busy_layer())
    cache = LayerRows()
    cache.room = lambda *own: [torch.zeros(1, 0, 16)] * 2  # type: ignore[method-assign]
    with pytest.raises(ValueError, match="internal"):
        layer.extend(torch.randn(2, 64), [range(2)], [cache])
