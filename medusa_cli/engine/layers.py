"""A decoder's layers written out over fused products, with little between them; made so that they can be traced.

Known are the parts most decoders are made of: RMS norms, rotary self-attention with or without norms on queries and
keys, a gated MLP, and Gemma's norms after attention and MLP. Any other layer is `Unsupported`.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from medusa_cli.engine.kernels import Kernel
from medusa_cli.model.backbone import Unsupported


class Norm(nn.Module):
    """x / rms(x) * gain over the last dimension, computed in fp32."""

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
    """The same norm in fewer operations; Unsupported if it is no RMS norm with gain w (Llama) or 1 + w (Gemma)."""
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
    """One decoder layer on rows [B * R, H] of B slots, written into the slots' keys and values in place."""

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
        # Which of the pass's masks and rotary tables are this layer's.
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

    @property
    def nbytes(self) -> int:
        return sum(one.nbytes for one in (self.qkv, self.out, self.gate_up, self.down))

    def project(self, x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Queries [B * R, heads, D], keys and values [B * R, KV, D] of rows, turned by tables [B * R, 1, D]."""
        found = self.qkv(self.attention_norm(x)).view(-1, self.heads + 2 * self.kv, self.dim)
        query_key, value = found.split([self.heads + self.kv, self.kv], dim=1)
        if self.query_norm is not None and self.key_norm is not None:
            query, key = query_key.split([self.heads, self.kv], dim=1)
            query_key = torch.cat([self.query_norm(query), self.key_norm(key)], dim=1)
        query_key = torch.addcmul(query_key * cos, query_key.roll(self.dim // 2, -1), sin)
        query, key = query_key.split([self.heads, self.kv], dim=1)
        return query, key, value

    def finish(self, x: Tensor, seen: Tensor) -> Tensor:
        """The layer's rows [B * R, H], from what they were and what attention gave [B * R, heads * D]."""
        x = self.out.plus(seen, x) if self.out_norm is None else x + self.out_norm(self.out(seen))
        gate, up = self.gate_up(self.mlp_norm(x)).chunk(2, dim=-1)
        inner = self.activation(gate).mul_(up)
        if self.down_norm is not None:
            return x + self.down_norm(self.down(inner))
        return self.down.plus(inner, x)


def attend_one(layer: FastLayer, rows: tuple[Tensor, Tensor, Tensor], mask: Tensor, past: Tensor, kv: Any) -> Tensor:
    """What the rows [R] of one slot see; mask [KV, G * R, L], past [length, 0] (its size is a number that a trace keeps
    open), kv: keys and values [KV, C, D] to write into. Gives [R, heads * D]."""
    (query, key, value), (keys, values) = rows, kv
    start, wide = past.shape[0], mask.shape[-1]
    end = start + query.shape[0]
    keys[:, start:end].copy_(key.transpose(0, 1))
    values[:, start:end].copy_(value.transpose(0, 1))
    query = query.transpose(0, 1).reshape(layer.kv, -1, layer.dim)
    scores = torch.baddbmm(mask, query, keys[:, :wide].transpose(1, 2), alpha=layer.scale)
    seen = torch.bmm(scores.softmax(-1), values[:, :wide])
    return seen.view(layer.heads, -1, layer.dim).transpose(0, 1).reshape(-1, layer.heads * layer.dim)


def attend_many(layer: FastLayer, rows: tuple[Tensor, Tensor, Tensor], mask: Tensor, places: Tensor, kv: Any) -> Tensor:
    """What the rows [B * R] of B slots see; mask [B * KV, G * R, L], places [B, R] (where rows are written), kv:
    keys and values [B, KV, C, D]. Gives [B * R, heads * D]."""
    (query, key, value), (keys, values) = rows, kv
    size, count = places.shape[0], places.shape[1]
    order = torch.arange(size, device=places.device)[:, None]
    keys.transpose(1, 2).index_put_((order, places), key.view(size, count, layer.kv, layer.dim))
    values.transpose(1, 2).index_put_((order, places), value.view(size, count, layer.kv, layer.dim))
    wide = mask.shape[-1]
    query = query.view(size, count, layer.heads, layer.dim).transpose(1, 2)
    query = query.reshape(size * layer.kv, -1, layer.dim)
    scores = torch.baddbmm(mask, query, keys.flatten(0, 1)[:, :wide].transpose(1, 2), alpha=layer.scale)
    seen = torch.bmm(scores.softmax(-1), values.flatten(0, 1)[:, :wide])
    seen = seen.view(size, layer.heads, count, layer.dim).transpose(1, 2)
    return seen.reshape(size * count, layer.heads * layer.dim)


def attend_fused(
    layer: FastLayer, rows: tuple[Tensor, Tensor, Tensor], mask: Tensor, places: Tensor, kv: Any
) -> Tensor:
    """The same by torch's fused attention, for many rows and for GPUs; mask [B, 1, G * R, L]."""
    (query, key, value), (keys, values) = rows, kv
    size, count = places.shape[0], places.shape[1]
    order = torch.arange(size, device=places.device)[:, None]
    keys.transpose(1, 2).index_put_((order, places), key.view(size, count, layer.kv, layer.dim))
    values.transpose(1, 2).index_put_((order, places), value.view(size, count, layer.kv, layer.dim))
    wide = mask.shape[-1]
    query = query.view(size, count, layer.heads, layer.dim).transpose(1, 2).reshape(size, layer.kv, -1, layer.dim)
    seen_keys = keys[:, :, :wide]
    if seen_keys.stride(-1) != 1:  # transposed keys are slow there
        seen_keys = seen_keys.contiguous()
    seen = F.scaled_dot_product_attention(query, seen_keys, values[:, :, :wide], attn_mask=mask, scale=layer.scale)
    seen = seen.reshape(size, layer.heads, count, layer.dim).transpose(1, 2)
    return seen.reshape(size * count, layer.heads * layer.dim)
