"""Attention by lengths that are data, and the merge of its two parts, against attention under a mask."""

from typing import Any

import pytest
import torch
from torch import Tensor

from medusa_cli.decode.graph_step import tree_operations
from medusa_cli.drafters.layers import SlotRows
from medusa_cli.engine.attention import (
    behind,
    columns_read,
    fused,
    merged,
    reads_by_length,
    visible_behind,
)
from medusa_cli.model.masks import additive
from medusa_cli.tree.tensors import GrowingTrees
from tests.device import NAME, STANDS, Device, flash

SIZE, CAPACITY, DIM = 3, 48, 8
LENGTHS = [1, 17, 30]
FLASH = torch.ops.aten._flash_attention_forward.default
attention: Any = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu


def case(rows: int, heads: int, kv: int) -> tuple[Tensor, ...]:
    """Returns queries, a cache whose rows beyond a slot's new ones are not a number, its new rows, who sees whom."""
    torch.manual_seed(rows)
    query = torch.randn(SIZE * rows, heads, DIM)
    keys, values = torch.randn(2, SIZE * kv, CAPACITY, DIM).unbind()
    tree_mask = torch.rand(SIZE, rows, rows).tril() > 0.5
    tree_mask |= torch.eye(rows, dtype=torch.bool)
    columns = torch.tensor(LENGTHS)[:, None] + torch.arange(rows)
    slots = torch.arange(SIZE)[:, None]
    new = [
        x.view(SIZE, kv, CAPACITY, DIM).transpose(1, 2)[slots, columns].flatten(0, 1)
        for x in (keys, values)
    ]
    return query, keys, values, *new, tree_mask


def test_merge_of_prefix_and_tree_is_attention_to_both() -> None:
    query, key, value = (
        torch.randn(2, 4, 9, DIM),
        torch.randn(2, 4, 40, DIM),
        torch.randn(2, 4, 40, DIM),
    )
    mask = torch.zeros(9, 9).masked_fill(torch.rand(9, 9) > 0.6, -torch.inf).fill_diagonal_(0)
    parts = [
        attention(query, key[:, :, :31], value[:, :, :31]),
        attention(query, key[:, :, 31:], value[:, :, 31:], attn_mask=mask.expand(2, 4, -1, -1)),
    ]
    whole, _ = attention(
        query, key, value, attn_mask=torch.cat([torch.zeros(9, 31), mask], 1).expand(2, 4, -1, -1)
    )
    (far, far_sum), (near, near_sum) = parts
    assert torch.allclose(merged(far, far_sum, near, near_sum), whole, atol=1e-6)


@pytest.mark.parametrize(("heads", "kv"), [(4, 4), (4, 2), (6, 1)])
@pytest.mark.parametrize("rows", [1, 5, 16])
def test_columns_behind_the_lengths_are_not_read(rows: int, heads: int, kv: int) -> None:
    query, keys, values, new_keys, new_values, tree_mask = case(rows, heads, kv)
    lengths = torch.tensor(LENGTHS)
    whole = additive(visible_behind(lengths, tree_mask, CAPACITY), torch.float32).repeat(
        1, heads // kv, 1
    )[:, None]
    expected = fused(query, keys, values, whole, kv, DIM**-0.5)
    for slot, length in enumerate(LENGTHS):
        for cached in (keys, values):
            cached.view(SIZE, kv, CAPACITY, DIM)[slot, :, length + (rows == 1) :] = torch.nan
    among = additive(tree_mask, torch.float32).repeat(1, heads // kv, 1)[:, None]
    with Device():
        remote = [x.to(NAME) for x in (query, keys, values, new_keys, new_values, among)]
        reads = columns_read(lengths.to(NAME), rows, kv, CAPACITY)
        seen = behind(*remote, reads, DIM**-0.5).cpu()  # type: ignore[arg-type]
    assert torch.allclose(seen, expected, atol=1e-5)


@pytest.mark.parametrize("held", [[0, 7], [7]])
@pytest.mark.parametrize("rows", [1, 5])
def test_rows_of_a_drafters_layer_see_each_other_once_behind_an_empty_slot(
    rows: int, held: list[int]
) -> None:
    torch.manual_seed(rows)
    size = len(held)
    query, keys, values = torch.randn(3, size, 4, rows, DIM).unbind()
    lengths, positions = torch.tensor(held), torch.arange(rows).expand(size, -1)
    tree_mask = torch.ones(size, rows, rows, dtype=torch.bool).tril()
    cached = torch.randn(2, size, 4, CAPACITY, DIM)
    expected = SlotRows(lengths, positions, tree_mask).attend(query, keys, values, cached.clone())
    with Device():
        slots = SlotRows(*(x.to(NAME) for x in (lengths, positions, tree_mask)), empty=True)
        seen = slots.attend(*(x.to(NAME) for x in (query, keys, values, cached))).cpu()
    assert torch.allclose(seen, expected, atol=1e-5)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize(("heads", "kv", "dim"), [(32, 32, 128), (32, 8, 128), (9, 3, 64)])
def test_gpu_attends_by_lengths(heads: int, kv: int, dim: int, dtype: torch.dtype) -> None:
    assert reads_by_length(torch.device("cuda", 0), dtype, heads, kv, dim)


@pytest.mark.gpu
def test_gpu_grows_trees_by_kernels() -> None:
    growing, _ = tree_operations(torch.device("cuda", 0))
    assert growing is not GrowingTrees


def test_device_without_the_kernels_reads_under_a_mask(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = torch.float32, 4, 2, DIM
    assert not reads_by_length.__wrapped__(torch.device("cpu"), *sizes)
    with Device():
        assert reads_by_length.__wrapped__(torch.device(NAME), *sizes)
        for kernels in (
            {},
            {**STANDS, FLASH: lambda *args, **named: tuple(2 * x for x in flash(*args, **named))},
        ):
            monkeypatch.setattr("tests.device.STANDS", kernels)
            assert not reads_by_length.__wrapped__(torch.device(NAME), *sizes)
