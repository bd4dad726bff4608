"""Tiny random models of several families, with a word-level tokenizer and a chat template, built in milliseconds."""

from typing import Any

import torch

from medusa_cli.backbone import Backbone
from medusa_cli.drafters.base import Batch
from medusa_cli.drafters.heads import HeadDrafter
from medusa_cli.engines import attach

FAMILIES = ("llama", "mistral", "mistral-window", "qwen2", "qwen3", "gemma3")
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ '<start> ' + message['role'] + ' ' + message['content'] + ' <end> ' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<start> assistant ' }}{% endif %}"
)
SPECIAL = ("<pad>", "<unk>", "<end>", "<start>")
ROLES = ("system", "user", "assistant")
END_ID = SPECIAL.index("<end>")


def tiny_tokenizer(vocab: int = 64) -> Any:
    """Words w0, w1, ... after the special tokens and the roles; ids below `vocab`."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = [*SPECIAL, *ROLES, *(f"w{i}" for i in range(vocab - len(SPECIAL) - len(ROLES)))]
    inner = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<unk>"))
    inner.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=inner,
        pad_token="<pad>",
        unk_token="<unk>",
        eos_token="<end>",
        clean_up_tokenization_spaces=False,
    )
    tokenizer.add_special_tokens({"additional_special_tokens": ["<start>"]})
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer


def tiny_model(
    family: str = "llama", *, vocab: int = 64, hidden: int = 32, layers: int = 2, positions: int = 512, seed: int = 0
) -> Any:
    """A random fp32 causal LM of a family; weights are large enough that its greedy text is not one token repeated."""
    import transformers as hf

    common = {
        "vocab_size": vocab,
        "hidden_size": hidden,
        "intermediate_size": 2 * hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": positions,
        "eos_token_id": END_ID,
        "bos_token_id": None,
        "pad_token_id": 0,
        "initializer_range": 0.4,
        "tie_word_embeddings": False,
    }
    configs = {
        "llama": (hf.LlamaConfig, hf.LlamaForCausalLM, {}),
        "mistral": (hf.MistralConfig, hf.MistralForCausalLM, {"sliding_window": None}),
        "mistral-window": (hf.MistralConfig, hf.MistralForCausalLM, {"sliding_window": 8}),
        "qwen2": (hf.Qwen2Config, hf.Qwen2ForCausalLM, {"tie_word_embeddings": True}),
        "qwen3": (hf.Qwen3Config, hf.Qwen3ForCausalLM, {"head_dim": 8}),
        "gemma3": (
            hf.Gemma3TextConfig,
            hf.Gemma3ForCausalLM,
            {
                "head_dim": 8,
                "sliding_window": 8,
                "layer_types": ["sliding_attention", "full_attention"] * (layers // 2 + 1),
            },
        ),
    }
    config_class, model_class, extra = configs[family]
    if family == "gemma3":
        extra["layer_types"] = extra["layer_types"][:layers]
    torch.manual_seed(seed + 4)  # with the first few seeds some families repeat one token forever
    return model_class(config_class(**{**common, **extra})).eval()


def tiny_backbone(
    family: str = "llama",
    *,
    vocab: int = 64,
    hidden: int = 32,
    layers: int = 2,
    positions: int = 512,
    seed: int = 0,
    engine: str = "eager",
) -> Backbone:
    """A backbone over tiny_model, in fp32."""
    model = tiny_model(family, vocab=vocab, hidden=hidden, layers=layers, positions=positions, seed=seed)
    backbone = Backbone(model, tiny_tokenizer(vocab), id=f"tiny-{family}")
    attach(backbone, engine)
    return backbone


def guesses(heads: HeadDrafter, backbone: Backbone, batch: Batch, top: int) -> torch.Tensor:
    """Token ids of each head's best guesses at the positions that are learnt, best first, [n, K, top]."""
    return torch.stack([heads.draft_ids[scores.topk(top).indices] for scores in heads.logits(backbone, batch)], dim=1)
