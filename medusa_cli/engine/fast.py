"""The fast engine: rewritten layers over a kernel's products, traced on a CPU so that no Python runs between them."""

import itertools
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from torch import Tensor, nn

from medusa_cli.engine.attention import BLOCK, columns_read, padding_of, pieces_of, reads_by_length
from medusa_cli.engine.cache import FIRST_ROWS, Cache
from medusa_cli.engine.engine import Engine
from medusa_cli.engine.jit import TracedModule
from medusa_cli.engine.kernels import Kernel, OneDnnLinear
from medusa_cli.engine.layers import FastLayer, Segment, norm_of
from medusa_cli.engine.plan import Layout, Plan, lay_out
from medusa_cli.model.attention import Masks
from medusa_cli.model.backbone import Backbone, Layers, Unsupported, padded_pass

# Tokens of the passes that compare the layers with the network, at the first positions and at the last.
PROBE = 12
# The allowed difference of states from the network's own, relative to their size, by the type of either.
TOLERANCE = {torch.float32: 1e-3, torch.float16: 0.02, torch.bfloat16: 0.1}
# Ways to feed a kernel's products, tried until a row's bits do not depend on the rows beside it: with so many rows more
# than a pass has, or so many at most at once. oneDNN's products of one row, and AMX's of more than 32, add in another
# order.
FEEDS: tuple[tuple[int, int | None], ...] = ((0, None), (1, None), (0, 32), (0, 16))
# Chunks of the largest usual tree: passes of more are mostly prompts.
LARGEST_TREE = 2
# Tokens of the prompt and nodes of the tree that the check of this compares: more than a block of attention, a chunk.
CHECKED, NODES = 300, 48


class FastEngine(Engine):
    """Runs the layers of a transformers decoder; raises Unsupported if it does not know their parts.

    The network's own linear layers are freed one by one as they are packed.
    """

    name = "fast"

    def __init__(self, backbone: Backbone, kernel: Kernel) -> None:
        super().__init__(backbone)
        self.kernel, self.dtype = kernel, kernel.rows
        on_cpu = backbone.device.type == "cpu"
        self.masks = Masks(backbone.config, torch.float32 if on_cpu else self.dtype)
        self.captures = None if backbone.device.type == "cuda" else False
        model, config = backbone.model, backbone.config
        self._parts = Layers(model)
        kinds, self._tables = self.masks.kinds, sorted(set(self._parts.kinds))
        self.kv = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
        self.groups = config.num_attention_heads // self.kv
        probe = torch.arange(PROBE, device=backbone.device) * 37 % backbone.vocab_size
        firsts = (0, max(0, backbone.max_positions - PROBE))
        expected = {first: self._expected(probe, first) for first in firsts}

        def pack(index: int, layer: nn.Module) -> FastLayer:
            kind, table = kinds.index(self.masks.layer_type(index)), self._tables.index(self._parts.kinds[index])
            packed = FastLayer(layer, config, kernel, kind, table).eval()
            release(layer)
            return packed

        # One thread packs a matrix, whatever its size.
        with ThreadPoolExecutor(torch.get_num_threads() if on_cpu else 1) as pool:
            head = pool.submit(kernel.pack_head, backbone.lm_head_weight, backbone.lm_head_bias)
            self.layers = list(pool.map(pack, itertools.count(), self._parts.layers))
            self.head = head.result()
        self.dim, self.norm = self.layers[0].dim, norm_of(self._parts.base.norm)
        self.by_length = reads_by_length(backbone.device, self.dtype, self.kv * self.groups, self.kv, self.dim)
        if on_cpu:
            _, self.width, self.round_to = padding_of(self.dim)
            self.block = BLOCK
        self.inner = self.layers[0].down.in_features
        self.weight_bytes = sum(layer.nbytes for layer in self.layers) + self.head.nbytes
        lm_head = model.get_output_embeddings()
        if lm_head.weight is not backbone.embedding.weight:
            release(lm_head)
        self._rotary: dict[int, tuple[Tensor, Tensor]] = {}
        self._segments: dict[tuple[Any, ...], TracedModule] = {}
        self._more, self._chunk = FEEDS[0]
        self._check(probe, expected)
        if on_cpu:
            self._make_row_invariant()

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

    def _make_row_invariant(self) -> None:
        """Finds a way to feed products under which a row has the same bits alone, in a tree, a batch and a prompt.

        Rounded products multiply prompts and large trees with other weights: theirs agree for few rows alone.
        """
        # fbgemm's product needs none; the others need more than one row at least.
        feeds = FEEDS if self.kernel.name == "fp16-weights" else FEEDS[1:]
        for more, chunk in feeds:
            self._feed(more, chunk)
            if self._rows_agree():
                few = self.kernel.few_rows
                self.row_invariant, self.few_nodes = few is None, None if few is None else few - more
                return
        self._feed(*FEEDS[0])

    def _feed(self, more: int, chunk: int | None) -> None:
        self._more, self._chunk, self._segments = more, chunk, {}
        for module in itertools.chain(self.head.modules(), *(layer.modules() for layer in self.layers)):
            if isinstance(module, OneDnnLinear):
                module.chunk = chunk

    @torch.inference_mode()
    def _rows_agree(self) -> bool:
        """Returns True if the first layer and the lm_head give rows the same bits, whatever stands beside them."""
        few = self.kernel.few_rows
        count, size = min(CHECKED, self.backbone.max_positions), min(NODES, few - self._more if few else NODES)
        if size < 5:
            return False  # even small trees are multiplied by other weights than plain decoding
        ids, start = torch.arange(count) * 37 % self.backbone.vocab_size, count - 12
        cache = self.new_cache(2)

        def states(tokens: Tensor, tree: tuple[Tensor, Tensor] | None = None) -> Tensor:
            plan = Plan(tokens, *(tree or (None, None)))
            layout = lay_out(plan, cache, self.masks, self.backbone.max_positions, tokens.device, self.round_to)
            return self.run(tokens, layout, cache, (0,), end=1)[0]

        # A path of three tokens among siblings.
        nodes, mask = torch.zeros(size, dtype=torch.long), torch.eye(size, dtype=torch.bool)
        nodes[::2][:3], mask[:, 0], mask[4, 2] = ids[start : start + 3], True, True
        depth = mask.sum(1) - 1
        prompt = states(torch.stack([ids, ids]))[0, start:]
        cache.lengths = [start, 5]
        tree, batch = states(nodes[None], (depth, mask))[0], states(ids[[start, 5]][:, None])
        alone = states(ids[None, start : start + 1])[0]
        scores = self.lm_head(tree)
        return (
            torch.equal(alone[0], tree[0])
            and torch.equal(alone[0], batch[0, 0])
            and (few is not None or torch.equal(tree[[0, 2, 4]], prompt[:3]))
            and torch.equal(self.lm_head(tree[:1])[0], scores[0])
            and torch.equal(self.lm_head(tree[3:8]), scores[3:8])
        )

    def lm_head(self, states: Tensor) -> Tensor:
        rows = states.flatten(0, -2)
        if self._more:
            rows = torch.cat([rows, rows[: self._more]])
        scores: Tensor = self.head(rows)
        return scores[: len(scores) - self._more].unflatten(0, states.shape[:-1])

    def run(
        self, tokens: Tensor, layout: Layout, cache: Cache, taps: tuple[int, ...], end: int | None = None
    ) -> tuple[Tensor, Tensor]:
        """Runs the layers before `end`; see Engine.run."""
        x = self._parts.base.embed_tokens(tokens).to(self.dtype)  # [B, R, H]
        if cache.keys is None:
            cache.allocate(self.kv, self.dim, x)
        extra_rows, last = layout.extra_rows, len(self.layers) if end is None else end
        cuts = {0, last, *(tap + 1 for tap in taps if tap >= 0), *(extra_rows.rows.layers if extra_rows else ())}
        tapped: dict[int, Tensor] = {}
        inputs: tuple[Any, ...] = ()
        for first, after in itertools.pairwise(sorted(cuts)):
            rows = x.shape[1]
            if extra_rows is not None:
                x = extra_rows.enter(first, x)
            if not inputs or x.shape[1] != rows:
                inputs = self.inputs(x.shape[1], layout)
            tapped[after - 1] = x = self.run_layers(first, after, x, layout, cache, *inputs)
        # As in the network's own list of states, the last layer's are those after the last norm.
        tapped[-1] = x
        return x if taps == (-1,) else torch.cat([tapped[tap] for tap in taps], dim=-1), x

    def run_layers(
        self, first: int, end: int, x: Tensor, layout: Layout, cache: Cache, path: str, *inputs: Any
    ) -> Tensor:
        """Returns the states [B, R, H] after layers first .. end - 1, and after the last layer its norm."""
        assert cache.keys is not None and cache.rows is not None
        slots, pieces = slice(layout.first, layout.first + layout.size), len(inputs[2])
        keys, values = (cached[first:end, slots].flatten(1, 2) for cached in (cache.keys, cache.rows))
        # A trace holds the number of chunks, and the choice that rounded products make by the number of rows.
        chunks = -(-len(inputs[0]) // self._chunk) if self._chunk else 0
        few = self.kernel.few_rows
        kind = chunks, few is not None and len(inputs[0]) > few
        key = (first, end, path, kind, pieces)
        if key not in self._segments:
            norm = self.norm if end == len(self.layers) else None
            segment = Segment(self.layers[first:end], norm, path)
            never = path == "fused" or pieces > 1
            self._segments[key] = TracedModule(segment, lambda: [segment], never=never, late=chunks > LARGEST_TREE)
        return self._segments[key].run(x.flatten(0, 1), *inputs, keys, values).view(x.shape)

    def inputs(self, rows: int, layout: Layout) -> tuple[Any, ...]:
        """Returns the path of attention for the first `rows` rows, and the other inputs of a segment."""
        masks = [layout.masks[kind][:, :rows] for kind in self.masks.kinds]
        # Slots may share their positions.
        positions = layout.positions[:, :rows].expand(layout.size, -1).flatten()
        tables = (self._cos_sin(table, positions, layout.wide) for table in range(len(self._tables)))
        cos, sin = map(list, zip(*tables, strict=True))
        columns = layout.columns[:, :rows]
        if self.width is None:
            masks = [mask.repeat(1, self.groups, 1)[:, None] for mask in masks]
            lengths, capacity = layout.lengths, layout.wide
            reads = [] if lengths is None else columns_read(lengths, rows, self.kv, capacity)
            return "fused", columns, masks, reads, columns, cos, sin, columns
        heads = self.kv * self.groups
        inner, threads = self.inner, torch.get_num_threads()
        feed, pieces, back = pieces_of(layout.size, rows, heads, self.kv, self.dim, self._more, inner, threads)
        masks = [piece.mask(mask, self.kv, layout.start) for mask in masks for piece in pieces]
        path = "slots"
        if layout.start is not None:
            path, columns = "slot", columns.new_empty(layout.start, 0)
        return path, feed, masks, [piece.order for piece in pieces], back, cos, sin, columns

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
            layer.gguf_blocks = None  # type: ignore[assignment]
