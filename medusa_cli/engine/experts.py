"""Mixtures of experts for the native library: their weights, and how their routers choose experts."""

import copy
import itertools
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional as F

from medusa_cli.model.backbone import Unsupported

ROUTER_NAMES = ("gate", "router")
# The name of the bias that a router adds to its scores for the choice of experts only.
BIAS = "e_score_correction_bias"
# The number of random rows with which a router is probed.
ROWS = 7


@dataclass(frozen=True)
class Part:
    """Rows first .. end - 1 of a stored weight, or all rows from `first` on if `end` is None.

    With `every`, the weight consists of blocks of `every` rows, such as the experts' matrices, and
    the part is rows first .. end - 1 of each block, or only every `step`-th of these rows.
    transposed: the number of the blocks if each of them is stored transposed, else 0.
    """

    weight: str
    bias: str
    first: int = 0
    end: int | None = None
    every: int | None = None
    step: int = 1
    transposed: int = 0

    def rows(self, count: int) -> slice | NDArray[np.bool_]:
        """Returns a slice or a mask [count] that selects the part from a weight of `count` rows."""
        if self.every is None:
            return slice(self.first, self.end)
        within = np.arange(count) % self.every
        chosen = (within >= self.first) & (within < (self.end or self.every))
        return chosen & ((within - self.first) % self.step == 0)


@dataclass(frozen=True)
class Routing:
    """The rule by which a router chooses experts for a row; the fields have the library's names.

    The scores are sigmoids or a softmax of the router's logits. The `top_experts` best scores are
    divided by their sum if `normalized`, then multiplied by `expert_scale`. If `jitter` is not 0,
    two experts are chosen by sparsemixer instead (Phi-3.5-MoE).
    """

    top_experts: int = 0
    sigmoid: bool = False
    normalized: bool = False
    expert_scale: float = 1.0
    jitter: float = 0.0

    def is_like(self, other: "Routing") -> bool:
        """Returns True if another rule differs from this one at most in `top_experts`."""
        return replace(self, top_experts=other.top_experts) == other


@dataclass(frozen=True)
class Experts:
    """A mixture of experts: its routing, and the names of its matrices and vectors.

    matrices, vectors: the library's names, mapped to the names of the stored weights. parts: the
    matrices that are rows of larger weights.
    """

    count: int
    routing: Routing
    matrices: dict[str, str]
    parts: dict[str, Part]
    vectors: dict[str, str]


def has_experts(mlp: Any) -> bool:
    """Returns True if an MLP is a mixture of experts."""
    return getattr(mlp, "experts", None) is not None


def experts_of(mlp: Any, name: str) -> Experts:
    """Describes a mixture of experts; `name` is the name of its module in the network.

    Raises Unsupported if it has unknown parts or chooses experts in an unknown way.
    """
    own, router = next(
        ((own, router) for own in ROUTER_NAMES if (router := getattr(mlp, own, None)) is not None),
        ("", None),
    )
    gate_up: Any = getattr(mlp.experts, "gate_up_proj", None)
    down: Any = getattr(mlp.experts, "down_proj", None)
    transposed = getattr(mlp.experts, "is_transposed", False)
    if router is None or not _are_stacked(gate_up, down, transposed):
        raise Unsupported("its experts have parts that are not supported")
    if getattr(mlp, "shared_expert_gate", None) is not None:
        shared = {"shared_router": f"{name}.shared_expert_gate"}
    else:
        shared = {}
    if not hasattr(router, "weight"):  # Hunyuan's router is a submodule
        own = f"{own}.wg"
    count, inner, hidden = down.shape if transposed else down.mT.shape
    experts = f"{name}.experts"
    of_gate_up = partial(_part_of, mlp.experts, experts, "gate_up_proj", 2 * inner)
    if getattr(mlp.experts, "is_concatenated", True):
        gate, up = of_gate_up(0, inner), of_gate_up(inner, 2 * inner)
    else:
        gate, up = of_gate_up(0, 2 * inner, step=2), of_gate_up(1, 2 * inner, step=2)
    bias = next((key for key in router.state_dict() if key.endswith(BIAS)), None)
    return Experts(
        count=count,
        routing=routing_of(router, count),
        matrices={
            "router": f"{name}.{own}",
            **{key: f"{experts}.{key}" for key in ("gate", "up", "down")},
            **shared,
        },
        parts={
            f"{experts}.gate": gate,
            f"{experts}.up": up,
            f"{experts}.down": _part_of(mlp.experts, experts, "down_proj", hidden, 0, hidden),
        },
        vectors={} if bias is None else {"router_bias": f"{name}.{own}.{bias}"},
    )


def _are_stacked(gate_up: Any, down: Any, transposed: bool) -> bool:
    """Returns True if the matrices are [experts, 2 * inner, hidden] and [experts, hidden, inner].

    transposed: True if the last two dimensions are swapped.
    """
    if gate_up is None or down is None or gate_up.dim() != 3 or down.dim() != 3:
        return False
    count, twice, hidden = gate_up.mT.shape if transposed else gate_up.shape
    wanted = (count, hidden, twice // 2)
    return tuple(down.mT.shape if transposed else down.shape) == wanted


def _part_of(
    module: Any, name: str, weight: str, every: int, first: int, end: int, step: int = 1
) -> Part:
    """Returns the part of a weight of all experts that holds rows first .. end - 1 of each expert's matrix.

    name: the name of the experts' module. every: the number of outputs of an expert's matrix.
    """
    bias = f"{weight}_bias"
    return Part(
        weight=f"{name}.{weight}",
        bias=f"{name}.{bias}" if getattr(module, bias, None) is not None else "",
        first=first,
        end=end,
        every=every,
        step=step,
        transposed=len(getattr(module, weight)) if getattr(module, "is_transposed", False) else 0,
    )


@torch.no_grad()
def routing_of(router: Any, count: int) -> Routing:
    """Returns the rule by which a router chooses among `count` experts.

    The rule is found by probing the router with random weights and rows. Raises Unsupported if no
    known rule reproduces its output.
    """
    probe = copy.deepcopy(router).to_empty(device="cpu").float()
    chance = torch.Generator().manual_seed(0)
    bias = torch.zeros(count)
    added = torch.zeros(count)
    for name, values in probe.state_dict(keep_vars=True).items():
        random = torch.randn(values.shape, generator=chance)
        if name.endswith(BIAS):
            values.data = random / 10
            bias = values.data.view(-1)
        elif name.endswith("bias"):
            values.data = random
            added = random
        else:
            values.data = 2 * random / random.shape[-1] ** 0.5
            weight = values.data
    x = torch.randn(ROWS, weight.shape[-1], generator=chance)
    _, values, chosen = probe(x)
    expected = torch.zeros(ROWS, count).scatter(1, chosen, values.float())

    top = chosen.shape[-1]
    jitter = float(getattr(router, "router_jitter_noise", 0.0))
    if jitter and top == 2:
        ours = _mix_sparsely(x @ weight.T + added, jitter)
        if torch.allclose(ours, expected, atol=1e-5, rtol=1e-4):
            return Routing(top, jitter=jitter)
    for sigmoid, normalized in itertools.product((False, True), repeat=2):
        ours = _route(x @ weight.T + added, bias, top, sigmoid, normalized)
        scale = float(expected.sum() / ours.sum())
        if torch.allclose(scale * ours, expected, atol=1e-5, rtol=1e-4):
            return Routing(top, sigmoid, normalized, round(scale, 4))
    raise Unsupported("its way of choosing experts is not supported")


def _route(scores: Tensor, bias: Tensor, top: int, sigmoid: bool, normalized: bool) -> Tensor:
    """Returns the experts' weights [n, experts] for a router's logits, zero for experts not chosen."""
    scores = scores.sigmoid() if sigmoid else F.softmax(scores, dim=-1)
    chosen = (scores + bias).topk(top, dim=-1).indices
    weights = torch.zeros_like(scores).scatter(1, chosen, scores.gather(1, chosen))
    return weights / weights.sum(-1, keepdim=True) if normalized else weights


def _mix_sparsely(scores: Tensor, jitter: float) -> Tensor:
    """Returns the weights [n, experts] of the two experts that sparsemixer chooses, zero for the others."""
    weights = torch.zeros_like(scores)
    left = scores
    for _ in range(2):
        best, chosen = left.max(dim=-1, keepdim=True)
        far = (best - scores) / scores.abs().clamp(min=best) > 2 * jitter
        shares = left.masked_fill(far, -torch.inf).softmax(dim=-1)
        weights = weights.scatter(1, chosen, shares.gather(1, chosen))
        left = left.scatter(1, chosen, -torch.inf)
    return weights
