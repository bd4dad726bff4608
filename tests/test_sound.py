"""Model folders and adapters that are damaged are refused by name, and no pickle is ever opened."""

import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load, save_file

from medusa_cli.engine import load_backbone
from medusa_cli.errors import UserError
from medusa_cli.model import lora as adapter
from medusa_cli.model.load import load_network
from medusa_cli.runs.resolve import LoadOptions
from tests.helpers import save_model

WEIGHTS = "model.safetensors"
MATRIX = "model.layers.1.mlp.up_proj.weight"


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return Path(save_model(tmp_path / "model"))


def refused(model: Path, match: str) -> None:
    with pytest.raises(UserError, match=match) as raised:
        load_backbone(str(model), LoadOptions(dtype="fp32"))
    assert len(str(raised.value).splitlines()) == 1


@pytest.mark.parametrize("number", [float("nan"), float("inf")])
def test_a_network_whose_pass_is_not_finite_is_refused(model: Path, number: float) -> None:
    tensors = load((model / WEIGHTS).read_bytes())
    tensors[MATRIX][3, 5] = number
    save_file(tensors, model / WEIGHTS, metadata={"format": "pt"})
    refused(model, "computes numbers that are not finite in float32")


def test_a_network_that_lacks_tensors_is_refused(model: Path) -> None:
    tensors = load((model / WEIGHTS).read_bytes())
    del tensors[MATRIX]
    save_file(tensors, model / WEIGHTS, metadata={"format": "pt"})
    refused(model, f"lack 1 tensors of the network, such as '{MATRIX}'")


@pytest.mark.parametrize("data", [b"", b"\x07" * 100_000, b"\xff" * 100_000])
def test_bytes_that_are_no_weights_are_refused(model: Path, data: bytes) -> None:
    (model / WEIGHTS).write_bytes(data)
    refused(model, "could not be loaded")


@pytest.mark.parametrize(
    ("field", "value", "match"),
    [
        ("num_hidden_layers", 10**9, "expected int <= 1024 at num_hidden_layers"),
        ("hidden_size", -1, "expected int >= 1 at hidden_size"),
        ("vocab_size", "64", "got str at vocab_size"),
        ("hidden_size", 48, "could not be loaded"),
        ("hidden_act", "no_such", "could not be loaded"),
        ("num_attention_heads", 5, "could not be loaded|cannot be run"),
    ],
)
def test_a_config_that_cannot_be_is_refused(model: Path, field: str, value: Any, match: str) -> None:
    path = model / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {field: value}))
    refused(model, match)


@pytest.mark.parametrize(
    ("name", "field", "value", "match"),
    [
        ("generation_config.json", "eos_token_id", [1, [None]], "eos_token_id .* is no token id|could not be loaded"),
        ("tokenizer_config.json", "model_max_length", "x", "could not be loaded"),
    ],
)
def test_settings_that_are_read_late_are_refused_at_load(
    model: Path, name: str, field: str, value: Any, match: str
) -> None:
    path = model / name
    path.write_text(json.dumps(json.loads(path.read_text()) | {field: value}))
    refused(model, match)


def test_an_adapter_beside_a_model_is_refused_unopened(model: Path) -> None:
    (model / "adapter_config.json").write_text('{"peft_type": "LORA", "base_model_name_or_path": "/etc"}')
    with pytest.raises(UserError, match="has an adapter beside it"):
        load_network(str(model), LoadOptions(dtype="fp32"))


def test_a_model_of_pickled_weights_alone_is_refused_unopened(model: Path, tmp_path: Path) -> None:
    class Touch:
        def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
            return Path.touch, (tmp_path / "ran",)

    torch.save(Touch(), model / "pytorch_model.bin")
    (model / WEIGHTS).unlink()
    refused(model, "could not be loaded")
    assert not (tmp_path / "ran").exists()


@pytest.fixture
def adapted(model: Path, tmp_path: Path) -> Path:
    network, _ = load_network(str(model), LoadOptions(dtype="fp32"))
    adapter.attach(network, rank=2, alpha=4.0, dropout=0.0)
    adapter.save(network, tmp_path / "adapter", str(model))
    return tmp_path / "adapter"


@pytest.mark.parametrize(
    ("field", "value", "match"),
    [
        ("r", "x", "got str at r"),
        ("r", 3, "does not fit the model"),
        ("peft_type", "LOHA", "invalid enum value 'LOHA'"),
        ("target_modules", "([", "expected array, got str at target_modules"),
        ("target_modules", ["nothing"], "does not fit the model"),
        ("lora_alpha", None, "at lora_alpha"),
    ],
)
def test_an_adapters_config_that_cannot_be_is_refused(
    model: Path, adapted: Path, field: str, value: Any, match: str
) -> None:
    path = adapted / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {field: value}))
    with pytest.raises(UserError, match=match):
        load_backbone(str(model), LoadOptions(dtype="fp32"), adapter=adapted)


def test_what_else_an_adapters_config_asks_for_is_not_done(model: Path, adapted: Path) -> None:
    path = adapted / "adapter_config.json"
    more = {"init_lora_weights": "loftq", "megatron_config": {}, "auto_mapping": {"parent_library": "no.such"}}
    path.write_text(json.dumps(json.loads(path.read_text()) | more))
    assert load_backbone(str(model), LoadOptions(dtype="fp32"), adapter=adapted).adapter == adapter.digest(adapted)


def test_an_adapters_damaged_weights_are_refused(model: Path, adapted: Path) -> None:
    path = adapted / adapter.WEIGHTS
    whole = path.read_bytes()
    tensors = load(whole)
    name = next(iter(tensors))
    for change, match in ((whole[: len(whole) // 2], "cannot be read"), (b"", "cannot be read")):
        path.write_bytes(change)
        with pytest.raises(UserError, match=match):
            load_backbone(str(model), LoadOptions(dtype="fp32"), adapter=adapted)
    save_file(tensors | {name: tensors[name] * float("nan")}, path)
    with pytest.raises(UserError, match="not finite"):
        load_backbone(str(model), LoadOptions(dtype="fp32"), adapter=adapted)
    save_file({key: one for key, one in tensors.items() if key != name}, path)
    with pytest.raises(UserError, match="lack 1 tensors"):
        load_backbone(str(model), LoadOptions(dtype="fp32"), adapter=adapted)


def test_hints_on_kernels_that_a_cpu_can_do_without_are_not_passed_on(model: Path) -> None:
    logging.getLogger("bitsandbytes").setLevel(logging.NOTSET)
    load_network(str(model))
    assert not logging.getLogger("bitsandbytes.backends.cpu.ops").isEnabledFor(logging.WARNING)
