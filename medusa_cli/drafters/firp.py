"""FIRP: states of the next tokens, guessed in the backbone's middle layers, ride to its end in the verifying pass."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

import torch
from msgspec import Meta
from torch import Tensor, nn

from medusa_cli.drafters.base import Batch, Draft, HeadsConfig, NewTokens, roots_of
from medusa_cli.drafters.heads import HeadDrafter, drafts_of
from medusa_cli.engine.extra_rows import ExtraRows
from medusa_cli.engine.extra_rows import ahead as states_ahead
from medusa_cli.errors import UsageError, UserError
from medusa_cli.model import Backbone
from medusa_cli.tree import DynamicTree, Tree


@dataclass(frozen=True)
class FirpConfig(HeadsConfig):
    """layers: after how many of the backbone's layers each head's pseudo state enters; masked: whether it does not see
    those of the heads before (the ablation of Figure 7)."""

    layers: tuple[Annotated[int, Meta(ge=1)], ...] = ()
    masked: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "layers", tuple(self.layers))  # whoever makes one may give a list


class Firp(HeadDrafter):
    """K linear maps; head k's turns a state h of layer t_k at position p into that of position p + k (section 3.2).

    The pseudo state goes on through the layers above, seeing the context, itself and the earlier heads' pseudo states,
    and through the backbone's own norm and lm_head. Training lets it see the same, where the paper shows it the true
    states of the tokens in between: what is trained is what drafts.
    """

    name = "firp"
    config_class = FirpConfig
    settings = ("layers", "masked", "conditional")
    vocabularies = ("draft", "shared")
    uses_verify_pass = True
    learning_rate = 1e-2  # the maps start as the identity and have far to go
    # With soft targets alone the loss is the KL divergence of equation 4, up to the target's own entropy.
    soft = 1.0
    config: FirpConfig

    def __init__(self, config: FirpConfig) -> None:
        super().__init__(config)
        size = config.hidden_size
        self.steps = nn.ModuleList(nn.Linear(size, size) for _ in range(config.num_heads))
        for step in self.steps:
            assert isinstance(step, nn.Linear)
            nn.init.eye_(step.weight)
            nn.init.zeros_(step.bias)

    @classmethod
    def create(
        cls,
        backbone: Backbone,
        num_heads: int = 3,
        num_layers: int = 1,
        vocabulary: str = "draft",
        draft_ids: Tensor | None = None,
        matrices: str = "each",
        rank: int | None = None,
        **own: Any,
    ) -> "Firp":
        """A fresh drafter whose pseudo states are copies of the states they start from; layers as in the config.

        layers None spreads them from a half to five sixths of the depth (the paper's choice for three heads).
        """
        for key, value, plain in (("num_layers", num_layers, 1), ("matrices", matrices, "each"), ("rank", rank, None)):
            if value != plain:
                raise UsageError(
                    f"drafter.{key}={value} says nothing to firp", "leave it out: a head is one linear map"
                )
        layers = own.pop("layers", None)
        layers = spread(num_heads, backbone.num_layers) if layers is None else tuple(layers)
        check_layers(layers, num_heads, backbone.num_layers)
        return super().create(backbone, num_heads, num_layers, vocabulary, draft_ids, layers=layers, **own)

    @classmethod
    def check_fit(cls, config: Any, backbone: Backbone) -> None:
        check_layers(config.layers, config.num_heads, backbone.num_layers)

    def _forget_fast(self) -> None:
        super()._forget_fast()
        self._rows: Tensor | None = None

    def extra_rows(self, depth: int) -> ExtraRows | None:
        """The pseudo rows of the first `depth` heads."""
        return self._extra_rows(list(self.fast("steps"))[:depth]) if depth else None

    def _extra_rows(self, steps: list[nn.Module]) -> ExtraRows:
        def cast(step: nn.Module) -> Any:
            return lambda x: step(x.to(self.dtype)).to(x.dtype)

        return ExtraRows(self.config.layers[: len(steps)], tuple(map(cast, steps)), self.config.masked)

    @property
    def head_modules(self) -> Sequence[nn.Module]:
        return list(self.steps)

    @torch.inference_mode()
    def draft(
        self, backbone: Backbone, sequences: "Sequence[Firp]", confirmed: Sequence[NewTokens], shape: Tree | DynamicTree
    ) -> list[Draft]:
        """Fill every node from the pseudo states that came with the last accepted tokens."""
        roots, states = (
            roots_of(confirmed, backbone.device),
            [one.extra_hidden for one in confirmed if one.extra_hidden is not None],
        )
        if not shape.max_depth:
            return drafts_of(self, lambda: [], [], shape, roots)
        if len(states) < len(confirmed):
            raise UserError("internal: firp drafts from pseudo states, and none came with the last pass")
        ahead = torch.stack([one[: shape.max_depth] for one in states], dim=1)  # [K, B, H]
        return drafts_of(self, lambda states: self._scores(backbone, states), [ahead], shape, roots)

    def _scores(self, backbone: Backbone, ahead: Tensor) -> Sequence[Tensor]:
        """Scores [B, M] of each head for pseudo states [K, B, H]."""
        return self.score(backbone, 0, ahead.flatten(0, 1)).unflatten(0, ahead.shape[:2]).unbind(0)

    def matrix(self, backbone: Backbone, head: int) -> Tensor:
        """The lm_head's rows of the draft vocabulary [M, H], or all of them."""
        if self.config.vocabulary == "shared":
            return backbone.lm_head_weight
        if self._rows is None:
            self._rows = self.of_vocabulary(backbone.lm_head_weight)
        return self._rows

    def score(self, backbone: Backbone, head: int, states: Tensor) -> Tensor:
        if not self._scorers:
            shared = self.config.vocabulary == "shared"
            engine = backbone.engine
            self._scorers = [
                engine.lm_head if shared else engine.kernel.pack(self.matrix(backbone, 0), self.bias(backbone))
            ]
        return self._scorers[0](states.to(backbone.dtype)).float()

    def head_states(self, backbone: Backbone, batch: Batch, rows: Sequence[Tensor]) -> Iterator[Tensor]:
        if batch.trace is None or batch.rows is None:
            raise UserError("internal: firp learns from traces of whole sequences, and the batch has none")
        states = states_ahead(backbone, batch.trace, self._extra_rows(list(self.steps)), batch.rows)  # [P, K, H]
        for head, positions in enumerate(rows):
            yield states[positions, head].to(batch.hidden.dtype)


def spread(heads: int, depth: int) -> tuple[int, ...]:
    """Entry layers of K heads, evenly from a half to five sixths of a depth."""
    shares = [1 / 2 + (1 / 3) * k / max(heads - 1, 1) for k in range(heads)]
    return tuple(max(1, min(depth - 1, round(share * depth))) for share in shares)


def check_layers(layers: tuple[int, ...], heads: int, depth: int) -> None:
    """UsageError for entry layers that are not one for each head, out of range, or in falling order."""
    shown = f"drafter.layers={list(layers)}"
    if len(layers) != heads:
        raise UsageError(
            f"{shown} names {len(layers)} layers for {heads} heads", f"name {heads}, or set drafter.num_heads"
        )
    if not all(1 <= layer < depth for layer in layers):
        raise UsageError(f"{shown} is outside this model's {depth} layers", f"use layers from 1 to {depth - 1}")
    if list(layers) != sorted(layers):
        raise UsageError(f"{shown} falls", "name the layers in rising order: later heads enter no lower")
