"""Tiny random networks of transformers' model types, and the ways in which each must decode as its own `generate`.

`python -m tests.models > docs/models.md` decodes with all of them and prints the page; with names, their rows.
"""

import logging
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers as hf
from torch import Tensor
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from medusa_cli.decode import Request
from medusa_cli.decode.policy import StaticTreePolicy
from medusa_cli.drafters import NewTokens
from medusa_cli.engine import load_backbone
from medusa_cli.engine.timing import machine_key
from medusa_cli.errors import UserError
from medusa_cli.model import Backbone
from medusa_cli.runs.load_options import LoadOptions
from medusa_cli.tree import Draft, Tree
from tests.helpers import SPARSE, Oracle, answer, decoder_of, save_network, steps_of, tokens_of

COUNT = 32
CHAIN = Tree.from_choices([[0], [0, 0], [0, 0, 0], [0, 0, 0, 0]])
LARGEST = 4e6  # weights of a network that is tiny
FULL, SLIDING, LINEAR = "full_attention", "sliding_attention", "linear_attention"
# Values of the fields that configs have; others stay as they are.
SMALL = {
    "vocab_size": 128, "hidden_size": 64, "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2,
    "intermediate_size": 96, "ffn_dim": 96, "n_inner": 96, "head_dim": 16, "max_position_embeddings": 512,
    "word_embed_proj_dim": 64, "embedding_size": 64, "rotary_dim": 16, "sliding_window": 16,
    "moe_intermediate_size": 32, "shared_expert_intermediate_size": 32, "num_experts": 4, "num_local_experts": 4,
    "n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1,
    "q_lora_rank": 16, "kv_lora_rank": 16, "qk_nope_head_dim": 16, "qk_rope_head_dim": 16, "v_head_dim": 16,
    "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0, "initializer_range": 0.3, "tie_word_embeddings": False,
    "is_decoder": True, "decoder_layers": 2, "decoder_attention_heads": 4, "decoder_ffn_dim": 96, "encoder_layers": 2,
    "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 16, "linear_value_head_dim": 16,
    "mamba_n_heads": 8, "mamba_d_head": 16, "mamba_d_state": 16, "mamba_d_ssm": 128, "mamba_n_groups": 1,
    "mamba_num_heads": 8, "mamba_head_dim": 16, "ssm_state_size": 16, "n_groups": 1, "n_mamba_heads": 1,
    "mamba_chunk_size": 8, "chunk_size": 8,
    "attention_chunk_size": 16, "vocab_size_per_layer_input": 128, "hidden_size_per_layer_input": 16,
}  # fmt: skip
LINEAR_LAYERS = [LINEAR, LINEAR, FULL, LINEAR]
CONV_LAYERS = ["conv", "conv", FULL, "conv"]
ATTENTION_AT = {
    "attn_layer_period": 4,
    "attn_layer_offset": 2,
    "expert_layer_period": 2,
    "expert_layer_offset": 1,
}
# What some types want beside these, or in their place; OUT leaves a field as it is.
OUT: Any = object()
OWN: dict[str, dict[str, Any]] = {
    "bamba": {"layer_types": OUT, "attn_layer_indices": [1, 3]},
    "dots1": {"n_shared_experts": 1},
    "falcon_h1": {"layer_types": OUT, "lm_head_multiplier": 0.25},
    "gemma2": {"attn_logit_softcapping": 2.0},
    "granite": {"embedding_multiplier": 3.0, "residual_multiplier": 0.4, "attention_multiplier": 0.1,
                "logits_scaling": 2.0},
    "gemma3n_text": {"num_kv_shared_layers": 2, "layer_types": [SLIDING, FULL] * 2, "laurel_rank": 8},
    "gemma4_text": {"num_kv_shared_layers": 2, "global_head_dim": 32, "layer_types": [SLIDING, FULL] * 2},
    "gemma4_unified_text": {"global_head_dim": 32, "layer_types": [SLIDING, FULL] * 2},
    "granitemoehybrid": {"layer_types": LINEAR_LAYERS, "logits_scaling": 2.0},
    "jamba": {"layer_types": OUT, **ATTENTION_AT},
    "kimi_linear": {"layer_types": LINEAR_LAYERS, "linear_head_dim": 16, "linear_num_heads": 4},
    "lfm2": {"layer_types": CONV_LAYERS},
    "lfm2_moe": {"layer_types": CONV_LAYERS, "num_dense_layers": 2},
    "lfm3": {"layer_types": ["conv", SLIDING, FULL, "conv"]},
    "moshi": {"sliding_window": 96},  # it is not run beyond its window
    "mamba2": {"num_heads": 8, "head_dim": 16, "expand": 2},
    "qwen2_5_vl_text": {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [4, 2, 2]}},
    "qwen3_vl_moe_text": {"sliding_window": OUT, "moe_intermediate_size": 96},
    "qwen4_exp_text": {"layer_types": LINEAR_LAYERS, "indexer_n_heads": 2, "indexer_kv_heads": 1,
                       "indexer_head_dim": 16, "indexer_budget": 16, "indexer_compress_ratio": 4},
    "phi4_multimodal": {
        "vision_config": {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2,
                          "image_size": 28, "patch_size": 14},
        "audio_config": {"hidden_size": 32, "intermediate_size": 32, "num_blocks": 1, "num_attention_heads": 2,
                         "ext_pw_out_channel": 32, "depthwise_separable_out_channel": 32, "nemo_conv_channels": 32},
    },
    "recurrent_gemma": {"layer_types": OUT},
    "zaya": {"num_experts_per_tok": 1},
    "zamba2": {"layer_types": OUT, "layers_block_type": [LINEAR, LINEAR, "hybrid", "hybrid"], "n_mamba_heads": 8},
    "longcat_flash": {"num_layers": 2, "ffn_hidden_size": 96, "expert_ffn_hidden_size": 32, "moe_topk": 2,
                      "zero_expert_num": 2, "num_key_value_heads": 4},
    "inkling_text": {"swa_num_attention_heads": 4, "swa_num_key_value_heads": 2, "swa_head_dim": 16,
                     "sliding_window_size": 16, "d_rel": 4, "rel_extent": 64},
    "inkling2_text": {"swa_num_attention_heads": 4, "swa_num_key_value_heads": 2, "swa_head_dim": 16,
                      "sliding_window_size": 16, "d_rel": 4, "rel_extent": 64, "unpadded_vocab_size": 120},
}  # fmt: skip


# Types that people may try, by what makes them special.
NAMED = {
    "plain": (
        "llama", "qwen2", "qwen3", "gemma", "gemma3_text", "mistral", "ministral", "ministral3", "seed_oss",
        "internlm3", "cwm", "iquestcoder", "phi", "phi3", "phi4_multimodal", "smollm3", "olmo", "olmo2", "olmo3",
        "nemotron", "glm4", "exaone4", "ernie4_5", "hunyuan_v1_dense", "apertus", "helium", "stablelm", "starcoder2",
        "gpt2", "gpt_neox", "youtu", "arcee", "bitnet", "jais2", "hrm_text",
    ),
    "experts": (
        "qwen2_moe", "qwen3_moe", "mixtral", "phimoe", "olmoe", "flex_olmo", "glm4_moe", "glm4_moe_lite",
        "deepseek_v2", "deepseek_v3", "exaone_moe", "ernie4_5_moe", "hunyuan_v1_moe", "hy_v3", "minimax_m2",
        "minimax_m3_vl_text", "dots1", "laguna", "mellum", "solar_open", "sarvam_moe", "sarvam_mla", "afmoe",
        "kolibri1", "axk1", "longcat_flash",
    ),
    "factors or caps of logits": (
        "granite", "granitemoe", "granitemoeshared", "cohere", "cohere2", "cohere2_moe", "nanochat", "minicpm3",
    ),
    "caps or sinks of attention": (
        "gemma2", "vaultgemma", "gpt_oss", "granite_swa", "granitemoe_swa", "mimo_v2_flash", "flint",
    ),
    "layers of different shapes": ("gemma3n_text", "gemma4_text", "gemma4_unified_text"),
    "short convolutions": ("lfm2", "lfm2_moe", "lfm3", "zaya"),
    "linear attention or Mamba": (
        "qwen3_next", "qwen3_5_text", "qwen3_5_moe_text", "olmo_hybrid", "kimi_linear", "bailing_hybrid", "lara_mini",
        "granitemoehybrid", "falcon_h1", "nemotron_h", "bamba", "jamba", "zamba", "zamba2", "mamba", "mamba2",
        "falcon_mamba", "minimax", "recurrent_gemma", "rwkv", "xlstm",
    ),
    "chunked attention": ("llama4_text",),
    "sparse attention": ("glm_moe_dsa", "deepseek_v32", "deepseek_v4", "hy_v4", "axk2", "qwen4_exp_text"),
    "relative positions": ("inkling_text", "inkling2_text"),
    "images": (
        "gemma3", "gemma4", "qwen3_vl", "qwen3_vl_moe", "qwen3_5", "qwen2_5_vl", "mistral3", "smolvlm", "lfm2_vl",
        "internvl", "idefics3", "llava", "paligemma", "aya_vision",
    ),
}  # fmt: skip
WRAPPERS = NAMED["images"]


class Known(Oracle):
    """Drafts from whole texts by position; a share of the nodes is right. It has no state, so prefixes are reused."""

    def __init__(self, texts: Sequence[Sequence[int]], right: float) -> None:
        super().__init__([], right)
        self.texts = [list(text) for text in texts]
        self.right = right

    def guess(self, backbone: Backbone, new: NewTokens, tree: Tree) -> Draft:
        read, end = new.tokens.tolist(), new.end
        fits = (
            text
            for text in self.texts
            if text[new.start : end] == read and text[end : end + 1] == [new.root]
        )
        text = next(fits, [])
        tokens = [new.root]
        for node in range(1, tree.size):
            ahead = text[end + tree.depths[node] :][:1]
            good = float(torch.rand(1, generator=self.chance)) < self.right
            wrong = int(torch.randint(5, backbone.vocab_size, (1,), generator=self.chance))
            tokens.append(ahead[0] if good and ahead else wrong)
        return Draft(torch.tensor(tokens), tree)


def tiny_config(kind: str, **own: Any) -> Any:
    """Returns a config of a model type with all sizes that it has set to tiny ones."""
    config_class = CONFIG_MAPPING[kind]
    default = config_class()

    def settable(name: str) -> bool:
        field = getattr(config_class, name, None)
        try:
            return hasattr(default, name) and not (
                isinstance(field, property) and field.fset is None
            )
        except RuntimeError:  # it is set layer by layer
            return True

    fields = {name: value for name, value in SMALL.items() if settable(name)}
    if settable("kv_lora_rank"):
        fields["num_key_value_heads"] = SMALL["num_attention_heads"]
    for name in ("layer_types", "mlp_layer_types"):
        if settable(name) and isinstance(kinds := getattr(default, name), list):
            kinds = list(dict.fromkeys(kinds))
            fields[name] = [kinds[i % len(kinds)] for i in range(SMALL["num_hidden_layers"])]
    fields |= OWN.get(kind, {}) | own
    return config_class(**{name: value for name, value in fields.items() if value is not OUT})


# Of what sees images; it is never run.
SMALL_VISION = {
    "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "depth": 1, "num_attention_heads": 2,
    "num_heads": 2, "image_size": 28, "patch_size": 14, "out_hidden_size": 64, "head_dim": 16, "vision_output_dim": 64,
    "projector_input_dim": 64, "projector_output_dim": 64, "deepstack_visual_indexes": [0], "vocab_size": 16,
    "num_position_embeddings": 16, "num_key_value_heads": 2, "global_head_dim": 16, "embed_dim": 32,
}  # fmt: skip


def tiny_wrapper(kind: str) -> Any:
    """Returns a config of a model type that sees images too, with a tiny text part."""
    config_class = CONFIG_MAPPING[kind]
    default = config_class()
    parts: dict[str, Any] = {
        "text_config": tiny_config(default.get_text_config().model_type).to_dict()
    }
    vision = getattr(default, "vision_config", None)
    if vision is not None:
        own = {name: value for name, value in SMALL_VISION.items() if hasattr(vision, name)}
        parts["vision_config"] = vision.to_dict() | own
    if hasattr(default, "audio_config"):
        parts["audio_config"] = None
    return config_class(**parts, tie_word_embeddings=False)


def tiny_network(kind: str, **own: Any) -> Any:
    """Returns a random fp32 network of a model type; any exception if it cannot be made tiny."""
    wrapper = kind in WRAPPERS
    config = tiny_wrapper(kind) if wrapper else tiny_config(kind, **own)
    auto = hf.AutoModelForImageTextToText if wrapper else hf.AutoModelForCausalLM
    with torch.device("meta"):
        network = auto.from_config(config)
        if sum(weight.numel() for weight in network.parameters()) > LARGEST:
            raise ValueError("it cannot be made tiny")
    torch.manual_seed(3)
    return type(network)(config).eval()


def generated(network: Any, prompt: Sequence[int]) -> list[int]:
    """Returns what a network's own `generate` answers to a prompt, greedily."""
    ids = torch.tensor([list(prompt)])
    rules = {"max_new_tokens": COUNT, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    out: Tensor = network.generate(ids, attention_mask=torch.ones_like(ids), **rules)
    return out[0, len(prompt) :].tolist()


RULES: dict[str, Any] = {"max_new_tokens": COUNT, "stop_ids": ()}
OPENING = [5, 9, 20, 11, 7, 33, 40, 12] * 4
PROMPTS = ([5, 9, 20, 11, 7], [*OPENING, 50, 61], [9, 30, 31, 32, 33, 9, 30, 31, 44])


def ways(network: Any, backbone: Backbone) -> dict[str, bool]:
    """Returns which ways of decoding give the tokens of the network's own `generate`."""
    answers = [generated(network, prompt) for prompt in PROMPTS]
    texts = [[*prompt, *tokens] for prompt, tokens in zip(PROMPTS, answers, strict=True)]
    prompt, want = PROMPTS[0], answers[0]

    def decoded(tree: Tree, right: float) -> list[int]:
        return tokens_of(answer(decoder_of(backbone, Known(texts, right), tree), prompt, **RULES))

    results = {"plain": tokens_of(answer(decoder_of(backbone), prompt, **RULES)) == want}
    results["chain"] = decoded(CHAIN, 0.6) == want
    for right in (1.0, 0.6, 0.0):
        results[f"tree {right:.0%}"] = decoded(SPARSE, right) == want
    # A second turn goes on from the first one's text, another text shares its beginning, and the first comes again.
    turns = [PROMPTS[1], [*texts[1], *PROMPTS[2]], [*OPENING, 70], PROMPTS[1]]
    lookup = decoder_of(backbone, None, StaticTreePolicy(CHAIN, ngrams=True))
    asked = [generated(network, turn) for turn in turns]
    results["lookup"] = [tokens_of(answer(lookup, turn, **RULES)) for turn in turns] == asked
    policy = StaticTreePolicy(SPARSE, ngrams=True)
    batch = decoder_of(backbone, Known(texts, 0.6), policy, slots=3)
    steps = steps_of(batch, [Request(own, **RULES) for own in PROMPTS])
    results["batch"] = [tokens_of(own) for own in steps] == answers
    return results


@dataclass(frozen=True)
class Outcome:
    """Holds a model type's engine, None if it is refused, and the ways that gave other tokens than `generate`."""

    engine: str | None
    wrong: tuple[str, ...] = ()
    note: str = ""

    def row(self, kind: str) -> str:
        """Returns the type's row of the page."""
        engine, drafts = (f"`{self.engine}`", "trees") if self.engine else ("refused", "none")
        return f"| `{kind}` | {engine} | {drafts} | {self.note} |"


STATES = "running states"
PROMPT_STATES = (
    "running states, by another formula in decoding: a prompt reuses prompts, but no answers"
)


def survey(kind: str) -> Outcome:
    """Saves a tiny network of a type, loads it as a user does, and decodes in all ways."""
    network = tiny_network(kind)
    with tempfile.TemporaryDirectory() as folder:
        path = save_network(network, Path(folder))
        try:
            backbone = load_backbone(path, LoadOptions(dtype="fp32"))
        except UserError as refusal:
            return Outcome(None, note=reason_of(refusal))
    wrong = tuple(way for way, right in ways(network, backbone).items() if not right)
    assert machine_key(backbone.config)
    assert backbone.engine.row_bytes >= 0
    notes = ["text only"] if kind in WRAPPERS else []
    if getattr(backbone.engine, "stateful", None) or backbone.engine.new_cache().stateful:
        notes.append(STATES if backbone.engine.new_cache().decoded_states else PROMPT_STATES)
    return Outcome(backbone.engine.name, wrong, "; ".join(notes))


def reason_of(refusal: UserError) -> str:
    """Returns the cause that a refusal names."""
    return str(refusal).split("over a tree: ")[-1].split("; use ")[0]


HEAD = """\
# Models

This page lists which models run, on which engine, and with which drafts. `make models-page` generates it. For each
model type, it saves and loads a tiny random network, and decodes greedily in fp32 in several ways: plain decoding; a
chain and trees of drafts that are always, sometimes or never right; n-gram matches after a reused prefix; and three
sequences at once. Each way must give the tokens of transformers' own `generate`. The type is the `model_type` of a
model's `config.json`, or of its `text_config`. A type that is not listed is checked when a model of this type is
loaded: a verify pass over a small tree must give the network's own logits.

- **Engine.** `native` runs the layers that it supports; `eager` runs transformers' own layers. See
  [engines](engines.md).
- **Images.** Models for images and text accept only text here.
- **Drafters.** Some checkpoints and GGUF files contain a drafter; see [drafters from model makers](drafters.md). Real
  weights of these drafters were not available, so we tested tiny random drafters in the layouts of their makers and of
  llama.cpp.
- **Running states.** Convolutions, Mamba and linear attention keep a state in place of keys. On the eager engine, each
  node of a tree has its own state. So these layers run a tree level by level, and large states limit the number of
  nodes (512 MB per tree). The native engine stores a node's inputs to the state instead. The state of a delta net
  cannot go back to any earlier token. A prompt therefore reuses an earlier text only up to the end of a prompt or an
  answer. For these models, the drafter `firp` is refused. `eagle` and `mtp` reuse no text, because they must read a
  text's last token again.
"""


def page(rows: dict[str, str]) -> str:
    """Returns the page as Markdown, one section a group, of each type's row."""
    parts = [HEAD]
    for group, kinds in NAMED.items():
        parts.append(
            f"## {group[0].upper()}{group[1:]}\n\n| type | engine | drafts | notes |\n|---|---|---|---|"
        )
        parts += [rows[kind] for kind in kinds]
        parts[-1] += "\n"
    return "\n".join(parts)


def main(kinds: Sequence[str]) -> None:
    """Prints the rows of some types, or the page; what went wrong goes to stderr."""
    hf.logging.set_verbosity_error()
    logging.disable(logging.WARNING)
    rows = {}
    for kind in kinds or [kind for of_group in NAMED.values() for kind in of_group]:
        outcome = survey(kind)
        rows[kind] = outcome.row(kind)
        print(kind, "WRONG" if outcome.wrong else "ok", *outcome.wrong, file=sys.stderr)
    print("\n".join(rows.values()) if kinds else page(rows), end="\n" if kinds else "")


if __name__ == "__main__":
    main(sys.argv[1:])
