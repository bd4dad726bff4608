"""The config and tokenizer of Qwen 3.5's GGUF files, which transformers' reader does not support."""

from collections.abc import Mapping
from tempfile import TemporaryDirectory
from typing import Any

# Fields of transformers' config, by the file's keys without the architecture's name.
FIELDS = {
    "block_count": "num_hidden_layers",
    "context_length": "max_position_embeddings",
    "embedding_length": "hidden_size",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "attention.key_length": "head_dim",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
    "full_attention_interval": "full_attention_interval",
    "ssm.conv_kernel": "linear_conv_kernel_dim",
    "ssm.state_size": "linear_key_head_dim",
    "ssm.group_count": "linear_num_key_heads",
    "ssm.time_step_rank": "linear_num_value_heads",
}


def qwen35_config(metadata: Mapping[str, Any], vocab_size: int, tied: bool) -> Any:
    """Returns the config of a file's model; raises ValueError for a key with a missing or impossible value.

    tied: the lm_head uses the embedding's weight.
    """
    from transformers import Qwen3_5TextConfig

    fields: dict[str, Any] = {own: _number(metadata, key) for key, own in FIELDS.items()}
    # The file's number of layers includes those that predict later tokens.
    later = metadata.get("qwen35.nextn_predict_layers", 0)
    layers = fields["num_hidden_layers"] - later
    values = fields["linear_num_value_heads"]
    inner = int(_number(metadata, "ssm.inner_size"))
    if later < 0 or layers < 1 or inner % values or values % fields["linear_num_key_heads"]:
        raise ValueError("its numbers of layers, heads and ssm.inner_size do not fit each other")
    fields["num_hidden_layers"] = layers
    rotary = _number(metadata, "rope.dimension_count") / fields["head_dim"]
    return Qwen3_5TextConfig(
        **fields,
        linear_value_head_dim=inner // values,
        vocab_size=vocab_size,
        rope_parameters={
            "rope_type": "default",
            "rope_theta": _number(metadata, "rope.freq_base"),
            "partial_rotary_factor": rotary,
        },
        tie_word_embeddings=tied,
        eos_token_id=metadata.get("tokenizer.ggml.eos_token_id"),
        bos_token_id=metadata.get("tokenizer.ggml.bos_token_id"),
    )


def _number(metadata: Mapping[str, Any], key: str) -> Any:
    """Returns a positive number from the metadata; raises ValueError if there is none."""
    value = metadata.get(f"qwen35.{key}")
    if not isinstance(value, int | float) or not value > 0:
        raise ValueError(f"its qwen35.{key} is {value}")
    return value


def qwen35_tokenizer(tokenizer: Any) -> Any:
    """Returns Qwen 3.5's tokenizer with the vocabulary of an earlier Qwen tokenizer, which splits words differently."""
    from transformers import Qwen3_5Tokenizer

    with TemporaryDirectory() as folder:
        tokenizer.save_pretrained(folder)
        return Qwen3_5Tokenizer.from_pretrained(folder)
