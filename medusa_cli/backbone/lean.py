"""The fast engine: a decoder's layers written out over fused (on a CPU packed) weights, with little between them.

It computes what the transformers model computes. What it knows are the parts most decoders are made of (RMS norms,
rotary self-attention with or without norms on queries and keys, a gated MLP); any other model is `Unsupported` and
keeps the eager engine.
"""

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from medusa_cli.backbone.layered import Layers, Unsupported, cut
from medusa_cli.backbone.packed import ROWS_HINT, can_pack
from medusa_cli.backbone.pseudo import Riders
from medusa_cli.backbone.rounded import FEW_ROWS, Rounded, round_weight

# Where weights are not packed but only fused: the libraries of these devices read the plain layout.
PLAIN = ("cuda",)
# Between these numbers of rows two plain products over turned keys beat torch's fused attention, up to twice; after a
# long text they do for fewer rows as well.
FEW, MANY, LONG = 5, 128, 1024


class Linear:
    """One or more nn.Linear on the same input as one product, packed on a CPU, with what follows it on the way out.

    bits: round the weights to so many, where there is a kernel; few rows then go through that.
    """

    def __init__(self, *linears: Any, bits: int | None = None) -> None:
        for linear in linears:
            plain = linear.weight.device.type in PLAIN
            if type(linear) is not nn.Linear or not (plain or can_pack(linear.weight)):
                raise Unsupported(f"a layer is {type(linear).__name__} without a packed kernel")
        weights = [linear.weight.detach() for linear in linears]
        biases = [linear.bias for linear in linears]
        if any(bias is None for bias in biases) != all(bias is None for bias in biases):
            raise Unsupported("only some of its fused layers have a bias")
        self.bias = None if biases[0] is None else torch.cat([bias.detach() for bias in biases])
        self.weight = weights[0] if len(weights) == 1 else torch.cat(weights)
        self.packed = not plain
        self.rounded: Rounded | None = None
        self.nbytes = self.weight.nbytes
        self.few = 0  # elements of the widest input that goes through the rounded weights
        if bits is not None and (made := round_weight(self.weight, bits)) is not None:
            self.rounded, self.weight = made
            self.nbytes = self.weight.numel() * bits // 8
            self.few = FEW_ROWS[bits] * self.weight.shape[1]
        if self.packed:
            self.weight = torch.ops.mkldnn._reorder_linear_weight(self.weight.contiguous(), ROWS_HINT)

    def __call__(self, x: Tensor) -> Tensor:
        if self.rounded is not None and x.numel() <= self.few:
            return self._few(self.rounded, x)
        if not self.packed:
            return F.linear(x, self.weight, self.bias)
        return torch.ops.mkldnn._linear_pointwise(x, self.weight, self.bias, "none", [], "")

    def plus(self, x: Tensor, other: Tensor) -> Tensor:
        """W x + b + other."""
        if self.rounded is not None and x.numel() <= self.few:
            return self._few(self.rounded, x).add_(other)
        if not self.packed:
            return F.linear(x, self.weight, self.bias).add_(other)
        return torch.ops.mkldnn._linear_pointwise.binary(x, other, self.weight, self.bias, "add")

    def _few(self, product: Rounded, x: Tensor) -> Tensor:
        found = product(x.reshape(-1, x.shape[-1])).view(*x.shape[:-1], -1)
        return found if self.bias is None else found.add_(self.bias)


Norm = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class _Layer:
    """One decoder layer's parts; the norms after attention and MLP exist in Gemma alone."""

    kind: str  # "full_attention" or "sliding_attention"
    attention_norm: Norm
    qkv: Linear
    query_norm: Norm | None
    key_norm: Norm | None
    out: Linear
    out_norm: Norm | None
    mlp_norm: Norm
    gate_up: Linear
    activation: Callable[[Tensor], Tensor]
    down: Linear
    down_norm: Norm | None


class LeanDecoder:
    """The layers of a transformers decoder; raises Unsupported where its parts are not those this engine knows.

    bits: round the weights of its linear layers to so many.
    """

    def __init__(self, model: Any, bits: int | None = None) -> None:
        config = model.config.get_text_config()
        self._parts = Layers(model)
        layers, kinds = self._parts.layers, self._parts.kinds
        self.head_dim: int = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        self.heads: int = config.num_attention_heads
        self.kv_heads: int = config.num_key_value_heads
        self._layers = [_layer(layer, kind, bits) for layer, kind in zip(layers, kinds, strict=True)]
        self._kinds = sorted(set(kinds))
        self._scale: float = layers[0].self_attn.scaling
        self._norm = rms_norm(self._parts.base.norm)
        # Four bits are too few for the last matrix: alone they moved the default model ten times as far as all others.
        self.lm_head = Linear(model.get_output_embeddings(), bits=bits and 8)

    def __call__(
        self,
        tokens: Tensor,
        cache: Any,
        mask: Tensor | dict[str, Tensor],
        positions: Tensor,
        taps: Sequence[int],
        riders: Riders | None = None,
    ) -> Tensor:
        """States [B, n, H * taps] of tokens [B, n] at positions [B, n]; keys and values go into the cache.

        With riders, positions and masks are theirs too, and so are the final states after the n.
        """
        x = self._parts.base.embed_tokens(tokens)
        every = {kind: self._rotary(x, positions, kind) for kind in self._kinds}
        whole = mask if isinstance(mask, dict) else dict.fromkeys(self._kinds, mask)
        masks, tables = self._for_rows(tokens.shape[1], whole, every, cache)
        tapped: dict[int, Tensor] = {}
        for index, layer in enumerate(self._layers):
            if riders is not None and index in riders.pseudo.layers:
                x = riders.enter(index, x)
                masks, tables = self._for_rows(x.shape[1], whole, every, cache)
            x = self._attend(layer, x, tables[layer.kind], cache.layers[index], masks[layer.kind])
            x = self._mlp(layer, x)
            if index in taps:
                tapped[index] = x
        tapped[-1] = self._norm(x)
        return tapped[-1] if tuple(taps) == (-1,) else torch.cat([tapped[tap] for tap in taps], dim=-1)

    @property
    def weight_bytes(self) -> int:
        """Bytes of the matrices that a step over few rows reads, scales apart."""
        layers = [(one.qkv, one.out, one.gate_up, one.down) for one in self._layers]
        return sum(one.nbytes for one in (*itertools.chain(*layers), self.lm_head))

    def _for_rows(
        self, rows: int, masks: dict[str, Tensor], tables: dict[str, tuple[Tensor, Tensor]], cache: Any
    ) -> tuple[dict[str, Tensor], dict[str, tuple[Tensor, Tensor]]]:
        """Masks and rotary tables, by kind, of the layers in which there are the first `rows` rows alone."""
        masks = {kind: cut(mask, rows) for kind, mask in masks.items()}
        if rows > 1:  # once a pass, not once a layer: query heads that share keys are rows of one product
            masks = {kind: mask.repeat(1, 1, self.heads // self.kv_heads, 1) for kind, mask in masks.items()}
        columns = next(iter(masks.values())).shape[3]
        if _turned(cache, rows, columns):
            more = cache.rounded(columns) - columns
            masks = {kind: F.pad(mask, (0, more), value=torch.finfo(mask.dtype).min) for kind, mask in masks.items()}
        return masks, {kind: (cos[:, :rows], sin[:, :rows]) for kind, (cos, sin) in tables.items()}

    def _rotary(self, x: Tensor, positions: Tensor, kind: str) -> tuple[Tensor, Tensor]:
        """Cosines and sines [B, n, 1, D]; the first half of the sines negated, as rotating halves needs them."""
        cos, sin = self._parts.rotary(x, positions, kind)
        half = sin.shape[-1] // 2
        signed = torch.cat([-sin[..., :half], sin[..., half:]], dim=-1)
        return cos[:, :, None], signed[:, :, None]

    def _attend(self, layer: _Layer, x: Tensor, table: tuple[Tensor, Tensor], cache: Any, mask: Tensor) -> Tensor:
        batch, rows = x.shape[:2]
        found = layer.qkv(layer.attention_norm(x)).view(batch, rows, -1, self.head_dim)
        query_key, value = found.split([self.heads + self.kv_heads, self.kv_heads], dim=2)
        if layer.query_norm is not None and layer.key_norm is not None:
            query, key = query_key.split([self.heads, self.kv_heads], dim=2)
            query_key = torch.cat([layer.query_norm(query), layer.key_norm(key)], dim=2)
        cos, sin = table
        query_key = torch.addcmul(query_key * cos, query_key.roll(self.head_dim // 2, -1), sin)
        query, key = query_key.transpose(1, 2).split([self.heads, self.kv_heads], dim=1)
        keys, values = cache.update(key, value.transpose(1, 2))
        query = query.reshape(batch, self.kv_heads, -1, self.head_dim)
        if _turned(cache.owner, rows, keys.shape[2]):
            turned, values = cache.turned
            scores = torch.baddbmm(mask[0], query[0], turned, alpha=self._scale)  # [KV, G * n, L']
            attended = torch.bmm(scores.softmax(-1), values[0])
        else:
            attended = F.scaled_dot_product_attention(query, keys, values, attn_mask=mask, scale=self._scale)
        attended = attended.view(batch, self.heads, rows, -1).transpose(1, 2).reshape(batch, rows, -1)
        if layer.out_norm is not None:
            return x + layer.out_norm(layer.out(attended))
        return layer.out.plus(attended, x)

    def _mlp(self, layer: _Layer, x: Tensor) -> Tensor:
        gate, up = layer.gate_up(layer.mlp_norm(x)).chunk(2, dim=-1)
        inner = layer.activation(gate).mul_(up)
        if layer.down_norm is not None:
            return x + layer.down_norm(layer.down(inner))
        return layer.down.plus(inner, x)


def _turned(cache: Any, rows: int, columns: int) -> bool:
    """Whether so many rows attend to so many columns by products over the cache's turned keys."""
    return cache.turns and (rows > FEW or columns > LONG) and rows <= MANY


def _layer(layer: Any, kind: str, bits: int | None) -> _Layer:
    attention: Any = getattr(layer, "self_attn", None)
    mlp: Any = getattr(layer, "mlp", None)
    if not all(hasattr(attention, name) for name in ("q_proj", "k_proj", "v_proj", "o_proj", "scaling")) or not all(
        hasattr(mlp, name) for name in ("gate_proj", "up_proj", "down_proj", "act_fn")
    ):
        raise Unsupported("its layers are not self-attention and a gated MLP")
    after = hasattr(layer, "post_feedforward_layernorm")
    if after != hasattr(layer, "pre_feedforward_layernorm"):
        raise Unsupported("its norms are placed in a way not known here")
    return _Layer(
        kind=kind,
        attention_norm=rms_norm(layer.input_layernorm),
        qkv=Linear(attention.q_proj, attention.k_proj, attention.v_proj, bits=bits),
        query_norm=rms_norm(attention.q_norm) if hasattr(attention, "q_norm") else None,
        key_norm=rms_norm(attention.k_norm) if hasattr(attention, "k_norm") else None,
        out=Linear(attention.o_proj, bits=bits),
        out_norm=rms_norm(layer.post_attention_layernorm) if after else None,
        mlp_norm=rms_norm(layer.pre_feedforward_layernorm if after else layer.post_attention_layernorm),
        gate_up=Linear(mlp.gate_proj, mlp.up_proj, bits=bits),
        activation=mlp.act_fn,
        down=Linear(mlp.down_proj, bits=bits),
        down_norm=rms_norm(layer.post_feedforward_layernorm) if after else None,
    )


def rms_norm(module: Any) -> Norm:
    """The same norm in fewer operations; Unsupported if it is no RMS norm with gain w (Llama) or 1 + w (Gemma)."""
    eps = getattr(module, "variance_epsilon", getattr(module, "eps", None))
    weight = getattr(module, "weight", None)
    if eps is None or weight is None or weight.dim() != 1:
        raise Unsupported(f"{type(module).__name__} is no RMS norm")
    probe = torch.linspace(-2, 3, 2 * weight.numel(), dtype=weight.dtype, device=weight.device).view(2, -1)
    expected = module(probe).float()
    for gain in (weight.detach().float(), 1 + weight.detach().float()):
        norm = _RMSNorm(gain, eps)
        if torch.allclose(norm(probe).float(), expected, rtol=2e-2, atol=1e-3):
            return norm
    raise Unsupported(f"{type(module).__name__} computes something other than an RMS norm")


class _RMSNorm:
    """x / rms(x) * gain over the last dimension, computed in fp32."""

    def __init__(self, gain: Tensor, eps: float) -> None:
        self._gain, self._share = gain, 1.0 / len(gain)
        self._eps = gain.new_tensor([eps])

    def __call__(self, x: Tensor) -> Tensor:
        norm = torch.linalg.vector_norm(x, dim=-1, keepdim=True, dtype=torch.float32)
        scale = torch.addcmul(self._eps, norm, norm, value=self._share).rsqrt_()
        return (x * scale).mul_(self._gain).to(x.dtype)


def release_linears(model: nn.Module) -> None:
    """Free the weights of a network's linear layers, which the packed ones replace."""
    for module in model.modules():
        if type(module) is nn.Linear:
            module.weight = nn.Parameter(torch.empty(0), requires_grad=False)
