"""Finds what the modules of a network compute by running them on known values."""

import copy
import sys
from collections.abc import Callable, Sequence
from inspect import signature
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from medusa_cli.engine.description import CLAMPED_SWIGLU, XIELU, XIELU_VECTORS, Activation
from medusa_cli.model.backbone import Layers, Unsupported
from medusa_cli.model.masks import Masks

# Plain activations, in the order of the library's numbers for them.
ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "squared_relu": lambda x: F.relu(x).square(),
}
# Maps positions [1, n] and a kind of layer to cosines and sines [1, n, D].
Rotary = Callable[[Tensor, str], tuple[Tensor, Tensor]]
# The names of activations in transformers' modules.
ACTIVATION_NAMES = ("act_fn", "activation_fn", "act", "activation")


def rotary_of(network: Any) -> Rotary:
    """Returns a function that computes a network's rotary tables on the CPU, even if it has no weights."""
    parts = Layers(network)
    config = network.config.get_text_config()
    with torch.device("cpu"):
        module = type(parts.base.rotary_emb)(config)
    like = torch.empty(1)

    def rotary(positions: Tensor, kind: str) -> tuple[Tensor, Tensor]:
        with torch.no_grad():
            cos, sin = module(like, positions, kind) if parts.by_kind else module(like, positions)
        return cos, sin

    return rotary


def first_of(owner: Any, names: Sequence[str]) -> Any:
    """Returns the first of the named attributes that is not None; None if there is none."""
    return next((part for name in names if (part := getattr(owner, name, None)) is not None), None)


def eps_of(norm: Any) -> float:
    """Returns a norm's epsilon; raises Unsupported if the module lacks an epsilon or a 1-D weight."""
    eps = getattr(norm, "variance_epsilon", getattr(norm, "eps", None))
    weight = getattr(norm, "weight", None)
    if eps is None or weight is None or weight.dim() != 1:
        raise Unsupported(f"{type(norm).__name__} is not a norm known here")
    return float(eps)


def has_gain(norm: Any) -> bool:
    return getattr(norm, "weight", None) is not None


def eps_without_gain(norm: Any, hidden: int) -> float:
    """Returns the epsilon of a norm without a gain, found from its output for small numbers."""
    x = torch.linspace(-1e-3, 1e-3, hidden)
    square = float(x.square().mean())
    return float(f"{square / float(norm(x).square().mean()) - square:.3g}")


def norm_kind(norm: Any, eps: float, hidden: int) -> tuple[bool, bool]:
    """Returns whether a norm subtracts the mean, and whether it multiplies by 1 + w.

    A copy of the norm is probed with known weights. Raises Unsupported if the norm computes something else.
    """
    probe = copy.deepcopy(norm).to_empty(device="cpu").float()
    for number, parameter in enumerate(probe.parameters()):
        parameter.data = torch.linspace(0.5 + number, 2, parameter.numel())
    gain = getattr(probe, "weight", None)
    gain = torch.ones(hidden) if gain is None else gain
    wide = gain.numel()
    x = torch.linspace(-2, 3, 2 * wide).square().view(2, wide)
    bias = getattr(probe, "bias", None)
    for centered in (False, True):
        center = x.mean(-1, keepdim=True) if centered else 0
        unit = F.rms_norm(x - center, (wide,), eps=eps)
        for one_more in (False, True):
            expected = unit * (gain + one_more) + (0 if bias is None else bias)
            if torch.allclose(probe(x), expected, atol=1e-4, rtol=1e-4):
                return centered, one_more
    raise Unsupported(f"{type(norm).__name__} computes something other than a norm known here")


def plain_attributes(module: Any) -> Sequence[Any]:
    """Returns the names and values of a module's numbers and strings, except its layer index."""
    plain = (bool, int, float, str, type(None))
    return sorted(
        (name, str(value))
        for name, value in vars(module).items()
        if isinstance(value, plain) and name != "layer_idx"
    )


def turning_of(parts: Layers, index: int, rotary: Rotary, query_norm: Any) -> tuple[bool, bool]:
    """Returns whether a layer rotates queries and keys, and whether it rotates them before it normalizes them.

    Two rows pass through the layer's attention: a result that depends on the cosines was rotated.
    """
    attention = parts.layers[index].self_attn
    weight = next(attention.parameters())
    more: dict[str, Any] = {}
    if "shared_kv_states" in signature(type(attention).forward).parameters:
        more["shared_kv_states"] = {}
    x = torch.zeros(1, 2, parts.config.hidden_size, dtype=weight.dtype, device=weight.device)
    tables = rotary(torch.arange(2)[None], parts.kinds[index])
    inputs: list[Tensor] = []
    hook = None
    if query_norm is not None:
        hook = query_norm.register_forward_pre_hook(lambda module, args: inputs.append(args[0]))
    try:
        with torch.enable_grad():
            cos, sin = (table.to(weight).requires_grad_() for table in tables)
            out = attention(
                hidden_states=x,
                position_embeddings=(cos, sin),
                attention_mask=None,
                position_ids=torch.arange(2, device=weight.device)[None],
                **more,
            )[0]
            return _depends(out, cos), any(_depends(rows, cos) for rows in inputs)
    finally:
        if hook is not None:
            hook.remove()


def _depends(result: Tensor, source: Tensor) -> bool:
    if not result.requires_grad:
        return False
    [gradient] = torch.autograd.grad(result.sum(), source, retain_graph=True, allow_unused=True)
    return gradient is not None


def quarter_turn(attention: Any) -> list[float]:
    """Returns `rotate_half` of 0, 1, 2, 3, from the Python module of an attention class; empty if it has none.

    If the function swaps adjacent numbers, rotary embeddings rotate adjacent pairs, else the halves of a head.
    """
    rotate_half = getattr(sys.modules[type(attention).__module__], "rotate_half", None)
    return [] if rotate_half is None else list(rotate_half(torch.arange(4.0)).tolist())


class _Reached(Exception):
    """Ends a pass at a layer."""


def norms_first(parts: Layers, masks: Masks) -> bool:
    """Returns True if the final norm also runs before the first layer, as a pass up to that layer shows.

    A norm with a gain needs no pass: no network uses such a norm in two places.
    """
    if has_gain(parts.norm):
        return False
    calls: list[Any] = []

    def stop(*_: Any) -> None:
        raise _Reached

    hooks = [
        parts.norm.register_forward_pre_hook(lambda module, args: calls.append(args)),
        parts.layers[0].register_forward_pre_hook(stop),
    ]
    device = parts.base.embed_tokens.weight.device
    token = torch.zeros(1, 1, dtype=torch.long, device=device)
    mask = masks.for_network(masks.causal(1, device))
    try:
        parts.base(input_ids=token, attention_mask=mask, position_ids=token, use_cache=False)
    except _Reached:
        pass
    finally:
        for hook in hooks:
            hook.remove()
    return bool(calls)


def embedding_scale(base: Any) -> float:
    """Returns the factor by which embeddings are multiplied."""
    scale = getattr(base.embed_tokens, "scalar_embed_scale", None)
    return float(getattr(base, "embedding_multiplier", 1.0) if scale is None else scale)


def activation_of_mlp(mlp: Any) -> Activation:
    """Returns the activation of an MLP; raises Unsupported if the library does not have it."""
    function = first_of(mlp, ACTIVATION_NAMES)
    if is_xielu(function):
        return Activation(XIELU)
    return Activation(_number_of(function))


def is_xielu(function: Any) -> bool:
    return all(hasattr(function, name) for name in XIELU_VECTORS)


def activation_of_experts(experts: Any) -> Activation:
    """Returns the activation of experts, found by probing how they combine gate and up.

    Raises Unsupported if the library does not have the activation.
    """
    function = first_of(experts, ACTIVATION_NAMES)
    join = getattr(experts, "_apply_gate", None)
    if join is None:
        return Activation(_number_of(function))

    def joined(gate: Tensor, up: Tensor) -> Tensor:
        if getattr(experts, "is_concatenated", True):
            gate_up = torch.cat([gate, up], dim=-1)
        else:
            gate_up = torch.stack([gate, up], dim=-1).flatten(-2)
        values: Tensor = join(gate_up)
        return values

    # A small gate shows alpha if up is 0, and the limit if up is far beyond the limit.
    small = torch.full((1,), 2.0**-6, dtype=torch.float64)
    without_up = joined(small, 0 * small)
    alpha = round(float((without_up / small).logit() / small), 4)
    limit = round(float(joined(small, torch.full_like(small, 1e4)) / without_up), 4) - 1
    gate = torch.linspace(-20, 20, 101)
    up = gate.flip(0) + gate.sin()
    known = gate.clamp(max=limit)
    known = known * torch.sigmoid(alpha * known) * (up.clamp(-limit, limit) + 1)
    if torch.allclose(joined(gate, up), known, atol=1e-5):
        return Activation(CLAMPED_SWIGLU, alpha, limit)
    number = _number_of(function)
    known = list(ACTIVATIONS.values())[number](gate) * up
    if not torch.allclose(joined(gate, up), known, atol=1e-3):
        raise Unsupported("its experts' way of joining gate and up is not supported")
    return Activation(number)


def _number_of(function: Any) -> int:
    """Returns the library's number for an activation function, found by comparing values.

    Raises Unsupported if the library does not have the function.
    """
    if function is None:  # LFM2's MLP does not name its activation; the twin verifies SiLU
        function = F.silu
    probe = torch.linspace(-6, 6, 101)
    values = function(probe)
    for number, known in enumerate(ACTIVATIONS.values()):
        if torch.allclose(values, known(probe), atol=1e-5):
            return number
    raise Unsupported(f"its activation {type(function).__name__} is not supported")
