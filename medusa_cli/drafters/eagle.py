"""EAGLE-3: one decoder layer over fused states of three layers, fed its own states from level to level of a tree."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from medusa_cli.backbone import Backbone
from medusa_cli.drafters.base import Batch, Confirmed, Draft, beside_final, roots_of
from medusa_cli.drafters.blocks import LayerCache, normed
from medusa_cli.drafters.config import HeadsConfig
from medusa_cli.drafters.heads import Encoded, HeadDrafter
from medusa_cli.drafters.levels import levels
from medusa_cli.drafters.midlayer import Midlayer, MidlayerShape
from medusa_cli.drafters.unrolled import Unrolled
from medusa_cli.errors import UsageError, UserError
from medusa_cli.tree import Growing, Growth, Tree


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
    effort = 2.5  # a layer that is unrolled
    sees_drafted = math.inf  # its states can be held to the model's, and are free unless asked (section 3.1)
    config_class = EagleConfig
    settings = ("taps",)
    vocabularies = ("draft", "own")
    config: EagleConfig

    def __init__(self, config: EagleConfig) -> None:
        super().__init__(config)
        self.taps = beside_final(config.taps)
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
        confirmed: Sequence[Confirmed],
        shape: Tree | Growth,
    ) -> list[Draft]:
        """Draft level by level; the layer and the matrix see all sequences' rows of a level at once."""
        states = self._confirm(backbone, sequences, confirmed)  # [B, H]
        if not shape.max_depth:
            return [Draft(root[None], Tree.root_only()) for root in roots_of(confirmed, backbone.device)]
        started = [_Branch(own, one, state[None]) for own, one, state in zip(sequences, confirmed, states, strict=True)]
        try:
            if isinstance(shape, Growth):
                return self._grow(backbone, started, shape)
            return self._fill(backbone, started, shape)
        finally:
            for branch in started:
                branch.own._cache.truncate(branch.end)

    def _confirm(self, backbone: Backbone, sequences: "Sequence[Eagle]", confirmed: Sequence[Confirmed]) -> Tensor:
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

    def _grow(self, backbone: Backbone, started: "list[_Branch]", growth: Growth) -> list[Draft]:
        growing = [Growing(growth, branch.root) for branch in started]
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

    def encode(self, backbone: Backbone, batch: Batch) -> Encoded:
        fused, embedded = self.fc(self._lower(batch.hidden)), self._embedded(backbone, batch.next)
        steps, number = Unrolled(self.midlayer, fused, embedded, batch.views, batch.learnt), batch.numbers
        return lambda head, rows: normed(self.norm, steps.step(head)[number[rows]]).to(batch.hidden.dtype)

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

    def __init__(self, own: Eagle, confirmed: Confirmed, states: Tensor) -> None:
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
