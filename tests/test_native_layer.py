"""A drafter's decoder layer in the native library against the plain one."""

import copy
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from medusa_cli.drafters.eagle import _extend_ancestor_masks
from medusa_cli.drafters.expansion import Frontier
from medusa_cli.drafters.layer_rows import LayerRows
from medusa_cli.drafters.layers import DecoderLayer
from medusa_cli.engine import native_layer
from medusa_cli.engine.linear import packed_copy, packed_linear
from medusa_cli.engine.native_layer import FIRST_POSITIONS, NativeDecoderLayer
from medusa_cli.engine.native_levels import NativeLevels
from medusa_cli.engine.native_linear import NativeEmbedding, NativeLinear
from medusa_cli.native import Format, PackedMatrix, RawMatrix


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
        """Reads prompts, then further tokens whose positions are beyond the first rotary table."""
        torch.manual_seed(1)
        caches = [LayerRows() for _ in range(3)]
        counts = [5, 70, 1]
        places = [range(count) for count in counts]
        outs = [
            layer.extend(first, places, caches, *rest, last=True) for first, *rest in [rows(76)]
        ]
        first, *rest = rows(450)
        more = [range(end + FIRST_POSITIONS, end + FIRST_POSITIONS + 150) for end in counts]
        outs.append(layer.extend(first, more, caches, *rest))
        return outs

    def rows(count: int) -> list[torch.Tensor]:
        return list(torch.randn(extra, count, 64))

    for ours, theirs in zip(run(native), run(plain), strict=True):
        assert ours.shape == theirs.shape
        assert (ours - theirs).norm() < 0.04 * theirs.norm()


@pytest.mark.parametrize("own", [own for own in LAYERS if own.get("embeddings")])
def test_native_levels_compute_what_the_plain_layer_does(own: dict[str, Any]) -> None:
    plain = with_packed_weights(busy_layer(**own))
    native = packed_copy(plain)
    matrix = PackedMatrix.pack(RawMatrix.of(torch.randn(40, 64).numpy()))
    sizes = {"hidden": 64, "vocab": 40}
    description = SimpleNamespace(embedding_scale=1.5, sizes=sizes)
    packed = NativeEmbedding(SimpleNamespace(embedding=matrix, description=description))  # type: ignore[arg-type]
    table = torch.nn.Embedding(40, 64, _weight=packed(torch.arange(40))).requires_grad_(False)
    head = packed_linear(torch.randn(24, 64))
    norm = torch.nn.RMSNorm(64, eps=1e-5).requires_grad_(False)
    norm.weight.uniform_(0.5, 1.5)
    assert isinstance(native, NativeDecoderLayer)
    assert isinstance(head, NativeLinear)
    ids = torch.randperm(40)[:24]
    # The second tree does not grow in the last level.
    levels = [
        ([2, 2, 2], [0, 0, 1, 1, 2, 2]),
        ([3, 3, 3], [0, 1, 1, 2, 3, 3, 4, 5, 5]),
        ([1, 0, 2], [0, 6, 8]),
    ]
    drafted = [torch.randint(0, 40, (len(parents),)) for _, parents in levels]
    # The positions are beyond the first rotary table.
    ends = [5, 70, FIRST_POSITIONS - 1]
    places = [range(5), range(70), [ends[2] - 1]]
    prompt, embedded = torch.randn(2, 76, 64)

    def start(layer: Any) -> tuple[torch.Tensor, list[LayerRows]]:
        caches = [LayerRows() for _ in ends]
        return layer.extend(prompt, places, caches, embedded, last=True), caches

    expected = []
    states, caches = start(plain)
    masks = [torch.zeros(1, 0, dtype=torch.bool) for _ in ends]
    for depth, ((counts, parents), tokens) in enumerate(zip(levels, drafted, strict=True)):
        masks = _extend_ancestor_masks(masks, Frontier(counts, torch.tensor(parents), tokens))
        at = [[end + depth] * count for end, count in zip(ends, counts, strict=True)]
        states = plain.extend(states[parents], at, caches, table(tokens), masks=masks)
        expected.append(states)

    for embedding in (table, packed):
        ours = NativeLevels(native, head, norm, ids, embedding, *start(native), ends)
        for depth, (level, tokens) in enumerate(zip(levels, drafted, strict=True), 1):
            scores, best = ours.extend(depth, *level, tokens.tolist(), 3, None)
            assert (ours.states - expected[depth - 1]).norm() < 0.06 * expected[depth - 1].norm()
            again, rows = head.guess(ours.states, 3, None, norm)
            assert torch.equal(scores, again)
            assert torch.equal(best, ids[rows])
    # The vocabulary lacks the token.
    with pytest.raises(ValueError, match="internal"):
        ours.extend(4, [1, 0, 0], [0], [40], 3, None)


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
    assert torch.equal(*outputs)
    assert torch.equal(*ends)
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
