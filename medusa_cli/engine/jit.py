"""Records a computation's operators once and runs them without Python between them."""

import warnings
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from medusa_cli.engine.kernels import Fp16Linear, OneDnnLinear

Computation = Callable[..., Any]
# The call from which on a computation is traced: a trace takes as long as some fifty calls gain by it, and a short
# answer would wait for it. A `late` one comes so many times as late: prompts in chunks have a trace for each number of
# chunks, and would wait for one that few others use.
TRACED_FROM, WAIT = 3, 20


class TracedModule:
    """Holds a computation as `run`: as it is at first, and later as a graph.

    The computation takes tensors of any sizes (and lists of them), returns tensors, and multiplies by packed weights of
    the modules `within()` alone. never: do not trace, as off the CPU. late: trace WAIT times as late.
    """

    run: Computation

    def __init__(
        self,
        compute: Computation,
        within: Callable[[], Iterable[nn.Module]],
        *,
        never: bool = False,
        late: bool = False,
    ) -> None:
        self._compute, self._within = compute, within
        self._left = TRACED_FROM * (WAIT if late else 1)
        self.run = compute if never else self._count

    def _count(self, *inputs: Any) -> Any:
        self._left -= 1
        if not self._left:
            self.run = trace(self._compute, inputs, self._within()) or self._compute
        return (self._compute if self._left else self.run)(*inputs)


def trace(compute: Computation, inputs: Sequence[Any], within: Iterable[nn.Module]) -> Computation | None:
    """Returns the operators of a computation on `inputs` as a graph over inputs of any sizes; None if that fails.

    Sizes stay open if they come from shapes within the computation. oneDNN's packed weights cannot be held by a graph:
    those of the modules `within` are passed to it with every call.
    """
    modules = [inner for module in within for inner in module.modules()]
    products = [module for module in modules if isinstance(module, OneDnnLinear)]

    class Graph(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            # A graph can hold fbgemm's weights, which are no tensors, only as attributes of its own module. It has no
            # other parts: torch examines each at length.
            for number, module in enumerate(modules):
                if isinstance(module, Fp16Linear):
                    setattr(self, f"packed_{number}", module.packed)

        def forward(self, bank: list[Tensor], *rest: Any) -> Any:
            for product, packed in zip(products, bank, strict=False):
                product.packed = packed
            return compute(*rest)

    # An empty list has no type that a trace could record.
    bank = [product.own for product in products] or [torch.zeros(())]
    try:
        with warnings.catch_warnings(), torch.inference_mode():
            # torch.jit is deprecated, but its successor takes half a minute a model on CPUs. It also warns of sizes.
            warnings.simplefilter("ignore")
            graph = _detached(torch.jit.trace(Graph().eval(), (bank, *inputs), check_trace=False))
    except RuntimeError:
        return None
    finally:
        for product in products:
            product.packed = product.own
    return partial(graph, bank)


def _detached(traced: Any) -> Computation:
    """Returns a traced module as a function that holds its weights and frees them.

    torch keeps the graph of every module it ever traced or froze with its weights: 400 MB for each load of the default
    model. These graphs are emptied once they are copied.
    """
    frozen = torch.jit.freeze(traced)
    copy = frozen.graph.copy()
    copy.eraseInput(0)  # the module: its attributes are constants now
    function: Computation = torch._C._create_function_from_graph("traced", copy)
    for graph in (frozen.graph, traced.graph):
        for _ in list(graph.outputs()):
            graph.eraseOutput(0)
        for node in reversed(list(graph.nodes())):
            node.destroy()
    return function
