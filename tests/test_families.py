"""Architectures of transformers, tiny and random: each decodes as its own `generate` or is refused by name."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
)

from medusa_cli.engine import load, load_backbone
from medusa_cli.engine.timing import machine_key
from medusa_cli.errors import UserError
from medusa_cli.files.model_files import refuse_by_source
from medusa_cli.model import Backbone
from medusa_cli.model.load import load_network
from medusa_cli.runs.load_options import LoadOptions
from tests.helpers import PROMPT, SPARSE, Oracle, generate, plain, save_network, tokens_of

COUNT = 32
LARGEST = 3e6  # weights of a model that is tiny
# Values of the fields that configs have; others stay as they are.
SMALL = {
    "vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "intermediate_size": 64, "ffn_dim": 64, "n_inner": 64, "head_dim": 8, "max_position_embeddings": 128,
    "word_embed_proj_dim": 32, "embedding_size": 32, "rotary_dim": 8, "sliding_window": 8,
    "decoder_layers": 2, "decoder_attention_heads": 4, "decoder_ffn_dim": 64, "encoder_layers": 2,
    "moe_intermediate_size": 32, "shared_expert_intermediate_size": 32, "num_experts": 4, "num_local_experts": 4,
    "n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1,
    "q_lora_rank": 16, "kv_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 8, "v_head_dim": 8,
    "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0, "initializer_range": 0.4, "tie_word_embeddings": False,
    "is_decoder": True,
}  # fmt: skip
DECODING = (
    "apertus", "biogpt", "deepseek_v2", "deepseek_v3", "exaone4", "falcon", "gemma", "gemma3_text", "glm4",
    "glm4_moe_lite", "gpt2", "gpt_bigcode", "gpt_neox", "granite", "helium", "hunyuan_v1_moe", "llama",
    "ministral3", "mistral", "mixtral", "moshi", "nemotron", "olmo2", "olmoe", "opt", "persimmon", "phi", "phi3",
    "qwen2", "qwen2_moe", "qwen3", "qwen3_moe", "smollm3", "stablelm", "starcoder2",
)  # fmt: skip
REFUSED = ("bart", "bert", "bloom", "doge", "hrm_text", "minimax", "rwkv", "xglm")


def small_config(kind: str) -> Any:
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
            return False

    fields = {name: value for name, value in SMALL.items() if settable(name)}
    if kind == "moshi":  # it is not run beyond its window
        fields["sliding_window"] = 48
    if hasattr(default, "kv_lora_rank"):
        fields["num_key_value_heads"] = SMALL["num_attention_heads"]
    for name in ("layer_types", "mlp_layer_types"):
        if settable(name) and isinstance(kinds := getattr(default, name), list):
            kinds = list(dict.fromkeys(kinds))
            fields[name] = [kinds[0], kinds[-1]]
    return config_class(**fields)


def small_network(kind: str) -> tuple[Any, list[int]]:
    """Returns a network of a model type and what it generates; any exception if it cannot be made tiny."""
    config = small_config(kind)
    model_class = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
    with torch.device("meta"):
        if sum(weight.numel() for weight in model_class(config).parameters()) > LARGEST:
            raise ValueError("it cannot be made tiny")
    torch.manual_seed(0)
    network, prompt = model_class(config).eval(), torch.tensor([PROMPT])
    rules = {"max_new_tokens": COUNT, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    ids = network.generate(prompt, attention_mask=torch.ones_like(prompt), **rules)
    return network, ids[0, len(PROMPT) :].tolist()


def assert_decodes(backbone: Backbone, expected: list[int]) -> None:
    """Decodes plain, and over a tree of which some drafts are right."""
    assert plain(backbone, COUNT) == expected
    drafted = generate(
        backbone, Oracle(expected, 0.6), SPARSE, PROMPT, max_new_tokens=COUNT, stop_ids=()
    )
    assert tokens_of(drafted) == expected
    assert machine_key(backbone.config)


@pytest.mark.parametrize("kind", DECODING)
def test_family_decodes_as_its_own_generate(kind: str, tmp_path: Path) -> None:
    network, expected = small_network(kind)
    assert_decodes(
        load_backbone(save_network(network, tmp_path), LoadOptions(dtype="fp32")), expected
    )


def test_moshi_is_not_run_beyond_its_window(tmp_path: Path) -> None:
    """Its masks have no window and its cache has one: a prompt and an answer disagree in transformers itself."""
    network, _ = small_network("moshi")
    backbone = load_backbone(save_network(network, tmp_path), LoadOptions(dtype="fp32"))
    prompt = [5 + 7 * i % 50 for i in range(49)]
    with pytest.raises(UserError, match="context"):
        next(generate(backbone, None, None, prompt, max_new_tokens=4))
    assert len(plain(backbone, 90)) == 48 - len(PROMPT)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("kind", ["gpt2", "gpt_neox", "phimoe", "olmo", "opt"])
def test_family_that_only_the_eager_engine_runs_is_read_once(
    kind: str, dtype: torch.dtype, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loads: list[str] = []
    monkeypatch.setattr(
        load,
        "load_network",
        lambda *args, **options: loads.append(kind) or load_network(*args, **options),
    )
    network, _ = small_network(kind)
    backbone = load_backbone(save_network(network.to(dtype), tmp_path))
    assert backbone.engine.name == "eager" and len(plain(backbone, COUNT)) == COUNT
    assert len(loads) == 1 or backbone.dtype != dtype


@pytest.mark.parametrize("kind", REFUSED)
def test_family_that_a_tree_cannot_verify_is_refused(kind: str, tmp_path: Path) -> None:
    network, _ = small_network(kind)
    with pytest.raises(UserError, match=kind):
        load_backbone(save_network(network, tmp_path), LoadOptions(dtype="fp32"))


def refused_by_source(kind: str) -> bool:
    try:
        refuse_by_source(SimpleNamespace(model_type=kind))
    except UserError:
        return True
    return False


def test_source_of_a_class_whose_attention_can_be_replaced_refuses_no_model() -> None:
    classes = {
        kind: getattr(transformers, str(name), None)
        for kind, name in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.items()
    }
    able = [kind for kind, network in classes.items() if getattr(network, "_supports_sdpa", False)]
    assert len(able) > 100 and not [kind for kind in able if refused_by_source(kind)]
    assert (
        refused_by_source("xglm") and refused_by_source("rwkv") and not refused_by_source("mamba")
    )


@pytest.mark.slow
def test_every_architecture_decodes_or_is_refused(tmp_path: Path) -> None:
    decoded, refused = [], []
    for kind in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        try:
            network, expected = small_network(kind)
        except Exception:  # not every architecture can be made tiny this way
            continue
        try:
            backbone = load_backbone(
                save_network(network, tmp_path / kind), LoadOptions(dtype="fp32")
            )
        except UserError:
            refused.append(kind)
            continue
        assert_decodes(backbone, expected)
        decoded.append(kind)
    assert len(decoded) > 60 and len(refused) > 40, (decoded, refused)
