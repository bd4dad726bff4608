"""FIRP, which adds guessed states of the next tokens as extra rows to the verify pass."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any

import torch
from msgspec import Meta
from torch import Tensor, nn

from medusa_cli.device import upload
from medusa_cli.drafters.base import Batch, NewTokens, check_layers
from medusa_cli.drafters.expansion import draft_by_level
from medusa_cli.drafters.heads import HeadDrafter, HeadsConfig
from medusa_cli.drafters.layers import identity_
from medusa_cli.engine import Plan
from medusa_cli.engine.extra_rows import ExtraRows, extra_row_states
from medusa_cli.errors import OTHER_THAN_FIRP, UsageError, UserError
from medusa_cli.model import Backbone
from medusa_cli.model.backbone import quantization_of
from medusa_cli.model.checks import PROBE, difference
from medusa_cli.tree import Draft, DynamicTree, Tree


@dataclass(frozen=True)
class FirpConfig(HeadsConfig):
    """Adds FIRP's setting. layers: the number of backbone layers below each head's pseudo state."""

    layers: tuple[Annotated[int, Meta(ge=1)], ...] = ()


class Firp(HeadDrafter):
    """Holds K linear maps (section 3.2).

    The map of head k turns the state of layer t_k at position p into a pseudo state of this layer at position p + k.
    The pseudo state passes through the layers above, where it sees the context, itself and the pseudo states of earlier
    heads. The backbone's norm and lm_head follow. A pseudo state sees the same in training as in drafting. In the
    paper, training instead shows a pseudo state the true states of the tokens between p and p + k.
    """

    name = "firp"
    config_class = FirpConfig
    settings = ("layers", "conditional")
    vocabularies = ("draft", "shared")
    uses_verify_pass = True
    learning_rate = 1e-2  # high, as the maps start as the identity, far from trained maps
    # With only soft targets, the loss is the KL divergence of equation 4, up to the entropy of the
    # targets.
    soft = 1.0
    config: FirpConfig

    def __init__(self, config: FirpConfig) -> None:
        super().__init__(config)
        size = config.hidden_size
        self.steps = nn.ModuleList(nn.Linear(size, size) for _ in range(config.num_heads))
        for weight in self.steps.parameters():
            if weight.dim() == 2:
                identity_(weight)
            else:
                nn.init.zeros_(weight)

    @classmethod
    def fields_of_model(cls, backbone: Backbone, num_heads: int) -> dict[str, Any]:
        return {"layers": spread(num_heads, backbone.num_layers)}

    @classmethod
    def check_fit(cls, config: Any, backbone: Backbone) -> None:
        if len(config.layers) != config.num_heads:
            raise UsageError(
                f"drafter.layers={list(config.layers)} names {len(config.layers)} layers for {config.num_heads} heads",
                f"name {config.num_heads}, or set drafter.num_heads",
            )
        check_layers(config.layers, backbone.num_layers, "drafter.layers", repeats=True)

    def extra_rows(self, depth: int) -> ExtraRows | None:
        return self.rows_of(list(self.packed("steps"))[:depth]) if depth else None

    def rows_of(self, steps: Sequence[nn.Module]) -> ExtraRows:
        """Returns the extra rows that the maps of the first heads produce."""
        maps: list[Callable[[Tensor], Tensor]] = [partial(self._step, step) for step in steps]
        return ExtraRows(self.config.layers[: len(maps)], tuple(maps))

    def _step(self, step: nn.Module, x: Tensor) -> Tensor:
        return step(x.to(self.dtype)).to(x.dtype)

    @torch.inference_mode()
    def draft(
        self,
        backbone: Backbone,
        sequences: Sequence[Firp],
        new: Sequence[NewTokens],
        tree: Tree | DynamicTree,
    ) -> list[Draft]:
        """Drafts every node from the pseudo states that were computed with the last accepted tokens."""

        depth = min(
            0 if tokens.extra_hidden is None else len(tokens.extra_hidden) for tokens in new
        )
        tree = tree.truncate(depth)
        if not tree.max_depth:
            return [
                Draft(upload([tokens.root], tokens.tokens.device), Tree.root_only())
                for tokens in new
            ]

        def compute(states: Tensor) -> Sequence[Tensor]:
            return (
                self.score(backbone, 0, states.flatten(0, 1))
                .unflatten(0, states.shape[:2])
                .unbind(0)
            )

        states = [
            tokens.extra_hidden[: tree.max_depth]
            for tokens in new
            if tokens.extra_hidden is not None
        ]
        guess = self.at_once(tree.max_depth, compute, torch.stack(states, dim=1))
        return draft_by_level(tree, new, guess)

    def head_states(self, backbone: Backbone, batch: Batch) -> Iterator[Tensor]:
        assert batch.trace is not None and batch.rows is not None
        # [P, K, H]
        states = extra_row_states(backbone, batch.trace, self.rows_of(list(self.steps)), batch.rows)
        yield from states[batch.learned].to(batch.hidden.dtype).unbind(1)


def spread(heads: int, depth: int) -> tuple[int, ...]:
    """Returns the entry layers of K heads, spaced evenly from one half to five sixths of the depth."""
    shares = [1 / 2 + (1 / 3) * k / max(heads - 1, 1) for k in range(heads)]
    return tuple(max(1, min(depth - 1, round(share * depth))) for share in shares)


@torch.inference_mode()
def check_extra_rows(backbone: Backbone) -> None:
    """Raises UserError unless a pass with extra rows gives the same logits as a pass without, up to rounding.

    Some networks scale or shift states outside their layers, which a layer-by-layer pass misses.
    """
    engine = backbone.engine
    tokens = torch.arange(PROBE) * 37 % backbone.vocab_size
    extra_rows = ExtraRows((max(1, backbone.num_layers // 2),), (lambda x: x,))
    logits = []
    for extra in (None, extra_rows):
        out = engine.forward(Plan.chain(tokens, logits="all", extra_rows=extra), engine.new_cache())
        assert out.logits is not None
        logits.append(out.logits[0].clone())  # the next pass may overwrite the logits
    error = difference(logits[1], logits[0])
    tolerance = 1e-3 if engine.dtype == torch.float32 else 0.25
    if error > tolerance and not quantization_of(backbone.model.config):
        raise UserError(
            f"the layers of the model {backbone.id!r} cannot be run one by one: its logits then differ by {error:.2g}",
            OTHER_THAN_FIRP,
        )
