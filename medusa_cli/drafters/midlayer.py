"""EAGLE-3's decoder layer, which reads a state and the next token's embedding side by side (its section 3.1)."""

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from medusa_cli.drafters.blocks import normed, rotary, rotated


@dataclass(frozen=True)
class MidlayerShape:
    """Widths of the layer, named as in the configs of serving engines: every head has keys and values of its own."""

    hidden_size: int
    num_attention_heads: int
    head_dim: int
    intermediate_size: int
    rms_norm_eps: float = 1e-6
    rope_theta: float = 10_000.0


class Midlayer(nn.Module):
    """Pre-norm attention over [embedding; state] of width 2H and a SwiGLU MLP, both added to the state.

    Its parts are named as in the files that serving engines read. A fresh layer passes the state on. It is run in
    pieces, for some rows are asked for their keys and values alone, and who sees whom is the caller's to say.
    """

    def __init__(self, shape: MidlayerShape) -> None:
        super().__init__()
        size, wide = shape.hidden_size, shape.intermediate_size
        inner = shape.num_attention_heads * shape.head_dim
        self.shape = shape
        self.input_layernorm = nn.RMSNorm(size, eps=shape.rms_norm_eps)
        self.hidden_norm = nn.RMSNorm(size, eps=shape.rms_norm_eps)
        self.post_attention_layernorm = nn.RMSNorm(size, eps=shape.rms_norm_eps)
        attention = {name: nn.Linear(2 * size, inner, bias=False) for name in ("q_proj", "k_proj", "v_proj")}
        mlp = {name: nn.Linear(size, wide, bias=False) for name in ("gate_proj", "up_proj")}
        out, down = nn.Linear(inner, size, bias=False), nn.Linear(wide, size, bias=False)
        nn.init.zeros_(out.weight)
        nn.init.zeros_(down.weight)
        self.self_attn = nn.ModuleDict(attention | {"o_proj": out})
        self.mlp = nn.ModuleDict(mlp | {"down_proj": down})

    def beside(self, states: Tensor, embedded: Tensor) -> Tensor:
        """What attention reads [.., 2H] of states and embeddings [.., H]."""
        return torch.cat([normed(self.input_layernorm, embedded), normed(self.hidden_norm, states)], dim=-1)

    def queries(self, x: Tensor, positions: Tensor) -> Tensor:
        """Queries [.., heads, n, D] of rows [.., n, 2H] at positions [.., n]."""
        return self._turned(self._heads("q_proj", x), positions)

    def keys_values(self, x: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values [.., heads, n, D] of rows [.., n, 2H] at positions [.., n]."""
        return self._turned(self._heads("k_proj", x), positions), self._heads("v_proj", x)

    def leave(self, states: Tensor, seen: Tensor) -> Tensor:
        """The next states [.., n, H] from those that came and what attention saw [.., heads, n, D]."""
        states = states + self.self_attn["o_proj"](seen.transpose(-3, -2).flatten(-2))
        x = normed(self.post_attention_layernorm, states)
        gate, up = self.mlp["gate_proj"](x), self.mlp["up_proj"](x)
        return states + self.mlp["down_proj"](F.silu(gate) * up)

    def _heads(self, name: str, x: Tensor) -> Tensor:
        found: Tensor = self.self_attn[name](x)
        return found.unflatten(-1, (self.shape.num_attention_heads, -1)).transpose(-3, -2)

    def _turned(self, x: Tensor, positions: Tensor) -> Tensor:
        cos, sin = rotary(positions, self.shape.head_dim, self.shape.rope_theta)
        return rotated(x, cos.unsqueeze(-3), sin.unsqueeze(-3))
