"""Gemma 4's assistants: a few layers that have only queries and read the model's keys and values."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from medusa_cli.drafters.base import Batch, NewTokens
from medusa_cli.drafters.expansion import Frontier, draft_by_level
from medusa_cli.drafters.heads import HeadsConfig
from medusa_cli.drafters.mtp import TransformersDrafter, refusing
from medusa_cli.errors import UserError
from medusa_cli.model import Backbone
from medusa_cli.model.masks import additive
from medusa_cli.tree import Draft, DynamicTree, Tree

KINDS = ("full_attention", "sliding_attention")
# Engines whose caches return the keys and values of a layer.
ENGINES = ("eager", "native")


@dataclass(frozen=True)
class AssistantConfig(HeadsConfig):
    """Adds an assistant's settings.

    num_heads: the number of draft tokens on a path. text: the assistant's config, in transformers' form.
    """

    text: dict[str, Any] = field(default_factory=dict)


class Assistant(TransformersDrafter):
    """Reads [embedding; state] of a node, attends to the text's keys and values, and computes the next state.

    An assistant's layers do not compute keys: a node sees the text directly, but its ancestors only
    through the state. All nodes have the position of the root.
    """

    name = "assistant"
    weights_file = "model.safetensors"
    config_class = AssistantConfig
    settings = ()
    vocabularies = ("shared",)
    reads_cache = True
    config: AssistantConfig

    def __init__(self, config: AssistantConfig) -> None:
        super().__init__(config)
        self.assistant = network_of(config.text)
        self.truncate(0)

    @classmethod
    def check_fit(cls, config: Any, backbone: Backbone) -> None:
        kinds = getattr(backbone.config, "layer_types", None) or ()
        if backbone.engine.name not in ENGINES or not set(KINDS) <= set(kinds):
            raise UserError(
                f"an assistant reads the keys of a Gemma 4, which the {backbone.engine.name} engine "
                f"does not have for {backbone.id!r}",
                "give a Gemma 4 @model with @engine eager, or another @drafter",
            )

    def named_weights(self) -> dict[str, Tensor]:
        """Returns the weights under the publisher's names, without the lm_head, which is the embedding."""
        named = {
            name.removeprefix("assistant."): weight
            for name, weight in self.state_dict(keep_vars=True).items()
        }
        named.pop("lm_head.weight")
        return named

    @torch.inference_mode()
    def draft(
        self,
        backbone: Backbone,
        sequences: Sequence[Assistant],
        new: Sequence[NewTokens],
        tree: Tree | DynamicTree,
    ) -> list[Draft]:
        """Drafts level by level, starting from the last state of each sequence."""
        network = self.packed("assistant")
        dtype = network.model.norm.weight.dtype
        states = torch.cat([tokens.hidden[-1:] for tokens in new])  # [B, H], then [N, H]
        known = {kind: self._rows(backbone, kind, new, dtype) for kind in KINDS}
        window = network.config.get_text_config().sliding_window
        lengths = [tokens.end for tokens in new]
        # If logits_to_keep is a tensor, not a number, layers with shared keys keep all rows.
        every = torch.zeros(1)

        def guess(
            head: int, width: int, temperature: float | None, level: Frontier
        ) -> tuple[Tensor, Tensor]:
            nonlocal states
            read = [backbone.embedding(level.tokens).to(dtype), states[level.parent_rows].to(dtype)]
            x = network.pre_projection(torch.cat(read, dim=-1))[None]
            out = network.model(
                inputs_embeds=x,
                attention_mask={
                    "full_attention": _mask(level.counts, lengths, None, x),
                    "sliding_attention": _mask(level.counts, lengths, window, x),
                },
                position_ids=_positions(level.counts, lengths, x.device)[None],
                shared_kv_states=known,
                use_cache=False,
                logits_to_keep=every,
            ).last_hidden_state[0]
            states = network.post_projection(out)
            return self.best(network.lm_head(out).float(), width, temperature)

        return draft_by_level(tree, new, guess)

    def _rows(
        self, backbone: Backbone, kind: str, new: Sequence[NewTokens], dtype: torch.dtype
    ) -> tuple[Tensor, Tensor]:
        """Returns the keys and values [1, heads, M, D] of the last layer of a kind, sequence after sequence."""
        layer = last_layer(backbone.config, kind)
        rows = [tokens.cache.rows_of(layer, tokens.slot, tokens.end) for tokens in new]
        keys, values = (
            torch.cat(parts, dim=1)[None].to(dtype) for parts in zip(*rows, strict=True)
        )
        return keys, values

    def head_states(self, backbone: Backbone, batch: Batch) -> Iterator[Tensor]:
        raise UserError(
            "an assistant reads the model's keys and values, which a calibration does not have",
            "use it without one: it drafts chains, or trees with @tree dynamic:N",
        )


def network_of(fields: dict[str, Any]) -> Any:
    """Returns transformers' network of an assistant, given its config; raises UserError for impossible values."""
    from transformers import CONFIG_MAPPING, AutoModelForCausalLM

    with refusing(str(fields.get("model_type"))):
        config = CONFIG_MAPPING[fields["model_type"]](
            **{key: value for key, value in fields.items() if key != "model_type"}
        )
        config.use_ordered_embeddings = False
        network = AutoModelForCausalLM.from_config(config, attn_implementation="sdpa")
    return network


def last_layer(config: Any, kind: str) -> int:
    """Returns the index of the last layer of a kind that has its own keys, according to a model's text config."""
    own = config.num_hidden_layers - (getattr(config, "num_kv_shared_layers", None) or 0)
    return max(layer for layer in range(own) if config.layer_types[layer] == kind)


def _positions(counts: Sequence[int], lengths: Sequence[int], device: torch.device) -> Tensor:
    """Returns the root's position for each node of B sequences."""
    each = [torch.full((n,), end, device=device) for n, end in zip(counts, lengths, strict=True)]
    return torch.cat(each)


def _mask(counts: Sequence[int], lengths: Sequence[int], window: int | None, x: Tensor) -> Tensor:
    """Returns the additive mask [1, 1, N, M].

    A node sees the text of its sequence, or the part of the text that lies in a window.
    """
    blocks = []
    for count, end in zip(counts, lengths, strict=True):
        seen = torch.ones(end, dtype=torch.bool, device=x.device)
        if window is not None:
            seen[: max(0, end - window - 1)] = False  # the window is counted as in transformers
        blocks.append(seen.expand(count, -1))
    return additive(torch.block_diag(*blocks).bool(), x.dtype)[None, None]
