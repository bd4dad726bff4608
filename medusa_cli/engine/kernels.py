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


class FrozenLinear(nn.Module):
    """A linear layer with frozen, packed weights; nbytes is what a product reads of them."""

    def __init__(self, shape: Sequence[int], nbytes: int) -> None:
        super().__init__()
        self.out_features, self.in_features = shape
        self.nbytes = nbytes

    def __deepcopy__(self, memo: dict[int, object]) -> "FrozenLinear":
        return self  # frozen, and packed weights cannot be copied


class Kernel:
    """One way to multiply.

    plain: torch's own product, on any device. fp32, bf16: oneDNN's packed weights. fp16-weights: fp32 rows over fp16
    weights. int8, int4: bf16 rows over rounded weights, which are not `exact`. gguf: bf16 rows over the 4 bits that a
    GGUF file holds, and bf16 for its other matrices. `rows` is the type of rows. few_rows: up to how many rows it
    multiplies with rounded weights; None if it has one product for all.
    """

    def __init__(self, name: str, rows: torch.dtype | None = None) -> None:
        self.name, self.rows, self.exact = name, rows or KERNELS[name], name not in BITS
        self.few_rows = FEW_ROWS.get(name)

    def pack(self, weight: Tensor, bias: Tensor | None = None) -> FrozenLinear:
        """Returns the product with a weight [N, K] and a bias [N]; Unsupported if the kernel cannot hold it."""
        if self.name in BITS:
            return _pack_rounded(weight, bias, BITS[self.name])
        bias = None if bias is None else bias.to(self.rows)
        if self.name == "gguf":
            return _pack_whole(weight, bias)
        if self.name == "plain":
            return PlainLinear(weight.to(self.rows), bias)
        return _pack_fp16(weight, bias) if self.name == "fp16-weights" else _pack(weight.to(self.rows), bias)

    def pack_head(self, weight: Tensor, bias: Tensor | None = None) -> FrozenLinear:
        """Returns the lm_head's product, in bf16 beside rounded weights.

        4 bits in it alone changed the default model ten times as much as in all other matrices, and 8 in it half as
        much as in all others.
        """
        return _pack_whole(weight, bias) if self.name in BITS else self.pack(weight, bias)

    def join(self, linears: Sequence[Any]) -> FrozenLinear:
        """Returns one product of layers that read the same rows; Unsupported unless all are plain linear layers."""
        for linear in linears:
            if type(linear) is not nn.Linear:
                raise Unsupported(f"a layer is {type(linear).__name__}, which has no kernel")
        weights = [linear.weight.detach() for linear in linears]
        biases = [linear.bias.detach() for linear in linears if linear.bias is not None]
        if biases and len(biases) != len(weights):
            raise Unsupported("only some of its fused layers have a bias")
        weight, bias = torch.cat(weights), torch.cat(biases) if biases else None
        blocks = [rows for linear in linears if (rows := getattr(linear, "gguf_blocks", None)) is not None]
        alike = len(blocks) == len(linears) and len({rows.shape[1] for rows in blocks}) == 1
        if self.name in ("int4", "gguf") and alike and _has_int4(weight):
            return _pack_int4(*read_blocks(torch.cat(blocks), weight.shape[1]), weight, bias)
        return self.pack(weight, bias)


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


class PlainLinear(FrozenLinear):
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


def _pack(weight: Tensor, bias: Tensor | None) -> "OneDnnLinear":
    if not can_pack(weight.dtype, weight.device):
        kind = str(weight.dtype).removeprefix("torch.")
        raise Unsupported(f"there is no packed kernel for {kind} on {weight.device.type} here")
    return OneDnnLinear(weight, bias)


class OneDnnLinear(FrozenLinear):
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


def _pack_fp16(weight: Tensor, bias: Tensor | None) -> FrozenLinear:
    """Returns a product over fp16 weights; a matrix that fp16 cannot hold exactly stays in fp32."""
    # A bf16 weight need not be widened to be compared.
    half = weight.half()
    if torch.equal(half.to(weight.dtype), weight):
        return Fp16Linear(half.float(), bias, 1.0)
    # Small weights lose bits in fp16; a power of two before, and its inverse after the product, keeps them.
    wide = weight.float()
    largest = float(wide.abs().max())
    power = math.floor(math.log2(LARGEST / largest)) if 0 < largest < math.inf else 0
    scaled = wide * 2.0**power
    if torch.equal(scaled.half().float(), scaled):
        return Fp16Linear(scaled, bias, 2.0**-power)
    return _pack(wide, bias)


class Fp16Linear(FrozenLinear):
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


# Up to so many rows a kernel multiplies with its few bits, by name. Where the CPU has AMX, bf16 is as fast from 4 rows
# on, beside 4 bits in a small model from 9. With 4 bits, trees of 16 nodes (fed as 18 rows) keep plain decoding's bits.
FEW_ROWS = {"int8": 3, "int4": 18, "gguf": 18}
# Weights of a row that share a scale and an offset in 4 bits: as many as in GGUF's Q4_0 and Q4_1.
GROUP = 32
# The 4-bit kernel wants whole blocks of outputs.
BLOCK = 16


def _pack_whole(weight: Tensor, bias: Tensor | None = None) -> FrozenLinear:
    """Returns a product over bf16 weights."""
    return (Kernel("bf16") if has_bf16() else Kernel("plain", torch.bfloat16)).pack(weight, bias)


def _pack_rounded(weight: Tensor, bias: Tensor | None, bits: int) -> FrozenLinear:
    """Returns a product over rounded weights; shapes without such a kernel keep bf16 weights."""
    weight = weight.to(torch.bfloat16)
    if bits == 4:
        if not _has_int4(weight):
            return _pack_whole(weight, bias)
        levels, scale, middle = round_to_int4(weight)
        return _pack_int4(levels, scale, middle, dequantize_int4(levels, scale, middle), bias)
    values, scale = round_to_int8(weight)
    restored = (values * scale[:, None].float()).to(torch.bfloat16)
    return QuantizedLinear("int8", values, scale, _pack_whole(restored), bias)


def _pack_int4(levels: Tensor, scale: Tensor, middle: Tensor, restored: Tensor, bias: Tensor | None) -> FrozenLinear:
    """Returns the 4-bit product of levels, scales and middles, as of round_to_int4; `restored` are its weights."""
    values = torch.ops.aten._convert_weight_to_int4pack_for_cpu(levels.flatten(1).to(torch.int32), 1)
    scales = torch.stack([scale, middle], dim=-1).transpose(0, 1).contiguous()
    return QuantizedLinear("int4", values, scales, _pack_whole(restored), bias)


class QuantizedLinear(FrozenLinear):
    """Multiplies few rows with the rounded weights, more rows with their values in bf16.

    values, scales: int8 [N, K] and [N], or torch's layout of 4 bits, with scales and middles [K / 32, N, 2].
    """

    values: Tensor
    scales: Tensor
    bias: Tensor | None

    def __init__(self, name: str, values: Tensor, scales: Tensor, restored: FrozenLinear, bias: Tensor | None) -> None:
        super().__init__((restored.out_features, restored.in_features), restored.nbytes * BITS[name] // 16)
        self.register_buffer("values", values, persistent=False)
        self.register_buffer("scales", scales, persistent=False)
        self.register_buffer("bias", None if bias is None else bias.to(torch.bfloat16), persistent=False)
        self.name, self.restored = name, restored

    def forward(self, x: Tensor) -> Tensor:
        if x.numel() > FEW_ROWS[self.name] * self.in_features:
            y: Tensor = self.restored(x)
        else:
            rows = x.reshape(-1, self.in_features)
            if self.name == "int8":
                y = torch._weight_int8pack_mm(rows, self.values, self.scales)
            else:
                y = torch.ops.aten._weight_int4pack_mm_for_cpu(rows, self.values, GROUP, self.scales)
            y = y.view(*x.shape[:-1], -1)
        return y if self.bias is None else y.add_(self.bias)


def round_to_int8(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Returns a weight [N, K] as int8 values [N, K], and a bf16 scale [N] for each row."""
    exact = weight.float()
    scale = (exact.abs().amax(dim=1) / 127).clamp(min=1e-8).to(torch.bfloat16)
    return (exact / scale[:, None].float()).round().clamp(-127, 127).to(torch.int8), scale


def _has_int4(weight: Tensor) -> bool:
    return not (weight.shape[1] % GROUP or weight.shape[0] % BLOCK)


def round_to_int4(weight: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Returns a weight [N, K] as levels 0 .. 15 [N, K / 32, 32], bf16 scales and the values of level 8 [N, K / 32]."""
    groups = weight.float().unflatten(1, (-1, GROUP))
    low, high = groups.amin(dim=-1), groups.amax(dim=-1)
    scale = ((high - low) / 15).clamp(min=1e-8).to(torch.bfloat16)
    middle = (low + 8 * scale.float()).to(torch.bfloat16)
    levels = ((groups - middle[..., None].float()) / scale[..., None].float() + 8).round().clamp(0, 15)
    return levels.to(torch.uint8), scale, middle


def dequantize_int4(levels: Tensor, scale: Tensor, middle: Tensor) -> Tensor:
    """Returns the weight [N, K] in bf16 that round_to_int4's or read_blocks' parts stand for."""
    values = (levels.float() - 8) * scale[..., None].float() + middle[..., None].float()
    return values.flatten(1).to(torch.bfloat16)


def read_blocks(blocks: Tensor, columns: int) -> tuple[Tensor, Tensor, Tensor]:
    """Returns blocks of Q4_0 (d, 32 levels) or Q4_1 (d, m, 32 levels), bytes [N, ..], as round_to_int4 does.

    Q4_0 has the values d (q - 8), Q4_1 d q + m. Only the rounding of d and m from fp16 to bf16 changes them.
    """
    parts = blocks.unflatten(1, (columns // GROUP, -1))
    pairs = parts[..., -GROUP // 2 :]
    levels = torch.cat([pairs & 15, pairs >> 4], dim=-1)
    numbers = parts[..., : -GROUP // 2].contiguous().view(torch.float16).float()
    scale = numbers[..., 0]
    middle = numbers[..., 1] + 8 * scale if numbers.shape[-1] == 2 else torch.zeros_like(scale)
    return levels, scale.to(torch.bfloat16), middle.to(torch.bfloat16)
