"""What a kernel is: one way to multiply rows with frozen weights, chosen by measurement."""

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from functools import cache
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from medusa_cli.model.backbone import Unsupported
from medusa_cli.model.load import has_bf16


class Product(nn.Module):
    """Rows x [.., K] -> W x + b [.., N] over frozen weights; nbytes is what one product reads of them."""

    nbytes: int

    def plus(self, x: Tensor, other: Tensor) -> Tensor:
        """W x + b + other."""
        found: Tensor = self(x)
        return found.add_(other)


class Kernel(ABC):
    """A way to multiply: `rows` is the type of what goes in and comes out, `exact` whether weights are as loaded."""

    name: ClassVar[str]
    exact: ClassVar[bool] = True
    rows: torch.dtype

    @abstractmethod
    def pack(self, weight: Tensor, bias: Tensor | None = None) -> Product:
        """The product with a weight [N, K] and a bias [N]; Unsupported where the kernel cannot hold it."""

    def last(self, weight: Tensor, bias: Tensor | None = None) -> Product:
        """The same for the lm_head, whose rounding moves a model most."""
        return self.pack(weight, bias)

    def join(self, linears: Sequence[Any]) -> Product:
        """Layers that read the same rows as one product; Unsupported where one is no plain linear layer."""
        return self.pack(*joined(linears))


def joined(linears: Sequence[Any]) -> tuple[Tensor, Tensor | None]:
    """The weights [N, K] and biases [N] of linear layers on the same input, one below the other."""
    for linear in linears:
        if type(linear) is not nn.Linear:
            raise Unsupported(f"a layer is {type(linear).__name__}, which has no kernel")
    biases = [None if one.bias is None else one.bias.detach() for one in linears]
    known = [bias for bias in biases if bias is not None]
    if known and len(known) != len(biases):
        raise Unsupported("only some of its fused layers have a bias")
    weights = [linear.weight.detach() for linear in linears]
    return (weights[0] if len(weights) == 1 else torch.cat(weights)), (torch.cat(known) if known else None)


class PlainKernel(Kernel):
    """torch's own product over weights as they are: what a GPU's libraries want, and what any device can do."""

    name = "plain"

    def __init__(self, rows: torch.dtype) -> None:
        self.rows = rows

    def pack(self, weight: Tensor, bias: Tensor | None = None) -> Product:
        return _PlainProduct(weight.to(self.rows), None if bias is None else bias.to(self.rows))


class _PlainProduct(Product):
    weight: Tensor
    bias: Tensor | None

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        super().__init__()
        self.register_buffer("weight", weight, persistent=False)
        self.register_buffer("bias", bias, persistent=False)
        self.nbytes = weight.nbytes

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight, self.bias)


# oneDNN picks the block layout for about this many rows; 16 was as good as any from 1 to 256 rows, in fp32 the best.
ROWS_HINT = 16


class PackedKernel(Kernel):
    """fp32 or bf16 rows over weights of the same type in oneDNN's layout."""

    def __init__(self, rows: torch.dtype) -> None:
        self.rows = rows
        self.name = "fp32" if rows == torch.float32 else "bf16"  # type: ignore[misc]

    def pack(self, weight: Tensor, bias: Tensor | None = None) -> Product:
        if not can_pack(self.rows, weight.device):
            raise Unsupported(f"there is no packed kernel for {self.name} on {weight.device.type} here")
        return PackedProduct(weight.to(self.rows), None if bias is None else bias.to(self.rows))


def can_pack(rows: torch.dtype, device: torch.device) -> bool:
    """Whether oneDNN has kernels for rows of a type here: fp32 on any CPU, bf16 where the CPU has instructions."""
    if device.type != "cpu" or not torch.backends.mkldnn.is_available():
        return False
    return rows == torch.float32 or (rows == torch.bfloat16 and has_bf16())


class PackedProduct(Product):
    """oneDNN's opaque weight, which no trace can hold: a trace is handed it anew with every call."""

    bias: Tensor | None

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        super().__init__()
        packed = torch.ops.mkldnn._reorder_linear_weight(weight.detach().contiguous(), ROWS_HINT)
        self.slot = BankSlot(packed)
        self.register_buffer("bias", bias, persistent=False)
        self.nbytes = weight.nbytes

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = _ops()[0](x, self.slot.tensor)
        return found if self.bias is None else found.add_(self.bias)

    def plus(self, x: Tensor, other: Tensor) -> Tensor:
        found: Tensor = _ops()[1](x, other, self.slot.tensor)
        return found if self.bias is None else found.add_(self.bias)


class BankSlot:
    """Where a product finds its packed weight: its own, or, while a trace is made, the traced input in its place."""

    def __init__(self, packed: Tensor) -> None:
        self.own = self.tensor = packed

    def __deepcopy__(self, memo: dict[int, Any]) -> "BankSlot":
        return BankSlot(self.own)  # packed weights never change


@cache
def _ops() -> tuple[Any, Any]:
    """oneDNN's product, and the product plus rows, as functions of tensors alone.

    The operators take an argument (`Scalar?[]`) that no trace can record, so each is wrapped in a graph of its own.
    """
    build, parse = torch._C._create_function_from_graph, torch._C.parse_ir
    plain = parse(
        """graph(%x : Tensor, %w : Tensor):
  %bias : NoneType = prim::Constant()
  %name : str = prim::Constant[value="none"]()
  %scalars : Scalar?[] = prim::ListConstruct()
  %algorithm : str = prim::Constant[value=""]()
  %found : Tensor = mkldnn::_linear_pointwise(%x, %w, %bias, %name, %scalars, %algorithm)
  return (%found)"""
    )
    plus = parse(
        """graph(%x : Tensor, %other : Tensor, %w : Tensor):
  %bias : NoneType = prim::Constant()
  %name : str = prim::Constant[value="add"]()
  %found : Tensor = mkldnn::_linear_pointwise(%x, %other, %w, %bias, %name)
  return (%found)"""
    )
    return build("packed_product", plain), build("packed_product_plus", plus)


LARGEST = 30_000.0


class Fp16Kernel(Kernel):
    """fp32 rows, fp16 weights; a matrix that fp16 cannot hold to the last bit stays in fp32."""

    name = "fp16-weights"
    rows = torch.float32

    def __init__(self) -> None:
        self._other = PackedKernel(torch.float32)

    def pack(self, weight: Tensor, bias: Tensor | None = None) -> Product:
        bias = None if bias is None else bias.float()
        # What comes back as it was is held to the last bit, and a bf16 weight need not be widened to see it.
        half = weight.half()
        if torch.equal(half.to(weight.dtype), weight):
            return Fp16Product(half.float(), bias, 1.0)
        # Small weights lose bits in fp16, which a power of two before, and its inverse after the product, saves.
        wide = weight.float()
        power = _headroom(wide)
        scaled = wide * 2.0**power
        if torch.equal(scaled.half().float(), scaled):
            return Fp16Product(scaled, bias, 2.0**-power)
        return self._other.pack(wide, bias)


def _headroom(weight: Tensor) -> int:
    """The power of two that brings a weight's largest entry near the largest number of fp16."""
    largest = float(weight.abs().max())
    return math.floor(math.log2(LARGEST / largest)) if 0 < largest < math.inf else 0


class Fp16Product(Product):
    """fbgemm's packed weight; bias [N] and shrink come after it, where they are not in it."""

    bias: Tensor | None

    def __init__(self, weight: Tensor, bias: Tensor | None, shrink: float) -> None:
        super().__init__()
        inside = bias if shrink == 1.0 else None
        self.packed = torch.ops.quantized.linear_prepack_fp16(weight.contiguous(), inside)
        self.register_buffer("bias", None if shrink == 1.0 else bias, persistent=False)
        self.shrink, self.nbytes = shrink, weight.nbytes // 2

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = torch.ops.quantized.linear_dynamic_fp16(x, self.packed)
        if self.shrink != 1.0:
            found = found.mul_(self.shrink)
        return found if self.bias is None else found.add_(self.bias)

    def __deepcopy__(self, memo: dict[int, object]) -> "Fp16Product":
        return self  # frozen, and the library's packed weights cannot be copied


def can_half() -> bool:
    """Whether this CPU and this build of torch have the kernel."""
    return "fbgemm" in torch.backends.quantized.supported_engines


BITS = {"int8": 8, "int4": 4}
# Up to so many rows the kernels beat packed bf16 weights that come from memory, by bits.
FEW_ROWS = {8: 6, 4: 12}
# Weights of a row that share a scale and an offset in 4 bits: as many as in GGUF's Q4_1.
GROUP = 32
# The 4-bit kernel wants whole blocks of outputs.
BLOCK = 16


class IntKernel(Kernel):
    """bf16 rows over weights of 8 or 4 bits; shapes without such a kernel keep bf16 weights."""

    exact = False
    rows = torch.bfloat16

    def __init__(self, bits: int) -> None:
        self.bits = bits
        self.name = f"int{bits}"  # type: ignore[misc]
        self._whole: Kernel = PackedKernel(torch.bfloat16) if has_bf16() else PlainKernel(torch.bfloat16)

    def pack(self, weight: Tensor, bias: Tensor | None = None) -> Product:
        return self._round(weight, bias, self.bits)

    def last(self, weight: Tensor, bias: Tensor | None = None) -> Product:
        # Four bits are too few for the last matrix: alone they moved the default model ten times as far as all others.
        return self._round(weight, bias, 8)

    def _round(self, weight: Tensor, bias: Tensor | None, bits: int) -> Product:
        made = round_weight(weight.to(torch.bfloat16), bits)
        if made is None:
            return self._whole.pack(weight, bias)
        values, scales, restored = made
        return _IntProduct(values, scales, bits, self._whole.pack(restored), bias, weight.shape[1])


class _IntProduct(Product):
    """Few rows go through the rounded weights, more through what these stand for in bf16."""

    values: Tensor
    scales: Tensor
    bias: Tensor | None

    def __init__(
        self, values: Tensor, scales: Tensor, bits: int, many: Product, bias: Tensor | None, width: int
    ) -> None:
        super().__init__()
        self.register_buffer("values", values, persistent=False)
        self.register_buffer("scales", scales, persistent=False)
        self.register_buffer("bias", None if bias is None else bias.to(torch.bfloat16), persistent=False)
        self.bits, self.many, self.width, self.nbytes = bits, many, width, many.nbytes * bits // 16

    def forward(self, x: Tensor) -> Tensor:
        if x.numel() > FEW_ROWS[self.bits] * self.width:
            found: Tensor = self.many(x)
        elif self.bits == 8:
            rows = torch._weight_int8pack_mm(x.reshape(-1, self.width), self.values, self.scales)
            found = rows.view(*x.shape[:-1], -1)
        else:
            rows = torch.ops.aten._weight_int4pack_mm_for_cpu(
                x.reshape(-1, self.width), self.values, GROUP, self.scales
            )
            found = rows.view(*x.shape[:-1], -1)
        return found if self.bias is None else found.add_(self.bias)


def round_weight(weight: Tensor, bits: int) -> tuple[Tensor, Tensor, Tensor] | None:
    """A bf16 weight [N, K] as values and scales of so many bits, and what these stand for in bf16.

    8 bits: values [N, K] and a scale [N] a row; 4: torch's layout, scales and offsets [K / 32, N, 2]. None where a
    shape has no kernel.
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
    middle = (low + 8 * scale.float()).to(torch.bfloat16)  # what level 8 stands for
    levels = ((groups - middle.float()) / scale.float() + 8).round().clamp(0, 15)
    restored = ((levels - 8) * scale.float() + middle.float()).flatten(1).to(torch.bfloat16)
    values = torch.ops.aten._convert_weight_to_int4pack_for_cpu(levels.flatten(1).to(torch.int32), 1)
    return values, torch.cat([scale, middle], dim=-1).transpose(0, 1).contiguous(), restored


def pack_linears(module: nn.Module, kernel: Kernel) -> None:
    """Replace every plain nn.Linear in a module by the kernel's product, in place."""
    for parent in list(module.modules()):
        for name, child in list(parent.named_children()):
            # Quantised layers are subclasses of nn.Linear with weights of their own: only the exact type is safe.
            if type(child) is nn.Linear and not isinstance(kernel, PlainKernel):
                setattr(parent, name, _PackedLinear(kernel.join([child]), child))


class _PackedLinear(nn.Module):
    """A frozen nn.Linear that keeps only its packed weight; for inference alone."""

    def __init__(self, product: Product, linear: nn.Linear) -> None:
        super().__init__()
        self.product = product
        self.in_features, self.out_features = linear.in_features, linear.out_features

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.product(x)
        return found


__all__ = [
    "BITS",
    "Fp16Kernel",
    "Kernel",
    "PackedKernel",
    "PlainKernel",
    "Product",
    "IntKernel",
    "kernel_named",
    "kernels_for",
]


def kernels_for(rows: torch.dtype, device: torch.device) -> list[Kernel]:
    """The exact kernels for rows of a type on a device, the one to take unmeasured first."""
    found: list[Kernel] = []
    if device.type == "cpu":
        if rows == torch.float32 and can_half():
            found.append(Fp16Kernel())
        if can_pack(rows, device):
            found.append(PackedKernel(rows))
    return found or [PlainKernel(rows)]


def kernel_named(name: str, rows: torch.dtype) -> Kernel:
    """The kernel of a name, as `kernels_for` or a measurement gave it; KeyError for none."""
    if name in BITS:
        return IntKernel(BITS[name])
    known: dict[str, Kernel] = {"plain": PlainKernel(rows), "fp16-weights": Fp16Kernel()}
    for kind in (torch.float32, torch.bfloat16):
        known[PackedKernel(kind).name] = PackedKernel(kind)
    return known[name]
