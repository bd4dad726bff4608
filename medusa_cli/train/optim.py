"""The optimizers of a training: AdamW, in 8 bits on request, and Muon for the matrices inside a drafter."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from medusa_cli.drafters.base import Drafter
from medusa_cli.runs.recipe import TrainRecipe
from medusa_cli.train.stage1 import Group


class CombinedOptimizer:
    """Several optimizers, by name, that step as one and are kept in one checkpoint."""

    def __init__(self, parts: dict[str, torch.optim.Optimizer]) -> None:
        self._parts = parts

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """Those of all parts, in order."""
        return [group for part in self._parts.values() for group in part.param_groups]

    def step(self) -> None:
        for part in self._parts.values():
            part.step()

    def zero_grad(self) -> None:
        for part in self._parts.values():
            part.zero_grad()

    def state_dict(self) -> dict[str, Any]:
        return {name: part.state_dict() for name, part in self._parts.items()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        for name, part in self._parts.items():
            part.load_state_dict(state[name])


def optimizer_of(
    groups: Sequence[Group], drafter: Drafter, train: TrainRecipe, device: str
) -> torch.optim.Optimizer | CombinedOptimizer:
    """The recipe's optimizer over the groups of a training, the drafter's first.

    Muon takes the matrices of the drafter's linear layers, at updates as large as AdamW's; vocabulary matrices,
    embeddings, vectors and the backbone's own weights stay with AdamW. Its steps are the same in each of several
    processes, since gradients are whole before it turns them into orthogonal ones.
    """
    betas, decay = (train.beta1, train.beta2), train.weight_decay
    if train.optimizer == "adamw8bit":
        from bitsandbytes.optim import AdamW8bit

        return AdamW8bit(_parts(groups, decay), betas=betas)
    fused = device in ("cpu", "cuda")
    if train.optimizer == "adamw":
        return torch.optim.AdamW(_parts(groups, decay), betas=betas, fused=fused)
    inside = [module.weight for module in drafter.modules() if isinstance(module, nn.Linear)]
    known = {id(weight) for weight in inside}
    others = [Group([p for p in group.parameters if id(p) not in known], group.lr) for group in groups]
    rate = groups[0].lr if train.muon_lr is None else train.muon_lr
    return CombinedOptimizer(
        {
            "adamw": torch.optim.AdamW(_parts(others, decay), betas=betas, fused=fused),
            "muon": torch.optim.Muon(inside, lr=rate, weight_decay=decay, adjust_lr_fn="match_rms_adamw"),
        }
    )


def _parts(groups: Sequence[Group], decay: float) -> list[dict[str, Any]]:
    """Two groups of each: matrices, which decay, and vectors, which do not."""
    parts: list[dict[str, Any]] = []
    for group in groups:
        for decays in (True, False):
            chosen = [p for p in group.parameters if (p.dim() > 1) == decays]
            parts.append({"params": chosen, "weight_decay": decay if decays else 0.0, "lr": group.lr})
    return parts
