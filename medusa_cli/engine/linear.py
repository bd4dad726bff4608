"""Linear layers of drafters for inference: packed to 4 bits for the native library on a CPU, unchanged elsewhere."""

import copy
from collections.abc import Callable, Iterable
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from medusa_cli import native

# Drafters import these from here, because `export --to hf` replaces only this module.
from medusa_cli.engine.native_layer import NativeDecoderLayer as NativeDecoderLayer
from medusa_cli.engine.native_levels import NativeLevels as NativeLevels
from medusa_cli.engine.native_linear import NativeLinear as NativeLinear
from medusa_cli.native.matrix import Parts

Pack = Callable[[Parts], native.PackedMatrix]


@runtime_checkable
class HasNativeParts(Protocol):
    """A decoder layer that the native library can run."""

    def native_parts(self) -> dict[str, Any]:
        """Returns the arguments of a NativeDecoderLayer."""


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


def packed_linear(
    weight: Tensor, bias: Tensor | None = None, pack: Pack | None = None
) -> nn.Module:
    """Returns a linear layer for a weight [N, K], packed if it is on a CPU and the native library can be used."""
    weight = weight.detach()
    bias = None if bias is None else bias.detach()
    if not packs(weight.device):
        return PlainLinear(weight, bias)
    return packed_parts([(weight, bias)], pack)


def packed_parts(
    parts: Iterable[tuple[Tensor, Tensor | None]], pack: Pack | None = None
) -> nn.Module:
    """Returns a packed linear layer, given its weight [N, K] and optional bias [N] in parts along N."""
    return NativeLinear(packed_matrix(parts, pack))


def packed_matrix(
    parts: Iterable[tuple[Tensor, Tensor | None]], pack: Pack | None
) -> native.PackedMatrix:
    """Returns a packed matrix for drafting, given its weight and bias in parts; see `packed_copy` for `pack`."""
    return (pack or native.drafting_matrix)(
        (weight.detach().float().numpy(), None if bias is None else bias.float().numpy())
        for weight, bias in parts
    )


def packed_copy(module: nn.Module, pack: Pack | None = None) -> nn.Module:
    """Returns a copy of a module with packed parts, for inference only.

    pack: packs each matrix, or returns the matrix that an earlier process packed.
    """
    if type(module) is nn.Linear:
        return packed_linear(module.weight, module.bias, pack)
    if isinstance(module, HasNativeParts):
        try:
            return NativeDecoderLayer(
                **module.native_parts(), pack=lambda weight: packed_matrix([(weight, None)], pack)
            )
        except ValueError:  # the layer's sizes are not whole tiles
            pass
    copied = copy.copy(module)
    copied._modules = {
        name: None if child is None else packed_copy(child, pack)
        for name, child in module._modules.items()
    }
    return copied


def packs(device: torch.device) -> bool:
    """Returns True if linear layers on a device are packed."""
    return device.type == "cpu" and native.is_available()
