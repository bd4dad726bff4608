"""Every kernel against torch's own product in fp64: exact weights, biases, sums, rounding, traces, refusals."""

import gc
import weakref
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Kind
from gguf import dequantize, quantize
from torch import Tensor, nn
from torch.nn import functional as F

from medusa_cli.decode import Stats
from medusa_cli.drafters import MedusaHeads, load_drafter
from medusa_cli.engine import attach
from medusa_cli.engine.jit import trace
from medusa_cli.engine.kernels import (
    BITS,
    FEW_ROWS,
    Kernel,
    can_pack,
    dequantize_int4,
    has_fp16_weights,
    kernels_for,
    pack_linears,
    read_blocks,
    round_to_int4,
    round_to_int8,
)
from medusa_cli.errors import UsageError
from medusa_cli.model import Backbone
from medusa_cli.model.backbone import Unsupported
from medusa_cli.model.load import has_bf16
from medusa_cli.tree import Tree
from tests.helpers import PROMPT, forward, generate, tiny_backbone, tiny_model, tiny_tokenizer

CPU = torch.device("cpu")
FP16 = pytest.mark.skipif(not has_fp16_weights(), reason="this build of torch has no fp16 kernel")
PACK = pytest.mark.skipif(not can_pack(torch.float32, CPU), reason="this build of torch has no oneDNN")
BF16 = pytest.mark.skipif(not has_bf16(), reason="no bf16 kernels here")
KERNELS = [
    pytest.param(Kernel("fp16-weights"), id="fp16-weights", marks=FP16),
    pytest.param(Kernel("fp32"), id="fp32", marks=PACK),
    pytest.param(Kernel("plain", torch.float32), id="plain"),
    pytest.param(Kernel("bf16"), id="bf16", marks=BF16),
    pytest.param(Kernel("plain", torch.bfloat16), id="plain-bf16"),
    pytest.param(Kernel("int8"), id="int8", marks=BF16),
    pytest.param(Kernel("int4"), id="int4", marks=BF16),
]
# The allowed difference from the product in fp64, relative to its size: by the type of rows, or for rounded weights.
TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 6e-3}
ROUNDED = {"int8": 0.02, "int4": 0.12}


def weight_of(rows: int = 48, wide: int = 64, seed: int = 0) -> Tensor:
    """Returns weights that bf16 and fp16 hold exactly."""
    torch.manual_seed(seed)
    return torch.randn(rows, wide).to(torch.bfloat16).float()


def rounded(weight: Tensor, bits: int) -> Tensor:
    """Returns the bf16 weights that a kernel of few bits multiplies by."""
    if bits == 4:
        return dequantize_int4(*round_to_int4(weight))
    values, scale = round_to_int8(weight)
    return (values * scale[:, None].float()).to(torch.bfloat16)


def error(y: Tensor, expected: Tensor) -> float:
    return float((y.double() - expected.double()).norm() / expected.double().norm())


def allowed(kernel: Kernel) -> float:
    return ROUNDED.get(kernel.name, TOLERANCE[kernel.rows])


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("rows", [1, 6, 7, 40])
def test_product_equals_torchs(kernel: Kernel, biased: bool, rows: int) -> None:
    weight, bias = weight_of(), torch.randn(48).to(torch.bfloat16).float() if biased else None
    x = torch.randn(rows, 64).to(kernel.rows)
    product, before = kernel.pack(weight, bias), x.clone()
    expected = F.linear(x.double(), weight.double(), None if bias is None else bias.double())
    y = product(x)
    assert y.dtype == kernel.rows and y.shape == (rows, 48)
    assert error(y, expected) < allowed(kernel)
    assert torch.equal(before, x) and error(product(x), expected) < allowed(kernel)  # inputs stay as they were


@pytest.mark.parametrize("kernel", KERNELS)
def test_rows_may_be_of_several_sequences(kernel: Kernel) -> None:
    product, x = kernel.pack(weight_of()), torch.randn(2, 3, 64).to(kernel.rows)
    y = product(x)
    assert y.shape == (2, 3, 48)
    assert error(y.reshape(-1, 48), product(x.reshape(-1, 64))) < TOLERANCE[kernel.rows]


@pytest.mark.parametrize("kernel", KERNELS)
def test_joined_layers_are_one_product(kernel: Kernel) -> None:
    torch.manual_seed(0)
    layers = [nn.Linear(64, wide, bias=True).to(torch.bfloat16) for wide in (32, 16, 16)]
    x = torch.randn(5, 64).to(kernel.rows)
    parts = [F.linear(x.double(), layer.weight.double(), layer.bias.double()) for layer in layers]
    assert error(kernel.join(layers)(x), torch.cat(parts, dim=-1)) < allowed(kernel)


def test_layers_that_cannot_be_joined_are_refused() -> None:
    class Quantised(nn.Linear):
        pass

    with pytest.raises(Unsupported, match="Quantised"):
        Kernel("plain", torch.float32).join([Quantised(8, 8)])
    with pytest.raises(Unsupported, match="bias"):
        Kernel("plain", torch.float32).join([nn.Linear(8, 8), nn.Linear(8, 8, bias=False)])


@FP16
@pytest.mark.parametrize("power", [-100, -20, 0, 9, 13])
def test_fp16_weights_hold_bf16_weights_of_any_size_exactly(power: int) -> None:
    weight = weight_of() * 2.0**power
    bias, x = torch.randn(48) * 2.0**power, torch.randn(5, 64)
    product = Kernel("fp16-weights").pack(weight, bias)
    assert error(product(x), F.linear(x.double(), weight.double(), bias.double())) < TOLERANCE[torch.float32]
    assert torch.equal(Kernel("fp16-weights").pack(weight)(torch.eye(64)).T, weight)


@FP16
@pytest.mark.parametrize("largest", [2.0**16, 2.0**100])
def test_fp16_weights_keep_in_fp32_a_matrix_that_fp16_cannot_hold(largest: float) -> None:
    weight = weight_of()
    weight[0, 0], weight[1, 1] = largest, 2.0**-30
    fine = torch.randn(48, 64)
    for matrix in (weight, fine):
        product = Kernel("fp16-weights").pack(matrix)
        assert product.nbytes == matrix.nbytes and torch.equal(product(torch.eye(64)).T, matrix)


@FP16
@pytest.mark.parametrize("weight", [torch.zeros(8, 16), torch.full((8, 16), 65504.0)], ids=["zeros", "largest"])
def test_fp16_weights_hold_zeros_and_the_largest_number(weight: Tensor) -> None:
    product = Kernel("fp16-weights").pack(weight)
    assert product.nbytes == weight.nbytes // 2 and torch.equal(product(torch.eye(16)).T, weight)


class Block(nn.Module):
    """Two products in a row, the second added to the input."""

    def __init__(self, kernel: Kernel) -> None:
        super().__init__()
        self.wide = kernel.pack(weight_of(64, 64, 1), torch.arange(64.0) / 64)
        self.back = kernel.pack(weight_of(64, 64, 2))

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.back(F.silu(self.wide(x))) + x
        return y


@pytest.mark.parametrize("kernel", KERNELS)
def test_traced_products_equal_untraced_ones(kernel: Kernel) -> None:
    module = Block(kernel).eval()
    with torch.inference_mode():
        for traced_rows in (3, 20):
            graph = trace(module, (torch.randn(traced_rows, 64).to(kernel.rows),), [module])
            assert graph is not None
            # Rounded kernels choose by the number of rows, so a trace serves that number alone.
            for rows in (1, 3, 6, 33) if kernel.exact else (traced_rows,):
                x = torch.randn(rows, 64).to(kernel.rows)
                assert torch.equal(graph(x), module(x))


def test_unused_trace_frees_its_weights() -> None:
    array = np.ones((64, 64), dtype=np.float32)
    alive, weight = weakref.ref(array), nn.Buffer(torch.from_numpy(array))
    graph = trace(partial(F.linear, weight=weight), (torch.randn(2, 64),), [])
    del array, weight
    assert graph is not None and graph(torch.ones(3, 64))[2, 0] == 64 and alive() is not None
    del graph
    gc.collect()
    assert alive() is None


@PACK
def test_failed_trace_leaves_the_module_as_it_was() -> None:
    class Odd(Block):
        def forward(self, x: Tensor) -> Any:
            raise RuntimeError("no graph")

    module = Odd(Kernel("fp32"))
    assert trace(module, (torch.randn(3, 64),), [module]) is None
    assert module.wide.packed is module.wide.own


@pytest.mark.parametrize("kernel", KERNELS)
def test_linear_layers_of_a_module_are_packed(kernel: Kernel) -> None:
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(64, 64), nn.SiLU(), nn.Sequential(nn.Linear(64, 32, bias=False)))
    for weight in module.parameters():
        weight.data = weight.data.to(torch.bfloat16).float()
    x = torch.randn(4, 64).to(kernel.rows)
    expected = module(x.float()).detach()
    pack_linears(module, kernel)
    linears = [layer for layer in module.modules() if type(layer) is nn.Linear]
    if kernel.name == "plain":
        assert len(linears) == 2  # torch's own product already
    else:
        assert not linears and error(module(x), expected) < 2 * allowed(kernel)


def test_first_kernel_of_a_type_is_exact() -> None:
    for rows in (torch.float32, torch.bfloat16, torch.float16):
        assert all(kernel.exact and kernel.rows == rows for kernel in kernels_for(rows, CPU))
    assert [kernel.name for kernel in kernels_for(torch.float16, CPU)] == ["plain"]
    with pytest.raises(KeyError):
        Kernel("int3")


def test_bf16_is_plain_without_instructions(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("medusa_cli.engine.kernels.has_bf16", lambda: False)
    assert [kernel.name for kernel in kernels_for(torch.bfloat16, CPU)] == ["plain"]
    with pytest.raises(Unsupported, match="bf16|bfloat16"):
        Kernel("bf16").pack(weight_of())


@BF16
@pytest.mark.parametrize("bits", [8, 4])
def test_rounded_weight_is_within_half_a_step(bits: int) -> None:
    torch.manual_seed(0)
    weight = torch.randn(48, 96).to(torch.bfloat16)
    exact, restored = weight.float(), rounded(weight, bits).float()
    spread = exact.unflatten(1, (-1, 32)).amax(-1) - exact.unflatten(1, (-1, 32)).amin(-1)
    step = exact.abs().amax(1, keepdim=True) / 127 if bits == 8 else spread.repeat_interleave(32, 1) / 15
    # Scales, offsets and results are rounded to bf16 as well.
    assert ((restored - exact).abs() <= 0.5 * step + 0.02 * exact.abs().amax()).all()
    x = torch.randn(5, 96).to(torch.bfloat16)
    assert error(Kernel(f"int{bits}").pack(weight)(x), x.float() @ restored.T) < 1e-2


@BF16
@pytest.mark.parametrize("bits", [8, 4])
def test_numbers_of_rows_share_the_traces_of_rounded_layers(bits: int, monkeypatch: pytest.MonkeyPatch) -> None:
    traces: list[Any] = []

    def counted(*given: Any) -> Any:
        traces.append(trace(*given))
        return traces[-1]

    monkeypatch.setattr("medusa_cli.engine.jit.trace", counted)
    alone, shared = (Backbone(tiny_model(hidden=64).to(torch.bfloat16), tiny_tokenizer()) for _ in range(2))
    for backbone in (alone, shared):
        attach(backbone, f"int{bits}")
    few = FEW_ROWS[f"int{bits}"]
    for rows in (1, few, few - 1, 2, few, few + 1, 40, 20, few + 2, 50):
        ids = torch.arange(5, 5 + rows)
        alone.engine._segments = {}  # never traced
        assert error(forward(shared, ids).hidden, forward(alone, ids).hidden) < 1e-2
    assert len(traces) == 2 and all(traces)


@BF16
def test_numbers_of_rows_share_the_traces_of_a_rounded_drafter(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    traces: list[Any] = []
    monkeypatch.setattr("medusa_cli.engine.jit.trace", lambda *given: traces.append(trace(*given)) or traces[-1])
    backbone = Backbone(tiny_model().to(torch.bfloat16), tiny_tokenizer())
    attach(backbone, "int8")
    MedusaHeads.create(backbone, 2, 1, "own").save(tmp_path, {})
    heads = load_drafter(tmp_path, backbone)
    few = FEW_ROWS["int8"]
    for rows in (1, 2, few, few - 1, few + 1, few + 2, 20, 3, 40):
        states = torch.randn(rows, backbone.hidden_size).to(torch.bfloat16)
        scores = heads.traced("scores", lambda x: heads.score(backbone, 0, x), states)
        assert error(scores, heads.score(backbone, 0, states)) < 1e-6
    assert len(traces) == 2 and all(traces)


@BF16
def test_shapes_without_a_rounded_kernel_keep_their_weights() -> None:
    weight, x = weight_of(30, 40).to(torch.bfloat16), torch.randn(3, 40).to(torch.bfloat16)
    product = Kernel("int4").pack(weight)
    assert product.nbytes == weight.nbytes == 2 * Kernel("int8").pack(weight).nbytes
    assert error(product(x), F.linear(x.float(), weight.float())) < TOLERANCE[torch.bfloat16]


@BF16
@pytest.mark.parametrize("bits", [8, 4])
def test_lm_head_keeps_bf16_beside_rounded_weights(bits: int) -> None:
    weight, x = weight_of(64, 64).to(torch.bfloat16), torch.randn(3, 64).to(torch.bfloat16)
    kernel, whole = Kernel(f"int{bits}"), Kernel("bf16").pack(weight)
    assert torch.equal(kernel.pack_head(weight)(x), whole(x)) and not torch.equal(kernel.pack(weight)(x), whole(x))
    assert kernel.pack(weight).nbytes == weight.nbytes * bits // 16


@BF16
@pytest.mark.parametrize("kind", [Kind.Q4_0, Kind.Q4_1], ids=lambda kind: kind.name)
@pytest.mark.parametrize("kernel", ["gguf", "int4"])
def test_blocks_of_a_file_are_multiplied_as_they_are(kind: Kind, kernel: str) -> None:
    layers = [nn.Linear(96, 48) for _ in range(2)]
    exact = []
    for seed, layer in enumerate(layers):
        packed = quantize(weight_of(48, 96, seed).numpy(), kind)
        exact.append(torch.from_numpy(dequantize(packed, kind)))
        layer.weight.data, layer.gguf_blocks = exact[-1].to(torch.bfloat16), torch.from_numpy(packed)
    weight, bias = torch.cat(exact), torch.cat([layer.bias for layer in layers]).detach()
    # Only scales and offsets are rounded, from fp16 to bf16.
    assert error(dequantize_int4(*read_blocks(torch.cat([layer.gguf_blocks for layer in layers]), 96)), weight) < 4e-3
    product = Kernel(kernel, torch.bfloat16).join([layer.to(torch.bfloat16) for layer in layers])
    for rows in (1, 5, 40):
        x = torch.randn(rows, 96).to(torch.bfloat16)
        assert error(product(x), F.linear(x.float(), weight, bias)) < 8e-3
    assert product.nbytes == weight.numel() // 2
    layers[1].gguf_blocks = None  # of another type in the file
    assert Kernel("gguf", torch.bfloat16).join(layers).nbytes == 2 * weight.numel()


@BF16
@pytest.mark.parametrize("engine", ["int8", "int4"])
def test_model_decodes_over_rounded_weights(engine: str, tmp_path: Path) -> None:
    network = tiny_model().to(torch.bfloat16)
    for name, layer in network.named_modules():
        if isinstance(layer, nn.Linear) and name != "lm_head":
            layer.weight.data = rounded(layer.weight.data, BITS[engine])
    expected, backbone = (Backbone(model, tiny_tokenizer()) for model in (network, tiny_model().to(torch.bfloat16)))
    attach(expected)
    attach(backbone, engine)
    assert backbone.engine.kernel.name == engine and backbone.engine.weight_bytes < expected.engine.weight_bytes
    for rows in (3, 40):
        ids = torch.arange(5, 5 + rows)
        assert error(forward(backbone, ids).hidden, forward(expected, ids).hidden) < 5e-2
    MedusaHeads.create(backbone, 2, 1, "own").save(tmp_path, {})
    heads = load_drafter(tmp_path, backbone)
    assert heads.kernel.name == "int8" and load_drafter(tmp_path, expected).kernel.exact
    steps = list(generate(backbone, heads, Tree.dense([2, 1]), PROMPT, max_new_tokens=20, stop_ids=()))
    assert Stats.of(steps).tokens == 20


def test_fp32_models_are_not_rounded() -> None:
    with pytest.raises(UsageError, match="quantize int8"):
        tiny_backbone(engine="int8")
