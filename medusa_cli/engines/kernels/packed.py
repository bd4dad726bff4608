"""Products over weights laid out once for oneDNN, so that a step reads them at memory speed."""

from functools import cache
from typing import Any

import torch
from torch import Tensor

from medusa_cli.backbone.cpu import has_bf16
from medusa_cli.backbone.layers import Unsupported
from medusa_cli.engines.kernels.kernel import Kernel, Product

# oneDNN picks the block layout for about this many rows; 16 was as good as any from 1 to 256 rows, in fp32 the best.
ROWS_HINT = 16


class Packed(Kernel):
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
