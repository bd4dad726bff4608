"""Losses by blocks of rows: the same sums and gradients as over all rows at once."""

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from medusa_cli.training.block_loss import loss_by_blocks


def kl_to(teacher: Tensor) -> object:
    def loss(scores: Tensor, block: slice) -> tuple[Tensor, Tensor]:
        aim = teacher[block]
        return F.kl_div(scores, aim, reduction="sum", log_target=True), scores.exp() - aim.exp()

    return loss


@pytest.mark.parametrize("rows", [1, 4, 64])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_loss_by_blocks_is_that_of_all_rows(rows: int, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    linear = nn.Linear(6, 30).to(dtype)
    hidden = torch.randn(13, 6, dtype=dtype, requires_grad=True)
    teacher = torch.randn(13, 30).log_softmax(-1)
    plain = F.kl_div(linear(hidden).float().log_softmax(-1), teacher, reduction="sum", log_target=True)
    expected = torch.autograd.grad(plain * 3, [hidden, *linear.parameters()])
    found = loss_by_blocks(kl_to(teacher), linear, hidden, list(linear.parameters()), rows)  # type: ignore[arg-type]
    near = 1e-5 if dtype == torch.float32 else 3e-2
    assert found.item() == pytest.approx(plain.item(), rel=near)
    got = torch.autograd.grad(found * 3, [hidden, *linear.parameters()])
    for one, other in zip(got, expected, strict=True):
        assert one.dtype == other.dtype
        torch.testing.assert_close(one, other, rtol=near, atol=near * float(other.abs().max()))


def test_what_does_not_learn_gets_no_gradient() -> None:
    torch.manual_seed(0)
    linear = nn.Linear(6, 30)
    linear.weight.requires_grad_(False)
    hidden, teacher = torch.randn(9, 6), torch.randn(9, 30).log_softmax(-1)
    loss_by_blocks(kl_to(teacher), linear, hidden, list(linear.parameters()), 4).backward()  # type: ignore[arg-type]
    assert linear.weight.grad is None and linear.bias.grad is not None
    with torch.no_grad():
        found = loss_by_blocks(kl_to(teacher), linear, hidden, list(linear.parameters()), 4)  # type: ignore[arg-type]
    assert not found.requires_grad and float(found) > 0
