"""Operator calls recorded once and run without Python between them; the one place that knows how."""

import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from medusa_cli.engines.kernels.packed import PackedProduct

Traced = Callable[..., Tensor]


def trace(module: nn.Module, inputs: Sequence[Any]) -> Traced | None:
    """A module's calls on `inputs` as one graph that takes the same inputs of any sizes; None where it fails.

    Sizes stay open where they come from shapes within the module. The weights of packed products cannot be held by a
    graph: they are handed to it with every call.
    """
    slots = [one.slot for one in module.modules() if isinstance(one, PackedProduct)]

    class Given(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = module

        def forward(self, bank: list[Tensor], *rest: Any) -> Tensor:
            for slot, tensor in zip(slots, bank, strict=False):
                slot.tensor = tensor
            found: Tensor = self.inner(*rest)
            return found

    # An empty list has no type that a trace could record.
    bank = [slot.own for slot in slots] or [torch.zeros(())]
    try:
        with warnings.catch_warnings(), torch.inference_mode():
            # torch.jit is deprecated without a successor for CPUs that costs less than half a minute a model; and sizes
            # that a trace keeps look to it like numbers that it might freeze.
            warnings.simplefilter("ignore")
            made = torch.jit.freeze(torch.jit.trace(Given().eval(), (bank, *inputs), check_trace=False))
    except RuntimeError:
        return None
    finally:
        for slot in slots:
            slot.tensor = slot.own
    return lambda *rest: made(bank, *rest)
