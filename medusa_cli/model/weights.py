"""A model's weights under transformers' names, from a GGUF file, safetensors files or a network in memory."""

import math
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from medusa_cli.files.gguf_header import Tensor as GgufTensor
from medusa_cli.files.gguf_names import GgufNames, names_of
from medusa_cli.files.model_source import ModelSource
from medusa_cli.model.backbone import Unsupported, has_tied_head
from medusa_cli.model.checks import unloadable
from medusa_cli.native.library import UNIT
from medusa_cli.native.matrix import Floats, Format, RawMatrix

# Types of floats that matrices may keep; other types are converted to fp32.
FLOAT_TYPES = {torch.float32: Format.F32, torch.float16: Format.F16, torch.bfloat16: Format.BF16}


class Weights(ABC):
    """Reads the weights of a model, by their names in transformers' network.

    source: the file or folder that holds them, if any.
    """

    source = ""

    @abstractmethod
    def __contains__(self, name: str) -> bool: ...

    @abstractmethod
    def matrix(self, name: str) -> RawMatrix:
        """Returns a matrix in the number format of its file."""

    @abstractmethod
    def shape(self, name: str) -> tuple[tuple[int, ...], bool]:
        """Returns the shape of a weight, without reading it, and whether it is stored as floats."""

    @abstractmethod
    def vector(self, name: str) -> Floats:
        """Returns the values of a norm or a bias in fp32."""

    def experts(self, name: str) -> RawMatrix | None:
        """Returns the matrices of a layer's experts, concatenated; None if a single weight holds all experts.

        name: the name of the experts' module, followed by .gate, .up or .down. The vector NAME_bias holds
        the experts' biases, if they have any.
        """
        return None

    def check(self, name: str, raw: RawMatrix) -> None:
        """Raises UserError for a matrix whose scales are not finite."""
        if not raw.is_finite:
            raise unloadable(self.source, f"the scales of its {name} are not finite")

    def release(self) -> None:  # noqa: B027  (most have nothing to release)
        """Releases the memory of weights that have been read."""


class NetworkWeights(Weights):
    """Reads the weights of a network in memory."""

    def __init__(self, network: Any) -> None:
        self.tensors: dict[str, Tensor] = network.state_dict(keep_vars=True)

    def __contains__(self, name: str) -> bool:
        return name in self.tensors

    def matrix(self, name: str) -> RawMatrix:
        return raw_of(self.tensors[name])

    def shape(self, name: str) -> tuple[tuple[int, ...], bool]:
        return tuple(self.tensors[name].shape), True

    def vector(self, name: str) -> Floats:
        return vector_of(self.tensors[name])


class CheckpointWeights(Weights):
    """Reads the weights in safetensors files, which are mapped into memory.

    network: transformers' network, which may be on the meta device.
    """

    def __init__(self, files: Sequence[Path], network: Any) -> None:
        from safetensors import SafetensorError, safe_open

        # Importing transformers' rules takes a while, and packed weights do not need them.
        from medusa_cli.model.conversion import sources_of

        self.source = str(files[0].parent)
        self.network = network
        self.stack = ExitStack()
        try:
            parts = [self.stack.enter_context(safe_open(path, framework="pt")) for path in files]
        except SafetensorError as reason:
            raise unloadable(self.source, reason) from reason
        self.parts = {name: part for part in parts for name in part.keys()}  # noqa: SIM118  (not a mapping)
        self.sources, self.unused = sources_of(self.parts, network)
        # The weights from the last conversion, until they are released.
        self._converted: dict[str, Tensor] = {}

    def __contains__(self, name: str) -> bool:
        return name in self.sources or self._is_mxfp4(name)

    def _is_mxfp4(self, name: str) -> bool:
        return all(f"{name}_{part}" in self.parts for part in ("blocks", "scales"))

    def _read(self, stored: str) -> Tensor:
        tensor: Tensor = self.parts[stored].get_tensor(stored)
        return tensor

    def tensor(self, name: str) -> Tensor:
        """Returns a weight in transformers' form."""
        if name not in self._converted:
            self._converted = self.sources[name].converted(self._read, self.network)
        return self._converted[name]

    def matrix(self, name: str) -> RawMatrix:
        if self._is_mxfp4(name):
            return _from_mxfp4(self._read(f"{name}_blocks"), self._read(f"{name}_scales"))
        return raw_of(self.tensor(name))

    def shape(self, name: str) -> tuple[tuple[int, ...], bool]:
        if self._is_mxfp4(name):
            *outputs, groups = self._empty(f"{name}_scales").shape
            return (*outputs, groups * UNIT), False
        return tuple(self.sources[name].converted(self._empty, self.network)[name].shape), True

    def _empty(self, stored: str) -> Tensor:
        """Returns a tensor with the shape of a stored tensor, on the meta device."""
        return torch.empty(self.parts[stored].get_slice(stored).get_shape(), device="meta")

    def vector(self, name: str) -> Floats:
        return vector_of(self.tensor(name))

    def experts(self, name: str) -> RawMatrix | None:
        module, _, part = name.rpartition(".")
        source = self.sources.get(f"{module}.{'down' if part == 'down' else 'gate_up'}_proj")
        stacks = [] if source is None else source.stacks
        if not stacks:
            return None
        each = [raw_of(self._read(stored)) for stored in stacks[part == "up"]]
        if len({raw.format for raw in each}) > 1:
            raise unloadable(self.source, f"the experts of its {name} have different number types")
        return replace(each[0], rows=np.concatenate([raw.rows for raw in each]))

    def release(self) -> None:
        self._converted = {}


class GgufWeights(Weights):
    """Reads the weights of a GGUF file, or of several files that hold one model; maps the files into memory."""

    def __init__(self, model: ModelSource, names: GgufNames) -> None:
        self.source = str(model.gguf)
        self.names = names
        self.files: list[Any] = [np.memmap(file, np.uint8, "r") for file in self.names.header.files]

    def __contains__(self, name: str) -> bool:
        return name in self.names.tensors

    def _tensor(self, name: str) -> GgufTensor:
        return self.names.header.tensors[self.names.tensors[name]]

    def _bytes(self, tensor: GgufTensor) -> Any:
        return self.files[tensor.file][tensor.start : tensor.end]

    def matrix(self, name: str) -> RawMatrix:
        tensor = self._tensor(name)
        *outputs, inputs = tensor.shape
        rows = self._bytes(tensor).reshape(math.prod(outputs), -1)
        raw = RawMatrix(Format[tensor.type], rows, inputs)
        order = self.names.order(name)
        raw = raw if order is None else raw.reordered(np.array(order))
        # Columns move to other blocks. The numbers of a block share factors, so the result is stored as floats.
        columns = self.names.columns(name)
        return raw if columns is None else RawMatrix.of(raw.floats()[:, columns])

    def shape(self, name: str) -> tuple[tuple[int, ...], bool]:
        tensor = self._tensor(name)
        return tensor.shape, Format[tensor.type].is_float

    def vector(self, name: str) -> Floats:
        from gguf import GGMLQuantizationType, dequantize

        tensor = self._tensor(name)
        values = dequantize(
            np.asarray(self._bytes(tensor)), GGMLQuantizationType[tensor.type]
        ).astype(np.float32)
        order = self.names.order(name)
        if order is not None:
            values = values.reshape(len(order), -1)[order].ravel()
        return self.names.values(name, values)

    def experts(self, name: str) -> RawMatrix | None:
        return self.matrix(name) if name in self else None

    def stacked(self, name: str) -> Tensor:
        """Returns the matrices [experts, outputs, inputs] or biases [experts, outputs] of a layer's experts in fp32."""
        raw = self.matrix(name)
        self.check(name, raw)
        return torch.tensor(raw.floats()).view(self._tensor(name).shape)

    def release(self) -> None:
        import mmap

        for data in self.files:
            data._mmap.madvise(mmap.MADV_DONTNEED)

    def items(self) -> Iterator[tuple[str, Tensor]]:
        """Yields the name and the fp32 values of each weight, in transformers' layout."""
        for name, stored in self.names.tensors.items():
            dimensions = len(self.names.header.tensors[stored].shape)
            module, _, part = name.rpartition(".")
            shape = self.names.shapes[name]
            if dimensions == 1:
                yield name, torch.from_numpy(self.vector(name)).view(shape)
            elif part == "gate":
                yield f"{module}.gate_up_proj", self._transposed(self._gate_and_up(module))
            elif part == "down":
                yield f"{module}.down_proj", self._transposed(self.stacked(name))
            elif part == "gate_bias":
                yield f"{module}.gate_up_proj_bias", self._gate_and_up(module, "_bias")
            elif part == "down_bias":
                yield f"{module}.down_proj_bias", self.stacked(name)
            elif dimensions == 2 and part != "up_bias":
                yield name, torch.tensor(self.matrix(name).floats()).view(shape)

    def _gate_and_up(self, module: str, kind: str = "") -> Tensor:
        """Returns the matrices or biases of gate and up [experts, 2 * outputs, ..], in the network's order."""
        gate = self.stacked(f"{module}.gate{kind}")
        up = self.stacked(f"{module}.up{kind}")
        if self.names.has_transposed_experts:
            return torch.stack([gate, up], dim=2).flatten(1, 2)
        return torch.cat([gate, up], dim=1)

    def _transposed(self, matrices: Tensor) -> Tensor:
        return matrices.mT if self.names.has_transposed_experts else matrices


class GgufSlice:
    """Reads a weight of a GGUF file, or one expert's part of it, only when sliced, like a slice of safetensors."""

    def __init__(self, weights: GgufWeights, name: str, expert: int | None = None) -> None:
        self.weights = weights
        self.name = name
        self.expert = expert

    def get_shape(self) -> list[int]:
        shape = self.weights.names.shapes[self.name]
        return [*shape] if self.expert is None else [*shape[1:]]

    def __getitem__(self, place: tuple[slice, ...]) -> Tensor:
        if len(place) == 1:
            return torch.from_numpy(self.weights.vector(self.name))[place]
        raw = self.weights.matrix(self.name)
        first = 0 if self.expert is None else self.expert * self.get_shape()[0]
        rows = raw.rows[first:][place[0]]
        part = RawMatrix(raw.format, np.ascontiguousarray(rows), raw.inputs)
        return torch.tensor(part.floats()[:, place[-1]])  # a copy, because the file is read-only


def gguf_slices(model: ModelSource) -> dict[str, GgufSlice]:
    """Returns the weights of a model's GGUF file as slices, which read only what is needed."""
    weights = GgufWeights(model, names_of(model.header, meta_network(model)))
    slices = {}
    for name, stored in weights.names.tensors.items():
        if len(weights.names.header.tensors[stored].shape) < 3:
            slices[name] = GgufSlice(weights, name)
            continue
        shape = weights.names.shapes[name]
        # Safetensors files have one weight per expert, so each expert of a GGUF file gets a slice, too.
        module, _, part = name.rpartition(".")
        for expert in range(shape[0]):
            own = f"{module}.{expert}.{part}_proj.weight"
            slices[own] = GgufSlice(weights, name, expert)
    return slices


def meta_network(model: ModelSource) -> Any:
    """Returns transformers' network for a model's config, without memory for its weights."""
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.from_pretrained(model.folder, trust_remote_code=False)
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config, trust_remote_code=False)


def open_weights(model: ModelSource, network: Any) -> Weights:
    """Opens the weights of a model that has files; its network may be on the meta device."""
    if model.weights_in_gguf:
        return GgufWeights(model, names_of(model.header, network))
    return CheckpointWeights(model.checkpoint, network)


def has_own_head(model: ModelSource, network: Any) -> bool:
    """Returns True if a network ties its lm_head to the embeddings, but its files hold another matrix for the lm_head.

    In this case, transformers does not tie the two, either. network: may be on the meta device.
    """
    # A GGUF file's lm_head is tied if and only if the file holds no matrix for it; see `write_metadata`.
    if not model.checkpoint or not has_tied_head(network):
        return False
    weights = CheckpointWeights(model.checkpoint, network)
    modules = (network.get_input_embeddings(), network.get_output_embeddings())
    names = {id(module): name for name, module in network.named_modules()}
    stored = [f"{names[id(module)]}.weight" for module in modules]
    if not all(name in weights for name in stored):
        return False
    return not torch.equal(*(weights.tensor(name) for name in stored))


def _from_mxfp4(blocks: Tensor, scales: Tensor) -> RawMatrix:
    """Returns the matrices of experts [E * outputs, inputs], in blocks as GGUF files have them.

    blocks [E, outputs, groups, 16]: a byte holds two neighboring numbers, the first in its lower four bits. In GGUF's
    blocks, a byte holds a number of a group's first half and a number of its second half. scales [E, outputs, groups]
    are exponents. Raises Unsupported for other shapes and types.
    """
    if blocks.dtype != torch.uint8 or scales.dtype != torch.uint8:
        raise Unsupported("its MXFP4 weights have types that are not supported")
    if blocks.dim() != 4 or blocks.shape[-1] != 16 or scales.shape != blocks.shape[:-1]:
        raise Unsupported("its MXFP4 weights have shapes that are not supported")
    first, second = np.split(blocks.numpy(), 2, axis=-1)
    rows = np.empty((*scales.shape, 17), np.uint8)
    rows[..., 0] = scales
    rows[..., 1::2] = first & 15 | second << 4
    rows[..., 2::2] = first >> 4 | second & 240
    experts, outputs, groups = scales.shape
    return RawMatrix(Format.MXFP4, rows.reshape(experts * outputs, -1), groups * UNIT)


def raw_of(tensor: Tensor) -> RawMatrix:
    """Returns a matrix of floats in its own type if FLOAT_TYPES has it, else in fp32; concatenates several matrices."""
    tensor = tensor.flatten(0, -2)
    if tensor.dtype not in FLOAT_TYPES:
        tensor = tensor.float()
    return RawMatrix.of(array_of(tensor))


def vector_of(tensor: Tensor) -> Floats:
    values: Floats = tensor.detach().float().flatten().numpy()
    return values


def array_of(tensor: Tensor) -> NDArray[Any]:
    """Returns a tensor's memory as an array; bf16 as uint16."""
    tensor = tensor.detach().contiguous()
    if tensor.dtype == torch.bfloat16:
        return tensor.view(torch.int16).numpy().view(np.uint16)
    array: NDArray[Any] = tensor.numpy()
    return array
