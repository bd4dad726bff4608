"""Operator calls recorded once and run without Python between them; the one place that knows how."""

import warnings
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from medusa_cli.engine.kernels import Fp16Product, PackedProduct

Computation = Callable[..., Tensor]
# The call from which on a computation is traced: a trace costs as long as some fifty calls gain by it, and a short
# answer would wait for it.
TRACED_FROM = 3


class TracedModule:
    """A computation that comes again and again: called as it is at first, then traced, where that can be done.

    It takes tensors of any sizes (and lists of them), gives one tensor, and multiplies by packed weights of the modules
    `within()` alone. never: not to be traced, as off the CPU, where graphs of the device take the calls out.
    """

    def __init__(self, compute: Computation, within: Callable[[], Iterable[nn.Module]], *, never: bool = False) -> None:
        self._run, self._within, self._left = compute, within, 0 if never else TRACED_FROM

    def __call__(self, *inputs: Any) -> Tensor:
        if self._left:
            self._left -= 1
            if not self._left:
                self._run = trace(self._run, inputs, self._within()) or self._run
        return self._run(*inputs)


def trace(compute: Computation, inputs: Sequence[Any], within: Iterable[nn.Module]) -> Computation | None:
    """The calls that a computation makes on `inputs` as one graph over inputs of any sizes; None where that fails.

    Sizes stay open where they come from shapes within the computation. oneDNN's packed weights cannot be held by a
    graph: those of the modules `within` are handed to it with every call.
    """
    products = [one for module in within for one in module.modules()]
    slots = [one.slot for one in products if isinstance(one, PackedProduct)]

    class Given(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            # A graph knows weights that are no tensors only as a module's own. It has nothing else of theirs: torch
            # looks long at every module that it is shown.
            for number, one in enumerate(products):
                if isinstance(one, Fp16Product):
                    setattr(self, f"packed_{number}", one.packed)

        def forward(self, bank: list[Tensor], *rest: Any) -> Tensor:
            for slot, tensor in zip(slots, bank, strict=False):
                slot.tensor = tensor
            return compute(*rest)

    # An empty list has no type that a trace could record.
    bank = [slot.own for slot in slots] or [torch.zeros(())]
    try:
        with warnings.catch_warnings(), torch.inference_mode():
            # torch.jit is deprecated without a successor for CPUs that costs less than half a minute a model; and sizes
            # that a trace keeps look to it like numbers that it might freeze.
            warnings.simplefilter("ignore")
            made = _alone(torch.jit.trace(Given().eval(), (bank, *inputs), check_trace=False))
    except RuntimeError:
        return None
    finally:
        for slot in slots:
            slot.tensor = slot.own
    return lambda *rest: made(bank, *rest)


def _alone(traced: Any) -> Computation:
    """A traced module as a function that holds its weights and goes when nobody has it any more.

    torch keeps the graph of every module it ever traced or froze, with the weights in it: 400 MB for each load of the
    default model. Theirs are emptied once their copy is made.
    """
    frozen = torch.jit.freeze(traced)
    graph = frozen.graph.copy()
    graph.eraseInput(0)  # the module: what it held are constants now
    found: Computation = torch._C._create_function_from_graph("traced", graph)
    for kept in (frozen.graph, traced.graph):
        for _ in list(kept.outputs()):
            kept.eraseOutput(0)
        for node in reversed(list(kept.nodes())):
            node.destroy()
    return found
