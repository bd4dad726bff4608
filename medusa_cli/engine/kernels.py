"""Kernels: the ways to multiply rows with frozen weights, chosen by name or by measurement."""

import math
from collections.abc import Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from medusa_cli.model.backbone import Unsupported
from medusa_cli.model.load import has_bf16

# The kernels beside "plain", and the type of their rows.
KERNELS = {
    "fp16-weights": torch.float32,
    "fp32": torch.float32,
    "bf16": torch.bfloat16,
    "int8": torch.bfloat16,
    "int4": torch.bfloat16,
}
BITS = {"int8": 8, "int4": 4}


class Product(nn.Module):
    """Computes W x + b [.., N] of rows x [.., K] over frozen weights; nbytes is what a product reads of them."""

    def __init__(self, shape: Sequence[int], nbytes: int) -> None:
        super().__init__()
        self.out_features, self.in_features = shape
        self.nbytes = nbytes

    def __deepcopy__(self, memo: dict[int, object]) -> "Product":
        return self  # frozen, and packed weights cannot be copied


class Kernel:
    """One way to multiply.

    plain: torch's own product, on any device. fp32, bf16: oneDNN's packed weights. fp16-weights: fp32 rows over fp16
    weights. int8, int4: bf16 rows over rounded weights, which are not `exact`. `rows` is the type of rows.
    """

    def __init__(self, name: str, rows: torch.dtype | None = None) -> None:
        self.name, self.rows, self.exact = name, rows or KERNELS[name], name not in BITS

    def pack(self, weight: Tensor, bias: Tensor | None = None) -> Product:
        """Returns the product with a weight [N, K] and a bias [N]; Unsupported if the kernel cannot hold it."""
        if self.name in BITS:
            return _pack_rounded(weight, bias, BITS[self.name])
        bias = None if bias is None else bias.to(self.rows)
        if self.name == "plain":
            return PlainProduct(weight.to(self.rows), bias)
        return _pack_fp16(weight, bias) if self.name == "fp16-weights" else _pack(weight.to(self.rows), bias)

    def pack_head(self, weight: Tensor, bias: Tensor | None = None) -> Product:
        """Returns the lm_head's product.

        It keeps 8 bits: 4 in it alone changed the default model ten times as much as in all other matrices.
        """
        return Kernel("int8").pack(weight, bias) if self.name == "int4" else self.pack(weight, bias)

    def join(self, linears: Sequence[Any]) -> Product:
        """Returns one product of layers that read the same rows; Unsupported unless all are plain linear layers."""
        for linear in linears:
            if type(linear) is not nn.Linear:
                raise Unsupported(f"a layer is {type(linear).__name__}, which has no kernel")
        weights = [linear.weight.detach() for linear in linears]
        biases = [linear.bias.detach() for linear in linears if linear.bias is not None]
        if biases and len(biases) != len(weights):
            raise Unsupported("only some of its fused layers have a bias")
        return self.pack(weights[0] if len(weights) == 1 else torch.cat(weights), torch.cat(biases) if biases else None)


def kernels_for(rows: torch.dtype, device: torch.device) -> list[Kernel]:
    """Returns the exact kernels for rows of a type on a device; the first is the choice without measurement."""
    kernels = []
    if device.type == "cpu" and rows == torch.float32 and has_fp16_weights():
        kernels.append(Kernel("fp16-weights"))
    if can_pack(rows, device):
        kernels.append(Kernel("fp32" if rows == torch.float32 else "bf16"))
    return kernels or [Kernel("plain", rows)]


def pack_linears(module: nn.Module, kernel: Kernel) -> None:
    """Replaces every plain nn.Linear in a module by the kernel's product, in place, for inference alone."""
    if kernel.name == "plain":
        return
    for parent in list(module.modules()):
        for name, child in list(parent.named_children()):
            # Quantised layers are subclasses of nn.Linear with weights of their own: only the exact type is safe.
            if type(child) is nn.Linear:
                setattr(parent, name, kernel.join([child]))


class PlainProduct(Product):
    """torch's own product."""

    weight: Tensor
    bias: Tensor | None

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        super().__init__(weight.shape, weight.nbytes)
        self.register_buffer("weight", weight, persistent=False)
        self.register_buffer("bias", bias, persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight, self.bias)


# oneDNN picks the block layout for about this many rows; 16 was as good as any from 1 to 256 rows, in fp32 the best.
ROWS_HINT = 16


def can_pack(rows: torch.dtype, device: torch.device) -> bool:
    """Returns True if oneDNN has kernels for rows of a type: fp32 on any CPU, bf16 if the CPU has instructions."""
    if device.type != "cpu" or not torch.backends.mkldnn.is_available():
        return False
    return rows == torch.float32 or (rows == torch.bfloat16 and has_bf16())


def _pack(weight: Tensor, bias: Tensor | None) -> "PackedProduct":
    if not can_pack(weight.dtype, weight.device):
        kind = str(weight.dtype).removeprefix("torch.")
        raise Unsupported(f"there is no packed kernel for {kind} on {weight.device.type} here")
    return PackedProduct(weight, bias)


class PackedProduct(Product):
    """oneDNN's product over an opaque weight, which no graph can hold: a graph gets it as an input with every call.

    chunk: multiplies at most so many rows at once.
    """

    bias: Tensor | None
    chunk: int | None = None

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        super().__init__(weight.shape, weight.nbytes)
        self.own = torch.ops.mkldnn._reorder_linear_weight(weight.detach().contiguous(), ROWS_HINT)
        self.packed = self.own  # while a graph is recorded, the graph's input
        self.weight = weight.new_empty(0)  # some models ask it for the type
        self.register_buffer("bias", bias, persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        if self.chunk is not None and len(x) > self.chunk:
            return torch.cat([self(rows) for rows in x.split(self.chunk)])
        y: Tensor = _onednn()(x, self.packed)
        return y if self.bias is None else y.add_(self.bias)


@cache
def _onednn() -> Any:
    """Returns oneDNN's product as a function of rows and weights alone.

    The operator takes an argument (`Scalar?[]`) that no trace can record, so it is wrapped in a graph of its own.
    """
    graph = torch._C.parse_ir(
        """graph(%x : Tensor, %w : Tensor):
  %bias : NoneType = prim::Constant()
  %name : str = prim::Constant[value="none"]()
  %scalars : Scalar?[] = prim::ListConstruct()
  %algorithm : str = prim::Constant[value=""]()
  %y : Tensor = mkldnn::_linear_pointwise(%x, %w, %bias, %name, %scalars, %algorithm)
  return (%y)"""
    )
    return torch._C._create_function_from_graph("packed_product", graph)


LARGEST = 30_000.0  # a scaled weight's largest entry, near the largest number of fp16


def has_fp16_weights() -> bool:
    """Returns True if this CPU and this build of torch have the kernel."""
    return "fbgemm" in torch.backends.quantized.supported_engines


def _pack_fp16(weight: Tensor, bias: Tensor | None) -> Product:
    """Returns a product over fp16 weights; a matrix that fp16 cannot hold exactly stays in fp32."""
    # A bf16 weight need not be widened to be compared.
    half = weight.half()
    if torch.equal(half.to(weight.dtype), weight):
        return Fp16Product(half.float(), bias, 1.0)
    # Small weights lose bits in fp16; a power of two before, and its inverse after the product, keeps them.
    wide = weight.float()
    largest = float(wide.abs().max())
    power = math.floor(math.log2(LARGEST / largest)) if 0 < largest < math.inf else 0
    scaled = wide * 2.0**power
    if torch.equal(scaled.half().float(), scaled):
        return Fp16Product(scaled, bias, 2.0**-power)
    return _pack(wide, bias)


class Fp16Product(Product):
    """fbgemm's product over fp16 weights; `shrink` undoes the weight's scale."""

    bias: Tensor | None

    def __init__(self, weight: Tensor, bias: Tensor | None, shrink: float) -> None:
        super().__init__(weight.shape, weight.nbytes // 2)
        inside = bias if shrink == 1.0 else None
        self.packed = torch.ops.quantized.linear_prepack_fp16(weight.contiguous(), inside)
        self.register_buffer("bias", None if shrink == 1.0 else bias, persistent=False)
        self.shrink = shrink

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = torch.ops.quantized.linear_dynamic_fp16(x, self.packed)
        if self.shrink != 1.0:
            y = y.mul_(self.shrink)
        return y if self.bias is None else y.add_(self.bias)


# Up to so many rows the rounded kernels beat packed bf16 weights read from memory, by bits.
FEW_ROWS = {8: 6, 4: 12}
# Weights of a row that share a scale and an offset in 4 bits: as many as in GGUF's Q4_1.
GROUP = 32
# The 4-bit kernel wants whole blocks of outputs.
BLOCK = 16


def _pack_rounded(weight: Tensor, bias: Tensor | None, bits: int) -> Product:
    """Returns a product over rounded weights; shapes without such a kernel keep bf16 weights."""
    whole = Kernel("bf16") if has_bf16() else Kernel("plain", torch.bfloat16)
    rounded = round_weight(weight.to(torch.bfloat16), bits)
    if rounded is None:
        return whole.pack(weight, bias)
    values, scales, restored = rounded
    return RoundedProduct(values, scales, bits, whole.pack(restored), bias)


class RoundedProduct(Product):
    """Multiplies few rows with the rounded weights, more rows with their values in bf16."""

    values: Tensor
    scales: Tensor
    bias: Tensor | None

    def __init__(self, values: Tensor, scales: Tensor, bits: int, restored: Product, bias: Tensor | None) -> None:
        super().__init__((restored.out_features, restored.in_features), restored.nbytes * bits // 16)
        self.register_buffer("values", values, persistent=False)
        self.register_buffer("scales", scales, persistent=False)
        self.register_buffer("bias", None if bias is None else bias.to(torch.bfloat16), persistent=False)
        self.bits, self.restored = bits, restored

    def forward(self, x: Tensor) -> Tensor:
        if x.numel() > FEW_ROWS[self.bits] * self.in_features:
            y: Tensor = self.restored(x)
        else:
            rows = x.reshape(-1, self.in_features)
            if self.bits == 8:
                y = torch._weight_int8pack_mm(rows, self.values, self.scales)
            else:
                y = torch.ops.aten._weight_int4pack_mm_for_cpu(rows, self.values, GROUP, self.scales)
            y = y.view(*x.shape[:-1], -1)
        return y if self.bias is None else y.add_(self.bias)


def round_weight(weight: Tensor, bits: int) -> tuple[Tensor, Tensor, Tensor] | None:
    """Returns a bf16 weight [N, K] as values and scales of 8 or 4 bits, and their product in bf16.

    8 bits: values [N, K] and a scale [N] a row; 4: torch's layout, scales and offsets [K / 32, N, 2]. None for a shape
    that has no kernel.
    """
    exact = weight.float()
    if bits == 8:
        scale = (exact.abs().amax(dim=1) / 127).clamp(min=1e-8).to(torch.bfloat16)
        levels = (exact / scale[:, None].float()).round().clamp(-127, 127)
        return levels.to(torch.int8), scale, (levels * scale[:, None].float()).to(torch.bfloat16)
    if weight.shape[1] % GROUP or weight.shape[0] % BLOCK:
        return None
    groups = exact.unflatten(1, (-1, GROUP))  # [N, K / 32, 32]
    low, high = groups.amin(dim=-1, keepdim=True), groups.amax(dim=-1, keepdim=True)
    scale = ((high - low) / 15).clamp(min=1e-8).to(torch.bfloat16)
    middle = (low + 8 * scale.float()).to(torch.bfloat16)  # the value of level 8
    levels = ((groups - middle.float()) / scale.float() + 8).round().clamp(0, 15)
    restored = ((levels - 8) * scale.float() + middle.float()).flatten(1).to(torch.bfloat16)
    values = torch.ops.aten._convert_weight_to_int4pack_for_cpu(levels.flatten(1).to(torch.int32), 1)
    return values, torch.cat([scale, middle], dim=-1).transpose(0, 1).contiguous(), restored
