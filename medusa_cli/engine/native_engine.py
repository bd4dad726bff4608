"""The native engine: one call of the library runs all layers on the rows of all slots."""

import itertools
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from ctypes import byref
from functools import lru_cache
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from medusa_cli.engine.cache import FIRST_ROWS, Slots
from medusa_cli.engine.engine import SCRATCH_ROWS, Engine
from medusa_cli.engine.extra_rows import ExtraRowStates
from medusa_cli.engine.kv_types import KV_TYPES
from medusa_cli.engine.native_cache import NativeCache
from medusa_cli.engine.native_linear import NativeLinear, looked_up
from medusa_cli.engine.native_model import NativeModel
from medusa_cli.engine.plan import Output, Plan
from medusa_cli.engine.shapes import padded
from medusa_cli.engine.state_cache import SNAPSHOTS
from medusa_cli.errors import OTHER_THAN_FIRP, UserError
from medusa_cli.model.backbone import Backbone
from medusa_cli.native import Format, instruction_set, library
from medusa_cli.native.library import MIXERS, TILE, UNIT, Step, check, require

FLOAT_BYTES = 4
# The minimum number of rows in the buffer of logits.
FIRST_LOGITS = 16


class NativeEngine(Engine):
    """Runs a model in the native library, with fp32 states.

    The bits of a row depend neither on the other rows of the pass nor on the number of threads. int8_rows: True if
    activations are rounded to 8 bits before a matmul with quantized weights. kv: the number type of keys and values.
    """

    name = "native"
    row_invariant = True
    prompt_invariant = True

    def __init__(
        self,
        backbone: Backbone,
        model: NativeModel,
        int8_rows: bool,
        quantize: str | None = None,
        kv: str = "fp32",
    ) -> None:
        super().__init__(backbone)
        self.model = model
        self.int8_rows = int8_rows
        self.quantize = quantize
        self.kv = kv
        self.dtype = torch.float32
        self.sizes = model.description.sizes
        # Floats per row in the library's buffers of states.
        self.stride = padded(self.sizes["hidden"], UNIT)
        self.head = NativeLinear(model.head)
        self.weight_bytes = model.bytes_read
        self._logits: NDArray[np.float32] | None = None

    @property
    def title(self) -> str:
        """Returns the engine's title: weight formats (largest share first), activations, instruction set."""
        bytes_of: Counter[str] = Counter()
        for matrix in self.model.packed.matrices.values():
            bytes_of[matrix.format.name] += matrix.nbytes
        kinds = ", ".join(name for name, _ in bytes_of.most_common())
        activations = "int8" if self.int8_rows else "fp32"
        kept = "" if self.kv == "fp32" else f", {self.kv} keys and values"
        return (
            f"native engine ({kinds} weights, {activations} activations{kept}, {instruction_set()})"
        )

    @contextmanager
    def without_torch_threads(self) -> Iterator[None]:
        """Limits torch to one thread, since its idle threads would spin on cores that the library needs."""
        count = torch.get_num_threads()
        if count == 1:
            yield
            return
        torch.set_num_threads(1)
        try:
            yield
        finally:
            torch.set_num_threads(count)

    @property
    def packed_path(self) -> Path | None:
        return self.model.packed.path

    @property
    def number_type(self) -> str:
        """Returns the type of float weights; for quantized weights, "auto" or, with fp32 activations, "fp32"."""
        formats = {
            self.model.packed.matrices[layer.matrices["out"]].format
            for layer in self.model.description.layers
        }
        if formats == {Format.BF16}:
            return "bf16"
        if formats == {Format.F16}:
            return "fp16"
        return "auto" if self.int8_rows else "fp32"

    def final_gain(self) -> Tensor:
        gain = self.model.gain_of(self.model.description.norm, self.sizes["hidden"])
        return torch.from_numpy(gain[: self.sizes["hidden"]].copy())

    def new_cache(self, slots: int = 1, capacity: int = FIRST_ROWS) -> NativeCache:
        return NativeCache(self.model, slots, capacity, self.kv)

    @property
    def row_bytes(self) -> int:
        description = self.model.description
        column = sum(self.model.column_bytes(KV_TYPES[self.kv][0]))
        inputs = FLOAT_BYTES * description.places("short_conv") * self.sizes["hidden"]
        return description.places("attention") * column + inputs

    def slot_bytes(self, rows: int) -> int:
        layers = self.model.description.places("delta_net")
        if not layers:
            return 0
        states = (1 + SNAPSHOTS) * self.model.delta_state
        return FLOAT_BYTES * layers * (states + rows * self.model.shapes.delta_row[1])

    def run_pass(self, plan: Plan, cache: Slots) -> Output:
        if not isinstance(cache, NativeCache) or cache.model is not self.model:
            raise ValueError("internal: the cache is another model's")
        rows = plan.tokens.shape[1]
        depth, mask = _depth_and_mask(plan)
        extra_rows = None
        if plan.extra_rows is not None:
            self._refuse_extra_rows()
            every = torch.arange(rows)
            extra_rows = ExtraRowStates(plan.extra_rows, every[-1:] if plan.is_chain else every)
            mask, depth = extra_rows.extend(mask, depth)

        if not plan.is_chain:
            cache.reserve_pending(rows)
        final, by_tap = self._states(plan, cache, depth, mask, extra_rows)
        if plan.is_chain:
            for slot in range(plan.first, plan.first + len(plan.tokens)):
                cache.take_snapshot(slot, cache.lengths[slot] + rows)
        tapped = [by_tap[tap][..., : self.sizes["hidden"]] for tap in plan.taps]
        hidden = tapped[0] if len(tapped) == 1 else torch.cat(tapped, dim=-1)
        extra = None
        if extra_rows is not None:
            hidden, extra = extra_rows.split(hidden)
            final = final[:, :rows]
        if plan.logits == "none":
            return Output(None, hidden, extra)
        logits, best = self._scores(final if plan.logits == "all" else final[:, -1:])
        return Output(logits, hidden, extra, best)

    def _refuse_extra_rows(self) -> None:
        if any(MIXERS[names.mixer] != "attention" for names in self.model.description.layers):
            fault = (
                "the layers of this model that keep a running state cannot be run with extra rows"
            )
            raise UserError(fault, OTHER_THAN_FIRP)

    def _states(
        self,
        plan: Plan,
        cache: NativeCache,
        depth: Tensor,
        mask: Tensor,
        extra_rows: ExtraRowStates | None,
    ) -> tuple[Tensor, dict[int, Tensor]]:
        """Runs all layers on rows with depths [B or 1, R] that see each other according to a mask [B or 1, R, R].

        Returns the final states [B, R, stride] and the tapped states by layer. Extra rows enter before their layers.
        """
        lengths = np.array(cache.lengths[plan.first : plan.first + len(plan.tokens)], np.int64)
        cache.reserve(int(lengths.max()) + depth.shape[1])
        context = self.backbone.max_positions
        positions = np.minimum(lengths[:, None] + depth.numpy(), context - 1).astype(np.int32)
        self.model.reserve(min(context, int(positions.max()) + 1))
        visible = np.ascontiguousarray(mask.numpy(), np.uint8)

        x = self._embed(plan.tokens)
        inputs = self._inputs(plan.tokens)
        if inputs is not None and extra_rows is not None:
            fault = "the layers of this model read each token's embedding, which the extra rows of firp lack"
            raise UserError(fault, OTHER_THAN_FIRP)
        last = self.sizes["layers"]
        entries = extra_rows.rows.layers if extra_rows is not None else ()
        cuts = sorted({0, last, *entries})
        # As in transformers' list of hidden states, the last layer's states are those after the final norm.
        taps = sorted(set(plan.taps) - {-1, last - 1})
        by_tap: dict[int, Tensor] = {}
        for first, end in itertools.pairwise(cuts):
            if extra_rows is not None and first in entries:
                x = self._padded(extra_rows.enter(first, x[..., : self.sizes["hidden"]]))
            here = [tap for tap in taps if first <= tap < end]
            states = self._run_layers(
                x,
                inputs,
                cache,
                plan.first,
                lengths,
                positions,
                visible,
                first,
                end,
                here,
                plan.is_chain,
            )
            by_tap |= zip(here, states, strict=True)
        by_tap[-1] = by_tap[last - 1] = x
        return x, by_tap

    def _padded(self, states: Tensor) -> Tensor:
        """Returns states [.., H], padded with zeros to the library's stride."""
        return nn.functional.pad(states, (0, self.stride - self.sizes["hidden"])).contiguous()

    def _run_layers(
        self,
        x: Tensor,
        inputs: Tensor | None,
        cache: NativeCache,
        first_slot: int,
        lengths: NDArray[np.int64],
        positions: NDArray[np.int32],
        seen: NDArray[np.uint8],
        first: int,
        end: int,
        taps: Sequence[int],
        keeps: bool,
    ) -> Sequence[Tensor]:
        """Runs layers first .. end - 1 on states x [B, R, stride] in place; returns the tapped layers' states.

        The slots from `first_slot` on hold `lengths` [B] rows. positions [B, n] and seen [B or 1,
        n, n] cover n rows, of which the first R have entered. inputs: the additional inputs of layers, which
        layer 0 completes. keeps: True if all rows stay in the cache.
        """
        slots, rows, stride = x.shape
        require(
            stride == self.stride
            and x.dtype == torch.float32
            and x.is_contiguous()
            and lengths.shape == (slots,)
            and positions.shape == (slots, seen.shape[1])
            and rows <= seen.shape[1] == seen.shape[2]
            and len(seen) in (1, slots)
            and (inputs is None or inputs.shape[:2] == x.shape[:2]),
            f"{rows} rows of {slots} sequences do not fit their positions and mask",
        )
        own_positions = np.ascontiguousarray(positions[:, :rows])
        layers = np.array(taps, np.int64)
        tapped = torch.empty(len(taps), slots, rows, stride)
        step = Step(
            first_slot=first_slot,
            slots=slots,
            rows=rows,
            lengths=lengths.ctypes.data,
            positions=own_positions.ctypes.data,
            seen=seen.ctypes.data,
            seen_slot=0 if len(seen) == 1 else seen.shape[1] * seen.shape[2],
            seen_row=seen.shape[2],
            first=first,
            end=end,
            keeps=keeps,
            x=x.data_ptr(),
            inputs=None if inputs is None else inputs.data_ptr(),
            taps=len(taps),
            tap_layers=layers.ctypes.data,
            tapped=tapped.data_ptr(),
        )
        code = library().run(byref(self.model.struct), byref(cache.buffers), byref(step))
        check(code, "a pass does not fit the cache or the context")
        return list(tapped)

    def _embed(self, tokens: Tensor) -> Tensor:
        """Returns the embeddings [B, n, stride] of tokens [B, n]."""
        scale = self.model.description.embedding_scale
        return looked_up(self.model.embedding, tokens, scale, self.stride)

    def _inputs(self, tokens: Tensor) -> Tensor | None:
        """Returns the additional inputs of layers, embeddings [B, n, layers * width]; None if there are none."""
        inputs = self.model.description.inputs
        if inputs is None:
            return None
        matrix = self.model.packed.matrices[inputs.embedding]
        width = self.sizes["layers"] * inputs.width
        return looked_up(matrix, tokens, inputs.embedding_scale, width)

    def _scores(self, states: Tensor) -> tuple[Tensor, Tensor]:
        """Returns the logits [B, n, V] and best tokens [B, n] for states [B, n, stride].

        The logits of up to SCRATCH_ROWS rows lie in a buffer that the next pass overwrites.
        """
        head = self.model.head
        states = states.contiguous()
        slots, rows, stride = states.shape
        count = slots * rows
        wide = padded(head.shape[0], TILE)
        out = self._logits
        if out is None or len(out) < count:
            out = np.empty((max(count, FIRST_LOGITS), wide), np.float32)
            # Larger outputs, such as a prompt's, are joined later and must last.
            if count <= SCRATCH_ROWS:
                self._logits = out

        best = np.empty((slots, rows), np.int32)
        code = library().logits(
            byref(head.struct),
            states.data_ptr(),
            count,
            stride,
            out.ctypes.data,
            wide,
            best.ctypes.data,
        )
        check(code, "states do not fit the lm_head")
        scores = torch.from_numpy(out[:count, : self.sizes["vocab"]]).view(slots, rows, -1)
        logits = self.backbone.finish_logits(scores)
        # A soft cap may round the best scores to the same value, so the best token is found after it.
        return logits, torch.from_numpy(best) if logits is scores else logits.argmax(-1).int()

    @torch.inference_mode()
    def states_at(self, tokens: Tensor, first: int) -> Tensor:
        """Returns the final states [n, H] for tokens [n] at positions from `first` on, to compare with transformers."""
        count = len(tokens)
        cache = self.new_cache()
        cache.reserve(count)
        self.model.reserve(first + count)

        x = self._embed(tokens[None])
        lengths = np.zeros(1, np.int64)
        positions = first + np.arange(count, dtype=np.int32)[None]
        seen = np.tril(np.ones((1, count, count), np.uint8))
        inputs = self._inputs(tokens[None])
        last = self.sizes["layers"]
        self._run_layers(x, inputs, cache, 0, lengths, positions, seen, 0, last, (), True)
        return x[0, :, : self.sizes["hidden"]]

    def logits_of(self, states: Tensor) -> Tensor:
        """Returns the logits [n, V] for final states [n, H]."""
        logits, _ = self._scores(self._padded(states[None]))
        return logits[0]


def _depth_and_mask(plan: Plan) -> tuple[Tensor, Tensor]:
    """Returns the depths [B or 1, n] of a plan's rows, and their tree mask [B or 1, n, n]."""
    if plan.depth is None or plan.tree_mask is None:
        return _chain(plan.tokens.shape[1])
    depth = plan.depth if plan.depth.dim() == 2 else plan.depth[None]
    mask = plan.tree_mask if plan.tree_mask.dim() == 3 else plan.tree_mask[None]
    return depth, mask


@lru_cache(maxsize=4)
def _chain(rows: int) -> tuple[Tensor, Tensor]:
    return torch.arange(rows)[None], torch.ones(rows, rows, dtype=torch.bool).tril()[None]
