"""A LoRA adapter's folder as a model: merged once as by peft, decoded and tuned like any model, refused by name."""

import json
import shutil
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from safetensors.torch import load_file, save_file

from medusa_cli.errors import UserError
from medusa_cli.files import adapter
from medusa_cli.files.model_source import ModelSource
from medusa_cli.files.paths import home
from medusa_cli.model.load import load_network
from medusa_cli.runs.load_options import LoadOptions
from tests.helpers import change_json, medusa, medusa_json, save_model, tiny_tokenizer
from tests.hub import running_hub

WEIGHTS = adapter.WEIGHTS


@pytest.fixture(autouse=True)
def own_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("MEDUSA_HOME", str(tmp_path / "home"))
    return tmp_path / "home"


def save_adapter(folder: Path, base: str, seed: int = 0, dtype: str = "fp32", **lora: Any) -> Any:
    """Trains nothing: saves an adapter of random weights for a model, and returns peft's merged network."""
    network, _ = load_network(ModelSource.of(base), LoadOptions(dtype=dtype))
    config = {"r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "down_proj"], **lora}
    adapted = peft.get_peft_model(network, peft.LoraConfig(**config))
    torch.manual_seed(seed)
    for name, weight in adapted.named_parameters():
        if "lora_B" in name or "lora_embedding_B" in name:
            torch.nn.init.normal_(weight, std=0.3)
    adapted.save_pretrained(folder)
    change_json(folder / adapter.CONFIG, base_model_name_or_path=base)
    return adapted.merge_and_unload()


@pytest.mark.quick
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("family", ["llama", "qwen2"])  # qwen2: the lm_head is the embedding
@pytest.mark.parametrize(
    "lora",
    [
        {},
        {"use_rslora": True},
        {"target_modules": "all-linear"},
        {"layers_to_transform": [1]},
        {"target_modules": r".*\.(q_proj|v_proj)"},
    ],
    ids=str,
)
def test_merged_files_hold_the_weights_that_peft_merges(
    tmp_path: Path, lora: dict[str, Any], family: str, dtype: str
) -> None:
    base = save_model(tmp_path / "base", family=family)
    network, _ = load_network(ModelSource.of(base), LoadOptions(dtype=dtype))
    Path(base, "model.safetensors").unlink()
    network.save_pretrained(base, max_shard_size="20KB")  # several files
    merged = save_adapter(tmp_path / "lora", base, dtype=dtype, **lora)
    expected = merged.state_dict()
    source = ModelSource.of(str(tmp_path / "lora"))
    assert len(source.checkpoint) > 1
    stored = {
        name: weight for file in source.checkpoint for name, weight in load_file(file).items()
    }
    assert stored.keys() <= expected.keys()
    for name, weight in stored.items():
        assert torch.equal(weight, expected[name]), name
    plain, _ = load_network(ModelSource.of(base), LoadOptions(dtype=dtype))
    changed = {
        name
        for name, weight in plain.state_dict().items()
        if not torch.equal(weight, expected[name])
    }
    assert changed


def test_an_adapter_decodes_as_its_merged_model_and_is_merged_once(
    tmp_path: Path, model: str, own_home: Path
) -> None:
    lora = tmp_path / "lora"
    save_adapter(lora, model).save_pretrained(tmp_path / "merged")
    shutil.copy(Path(model) / "config.json", lora)  # some trainers write it
    tiny_tokenizer().save_pretrained(tmp_path / "merged")
    prompt = ("--prompt", "w1 w2 w3", "--max-new-tokens", "12")
    expected = medusa_json("chat", "--model", tmp_path / "merged", "--lookup", *prompt)
    first = medusa("chat", "--model", lora, "--lookup", *prompt, "--json")
    assert "merging the adapter" in first.stderr
    assert json.loads(first.stdout)["answer"] == expected["answer"]
    again = medusa("chat", "--model", lora, "--lookup", *prompt, "--json")
    assert "merging" not in again.stderr
    assert json.loads(again.stdout)["answer"] == expected["answer"]
    assert (
        expected["answer"] != medusa_json("chat", "--model", model, "--lookup", *prompt)["answer"]
    )
    (kept,) = own_home.glob("models/adapter-*[!k]")
    # Trained further: the earlier merged model goes.
    save_adapter(lora, model, seed=1)
    assert "merging" in medusa("chat", "--model", lora, "--lookup", *prompt).stderr
    (later,) = (path for path in own_home.glob("models/adapter-*") if path.is_dir())
    assert later != kept


def test_the_tokenizer_beside_an_adapter_replaces_the_models(tmp_path: Path, model: str) -> None:
    lora = tmp_path / "lora"
    save_adapter(lora, model)
    assert (
        "TEMPLATE" not in Path(ModelSource.of(str(lora)).folder, "chat_template.jinja").read_text()
    )
    (lora / "chat_template.jinja").write_text("{# TEMPLATE #}")
    assert "TEMPLATE" in Path(ModelSource.of(str(lora)).folder, "chat_template.jinja").read_text()


def test_the_model_of_an_adapter_comes_from_the_hub(
    tmp_path: Path, model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    lora = tmp_path / "lora"
    save_adapter(lora, model)
    change_json(lora / adapter.CONFIG, base_model_name_or_path="owner/base")
    with running_hub(monkeypatch, tmp_path / "cache") as hub:
        files = {path.name: path.read_bytes() for path in Path(model).iterdir()}
        hub.repositories["owner/base"] = {**files, "pytorch_model.bin": b"unread"}
        source = ModelSource.of(str(lora))
        assert source.must_be_fetched
        merged = source.folder
        assert not any("pytorch_model" in request for request in hub.requests)
        monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
        assert ModelSource.of(str(lora)).folder == merged
        assert not ModelSource.of(str(lora)).must_be_fetched


def drop_half(folder: Path) -> None:
    tensors = load_file(folder / WEIGHTS)
    tensors.pop(next(name for name in tensors if ".lora_B." in name))
    save_file(tensors, folder / WEIGHTS)


def damage(folder: Path) -> None:
    (folder / WEIGHTS).write_bytes((folder / WEIGHTS).read_bytes()[:99])


def infinite(folder: Path) -> None:
    tensors = load_file(folder / WEIGHTS)
    next(iter(tensors.values()))[0] = float("inf")
    save_file(tensors, folder / WEIGHTS)


def config(**fields: Any) -> Any:
    return lambda folder: change_json(folder / adapter.CONFIG, **fields)


@pytest.mark.parametrize(
    ("change", "match"),
    [
        (config(base_model_name_or_path=None), "base_model_name_or_path"),
        (config(base_model_name_or_path="/no/where"), "/no/where"),
        (config(base_model_name_or_path="no-such/model"), "no-such/model"),
        (config(base_model_name_or_path="qwen2.5-coder-0.5b"), "GGUF"),
        (config(base_model_name_or_path="random:0.5b"), "random"),
        (config(use_dora=True), "use_dora"),
        (config(modules_to_save=["lm_head"]), "modules_to_save"),
        (config(peft_type="LOHA"), "LOHA"),
        (config(r=3), "r = 3"),
        (drop_half, "q_proj|down_proj"),
        (damage, "cannot be read"),
        (infinite, "finite"),
        (lambda folder: (folder / WEIGHTS).unlink(), "no adapter"),
        (lambda folder: (folder / WEIGHTS).rename(folder / "adapters.npz"), "adapters.npz"),
    ],
)
def test_adapters_that_cannot_be_merged_are_refused(
    tmp_path: Path, model: str, change: Any, match: str
) -> None:
    lora = tmp_path / "lora"
    save_adapter(lora, model)
    change(lora)
    with pytest.raises(UserError, match=match) as raised:
        ModelSource.of(str(lora)).folder  # noqa: B018  (a property that merges)
    assert len(str(raised.value).splitlines()) == 1
    shown = medusa("chat", "--model", lora, "--prompt", "w1", exit_code=1).stderr
    assert "Traceback" not in shown
    assert not [path for path in (home() / "models").glob("adapter-*") if path.is_dir()]


def test_an_adapter_is_refused_for_another_shape_and_for_changes_of_embeddings(
    tmp_path: Path, model: str
) -> None:
    save_adapter(tmp_path / "lora", model)
    wider = save_model(tmp_path / "wider", hidden=96)
    for name, base, match in (
        ("lora", wider, "shape"),
        ("embeddings", model, "embed_tokens"),
        ("nested", str(tmp_path / "lora"), "an adapter"),
    ):
        folder = tmp_path / name
        if name == "embeddings":
            save_adapter(folder, model, target_modules=["q_proj", "embed_tokens"])
        elif name == "nested":
            shutil.copytree(tmp_path / "lora", folder)
        change_json(folder / adapter.CONFIG, base_model_name_or_path=base)
        with pytest.raises(UserError, match=match):
            ModelSource.of(str(folder)).folder  # noqa: B018  (a property that merges)
        change_json(folder / adapter.CONFIG, base_model_name_or_path=model)
