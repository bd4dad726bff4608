"""The fast engine: rewritten layers over a kernel's products, traced on a CPU so that no Python runs between them."""

import itertools
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from torch import Tensor, nn

from medusa_cli.engine.cache import FIRST_ROWS, Cache
from medusa_cli.engine.engine import Engine
from medusa_cli.engine.jit import TracedModule
from medusa_cli.engine.kernels import Kernel
from medusa_cli.engine.layers import FastLayer, Segment, norm_of
from medusa_cli.engine.plan import Layout, Plan
from medusa_cli.model.backbone import Backbone, Layers, Unsupported, padded_pass
from medusa_cli.model.masks import Masks

# Up to so many rows of a slot two plain products over transposed keys beat torch's fused attention.
FUSED_ROWS = 128
# Tokens of the passes that compare the layers with the network, at the first positions and at the last.
PROBE = 12
# The allowed difference of states from the network's own, relative to their size, by the type of either.
TOLERANCE = {torch.float32: 1e-3, torch.float16: 0.02, torch.bfloat16: 0.1}


class FastEngine(Engine):
    """Runs the layers of a transformers decoder; raises Unsupported if it does not know their parts.

    The network's own linear layers are freed one by one as they are packed.
    """

    name = "fast"

    def __init__(self, backbone: Backbone, kernel: Kernel) -> None:
        super().__init__(backbone)
        self.kernel, self.dtype = kernel, kernel.rows
        self.masks = Masks(backbone.config, self.dtype)
        on_cpu = backbone.device.type == "cpu"
        self.transposed, self.captures = on_cpu, None if backbone.device.type == "cuda" else False
        # oneDNN prepares bf16 products anew for every new length.
        self.round_to = 64 if on_cpu and self.dtype != torch.float32 else 1
        model, config = backbone.model, backbone.config
        self._parts = Layers(model)
        kinds, self._tables = self.masks.kinds, sorted(set(self._parts.kinds))
        self.kv = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
        self.groups = config.num_attention_heads // self.kv
        probe = torch.arange(PROBE, device=backbone.device) * 37 % backbone.vocab_size
        firsts = (0, max(0, backbone.max_positions - PROBE))
        expected = {first: self._expected(probe, first) for first in firsts}

        def pack(index: int, layer: nn.Module) -> FastLayer:
            kind, table = kinds.index(self.masks.kind_of(index)), self._tables.index(self._parts.kinds[index])
            packed = FastLayer(layer, config, kernel, kind, table).eval()
            release(layer)
            return packed

        # One thread packs a matrix, whatever its size.
        with ThreadPoolExecutor(torch.get_num_threads() if on_cpu else 1) as pool:
            head = pool.submit(kernel.pack_head, backbone.lm_head_weight, backbone.lm_head_bias)
            self.layers = list(pool.map(pack, itertools.count(), self._parts.layers))
            self.head = head.result()
        self.dim, self.norm = self.layers[0].dim, norm_of(self._parts.base.norm)
        self.weight_bytes = sum(layer.nbytes for layer in self.layers) + self.head.nbytes
        lm_head = model.get_output_embeddings()
        if lm_head.weight is not backbone.embedding.weight:
            release(lm_head)
        self._rotary: dict[int, tuple[Tensor, Tensor]] = {}
        self._segments: dict[tuple[Any, ...], TracedModule] = {}
        self._check(probe, expected)

    def _expected(self, tokens: Tensor, first: int) -> Tensor:
        """Returns the network's own states [1, n, H] of tokens [n] at the positions from `first` on."""
        positions = first + torch.arange(len(tokens), device=tokens.device)[None]
        states: Tensor = padded_pass(self.backbone, tokens[None], position_ids=positions).last_hidden_state
        return states.float()

    @torch.inference_mode()
    def _check(self, probe: Tensor, expected: dict[int, Tensor]) -> None:
        """Raises Unsupported unless states of a few tokens, by their first position, are the network's own."""
        allowed = max(TOLERANCE[self.dtype], TOLERANCE[self.backbone.embedding.weight.dtype])
        for first, states in expected.items():
            # Tables of these positions alone take the place of the first ones.
            positions = first + torch.arange(max(PROBE, self.round_to), device=probe.device)
            positions = positions.clamp(max=self.backbone.max_positions - 1)
            self._rotary = {table: self._table(table, positions) for table in range(len(self._tables))}
            ours = self.forward(Plan.chain(probe, logits="none"), self.new_cache()).hidden.float()
            error = float((ours - states).norm() / states.norm())
            if self.kernel.exact and not error <= allowed:
                raise Unsupported(f"its states differ from the network's own by {error:.1%} from position {first:,} on")
        self._rotary, self._segments = {}, {}

    def run(self, tokens: Tensor, layout: Layout, cache: Cache, taps: tuple[int, ...]) -> tuple[Tensor, Tensor]:
        x = self._parts.base.embed_tokens(tokens).to(self.dtype)  # [B, R, H]
        if cache.keys is None:
            cache.allocate(self.kv, self.dim, x)
        pseudo, last = layout.pseudo, len(self.layers)
        cuts = {0, last, *(tap + 1 for tap in taps if tap >= 0), *(pseudo.rows.layers if pseudo else ())}
        tapped: dict[int, Tensor] = {}
        inputs: tuple[Any, ...] = ()
        for first, end in itertools.pairwise(sorted(cuts)):
            rows = x.shape[1]
            if pseudo is not None:
                x = pseudo.enter(first, x)
            if not inputs or x.shape[1] != rows:
                inputs = self._inputs(x.shape[1], layout)
            tapped[end - 1] = x = self._run_layers(first, end, x, layout, cache, *inputs)
        # As in the network's own list of states, the last layer's are those after the last norm.
        tapped[-1] = x
        return x if taps == (-1,) else torch.cat([tapped[tap] for tap in taps], dim=-1), x

    def _run_layers(
        self, first: int, end: int, x: Tensor, layout: Layout, cache: Cache, path: str, *inputs: Any
    ) -> Tensor:
        """Returns the states [B, R, H] after layers first .. end - 1, and after the last layer its norm."""
        assert cache.keys is not None and cache.values is not None
        slots = slice(layout.first, layout.first + layout.size)
        keys, values = (cached[first:end, slots].flatten(1, 2) for cached in (cache.keys, cache.values))
        # Rounded products choose by the number of rows, so each number has a trace of its own.
        key = (first, end, path, self.kernel.exact or x.shape[0] * x.shape[1])
        if key not in self._segments:
            segment = Segment(self.layers[first:end], self.norm if end == len(self.layers) else None, path)
            self._segments[key] = TracedModule(segment, lambda: [segment], never=path == "fused")
        return self._segments[key](x.flatten(0, 1), *inputs, keys, values).view(x.shape)

    def _inputs(self, rows: int, layout: Layout) -> tuple[Any, ...]:
        """Returns the path of attention for the first `rows` rows, and its masks, rotary tables and columns."""
        path = "fused" if rows > FUSED_ROWS or not self.transposed else "slots" if layout.start is None else "slot"
        masks = [layout.masks[kind][:, :rows].repeat(1, self.groups, 1)[:, None] for kind in self.masks.kinds]
        if path != "fused":
            masks = [mask.expand(-1, self.kv, -1, -1).flatten(0, 1) for mask in masks]  # [B * KV, G * R, L]
        # Slots may share their positions.
        positions = layout.positions[:, :rows].expand(layout.size, -1).flatten()
        tables = [self._cos_sin(table, positions, layout.wide) for table in range(len(self._tables))]
        cos, sin = [table[0] for table in tables], [table[1] for table in tables]
        if path == "slot":
            assert layout.start is not None
            return path, masks, cos, sin, masks[0].new_empty(layout.start, 0)
        return path, masks, cos, sin, layout.columns[:, :rows]

    def _cos_sin(self, table: int, positions: Tensor, wide: int) -> tuple[Tensor, Tensor]:
        """Returns cosines and sines [P, 1, D] of positions [P] below `wide`."""
        context = self.backbone.max_positions
        length = len(self._rotary[table][0]) if table in self._rotary else 0
        if length < min(wide, context):
            # On a GPU, captured steps keep the place of the tables, so these never grow.
            length = context if positions.device.type == "cuda" else min(context, max(wide, 2 * length, FIRST_ROWS))
            self._rotary[table] = self._table(table, torch.arange(length, device=positions.device))
        cos, sin = self._rotary[table]
        return cos[positions][:, None], sin[positions][:, None]

    def _table(self, table: int, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Returns cosines and sines [P, D] of positions [P]; the first half of the sines is negated."""
        like = torch.empty(1, dtype=self.dtype, device=positions.device)
        cos, sin = self._parts.rotary(like, positions[None], self._tables[table])
        half = sin.shape[-1] // 2
        return cos[0], torch.cat([-sin[0, :, :half], sin[0, :, half:]], dim=-1)


def release(module: nn.Module) -> None:
    """Frees the weights of a module's linear layers, which packed ones replace."""
    for layer in module.modules():
        if type(layer) is nn.Linear:
            layer.weight = nn.Parameter(torch.empty(0), requires_grad=False)
