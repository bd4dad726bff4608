"""Linear layers of drafters for inference: int8 weights in the native library on a CPU, unchanged elsewhere."""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from medusa_cli import native


class PlainLinear(nn.Module):
    """A linear layer over a given weight [N, K]."""

    weight: Tensor
    bias: Tensor | None

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        super().__init__()
        self.register_buffer("weight", weight, persistent=False)
        self.register_buffer("bias", bias, persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight, self.bias)


def packed_linear(weight: Tensor, bias: Tensor | None = None) -> nn.Module:
    """Returns a linear layer for a weight [N, K], in int8 if it is on a CPU and the native library can be used.

    Int8 halves the bytes read, and drafts need not be exact.
    """
    weight = weight.detach()
    if weight.device.type != "cpu" or not native.is_available():
        return PlainLinear(weight, None if bias is None else bias.detach())
    from medusa_cli.engine.native import NativeLinear

    raw = native.RawMatrix.of(weight.float().numpy()).rounded(native.Format.Q8_0)
    own = None if bias is None else bias.detach().float().numpy()
    return NativeLinear(native.PackedMatrix.pack(raw, own, int8_rows=True))


def pack_linears(module: nn.Module) -> None:
    """Replaces every plain nn.Linear in a module with its packed layer, in place; for inference only."""
    for parent in list(module.modules()):
        for name, child in list(parent.named_children()):
            if type(child) is nn.Linear:
                setattr(parent, name, packed_linear(child.weight, child.bias))


def packs(device: torch.device) -> bool:
    """Returns True if linear layers on a device are packed."""
    return device.type == "cpu" and native.is_available()
