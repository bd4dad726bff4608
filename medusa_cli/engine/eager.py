"""The eager engine: runs transformers' own layers; the readable reference, and the engine for unknown models."""

import torch
from torch import Tensor
from transformers.cache_utils import Cache as TransformersCache
from transformers.cache_utils import CacheLayerMixin

from medusa_cli.engine.cache import Cache
from medusa_cli.engine.engine import Engine
from medusa_cli.engine.plan import Layout, Plan
from medusa_cli.errors import UserError, first_line
from medusa_cli.model.attention import NAME, cache_name
from medusa_cli.model.backbone import Backbone, Layers, Unsupported, for_transformers, quantization_of, tapped
from medusa_cli.model.checks import FAULTS, PROBE, difference
from medusa_cli.model_files import unverifiable


class EagerEngine(Engine):
    """Runs the network itself; passes with extra rows run its layers one by one."""

    name = "eager"

    def __init__(self, backbone: Backbone) -> None:
        super().__init__(backbone)
        table = backbone.embedding.weight
        self.dtype, self.masks = table.dtype, backbone.masks
        # A step reads all weights but an embedding table that is not also the lm_head.
        tied = backbone.model.get_output_embeddings().weight is table
        every = sum(weight.nbytes for weight in backbone.model.parameters())
        self.weight_bytes = every if tied else every - table.nbytes
        self.head = backbone.model.get_output_embeddings()

    @torch.inference_mode()
    def check(self) -> None:
        """Raises UserError unless a verify pass over a small tree gives the network's own logits, up to rounding.

        The tree follows two tokens: the rest of a chain, and a wrong node that no other sees beside its second one.
        """
        network, device = self.backbone.model, self.backbone.device
        chain = torch.arange(PROBE, device=device) * 37 % self.backbone.vocab_size
        tokens = torch.cat([chain[2:3], chain[:1], chain[3:]])
        depth, right = torch.tensor([0, 1, *range(1, PROBE - 2)]), torch.tensor([0, *range(2, PROBE - 1)])
        mask = torch.ones(len(tokens), len(tokens), dtype=torch.bool).tril()
        mask[2:, 1] = False
        cache = self.new_cache()
        try:
            network.set_attn_implementation("sdpa")
            own = network(input_ids=chain[None], attention_mask=torch.ones_like(chain)[None]).logits[0, 2:].float()
            network.set_attn_implementation(NAME)
            self.forward(Plan.chain(chain[:2], logits="none"), cache)
            logits = self.forward(Plan(tokens[None], depth, mask), cache).logits
        except torch.OutOfMemoryError:
            raise
        except FAULTS as reason:
            raise unverifiable(self.backbone.config, first_line(reason)) from reason
        assert logits is not None
        error = difference(logits[0, right.to(device)], own)
        if error > (1e-3 if self.dtype == torch.float32 else 0.25) and not quantization_of(network):
            raise unverifiable(self.backbone.config, f"its logits there differ from its own by {error:.0%}")

    def run(self, tokens: Tensor, layout: Layout, cache: Cache, taps: tuple[int, ...]) -> tuple[Tensor, Tensor]:
        if layout.extra_rows is not None:
            final = self._layer_by_layer(tokens, layout, cache)
            return final, final
        model = self.backbone.model
        out = model.base_model(
            input_ids=tokens,
            attention_mask=for_transformers(layout.masks),
            position_ids=layout.positions,
            **{cache_name(type(model).forward): _view(cache, layout)},
            use_cache=True,
            output_hidden_states=taps != (-1,),
        )
        return tapped(out, taps), out.last_hidden_state

    def _layer_by_layer(self, tokens: Tensor, layout: Layout, cache: Cache) -> Tensor:
        """Returns final states [B, R, H]; extra rows enter on the way."""
        backbone, extra_rows = self.backbone, layout.extra_rows
        assert extra_rows is not None
        try:
            parts = Layers(backbone.model)
        except Unsupported as reason:
            raise UserError(
                f"the layers of the model {backbone.id!r} cannot be run one by one: {reason}",
                "use a drafter other than firp, such as drafter=hydra",
            ) from reason
        view, x = _view(cache, layout), parts.base.embed_tokens(tokens)
        tables = {kind: parts.rotary(x, layout.positions, kind) for kind in sorted(set(parts.kinds))}
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


def _view(cache: Cache, layout: Layout) -> TransformersCache:
    """Returns the slots of one pass as transformers' attention sees them."""
    return TransformersCache(layers=[_ViewLayer(cache, layout, index) for index in range(cache.layers)])


class _ViewLayer(CacheLayerMixin):
    is_sliding = False

    def __init__(self, cache: Cache, layout: Layout, index: int) -> None:
        super().__init__()
        self._cache, self._layout, self._index = cache, layout, index

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        self._cache.allocate(key_states.shape[1], key_states.shape[3], key_states, value_states.shape[3])
        self.is_initialized = True

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: object, **kwargs: object
    ) -> tuple[Tensor, Tensor]:
        cache, layout = self._cache, self._layout
        if cache.keys is None:
            self.lazy_initialization(key_states, value_states)
        assert cache.keys is not None and cache.values is not None
        slots = slice(layout.first, layout.first + layout.size)
        keys, values = cache.keys[self._index, slots], cache.values[self._index, slots]  # [B, KV, C, D]
        if key_states.shape[1::2] != keys.shape[1::2] or value_states.shape[1::2] != values.shape[1::2]:
            raise RuntimeError("its layers differ in key heads or their width")
        rows = key_states.shape[2]
        if layout.start is not None:
            end = layout.start + rows
            keys[:, :, layout.start : end] = key_states
            values[:, :, layout.start : end] = value_states
        else:
            order = torch.arange(layout.size, device=keys.device)[:, None]
            keys[order, :, layout.columns[:, :rows]] = key_states.transpose(1, 2)
            values[order, :, layout.columns[:, :rows]] = value_states.transpose(1, 2)
        return keys[:, :, : layout.wide], values[:, :, : layout.wide]

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self._layout.wide, 0

    def get_seq_length(self) -> int:
        return self._layout.wide

    def get_max_length(self) -> int:
        return -1
