"""Engines over rounded weights: what they stand for, how far off they are, where they cannot be had."""

from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from medusa_cli.decode import Stats
from medusa_cli.drafters import MedusaHeads, load_drafter
from medusa_cli.engine import attach
from medusa_cli.engine.kernels import BITS, FEW_ROWS, IntKernel, round_weight
from medusa_cli.errors import UsageError
from medusa_cli.model import Backbone
from medusa_cli.model.load import has_bf16
from medusa_cli.tree import Tree
from tests.helpers import forward, generate, tiny_backbone, tiny_model, tiny_tokenizer

pytestmark = pytest.mark.skipif(not has_bf16(), reason="no bf16 kernels here")


def off(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float((found.float() - expected.float()).norm() / expected.float().norm())


@pytest.mark.parametrize("bits", [8, 4])
def test_a_rounded_weight_is_near_and_its_product_is_that_of_what_it_stands_for(bits: int) -> None:
    torch.manual_seed(0)
    weight = torch.randn(48, 96).to(torch.bfloat16)
    made = round_weight(weight, bits)
    assert made is not None
    restored, product = made[2], IntKernel(bits).pack(weight)
    spread = weight.float().unflatten(1, (-1, 32)).amax(-1) - weight.float().unflatten(1, (-1, 32)).amin(-1)
    step = weight.float().abs().amax(1, keepdim=True) / 127 if bits == 8 else spread.repeat_interleave(32, 1) / 15
    # Half a step of rounding, and the rounding to bf16 of scales, offsets and results.
    assert ((restored.float() - weight.float()).abs() <= 0.5 * step + 0.02 * weight.float().abs().amax()).all()
    x = torch.randn(5, 96).to(torch.bfloat16)
    assert off(product(x), x.float() @ restored.float().T) < 1e-2


@pytest.mark.parametrize("bits", [8, 4])
def test_few_rows_and_many_compute_the_same(bits: int) -> None:
    torch.manual_seed(0)
    layers = [nn.Linear(64, 32, bias=True).to(torch.bfloat16) for _ in range(2)]
    fused = IntKernel(bits).join(layers)
    x, other = torch.randn(1, 40, 64).to(torch.bfloat16), torch.randn(1, 40, 64).to(torch.bfloat16)
    many, summed = fused(x), fused.plus(x, other)
    for rows in (1, FEW_ROWS[bits], FEW_ROWS[bits] + 1):
        assert off(fused(x[:, :rows]), many[:, :rows]) < 2e-2
        assert off(fused.plus(x[:, :rows], other[:, :rows]), summed[:, :rows]) < 2e-2
    assert (
        1e-4
        < off(many, F.linear(x, torch.cat([one.weight for one in layers]), torch.cat([one.bias for one in layers])))
        < 0.2
    )


def test_shapes_without_a_kernel_keep_their_weights() -> None:
    torch.manual_seed(0)
    weight, x = torch.randn(30, 40).to(torch.bfloat16), torch.randn(3, 40).to(torch.bfloat16)
    assert round_weight(weight, 4) is None and round_weight(weight, 8) is not None
    kept = IntKernel(4).pack(weight)
    assert kept.nbytes == weight.nbytes == 2 * IntKernel(8).pack(weight).nbytes
    assert off(kept(x), F.linear(x.float(), weight.float())) < 5e-3  # the rows' own rounding alone


def test_the_last_matrix_keeps_8_bits() -> None:
    torch.manual_seed(0)
    weight, x = torch.randn(64, 64).to(torch.bfloat16), torch.randn(3, 64).to(torch.bfloat16)
    eight, four = IntKernel(8).pack(weight), IntKernel(4).pack(weight)
    assert torch.equal(IntKernel(4).last(weight)(x), eight(x)) and not torch.equal(four(x), eight(x))
    assert (four.nbytes, eight.nbytes) == (weight.nbytes // 4, weight.nbytes // 2)


@pytest.mark.parametrize("engine", ["int8", "int4"])
def test_a_model_decodes_over_rounded_weights(engine: str, tmp_path: Path) -> None:
    network = tiny_model("llama").to(torch.bfloat16)
    for name, layer in network.named_modules():
        if isinstance(layer, nn.Linear):
            layer.weight.data = round_weight(layer.weight.data, 8 if name == "lm_head" else BITS[engine])[2]
    expected = Backbone(network, tiny_tokenizer())
    attach(expected)
    backbone = Backbone(tiny_model("llama").to(torch.bfloat16), tiny_tokenizer())
    attach(backbone, engine)
    assert backbone.engine.kernel.name == engine and backbone.engine.weight_bytes < expected.engine.weight_bytes
    for rows in (3, 40):
        ids = torch.arange(5, 5 + rows)
        assert off(forward(backbone, ids).hidden, forward(expected, ids).hidden) < 5e-2
    MedusaHeads.create(backbone, 2, 1, "own").save(tmp_path, {})
    heads = load_drafter(tmp_path, backbone)
    assert heads.kernel.name == "int8" and load_drafter(tmp_path, expected).kernel.exact
    steps = list(generate(backbone, heads, Tree.dense([2, 1]), [5, 9, 20], max_new_tokens=20, stop_ids=()))
    assert Stats.of(steps).tokens == 20


def test_what_cannot_be_rounded_is_refused() -> None:
    with pytest.raises(UsageError, match="quantize int8 needs bf16 on a CPU, not float32"):
        tiny_backbone(engine="int8")
