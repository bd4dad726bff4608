"""Architectures of transformers, tiny and random: each decodes as its own `generate` or is refused by name."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from medusa_cli.engine import load, load_backbone
from medusa_cli.engine.timing import machine_key
from medusa_cli.errors import UserError
from medusa_cli.files.model_files import refuse_by_source
from medusa_cli.model import Backbone
from medusa_cli.model.load import load_network
from medusa_cli.runs.load_options import LoadOptions
from tests.helpers import PROMPT, SPARSE, Oracle, generate, plain, save_network, tokens_of
from tests.models import COUNT, generated, tiny_network

DECODING = (
    "apertus", "biogpt", "deepseek_v2", "deepseek_v3", "exaone4", "falcon", "gemma", "gemma3_text", "glm4",
    "glm4_moe_lite", "gpt2", "gpt_bigcode", "gpt_neox", "helium", "hunyuan_v1_moe", "llama",
    "ministral3", "mistral", "mixtral", "moshi", "nemotron", "olmo2", "olmoe", "opt", "persimmon", "phi", "phi3",
    "qwen2", "qwen2_moe", "qwen3", "qwen3_moe", "smollm3", "stablelm", "starcoder2",
)  # fmt: skip
REFUSED = ("bart", "bert", "bloom", "doge", "hrm_text", "minimax", "rwkv", "xglm")


def small_network(kind: str) -> tuple[Any, list[int]]:
    """Returns a network of a model type and what it generates; any exception if it cannot be made tiny."""
    network = tiny_network(kind)
    return network, generated(network, PROMPT)


def assert_decodes(backbone: Backbone, expected: list[int]) -> None:
    """Decodes plain, and over a tree of which some drafts are right."""
    assert plain(backbone, COUNT) == expected
    drafted = generate(
        backbone, Oracle(expected, 0.6), SPARSE, PROMPT, max_new_tokens=COUNT, stop_ids=()
    )
    assert tokens_of(drafted) == expected
    assert machine_key(backbone.config)


@pytest.mark.quick("falcon", "moshi")
@pytest.mark.parametrize("kind", DECODING)
def test_family_decodes_as_its_own_generate(kind: str, tmp_path: Path) -> None:
    network, expected = small_network(kind)
    assert_decodes(
        load_backbone(save_network(network, tmp_path), LoadOptions(dtype="fp32")), expected
    )


@pytest.mark.slow
def test_moshi_is_not_run_beyond_its_window(tmp_path: Path) -> None:
    """Its masks have no window and its cache has one: a prompt and an answer disagree in transformers itself."""
    network, _ = small_network("moshi")
    backbone = load_backbone(save_network(network, tmp_path), LoadOptions(dtype="fp32"))
    prompt = [5 + 7 * i % 50 for i in range(97)]
    with pytest.raises(UserError, match="context"):
        next(generate(backbone, None, None, prompt, max_new_tokens=4))
    assert len(plain(backbone, 200)) == 96 - len(PROMPT)


@pytest.mark.quick("gpt2-dtype0")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("kind", ["gpt2", "gpt_neox", "deepseek_v3", "minicpm3", "opt"])
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
    assert backbone.engine.name == "eager"
    assert len(plain(backbone, COUNT)) == COUNT
    assert len(loads) == 1 or backbone.dtype != dtype


@pytest.mark.quick("doge", "xglm")
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


@pytest.mark.slow
def test_source_of_a_class_whose_attention_can_be_replaced_refuses_no_model() -> None:
    classes = {
        kind: getattr(transformers, str(name), None)
        for kind, name in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.items()
    }
    able = [kind for kind, network in classes.items() if getattr(network, "_supports_sdpa", False)]
    assert len(able) > 100
    assert not [kind for kind in able if refused_by_source(kind)]
    assert refused_by_source("xglm")
    assert refused_by_source("rwkv")
    assert not refused_by_source("mamba")


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
    assert len(decoded) > 60, (decoded, refused)
    assert len(refused) > 40, (decoded, refused)
