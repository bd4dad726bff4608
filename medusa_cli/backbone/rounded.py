"""Weights rounded to 8 or 4 bits, of which a step over few rows reads half or a quarter of the bytes.

This changes the model; with 4 bits the lm_head keeps 8. The kernels are torch's own for CPUs, over bf16 rows; beyond a
few rows they lose to packed bf16 weights, which is why whoever uses them keeps both.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from medusa_cli.errors import UsageError

BITS = {"int8": 8, "int4": 4}
# Up to so many rows the kernels beat packed bf16 weights that come from memory, by bits.
FEW_ROWS = {8: 6, 4: 12}
# Weights of a row that share a scale and an offset in 4 bits: as many as in GGUF's Q4_1.
GROUP = 32
# The 4-bit kernel wants whole blocks of outputs.
BLOCK = 16


@dataclass(frozen=True)
class Rounded:
    """A weight [N, K] in 8 bits with a scale [N] a row, or in 4 with scales and offsets [K / 32, N, 2]."""

    values: Tensor
    scales: Tensor
    bits: int

    def __call__(self, x: Tensor) -> Tensor:
        """Rows x [m, K] -> [m, N], in bf16."""
        if self.bits == 8:
            return torch._weight_int8pack_mm(x, self.values, self.scales)
        return torch.ops.aten._weight_int4pack_mm_for_cpu(x, self.values, GROUP, self.scales)


def round_weight(weight: Tensor, bits: int) -> tuple[Rounded, Tensor] | None:
    """A bf16 weight [N, K] in so many bits, and what that stands for in bf16; None where its shape has no kernel."""
    exact = weight.float()
    if bits == 8:
        scale = (exact.abs().amax(dim=1) / 127).clamp(min=1e-8).to(torch.bfloat16)
        levels = (exact / scale[:, None].float()).round().clamp(-127, 127)
        return Rounded(levels.to(torch.int8), scale, 8), (levels * scale[:, None].float()).to(torch.bfloat16)
    if weight.shape[1] % GROUP or weight.shape[0] % BLOCK:
        return None
    groups = exact.unflatten(1, (-1, GROUP))  # [N, K / 32, 32]
    low, high = groups.amin(dim=-1, keepdim=True), groups.amax(dim=-1, keepdim=True)
    scale = ((high - low) / 15).clamp(min=1e-8).to(torch.bfloat16)
    middle = (low + 8 * scale.float()).to(torch.bfloat16)  # what level 8 stands for
    levels = ((groups - middle.float()) / scale.float() + 8).round().clamp(0, 15)
    restored = ((levels - 8) * scale.float() + middle.float()).flatten(1).to(torch.bfloat16)
    values = torch.ops.aten._convert_weight_to_int4pack_for_cpu(levels.flatten(1).to(torch.int32), 1)
    scales = torch.cat([scale, middle], dim=-1).transpose(0, 1).contiguous()
    return Rounded(values, scales, 4), restored


def check_rounding(engine: str, dtype: torch.dtype, device: torch.device) -> None:
    """UsageError where an engine of rounded weights has no kernels."""
    if dtype != torch.bfloat16 or device.type != "cpu":
        raise UsageError(
            f"--engine {engine} rounds bf16 weights on a CPU, not {str(dtype).removeprefix('torch.')} on {device.type}",
            "use --dtype bf16 --device cpu, or --load-in-8bit",
        )
