"""Configs of GGUF files, for architectures that transformers' reader does not know, or knows only in part."""

import math
from collections.abc import Callable, Collection
from typing import Any

from medusa_cli.errors import shown
from medusa_cli.files.gguf_header import Header
from medusa_cli.files.gguf_names import FACTORS_OF_PHI3, FREQUENCIES, has_mtp
from medusa_cli.files.layer_kinds import FULL, SLIDING

# Fields of transformers' configs, by the file's keys without the architecture's name.
FIELDS = {
    "block_count": "num_hidden_layers",
    "context_length": "max_position_embeddings",
    "embedding_length": "hidden_size",
    "attention.head_count": "num_attention_heads",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
}
IDS = {
    "tokenizer.ggml.bos_token_id": "bos_token_id",
    "tokenizer.ggml.eos_token_id": "eos_token_id",
    "tokenizer.ggml.padding_token_id": "pad_token_id",
}
GRANITE_FACTORS = {
    "embedding_scale": "embedding_multiplier",
    "attention.scale": "attention_multiplier",
    "residual_scale": "residual_multiplier",
    "logit_scale": "logits_scaling",  # llama.cpp and transformers divide the logits by it
}
DELTA_NET = {
    "full_attention_interval": "full_attention_interval",
    "ssm.conv_kernel": "linear_conv_kernel_dim",
    "ssm.state_size": "linear_key_head_dim",
    "ssm.group_count": "linear_num_key_heads",
    "ssm.time_step_rank": "linear_num_value_heads",
}
EXPERTS_OF_GLM4 = {
    "expert_count": "n_routed_experts",
    "expert_used_count": "num_experts_per_tok",
    "expert_feed_forward_length": "moe_intermediate_size",
}
# The expert_gating_func of GLM 4.5, whose files may leave the key out.
SIGMOID = 2
# As in llama.cpp: every fourth layer of SmolLM3 has no rotary embedding.
LAYERS_TO_NO_ROPE = 4
# As in llama.cpp: every sixth layer of Gemma 3 attends to all positions.
LAYERS_TO_FULL_ATTENTION = 6
# As in llama.cpp: a Gemma 3 with this number of layers (27B) has hidden_size / num_attention_heads as
# its query_pre_attn_scalar, not the width of a head.
LAYERS_OF_GEMMA3_27B = 62
# Tokens that end an answer of Gemma 4; its files name only one of them.
ENDS_OF_GEMMA4 = ("<eos>", "<turn|>", "<|tool_response>")
# Tokens that end an answer of gpt-oss; its files name only one of them.
ENDS_OF_GPT_OSS = ("<|return|>", "<|call|>", "<|endoftext|>")
# As in llama.cpp: every second layer of gpt-oss attends to all positions.
LAYERS_TO_FULL_ATTENTION_OF_GPT_OSS = 2


class Keys:
    """Reads a file's metadata. A key is given without the architecture's name before it.

    Raises ValueError for a missing or impossible value. The header must have been read with its arrays.
    """

    def __init__(self, header: Header) -> None:
        self.header = header

    def get(self, key: str) -> Any:
        return self.header.metadata.get(f"{self.header.architecture}.{key}")

    def number(self, key: str, default: float | None = None) -> Any:
        """Returns a positive number; if the file does not have the key, the default."""
        value = self.get(key)
        if value is None and default is not None:
            return default
        if not isinstance(value, int | float) or not 0 < value < math.inf:
            raise ValueError(f"its {self.header.architecture}.{key} is {shown(value)}")
        return value

    def number_or_0(self, key: str) -> Any:
        """Returns a number of 0 or more; 0 if the file does not have the key."""
        return self.number(key) if self.get(key) else 0

    def count(self, key: str) -> int:
        """Returns a whole number of 0 or more; 0 if the file does not have the key."""
        value = self.number_or_0(key)
        if type(value) is not int:
            raise ValueError(f"its {self.header.architecture}.{key} is {shown(value)}")
        return value

    def by_layer(self, key: str, default: int | None = None) -> list[int]:
        """Returns a positive number for each layer; a file has one number for all layers, or a list."""
        layers = int(self.number("block_count"))
        if not isinstance(self.get(key), list):
            return [int(self.number(key, default))] * layers
        values: list[int] = self.get(key)
        if len(values) != layers or not all(isinstance(own, int) and own > 0 for own in values):
            raise ValueError(f"its {self.header.architecture}.{key} is {shown(values)}")
        return values

    def fields(self) -> dict[str, Any]:
        """Returns the fields that most configs have, except for those of the rotary embedding."""
        fields: dict[str, Any] = {own: self.number(key) for key, own in FIELDS.items()}
        heads = fields["num_attention_heads"]
        fields["num_key_value_heads"] = self.by_layer("attention.head_count_kv", heads)[0]
        # If all layers have experts, a file may state only the size of experts.
        experts = self.count("expert_feed_forward_length")
        fields["intermediate_size"] = self.by_layer("feed_forward_length", experts or None)[0]
        fields["head_dim"] = self.number("attention.key_length", fields["hidden_size"] // heads)
        fields["vocab_size"] = self.rows("token_embd.weight")
        return fields | {own: self.header.metadata.get(key) for key, own in IDS.items()}

    def layers(self) -> tuple[int, int]:
        """Returns the number of a model's own layers, and of the layers after them for later tokens (MTP).

        The file's block_count is the sum of both. MTP layers that the file counts but does not hold are left out.
        """
        later = self.count("nextn_predict_layers")
        layers = self.number("block_count") - later
        if layers < 1:
            raise ValueError(
                f"its numbers of layers, and of those for later tokens ({later}), do not fit each other"
            )
        return layers, later if has_mtp(self.header, layers) else 0

    def tokens(self, names: Collection[str]) -> list[int]:
        """Returns the ids of the tokens with these names. Names that the vocabulary lacks are left out."""
        known: list[str] = self.header.metadata.get("tokenizer.ggml.tokens") or []
        return [number for number, token in enumerate(known) if token in names]

    def rows(self, tensor: str) -> int:
        if tensor not in self.header.tensors:
            raise ValueError(f"it lacks {tensor}")
        return self.header.tensors[tensor].shape[0]

    def factors(self, name: str) -> list[float]:
        """Returns the divisors of rotary frequencies in a tensor, which transformers' reader ignores; [] without it."""
        import numpy as np

        tensor = self.header.tensors.get(name)
        if tensor is None:
            return []
        if tensor.type != "F32":
            raise ValueError(f"its {name} has the type {tensor.type}")
        count = math.prod(tensor.shape)
        file = self.header.files[tensor.file]
        values = np.fromfile(file, np.float32, count, offset=tensor.start).astype(np.float64)
        if len(values) < count or not (np.isfinite(values) & (values > 0)).all():
            raise ValueError(f"its {name} holds no factors of the rotary frequencies")
        return [float(value) for value in values]

    def rope(self) -> dict[str, Any]:
        """Returns the parameters of a rotary embedding; raises ValueError if it rotates only a part of each head."""
        head = self.number(
            "attention.key_length",
            self.number("embedding_length") // self.number("attention.head_count"),
        )
        if self.number("rope.dimension_count", head) != head:
            raise ValueError("its rotary embeddings are narrower than its heads")
        return {"rope_theta": self.number("rope.freq_base", 10000.0), **self.scaling()}

    def scaling(self) -> dict[str, Any]:
        """Returns the parameters by which a rotary embedding scales positions, to reach beyond the original context."""
        # Files of 2023 have another key for the factor.
        key = "rope.scaling.factor"
        if self.get(key) is None and self.number_or_0("rope.scale_linear"):
            key = "rope.scale_linear"
        kind = self.get("rope.scaling.type") or ("none" if self.get(key) is None else "linear")
        if kind == "none":
            return {"rope_type": "default"}
        if kind not in ("linear", "yarn"):
            raise ValueError(f"its positions are scaled in an unknown way ({shown(kind)})")
        factor = self.number(key)
        if kind == "linear":
            return {"rope_type": "linear", "factor": factor}
        return {
            "rope_type": "yarn",
            "factor": factor,
            "original_max_position_embeddings": self.number("rope.scaling.original_context_length"),
            "beta_fast": self.number("rope.scaling.yarn_beta_fast", 32.0),
            "beta_slow": self.number("rope.scaling.yarn_beta_slow", 1.0),
            "attention_factor": self._attention_factor(factor),
        }

    def _attention_factor(self, factor: float) -> float:
        """Returns the factor by which YaRN multiplies queries and keys."""
        own: float = self.number("rope.scaling.attn_factor", 1.0)
        # The result is divided by 1 plus this multiple of the growth. In most files, the multiple is 0.
        reduced = self.number_or_0("rope.scaling.yarn_log_multiplier")
        growth = 0.1 * math.log(factor) if factor > 1 else 0.0
        return own * (1 + growth) / (1 + reduced * growth)

    def windows(self, period: int | None = None) -> list[str]:
        """Returns each layer's kind of attention. Unless the file says otherwise, every `period`-th layer is full."""
        layers = int(self.number("block_count"))
        pattern = self.get("attention.sliding_window_pattern")
        if not isinstance(pattern, list):
            period = int(self.number("attention.sliding_window_pattern", period))
            pattern = [bool((layer + 1) % period) for layer in range(layers)]
        if len(pattern) != layers:
            raise ValueError(f"its sliding_window_pattern has {len(pattern)} layers, not {layers}")
        return [SLIDING if own else FULL for own in pattern]


def _granite(keys: Keys) -> Any:
    from transformers import GraniteConfig

    return GraniteConfig(**_granite_fields(keys))


def _granite_moe(keys: Keys) -> Any:
    from transformers import GraniteMoeConfig

    return GraniteMoeConfig(
        **_granite_fields(keys),
        num_local_experts=keys.number("expert_count"),
        num_experts_per_tok=keys.number("expert_used_count"),
    )


def _granite_fields(keys: Keys) -> dict[str, Any]:
    if keys.get("rope.scaling.finetuned") is False:
        raise ValueError("its layers do not rotate, which transformers' Granite has no place for")
    factors = {own: keys.number(key, 1.0) for key, own in GRANITE_FACTORS.items()}
    if keys.get("attention.scale") is None:
        factors["attention_multiplier"] = keys.fields()["head_dim"] ** -0.5
    return {**keys.fields(), **factors, "rope_parameters": keys.rope(), **_biases(keys)}


def _phi3(keys: Keys) -> Any:
    from transformers import Phi3Config

    fields = keys.fields()
    head = fields.pop("head_dim")
    if head != fields["hidden_size"] // fields["num_attention_heads"]:
        raise ValueError(f"its heads have {head} numbers, which no Phi 3 has")
    rope = {
        "rope_theta": keys.number("rope.freq_base", 10000.0),
        "partial_rotary_factor": keys.number("rope.dimension_count", head) / head,
    }
    original = int(
        keys.number("rope.scaling.original_context_length", fields["max_position_embeddings"])
    )
    factors = {f"{own}_factor": keys.factors(name) for own, name in FACTORS_OF_PHI3.items()}
    if all(factors.values()):
        # Older files lack this factor; then llama.cpp does not multiply by it.
        growth = keys.number("rope.scaling.attn_factor", 1.0)
        rope |= {"rope_type": "longrope", "attention_factor": growth, **factors}
        rope["original_max_position_embeddings"] = original
    elif keys.scaling()["rope_type"] == "default":
        rope["rope_type"] = "default"
    else:
        raise ValueError("its positions are scaled, and it lacks their factors")
    window = keys.count("attention.sliding_window")
    return Phi3Config(
        **fields,
        original_max_position_embeddings=original,
        rope_parameters=rope,
        sliding_window=window if 0 < window < fields["max_position_embeddings"] else None,
    )


def _smollm3(keys: Keys) -> Any:
    from transformers import SmolLM3Config

    return SmolLM3Config(
        **keys.fields(),
        **_biases(keys),
        rope_parameters=keys.rope(),
        no_rope_layer_interval=LAYERS_TO_NO_ROPE,
    )


def _mistral3(keys: Keys) -> Any:
    from transformers import Ministral3Config

    fields, rope = keys.fields(), keys.rope()
    growth = keys.number_or_0("attention.temperature_scale")
    # Queries are scaled up after each multiple of the original context. The native engine cannot do
    # that, so the context of such a file ends where the original context ends.
    first = rope.setdefault("original_max_position_embeddings", fields["max_position_embeddings"])
    if growth:
        fields["max_position_embeddings"] = min(first, fields["max_position_embeddings"])
    return Ministral3Config(**fields, rope_parameters={**rope, "llama_4_scaling_beta": growth})


def _olmo2(keys: Keys) -> Any:
    from transformers import Olmo2Config

    if keys.get("attention.sliding_window") is not None:
        raise ValueError("it is an Olmo 3, whose windows are not read from GGUF files")
    return Olmo2Config(**keys.fields(), **_biases(keys), rope_parameters=keys.rope())


def _biases(keys: Keys) -> dict[str, bool]:
    return {"attention_bias": "blk.0.attn_q.bias" in keys.header.tensors}


def _gemma3(keys: Keys) -> Any:
    from transformers import Gemma3TextConfig

    fields = keys.fields()
    scale = fields["head_dim"]
    if fields["num_hidden_layers"] == LAYERS_OF_GEMMA3_27B:
        scale = fields["hidden_size"] // fields["num_attention_heads"]
    return Gemma3TextConfig(
        **fields,
        query_pre_attn_scalar=scale,
        sliding_window=keys.number("attention.sliding_window"),
        layer_types=keys.windows(LAYERS_TO_FULL_ATTENTION),
        final_logit_softcapping=keys.number_or_0("final_logit_softcapping") or None,
        rope_parameters={FULL: keys.rope(), SLIDING: _rope_of_windows(keys)},
    )


def _rope_of_windows(keys: Keys) -> dict[str, Any]:
    """Returns the parameters of the rotary embedding in Gemma's layers with a window, which never scales positions."""
    return {"rope_type": "default", "rope_theta": keys.number("rope.freq_base_swa", 10000.0)}


def _gemma4(keys: Keys) -> Any:
    from transformers import Gemma4TextConfig

    if keys.count("expert_count"):
        raise ValueError("its layers have experts, which are not read from files of Gemma 4")
    fields = keys.fields()
    kinds = keys.windows()
    layers = len(kinds)
    full = kinds.index(FULL) if FULL in kinds else -1
    narrow = kinds.index(SLIDING) if SLIDING in kinds else -1
    heads = keys.by_layer("attention.head_count_kv")
    widths = keys.by_layer("feed_forward_length")
    shared = keys.count("attention.shared_kv_layers")
    if full < 0 or narrow < 0 or shared >= layers:
        raise ValueError("its layers have one kind of attention, or share all keys")
    doubled = [widths[0] * (2 if layer >= layers - shared else 1) for layer in range(layers)]
    if widths != doubled and len(set(widths)) > 1:
        raise ValueError(f"its feed_forward_length is {shown(widths)}")
    if heads != [heads[full] if kind == FULL else heads[narrow] for kind in kinds]:
        raise ValueError(f"its attention.head_count_kv is {shown(heads)}")
    width = keys.number("attention.key_length_swa")
    if keys.number("rope.dimension_count_swa", width) != width:
        raise ValueError("the rotary embeddings of its windows are narrower than its heads")
    inputs = keys.count("embedding_length_per_layer_input")
    fields |= {"head_dim": width, "num_key_value_heads": heads[narrow]}
    fields["eos_token_id"] = keys.tokens(ENDS_OF_GEMMA4) or fields["eos_token_id"]
    return Gemma4TextConfig(
        **fields,
        global_head_dim=keys.number("attention.key_length"),
        num_global_key_value_heads=heads[full],
        # Layers with full attention may have another number of key heads only if their values are their keys.
        attention_k_eq_v=f"blk.{full}.attn_v.weight" not in keys.header.tensors,
        num_kv_shared_layers=shared,
        use_double_wide_mlp=len(set(widths)) > 1,
        layer_types=kinds,
        sliding_window=keys.number("attention.sliding_window"),
        final_logit_softcapping=keys.number_or_0("final_logit_softcapping") or None,
        hidden_size_per_layer_input=inputs,
        vocab_size_per_layer_input=keys.rows("per_layer_token_embd.weight") if inputs else 1,
        rope_parameters={FULL: keys.rope() | _proportion(keys), SLIDING: _rope_of_windows(keys)},
    )


def _proportion(keys: Keys) -> dict[str, Any]:
    """Returns which part of a head Gemma 4 rotates. In the file, the other part's frequencies have huge divisors."""
    factors = keys.factors(FREQUENCIES)
    rotated = factors.count(1.0)
    if not rotated or min(factors[rotated:], default=1e30) < 1e29:
        raise ValueError(f"its {FREQUENCIES} does not say which part of a head rotates")
    return {"rope_type": "proportional", "partial_rotary_factor": rotated / len(factors)}


def _gpt_oss(keys: Keys) -> Any:
    from transformers import GptOssConfig

    fields, rope = keys.fields(), keys.rope()
    fields["intermediate_size"] = keys.number("expert_feed_forward_length")
    fields["eos_token_id"] = keys.tokens(ENDS_OF_GPT_OSS) or fields["eos_token_id"]
    if rope["rope_type"] == "yarn":
        # As in the makers' code; llama.cpp rounds the bounds between scaled and unscaled
        # frequencies.
        rope["truncate"] = False
    return GptOssConfig(
        **fields,
        num_local_experts=keys.number("expert_count"),
        num_experts_per_tok=keys.number("expert_used_count"),
        sliding_window=keys.number("attention.sliding_window"),
        layer_types=keys.windows(LAYERS_TO_FULL_ATTENTION_OF_GPT_OSS),
        rope_parameters=rope,
    )


def _qwen35(keys: Keys) -> Any:
    from transformers import Qwen3_5TextConfig

    return Qwen3_5TextConfig(**_qwen35_fields(keys))


def _qwen35_moe(keys: Keys) -> Any:
    from transformers import Qwen3_5MoeTextConfig

    return Qwen3_5MoeTextConfig(
        **_qwen35_fields(keys),
        num_experts=keys.number("expert_count"),
        num_experts_per_tok=keys.number("expert_used_count"),
        moe_intermediate_size=keys.number("expert_feed_forward_length"),
        shared_expert_intermediate_size=keys.number("expert_shared_feed_forward_length"),
    )


def _qwen35_fields(keys: Keys) -> dict[str, Any]:
    fields = keys.fields() | {own: keys.number(key) for key, own in DELTA_NET.items()}
    fields["num_hidden_layers"], fields["mtp_num_hidden_layers"] = keys.layers()
    values = fields["linear_num_value_heads"]
    inner = int(keys.number("ssm.inner_size"))
    if inner % values or values % fields["linear_num_key_heads"]:
        raise ValueError("its numbers of heads and ssm.inner_size do not fit each other")
    fields["linear_value_head_dim"] = inner // values
    fields["rope_parameters"] = {
        "rope_type": "default",
        "rope_theta": keys.number("rope.freq_base"),
        "partial_rotary_factor": keys.number("rope.dimension_count") / fields["head_dim"],
    }
    return fields


def _glm4_moe(keys: Keys) -> Any:
    from transformers import Glm4MoeConfig

    if keys.get("expert_gating_func") not in (None, SIGMOID):
        raise ValueError(f"its expert_gating_func is {shown(keys.get('expert_gating_func'))}")
    fields = keys.fields() | {own: keys.number(key) for key, own in EXPERTS_OF_GLM4.items()}
    fields["num_hidden_layers"], fields["num_nextn_predict_layers"] = keys.layers()
    return Glm4MoeConfig(
        **fields,
        **_biases(keys),
        use_qk_norm="blk.0.attn_q_norm.weight" in keys.header.tensors,
        n_shared_experts=keys.count("expert_shared_count"),
        first_k_dense_replace=keys.count("leading_dense_block_count"),
        norm_topk_prob=bool(keys.get("expert_weights_norm")),
        routed_scaling_factor=keys.number("expert_weights_scale", 1.0),
        n_group=keys.number("expert_group_count", 1),
        topk_group=keys.number("expert_group_used_count", 1),
        rope_parameters={
            "rope_theta": keys.number("rope.freq_base", 10000.0),
            "partial_rotary_factor": keys.number("rope.dimension_count") / fields["head_dim"],
            **keys.scaling(),
        },
    )


# Functions that return a config, by the file's architecture.
CONFIGS: dict[str, Callable[[Keys], Any]] = {
    "gemma3": _gemma3,
    "gemma4": _gemma4,
    "glm4moe": _glm4_moe,
    "gpt-oss": _gpt_oss,
    "granite": _granite,
    "granitemoe": _granite_moe,
    "mistral3": _mistral3,
    "olmo2": _olmo2,
    "phi3": _phi3,
    "qwen35": _qwen35,
    "qwen35moe": _qwen35_moe,
    "smollm3": _smollm3,
}
