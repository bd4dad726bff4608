"""transformers' network over packed weights, on any device: its quantized matrices stay in tiles."""

import logging
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from medusa_cli.engine.description import Description
from medusa_cli.engine.packed import Packed
from medusa_cli.engine.tiles import TileLinear, Tiles, floats_of
from medusa_cli.errors import first_line
from medusa_cli.model.backbone import Unsupported, auto_class, text_model
from medusa_cli.native import PackedMatrix

# The rows of the probe, and the relative difference that rounding rows to 8 bits may cause.
ROWS = 3
TOLERANCE = 0.03
log = logging.getLogger(__name__)
Multiply = Callable[..., Tensor]
Head = Callable[[Tensor | None], tuple[Tensor, Tensor | None]]


def network_of(
    config: Any,
    description: Description,
    packed: Packed,
    dtype: torch.dtype,
    device: torch.device,
    int8_rows: bool,
) -> tuple[Any, Head]:
    """Returns a config's network with packed weights, and a function that looks up rows of its lm_head.

    Embeddings, norms and matrices of floats are in `dtype`. int8_rows: True if activations are rounded to 8 bits where
    the device has kernels for this. Raises Unsupported for weights that do not fit the network's own modules.
    """
    from accelerate import init_empty_weights

    with init_empty_weights(include_buffers=False):
        network = auto_class(config).from_config(config, dtype=dtype, trust_remote_code=False)
    if description.vector_names or description.flags["centered"]:
        raise Unsupported("its layers have weights besides matrices and the gains of norms")
    with torch.inference_mode():
        multiply = _kernel_for(packed, device) if int8_rows else None
    embedding = network.get_input_embeddings()
    head = network.get_output_embeddings()
    # The embeddings and the lm_head may share one matrix.
    places = {
        name: module for name, module in network.named_modules() if isinstance(module, nn.Linear)
    }
    own = next(name for name, module in places.items() if module is head)
    for name, matrix in packed.matrices.items():
        if name == description.embedding:
            embedding.weight = _frozen(floats_of(matrix, dtype), device)
        place = own if name == description.head else name
        if place in places:
            network.set_submodule(place, _linear(matrix, dtype, device, multiply))
        elif name != description.embedding:
            raise Unsupported(f"its {name} is a part of another weight")
    for name in description.norm_names:
        norm = network.get_submodule(name)
        gain = torch.from_numpy(np.array(packed.vectors[name][: norm.weight.numel()]))
        norm.weight = _frozen((gain - 1 if description.one_more else gain).to(dtype), device)

    text = text_model(network)
    lacking = [name for name, weight in text.named_parameters() if weight.is_meta]
    if lacking:
        raise Unsupported(f"its {lacking[0]} is not a packed weight")
    text.to(device)
    return network.eval(), partial(_rows_of, network.get_output_embeddings(), dtype)


def _linear(
    matrix: PackedMatrix, dtype: torch.dtype, device: torch.device, multiply: Multiply | None
) -> nn.Module:
    """Returns a linear layer on a device for a packed matrix, with its bias."""
    bias = None
    if matrix.bias is not None:
        bias = torch.from_numpy(np.array(matrix.bias[: matrix.shape[0]])).to(device)
    if not matrix.format.is_float:
        return TileLinear([Tiles.of(matrix, device)], bias, multiply)
    linear = nn.Linear(1, 1, bias=False, device="meta")
    linear.weight = _frozen(floats_of(matrix, dtype), device)
    if bias is not None:
        linear.bias = _frozen(bias.to(dtype), device)
    return linear


def _frozen(values: Tensor, device: torch.device) -> nn.Parameter:
    return nn.Parameter(values.to(device), requires_grad=False)


def _rows_of(head: Any, dtype: torch.dtype, ids: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """Returns the weight and bias of an lm_head for token ids, or for all tokens."""
    if isinstance(head, TileLinear):
        weight, bias = head.rows(ids, dtype)
        return weight, None if bias is None else bias.to(dtype)
    weight = head.weight.detach()
    bias = None if head.bias is None else head.bias.detach()
    if ids is None:
        return weight, bias
    return weight[ids], None if bias is None else bias[ids]


def _kernel_for(packed: Packed, device: torch.device) -> Multiply | None:
    """Returns the kernel that multiplies 8-bit rows by tiles on a device, or None if there is no correct one.

    The kernel is compared with dequantized tiles on the smallest matrix of each format.
    """
    if device.type != "cuda":
        return None
    quantized = [matrix for matrix in packed.matrices.values() if not matrix.format.is_float]
    smallest: dict[int, PackedMatrix] = {}
    for matrix in sorted(quantized, key=lambda matrix: matrix.nbytes):
        smallest.setdefault(matrix.format, matrix)
    try:
        from medusa_cli.engine.tile_kernels import tile_matmul

        for matrix in smallest.values():
            if (fault := difference(tile_matmul, Tiles.of(matrix, device))) is not None:
                raise ArithmeticError(f"{matrix.format.name}: {fault}")
    except torch.OutOfMemoryError:
        raise
    # Triton, its compilers and its driver raise errors of many kinds.
    except Exception as reason:
        log.warning(
            "quantized weights are dequantized in each pass, which is slow, as their kernel does not run on %s: %s",
            device,
            first_line(reason) or type(reason).__name__,
        )
        return None
    return tile_matmul


def difference(multiply: Multiply, tiles: Tiles) -> str | None:
    """Returns how a kernel's products differ from those of dequantized tiles; None if they differ only by rounding."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(ROWS, tiles.shape[1], generator=generator).to(tiles.data.device)
    expected = TileLinear([tiles])(x)
    error = float((multiply(x, [tiles]) - expected).norm() / expected.norm())
    return None if error <= TOLERANCE else f"its products differ by {error:.2%}"
