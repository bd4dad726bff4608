"""The cache as transformers' layers see it, and the order in which stateful layers process a tree."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers.cache_utils import Cache as TransformersCache
from transformers.cache_utils import CacheLayerMixin

from medusa_cli.engine.layer_cache import LayerCache
from medusa_cli.engine.plan import Layout
from medusa_cli.engine.state_cache import StateKey


@contextmanager
def following(modules: Sequence[Any], view: "View") -> Iterator[None]:
    """Makes modules with a running state process the chain or tree of a view while the context lasts."""
    own = [vars(module).get("forward") for module in modules]
    for module in modules:
        module.forward = partial(view.follow, module.layer_idx, module.forward)
    try:
        yield
    finally:
        for module, forward in zip(modules, own, strict=True):
            del module.forward
            if forward is not None:
                module.forward = forward


class View(TransformersCache):
    """The slots of one pass as transformers' layers see them.

    A module with a running state processes a tree level by level. The nodes of a level are a batch of sequences with
    one new token each, which continue from their parents' states. A node is thus computed as in plain decoding.
    """

    def __init__(self, cache: LayerCache, layout: Layout, layers: int) -> None:
        super().__init__(layers=[_ViewLayer(cache, layout, index) for index in range(layers)])
        self._cache = cache
        self._layout = layout
        self._slots = slice(layout.first, layout.first + layout.size)
        self._now: dict[StateKey, Tensor] = {}  # states that the running module reads and writes
        cache.node_states = {}
        cache.first_node_slot = layout.first

    def follow(
        self,
        layer: int,
        forward: Callable[..., Any],
        hidden_states: Tensor,
        *args: Any,
        **options: Any,
    ) -> Any:
        """Returns a module's output for states [B, R, H]; `args` and `options` are its other arguments."""
        known = {key: states for key, states in self._cache.states.items() if key[0] == layer}
        run = partial(self._follow_chain if self._layout.tree is None else self._follow_tree, known)
        return run(lambda rows: forward(rows, *args, **options), hidden_states)

    def _follow_chain(
        self, known: dict[StateKey, Tensor], forward: Callable[[Tensor], Any], x: Tensor
    ) -> Any:
        lengths = self._cache.lengths[self._slots]
        goes_on = any(lengths)
        if goes_on and not all(lengths):
            raise ValueError("chains of several slots must all begin, or all go on")
        self._now = (
            {key: states[self._slots].clone() for key, states in known.items()} if goes_on else {}
        )
        pieces = x.split(1 if goes_on and self._cache.by_token else x.shape[1], dim=1)
        out = _along_rows([forward(piece) for piece in pieces])
        for key, state in self._now.items():
            self._cache.put(key, self._slots, state)
        return out

    def _follow_tree(
        self, known: dict[StateKey, Tensor], forward: Callable[[Tensor], Any], x: Tensor
    ) -> Any:
        after: dict[StateKey, Tensor] = {}
        outs: list[Any] = []
        for slot, row, parent in self._levels:
            if after:
                self._now = {key: states[slot, parent] for key, states in after.items()}
            else:
                self._now = {
                    key: states[self._layout.first + slot] for key, states in known.items()
                }
            outs.append(forward(x[slot, row][:, None]))
            for key, state in self._now.items():
                if key not in after:
                    after[key] = state.new_empty(*x.shape[:2], *state.shape[1:])
                after[key][slot, row] = state
        self._cache.node_states |= after
        return _by_node(outs, [level[:2] for level in self._levels], x.shape[:2])

    @cached_property
    def _levels(self) -> list[tuple[Tensor, Tensor, Tensor]]:
        """Returns the slots, rows and parents' rows, all [n], of the nodes in each level, roots first."""
        assert self._layout.tree is not None
        depth, mask = self._layout.tree
        above = mask & (depth[:, None, :] == depth[:, :, None] - 1)
        parents = above.long().argmax(-1).expand(self._layout.size, -1)
        depth = depth.expand(self._layout.size, -1)
        levels = []
        for level in range(int(depth.max()) + 1):
            slot, row = torch.nonzero(depth == level, as_tuple=True)
            levels.append((slot, row, parents[slot, row]))
        return levels

    def get_conv_state(self, layer_idx: int, state_idx: int = 0) -> Tensor | None:
        return self._now.get((layer_idx, "conv", state_idx))

    def get_recurrent_state(self, layer_idx: int, state_idx: int = 0) -> Tensor | None:
        return self._now.get((layer_idx, "recurrent", state_idx))

    def update_conv_state(
        self,
        conv_states: Tensor,
        layer_idx: int,
        state_idx: int = 0,
        conv_kernel_size: int | None = None,
        **options: object,
    ) -> Tensor:
        """Keeps the last inputs of a convolution; returns earlier and new inputs, as transformers' cache does."""
        key = (layer_idx, "conv", state_idx)
        before = self._now.get(key)
        if before is None:
            width = conv_kernel_size or conv_states.shape[-1]
            inputs = nn.functional.pad(conv_states, (max(0, width - conv_states.shape[-1]), 0))
        else:
            width = before.shape[-1]
            inputs = torch.cat([before, conv_states], dim=-1)
        # A module's kernel may change inputs in place.
        self._now[key] = inputs[..., -width:].clone()
        return inputs

    def update_recurrent_state(
        self, recurrent_states: Tensor, layer_idx: int, state_idx: int = 0, **options: object
    ) -> Tensor:
        self._now[layer_idx, "recurrent", state_idx] = recurrent_states
        return recurrent_states

    def has_previous_state(
        self, layer_idx: int | None = None, state_idx: int | None = None
    ) -> bool:
        return bool(self._now)

    def is_recording_past(self, layer_idx: int) -> bool:
        return False


def _along_rows(outs: list[Any]) -> Any:
    """Joins a module's outputs for the pieces of a chain: tensors [B, n, ..], or tuples of them."""
    if len(outs) == 1:
        return outs[0]
    if isinstance(outs[0], tuple):
        return tuple(_along_rows(list(part)) for part in zip(*outs, strict=True))
    return None if outs[0] is None else torch.cat(outs, dim=1)


def _by_node(outs: list[Any], places: Sequence[tuple[Tensor, Tensor]], shape: Sequence[int]) -> Any:
    """Joins a module's outputs [n, 1, ..] for a tree's levels into [B, R, ..]; tuples are joined part by part."""
    if isinstance(outs[0], tuple):
        return tuple(_by_node(list(part), places, shape) for part in zip(*outs, strict=True))
    if outs[0] is None:
        return None
    whole: Tensor = outs[0].new_empty(*shape, *outs[0].shape[2:])
    for (slot, row), out in zip(places, outs, strict=True):
        whole[slot, row] = out[:, 0]
    return whole


class _ViewLayer(CacheLayerMixin):
    """One layer's keys and values; see CacheLayerMixin for its methods."""

    is_sliding = False

    def __init__(self, cache: LayerCache, layout: Layout, index: int) -> None:
        super().__init__()
        self._cache = cache
        self._layout = layout
        self._index = index

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        self.is_initialized = True

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: object, **kwargs: object
    ) -> tuple[Tensor, Tensor]:
        layout = self._layout
        slots = slice(layout.first, layout.first + layout.size)
        keys, values = self._cache.keys_and_values(self._index, slots, key_states, value_states)
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
