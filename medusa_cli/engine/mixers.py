"""Layers that mix rows without attention, as the native library runs them: their weights and sizes."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import nn

from medusa_cli.model.backbone import Unsupported, stateful_modules
from medusa_cli.native.library import MIXERS

# The library's names of matrices and vectors, mapped to transformers' names.
SHORT_CONV = {"input": "in_proj", "out": "out_proj"}
DELTA_NET = {
    "input": "in_proj_qkv",
    "output_gate": "in_proj_z",
    "beta": "in_proj_b",
    "decay": "in_proj_a",
    "out": "out_proj",
}
DELTA_VECTORS = {
    "conv": "conv1d.weight",
    "decay_log": "A_log",
    "decay_bias": "dt_bias",
    "state_norm": "norm.weight",
}
MAX_KERNEL = 16


@dataclass(frozen=True)
class Mixer:
    """Describes how a layer without attention mixes rows; `kind` is one of MIXERS.

    matrices, vectors: the library's names, mapped to the names of the stored weights. sizes: by the
    library's names. norm: the mixer's norm, if it has one; its epsilon must be the model's.
    """

    kind: str
    matrices: dict[str, str]
    vectors: dict[str, str]
    sizes: dict[str, int]
    norm: Any = None

    @property
    def number(self) -> int:
        return MIXERS.index(self.kind)


def mixers_of(base: nn.Module, layers: Any, names: Mapping[int, str]) -> list[Mixer | None]:
    """Returns the mixer of each layer, or None for an attention layer.

    names: the name of each module, by the module's id. Raises Unsupported if some layers keep a running
    state that is not supported.
    """
    mixers = [_mixer_of(layer, names) for layer in layers]
    if len(stateful_modules(base)) != sum(mixer is not None for mixer in mixers):
        raise Unsupported("some layers keep a running state")
    return mixers


def _mixer_of(layer: Any, names: Mapping[int, str]) -> Mixer | None:
    if _has(conv := getattr(layer, "conv", None), SHORT_CONV):
        return _short_conv(conv, names[id(conv)])
    if _has(net := getattr(layer, "linear_attn", None), DELTA_NET):
        return _delta_net(net, names[id(net)])
    return None


def _has(module: Any, linears: Mapping[str, str]) -> bool:
    return all(type(getattr(module, own, None)) is nn.Linear for own in linears.values())


def _short_conv(module: Any, name: str) -> Mixer:
    return Mixer(
        kind="short_conv",
        matrices={own: f"{name}.{theirs}" for own, theirs in SHORT_CONV.items()},
        vectors={"conv": f"{name}.conv.weight"},
        sizes={"kernel": _kernel(module.conv)},
    )


def _delta_net(module: Any, name: str) -> Mixer:
    sizes = {
        "key_heads": module.num_k_heads,
        "value_heads": module.num_v_heads,
        "key_dim": module.head_k_dim,
        "value_dim": module.head_v_dim,
    }
    if sizes["key_dim"] % 16 or sizes["value_dim"] % 16 or module.num_v_heads % module.num_k_heads:
        raise Unsupported("its states have sizes that are not supported")
    return Mixer(
        kind="delta_net",
        matrices={own: f"{name}.{theirs}" for own, theirs in DELTA_NET.items()},
        vectors={own: f"{name}.{theirs}" for own, theirs in DELTA_VECTORS.items()},
        sizes={"kernel": _kernel(module.conv1d), **sizes},
        norm=module.norm,
    )


def _kernel(conv: nn.Conv1d) -> int:
    """Returns the kernel size of a depthwise convolution.

    Raises Unsupported if the convolution has a bias, is not depthwise, or has a kernel size outside 2 .. MAX_KERNEL.
    """
    [kernel] = conv.kernel_size
    if conv.bias is not None or conv.groups != conv.in_channels or not 1 < kernel <= MAX_KERNEL:
        raise Unsupported("its convolutions have parts that are not supported")
    return kernel
