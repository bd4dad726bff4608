"""To and from the hub: exports are uploaded, and drafters downloaded, through huggingface_hub's own requests."""

import re
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml
from huggingface_hub import constants

from medusa_cli import Medusa
from medusa_cli.errors import UserError
from medusa_cli.files.hub import (
    gguf_files,
    go_offline_unless_reachable,
    hub_gguf,
    names_gguf,
)
from medusa_cli.files.model_source import ModelSource
from medusa_cli.model.load import load_network
from medusa_cli.runs.resolve import choose, find_drafter
from tests.helpers import medusa, medusa_json, save_model, save_run
from tests.hub import Hub, running_hub
from tests.test_gguf import VOCAB, write_gguf


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_model(tmp_path_factory.mktemp("model"), layers=2)


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Hub]:
    with running_hub(monkeypatch, tmp_path / "cache") as server:
        yield server


def push(folder: Path, *words: str, exit_code: int = 0) -> str:
    """Exports a run to the hub and returns what is printed."""
    command = ("export", "--run", f"{folder}/", "--push", "owner/heads", *words)
    return medusa(*command, exit_code=exit_code).output


@pytest.mark.slow
def test_a_pushed_drafter_chats_as_the_run_it_comes_from(
    hub: Hub, model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (Path(model) / "README.md").write_text("---\nlicense: mit\n---\n")
    run = save_run(tmp_path / "run", model, calibrated=True)
    push(run.path, "--to", "drafter")
    files = hub.repositories["owner/heads"]
    kept = {"tree.json": run.tree_path, "calibration.json": run.calibration_path}
    assert {name: files[name] for name in kept} == {
        name: path.read_bytes() for name, path in kept.items()
    }
    head = yaml.safe_load(files["README.md"].decode().split("---")[1])
    assert head["license"] == "mit"
    assert "medusa" in head["tags"]

    questions = tmp_path / "questions.jsonl"
    questions.write_text('{"prompt": "w1 w2 w3"}\n{"prompt": "w4 w5"}\n')
    monkeypatch.chdir(tmp_path)
    shared = ("bench", "--methods", "ar,medusa", "--tree", "static", "--dtype", "fp32")
    shared += ("--questions", questions, "--max-new-tokens", 8)
    of_run = medusa_json(*shared, "--run", f"{run.path}/")
    of_hub = medusa_json(*shared, "--drafter", "owner/heads")  # which names its model
    assert of_hub["methods"]["medusa"]["identical"] == len(of_hub["questions"])
    turns = [
        [answer["turns"] for answer in document["methods"]["medusa"]["answers"]]
        for document in (of_run, of_hub)
    ]
    assert turns[0] == turns[1]
    assert of_hub["drafting"]["medusa"]["nodes"] == of_run["drafting"]["medusa"]["nodes"] > 1


@pytest.mark.slow
def test_a_drafter_of_the_hub_works_from_the_cache_without_a_network(
    hub: Hub, model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    push(save_run(tmp_path / "run", model).path, "--to", "drafter")
    folder, home = find_drafter("owner/heads")
    assert home is not None
    assert home.tree_path.is_file()
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", "http://127.0.0.1:9")
    assert find_drafter("owner/heads")[0] == folder
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    assert choose(None, None, "owner/heads", None).model == model
    with pytest.raises(UserError, match="drafter"):
        find_drafter("owner/others")


def test_a_cached_model_asks_an_unreachable_hub_once(hub: Hub, model: str) -> None:
    hub.repositories["owner/model"] = {
        file.name: file.read_bytes() for file in Path(model).iterdir()
    }
    go_offline_unless_reachable.cache_clear()
    expected = load_network(ModelSource.of("owner/model"))[0].lm_head.weight
    assert not constants.HF_HUB_OFFLINE
    hub.fault = 503
    hub.requests.clear()
    go_offline_unless_reachable.cache_clear()
    again = load_network(ModelSource.of("owner/model"))[0].lm_head.weight
    assert constants.HF_HUB_OFFLINE
    assert len(hub.requests) == 1
    assert torch.equal(again, expected)
    Medusa.from_pretrained("owner/model", drafter=None, dtype="fp32").close()
    assert not constants.HF_HUB_OFFLINE  # the caller's client is as it was


@pytest.mark.quick("503")
@pytest.mark.parametrize("status", [429, 503])
def test_a_drafter_of_the_hub_works_from_the_cache_while_the_hub_is_overloaded(
    hub: Hub, model: str, tmp_path: Path, status: int
) -> None:
    push(save_run(tmp_path / "run", model).path, "--to", "drafter")
    folder = find_drafter("owner/heads")[0]
    hub.fault = status
    assert find_drafter("owner/heads")[0] == folder
    with pytest.raises(UserError, match="not on this machine"):
        find_drafter("owner/others")
    hub.fault = 403
    with pytest.raises(UserError, match="not given by the hub"):
        find_drafter("owner/heads")


def test_the_drafter_of_a_pushed_model_comes_without_the_models_weights(
    hub: Hub, model: str, tmp_path: Path
) -> None:
    push(save_run(tmp_path / "run", model).path, "--to", "hf")
    assert "model.safetensors" in hub.repositories["owner/heads"]
    choice = choose(None, None, "owner/heads", None)
    assert choice.drafter is not None
    assert choice.tree.file is not None
    assert not any("/model.safetensors" in request for request in hub.requests)
    assert "owner/heads" in hub.repositories["owner/heads"]["README.md"].decode()


def test_a_gguf_file_of_a_repository_is_a_model(
    hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "tiny.gguf"
    network = write_gguf(file)
    hub.repositories["owner/tiny-GGUF"] = {
        "tiny-Q4_0.gguf": b"GGUF",
        "tiny-Q8_0.gguf": file.read_bytes(),
        "mmproj-Q8_0.gguf": b"GGUF",
    }
    hub_gguf.cache_clear()
    loaded = Medusa.from_pretrained("owner/tiny-GGUF:q8_0", drafter=None, dtype="fp32")
    weight = torch.from_numpy(loaded.backbone.engine.model.head.embed(np.arange(VOCAB)))
    torch.testing.assert_close(weight, network.lm_head.weight.detach())
    assert not any("Q4_0.gguf" in request for request in hub.requests)

    hub_gguf.cache_clear()  # as in another process
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    assert ModelSource.of("owner/tiny-GGUF:Q8_0").gguf.read_bytes() == file.read_bytes()


@pytest.mark.slow
def test_all_files_of_a_split_model_are_downloaded(hub: Hub, tmp_path: Path) -> None:
    network = write_gguf(tmp_path / "tiny-q8_0.gguf", split_max_tensors=8)
    files = list(tmp_path.glob("*-of-*.gguf"))
    assert len(files) > 2
    others = {"other-q4_0-00001-of-00001.gguf": b"GGUF"}
    hub.repositories["owner/split-GGUF"] = {file.name: file.read_bytes() for file in files} | others
    hub_gguf.cache_clear()
    loaded = Medusa.from_pretrained("owner/split-GGUF:Q8_0", drafter=None, dtype="fp32")
    weight = torch.from_numpy(loaded.backbone.engine.model.head.embed(np.arange(VOCAB)))
    torch.testing.assert_close(weight, network.lm_head.weight.detach())
    assert not any("q4_0" in request for request in hub.requests)

    hub_gguf.cache_clear()  # as in another process, after a download that was cut off
    first = ModelSource.of("owner/split-GGUF:Q8_0").gguf
    first.with_name(max(file.name for file in files)).unlink()
    hub_gguf.cache_clear()
    assert ModelSource.of("owner/split-GGUF:Q8_0").gguf == first
    assert all(first.with_name(file.name).is_file() for file in files)


def test_what_a_repository_of_gguf_files_does_not_hold_is_named(hub: Hub) -> None:
    hub.repositories["owner/tiny-GGUF"] = {"a-Q8_0.gguf": b"GGUF", "b-Q8_0.gguf": b"GGUF"}
    for model, match in (
        ("owner/tiny-GGUF:Q4_K_M", "no GGUF files.*a-Q8_0.gguf"),
        ("owner/tiny-GGUF:Q8_0", "2 GGUF files"),
        ("owner/tiny-GGUF", "config.json.*owner/tiny-GGUF:a-Q8_0.gguf"),
        ("owner/none:Q8_0", "owner/none:Q8_0"),
    ):
        hub_gguf.cache_clear()
        shown = medusa("chat", "--model", model, "--prompt", "a", exit_code=1).stderr
        assert re.search(match, shown), shown


def test_names_of_gguf_files_are_told_from_paths_and_parts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "models").mkdir()
    (tmp_path / "models" / "llama:8b.gguf").touch()
    assert names_gguf("owner/name:Q8_0")
    for name in ("models/llama:8b.gguf", "./a/b:Q8_0", "owner/name", "owner/name:", "a:Q8_0"):
        assert not names_gguf(name), name
    whole = ["mixture-of-experts-Q4_K_M.gguf", "b/model.gguf"]
    parts = [f"model-q4_0-0000{number}-of-00002.gguf" for number in (1, 2)]
    others = ["lost-00002-of-00002.gguf", "half-00001-of-00002.gguf", "mmproj-Q8_0.gguf", "a.txt"]
    assert gguf_files([*whole, *parts, *others]) == sorted([*whole, parts[0]])


def test_what_the_hub_does_not_take_or_have_is_one_line(
    hub: Hub, model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = save_run(tmp_path / "run", model)
    with pytest.raises(UserError, match="owner/none"):
        find_drafter("owner/none")
    hub.repositories["owner/model"] = {"config.json": b'{"model_type": "llama"}'}
    with pytest.raises(UserError, match="owner/model"):
        find_drafter("owner/model")
    monkeypatch.setenv("HF_TOKEN", "hf_other")
    assert "--push" in push(run.path, "--to", "drafter", exit_code=1)
    assert "owner/heads" not in hub.repositories
    for words in (("--to", "data"), ("--to", "drafter", "--push", "a/b/c")):
        assert "--push" in push(run.path, *words, exit_code=2)
