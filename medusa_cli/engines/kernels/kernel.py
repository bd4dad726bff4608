"""What a kernel is: one way to multiply rows with frozen weights, chosen by measurement."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from medusa_cli.backbone.layers import Unsupported


class Product(nn.Module):
    """Rows x [.., K] -> W x + b [.., N] over frozen weights; nbytes is what one product reads of them."""

    nbytes: int

    def plus(self, x: Tensor, other: Tensor) -> Tensor:
        """W x + b + other."""
        found: Tensor = self(x)
        return found.add_(other)


class Kernel(ABC):
    """A way to multiply: `rows` is the type of what goes in and comes out, `exact` whether weights are as loaded."""

    name: ClassVar[str]
    exact: ClassVar[bool] = True
    rows: torch.dtype

    @abstractmethod
    def pack(self, weight: Tensor, bias: Tensor | None = None) -> Product:
        """The product with a weight [N, K] and a bias [N]; Unsupported where the kernel cannot hold it."""

    def last(self, weight: Tensor, bias: Tensor | None = None) -> Product:
        """The same for the lm_head, whose rounding moves a model most."""
        return self.pack(weight, bias)

    def join(self, linears: Sequence[Any]) -> Product:
        """Layers that read the same rows as one product; Unsupported where one is no plain linear layer."""
        return self.pack(*joined(linears))


def joined(linears: Sequence[Any]) -> tuple[Tensor, Tensor | None]:
    """The weights [N, K] and biases [N] of linear layers on the same input, one below the other."""
    for linear in linears:
        if type(linear) is not nn.Linear:
            raise Unsupported(f"a layer is {type(linear).__name__}, which has no kernel")
    biases = [None if one.bias is None else one.bias.detach() for one in linears]
    known = [bias for bias in biases if bias is not None]
    if known and len(known) != len(biases):
        raise Unsupported("only some of its fused layers have a bias")
    weights = [linear.weight.detach() for linear in linears]
    return (weights[0] if len(weights) == 1 else torch.cat(weights)), (torch.cat(known) if known else None)


class Plain(Kernel):
    """torch's own product over weights as they are: what a GPU's libraries want, and what any device can do."""

    name = "plain"

    def __init__(self, rows: torch.dtype) -> None:
        self.rows = rows

    def pack(self, weight: Tensor, bias: Tensor | None = None) -> Product:
        return _PlainProduct(weight.to(self.rows), None if bias is None else bias.to(self.rows))


class _PlainProduct(Product):
    weight: Tensor
    bias: Tensor | None

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        super().__init__()
        self.register_buffer("weight", weight, persistent=False)
        self.register_buffer("bias", bias, persistent=False)
        self.nbytes = weight.nbytes

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight, self.bias)
