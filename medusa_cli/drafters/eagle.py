"""Attention in one softmax over keys that the rows of a sequence share and over a few that are each row's own."""

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from medusa_cli.drafters.base import Batch, Draft, HeadsConfig, NewTokens, roots_of, with_last_layer
from medusa_cli.drafters.heads import HeadDrafter, levels
from medusa_cli.drafters.layers import LayerCache, by_sequence, normed, places_by_sequence, rotary, rotated
from medusa_cli.errors import UsageError, UserError
from medusa_cli.model import Backbone
from medusa_cli.tree import DynamicTree, Tree, TreeBuilder

# Pairs of keys and values [heads, n, D], of which row i alone sees the i-th.
Own = Sequence[tuple[Tensor, Tensor]]


@dataclass(frozen=True)
class SharedPrefixAttention:
    """What S sequences' rows share: keys and values [S, heads, L, D], and who sees them.

    mask [S, 1, W, L] of 0 and -inf, in the keys' dtype, for W rows a sequence; slots [n]: which of all S * W is whose.
    """

    keys: Tensor
    values: Tensor
    mask: Tensor
    slots: Tensor

    def spread(self, rows: Tensor) -> Tensor:
        """Rows [heads, n, D] where their sequences want them, [S, heads, W, D]; zero where there is none."""
        count, _, width, _ = self.mask.shape
        heads, _, dim = rows.shape
        places = rows.new_zeros(count * width, heads, dim).index_copy(0, self.slots, rows.transpose(0, 1))
        return places.view(count, width, heads, dim).transpose(1, 2)

    def gathered(self, places: Tensor) -> Tensor:
        """Of what sequences have at every place [S, heads, W, ..] that of the rows [heads, n, ..]."""
        return places.transpose(1, 2).flatten(0, 1)[self.slots].transpose(0, 1)


def merged_attention(queries: Tensor, shared: SharedPrefixAttention, own: Own) -> Tensor:
    """What rows' queries [heads, n, D] see of the shared rows that their mask shows them and of their own."""
    if queries.device.type == "cpu":
        seen: Tensor = _Flash.apply(queries, shared, shared.keys, shared.values, *(part for one in own for part in one))
        return seen
    return plain_attention(queries, shared, own)


def plain_attention(queries: Tensor, shared: SharedPrefixAttention, own: Own) -> Tensor:
    """The same with all scores in memory at once, on any device."""
    q = queries * queries.shape[-1] ** -0.5
    scores = shared.spread(q) @ shared.keys.transpose(-1, -2)
    far = shared.gathered(scores.float() + shared.mask.float())
    near = [(q * keys).sum(-1, keepdim=True).float() for keys, _ in own]
    shares = torch.cat([far, *near], dim=-1).softmax(-1).to(q.dtype)
    width = far.shape[-1]
    seen = shared.gathered(shared.spread(shares[..., :width]) @ shared.values)
    for number, (_, values) in enumerate(own):
        seen = seen + shares[..., width + number, None] * values
    return seen


class _Flash(torch.autograd.Function):
    """The shared rows go through flash attention, whose logsumexp lets the rows' own join its softmax afterwards.

    On the way back flash attention makes its shares anew from scores and logsumexp: given that of the whole softmax,
    and the whole sum as what was seen, the gradients it finds are the right ones for its part.
    """

    @staticmethod
    def forward(
        ctx: Any, queries: Tensor, shared: SharedPrefixAttention, keys: Tensor, values: Tensor, *own: Tensor
    ) -> Tensor:
        spread, scale = shared.spread(queries), queries.shape[-1] ** -0.5
        seen, logsumexp = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            spread, keys, values, 0.0, False, attn_mask=shared.mask, scale=None
        )
        far = shared.gathered(logsumexp[..., None])[..., 0]  # [heads, n]
        near = [(queries * one).sum(-1).float() * scale for one in own[::2]]
        whole = torch.stack([far, *near]).logsumexp(0)
        shares = [(score - whole).exp()[..., None].to(queries.dtype) for score in (far, *near)]
        result = shared.gathered(seen) * shares[0]
        for share, one in zip(shares[1:], own[1::2], strict=True):
            result = result + share * one
        ctx.shared = shared
        ctx.save_for_backward(queries, keys, values, result, whole, logsumexp, *shares[1:], *own)
        return result

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        queries, keys, values, result, whole, logsumexp, *rest = ctx.saved_tensors
        count, scale, shared = len(rest) // 3, queries.shape[-1] ** -0.5, ctx.shared
        shares, own = rest[:count], rest[count:]
        places = logsumexp.transpose(1, 2).flatten(0, 1).index_copy(0, shared.slots, whole.T)  # [S * W, heads]
        places = places.view(len(keys), -1, len(queries)).transpose(1, 2)
        query_grad, key_grad, value_grad = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
            *(shared.spread(grad), shared.spread(queries), keys, values, shared.spread(result), places, 0.0, False),
            attn_mask=shared.mask,
            scale=None,
        )
        query_grad = shared.gathered(query_grad)
        mean = (grad * result).sum(-1, keepdim=True)
        found = []
        for share, key, value in zip(shares, own[::2], own[1::2], strict=True):
            score_grad = share * ((grad * value).sum(-1, keepdim=True) - mean) * scale
            query_grad = query_grad + score_grad * key
            found += [score_grad * queries, share * grad]
        return query_grad, None, key_grad, value_grad, *found


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


def training_time_test(
    layer: Midlayer, states: Tensor, embedded: Tensor, views: Tensor, learnt: Tensor
) -> Iterator[Tensor]:
    """Yields the states [n, H] of steps 1, 2, .. at the n learnt positions (EAGLE-3's training-time test).

    states, embedded [P, H]: fused states and embeddings of the next tokens; views [P]: each position's conversation;
    learnt [n]: positions. Step 1 reads the true states at positions 0 .. p of a conversation. Step k stands for level k
    of a draft made after position p: it is at position p + k - 1 and reads the state of the step before and the true
    token there. It sees the true rows 0 .. p and its own rows of steps 2 .. k, but no row of another position's draft.
    """
    places, count, longest = places_by_sequence(views)
    place = places % longest
    position = place[learnt]
    keys, values = layer.keys_values(layer.beside(states, embedded), place)  # [heads, P, D]
    owner = places[learnt] // longest
    where, slots = by_sequence(position[:, None], owner)  # [S, W, 1]: the learnt positions side by side
    present = owner.unique_consecutive()
    spread = keys.new_zeros(count * longest, 2, *keys[:, 0].shape)
    spread = spread.index_copy(0, places, torch.stack([keys, values]).permute(2, 0, 1, 3))
    keys, values = spread.view(count, longest, 2, *keys[:, 0].shape)[present].permute(2, 0, 3, 1, 4)
    later = torch.arange(longest, device=where.device) > where  # [S, W, L]
    mask = keys.new_zeros(1, 1, 1, 1).masked_fill(later[:, None], -torch.inf)
    shared = SharedPrefixAttention(keys, values, mask, slots)
    own: list[tuple[Tensor, Tensor]] = []  # keys and values [heads, n, D] of steps 2, 3, ..
    states, step = states[learnt], 0
    while True:
        # Beyond a conversation's end there is no target: any token may be read there.
        token = (learnt + step).clamp(max=len(embedded) - 1)
        x = layer.beside(states, embedded[token])
        if step:
            own.append(layer.keys_values(x, position + step))
        seen = merged_attention(layer.queries(x, position + step), shared, tuple(own))
        states, step = layer.leave(states, seen), step + 1
        yield states


@dataclass(frozen=True)
class EagleConfig(HeadsConfig):
    """num_heads is how many levels it was trained for. taps: after how many of the backbone's layers states are read,
    the last ones being read too, for training alone. The other names are those of serving engines' configs."""

    taps: tuple[int, ...] = ()
    num_attention_heads: int = 1
    head_dim: int = 64
    intermediate_size: int = 64
    rms_norm_eps: float = 1e-6
    rope_theta: float = 10_000.0
    max_position_embeddings: int = 2048

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "taps", tuple(self.taps))  # JSON has lists


class Eagle(HeadDrafter):
    """Head k is the k-th step of one layer: its state after k drafted tokens says the next (arXiv:2503.01840).

    The layer sees the conversation from its first token: the true rows, and in a draft the rows of a node's ancestors.
    """

    name = "eagle"
    weights_file = "model.safetensors"
    learning_rate = 1e-3
    training_cost = 2.5  # of the training-time test
    autoregressive = True
    config_class = EagleConfig
    settings = ("taps",)
    vocabularies = ("draft", "own")
    config: EagleConfig

    def __init__(self, config: EagleConfig) -> None:
        super().__init__(config)
        self.taps = with_last_layer(config.taps)
        size = config.hidden_size
        widths = {key: getattr(config, key) for key in MidlayerShape.__dataclass_fields__}
        self.fc = nn.Linear(len(config.taps) * size, size, bias=False)
        self.midlayer = Midlayer(MidlayerShape(**widths))
        self.norm = nn.RMSNorm(size, eps=config.rms_norm_eps)
        nn.init.zeros_(self.fc.weight)
        nn.init.eye_(self.fc.weight[:, -size:])  # a fresh one passes the highest layer's state on
        self._cache = LayerCache()

    @classmethod
    def create(
        cls,
        backbone: Backbone,
        num_heads: int = 5,
        num_layers: int = 1,
        vocabulary: str = "draft",
        draft_ids: Tensor | None = None,
        matrices: str = "each",
        rank: int | None = None,
        **own: Any,
    ) -> "Eagle":
        """A fresh drafter with the backbone's heads and widths; one matrix for all levels, whatever `matrices` says."""
        for key, value, plain in (("num_layers", num_layers, 1), ("rank", rank, None)):
            if value != plain:
                raise UsageError(f"drafter.{key}={value} says nothing to eagle", "leave it out: it is one layer")
        config, size = backbone.config, backbone.hidden_size
        heads = config.num_attention_heads
        shape = {
            "taps": tuple(own.pop("taps", None) or cls.default_taps(backbone.num_layers)),
            "num_attention_heads": heads,
            "head_dim": getattr(config, "head_dim", None) or size // heads,
            "intermediate_size": getattr(config, "intermediate_size", None) or 4 * size,
            "max_position_embeddings": backbone.max_positions,
        }
        # In rising order, as engines keep a draft vocabulary.
        ids = None if draft_ids is None else draft_ids.sort().values
        drafter = super().create(backbone, num_heads, 1, vocabulary, ids, "one", None, **shape, **own)
        # The matrix starts as the lm_head's, so what it reads had best be normed as what that reads.
        final = getattr(backbone.model.base_model, "norm", None)
        if final is not None:
            ones = torch.ones(size, device=backbone.device, dtype=backbone.dtype)
            drafter.norm.weight.data.copy_(final(ones))
        return drafter

    @classmethod
    def default_taps(cls, depth: int) -> tuple[int, ...]:
        """A low, a middle and a high layer of so many, as EAGLE-3 takes them; fewer where there are not so many."""
        taps = (2, depth // 2, depth - 3)
        if taps == tuple(sorted(set(taps))):
            return taps
        return tuple(range(1, depth))[-3:]

    @classmethod
    def sees_prompt(cls, settings: Any) -> bool:
        return True

    def truncate(self, length: int) -> int:
        if not length:  # a fork's own, not that of the drafter it is a copy of
            self._cache = LayerCache()
        # The last row that stays saw which token follows: that one may be another now.
        return self._cache.truncate(max(0, length - 1))

    @torch.inference_mode()
    def draft(
        self,
        backbone: Backbone,
        sequences: "Sequence[Eagle]",
        confirmed: Sequence[NewTokens],
        shape: Tree | DynamicTree,
    ) -> list[Draft]:
        """Draft level by level; the layer and the matrix see all sequences' rows of a level at once."""
        states = self._confirm(backbone, sequences, confirmed)  # [B, H]
        if not shape.max_depth:
            return [Draft(root[None], Tree.root_only()) for root in roots_of(confirmed, backbone.device)]
        started = [_Branch(own, one, state[None]) for own, one, state in zip(sequences, confirmed, states, strict=True)]
        try:
            if isinstance(shape, DynamicTree):
                return self._grow(backbone, started, shape)
            return self._fill(backbone, started, shape)
        finally:
            for branch in started:
                branch.own._cache.truncate(branch.end)

    def _confirm(self, backbone: Backbone, sequences: "Sequence[Eagle]", confirmed: Sequence[NewTokens]) -> Tensor:
        """Take the confirmed rows into each sequence's own cache; the state [B, H] of its last one."""
        layer, counts = self.fast("midlayer"), [len(one.tokens) for one in confirmed]
        below = self._lower(torch.cat([one.hidden for one in confirmed]).to(self.dtype))
        states = self.repeated("fc", self.fast("fc"), below)
        tokens = torch.cat([one.following for one in confirmed])
        where = [range(one.start, one.start + count) for one, count in zip(confirmed, counts, strict=True)]
        positions = torch.tensor([place for places in where for place in places], device=backbone.device)
        queries, keys, values = self._read(backbone, states, tokens, positions)
        last = torch.tensor(counts, device=backbone.device).cumsum(0) - 1
        every = [
            own._cache.append(k, v, places)
            for own, k, v, places in zip(sequences, keys.split(counts, 1), values.split(counts, 1), where, strict=True)
        ]
        own = queries[:, last].split(1, 1)
        seen = [F.scaled_dot_product_attention(q, k, v) for q, (k, v) in zip(own, every, strict=True)]
        return self.repeated("leave", layer.leave, states[last], torch.cat(seen, dim=1))

    def _read(self, backbone: Backbone, states: Tensor, tokens: Tensor, positions: Tensor) -> Tensor:
        """Queries, keys and values [3, heads, n, D] of rows of states [n, H], the tokens after them, and positions."""
        layer = self.fast("midlayer")

        def read(states: Tensor, tokens: Tensor, positions: Tensor) -> Tensor:
            x = layer.beside(states, self._embedded(backbone, tokens))
            return torch.stack([layer.queries(x, positions), *layer.keys_values(x, positions)])

        return self.repeated("read", read, states, tokens, positions)

    def _fill(self, backbone: Backbone, started: "list[_Branch]", tree: Tree) -> list[Draft]:
        roots = torch.tensor([branch.root for branch in started], device=backbone.device)
        tokens = roots[:, None].repeat(1, tree.size)
        for level in levels(tree, backbone.device):
            scores = self._scored(backbone, torch.stack([branch.states for branch in started]))  # [B, n, M]
            best = scores.topk(level.width, dim=-1).indices
            drafted = self.draft_ids[best[:, level.rows, level.ranks]]
            tokens[:, level.nodes] = drafted
            if len(level.inner):
                above = level.rows[level.inner]
                self._descend(backbone, started, [above] * len(started), list(drafted[:, level.inner]))
        return [Draft(row, tree) for row in tokens]

    def _grow(self, backbone: Backbone, started: "list[_Branch]", growth: DynamicTree) -> list[Draft]:
        growing = [TreeBuilder(growth, branch.root) for branch in started]
        nodes, live = [[0] for _ in started], list(range(len(started)))
        for head in range(growth.max_depth):
            scores = self._scored(backbone, torch.cat([started[one].states for one in live]))
            each = zip(*self.confidences(head, scores, growth), strict=True)
            above = []
            for one in live:
                row = {node: place for place, node in enumerate(nodes[one])}
                offered = [next(each) for _ in nodes[one]]
                nodes[one] = growing[one].extend(nodes[one], [a for a, _ in offered], [b for _, b in offered])
                parents = [row[growing[one].parents[node]] for node in nodes[one]]
                above.append(torch.tensor(parents, dtype=torch.long, device=backbone.device))
            above = [rows for rows in above if len(rows)]
            live = [one for one in live if nodes[one]]
            if not live or head + 1 == growth.max_depth:
                break
            drafted = [[growing[one].tokens[node] for node in nodes[one]] for one in live]
            tokens = [torch.tensor(row, device=backbone.device) for row in drafted]
            self._descend(backbone, [started[one] for one in live], above, tokens)
        made = (one.tree() for one in growing)
        return [Draft(torch.tensor(chosen, device=backbone.device), tree) for tree, chosen in made]

    def _descend(
        self, backbone: Backbone, branches: "Sequence[_Branch]", above: Sequence[Tensor], tokens: Sequence[Tensor]
    ) -> None:
        """One level down: each branch's tokens [n] read the states of its rows `above` [n] and become its rows."""
        layer, counts = self.fast("midlayer"), [len(rows) for rows in tokens]
        states = torch.cat([branch.states[rows] for branch, rows in zip(branches, above, strict=True)])
        where = [[branch.place] * count for branch, count in zip(branches, counts, strict=True)]
        positions = torch.tensor([place for places in where for place in places], device=states.device)
        parts = self._read(backbone, states, torch.cat(list(tokens)), positions)
        each: Iterator[Any] = zip(branches, above, where, *(part.split(counts, 1) for part in parts), strict=True)
        seen = [branch.attend(rows, places, q, k, v) for branch, rows, places, q, k, v in each]
        made = self.repeated("leave", layer.leave, states, torch.cat(seen, dim=1))
        for branch, own in zip(branches, made.split(counts), strict=True):
            branch.states = own

    def _scored(self, backbone: Backbone, states: Tensor) -> Tensor:
        return self.repeated(("scored", states.dim()), lambda x: self.score(backbone, 0, self.norm(x)), states)

    def _embedded(self, backbone: Backbone, tokens: Tensor) -> Tensor:
        """The backbone's embeddings as they are: the layer's own norm levels them."""
        return backbone.embedding(tokens).to(self.dtype)

    def _lower(self, hidden: Tensor) -> Tensor:
        """The states that are fused, without the last ones."""
        return hidden[..., : -self.config.hidden_size]

    def head_states(self, backbone: Backbone, batch: Batch, rows: Sequence[Tensor]) -> Iterator[Tensor]:
        fused, embedded = self.fc(self._lower(batch.hidden)), self._embedded(backbone, batch.next)
        steps = training_time_test(self.midlayer, fused, embedded, batch.attention_groups, batch.learnt)
        for positions, states in zip(rows, steps, strict=False):
            yield normed(self.norm, states[batch.learnt_index[positions]]).to(batch.hidden.dtype)

    def named_weights(self) -> dict[str, Tensor]:
        """Under the names that serving engines read."""
        return {"lm_head.weight" if name == "matrices.0" else name: weight for name, weight in self.named_parameters()}

    def vocabulary_tensors(self) -> dict[str, Tensor]:
        """d2t [M]: what to add to a row's number for its token's id; t2d [V]: which tokens have a row."""
        ids = self.draft_ids.cpu()
        known = torch.zeros(self.config.vocab_size, dtype=torch.bool).index_fill(0, ids, True)
        return {"d2t": ids - torch.arange(len(ids)), "t2d": known}

    @classmethod
    def id_shapes(cls, config: Any) -> dict[str, tuple[int, ...]]:
        return {"d2t": (config.draft_vocab_size,)} if config.vocabulary == "draft" else {}

    @staticmethod
    def draft_ids_of(tensors: dict[str, Tensor]) -> Tensor:
        return tensors["d2t"] + torch.arange(len(tensors["d2t"]))

    def config_json(self) -> dict[str, Any]:
        return asdict(self.config) | {
            "architectures": ["LlamaForCausalLMEagle3"],
            "model_type": "llama",
            "num_hidden_layers": 1,
            "num_key_value_heads": self.config.num_attention_heads,
            "draft_vocab_size": len(self.draft_ids),
            "hidden_act": "silu",
            "tie_word_embeddings": False,
            "torch_dtype": "bfloat16",
            "eagle_aux_hidden_state_layer_ids": list(self.config.taps),
        }

    @classmethod
    def read_config(cls, data: dict[str, Any]) -> dict[str, Any]:
        return {**data, "draft_vocab_size": None} if data.get("vocabulary") == "own" else data

    @classmethod
    def check_fit(cls, config: Any, backbone: Backbone) -> None:
        taps = config.taps
        if not taps or list(taps) != sorted(set(taps)) or not all(1 <= one < backbone.num_layers for one in taps):
            raise UserError(
                f"the drafter reads states after the layers {list(taps)}, the model has {backbone.num_layers} layers",
                "give the drafter's own @model",
            )


class _Branch:
    """A sequence's draft under way: the states [n, H] of the nodes that may have children, and who sees whom."""

    def __init__(self, own: Eagle, confirmed: NewTokens, states: Tensor) -> None:
        self.own, self.root, self.states = own, confirmed.root, states
        self.end = self.place = confirmed.start + len(confirmed.tokens)
        self._seen = torch.zeros(1, 0, dtype=torch.bool, device=states.device)  # of the tree's rows so far, by these

    def attend(self, above: Tensor, places: list[int], q: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        """What rows [heads, n, D] under the rows `above` see: all that is confirmed, their ancestors and themselves."""
        itself = torch.eye(len(above), dtype=torch.bool, device=above.device)
        self._seen = torch.cat([self._seen[above], itself], dim=1)
        cache = self.own._cache
        keys, values = cache.append(keys, values, places)
        mask = F.pad(self._seen, (cache.length - self._seen.shape[1], 0), value=True)
        self.place += 1
        return F.scaled_dot_product_attention(q, keys, values, attn_mask=mask)
