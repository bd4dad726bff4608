"""A Hugging Face causal LM as a backbone: the frozen network, its lm_head, and what names it."""

from collections.abc import Sequence
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from medusa_cli.errors import UserError
from medusa_cli.model import masks as attention
from medusa_cli.model.chat_template import render, token_ids
from medusa_cli.model.checks import refuse_unsupported, usable_positions
from medusa_cli.model.identity import identity_of
from medusa_cli.runs.io import Malformed


class Backbone:
    """A frozen causal LM, unmodified but for its attention function, and the engine that runs it.

    weights: the digest of the files that the network is from, for its identity; None: it is read from the weights.
    Raises UserError for models whose attention a tree mask cannot express.
    """

    # Any: drafters and loops use what their engine offers beyond a pass, and this layer knows none of it.
    engine: Any

    def __init__(
        self,
        model: Any,
        tokenizer: Any = None,
        id: str = "model",
        adapter: str | None = None,
        weights: str | None = None,
    ) -> None:
        refuse_unsupported(model.config)
        attention.register()
        model.set_attn_implementation(attention.NAME)
        self.model = model.eval().requires_grad_(False)
        self.tokenizer = tokenizer
        self.id = id
        self.adapter = adapter
        self.config = model.config.get_text_config()
        self.hidden_size: int = self.config.hidden_size
        self.num_layers: int = self.config.num_hidden_layers
        self.max_positions: int = usable_positions(self.config)
        self.embedding: nn.Embedding = model.get_input_embeddings()
        self.vocab_size: int = self.embedding.weight.shape[0]
        self.device: torch.device = self.embedding.weight.device
        # Kept apart from the layer, whose weights an engine may pack and give up.
        head = model.get_output_embeddings()
        self.lm_head_weight: Tensor = head.weight.detach()
        self.lm_head_bias: Tensor | None = None if head.bias is None else head.bias.detach()
        # Read before weights are packed, or learn.
        self.identity: dict[str, Any] = identity_of(model, id=id, weights=weights, adapter=adapter)

    @property
    def dtype(self) -> torch.dtype:
        """The type of the states: the engine's, which may compute in fp32 over weights kept in 16 bits."""
        engine = getattr(self, "engine", None)
        return self.embedding.weight.dtype if engine is None else engine.dtype

    @cached_property
    def masks(self) -> attention.Masks:
        """Additive masks of the type of the network's weights, for passes through the network itself."""
        return attention.Masks(self.config, self.embedding.weight.dtype)

    @cached_property
    def eos_ids(self) -> frozenset[int]:
        """The token ids that end an answer."""
        ids: set[int] = set()
        for owner in (self.model.generation_config, self.config, self.tokenizer):
            found = getattr(owner, "eos_token_id", None)
            ids.update(found if isinstance(found, list) else [] if found is None else [found])
        return frozenset(ids)

    def states(self, tokens: Tensor, taps: Sequence[int] = (-1,)) -> Tensor:
        """Tapped states [B, L, H * taps] of rows of tokens [B, L], padded at their ends, for training.

        Each row alone, and no cache; gradients reach whatever weights of the network learn.
        """
        return tapped(padded_pass(self, tokens, output_hidden_states=lower(taps)), taps)

    def encode_chat(self, messages: list[dict[str, str]], add_generation_prompt: bool = True) -> list[int]:
        """Token ids of a conversation under the model's chat template; UserError where it has none or refuses."""
        try:
            text = render(self, messages, prompt=add_generation_prompt)
        except Malformed as reason:
            raise UserError(
                f"the model {self.id!r} cannot be told this conversation: {reason}",
                "leave the system prompt out, or what the template names",
            ) from reason
        return token_ids(self, text)

    def decode(self, ids: Sequence[int]) -> str:
        """The text of token ids, special tokens left out."""
        return str(self.tokenizer.decode(list(ids), skip_special_tokens=True))


def padded_pass(backbone: Backbone, tokens: Tensor, **options: Any) -> Any:
    """Run rows of tokens [B, L], padded at their ends, through the network; no token sees what comes after it."""
    device = backbone.device
    size, length = tokens.shape
    return backbone.model.base_model(
        input_ids=tokens.to(device),
        attention_mask=backbone.masks.causal(length, device),
        position_ids=torch.arange(length, device=device)[None].expand(size, -1),
        **{"use_cache": False, **options},
    )


def lower(taps: Sequence[int]) -> bool:
    """Whether states below the final ones are asked for."""
    return any(tap != -1 for tap in taps)


def tapped(out: Any, taps: Sequence[int]) -> Tensor:
    """The tapped states [.., H * taps] of a network's output."""
    if tuple(taps) == (-1,):
        final: Tensor = out.last_hidden_state
        return final
    # hidden_states[0] is the embedding, so the output of layer t is at t + 1.
    return torch.cat([out.last_hidden_state if t == -1 else out.hidden_states[t + 1] for t in taps], dim=-1)
