"""Ways to multiply rows with frozen weights, one file each, behind one interface."""

import torch

from medusa_cli.engines.kernels.half import Half, can_half
from medusa_cli.engines.kernels.kernel import Kernel, Plain, Product
from medusa_cli.engines.kernels.packed import Packed, can_pack
from medusa_cli.engines.kernels.rounded import BITS, Rounded

__all__ = ["BITS", "Half", "Kernel", "Packed", "Plain", "Product", "Rounded", "kernel_named", "kernels_for"]


def kernels_for(rows: torch.dtype, device: torch.device) -> list[Kernel]:
    """The exact kernels for rows of a type on a device, the one to take unmeasured first."""
    found: list[Kernel] = []
    if device.type == "cpu":
        if rows == torch.float32 and can_half():
            found.append(Half())
        if can_pack(rows, device):
            found.append(Packed(rows))
    return found or [Plain(rows)]


def kernel_named(name: str, rows: torch.dtype) -> Kernel:
    """The kernel of a name, as `kernels_for` or a measurement gave it; KeyError for none."""
    if name in BITS:
        return Rounded(BITS[name])
    known: dict[str, Kernel] = {"plain": Plain(rows), "fp16-weights": Half()}
    for kind in (torch.float32, torch.bfloat16):
        known[Packed(kind).name] = Packed(kind)
    return known[name]
