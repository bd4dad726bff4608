"""Layers that drafters are built of: residual blocks, and a decoder layer with a KV cache of its own."""

from bisect import bisect_left
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F

# A long prompt's rows are run so many at a time: a mask over all of them would be quadratic in its length.
PIECE = 512
# Calls a function by a name under which it may come again, with its inputs: `HeadDrafter.repeated`.
Repeatedly = Callable[..., Tensor]


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


def truncated(caches: Sequence[LayerCache], position: int, default: int) -> int:
    """Forget all caches' rows from a position on, or from the first that some cache has not; where they end now."""
    end = min([cache.truncate(position) for cache in caches], default=default)
    for cache in caches:
        cache.truncate(end)
    return end


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

    def forward(self, x: Tensor) -> Tensor:
        """Sequences x [B, n, H] -> [B, n, H], each from its first position on."""
        q, k, v = self._project(x, torch.arange(x.shape[1], device=x.device))
        return self._leave(x, F.scaled_dot_product_attention(q, k, v, is_causal=x.shape[1] > 1))

    def extend(self, x: Tensor, cache: LayerCache, first: int, repeated: Repeatedly) -> Tensor:
        """Rows x [n, H] at positions from `first` on, which continue a cache -> [n, H]; what it calls is `repeated`."""
        if len(x) > PIECE:
            pieces = enumerate(x.split(PIECE))
            return torch.cat([self.extend(one, cache, first + PIECE * place, repeated) for place, one in pieces])
        positions = torch.arange(first, first + len(x), device=x.device)
        q, k, v = repeated((self, "project"), self._projected, x, positions)
        keys, values = cache.append(k, v, range(first, first + len(x)))
        return repeated((self, "see"), self._see, x, q, keys, values)

    def _project(self, x: Tensor, positions: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values [.., heads, n, D] of x [.., n, H] at positions [n]."""
        parts = self.qkv(normed(self.attention_norm, x)).unflatten(-1, (3, self.heads, -1))
        q, k, v = parts.movedim(-3, 0).transpose(-3, -2)
        turn = rotary(positions, q.shape[-1], self.rope_theta)
        return rotated(q, *turn), rotated(k, *turn), v

    def _projected(self, x: Tensor, positions: Tensor) -> Tensor:
        """The three as one tensor [3, heads, n, D], which a trace gives back."""
        return torch.stack(self._project(x, positions))

    def _see(self, x: Tensor, q: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        """Rows [n, H] once their q [heads, n, D] have seen all rows [heads, m, D], of which the last n are theirs."""
        past = keys.shape[1] - q.shape[1]
        mask = torch.ones(q.shape[1], keys.shape[1], dtype=torch.bool, device=x.device).tril(past)
        return self._leave(x, F.scaled_dot_product_attention(q[None], keys[None], values[None], attn_mask=mask)[0])

    def _leave(self, x: Tensor, seen: Tensor) -> Tensor:
        """x [.., n, H] and what its attention saw [.., heads, n, D], through the MLP."""
        x = x + self.out(seen.transpose(-3, -2).flatten(-2))
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
    places, count, longest = places_by_sequence(segment)
    padded = x.new_zeros(count * longest, x.shape[-1]).index_copy(0, places, x)
    return padded.view(count, longest, -1), places


def places_by_sequence(segment: Tensor) -> tuple[Tensor, int, int]:
    """Where packed rows [P] of consecutive segments go as these are padded to the longest, how many and how long."""
    starts = torch.cat([segment.new_ones(1), (segment[1:] != segment[:-1]).long()]).nonzero().squeeze(-1)
    lengths = torch.diff(torch.cat([starts, starts.new_tensor([len(segment)])]))
    longest = int(lengths.max())
    number = torch.repeat_interleave(torch.arange(len(lengths), device=segment.device), lengths)
    places = number * longest + torch.arange(len(segment), device=segment.device) - starts[number]
    return places, len(lengths), longest


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
