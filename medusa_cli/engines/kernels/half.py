"""fp32 products over weights kept in fp16 (fbgemm): half the bytes of fp32, and exact for what bf16 and fp16 hold."""

import math

import torch
from torch import Tensor

from medusa_cli.engines.kernels.kernel import Kernel, Product
from medusa_cli.engines.kernels.packed import Packed

LARGEST = 30_000.0


class Half(Kernel):
    """fp32 rows, fp16 weights; a matrix that fp16 cannot hold to the last bit stays in fp32."""

    name = "fp16-weights"
    rows = torch.float32

    def __init__(self) -> None:
        self._other = Packed(torch.float32)

    def pack(self, weight: Tensor, bias: Tensor | None = None) -> Product:
        bias = None if bias is None else bias.float()
        # What comes back as it was is held to the last bit, and a bf16 weight need not be widened to see it.
        half = weight.half()
        if torch.equal(half.to(weight.dtype), weight):
            return HalfProduct(half.float(), bias, 1.0)
        # Small weights lose bits in fp16, which a power of two before, and its inverse after the product, saves.
        wide = weight.float()
        power = _headroom(wide)
        scaled = wide * 2.0**power
        if torch.equal(scaled.half().float(), scaled):
            return HalfProduct(scaled, bias, 2.0**-power)
        return self._other.pack(wide, bias)


def _headroom(weight: Tensor) -> int:
    """The power of two that brings a weight's largest entry near the largest number of fp16."""
    largest = float(weight.abs().max())
    return math.floor(math.log2(LARGEST / largest)) if 0 < largest < math.inf else 0


class HalfProduct(Product):
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

    def __deepcopy__(self, memo: dict[int, object]) -> "HalfProduct":
        return self  # frozen, and the library's packed weights cannot be copied


def can_half() -> bool:
    """Whether this CPU and this build of torch have the kernel."""
    return "fbgemm" in torch.backends.quantized.supported_engines
