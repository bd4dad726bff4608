"""Weights rounded to 8 or 4 bits, of which a step over few rows reads half or a quarter of the bytes.

This changes the model; with 4 bits the lm_head keeps 8. The kernels are torch's own for CPUs, over bf16 rows; beyond a
few rows they lose to bf16 weights, which is why both are kept.
"""

import torch
from torch import Tensor

from medusa_cli.backbone.cpu import has_bf16
from medusa_cli.engines.kernels.kernel import Kernel, Plain, Product
from medusa_cli.engines.kernels.packed import Packed

BITS = {"int8": 8, "int4": 4}
# Up to so many rows the kernels beat packed bf16 weights that come from memory, by bits.
FEW_ROWS = {8: 6, 4: 12}
# Weights of a row that share a scale and an offset in 4 bits: as many as in GGUF's Q4_1.
GROUP = 32
# The 4-bit kernel wants whole blocks of outputs.
BLOCK = 16


class Rounded(Kernel):
    """bf16 rows over weights of 8 or 4 bits; shapes without such a kernel keep bf16 weights."""

    exact = False
    rows = torch.bfloat16

    def __init__(self, bits: int) -> None:
        self.bits = bits
        self.name = f"int{bits}"  # type: ignore[misc]
        self._whole: Kernel = Packed(torch.bfloat16) if has_bf16() else Plain(torch.bfloat16)

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
        return _RoundedProduct(values, scales, bits, self._whole.pack(restored), bias, weight.shape[1])


class _RoundedProduct(Product):
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
