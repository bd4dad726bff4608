"""Every way to multiply against torch's own product: exact weights, biases, sums, traces, what no kernel can hold."""

import gc
import weakref
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from medusa_cli.engine.jit import trace
from medusa_cli.engine.kernels import (
    Fp16Kernel,
    IntKernel,
    Kernel,
    PackedKernel,
    PlainKernel,
    can_half,
    can_pack,
    kernel_named,
    kernels_for,
    pack_linears,
)
from medusa_cli.model.backbone import Unsupported
from medusa_cli.model.load import has_bf16

CPU = torch.device("cpu")
HALF = pytest.mark.skipif(not can_half(), reason="this build of torch has no fp16 kernel")
PACK = pytest.mark.skipif(not can_pack(torch.float32, CPU), reason="this build of torch has no oneDNN")
BF16 = pytest.mark.skipif(not has_bf16(), reason="no bf16 kernels here")
KERNELS = [
    pytest.param(Fp16Kernel(), id="fp16-weights", marks=HALF),
    pytest.param(PackedKernel(torch.float32), id="fp32", marks=PACK),
    pytest.param(PlainKernel(torch.float32), id="plain"),
    pytest.param(PackedKernel(torch.bfloat16), id="bf16", marks=BF16),
    pytest.param(PlainKernel(torch.bfloat16), id="plain-bf16"),
    pytest.param(IntKernel(8), id="int8", marks=BF16),
    pytest.param(IntKernel(4), id="int4", marks=BF16),
]
# How far a product may be from that of the same weights in fp64, as a share of its size: the rows' own rounding.
TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 6e-3}
# What rounding weights of a normal distribution costs.
ROUNDED = {"int8": 0.02, "int4": 0.12}


def weight_of(rows: int = 48, wide: int = 64, seed: int = 0) -> Tensor:
    """Weights that bf16 and fp16 hold alike."""
    torch.manual_seed(seed)
    return torch.randn(rows, wide).to(torch.bfloat16).float()


def off(found: Tensor, expected: Tensor) -> float:
    return float((found.double() - expected.double()).norm() / expected.double().norm())


def allowed(kernel: Kernel) -> float:
    return ROUNDED.get(kernel.name, TOLERANCE[kernel.rows])


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("rows", [1, 6, 7, 40])
def test_a_product_is_torchs_own(kernel: Kernel, biased: bool, rows: int) -> None:
    weight, bias = weight_of(), torch.randn(48).to(torch.bfloat16).float() if biased else None
    x, other = (torch.randn(rows, wide).to(kernel.rows) for wide in (64, 48))
    product = kernel.pack(weight, bias)
    expected = F.linear(x.double(), weight.double(), None if bias is None else bias.double())
    found = product(x)
    assert found.dtype == kernel.rows and found.shape == (rows, 48)
    assert off(found, expected) < allowed(kernel)
    before = other.clone()
    assert off(product.plus(x, other), expected + other.double()) < allowed(kernel)
    assert torch.equal(before, other)  # what is added stays what it was
    assert off(product(x), expected) < allowed(kernel)


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("shape", [(1, 64), (3, 64), (2, 3, 64)])
def test_rows_may_be_of_several_sequences(kernel: Kernel, shape: tuple[int, ...]) -> None:
    product, x = kernel.pack(weight_of()), torch.randn(shape).to(kernel.rows)
    found = product(x)
    assert found.shape == (*shape[:-1], 48)
    flat = product(x.reshape(-1, 64))
    assert off(found.reshape(-1, 48), flat) < TOLERANCE[kernel.rows]


@pytest.mark.parametrize("kernel", KERNELS)
def test_layers_on_the_same_rows_become_one_product(kernel: Kernel) -> None:
    torch.manual_seed(0)
    layers = [nn.Linear(64, wide, bias=True).to(torch.bfloat16) for wide in (32, 16, 16)]
    x = torch.randn(5, 64).to(kernel.rows)
    expected = torch.cat([F.linear(x.double(), one.weight.double(), one.bias.double()) for one in layers], dim=-1)
    assert off(kernel.join(layers)(x), expected) < allowed(kernel)


def test_layers_that_cannot_be_joined_are_said_to_be() -> None:
    class Quantised(nn.Linear):
        pass

    with pytest.raises(Unsupported, match="Quantised"):
        PlainKernel(torch.float32).join([Quantised(8, 8)])
    with pytest.raises(Unsupported, match="only some of its fused layers have a bias"):
        PlainKernel(torch.float32).join([nn.Linear(8, 8), nn.Linear(8, 8, bias=False)])


@HALF
@pytest.mark.parametrize("power", [-100, -40, -20, -9, 0, 9, 13])
def test_fp16_weights_hold_those_of_bf16_of_any_size_to_the_last_bit(power: int) -> None:
    """Exact weights: only the order of the sums differs, by as much as fp32 rounds."""
    weight = weight_of() * 2.0**power
    assert torch.equal(weight, weight.to(torch.bfloat16).float())
    bias, x = torch.randn(48) * 2.0**power, torch.randn(5, 64)
    product = Fp16Kernel().pack(weight, bias)
    assert off(product(x), F.linear(x.double(), weight.double(), bias.double())) < TOLERANCE[torch.float32]
    # One weight at a time: a unit row reads a column, and nothing may be lost of it.
    columns = Fp16Kernel().pack(weight)(torch.eye(64))
    assert torch.equal(columns.T, weight)


@HALF
@pytest.mark.parametrize("largest", [2.0**16, 2.0**100])
def test_a_weight_that_no_fp16_can_hold_stays_in_fp32(largest: float) -> None:
    """Huge ones are scaled down; huge and tiny ones side by side have no scale that suits both."""
    weight = weight_of()
    halved, x = Fp16Kernel().pack(weight), torch.randn(5, 64)
    weight[0, 0], weight[1, 1] = largest, 2.0**-30
    product = Fp16Kernel().pack(weight)
    assert product.nbytes == weight.nbytes == 2 * halved.nbytes
    expected = F.linear(x.double(), weight.double())
    assert off(product(x), expected) < TOLERANCE[torch.float32]
    assert torch.equal(product(torch.eye(64)).T, weight)


@HALF
@pytest.mark.parametrize("weight", [torch.zeros(8, 16), torch.full((8, 16), 65504.0)], ids=["zeros", "largest"])
def test_zeros_and_the_largest_weights_of_fp16_are_held(weight: Tensor) -> None:
    product = Fp16Kernel().pack(weight)
    assert product.nbytes == weight.nbytes // 2 and torch.equal(product(torch.eye(16)).T, weight)


@HALF
def test_fp32_weights_that_bf16_could_not_hold_lose_nothing() -> None:
    torch.manual_seed(0)
    weight = torch.randn(48, 64)
    product = Fp16Kernel().pack(weight)
    assert product.nbytes == weight.nbytes and torch.equal(product(torch.eye(64)).T, weight)


class _Two(nn.Module):
    """Products in a row, as layers have them, the second added to what went in."""

    def __init__(self, kernel: Kernel) -> None:
        super().__init__()
        self.wide = kernel.pack(weight_of(64, 64, 1), torch.arange(64.0) / 64)
        self.back = kernel.pack(weight_of(64, 64, 2))

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.back.plus(F.silu(self.wide(x)), x)
        return found


@pytest.mark.parametrize("kernel", KERNELS)
def test_a_traced_product_is_the_untraced_one_for_any_number_of_rows(kernel: Kernel) -> None:
    if not kernel.exact:
        pytest.skip("rounded kernels choose by the number of rows, so each number has a trace of its own")
    module = _Two(kernel).eval()
    with torch.inference_mode():
        made = trace(module, (torch.randn(3, 64).to(kernel.rows),), [module])
        assert made is not None
        for rows in (1, 3, 6, 33):
            x = torch.randn(rows, 64).to(kernel.rows)
            assert torch.equal(made(x), module(x))


@pytest.mark.parametrize("kernel", KERNELS)
def test_a_trace_of_so_many_rows_serves_rows_of_that_number(kernel: Kernel) -> None:
    module = _Two(kernel).eval()
    with torch.inference_mode():
        for rows in (2, 20):
            made = trace(module, (torch.randn(rows, 64).to(kernel.rows),), [module])
            assert made is not None
            x = torch.randn(rows, 64).to(kernel.rows)
            assert torch.equal(made(x), module(x))


def test_a_trace_that_nobody_has_any_more_lets_its_weights_go() -> None:
    array = np.ones((64, 64), dtype=np.float32)
    held, weight = weakref.ref(array), nn.Buffer(torch.from_numpy(array))
    made = trace(partial(F.linear, weight=weight), (torch.randn(2, 64),), [])
    del array, weight
    assert made is not None and made(torch.ones(3, 64))[2, 0] == 64 and held() is not None
    del made
    gc.collect()
    assert held() is None


@PACK
def test_what_cannot_be_traced_is_no_error() -> None:
    class Odd(_Two):
        def forward(self, x: Tensor) -> Any:
            raise RuntimeError("no graph")

    module = Odd(PackedKernel(torch.float32))
    assert trace(module, (torch.randn(3, 64),), [module]) is None
    assert module.wide.slot.tensor is module.wide.slot.own  # left as it was


@pytest.mark.parametrize("kernel", KERNELS)
def test_a_modules_linear_layers_give_way_to_a_kernel(kernel: Kernel) -> None:
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(64, 64), nn.SiLU(), nn.Sequential(nn.Linear(64, 32, bias=False)))
    for weight in module.parameters():
        weight.data = weight.data.to(torch.bfloat16).float()
    x = torch.randn(4, 64).to(kernel.rows)
    expected = module(x.float()).detach()
    pack_linears(module, kernel)
    plain = [one for one in module.modules() if type(one) is nn.Linear]
    if isinstance(kernel, PlainKernel):
        assert len(plain) == 2  # torch's own product is what they do already
    else:
        assert not plain and off(module(x), expected) < 2 * allowed(kernel)


def test_kernels_are_named_and_the_first_of_a_type_is_exact() -> None:
    for rows in (torch.float32, torch.bfloat16, torch.float16):
        for kernel in kernels_for(rows, CPU):
            assert kernel.exact and kernel.rows == rows
            assert type(kernel_named(kernel.name, rows)) is type(kernel)
    assert [kernel.name for kernel in kernels_for(torch.float16, CPU)] == ["plain"]
    assert kernel_named("int4", torch.bfloat16).name == "int4"
    with pytest.raises(KeyError):
        kernel_named("int3", torch.bfloat16)


def test_without_instructions_for_it_bf16_is_plain(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("medusa_cli.engine.kernels.has_bf16", lambda: False)
    assert [kernel.name for kernel in kernels_for(torch.bfloat16, CPU)] == ["plain"]
    with pytest.raises(Unsupported, match="no packed kernel for bf16 on cpu"):
        PackedKernel(torch.bfloat16).pack(weight_of())
