"""Greedy decoding by steps of fixed shapes: what the fast engine runs under CUDA."""

import time
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch

from medusa_cli.backbone import Backbone
from medusa_cli.decoding.clock import Clock
from medusa_cli.decoding.ending import Ending, fitting
from medusa_cli.decoding.graphs import borrowed
from medusa_cli.decoding.types import Step
from medusa_cli.drafters.base import Confirmed, Drafter
from medusa_cli.tree import Tree


def generate_static(
    backbone: Backbone,
    drafter: Drafter | None,
    tree: Tree,
    prompt: Sequence[int],
    *,
    max_new_tokens: int,
    stop_ids: Iterable[int] | None = None,
    stop_strings: Sequence[str] = (),
) -> Iterator[Step]:
    """What generate gives for a static tree and greedy decoding; without a drafter what generate_plain gives.

    Arguments and errors as there.
    """
    ending = Ending(backbone, prompt, max_new_tokens, stop_ids, stop_strings)
    taps = (-1,) if drafter is None else drafter.taps
    shape = tree if drafter is not None else Tree.root_only()
    if drafter is not None:
        drafter.reset()
    with borrowed(backbone, ending.room + shape.size, taps) as decoder:
        clock, watch = Clock(backbone), _Watch(backbone)
        tokens = torch.tensor(list(prompt), device=backbone.device)
        out = decoder.prefill(tokens)
        assert out.logits is not None
        confirmed = Confirmed(tokens, out.hidden, int(out.logits[-1].argmax()), 0)
        yield Step(ending.cut([confirmed.root]), 0, 0, 0.0, clock.lap(), prefill=True)
        slot = decoder.cache.slots[0]
        while not ending.done:
            start, begun = slot.length, watch.mark()
            cut = fitting(shape, backbone.max_positions - start)
            assert isinstance(cut, Tree)
            if drafter is None:
                drafted = torch.tensor([confirmed.root], device=backbone.device)
            else:
                drafted = drafter.draft(backbone, slot, confirmed, cut).tokens
            drawn_up = watch.mark()
            # A tree cut by the context's end does not come again.
            (settled,) = decoder.step(drafted[None], cut, capture=cut is shape)
            accepted = torch.tensor(settled.tokens, device=backbone.device)
            confirmed = Confirmed(accepted, settled.hidden, settled.bonus, start)
            fresh = ending.cut([*settled.tokens[1:], settled.bonus])
            whole, draft_s = clock.lap(), watch.between(begun, drawn_up)
            yield Step(fresh, cut.size - 1, len(fresh) - 1, draft_s, whole - draft_s)


class _Watch:
    """Marks in the device's own queue: the host waits for nothing when it makes one."""

    def __init__(self, backbone: Backbone) -> None:
        self._on_device = backbone.device.type == "cuda"

    def mark(self) -> Any:
        if not self._on_device:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def between(self, first: Any, second: Any) -> float:
        """Seconds between two marks that the device has passed."""
        return first.elapsed_time(second) / 1e3 if self._on_device else second - first
