"""Linear layers whose weights are laid out once for oneDNN, so that a step reads them at memory speed."""

from collections.abc import Callable

import torch
from torch import Tensor, nn

from medusa_cli.backbone.rounded import FEW_ROWS, round_weight

# oneDNN picks the block layout for about this many rows; 16 was as good as any from 1 to 256 rows, in fp32 the best.
ROWS_HINT = 16


def can_pack(weight: Tensor) -> bool:
    """Whether this weight [out, in] has a packed kernel here: a CPU tensor in fp32, or in bf16 where the CPU has it."""
    if weight.device.type != "cpu" or not torch.backends.mkldnn.is_available():
        return False
    if weight.dtype == torch.bfloat16:
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    return weight.dtype == torch.float32


def pack_linear(weight: Tensor, bias: Tensor | None = None, bits: int | None = None) -> Callable[[Tensor], Tensor]:
    """Return x [..., in] -> [..., out] over weight [out, in], packed where can_pack says so, F.linear elsewhere.

    bits: a bf16 weight is rounded to so many, where there is a kernel.
    """
    if not can_pack(weight):
        return lambda x: nn.functional.linear(x, weight, bias)
    if bits is not None and weight.dtype == torch.bfloat16 and (made := round_weight(weight.detach(), bits)):
        few, restored = made
        many, limit = pack_linear(restored, bias), FEW_ROWS[bits] * weight.shape[1]

        def product(x: Tensor) -> Tensor:
            if x.numel() > limit:
                return many(x)
            found = few(x.reshape(-1, x.shape[-1])).view(*x.shape[:-1], -1)
            return found if bias is None else found.add_(bias)

        return product
    packed = torch.ops.mkldnn._reorder_linear_weight(weight.detach().contiguous(), ROWS_HINT)
    return lambda x: torch.ops.mkldnn._linear_pointwise(x, packed, bias, "none", [], "")


class PackedLinear(nn.Module):
    """A frozen nn.Linear that keeps only its packed weight; for inference alone."""

    def __init__(self, linear: nn.Linear, bits: int | None = None) -> None:
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.apply_packed = pack_linear(linear.weight, None if linear.bias is None else linear.bias.detach(), bits)

    def forward(self, x: Tensor) -> Tensor:
        return self.apply_packed(x)

    def extra_repr(self) -> str:
        return f"in_features={self.in_features}, out_features={self.out_features}"


def pack_linears(model: nn.Module, bits: int | None = None) -> int:
    """Replace every plain nn.Linear of the model by a packed one, in place; return how many were replaced."""
    replaced = 0
    for module in list(model.modules()):
        for name, child in list(module.named_children()):
            # Quantised layers are subclasses of nn.Linear with weights of their own: only the exact type is safe.
            if type(child) is nn.Linear and can_pack(child.weight):
                setattr(module, name, PackedLinear(child, bits))
                replaced += 1
    return replaced
