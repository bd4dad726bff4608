"""A decoder's layers written out over fused products, with few operations between them; fit to be traced.

Known parts: RMS norms, rotary self-attention with optional norms on queries and keys, a gated MLP, and Gemma's norms
after attention and MLP. Any other layer is `Unsupported`.
"""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

from medusa_cli.engine.attention import attend, behind, fused
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

    def project(self, x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        """Returns queries and keys [B * R, heads + KV, D], rotated by tables [B * R, 1, D], and values [B * R, KV, D].

        x may have more rows, which only make products faster or row-invariant.
        """
        qkv = self.qkv(self.attention_norm(x)).narrow(0, 0, cos.shape[0]).view(-1, self.heads + 2 * self.kv, self.dim)
        query_key, value = qkv.split([self.heads + self.kv, self.kv], dim=1)
        if self.query_norm is not None and self.key_norm is not None:
            query, key = query_key.split([self.heads, self.kv], dim=1)
            query_key = torch.cat([self.query_norm(query), self.key_norm(key)], dim=1)
        return torch.addcmul(query_key * cos, query_key.roll(self.dim // 2, -1), sin), value

    def finish(self, x: Tensor, attended: Tensor) -> Tensor:
        """Returns the layer's output [B * R, H] from its input and the attention's [B * R, heads * D]."""
        y = self.out(attended)
        x = x + (y if self.out_norm is None else self.out_norm(y))
        gate, up = self.gate_up(self.mlp_norm(x)).chunk(2, dim=-1)
        inner = self.activation(gate).mul_(up)
        y = self.down(inner)
        return x + (y if self.down_norm is None else self.down_norm(y))


class Segment(nn.Module):
    """Consecutive layers, and with a norm the last one after them.

    path: "slot" attends one slot, with columns [start, 0], as a trace keeps that size open; "slots" several; "fused" by
    torch's fused attention.
    """

    def __init__(self, layers: Iterable[nn.Module], norm: nn.Module | None, path: str) -> None:
        super().__init__()
        self.layers, self.norm, self.path = nn.ModuleList(layers), norm, path

    def forward(
        self,
        x: Tensor,
        feed: Tensor,
        masks: list[Tensor],
        orders: list[Tensor],
        back: Tensor,
        cos: list[Tensor],
        sin: list[Tensor],
        columns: Tensor,
        keys: Tensor,
        values: Tensor,
    ) -> Tensor:
        """Returns states [B * R, H] after the layers.

        feed: the rows of x that products see, those of the pass first. masks by kind of layer and piece of attention;
        orders of pieces (on a GPU those of `columns_read`, or none); back: the places of `attention.pieces_of`. cos,
        sin by table. columns [B, R]: where each slot gets its rows. keys [layers, B * KV, C, D], values
        [layers, B * KV, C, W].
        """
        layer: Any
        rows, pieces = x.shape[0], len(orders)
        if self.path != "fused":
            x = x.index_select(0, feed)
        for layer, key, value in zip(self.layers, keys.unbind(0), values.unbind(0), strict=True):
            query_key, new = layer.project(x, cos[layer.table], sin[layer.table])
            self._write(layer, key, query_key.narrow(1, layer.heads, layer.kv), columns)
            self._write(layer, value.narrow(2, 0, layer.dim), new, columns)
            if self.path == "fused":
                query, new_keys = query_key.split([layer.heads, layer.kv], dim=1)
                mask = masks[layer.kind]
                if orders and mask.shape[-1] == columns.shape[1]:
                    attended = behind(query, key, value, new_keys, new, mask, orders, layer.scale)
                else:
                    attended = fused(query, key, value, mask, layer.kv, layer.scale)
            else:
                seen = masks[layer.kind * pieces : (layer.kind + 1) * pieces]
                attended = attend(query_key, key, value, seen, orders, back, layer.scale)
            x = layer.finish(x, attended.view(-1, layer.heads * layer.dim))
        x = x.narrow(0, 0, rows)
        return x if self.norm is None else self.norm(x)

    def _write(self, layer: FastLayer, cached: Tensor, new: Tensor, columns: Tensor) -> None:
        """Writes rows [B * R, KV, D] into their columns of the cache [B * KV, C, D]."""
        if self.path == "slot":
            cached.narrow(1, columns.shape[0], new.shape[0]).copy_(new.transpose(0, 1))
            return
        size, count = columns.shape[0], columns.shape[1]
        slots = torch.arange(size, device=columns.device)[:, None]
        by_slot = cached.unflatten(0, (size, layer.kv)).transpose(1, 2)
        by_slot.index_put_((slots, columns), new.reshape(size, count, layer.kv, layer.dim).to(cached.dtype))
