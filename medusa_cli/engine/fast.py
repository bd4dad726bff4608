"""The fast engine: lean layers over a kernel's products, on a CPU traced once so that little lies between products."""

import itertools
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from torch import Tensor, nn

from medusa_cli.engine.cache import Cache
from medusa_cli.engine.engine import Engine
from medusa_cli.engine.jit import TracedModule
from medusa_cli.engine.kernels import Kernel
from medusa_cli.engine.layers import FastLayer, attend_fused, attend_many, attend_one, norm_of
from medusa_cli.engine.plan import Layout
from medusa_cli.errors import first_line
from medusa_cli.model import Backbone
from medusa_cli.model.backbone import Layers, Unsupported
from medusa_cli.model.masks import Masks

# Up to so many rows of a slot two plain products over transposed keys beat torch's fused attention.
MANY = 128
# Tokens by which the lean layers are held against the network.
PROBE = 12
# How far its states may be from the network's own, as a share of their size: rounding apart by the type of either.
TOLERANCE = {torch.float32: 1e-3, torch.float16: 0.02, torch.bfloat16: 0.1}


class FastEngine(Engine):
    """The layers of a transformers decoder; raises Unsupported where its parts are not those this engine knows.

    The network's own linear layers are given up one by one as they are packed.
    """

    name = "fast"

    def __init__(self, backbone: Backbone, kernel: Kernel) -> None:
        super().__init__(backbone)
        self.kernel, self.dtype = kernel, kernel.rows
        self._masks = Masks(backbone.config, self.dtype)
        self.transposed = backbone.device.type == "cpu"
        self.captures = None if backbone.device.type == "cuda" else False
        # bf16 products are prepared anew for every new length.
        self.round_to = 64 if self.transposed and self.dtype != torch.float32 else 1
        model, config = backbone.model, backbone.config
        self._parts = Layers(model)
        kinds, self._tables = self._masks.kinds, sorted(set(self._parts.kinds))
        self.kv, self.groups = config.num_key_value_heads, config.num_attention_heads // config.num_key_value_heads
        probe = torch.arange(PROBE, device=backbone.device) * 37 % backbone.vocab_size
        expected = backbone.states(probe[None]).float()

        def lean(index: int, layer: nn.Module) -> FastLayer:
            kind, table = kinds.index(self._masks.kind_of(index)), self._tables.index(self._parts.kinds[index])
            made = FastLayer(layer, config, kernel, kind, table).eval()
            release(layer)
            return made

        # A matrix is packed by one thread, whatever its size.
        with ThreadPoolExecutor(torch.get_num_threads() if self.transposed else 1) as pool:
            packed = pool.submit(kernel.last, backbone.lm_head_weight, backbone.lm_head_bias)
            self._lean = list(pool.map(lean, itertools.count(), self._parts.layers))
            self.head = packed.result()
        self.layers, self.dim = nn.ModuleList(self._lean), self._lean[0].dim
        self.norm = norm_of(self._parts.base.norm)
        head = model.get_output_embeddings()
        if head.weight is not backbone.embedding.weight:
            release(head)
        self._rotary: dict[int, tuple[Tensor, Tensor]] = {}
        self._segments: dict[tuple[Any, ...], TracedModule] = {}
        self._check(probe, expected)

    @torch.inference_mode()
    def _check(self, probe: Tensor, expected: Tensor) -> None:
        """Unsupported unless the states of a few tokens are the network's own, rounding apart."""
        from medusa_cli.engine.plan import Plan

        try:
            found = self.forward(Plan.chain(probe, logits="none"), self.new_cache()).hidden.float()
        except RuntimeError as reason:  # shapes that do not fit, such as a rotary part of a head
            raise Unsupported(first_line(reason)) from reason
        error = float((found - expected).norm() / expected.norm())
        allowed = max(TOLERANCE[self.dtype], TOLERANCE[self.backbone.embedding.weight.dtype])
        if self.kernel.exact and error > allowed:
            raise Unsupported(f"its states differ from the network's own by {error:.1%}")

    @property
    def weight_bytes(self) -> int:
        return sum(layer.nbytes for layer in self._lean) + self.head.nbytes

    @property
    def masks(self) -> Masks:
        return self._masks

    def lm_head(self, states: Tensor) -> Tensor:
        found: Tensor = self.head(states)
        return found

    def run(self, tokens: Tensor, layout: Layout, cache: Cache, taps: tuple[int, ...]) -> tuple[Tensor, Tensor]:
        x = self._parts.base.embed_tokens(tokens).to(self.dtype)  # [B, R, H]
        if cache.keys is None:
            cache.allocate(self.kv, self.dim, x)
        pseudo, last = layout.pseudo, len(self.layers)
        cuts = {0, last, *(tap + 1 for tap in taps if tap >= 0), *(pseudo.pseudo.layers if pseudo else ())}
        tapped: dict[int, Tensor] = {}
        given: tuple[Any, ...] = ()
        for first, end in itertools.pairwise(sorted(cuts)):
            before = x.shape[1]
            if pseudo is not None:
                x = pseudo.enter(first, x)
            if not given or x.shape[1] != before:
                given = self._given(x.shape[1], layout)
            x = self._segment(first, end, end == last, x, layout, cache, given)
            tapped[end - 1] = x
        # As in the network's own list of states, the last layer's are those after the last norm.
        tapped[-1] = final = x
        return final if taps == (-1,) else torch.cat([tapped[tap] for tap in taps], dim=-1), final

    def _segment(
        self, first: int, end: int, final: bool, x: Tensor, layout: Layout, cache: Cache, given: tuple[Any, ...]
    ) -> Tensor:
        """The states [B, R, H] after layers first .. end - 1, and with `final` the last norm."""
        assert cache.keys is not None and cache.values is not None
        way, *rest = given
        # A slot alone has no dimension of slots.
        mine = layout.first if way == "one" else slice(layout.first, layout.first + layout.size)
        inputs = (x.flatten(0, 1), *rest, cache.keys[first:end, mine], cache.values[first:end, mine])
        few = self.kernel.exact or x.shape[0] * x.shape[1]
        key = (first, end, final, way, few)
        found = self._segments.get(key)
        if found is None:
            plain = _Segment(self.layers[first:end], self.norm if final else None, way)
            found = self._segments[key] = TracedModule(plain, lambda: [plain], never=way == "fused")
        return found(*inputs).view(x.shape)

    def _given(self, rows: int, layout: Layout) -> tuple[Any, ...]:
        """The way to attend for the first `rows` rows, and what it reads: masks, tables, and where rows are written."""
        way = "fused" if rows > MANY or not self.transposed else "many" if layout.start is None else "one"
        masks = []
        for kind in self._masks.kinds:
            mask = layout.masks[kind][:, :rows].repeat(1, self.groups, 1)  # [B, G * R, L]
            if way == "one":
                masks.append(mask.expand(self.kv, -1, -1))
            elif way == "many":
                masks.append(mask[:, None].expand(-1, self.kv, -1, -1).flatten(0, 1))
            else:
                masks.append(mask[:, None])
        positions = layout.positions[:, :rows]
        if len(positions) != layout.size:  # slots that share their positions
            positions = positions.expand(layout.size, -1)
        tables = [self._cos_sin(table, positions.flatten()) for table in range(len(self._tables))]
        cos, sin = [one for one, _ in tables], [one for _, one in tables]
        if way == "one":
            assert layout.start is not None
            return way, masks, cos, sin, masks[0].new_empty(layout.start, 0)
        return way, masks, cos, sin, layout.places[:, :rows]

    def _cos_sin(self, table: int, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Cosines and sines [P, 1, D] of positions [P]; the first half of the sines negated, as rotating wants them."""
        if table not in self._rotary:
            like = torch.empty(1, dtype=self.dtype, device=positions.device)
            # All of the context at once: some models' tables depend on the longest position of a call.
            every = torch.arange(self.backbone.max_positions, device=positions.device)[None]
            cos, sin = self._parts.rotary(like, every, self._tables[table])
            half = sin.shape[-1] // 2
            self._rotary[table] = cos[0], torch.cat([-sin[0, :, :half], sin[0, :, half:]], dim=-1)
        cos, sin = self._rotary[table]
        return cos[positions][:, None], sin[positions][:, None]


class _Segment(nn.Module):
    """Consecutive layers, attending in one way."""

    def __init__(self, layers: Any, norm: nn.Module | None, way: str) -> None:
        super().__init__()
        self.layers, self.norm, self.way = layers, norm, way

    def forward(
        self,
        x: Tensor,
        masks: list[Tensor],
        cos: list[Tensor],
        sin: list[Tensor],
        where: Tensor,
        keys: Tensor,
        values: Tensor,
    ) -> Tensor:
        """States [B * R, H] from those before; the rest as the ways to attend want it, keys and values by layer."""
        for layer, key, value in zip(self.layers, keys.unbind(0), values.unbind(0), strict=True):
            rows = layer.project(x, cos[layer.table], sin[layer.table])
            if self.way == "one":
                seen = attend_one(layer, rows, masks[layer.kind], where, (key, value))
            elif self.way == "many":
                seen = attend_many(layer, rows, masks[layer.kind], where, (key, value))
            else:
                seen = attend_fused(layer, rows, masks[layer.kind], where, (key, value))
            x = layer.finish(x, seen)
        return x if self.norm is None else self.norm(x)


def release(module: nn.Module) -> None:
    """Free the weights of a module's linear layers, which packed ones replace."""
    for one in module.modules():
        if type(one) is nn.Linear:
            one.weight = nn.Parameter(torch.empty(0), requires_grad=False)
