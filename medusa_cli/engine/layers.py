"""A decoder's layers written out over fused products, with few operations between them; fit to be traced.

Known parts: RMS norms, rotary self-attention with optional norms on queries and keys, a gated MLP, and Gemma's norms
after attention and MLP. Any other layer is `Unsupported`.
"""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from medusa_cli.engine.kernels import Kernel
from medusa_cli.model.backbone import Unsupported


class Norm(nn.Module):
    """Computes x / rms(x) * gain over the last dimension in fp32."""

    gain: Tensor
    eps: Tensor

    def __init__(self, gain: Tensor, eps: float) -> None:
        super().__init__()
        self.register_buffer("gain", gain, persistent=False)
        self.register_buffer("eps", gain.new_tensor([eps]), persistent=False)
        self.share = 1.0 / len(gain)

    def forward(self, x: Tensor) -> Tensor:
        norm = torch.linalg.vector_norm(x, dim=-1, keepdim=True, dtype=torch.float32)
        scale = torch.addcmul(self.eps, norm, norm, value=self.share).rsqrt_()
        return (x * scale).mul_(self.gain).to(x.dtype)


def norm_of(module: Any) -> Norm:
    """Returns the same norm in fewer operations; Unsupported unless it is an RMS norm with gain w or 1 + w (Gemma)."""
    eps = getattr(module, "variance_epsilon", getattr(module, "eps", None))
    weight = getattr(module, "weight", None)
    if eps is None or weight is None or weight.dim() != 1:
        raise Unsupported(f"{type(module).__name__} is no RMS norm")
    probe = torch.linspace(-2, 3, 2 * weight.numel(), dtype=weight.dtype, device=weight.device).view(2, -1)
    expected = module(probe).float()
    for gain in (weight.detach().float(), 1 + weight.detach().float()):
        norm = Norm(gain, eps)
        if torch.allclose(norm(probe).float(), expected, rtol=2e-2, atol=1e-3):
            return norm
    raise Unsupported(f"{type(module).__name__} computes something other than an RMS norm")


class FastLayer(nn.Module):
    """One decoder layer on rows [B * R, H] of B slots, whose keys and values it writes in place.

    kind and table: the indices of its masks and rotary tables.
    """

    def __init__(self, layer: Any, config: Any, kernel: Kernel, kind: int, table: int) -> None:
        super().__init__()
        attention, mlp = getattr(layer, "self_attn", None), getattr(layer, "mlp", None)
        if not all(hasattr(attention, name) for name in ("q_proj", "k_proj", "v_proj", "o_proj", "scaling")) or not all(
            hasattr(mlp, name) for name in ("gate_proj", "up_proj", "down_proj", "act_fn")
        ):
            raise Unsupported("its layers are not self-attention and a gated MLP")
        assert attention is not None and mlp is not None
        after = hasattr(layer, "post_feedforward_layernorm")
        if after != hasattr(layer, "pre_feedforward_layernorm"):
            raise Unsupported("its norms are placed in a way not known here")
        self.kind, self.table = kind, table
        self.dim: int = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        self.heads: int = config.num_attention_heads
        self.kv: int = config.num_key_value_heads
        self.scale: float = attention.scaling
        self.attention_norm = norm_of(layer.input_layernorm)
        self.qkv = kernel.join([attention.q_proj, attention.k_proj, attention.v_proj])
        self.query_norm = norm_of(attention.q_norm) if hasattr(attention, "q_norm") else None
        self.key_norm = norm_of(attention.k_norm) if hasattr(attention, "k_norm") else None
        self.out = kernel.join([attention.o_proj])
        self.out_norm = norm_of(layer.post_attention_layernorm) if after else None
        self.mlp_norm = norm_of(layer.pre_feedforward_layernorm if after else layer.post_attention_layernorm)
        self.gate_up = kernel.join([mlp.gate_proj, mlp.up_proj])
        self.activation: Callable[[Tensor], Tensor] = mlp.act_fn
        self.down = kernel.join([mlp.down_proj])
        self.down_norm = norm_of(layer.post_feedforward_layernorm) if after else None
        self.nbytes = sum(product.nbytes for product in (self.qkv, self.out, self.gate_up, self.down))

    def project(self, x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Returns queries [B * R, heads, D], keys and values [B * R, KV, D], rotated by tables [B * R, 1, D]."""
        qkv = self.qkv(self.attention_norm(x)).view(-1, self.heads + 2 * self.kv, self.dim)
        query_key, value = qkv.split([self.heads + self.kv, self.kv], dim=1)
        if self.query_norm is not None and self.key_norm is not None:
            query, key = query_key.split([self.heads, self.kv], dim=1)
            query_key = torch.cat([self.query_norm(query), self.key_norm(key)], dim=1)
        query_key = torch.addcmul(query_key * cos, query_key.roll(self.dim // 2, -1), sin)
        query, key = query_key.split([self.heads, self.kv], dim=1)
        return query, key, value

    def finish(self, x: Tensor, attended: Tensor) -> Tensor:
        """Returns the layer's output [B * R, H] from its input and the attention's [B * R, heads * D]."""
        x = self.out.plus(attended, x) if self.out_norm is None else x + self.out_norm(self.out(attended))
        gate, up = self.gate_up(self.mlp_norm(x)).chunk(2, dim=-1)
        inner = self.activation(gate).mul_(up)
        if self.down_norm is not None:
            return x + self.down_norm(self.down(inner))
        return self.down.plus(inner, x)


def attention(
    layer: FastLayer,
    rows: tuple[Tensor, Tensor, Tensor],
    mask: Tensor,
    columns: Tensor,
    keys: Tensor,
    values: Tensor,
    path: str,
) -> Tensor:
    """Writes projected rows into the cache and attends them to it; returns [B * R, heads * D].

    keys, values [B * KV, C, D]; mask [B * KV, G * R, L], over the first L columns; columns [B, R]: where each slot's
    rows are written. path "slot" is for one slot, with columns [start, 0]: a trace keeps that size open. path "fused"
    is torch's fused attention, for many rows and for GPUs; its mask is [B, 1, G * R, L].
    """
    query, key, value = rows
    wide = mask.shape[-1]
    if path == "slot":
        size, start = 1, columns.shape[0]
        end = start + query.shape[0]
        keys[:, start:end].copy_(key.transpose(0, 1))
        values[:, start:end].copy_(value.transpose(0, 1))
    else:
        size, count = columns.shape[0], columns.shape[1]
        slots = torch.arange(size, device=columns.device)[:, None]
        for cached, new in ((keys, key), (values, value)):
            by_slot = cached.unflatten(0, (size, layer.kv)).transpose(1, 2)
            by_slot.index_put_((slots, columns), new.view(size, count, layer.kv, layer.dim))
    query = query.view(size, -1, layer.heads, layer.dim).transpose(1, 2).reshape(size * layer.kv, -1, layer.dim)
    seen_keys, seen_values = keys[:, :wide], values[:, :wide]
    if path == "fused":
        if seen_keys.stride(-1) != 1:  # transposed keys are slow there
            seen_keys = seen_keys.contiguous()
        # Only products of four dimensions have fused kernels.
        q, k, v = (x.unflatten(0, (size, layer.kv)) for x in (query, seen_keys, seen_values))
        attended = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=layer.scale)
    else:
        scores = torch.baddbmm(mask, query, seen_keys.transpose(1, 2), alpha=layer.scale)
        attended = torch.bmm(scores.softmax(-1), seen_values)
    attended = attended.reshape(size, layer.heads, -1, layer.dim).transpose(1, 2)
    return attended.reshape(-1, layer.heads * layer.dim)


class Segment(nn.Module):
    """Consecutive layers, and with a norm the last one after them."""

    def __init__(self, layers: Iterable[nn.Module], norm: nn.Module | None, path: str) -> None:
        super().__init__()
        self.layers, self.norm, self.path = nn.ModuleList(layers), norm, path

    def forward(
        self,
        x: Tensor,
        masks: list[Tensor],
        cos: list[Tensor],
        sin: list[Tensor],
        columns: Tensor,
        keys: Tensor,
        values: Tensor,
    ) -> Tensor:
        """Returns states [B * R, H] after the layers; masks and tables as their indices say, keys, values by layer."""
        layer: Any
        for layer, key, value in zip(self.layers, keys.unbind(0), values.unbind(0), strict=True):
            rows = layer.project(x, cos[layer.table], sin[layer.table])
            x = layer.finish(x, attention(layer, rows, masks[layer.kind], columns, key, value, self.path))
        return x if self.norm is None else self.norm(x)
