"""What drafters are built of: widths that do not split evenly into heads of 64."""

import pytest
import torch

from medusa_cli.drafters.blocks import DecoderLayer, HeadAttention, LayerCache, head_count


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


@pytest.mark.parametrize("hidden", [130, 480])
def test_layers_of_an_uneven_width_run_and_their_caches_agree(hidden: int) -> None:
    torch.manual_seed(0)
    layer, attention = DecoderLayer(hidden), HeadAttention(hidden)
    for weight in (layer.out.weight, layer.down.weight, attention.out.weight):
        torch.nn.init.normal_(weight, std=0.1)
    x, cache = torch.randn(1, 7, hidden), LayerCache()
    pieces = [layer(piece, cache) for piece in x.split([3, 1, 3], dim=1)]
    assert torch.allclose(torch.cat(pieces, dim=1), layer(x), atol=1e-5)
    assert attention(x).shape == x.shape
