"""Layers of drafters: residual blocks, attention, the decoder layer, and the bias from a token."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache, cached_property
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from medusa_cli.device import numbered, upload
from medusa_cli.drafters.layer_rows import LayerRows, whole_mask
from medusa_cli.engine.attention import behind, columns_read, reads_by_length, visible_behind
from medusa_cli.model.masks import additive

# When drafting, the bias is added only to this many of a head's best guesses, because other guesses
# rarely become the best.
CANDIDATES = 128
# The attention score of a row to itself in a fresh layer. Scores to other tokens are around 0, with
# a standard deviation of 1.
OWN_SCORE = 12.0


class ResidualBlock(nn.Module):
    """Adds SiLU(W1 x + b); W1 and b start at zero, so a fresh block changes nothing (Medusa, section 3.1.1)."""

    def __init__(self, hidden_size: int) -> None:
        super().__init__()
        self.linear = nn.Linear(hidden_size, hidden_size)
        nn.init.zeros_(self.linear.weight)
        nn.init.zeros_(self.linear.bias)

    def forward(self, x: Tensor) -> Tensor:
        return x + F.silu(self.linear(x))


@torch.no_grad()
def identity_(weight: Tensor) -> None:
    """Makes a weight [N, K] pass its first N inputs through, as nn.init.eye_ does.

    On the meta device, nn.init.eye_ imports torch's decompositions, which takes a second.
    """
    weight.zero_()
    weight.diagonal().fill_(1)


def residual_blocks(hidden_size: int, count: int) -> nn.Sequential:
    """Returns a sequence of residual blocks, each with its own weights."""
    return nn.Sequential(*(ResidualBlock(hidden_size) for _ in range(count)))


def attend(q: Tensor, keys: Tensor, values: Tensor, mask: Any = None) -> Tensor:
    """Attends from rows q [heads, n, D], the last n of m rows, to all rows [heads, m, D] under a mask [n, m].

    Without a mask, each row sees itself and the rows before it.
    """
    if mask is None and q.shape[1] > 1:
        # This import loads torch._dynamo, which takes half a second.
        from torch.nn.attention.bias import causal_lower_right

        mask = causal_lower_right(q.shape[1], keys.shape[1])
    return F.scaled_dot_product_attention(q[None], keys[None], values[None], attn_mask=mask)[0]


class SlotRows:
    """Holds R new rows at positions [B, R] for each of B slots, which already hold `lengths` [B] rows.

    tree_mask bool [B, R, R]: which of the new rows see each other. empty: True if a slot may have no
    rows yet; in such a slot, all new rows see the first new row.
    """

    def __init__(
        self, lengths: Tensor, positions: Tensor, tree_mask: Tensor, *, empty: bool = False
    ) -> None:
        self.lengths = lengths
        self.positions = positions
        self._tree_mask = tree_mask
        self._empty = empty
        # The mask and the result of `columns_read`, computed for the first layer that needs them.
        self._reach: tuple[Tensor, list[Tensor]] | None = None

    @cached_property
    def columns(self) -> Tensor:
        """Returns the columns [B, R] in which the rows are written."""
        rows = self.positions.shape[1]
        return self.lengths[:, None] + numbered(rows, self.lengths.device)

    def attend(self, query: Tensor, keys: Tensor, values: Tensor, cached: Tensor) -> Tensor:
        """Writes keys and values [B, heads, R, D] to `cached` [2, B, heads, C, D], after the earlier rows.

        Returns the attention output [B, heads, R, D] for the queries.
        """
        size, heads, rows, dim = query.shape
        slots = numbered(size, query.device)[:, None]
        for known, new in zip(cached, (keys, values), strict=True):
            known.transpose(1, 2).index_put_((slots, self.columns), new.transpose(1, 2))
        if not reads_by_length(query.device, query.dtype, heads, heads, dim):
            visible = visible_behind(self.lengths, self._tree_mask, cached.shape[3])
            mask = additive(visible[:, None], query.dtype)
            return F.scaled_dot_product_attention(query, cached[0], cached[1], attn_mask=mask)
        query, keys, values = (x.transpose(1, 2).flatten(0, 1) for x in (query, keys, values))
        known_keys, known_values = cached.flatten(1, 2)
        if self._reach is None:
            tree_mask = self._tree_mask
            if self._empty:
                # The kernel must read some column of each slot. In an empty slot, it reads column 0, where
                # the first of the new rows was just written. The other rows must not count that row twice.
                held = (self.lengths > 0)[:, None, None]
                tree_mask = tree_mask & (held | without_first_column(tree_mask))
            mask = additive(tree_mask[:, None], query.dtype)
            self._reach = mask, columns_read(self.lengths, rows, heads, cached.shape[3])
        mask, reads = self._reach
        seen = behind(query, known_keys, known_values, keys, values, mask, reads, dim**-0.5)
        return seen.view(size, rows, heads, dim).transpose(1, 2)


def without_first_column(tree_mask: Tensor) -> Tensor:
    """Returns a mask [R, R] for a tree's mask [B, R, R]: True in the first row, and in all columns but the first."""
    return _without_first_column(tree_mask.shape[-1], tree_mask.device)


@cache
@torch.inference_mode(False)
def _without_first_column(rows: int, device: torch.device) -> Tensor:
    every = torch.arange(rows, device=device)
    return (every[:, None] == 0) | (every > 0)


def head_count(hidden_size: int) -> int:
    """Returns the maximum number of heads for a hidden size if their widths are equal, even and at least 64."""
    counts = range(max(1, hidden_size // 64), 1, -1)
    return next((count for count in counts if hidden_size % (2 * count) == 0), 1)


class SelfAttention(nn.Module):
    """Adds pre-norm self-attention to its input; a fresh layer adds nothing."""

    def __init__(
        self, hidden_size: int, heads: int, head_dim: int, read_size: int, eps: float = 1e-6
    ) -> None:
        super().__init__()
        self.heads = heads
        self.hidden_norm = nn.RMSNorm(hidden_size, eps=eps)
        width = heads * head_dim
        layers = {
            name: nn.Linear(read_size, width, bias=False) for name in ("q_proj", "k_proj", "v_proj")
        }
        layers["o_proj"] = nn.Linear(width, hidden_size, bias=False)
        self.self_attn = nn.ModuleDict(layers)
        nn.init.zeros_(self.self_attn["o_proj"].weight)  # type: ignore[arg-type]

    def project(self, name: str, x: Tensor) -> Tensor:
        """Returns one projection of x [.., n, H], split into heads [.., heads, n, D]."""
        projected: Tensor = self.self_attn[name](x)
        return projected.unflatten(-1, (self.heads, -1)).transpose(-3, -2)

    def add(self, x: Tensor, seen: Tensor) -> Tensor:
        """Adds the output projection of the attention output [.., heads, n, D] to x [.., n, H]."""
        return x + self.self_attn["o_proj"](seen.transpose(-3, -2).flatten(-2))


class HeadAttention(SelfAttention):
    """Applies bidirectional self-attention over the K heads of a position (Amphista's auto-embedding, section 3.2)."""

    def __init__(self, hidden_size: int) -> None:
        heads = head_count(hidden_size)
        super().__init__(hidden_size, heads, hidden_size // heads, hidden_size)

    def forward(self, x: Tensor) -> Tensor:
        """Returns states [P, K, H], computed from states [P, K, H]."""
        read = normed(self.hidden_norm, x)
        q, k, v = (self.project(name, read) for name in ("q_proj", "k_proj", "v_proj"))
        return self.add(x, F.scaled_dot_product_attention(q, k, v))


class DecoderLayer(SelfAttention):
    """Applies a causal decoder layer with rotary embeddings and a SwiGLU MLP.

    A fresh layer passes its input through. The submodules have the names that serving engines expect.
    embeddings: True if attention reads [embedding; state] of width 2H, as in EAGLE's layer.
    norm_before_residual: True if attention is added to the normalized state instead of the state.
    """

    def __init__(
        self,
        hidden_size: int,
        heads: int | None = None,
        head_dim: int | None = None,
        wide: int | None = None,
        *,
        embeddings: bool = False,
        eps: float = 1e-6,
        rope_theta: float = 10_000.0,
        norm_before_residual: bool = False,
    ) -> None:
        heads = heads or head_count(hidden_size)
        wide = wide or -(-8 * hidden_size // 3 // 64) * 64
        super().__init__(
            hidden_size,
            heads,
            head_dim or hidden_size // heads,
            hidden_size * (1 + embeddings),
            eps,
        )
        self.rope_theta = rope_theta
        self.embeddings = embeddings
        self.norm_before_residual = norm_before_residual
        if embeddings:
            self.input_layernorm = nn.RMSNorm(hidden_size, eps=eps)
            self._start_at_own_token(hidden_size)
        self.post_attention_layernorm = nn.RMSNorm(hidden_size, eps=eps)
        mlp = {name: nn.Linear(hidden_size, wide, bias=False) for name in ("gate_proj", "up_proj")}
        self.mlp = nn.ModuleDict(mlp | {"down_proj": nn.Linear(wide, hidden_size, bias=False)})
        nn.init.zeros_(self.mlp["down_proj"].weight)  # type: ignore[arg-type]

    @torch.no_grad()
    def _start_at_own_token(self, hidden_size: int) -> None:
        """Makes each row of a fresh layer attend to itself: queries and keys start as the same random projection.

        A token's embedding reaches a state only through attention, and uniform attention would mix the
        embeddings of all earlier tokens.
        """
        q, k = (self.self_attn.get_parameter(f"{name}.weight") for name in ("q_proj", "k_proj"))
        nn.init.zeros_(q)
        width = len(q) // self.heads
        nn.init.normal_(q[:, :hidden_size], std=(OWN_SCORE / hidden_size) ** 0.5 * width**-0.25)
        k.copy_(q)

    @property
    def head_dim(self) -> int:
        return self.self_attn["o_proj"].in_features // self.heads  # type: ignore[operator, return-value]

    def new_rows(self, *shape: int) -> Tensor:
        """Returns zeros with the dtype and device of the weights."""
        return self.hidden_norm.weight.new_zeros(shape)

    def native_parts(self) -> dict[str, Any]:
        """Returns the parts by their names in the native library, which runs the layer when drafting on a CPU."""
        matrices = {
            "query": self.self_attn["q_proj"],
            "key": self.self_attn["k_proj"],
            "value": self.self_attn["v_proj"],
            "out": self.self_attn["o_proj"],
            "gate": self.mlp["gate_proj"],
            "up": self.mlp["up_proj"],
            "down": self.mlp["down_proj"],
        }
        norms = {"attention_norm": self.hidden_norm, "mlp_norm": self.post_attention_layernorm}
        if self.embeddings:
            norms["input_norm"] = self.input_layernorm
        return {
            "matrices": matrices,
            "norms": norms,
            "heads": self.heads,
            "rope_theta": self.rope_theta,
            "norm_before_residual": self.norm_before_residual,
        }

    def forward(self, x: Tensor, sequences: Padding) -> Tensor:
        """Returns states [P, H] for the packed rows x [P, H] of sequences that start at position 0."""
        q, k, v = self.attention_inputs(self.reads(x), sequences.position)
        rows = torch.stack([q, k, v], dim=1).permute(2, 1, 0, 3)  # [P, 3, heads, D]
        q, k, v = sequences.pad(rows).permute(2, 0, 3, 1, 4)  # [S, heads, L, D] each
        seen = F.scaled_dot_product_attention(q, k, v, is_causal=q.shape[2] > 1)
        return self.leave(x, sequences.unpad(seen.transpose(1, 2)).transpose(0, 1))

    def reads(self, x: Tensor, embedded: Tensor | None = None) -> Tensor:
        """Returns the input of the attention, computed from states and embeddings [.., H]."""
        states = normed(self.hidden_norm, x)
        if embedded is None:
            return states
        return torch.cat([normed(self.input_layernorm, embedded), states], dim=-1)

    def attention_inputs(self, read: Tensor, positions: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Returns queries, keys and values [.., heads, n, D] for rows [.., n, H] at positions [.., n]."""
        query_key = torch.cat([self.project("q_proj", read), self.project("k_proj", read)], dim=-3)
        q, k = rotate(query_key, positions[..., None, :], self.rope_theta).chunk(2, dim=-3)
        return q, k, self.project("v_proj", read)

    def leave(self, x: Tensor, seen: Tensor) -> Tensor:
        """Returns the layer's output [.., n, H], given its input and the attention output [.., heads, n, D]."""
        if self.norm_before_residual:
            x = normed(self.hidden_norm, x)
        x = self.add(x, seen)
        read = normed(self.post_attention_layernorm, x)
        gate, up = self.mlp["gate_proj"](read), self.mlp["up_proj"](read)
        return x + self.mlp["down_proj"](F.silu(gate) * up)

    def extend(
        self,
        x: Tensor,
        positions: Sequence[Sequence[int]],
        caches: Sequence[LayerRows],
        *embedded: Tensor,
        masks: Sequence[Tensor] | None = None,
        last: bool = False,
    ) -> Tensor:
        """Adds rows x [n, H] of B sequences, one after another, to the sequences' caches.

        Returns the layer's output [n, H]. positions: the positions of each sequence's rows. masks: for each sequence, a
        mask [n_i, m_i] of its new rows over its last m_i >= n_i rows; all earlier rows are seen. By default, a row sees
        itself and all rows before it. last: True to return only each sequence's last row [B, H]; excludes masks.
        """
        counts = [len(own) for own in positions]
        flat = upload([position for own in positions for position in own], x.device)
        q, k, v = self.attention_inputs(self.reads(x, *embedded), flat)
        parts = zip(caches, k.split(counts, 1), v.split(counts, 1), positions, strict=True)
        known = [cache.append(keys, values, own) for cache, keys, values, own in parts]
        if last:
            rows = upload(last_of(counts), x.device)
            x = x[rows]
            q = q[:, rows]
            counts = [1] * len(counts)
        whole: list[Tensor | None] = [None] * len(counts)
        if masks is not None:
            whole = [
                whole_mask(mask, cache.length) for mask, cache in zip(masks, caches, strict=True)
            ]
        each = zip(q.split(counts, 1), known, whole, strict=True)
        seen = [attend(own, keys, values, mask) for own, (keys, values), mask in each]
        return self.leave(x, torch.cat(seen, dim=1))

    def extend_slots(self, x: Tensor, rows: SlotRows, cached: Tensor, *embedded: Tensor) -> Tensor:
        """Adds rows x [B, n, H] to B slots of a cache [2, S, heads, C, D].

        Returns the layer's output [B, n, H].
        """
        q, k, v = self.attention_inputs(self.reads(x, *embedded), rows.positions)
        return self.leave(x, rows.attend(q, k, v, cached[:, : len(x)]))


def last_of(counts: Sequence[int]) -> list[int]:
    """Returns the index of the last row of each group, given the sizes of consecutive groups of rows."""
    return [end - 1 for end in accumulate(counts)]


def repeated(x: Tensor, counts: Sequence[int]) -> Tensor:
    """Returns each row of x [B, ..] as often as its count says."""
    rows = [row.expand(count, *row.shape) for row, count in zip(x, counts, strict=True)]
    return torch.cat(rows)


def normed(norm: nn.RMSNorm, x: Tensor) -> Tensor:
    """Normalizes x in the dtype of the weight, because under autocast the dtypes differ, and torch would warn."""
    return norm(x.to(norm.weight.dtype))


def rotate(x: Tensor, positions: Tensor, theta: float) -> Tensor:
    """Rotates queries or keys [.., n, D] according to positions [.., n]; a pair has a number from each half of D."""
    half = x.shape[-1] // 2
    angles = positions[..., None] * _rates(half, theta, x.device)  # fp32 [.., n, D]
    rolled = x.roll(half, -1)
    return torch.addcmul(x * angles.cos(), rolled, angles.sin()).to(x.dtype)


@cache
@torch.inference_mode(False)
def _rates(half: int, theta: float, device: torch.device) -> Tensor:
    """Returns the angle per position of each element, [2 * half]; the angles of the first half are negated."""
    rates = theta ** (-torch.arange(0, 2 * half, 2, device=device).float() / (2 * half))
    return torch.cat([-rates, rates])


class Padding:
    """Converts between packed rows [P] of consecutive segments and padded sequences [S, L].

    segment, numbers [P]: the segment of each row, and its number among the segments. Both are on the
    host, so that shapes are known without a wait. sequence, position [P]: the same numbers, and the
    row's position in its segment, on the device.
    """

    def __init__(self, segment: Tensor, device: torch.device) -> None:
        self.numbers = F.pad((segment.diff() != 0).cumsum(0), (1, 0))
        position = torch.arange(len(segment)) - torch.searchsorted(self.numbers, self.numbers)
        self.shape = (int(self.numbers[-1]) + 1, int(position.max()) + 1)
        index = self.numbers * self.shape[1] + position
        uploaded = upload(torch.stack([self.numbers, position, index]), device)
        self.sequence, self.position, self._index = uploaded.unbind()

    def pad(self, x: Tensor) -> Tensor:
        """Returns rows [P, ..] as sequences [S, L, ..], padded with zeros."""
        rows = x.new_zeros(self.shape[0] * self.shape[1], *x.shape[1:])
        return rows.index_copy(0, self._index, x).unflatten(0, self.shape)

    def unpad(self, x: Tensor) -> Tensor:
        """Returns the rows [P, ..] of padded sequences [S, L, ..]."""
        return x.flatten(0, 1).index_select(0, self._index)


class TokenBias(nn.Module):
    """Adds after @ before[token] to the scores [M] of any head; a fresh bias adds nothing.

    before [V, r]: for the token drafted one place earlier. after [M, r]: for the guesses. All heads share both.
    """

    def __init__(self, tokens: int, guesses: int, rank: int) -> None:
        super().__init__()
        self.before = nn.Parameter(torch.randn(tokens, rank) * rank**-0.25)
        self.after = nn.Parameter(torch.zeros(guesses, rank))

    def factors(self, states: Tensor, matrix: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """Widens states [n, H] and a matrix [M, H] so that their matmul includes the bias from tokens [n]."""
        before = F.embedding(tokens, self.before).to(states.dtype)
        after = self.after.to(matrix.dtype)
        return torch.cat([states, before], dim=-1), torch.cat([matrix, after], dim=-1)

    def best(
        self, scores: Tensor, tokens: Sequence[Tensor], width: int, temperature: float | None
    ) -> tuple[Tensor, Tensor]:
        """Returns the log confidences and indices [N, width] of the best guesses after the tokens of B sequences.

        scores [B, M] do not include the bias, which is added only to the scores of the CANDIDATES best guesses.
        """
        best = scores.topk(min(max(CANDIDATES, width), scores.shape[-1]), dim=-1)
        pairs = zip(tokens, best.indices, strict=True)
        lifts = [F.embedding(own, self.before) @ self.after[rows].T for own, rows in pairs]
        counts = [len(own) for own in tokens]
        lifted = repeated(best.values, counts) + torch.cat(lifts).float()  # [N, C]
        if temperature is not None:
            others = (scores / temperature).scatter(1, best.indices, -torch.inf)
            rest = repeated(others.logsumexp(-1, keepdim=True), counts)
            lifted = lifted / temperature
            lifted = lifted - torch.logaddexp(lifted.logsumexp(-1, keepdim=True), rest)
        chosen = lifted.topk(min(width, lifted.shape[-1]), dim=-1)
        return chosen.values, repeated(best.indices, counts).gather(1, chosen.indices)
