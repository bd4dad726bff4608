"""Checkpoints that were made to harm, or damaged: `medusa import` ends in one line and leaves no drafter."""

import json
import os
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor
from typer.testing import CliRunner, Result

from medusa_cli.cli import app
from medusa_cli.errors import UserError
from medusa_cli.exporting.incoming import import_drafter
from medusa_cli.exporting.medusa import BESIDE, export_medusa
from medusa_cli.exporting.source import find_source
from medusa_cli.exporting.tensors import read_tensors
from tests.checkpoints import EAGLE, H, V, eagle3, hydra_heads, medusa_heads, write
from tests.runs import save_model, save_run
from tests.test_lock import held

FIRST, WEIGHTS = "0.0.linear.weight", "medusa_lm_head.safetensors"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_model(tmp_path_factory.mktemp("model"), layers=5)


def taken(folder: Path, model: str, run: Path) -> Result:
    return CliRunner().invoke(app, ["import", str(folder), "--model", model, "--run", str(run)])


def refused(folder: Path, model: str, part: str) -> None:
    """The import of a folder ends in one line that says so, and no drafter is there."""
    done = taken(folder, model, folder.parent / "run")
    assert done.exit_code == 1, (done.exception, done.output)
    assert "internal error" not in done.stderr and done.stderr.count("error: ") == 1 and part in done.stderr
    assert not (folder.parent / "run" / "drafter").exists()


DAMAGE: dict[str, tuple[Callable[[dict[str, Tensor]], Any], str]] = {
    "a billion heads": (lambda one: one.update({"1000000000.0.linear.weight": torch.zeros(H, H)}), "1000000000.0"),
    "a head of many digits": (lambda one: one.update({"9" * 5000 + ".0.linear.weight": torch.zeros(1)}), "999"),
    "a weight without axes": (lambda one: one.update({FIRST: torch.tensor(1.0)}), "a number where 32x32 is wanted"),
    "whole numbers": (lambda one: one.update({FIRST: torch.ones(H, H, dtype=torch.int8)}), "whole numbers"),
    "eight-bit floats": (lambda one: one.update({FIRST: torch.ones(H, H).to(torch.float8_e4m3fn)}), "no plain type"),
    "a sparse one": (lambda one: one.update({FIRST: torch.ones(H, H).to_sparse()}), "no plain type"),
    "one number as a billion": (lambda one: one.update({FIRST: torch.zeros(1).expand(10**12)}), "1000000000000"),
    "a map without axes": (lambda one: one.update({"token_map": torch.tensor(3)}), "token_map"),
    "a map outside": (lambda one: one.update({"token_map": torch.arange(V) + 1}), "token_map"),
    "a map of one token": (lambda one: one.update({"token_map": torch.ones(V, dtype=torch.int64)}), "token_map"),
    "a map of floats": (lambda one: one.update({"token_map": torch.arange(V) * 1.0}), "token_map"),
    "no name": (lambda one: one.update({"": torch.zeros(1)}), "unknown"),
}


@pytest.mark.parametrize("name", DAMAGE)
def test_tensors_that_cannot_be_are_named(tmp_path: Path, model: str, name: str) -> None:
    change, part = DAMAGE[name]
    tensors = medusa_heads(dtype=torch.float32)
    change(tensors)
    (tmp_path / "theirs").mkdir()
    torch.save(tensors, tmp_path / "theirs" / "medusa_lm_head.pt")
    refused(tmp_path / "theirs", model, part)


def test_heads_of_hydra_are_counted_within_bounds(tmp_path: Path, model: str) -> None:
    tensors = {**hydra_heads(), "hydra_mlp.4000000000.0.linear.weight": torch.zeros(1)}
    write(tmp_path / "theirs", "hydra_lm_head.pt", tensors, {"grounded_heads": True})
    refused(tmp_path / "theirs", model, "unknown hydra_mlp.4000000000.0.linear.weight")


@pytest.mark.parametrize(
    "change",
    [
        {"rope_theta": "x"},
        {"rope_theta": None, "rope_parameters": "x"},
        {"rms_norm_eps": [1]},
        {"num_attention_heads": 10**12},
        {"head_dim": -8},
        {"draft_vocab_size": 10**30},
        {"num_hidden_layers": "x"},
        {"eagle_aux_hidden_state_layer_ids": "abc"},
        {"speculators_config": {"proposal_methods": [{"speculative_tokens": 10**12}]}},
    ],
    ids=lambda change: next(iter(change)),
)
def test_a_config_of_eagle_that_cannot_be_is_refused(tmp_path: Path, model: str, change: dict[str, Any]) -> None:
    write(tmp_path / "theirs", "model.safetensors", eagle3(), {**EAGLE, **change})
    done = taken(tmp_path / "theirs", model, tmp_path / "run")
    assert "internal error" not in done.stderr, done.stderr
    if done.exit_code == 0:  # a nonsense that says nothing
        assert change.get("rope_parameters") == "x"
    else:
        assert done.exit_code == 1 and done.stderr.count("\n") == 1


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory, model: str) -> Path:
    """What `medusa export --to medusa` writes, calibration and tree among it."""
    folder = tmp_path_factory.mktemp("exported")
    run = save_run(folder / "run", model, calibrated=True)
    return export_medusa(find_source(f"{run.path}/"), folder / "theirs").folder


BESIDES: dict[str, tuple[dict[str, Any], str]] = {
    "calibration of words": ({"calibration": {"accuracies": "x"}}, "the calibration in"),
    "calibration without heads": ({"calibration": {"accuracies": []}}, "the calibration in"),
    "tree of words": ({"tree": {"parents": "x"}}, "the tree in"),
    "config of words": ({"config": "x"}, "does not belong"),
    "one matrix": ({"config": {"matrices": "one"}}, "does not belong"),
    "a draft vocabulary": ({"config": {"vocabulary": "draft"}, "draft_ids": [-1]}, "does not belong"),
}


@pytest.mark.parametrize("name", BESIDES)
def test_what_lies_beside_is_checked(tmp_path: Path, model: str, exported: Path, name: str) -> None:
    change, part = BESIDES[name]
    theirs = tmp_path / "theirs"
    theirs.mkdir()
    for one in exported.iterdir():
        (theirs / one.name).write_bytes(one.read_bytes())
    beside = json.loads((theirs / BESIDE).read_text())
    (theirs / BESIDE).write_text(json.dumps({**beside, **change}))
    refused(theirs, model, part)


def test_another_kind_and_another_maker_cannot_be_put_on(tmp_path: Path, model: str, exported: Path) -> None:
    theirs = tmp_path / "theirs"
    theirs.mkdir()
    for one in exported.iterdir():
        (theirs / one.name).write_bytes(one.read_bytes())
    beside = json.loads((theirs / BESIDE).read_text())
    beside["config"] |= {"drafter": "hydra", "provenance": {"backbone": "x"}}
    (theirs / BESIDE).write_text(json.dumps(beside))
    done = import_drafter(str(theirs), f"{tmp_path}/run", model)
    config = json.loads((done.run.drafter_dir / "config.json").read_text())
    assert config["drafter"] == "medusa" and config["provenance"]["backbone"]["id"] == model


def test_tied_matrices_become_one_each(tmp_path: Path, model: str) -> None:
    """As a state dict of heads that share a matrix is: several names for one storage."""
    tensors = medusa_heads()
    for head in (1, 2):
        tensors[f"{head}.2.weight"] = tensors["0.2.weight"]
    (tmp_path / "theirs").mkdir()
    torch.save(tensors, tmp_path / "theirs" / "medusa_lm_head.pt")
    found = read_tensors(import_drafter(str(tmp_path / "theirs"), f"{tmp_path}/run", model).run.drafter_dir / WEIGHTS)
    assert torch.equal(found["2.2.weight"].half(), tensors["0.2.weight"])


def test_a_file_that_unpacks_to_more_than_it_is_is_refused(tmp_path: Path) -> None:
    torch.save({FIRST: torch.zeros(4 << 20)}, tmp_path / "plain.pt")
    with (
        zipfile.ZipFile(tmp_path / "plain.pt") as plain,
        zipfile.ZipFile(tmp_path / "bomb.pt", "w", zipfile.ZIP_DEFLATED) as bomb,
    ):
        for one in plain.infolist():
            bomb.writestr(one.filename, plain.read(one))
    assert (tmp_path / "bomb.pt").stat().st_size < 1 << 20
    with pytest.raises(UserError, match="packed"):
        read_tensors(tmp_path / "bomb.pt")


def test_links_of_the_hubs_cache_are_followed_and_no_others(tmp_path: Path, model: str) -> None:
    cache = tmp_path / "models--a--b"
    folder = cache / "snapshots" / "0123"
    (cache / "blobs").mkdir(parents=True)
    folder.mkdir(parents=True)
    save_file(medusa_heads(), cache / "blobs" / "sum")
    (folder / "part.safetensors").symlink_to(cache / "blobs" / "sum")
    index = {"weight_map": {FIRST: "part.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    assert import_drafter(str(folder), f"{tmp_path}/run", model).heads == 3
    (folder / "part.safetensors").unlink()
    save_file(medusa_heads(), tmp_path / "elsewhere")
    (folder / "part.safetensors").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(UserError, match="lies outside"):
        import_drafter(str(folder), f"{tmp_path}/other", model)


def test_headers_that_claim_too_much_and_pipes_are_refused_at_once(tmp_path: Path, model: str) -> None:
    theirs = tmp_path / "theirs"
    theirs.mkdir()
    for data in ((1 << 62).to_bytes(8, "little") + b"{", (64).to_bytes(8, "little") + b"{" * 64, b""):
        (theirs / "medusa_lm_head.safetensors").write_bytes(data)
        refused(theirs, model, "no whole safetensors file")
    (theirs / "medusa_lm_head.safetensors").unlink()
    os.mkfifo(theirs / "medusa_lm_head.safetensors")
    refused(theirs, model, "holds no weights")
    os.mkfifo(theirs / "config.json")
    refused(theirs, model, "holds no weights")


def test_a_run_that_is_being_written_is_not_imported_into(tmp_path: Path, model: str) -> None:
    write(tmp_path / "theirs", "medusa_lm_head.pt", medusa_heads(), {})
    (tmp_path / "run").mkdir()
    with held(tmp_path / "run"):
        refused(tmp_path / "theirs", model, "is being written by `medusa distill`")
    assert taken(tmp_path / "theirs", model, tmp_path / "run").exit_code == 0
