"""A Hugging Face causal LM as a backbone: the frozen network, its layers, its lm_head and its identity."""

import os
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from functools import cache, cached_property, partial
from inspect import unwrap
from typing import Any

import torch
from torch import Tensor, nn

from medusa_cli.errors import UserError
from medusa_cli.files.model_files import STATE_UPDATES
from medusa_cli.files.model_source import lasting_name
from medusa_cli.model.chat_template import chat_prompt, token_ids
from medusa_cli.model.grouped_attention import NAME, register
from medusa_cli.model.masks import Masks
from medusa_cli.model.vocabulary import Vocabulary, eos_ids_of

# Maximum number of positions for models that state no maximum, such as Mamba.
UNBOUNDED = 1 << 20
# Types of rotary embeddings that change beyond the original context. Keys that are already in the
# cache would keep the rotation from before the change.
CHANGING_ROPE = ("longrope", "dynamic")
# The process that made the first backbone. In a fork of this process, torch waits for threads that
# do not exist there.
_first_process: int | None = None


class Unsupported(Exception):
    """Says why an engine cannot run a model."""


def check_fork() -> None:
    """Raises UserError in a fork of a process that has loaded a model, if torch would use threads."""
    if _first_process not in (None, os.getpid()) and torch.get_num_threads() > 1:
        raise _forked(_first_process)


def _forked(process: int | None) -> UserError:
    return UserError(
        f"this process was forked from process {process} after that one had loaded a model, and torch would hang here",
        "start processes by spawn (multiprocessing.get_context), or load the model only after the fork",
    )


def _rows_of(
    weight: Tensor, bias: Tensor | None, ids: Tensor | None
) -> tuple[Tensor, Tensor | None]:
    """Returns the rows of the weight and the bias for token ids, or all rows if `ids` is None."""
    if ids is None:
        return weight, bias
    return weight[ids], None if bias is None else bias[ids]


@dataclass
class LazyNetwork:
    """Holds a network without weights, which `build` creates on the meta device when it is first needed.

    Building the network imports the classes of its model type, which takes more than a second.
    """

    config: Any
    generation_config: Any
    build: Callable[[], Any]

    @cached_property
    def network(self) -> Any:
        network = self.build()
        network.generation_config = self.generation_config
        return network


class Backbone:
    """Holds a frozen causal LM, unmodified except for its attention function, and the engine that runs it.

    weights, adapter: the digests of their files. embedding: a layer that looks up tokens. lm_head: a function that
    returns the lm_head's weight and bias for token ids, or for all tokens if given None. embedding and lm_head are
    given for a network on the meta device, where only the engine holds weights.
    """

    engine: Any  # an engine.Engine, which this package must not import

    def __init__(
        self,
        model: Any,
        tokenizer: Any = None,
        id: str = "model",
        adapter: str | None = None,
        weights: str | None = None,
        *,
        embedding: Any = None,
        lm_head: Callable[[Tensor | None], tuple[Tensor, Tensor | None]] | None = None,
    ) -> None:
        global _first_process
        self.process = os.getpid()
        _first_process = _first_process or self.process
        self._lazy = model if isinstance(model, LazyNetwork) else None
        if self._lazy is None:
            self.model = _prepared(model)
        self.generation_config = model.generation_config
        self.tokenizer = tokenizer
        self.id = id
        self.adapter = adapter
        self.config = text_config(model.config)
        self.hidden_size: int = self.config.hidden_size
        self.num_layers: int = self.config.num_hidden_layers
        self.max_positions: int = usable_positions(self.config)
        self.embedding: nn.Embedding = (
            model.get_input_embeddings() if embedding is None else embedding
        )
        self.vocab_size: int = self.embedding.weight.shape[0]
        self.device: torch.device = self.embedding.weight.device
        if lm_head is None:
            # The weight is read now, because an adapter may wrap the layer later.
            head = model.get_output_embeddings()
            bias = None if head.bias is None else head.bias.detach()
            lm_head = partial(_rows_of, head.weight.detach(), bias)
        self._lm_head = lm_head
        self.identity: dict[str, Any] = identity_of(
            model.config, self.vocab_size, id=id, weights=weights, adapter=adapter
        )

    @property
    def forked(self) -> bool:
        """Returns True in a fork of the process that loaded the model."""
        return self.process != os.getpid()

    def check_process(self) -> None:
        """Raises UserError in a fork of the process that loaded the model, where torch hangs."""
        if self.forked:
            raise _forked(self.process)

    def __reduce__(self) -> Any:
        raise UserError("a loaded model cannot be pickled", "load it in the process that uses it")

    @cached_property
    def model(self) -> Any:
        """Returns transformers' network, which decoding with the native engine does not need."""
        assert self._lazy is not None
        return _prepared(self._lazy.network)

    @property
    def dtype(self) -> torch.dtype:
        """Returns the number type of the hidden states; the engine may compute in fp32 with 16-bit weights."""
        engine = getattr(self, "engine", None)
        return self.embedding.weight.dtype if engine is None else engine.dtype

    @property
    def description(self) -> str:
        """Returns the model, its number type, its device and its engine in a few words."""
        dtype = str(self.dtype).removeprefix("torch.")
        return f"{self.id} in {dtype} on {self.device}, {self.engine.title}"

    @property
    def lm_head_weight(self) -> Tensor:
        """Returns the lm_head's weight [V, H]."""
        return self._lm_head(None)[0]

    @property
    def lm_head_bias(self) -> Tensor | None:
        """Returns the lm_head's bias [V], if it has one."""
        return self._lm_head(None)[1]

    def lm_head_rows(self, ids: Tensor) -> tuple[Tensor, Tensor | None]:
        """Returns the lm_head's weight [M, H], and its bias [M] if it has one, for token ids [M]."""
        return self._lm_head(ids.to(self.device))

    def take_own_attention(self) -> None:
        """Restores transformers' attention in the network, for passes without an engine."""
        take_own_attention(self.model)

    @property
    def text_model(self) -> Any:
        """Returns the part of the network that computes hidden states from token ids."""
        return text_model(self.model)

    @cached_property
    def masks(self) -> Masks:
        """Returns the builder of masks in the weights' number type, for passes through the network itself."""
        return Masks(self.config, self.embedding.weight.dtype)

    @cached_property
    def eos_ids(self) -> frozenset[int]:
        """Returns the token ids that end an answer."""
        return frozenset(eos_ids_of((self.generation_config, self.config, self.tokenizer)))

    def states(self, tokens: Tensor, taps: Sequence[int] = (-1,)) -> Tensor:
        """Returns the tapped hidden states [B, L, H * taps] of right-padded token rows [B, L], for training.

        No cache is used; gradients reach the network's trainable weights.
        """
        states = tapped(padded_pass(self, tokens, output_hidden_states=tuple(taps) != (-1,)), taps)
        return states.to(self.embedding.weight.dtype)  # Mamba's states are fp32

    def finish_logits(self, scores: Tensor) -> Tensor:
        """Returns the model's logits [.., V] from its lm_head's scores."""
        return finish_logits(self.config, scores)

    def encode_chat(self, messages: list[dict[str, Any]], **template: Any) -> list[int]:
        """Returns the token ids of a conversation. template: more arguments for transformers' chat templates.

        Raises UserError if the model's chat template fails or is missing.
        """
        return token_ids(self, chat_prompt(self, messages, template))

    def decode(
        self, ids: Sequence[int], keep: Collection[int] = (), *, clean_up: bool | None = None
    ) -> str:
        """Returns the text of token ids, without special tokens except those in `keep`.

        clean_up: remove blanks before punctuation; None: as the tokenizer's setting says.
        """
        shown = (
            [id for id in ids if id in keep or id not in self.special_ids] if keep else list(ids)
        )
        rules = {"skip_special_tokens": not keep, "clean_up_tokenization_spaces": clean_up}
        return str(self.tokenizer.decode(shown, **rules))

    @cached_property
    def vocabulary(self) -> Vocabulary:
        """Returns the bytes of the tokenizer's tokens, and the rules by which it decodes texts."""
        return Vocabulary(self.tokenizer)

    @cached_property
    def special_ids(self) -> frozenset[int]:
        """Returns the ids of special tokens. They are kept, because listing thousands of tokens takes milliseconds."""
        added = self.tokenizer.added_tokens_decoder
        return frozenset(id for id, token in added.items() if token.special)


def _prepared(network: Any) -> Any:
    """Sets a network to this package's attention and to inference, and returns the network."""
    register()
    network.set_attn_implementation(NAME)
    return network.eval().requires_grad_(False)


def padded_pass(backbone: Backbone, tokens: Tensor, **options: Any) -> Any:
    """Runs right-padded token rows [B, L] through the network with a causal mask."""
    backbone.check_process()
    device = backbone.device
    size, length = tokens.shape
    if backbone.masks.kinds:  # pure Mamba accepts no positions
        options = {
            "position_ids": torch.arange(length, device=device)[None].expand(size, -1),
            **options,
        }
    return backbone.text_model(
        input_ids=tokens.to(device),
        attention_mask=backbone.masks.for_network(backbone.masks.causal(length, device)),
        **{"use_cache": False, **options},
    )


def take_own_attention(network: Any) -> None:
    """Sets a network to transformers' own attention."""
    network.set_attn_implementation("sdpa" if network._supports_sdpa else "eager")


def text_config(config: Any) -> Any:
    """Returns the text part of a model's config, in a form in which every field can be read.

    Otherwise, transformers raises an error when code reads a field that differs between layers,
    even if the code gives a default value.
    """
    text = config.get_text_config()
    text.allow_global_per_layer_attribute_access = True
    return text


def text_model(network: Any) -> Any:
    """Returns the part of a network that computes hidden states from token ids; for a vision model, the text part."""
    base = network.base_model
    if base is not network and type(base.config) is type(network.config.get_text_config()):
        return base
    decoder = network.get_decoder()
    # Llama 4's class does not declare its decoder.
    return network.model if decoder is network else decoder


def has_tied_head(network: Any) -> bool:
    """Returns True if a network's lm_head shares the weight of its embeddings.

    The config is not enough to tell: the configs of a whole model and of its text part may differ, and
    files may hold both weights.
    """
    return network.get_output_embeddings().weight is network.get_input_embeddings().weight


def untie_head(network: Any) -> None:
    """Gives the lm_head its own copy of the embeddings' weight, if they share the weight."""
    if has_tied_head(network):
        head = network.get_output_embeddings()
        head.weight = nn.Parameter(head.weight.detach().clone(), requires_grad=False)
        network.config.get_text_config().tie_word_embeddings = False
        network.config.tie_word_embeddings = False


def auto_class(config: Any) -> Any:
    """Returns transformers' class that loads a config's model; not all vision models count as causal LMs there."""
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

    known = type(config) in AutoModelForCausalLM._model_mapping
    sees = not known and type(config) in AutoModelForImageTextToText._model_mapping
    return AutoModelForImageTextToText if sees else AutoModelForCausalLM


# Changes that architectures make to the lm_head's scores, by config field, in order of application.
LOGIT_CHANGES: dict[str, Callable[[Tensor, float], Tensor]] = {
    "logits_mup_width_multiplier": lambda scores, by: scores / by,
    "logits_scaling": lambda scores, by: scores / by,
    "logit_scale": lambda scores, by: scores * by,
    "lm_head_multiplier": lambda scores, by: scores * by,
    "output_multiplier": lambda scores, by: scores * by,
    "final_logit_softcapping": lambda scores, cap: (scores / cap).tanh() * cap,
    "logits_soft_cap": lambda scores, cap: (scores / cap).tanh() * cap,
}


def finish_logits(config: Any, scores: Tensor) -> Tensor:
    """Returns a model's logits, computed from its lm_head's scores according to its text config.

    The likeliest token stays the likeliest. `check_network` verifies the logits.
    """
    for name, change in LOGIT_CHANGES.items():
        by = getattr(config, name, None)
        if by is not None:
            scores = change(scores, by)
    return scores


def tapped(out: Any, taps: Sequence[int]) -> Tensor:
    """Returns the tapped states [.., H * taps] of a network's output; raises UserError if the output lacks them."""
    final: Tensor = out.last_hidden_state
    if tuple(taps) == (-1,):
        return final
    # hidden_states[0] is the embedding, so the output of layer t is at index t + 1.
    by_layer = out.hidden_states
    if max(taps) + 1 >= len(by_layer) or by_layer[1].shape != final.shape:
        fault = "some layers of this model give no state of a token, or several, which aux hidden state layers need"
        raise UserError(fault, "use a drafter that reads the last state, such as drafter=hydra")
    return torch.cat([final if t == -1 else by_layer[t + 1] for t in taps], dim=-1)


def stateful_modules(network: nn.Module) -> list[Any]:
    """Returns the modules that keep a running state in the cache: convolutions, linear attention, Mamba."""
    layers = [
        module for module in network.modules() if type(getattr(module, "layer_idx", None)) is int
    ]
    return [layer for layer in layers if _updates_state(type(layer).forward)]


@cache
def _updates_state(forward: Callable[..., Any]) -> bool:
    return not set(STATE_UPDATES).isdisjoint(_names_in(forward))


def _names_in(forward: Callable[..., Any]) -> Sequence[str]:
    """Returns the names that a function's code reads, including attributes."""
    code = getattr(unwrap(forward), "__code__", None)
    return () if code is None else code.co_names


class Layers:
    """Holds the parts that most decoders consist of: embedding, rotary embeddings, layers and last norm.

    Raises Unsupported if one of these parts is missing.
    """

    def __init__(self, model: Any) -> None:
        base = text_model(model)
        config = model.config.get_text_config()
        if not all(
            getattr(base, name, None) is not None
            for name in ("layers", "rotary_emb", "embed_tokens")
        ):
            raise Unsupported("its parts are not named as in Llama")
        names = ("norm", "final_layernorm", "embedding_norm")
        norms = (getattr(base, name, None) for name in names)
        self.norm: Any = next((norm for norm in norms if norm is not None), None)
        if self.norm is None:
            raise Unsupported("it has no last norm")
        self.base = base
        self.config = config
        self.layers = base.layers
        self.kinds: list[str] = getattr(config, "layer_types", None) or ["full_attention"] * len(
            base.layers
        )
        self.by_kind = getattr(base.rotary_emb, "layer_types", None) is not None

    def refuse_special_layers(self) -> None:
        """Raises Unsupported for attention or running states that do not work if layers run one by one."""
        if stateful_modules(self.base):
            raise Unsupported("some layers keep a running state")
        if getattr(self.config, "attn_logit_softcapping", None) is not None:
            raise Unsupported("its attention scores are soft-capped")
        if any(getattr(module, "sinks", None) is not None for module in self.base.modules()):
            raise Unsupported("its attention has sinks")
        if len({key_sizes(layer) for layer in by_layer(self.config)}) > 1:
            raise Unsupported("its layers differ in the shape of their keys")

    def rotary(self, x: Tensor, positions: Tensor, kind: str) -> tuple[Tensor, Tensor]:
        """Returns rotary cosines and sines [B, n, D] of positions [B, n] for layers of a kind, in x's number type."""
        rotary = self.base.rotary_emb
        cos, sin = rotary(x, positions, kind) if self.by_kind else rotary(x, positions)
        return cos, sin


def by_layer(config: Any) -> Sequence[Any]:
    """Returns the text configs of a model's layers, or only the model's config if the layers share it."""
    layers: Sequence[Any] = getattr(config, "per_layer_config", None) or [config]
    return layers


def key_sizes(config: Any) -> tuple[int, int]:
    """Returns the number of key heads and their width from a model's or a layer's config; zeros without attention."""
    heads = getattr(config, "num_attention_heads", None) or 0
    dim = getattr(config, "head_dim", None) or (config.hidden_size // heads if heads else 0)
    return getattr(config, "num_key_value_heads", None) or heads, dim


def usable_positions(config: Any) -> int:
    """Returns a model's maximum number of positions.

    This is the context, or the original context if the rotary embeddings change beyond it. For Moshi it is the
    sliding window: in transformers, the tokens of a longer prompt see the whole prompt, but an answer's tokens see only
    the window.
    """
    context = int(getattr(config, "max_position_embeddings", None) or UNBOUNDED)
    if config.model_type == "moshi" and config.sliding_window:
        return min(context, int(config.sliding_window))
    scaling = (
        getattr(config, "rope_scaling", None) or getattr(config, "rope_parameters", None) or {}
    )
    key = "original_max_position_embeddings"
    by_kind = [own for own in scaling.values() if isinstance(own, dict)]
    for own in by_kind or [scaling]:
        if own.get("rope_type", own.get("type")) in CHANGING_ROPE:
            context = min(context, int(own.get(key) or getattr(config, key, None) or context))
    return context


def identity_of(
    config: Any, vocab_size: int, *, id: str, weights: str | None = None, adapter: str | None = None
) -> dict[str, Any]:
    """Returns a model's identity: id, architecture, sizes, quantization, and digests of its weights and adapter.

    config: the config of the whole model.
    """
    text = config.get_text_config()
    identity = {
        "id": lasting_name(id),
        "architecture": text.model_type,
        "hidden_size": text.hidden_size,
        "vocab_size": vocab_size,
        "layers": text.num_hidden_layers,
        "weights": weights,
        "rounding": quantization_of(config),
        "adapter": adapter,
    }
    return {key: value for key, value in identity.items() if value is not None}


def quantization_of(config: Any) -> str | None:
    """Returns bitsandbytes' quantization of a model's weights as in `LoadOptions.quantize`; None if there is none."""
    settings = getattr(config, "quantization_config", None)
    if getattr(settings, "load_in_4bit", False):
        return "bnb.nf4"
    return "bnb.int8" if getattr(settings, "load_in_8bit", False) else None
