"""The eager engine, which runs transformers' own layers: a readable reference, and the engine for unknown models."""

from typing import Any

import torch
from torch import Tensor, nn
from transformers.cache_utils import Cache as TransformersCache
from transformers.cache_utils import DynamicCache

from medusa_cli.engine.cache import FIRST_ROWS, Cache
from medusa_cli.engine.engine import LayoutEngine
from medusa_cli.engine.extra_rows import layers_one_by_one
from medusa_cli.engine.layer_cache import LayerCache
from medusa_cli.engine.plan import Layout, Plan
from medusa_cli.engine.state_cache import SNAPSHOTS
from medusa_cli.engine.view import View, following
from medusa_cli.errors import first_line
from medusa_cli.files.model_files import unverifiable
from medusa_cli.model.backbone import (
    Backbone,
    by_layer,
    key_sizes,
    quantization_of,
    stateful_modules,
    tapped,
)
from medusa_cli.model.checks import FAULTS, PROBE, difference, probe_tokens
from medusa_cli.model.grouped_attention import NAME, cache_name

# The maximum number of bytes that the running states after all nodes of one sequence's tree may take;
# larger trees are cut.
NODE_STATES = 1 << 29
# The allowed relative difference of logits, in fp32 and in 16 bits.
TOLERANCE = 1e-3
TOLERANCE_16 = 0.25
# The allowed relative difference of logits due to running states, in fp32 and in 16 bits. Rounding causes a
# difference of 1e-5. A different formula causes a difference above this limit.
STATE_TOLERANCE = 1e-4
STATE_TOLERANCE_16 = 0.05


class EagerEngine(LayoutEngine):
    """Runs transformers' network as a whole; in passes with extra rows, runs its layers one by one."""

    name = "eager"

    def __init__(self, backbone: Backbone) -> None:
        super().__init__(backbone)
        table = backbone.embedding.weight
        self.dtype = table.dtype
        self.masks = backbone.masks
        self.stateful = stateful_modules(backbone.text_model)
        self.weight_bytes = _bytes_read(backbone)
        self.head = backbone.model.get_output_embeddings()
        # `check` determines the final values of these fields.
        self._by_token = bool(self.stateful)
        self._decoded_states = not self.stateful
        self._state_bytes = 0  # of one sequence

    def new_cache(self, slots: int = 1, capacity: int = FIRST_ROWS) -> LayerCache:
        cache = LayerCache(self.masks.layers_with_keys(self.backbone.num_layers), slots, capacity)
        cache.by_token = self._by_token
        cache.decoded_states = self._decoded_states
        return cache

    @property
    def row_bytes(self) -> int:
        heads, dim = map(max, zip(*map(key_sizes, by_layer(self.backbone.config)), strict=True))
        return (
            2
            * self.masks.layers_with_keys(self.backbone.num_layers)
            * heads
            * dim
            * self.dtype.itemsize
        )

    def slot_bytes(self, rows: int) -> int:
        # Each node of a tree has its own states.
        return (1 + SNAPSHOTS + min(rows, self.tree_rows(0))) * self._state_bytes

    def tree_rows(self, length: int) -> int:
        rows = super().tree_rows(length)
        return min(rows, max(1, NODE_STATES // self._state_bytes)) if self._state_bytes else rows

    @torch.inference_mode()
    def check(self) -> None:
        """Raises UserError unless a verify pass over a small tree gives the network's own logits, up to rounding.

        The first two tokens of a chain are the prefix. The tree is the rest of that chain and one
        wrong node, to which no other node attends. If layers keep a running state, the
        logits are compared with those of decoding in transformers.
        """
        network = self.backbone.model
        device = self.backbone.device
        chain = probe_tokens(self.backbone.vocab_size, device=device)
        tokens = torch.cat([chain[2:3], chain[:1], chain[3:]])
        depth = torch.tensor([0, 1, *range(1, PROBE - 2)])
        right = torch.tensor([0, *range(2, PROBE - 1)])
        mask = torch.ones(len(tokens), len(tokens), dtype=torch.bool).tril()
        mask[2:, 1] = False
        try:
            self.backbone.take_own_attention()
            own = (
                network(input_ids=chain[None], attention_mask=torch.ones_like(chain)[None])
                .logits[0, 2:]
                .float()
            )
            decoded = self._decoded(chain)[2:] if self.stateful else own
            network.set_attn_implementation(NAME)
            if self.stateful:
                self._learn_states(chain, own, decoded)
            cache = self.new_cache()
            self.forward(Plan.chain(chain[:2], logits="none"), cache)
            logits = self.forward(Plan(tokens[None], depth, mask), cache).logits
        except torch.OutOfMemoryError:
            raise
        except FAULTS as reason:
            raise unverifiable(self.backbone.config, first_line(reason)) from reason
        assert logits is not None
        self._state_bytes = cache.slot_bytes
        error = difference(logits[0, right.to(device)], decoded)
        if error > self._allowed(TOLERANCE, TOLERANCE_16) and not quantization_of(network.config):
            raise unverifiable(
                self.backbone.config, f"its logits there differ from its own by {error:.2%}"
            )

    def _allowed(self, exact: float, sixteen: float) -> float:
        return exact if self.dtype == torch.float32 else sixteen

    def _decoded(self, tokens: Tensor) -> Tensor:
        """Returns the logits [n, V] for tokens [n], run as in transformers' `generate`: two, then one per pass."""
        text = self.backbone.text_model
        cache = DynamicCache(config=self.backbone.config)
        states = []
        every = torch.arange(len(tokens), device=tokens.device)
        for place in (every[:2], *every[2:].split(1)):
            places = self._places(cache, place[None])
            states.append(
                text(input_ids=tokens[place][None], use_cache=True, **places).last_hidden_state[0]
            )
        # The next pass overwrites the buffer of the logits.
        return self.logits(torch.cat(states).to(self.dtype)).clone()

    def _learn_states(self, tokens: Tensor, own: Tensor, decoded: Tensor) -> None:
        """Determines how the layers' states can be used, from the logits of one pass and of decoding.

        Some layers restart their state if several tokens continue a sequence (Jamba's in transformers
        5.24). Other layers use different formulas for decoding and for prompts (Nemotron-H's).
        """
        allowed = self._allowed(STATE_TOLERANCE, STATE_TOLERANCE_16)
        self._decoded_states = float((decoded - own).norm() / own.norm()) <= allowed
        self._by_token = False
        cache = self.new_cache()
        self.forward(Plan.chain(tokens[:2], logits="none"), cache)
        continued = self.forward(Plan.chain(tokens[2:], logits="all"), cache).logits
        assert continued is not None
        self._by_token = float((continued[0] - own).norm() / own.norm()) > allowed

    def run(
        self, tokens: Tensor, layout: Layout, cache: Cache, taps: tuple[int, ...]
    ) -> tuple[Tensor, Tensor]:
        assert isinstance(cache, LayerCache)
        if layout.extra_rows is not None:
            final = self._layer_by_layer(tokens, layout, cache)
            return final, final
        view = View(cache, layout, self.backbone.num_layers)
        text = self.backbone.text_model
        with following(self.stateful, view):
            out = text(
                input_ids=tokens,
                attention_mask=self.masks.for_network(layout.masks),
                use_cache=True,
                output_hidden_states=taps != (-1,),
                **self._places(view, layout.positions),
            )
        if layout.tree is None:
            for slot in range(layout.first, layout.first + layout.size):
                cache.take_snapshot(slot, cache.lengths[slot] + tokens.shape[1])
        # Mamba's states are fp32.
        return tapped(out, taps).to(self.dtype), out.last_hidden_state.to(self.dtype)

    def _places(self, cache: TransformersCache, positions: Tensor) -> dict[str, Any]:
        """Returns the arguments for the cache and the rows' positions; pure Mamba accepts no positions."""
        places: dict[str, Any] = {cache_name(type(self.backbone.model).forward): cache}
        if self.masks.kinds:
            places["position_ids"] = positions
        return places

    def _layer_by_layer(self, tokens: Tensor, layout: Layout, cache: LayerCache) -> Tensor:
        """Runs the layers one by one, with the extra rows that enter between them; returns final states [B, R, H]."""
        backbone = self.backbone
        extra_rows = layout.extra_rows
        assert extra_rows is not None
        parts = layers_one_by_one(backbone)
        view = View(cache, layout, backbone.num_layers)
        x = parts.base.embed_tokens(tokens)
        tables = {
            kind: parts.rotary(x, layout.positions, kind) for kind in sorted(set(parts.kinds))
        }
        for index, (layer, kind) in enumerate(zip(parts.layers, parts.kinds, strict=True)):
            x = extra_rows.enter(index, x)
            rows = x.shape[1]
            cos, sin = tables[kind]
            x = layer(
                x,
                attention_mask=layout.masks[backbone.masks.layer_type(index)][:, None, :rows],
                position_embeddings=(cos[:, :rows], sin[:, :rows]),
                position_ids=layout.positions[:, :rows],
                **{cache_name(type(layer).forward): view},
                use_cache=True,
            )
        final: Tensor = parts.base.norm(x)
        return final


def _bytes_read(backbone: Backbone) -> int:
    """Returns how many bytes of weights a step reads, excluding embedding tables and vision modules."""
    text = backbone.text_model
    head = backbone.model.get_output_embeddings()
    tables = {id(module.weight) for module in text.modules() if isinstance(module, nn.Embedding)}
    read = {id(weight): weight.nbytes for weight in text.parameters() if id(weight) not in tables}
    read[id(head.weight)] = head.weight.nbytes  # the lm_head may be the embedding table, too
    return sum(read.values())
