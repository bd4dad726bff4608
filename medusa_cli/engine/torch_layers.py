"""The torch engine for GPUs: a decoder's layers rewritten with joined matrices and fewer operations.

The engine supports RMS norms, rotary self-attention with optional norms of queries and keys, a gated
MLP, and Gemma's norms after attention and MLP. For any other layer, it raises Unsupported.
"""

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from medusa_cli.device import numbered
from medusa_cli.engine.attention import behind, columns_read, fused, reads_by_length
from medusa_cli.engine.cache import Cache
from medusa_cli.engine.engine import LayoutEngine
from medusa_cli.engine.plan import Layout, Plan
from medusa_cli.engine.probes import eps_of
from medusa_cli.engine.reach import LAG, Reach
from medusa_cli.engine.tiles import TileLinear, Tiles
from medusa_cli.model.backbone import Backbone, Layers, Unsupported, padded_pass
from medusa_cli.model.checks import FAULTS, probe_tokens
from medusa_cli.model.masks import Masks

# Tokens in each pass that compares the layers with the network, at the first and at the last positions.
TOKENS = 12
# The allowed relative difference from the network's states, by number type.
TOLERANCE = {torch.float32: 1e-3, torch.float16: 0.02, torch.bfloat16: 0.1}


class Norm(nn.Module):
    """Computes x / rms(x) * gain over the last dimension in one kernel."""

    gain: Tensor

    def __init__(self, gain: Tensor, eps: float) -> None:
        super().__init__()
        self.register_buffer("gain", gain, persistent=False)
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, self.gain.shape, self.gain, self.eps)


def norm_of(module: Any) -> Norm:
    """Returns a Norm that computes a module's norm in fewer operations.

    Raises Unsupported unless the module is an RMS norm with gain w or 1 + w (Gemma).
    """
    eps = eps_of(module)
    weight = module.weight
    probe = torch.linspace(
        -2, 3, 2 * weight.numel(), dtype=weight.dtype, device=weight.device
    ).view(2, -1)
    expected = module(probe).float()
    for gain in (weight.detach().float(), 1 + weight.detach().float()):
        norm = Norm(gain.to(weight.dtype), eps)
        if torch.allclose(norm(probe).float(), expected, rtol=2e-2, atol=1e-3):
            return norm
    raise Unsupported(f"{type(module).__name__} computes something other than an RMS norm")


class Joined(nn.Module):
    """Linear layers that read the same rows, joined into one matmul with a copy of their weights."""

    weight: Tensor
    bias: Tensor | None

    def __init__(self, linears: Sequence[nn.Linear]) -> None:
        super().__init__()
        biases = [linear.bias.detach() for linear in linears if linear.bias is not None]
        if biases and len(biases) != len(linears):
            raise Unsupported("only some of its joined layers have a bias")
        self.register_buffer(
            "weight", torch.cat([linear.weight.detach() for linear in linears]), persistent=False
        )
        self.register_buffer("bias", torch.cat(biases) if biases else None, persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight, self.bias)


class Concatenated(nn.Module):
    """Runs linear layers of bitsandbytes on the same rows, and concatenates their outputs."""

    def __init__(self, linears: Sequence[nn.Module]) -> None:
        super().__init__()
        self.linears = nn.ModuleList(linears)

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([linear(x) for linear in self.linears], dim=-1)


def joined(linears: Sequence[Any]) -> nn.Module:
    """Returns one module for linear layers that read the same rows; raises Unsupported for layers of other kinds."""
    kinds = {type(linear) for linear in linears}
    if kinds == {nn.Linear}:
        return Joined(linears)
    if kinds == {TileLinear}:
        return TileLinear.joined(linears)
    if all(kind.__module__.startswith("bitsandbytes.") for kind in kinds):
        return Concatenated(linears)
    names = ", ".join(sorted(kind.__name__ for kind in kinds))
    raise Unsupported(f"a layer is {names}, not a plain linear one")


def stored_bytes(*modules: nn.Module) -> int:
    """Returns the bytes of the matrices that modules hold."""
    held = (tensor for module in modules for tensor in (*module.parameters(), *module.buffers()))
    return sum(tensor.nbytes for tensor in held if tensor.dim() > 1)


class TorchLayer(nn.Module):
    """One decoder layer for rows [B * R, H] of B slots: the parts before and after attention.

    kind, table: the indices of the layer's mask and rotary table.
    """

    def __init__(self, layer: Any, config: Any, kind: int, table: int) -> None:
        super().__init__()
        attention = getattr(layer, "self_attn", None)
        mlp = getattr(layer, "mlp", None)
        is_attention = all(
            hasattr(attention, name) for name in ("q_proj", "k_proj", "v_proj", "o_proj", "scaling")
        )
        is_gated = all(
            hasattr(mlp, name) for name in ("gate_proj", "up_proj", "down_proj", "act_fn")
        )
        if not (is_attention and is_gated):
            raise Unsupported("its layers are not self-attention and a gated MLP")
        assert attention is not None and mlp is not None
        after = hasattr(layer, "post_feedforward_layernorm")
        if after != hasattr(layer, "pre_feedforward_layernorm"):
            raise Unsupported("the places of its norms are not supported")
        self.kind = kind
        self.table = table
        self.dim: int = (
            getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        )
        self.heads: int = config.num_attention_heads
        self.kv: int = config.num_key_value_heads
        self.scale: float = attention.scaling
        self.attention_norm = norm_of(layer.input_layernorm)
        self.qkv = joined([attention.q_proj, attention.k_proj, attention.v_proj])
        self.query_norm = norm_of(attention.q_norm) if hasattr(attention, "q_norm") else None
        self.key_norm = norm_of(attention.k_norm) if hasattr(attention, "k_norm") else None
        self.out = joined([attention.o_proj])
        self.out_norm = norm_of(layer.post_attention_layernorm) if after else None
        self.mlp_norm = norm_of(
            layer.pre_feedforward_layernorm if after else layer.post_attention_layernorm
        )
        self.gate_up = joined([mlp.gate_proj, mlp.up_proj])
        self.activation: Callable[[Tensor], Tensor] = mlp.act_fn
        self.down = joined([mlp.down_proj])
        self.down_norm = norm_of(layer.post_feedforward_layernorm) if after else None
        self.nbytes = stored_bytes(self.qkv, self.out, self.gate_up, self.down)

    def project(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Returns queries and keys, rotated, and values as one tensor [B * R, heads + KV + KV, D]."""
        qkv = self.qkv(self.attention_norm(x)).view(-1, self.heads + 2 * self.kv, self.dim)
        query_key = rotated = qkv[:, : self.heads + self.kv]
        if self.query_norm is not None and self.key_norm is not None:
            query, key = query_key.split([self.heads, self.kv], dim=1)
            query_key = torch.cat([self.query_norm(query), self.key_norm(key)], dim=1)
        rolled = query_key.roll(self.dim // 2, -1)
        torch.addcmul(query_key * cos, rolled, sin, out=rotated)
        return qkv

    def finish(self, x: Tensor, attended: Tensor) -> Tensor:
        """Returns the layer's output [B * R, H] for its input and the attention output [B * R, heads * D]."""
        y = self.out(attended)
        x = x + (y if self.out_norm is None else self.out_norm(y))
        gate, up = self.gate_up(self.mlp_norm(x)).chunk(2, dim=-1)
        inner = self.activation(gate).mul_(up)
        y = self.down(inner)
        return x + (y if self.down_norm is None else self.down_norm(y))


@dataclass(frozen=True)
class LayerInputs:
    """Holds what all layers read for R rows in each of B slots.

    masks: one per kind of layer. reads: the result of `columns_read`, or an empty list. cos, sin: one
    per rotary table. columns [B, R]: the columns in which each slot's rows are written.
    """

    masks: list[Tensor]
    reads: list[Tensor]
    cos: list[Tensor]
    sin: list[Tensor]
    columns: Tensor


class TorchEngine(LayoutEngine):
    """Runs the layers of a transformers decoder; raises Unsupported if layers have unknown parts.

    The network's own weights of each layer are freed as soon as they are joined.
    """

    name = "torch"

    @property
    def title(self) -> str:
        tiles = (part for layer in self.layers for part in layer.modules() if type(part) is Tiles)
        formats = sorted({part.format.name for part in tiles})
        return ", ".join([super().title, *formats])

    @property
    def row_invariant(self) -> bool:  # type: ignore[override]
        return self.exact is not None

    @property
    def tree_depth(self) -> int:  # type: ignore[override]
        return super().tree_depth if self.exact is None else LAG - 1

    def __init__(self, backbone: Backbone) -> None:
        super().__init__(backbone)
        model = backbone.model
        config = backbone.config
        self.dtype = backbone.embedding.weight.dtype
        self.masks = Masks(config, self.dtype)
        self.captures = None if backbone.device.type == "cuda" else False
        self.kv = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
        self.groups = config.num_attention_heads // self.kv
        try:
            self._parts = Layers(model)
            self._parts.refuse_special_layers()
            self._tables = sorted(set(self._parts.kinds))
            tokens = probe_tokens(backbone.vocab_size, TOKENS, backbone.device)
            firsts = (0, max(0, backbone.max_positions - TOKENS))
            expected = {first: self._expected(tokens, first) for first in firsts}
            self.layers = [
                self._join(index, layer) for index, layer in enumerate(self._parts.layers)
            ]
        except torch.OutOfMemoryError:
            raise
        except FAULTS as reason:
            raise Unsupported(str(reason)) from reason
        self.head = model.get_output_embeddings()
        self.dim = self.layers[0].dim
        self.norm = norm_of(self._parts.norm)
        self.by_length = reads_by_length(
            backbone.device, self.dtype, self.kv * self.groups, self.kv, self.dim
        )
        self.weight_bytes = sum(layer.nbytes for layer in self.layers) + stored_bytes(self.head)
        self._rotary: dict[int, tuple[Tensor, Tensor]] = {}
        self._check(tokens, expected)

    def _join(self, index: int, layer: nn.Module) -> TorchLayer:
        kind = self.masks.kinds.index(self.masks.layer_type(index))
        joined = TorchLayer(
            layer, self.backbone.config, kind, self._tables.index(self._parts.kinds[index])
        ).eval()
        release(layer)
        return joined

    def _expected(self, tokens: Tensor, first: int) -> Tensor:
        """Returns the network's states [1, n, H] for tokens [n] at positions from `first` on."""
        positions = first + torch.arange(len(tokens), device=tokens.device)[None]
        states: Tensor = padded_pass(
            self.backbone, tokens[None], position_ids=positions
        ).last_hidden_state
        return states.float()

    @torch.inference_mode()
    def _check(self, tokens: Tensor, expected: dict[int, Tensor]) -> None:
        """Raises Unsupported unless the states of a few tokens match the network's states.

        expected: the network's states by first position.
        """
        for first, states in expected.items():
            # The tables hold only these positions, and the pass reads them at 0, 1 and so on.
            positions = first + torch.arange(TOKENS, device=tokens.device)
            positions = positions.clamp(max=self.backbone.max_positions - 1)
            self._rotary = {
                table: self._table(table, positions) for table in range(len(self._tables))
            }
            ours = self.forward(Plan.chain(tokens, logits="none"), self.new_cache()).hidden.float()
            error = float((ours - states).norm() / states.norm())
            if not error <= TOLERANCE[self.dtype]:
                raise Unsupported(
                    f"its states differ from the network's own by {error:.2%} from position {first:,} on"
                )
        self._rotary = {}

    def run(
        self, tokens: Tensor, layout: Layout, cache: Cache, taps: tuple[int, ...]
    ) -> tuple[Tensor, Tensor]:
        x = self._parts.base.embed_tokens(tokens).to(self.dtype)  # [B, R, H]
        if cache.keys is None:
            cache.allocate(self.kv, self.dim, x)
        if self.exact is not None and layout.reach is not None:
            return self._run_exactly(x, layout, layout.reach, cache, taps)
        extra_rows = layout.extra_rows
        last = len(self.layers)
        cuts = {
            0,
            last,
            *(tap + 1 for tap in taps if tap >= 0),
            *(extra_rows.rows.layers if extra_rows else ()),
        }
        tapped: dict[int, Tensor] = {}
        inputs: LayerInputs | None = None
        for first, after in itertools.pairwise(sorted(cuts)):
            rows = x.shape[1]
            if extra_rows is not None:
                x = extra_rows.enter(first, x)
            if inputs is None or x.shape[1] != rows:
                inputs = self.inputs(x.shape[1], layout)
            tapped[after - 1] = x = self.run_layers(first, after, x, layout, cache, inputs)
        # As in transformers' list of hidden states, the last layer's states are those after the final norm.
        tapped[-1] = x
        return x if taps == (-1,) else torch.cat([tapped[tap] for tap in taps], dim=-1), x

    def _run_exactly(
        self, x: Tensor, layout: Layout, reach: Reach, cache: Cache, taps: tuple[int, ...]
    ) -> tuple[Tensor, Tensor]:
        """Runs embeddings [B, R, H] on the exact path; see `run`."""
        assert self.exact is not None
        cached = cache.both[:, :, layout.first : layout.first + layout.size]
        cos, sin = self._rotations(layout.positions, layout)
        states = self.exact.run(x.flatten(0, 1), cached, cos, sin, reach, taps)
        final = states[-1].view(x.shape)
        if taps == (-1,):
            return final, final
        return torch.cat([states[tap].view(x.shape) for tap in taps], dim=-1), final

    def lm_head(self, states: Tensor) -> Tensor:
        if self.exact is None:
            return super().lm_head(states)
        scores: Tensor = self.exact.lm_head(states)
        return scores

    def run_layers(
        self,
        first: int,
        end: int,
        x: Tensor,
        layout: Layout,
        cache: Cache,
        inputs: LayerInputs,
    ) -> Tensor:
        """Returns the states [B, R, H] after layers first .. end - 1, normalized after the last layer."""
        shape = x.shape
        x = x.flatten(0, 1)
        slots = slice(layout.first, layout.first + layout.size)
        cached = cache.both[:, :, slots]  # [2, layers, B, KV, C, D]
        for index in range(first, end):
            layer = self.layers[index]
            qkv = layer.project(x, inputs.cos[layer.table], inputs.sin[layer.table])
            write(cached[:, index], qkv[:, layer.heads :], inputs.columns)
            query, new_keys, new_values = qkv.split([layer.heads, layer.kv, layer.kv], dim=1)
            keys, values = cached[:, index].flatten(1, 2)
            mask = inputs.masks[layer.kind]
            if inputs.reads and mask.shape[-1] == inputs.columns.shape[1]:
                attended = behind(
                    query, keys, values, new_keys, new_values, mask, inputs.reads, layer.scale
                )
            else:
                attended = fused(query, keys, values, mask, layer.kv, layer.scale)
            x = layer.finish(x, attended.view(-1, layer.heads * layer.dim))
        if end == len(self.layers):
            x = self.norm(x)
        return x.view(shape)

    def inputs(self, rows: int, layout: Layout) -> LayerInputs:
        """Returns the inputs of layers for the first `rows` rows of a layout."""
        masks = [layout.masks[kind][:, :rows] for kind in self.masks.kinds]
        masks = [self._for_groups(mask)[:, None] for mask in masks]
        cos, sin = self._rotations(layout.positions[:, :rows], layout)
        reads = []
        if layout.lengths is not None:
            reads = columns_read(layout.lengths, rows, self.kv, layout.wide)
        return LayerInputs(masks, reads, cos, sin, layout.columns[:, :rows])

    def _rotations(self, positions: Tensor, layout: Layout) -> tuple[list[Tensor], list[Tensor]]:
        """Returns the cosines and sines [B * R, 1, D] by rotary table for the rows of a layout."""
        # Slots may share their positions.
        positions = positions.expand(layout.size, -1).flatten()
        tables = (
            self._cos_sin(table, positions, layout.wide) for table in range(len(self._tables))
        )
        cos, sin = map(list, zip(*tables, strict=True))
        return cos, sin

    def _for_groups(self, mask: Tensor) -> Tensor:
        """Returns a mask [B, R, L] repeated for the query heads of a key head, [B, G * R, L]."""
        if mask.shape[1] == 1:
            return mask.expand(-1, self.groups, -1)
        return mask.repeat(1, self.groups, 1)

    def _cos_sin(self, table: int, positions: Tensor, wide: int) -> tuple[Tensor, Tensor]:
        """Returns the cosines and sines [P, 1, D] for positions [P], which are below `wide`."""
        context = self.backbone.max_positions
        length = len(self._rotary[table][0]) if table in self._rotary else 0
        if length < min(wide, context):
            # CUDA graphs keep the address of the tables, so the tables must never grow.
            self._rotary[table] = self._table(table, torch.arange(context, device=positions.device))
        cos, sin = self._rotary[table]
        return cos[positions][:, None], sin[positions][:, None]

    def _table(self, table: int, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Returns the cosines and sines [P, D] for positions [P]; the first half of the sines is negated."""
        like = torch.empty(1, dtype=self.dtype, device=positions.device)
        cos, sin = self._parts.rotary(like, positions[None], self._tables[table])
        half = sin.shape[-1] // 2
        return cos[0], torch.cat([-sin[0, :, :half], sin[0, :, half:]], dim=-1)


def write(cached: Tensor, new: Tensor, columns: Tensor) -> None:
    """Writes keys and values [B * R, 2 * KV, D] into their columns [B, R] of a cache [2, B, KV, C, D]."""
    size, count = columns.shape
    kind = numbered(2, columns.device)[:, None, None]
    slots = numbered(size, columns.device)[:, None]
    rows = new.view(size, count, 2, -1, new.shape[-1]).permute(2, 0, 1, 3, 4)
    cached.transpose(2, 3).index_put_((kind, slots, columns), rows.to(cached.dtype))


def release(module: nn.Module) -> None:
    """Frees the weights of a module's linear layers, which joined layers replace."""
    for layer in [*module.modules()]:
        if type(layer) is nn.Linear:
            layer.weight = nn.Parameter(torch.empty(0), requires_grad=False)
        elif type(layer) is TileLinear:
            layer.parts = nn.ModuleList()
