"""What drafters are built of: widths that do not split evenly into heads of 64, caches of their own."""

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from medusa_cli.drafters import layers as blocks
from medusa_cli.drafters.layers import DecoderLayer, HeadAttention, LayerCache, head_count, rotary, rotated


@pytest.mark.parametrize(
    ("hidden", "heads"), [(576, 9), (4096, 64), (3584, 56), (960, 15), (32, 1), (96, 1), (480, 6), (130, 1), (1000, 10)]
)
def test_heads_are_those_of_64_where_they_fit_and_else_the_nearest_wider_ones(hidden: int, heads: int) -> None:
    assert head_count(hidden, 64) == heads


def test_what_fitted_is_as_it_was() -> None:
    for hidden in range(2, 8194, 2):
        plain = max(1, hidden // 64)
        if hidden % (2 * plain) == 0:
            assert head_count(hidden, 64) == plain


def extended(layer: DecoderLayer, x: Tensor, cache: LayerCache, first: int) -> Tensor:
    return layer.extend(x, cache, first, lambda what, compute, *inputs: compute(*inputs))


@pytest.mark.parametrize("hidden", [130, 480])
def test_layers_of_an_uneven_width_run_and_their_caches_agree(hidden: int) -> None:
    torch.manual_seed(0)
    layer, attention = DecoderLayer(hidden), HeadAttention(hidden)
    for weight in (layer.out.weight, layer.down.weight, attention.out.weight):
        torch.nn.init.normal_(weight, std=0.1)
    x, cache = torch.randn(1, 7, hidden), LayerCache()
    pieces = [extended(layer, one, cache, first) for one, first in zip(x[0].split([3, 1, 3]), (0, 3, 4), strict=True)]
    assert torch.allclose(torch.cat(pieces), layer(x)[0], atol=1e-5)
    assert attention(x).shape == x.shape


def test_a_long_prompt_is_run_in_pieces_and_sees_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    layer, x = DecoderLayer(32, 8), torch.randn(1, 23, 32)
    torch.nn.init.normal_(layer.out.weight)
    monkeypatch.setattr(blocks, "PIECE", 5)
    assert torch.allclose(extended(layer, x[0], LayerCache(), 0), layer(x)[0], atol=1e-5)


def test_caches_that_were_cut_off_in_the_midst_of_a_draft_end_together() -> None:
    layer, caches = DecoderLayer(32, 8), [LayerCache(), LayerCache()]
    for cache, rows in zip(caches, (9, 6), strict=True):
        extended(layer, torch.randn(rows, 32), cache, 0)
    assert blocks.truncated(caches, 8, 8) == 6 and [cache.length for cache in caches] == [6, 6]


def test_a_cache_that_is_cut_goes_on_from_there_and_one_with_a_gap_sees_what_is_left() -> None:
    torch.manual_seed(0)
    layer, cache, x = DecoderLayer(32, 8), LayerCache(), torch.randn(1, 9, 32)
    torch.nn.init.normal_(layer.out.weight)
    extended(layer, x[0, :3], cache, 0)
    extended(layer, x[0, 5:], cache, 5)  # nothing is known of positions 3 and 4
    cache.truncate(7)
    assert cache.length == 5
    again = extended(layer, x[0, 7:], cache, 7)
    # The same rows in one pass: rotary embedding sees how far apart they are.
    mask = torch.ones(9, 9).tril().bool()
    mask[5:, 3:5] = False
    q, k, v = layer.qkv(layer.attention_norm(x)).unflatten(-1, (3, layer.heads, -1)).permute(2, 0, 3, 1, 4)
    turn = rotary(torch.arange(9), 8, layer.rope_theta)
    seen = F.scaled_dot_product_attention(rotated(q, *turn), rotated(k, *turn), v, attn_mask=mask)
    assert torch.allclose(again, (x + layer.out(seen.transpose(1, 2).flatten(-2)))[0, 7:], atol=1e-4)
    cache.truncate(0)
    assert cache.length == 0 and torch.allclose(extended(layer, x[0], cache, 0), layer(x)[0], atol=1e-5)
