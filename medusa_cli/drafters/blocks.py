"""Layers that drafters are built of: residual blocks, and a decoder layer with a KV cache of its own."""

from bisect import bisect_left
from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class ResidualBlock(nn.Module):
    """x + SiLU(W1 x + b) with W1 and b starting at zero, so that a fresh block changes nothing (Medusa, 3.1.1)."""

    def __init__(self, hidden_size: int) -> None:
        super().__init__()
        self.linear = nn.Linear(hidden_size, hidden_size)
        nn.init.zeros_(self.linear.weight)
        nn.init.zeros_(self.linear.bias)

    def forward(self, x: Tensor) -> Tensor:
        return x + F.silu(self.linear(x))


class Stack(nn.Module):
    """L residual blocks, each with its own weights."""

    def __init__(self, hidden_size: int, layers: int) -> None:
        super().__init__()
        for index in range(layers):
            self.add_module(str(index), ResidualBlock(hidden_size))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.children():
            x = layer(x)
        return x


class Fuse(nn.Module):
    """States of several layers [.., H * taps], the final one last, as one [.., H]: that one and a map of the others.

    The others are brought to unit root mean square, since a layer's scale grows with its depth; a fresh map adds
    nothing (EAGLE-3, arXiv:2503.01840, section 3.1, reads a low, a middle and a high layer in this way).
    """

    def __init__(self, hidden_size: int, taps: int) -> None:
        super().__init__()
        self.sizes = [hidden_size] * taps
        self.linear = nn.Linear(hidden_size * (taps - 1), hidden_size, bias=False)
        nn.init.zeros_(self.linear.weight)

    def forward(self, x: Tensor) -> Tensor:
        *lower, final = x.split(self.sizes, dim=-1)
        level = torch.cat([F.rms_norm(one.float(), one.shape[-1:]).to(x.dtype) for one in lower], dim=-1)
        return final + self.linear(level)


class LayerCache:
    """Keys and values [heads, rows, D] of one decoder layer and one sequence, with the position of each row.

    Rows come in order of position; some positions may have none, and those of a tree share some.
    """

    def __init__(self) -> None:
        self.length = 0
        self._positions: list[int] = []
        self._keys: Tensor | None = None
        self._values: Tensor | None = None

    def append(self, keys: Tensor, values: Tensor, positions: Sequence[int]) -> tuple[Tensor, Tensor]:
        """Add rows [heads, n, D] at positions [n]; return all keys and values so far."""
        end = self.length + len(positions)
        self._positions += positions
        if self._keys is None or self._values is None or self._keys.shape[1] < end:
            grown = keys.new_empty(2, keys.shape[0], max(64, 2 * end), keys.shape[2])
            if self._keys is not None and self._values is not None:
                grown[0, :, : self.length] = self._keys[:, : self.length]
                grown[1, :, : self.length] = self._values[:, : self.length]
            self._keys, self._values = grown[0], grown[1]
        self._keys[:, self.length : end] = keys
        self._values[:, self.length : end] = values
        self.length = end
        return self._keys[:, :end], self._values[:, :end]

    def truncate(self, position: int) -> int:
        """Forget the rows from a position on; return the first that has none now."""
        self.length = bisect_left(self._positions, position)
        del self._positions[self.length :]
        return self._positions[-1] + 1 if self._positions else 0


def head_count(hidden_size: int, head_dim: int) -> int:
    """The most heads of at least head_dim (one at least) that share a width evenly, with an even width to rotate."""
    counts = range(max(1, hidden_size // head_dim), 1, -1)
    return next((one for one in counts if hidden_size % (2 * one) == 0), 1)


class DecoderLayer(nn.Module):
    """A pre-norm causal decoder layer: rotary self-attention and a SwiGLU MLP of 8/3 the width.

    Its output projections start at zero, so that a fresh layer passes its input on.
    """

    def __init__(self, hidden_size: int, head_dim: int = 64, rope_theta: float = 10_000.0) -> None:
        super().__init__()
        self.heads = head_count(hidden_size, head_dim)
        self.rope_theta = rope_theta
        wide = -(-8 * hidden_size // 3 // 64) * 64
        self.attention_norm = nn.RMSNorm(hidden_size, eps=1e-6)
        self.qkv = nn.Linear(hidden_size, 3 * hidden_size, bias=False)
        self.out = nn.Linear(hidden_size, hidden_size, bias=False)
        self.mlp_norm = nn.RMSNorm(hidden_size, eps=1e-6)
        self.gate_up = nn.Linear(hidden_size, 2 * wide, bias=False)
        self.down = nn.Linear(wide, hidden_size, bias=False)
        nn.init.zeros_(self.out.weight)
        nn.init.zeros_(self.down.weight)

    def forward(self, x: Tensor, cache: LayerCache | None = None, first: int = 0) -> Tensor:
        """Sequences x [B, n, H] -> [B, n, H], each from position `first` on; with a cache B is 1 and x continues it."""
        past = cache.length if cache is not None else 0
        rows = x.shape[1]
        q, k, v = self.qkv(normed(self.attention_norm, x)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        turn = rotary(torch.arange(first, first + rows, device=x.device), q.shape[-1], self.rope_theta)
        q, k = rotated(q, *turn), rotated(k, *turn)
        mask = None
        if cache is not None:
            keys, values = cache.append(k[0], v[0], range(first, first + rows))
            k, v = keys[None], values[None]
            if past and rows > 1:
                mask = torch.ones(rows, past + rows, dtype=torch.bool, device=x.device).tril(past)
        causal = mask is None and rows > 1
        seen = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=causal)
        x = x + self.out(seen.transpose(1, 2).flatten(-2))
        gate, up = self.gate_up(normed(self.mlp_norm, x)).chunk(2, dim=-1)
        return x + self.down(F.silu(gate) * up)


def normed(norm: nn.RMSNorm, x: Tensor) -> Tensor:
    """Normalised in the weight's own type: under autocast the two differ, which torch warns of."""
    return norm(x.to(norm.weight.dtype))


def rotary(positions: Tensor, dim: int, theta: float) -> tuple[Tensor, Tensor]:
    """Cosines and sines [.., dim] of positions [..]."""
    rates = theta ** (-torch.arange(0, dim, 2, device=positions.device).float() / dim)
    angles = positions.float()[..., None] * rates
    angles = torch.cat([angles, angles], dim=-1)
    return angles.cos(), angles.sin()


def rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Queries or keys [.., dim] turned by their positions' angles, its second half with its first."""
    half = x.shape[-1] // 2
    crossed = torch.cat([-x[..., half:], x[..., :half]], dim=-1)
    return (x * cos + crossed * sin).to(x.dtype)


def by_sequence(x: Tensor, segment: Tensor) -> tuple[Tensor, Tensor]:
    """Packed rows [P, H] of consecutive segments as padded sequences [S, longest, H], and where each row went [P]."""
    starts = torch.cat([segment.new_ones(1), (segment[1:] != segment[:-1]).long()]).nonzero().squeeze(-1)
    lengths = torch.diff(torch.cat([starts, starts.new_tensor([len(segment)])]))
    longest = int(lengths.max())
    number = torch.repeat_interleave(torch.arange(len(lengths), device=x.device), lengths)
    places = number * longest + torch.arange(len(segment), device=x.device) - starts[number]
    padded = x.new_zeros(len(lengths) * longest, x.shape[-1]).index_copy(0, places, x)
    return padded.view(len(lengths), longest, -1), places


class HeadAttention(nn.Module):
    """Bi-directional self-attention over the K heads of one position, added to them; at first it adds nothing.

    Amphista's auto-embedding (section 3.2).
    """

    def __init__(self, hidden_size: int, head_dim: int = 64) -> None:
        super().__init__()
        self.heads = head_count(hidden_size, head_dim)
        self.norm = nn.RMSNorm(hidden_size, eps=1e-6)
        self.qkv = nn.Linear(hidden_size, 3 * hidden_size, bias=False)
        self.out = nn.Linear(hidden_size, hidden_size, bias=False)
        nn.init.zeros_(self.out.weight)

    def forward(self, x: Tensor) -> Tensor:
        """States [P, K, H] -> [P, K, H]."""
        q, k, v = self.qkv(normed(self.norm, x)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        seen = F.scaled_dot_product_attention(q, k, v)
        return x + self.out(seen.transpose(1, 2).flatten(-2))
