"""Weights as files hold them: lm_heads beside tied configs, and published layouts that transformers converts."""

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import revert_weight_conversion

from medusa_cli.engine import attach, load_backbone
from medusa_cli.errors import UserError
from medusa_cli.model import Backbone
from medusa_cli.runs.load_options import LoadOptions
from tests.helpers import change_json, forward, save_network
from tests.models import WRAPPERS, tiny_network

TEXT = torch.arange(3, 33)
PAGE = Path(__file__).parent.parent / "docs" / "models.md"
NATIVE = re.findall(r"^\| `(\w+)` \| `native`", PAGE.read_text(), re.MULTILINE)
# The native types whose published files transformers converts.
CONVERTED = (
    "qwen2_moe", "qwen3_moe", "mixtral", "phimoe", "olmoe", "flex_olmo", "glm4_moe", "exaone_moe",
    "ernie4_5_moe", "hunyuan_v1_moe", "dots1", "mellum", "solar_open", "sarvam_moe", "granitemoe",
    "granitemoeshared", "cohere2_moe", "flint", "qwen3_5_text", "qwen3_5_moe_text", "gemma3", "qwen3_vl_moe",
    "qwen3_5", "qwen2_5_vl", "mistral3", "lfm2_vl", "internvl", "llava",
)  # fmt: skip


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Returns the cache folder, which is empty."""
    monkeypatch.setenv("MEDUSA_HOME", str(tmp_path / "home"))
    return tmp_path / "home"


def load(path: str | Path, **options: Any) -> Backbone:
    return load_backbone(str(path), LoadOptions(dtype="fp32", **options))


def logits_of(backbone: Backbone) -> Tensor:
    return forward(backbone, TEXT).logits.clone()


@torch.inference_mode()
def own_logits(network: Any) -> Tensor:
    """Returns a network's own logits, before a backbone gives it other attention."""
    logits: Tensor = network(TEXT[None]).logits[0]
    return logits


def assert_computes(backbone: Backbone, network: Any) -> None:
    """Asserts that a backbone gives a network's own logits."""
    assert_close(backbone, own_logits(network))


def assert_close(backbone: Backbone, expected: Tensor) -> None:
    assert float((logits_of(backbone) - expected).norm() / expected.norm()) < 1e-4


# ---- lm_heads


def rewrite_head(folder: Path, head: str) -> None:
    """Writes a saved network's embeddings as they may be tied: without an lm_head, beside it, or as the lm_head."""
    file = folder / "model.safetensors"
    tensors = load_file(file)
    [lm_head] = [name for name in tensors if name.endswith("lm_head.weight")]
    [embeddings] = [name for name in tensors if name.endswith("embed_tokens.weight")]
    if head == "none":
        del tensors[lm_head]
    if head == "same":
        tensors[lm_head] = tensors[embeddings].clone()
    if head == "only":
        tensors[lm_head] = tensors.pop(embeddings)
    save_file(tensors, file, {"format": "pt"})


def set_tied(folder: Path, top: bool | None, inner: bool | None = None) -> None:
    """Sets `tie_word_embeddings` of a saved config and of its text part; None removes it."""

    def put(fields: dict[str, Any], value: bool | None) -> None:
        fields.pop("tie_word_embeddings", None)
        if value is not None:
            fields["tie_word_embeddings"] = value

    def change(fields: dict[str, Any]) -> None:
        put(fields, top)
        if "text_config" in fields:
            put(fields["text_config"], inner)

    change_json(folder / "config.json", change)


@pytest.mark.parametrize("kind", ["qwen2", "gemma2", "cohere2", *(set(WRAPPERS) & set(NATIVE))])
def test_a_head_of_its_own_is_used_whatever_the_config_says(kind: str, tmp_path: Path) -> None:
    network = tiny_network(kind)
    path = save_network(network, tmp_path / "model")
    for top, inner in ((True, True), (False, None)):
        set_tied(tmp_path / "model", top, inner)
        backbone = load(path, engine="native")
        assert backbone.engine.model.packed.memory is not None
        assert_computes(backbone, network)
        own = network.get_output_embeddings().weight
        assert torch.equal(backbone.lm_head_weight, own)


@pytest.mark.parametrize(
    ("kind", "head", "engine"),
    [
        *(
            ("qwen3_5", "none", "native"),
            ("qwen3_5", "none", "eager"),
            ("gemma3", "none", "native"),
        ),
        *(("llava", "none", "native"), ("lfm2_vl", "none", "native"), ("qwen2", "same", "native")),
        *(("qwen2", "only", "native"), ("qwen3_5", "only", "native"), ("gemma4", "none", "native")),
    ],
)
def test_a_tied_head_is_the_embeddings(kind: str, head: str, engine: str, tmp_path: Path) -> None:
    """Some wrappers are tied at the top alone, and classes of transformers differ in which part they read."""
    network = tiny_network(kind)
    path = save_network(network, tmp_path / "model")
    rewrite_head(tmp_path / "model", head)
    network.get_output_embeddings().weight = network.get_input_embeddings().weight
    for top, inner in ((True, None), (True, False)):
        set_tied(tmp_path / "model", top, inner)
        assert_computes(load(path, engine=engine), network)


def test_a_missing_head_that_nothing_ties_is_named(tmp_path: Path) -> None:
    path = save_network(tiny_network("qwen2"), tmp_path)
    rewrite_head(tmp_path, "none")
    set_tied(tmp_path, False)
    with pytest.raises(UserError, match=r"lm_head\.weight"):
        load(path)


@pytest.mark.parametrize("kind", ["qwen2", "gemma3", "gemma4", "qwen3_5", "lfm2_vl"])
@pytest.mark.parametrize("tied", [True, False])
def test_the_head_of_a_network_in_memory_is_what_it_shares(kind: str, tied: bool) -> None:
    network = tiny_network(kind)
    if tied:
        network.get_output_embeddings().weight = network.get_input_embeddings().weight
    for part in (network.config, network.config.get_text_config()):
        part.tie_word_embeddings = not tied
    expected = own_logits(network)
    backbone = Backbone(network)
    attach(backbone, "native")
    assert_close(backbone, expected)


# ---- published layouts


def published(network: Any) -> dict[str, Tensor]:
    """Returns a network's tensors in the layout of its maker's files: transformers' conversions, reversed."""
    conversions = get_model_conversion_mapping(network, add_legacy=False)
    for conversion in conversions:
        for operation in getattr(conversion, "operations", ()):
            operation.check_dims = False  # so that saving transposes, too
    network._weight_conversions = conversions
    tensors = revert_weight_conversion(network, network.state_dict())
    return {name: values.clone().contiguous() for name, values in tensors.items()}


@pytest.mark.parametrize("kind", CONVERTED)
def test_published_layouts_are_read_as_transformers_reads_them(kind: str, tmp_path: Path) -> None:
    network = tiny_network(kind)
    for name, values in network.state_dict().items():
        if name.endswith("e_score_correction_bias"):
            values.copy_(torch.linspace(-1, 1, values.numel()).view_as(values))
    path = save_network(network, tmp_path / "model")
    save_file(published(network), tmp_path / "model" / "model.safetensors", {"format": "pt"})
    backbone = load(path, engine="native")
    assert backbone.engine.model.packed.memory is not None
    assert_computes(backbone, network)


@pytest.mark.slow
def test_no_native_type_with_a_published_layout_is_left_out() -> None:
    with_layout = {
        kind
        for kind in NATIVE
        if get_model_conversion_mapping(tiny_network(kind), add_legacy=False)
    }
    assert with_layout == set(CONVERTED)
