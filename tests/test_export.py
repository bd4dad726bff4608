"""Drafters in the layouts of serving engines, and back again."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from medusa_cli.drafters import Eagle, HydraHeads, MedusaHeads, load_drafter
from medusa_cli.drafters.base import NewTokens
from medusa_cli.engine import load_backbone
from medusa_cli.errors import UserError
from medusa_cli.export.eagle3_format import export_eagle3
from medusa_cli.export.folder import Source, find_source
from medusa_cli.export.incoming import import_drafter
from medusa_cli.export.medusa_format import export_medusa
from medusa_cli.runs.accuracies import STAMP, stamp_of
from medusa_cli.runs.resolve import LoadOptions
from medusa_cli.runs.run import Run, provenance
from tests.checkpoints import EAGLE, H, V, eagle3, write
from tests.helpers import TREE, drafted, medusa, save_model, save_run

CONFIG_KEYS = {
    *("base_model_name_or_path", "model_type", "medusa_num_heads", "medusa_num_layers"),
    *("hidden_size", "vocab_size", "medusa_fc_bias"),
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_model(tmp_path_factory.mktemp("model"), layers=5)


def medusa_run(folder: Path, model: str, vocabulary: str = "own", layers: int = 2, **settings) -> Run:
    """Saves a run with random Medusa heads of a vocabulary."""
    run = save_run(folder, model)
    backbone = load_backbone(model, LoadOptions(dtype="fp32", engine="eager"))
    torch.manual_seed(2)
    ids = torch.randperm(V)[:24] if vocabulary == "draft" else None
    heads = MedusaHeads.create(backbone, 3, layers, vocabulary, ids, **settings)
    for weight in heads.parameters():
        weight.data += 0.1 * torch.randn_like(weight)
    heads.save(run.drafter_dir, provenance(backbone.identity))
    return run


def weights_of(run: Run, name: str = "medusa_lm_head.safetensors") -> dict[str, Tensor]:
    return load_file(run.drafter_dir / name)


def same(tensors: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    """Returns True if two files hold the same names, types and bits."""
    return tensors.keys() == other.keys() and all(
        tensors[name].dtype == other[name].dtype and torch.equal(tensors[name], other[name]) for name in tensors
    )


def draft_tokens(run: Run, model: str) -> list[int]:
    """Returns what the run's drafter drafts after some states."""
    backbone = load_backbone(model, LoadOptions(dtype="fp32", engine="eager"))
    drafter = load_drafter(run.drafter_dir, backbone)
    torch.manual_seed(8)
    new = NewTokens(torch.tensor([5]), torch.randn(1, backbone.hidden_size * len(drafter.taps)), 11, 0)
    return drafted(drafter, backbone, new, TREE).tokens.tolist()


SHAPES = {
    "own": {"vocabulary": "own"},
    "one matrix": {"vocabulary": "own", "matrices": "one"},
    "draft": {"vocabulary": "draft"},
    "draft, one matrix": {"vocabulary": "draft", "matrices": "one", "layers": 1},
    "shared": {"vocabulary": "shared"},
    "low rank": {"vocabulary": "own", "rank": 8},
    "draft, one matrix of low rank": {"vocabulary": "draft", "matrices": "one", "rank": 8},
}


@pytest.mark.parametrize("name", SHAPES)
def test_medusa_heads_have_the_layout_that_engines_read_and_come_back(tmp_path: Path, model: str, name: str) -> None:
    run, layers = medusa_run(tmp_path / "run", model, **SHAPES[name]), SHAPES[name].get("layers", 2)
    launch, _ = export_medusa(find_source(f"{run.path}/"), tmp_path / "out")
    tensors = load_file(tmp_path / "out" / "medusa_lm_head.safetensors")
    blocks = {f"{k}.{layer}.linear.{end}" for k in range(3) for layer in range(layers) for end in ("weight", "bias")}
    matrices = {f"{k}.{layers}.weight" for k in range(3)} if name != "shared" else set()
    assert tensors.keys() == blocks | matrices
    assert all(tensors[matrix].shape == (V, H) for matrix in matrices)
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config.keys() == CONFIG_KEYS and config["medusa_fc_bias"] is True
    assert '"num_speculative_tokens": 3' in launch[0]
    back = import_drafter(str(tmp_path / "out"), f"{tmp_path}/back").run
    assert same(weights_of(back), tensors)
    if name in ("own", "shared"):
        assert same(tensors, weights_of(run))
    if "draft" not in name:  # the rows of zeros of a draft vocabulary may rank above its least likely tokens
        assert draft_tokens(back, model) == draft_tokens(run, model)


def test_a_widened_low_rank_matrix_has_its_rows_in_place_and_zeros_elsewhere(tmp_path: Path, model: str) -> None:
    run = medusa_run(tmp_path / "run", model, "draft", rank=8)
    export_medusa(find_source(f"{run.path}/"), tmp_path / "out")
    narrow = weights_of(run)
    wide, ids = load_file(tmp_path / "out" / "medusa_lm_head.safetensors")["2.2.weight"], narrow["draft_ids"].long()
    product = narrow["2.2.weight"].float() @ narrow["2.2.factor"].float()
    assert torch.equal(wide[ids], product.to(torch.bfloat16))
    outside = torch.ones(V, dtype=torch.bool).index_fill(0, ids, False)
    assert not wide[outside].any() and outside.sum() == V - 24


def test_a_conditional_bias_is_refused(tmp_path: Path, model: str) -> None:
    run = medusa_run(tmp_path / "run", model, conditional=4)
    with pytest.raises(UserError, match="drafter.conditional"):
        export_medusa(find_source(f"{run.path}/"), tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_heads_for_another_model_are_refused(tmp_path: Path, model: str) -> None:
    run = medusa_run(tmp_path / "run", model)
    export_medusa(find_source(f"{run.path}/"), tmp_path / "out")
    wider = save_model(tmp_path / "wider", hidden=48)
    with pytest.raises(UserError, match="0.0.linear.weight is 32x32 instead of 48x48"):
        import_drafter(str(tmp_path / "out"), f"{tmp_path}/back", wider)


def test_other_kinds_are_refused(tmp_path: Path, model: str) -> None:
    run = save_run(tmp_path / "run", model, kind=HydraHeads)
    for format in ("medusa", "eagle3"):
        words = ["export", "--to", format, "--run", f"{run.path}/", "--output", tmp_path / "out"]
        done = medusa(*words, exit_code=1)
        assert "hydra" in done.stderr and f"--to {format}" in done.stderr
    assert not (tmp_path / "out").exists()


def eagle_run(folder: Path, model: str, config: dict = EAGLE) -> Run:
    """Imports a random EAGLE-3 drafter into a run."""
    tensors = eagle3(config)
    theirs = write(folder.with_name("theirs"), "model.safetensors", tensors, config)
    return import_drafter(str(theirs), str(folder), model).run


def test_an_eagle3_folder_is_the_one_that_engines_read(tmp_path: Path, model: str) -> None:
    run = eagle_run(tmp_path / "run", model)
    launch, notes = export_eagle3(find_source(f"{run.path}/"), tmp_path / "out")
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    wanted = {
        **EAGLE,
        "num_key_value_heads": 4,
        "head_dim": 8,
        "tie_word_embeddings": False,
        "eagle_config": {"eagle_aux_hidden_state_layer_ids": [0, 1, 2], "use_aux_hidden_state": True},
        "max_position_embeddings": 512,
        "torch_dtype": "bfloat16",
    }
    assert {key: config[key] for key in wanted} == wanted
    tensors = load_file(tmp_path / "out" / "model.safetensors")
    assert tensors["fc.weight"].shape == (H, 3 * H) and tensors["midlayer.self_attn.k_proj.weight"].shape == (H, 2 * H)
    assert tensors["d2t"].dtype == torch.int64 and tensors["t2d"].dtype == torch.bool
    # target = i + d2t[i], in rising order
    assert torch.equal(tensors["t2d"].nonzero()[:, 0], torch.arange(24) + tensors["d2t"])
    assert len(launch) == 3 and not notes
    assert all(line in (tmp_path / "out" / "README.md").read_text() for line in launch)


def test_an_eagle3_drafter_comes_back_bit_for_bit(tmp_path: Path, model: str) -> None:
    run = eagle_run(tmp_path / "run", model)
    export_eagle3(find_source(f"{run.path}/"), tmp_path / "out")
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    for keys in ("eagle_config", "eagle_aux_hidden_state_layer_ids"):  # what vLLM reads, and what SGLang reads
        (tmp_path / "out" / "config.json").write_text(json.dumps({k: v for k, v in config.items() if k != keys}))
        back = import_drafter(str(tmp_path / "out"), f"{tmp_path}/{keys}", model).run
        assert same(weights_of(back, "model.safetensors"), weights_of(run, "model.safetensors"))
        configs = [json.loads((found.drafter_dir / "config.json").read_text()) for found in (back, run)]
        assert {**configs[0], "provenance": 0} == {**configs[1], "provenance": 0}
        assert draft_tokens(back, model) == draft_tokens(run, model)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (lambda weights, config: weights.pop("norm.weight"), "norm.weight"),
        (lambda weights, config: weights.update({"fc.weight": torch.zeros(H, H)}), "fc.weight"),
        (lambda weights, config: config.pop("hidden_size"), "hidden_size"),
    ],
    ids=["missing", "width", "config"],
)
def test_a_damaged_drafter_is_not_exported(tmp_path: Path, model: str, change, named: str) -> None:
    run = eagle_run(tmp_path / "run", model)
    path, weights = run.drafter_dir / "config.json", weights_of(run, "model.safetensors")
    config = json.loads(path.read_text())
    change(weights, config)
    save_file(weights, run.drafter_dir / "model.safetensors")
    path.write_text(json.dumps(config))
    with pytest.raises(UserError, match=named):
        find_source(f"{run.path}/")


def test_two_aux_layers_are_noted_for_llama_cpp(tmp_path: Path, model: str) -> None:
    run = eagle_run(tmp_path / "run", model)
    source = find_source(f"{run.path}/")
    object.__setattr__(source.config, "taps", (1, 2))
    assert len(export_eagle3(source, tmp_path / "out")[1]) == 1


def test_a_trained_eagle_drafter_is_exported_from_its_run(tmp_path: Path, model: str) -> None:
    run = save_run(tmp_path / "run", model, kind=Eagle)
    export_eagle3(find_source(f"{run.path}/"), tmp_path / "out")
    back = import_drafter(str(tmp_path / "out"), f"{tmp_path}/back", model).run
    assert draft_tokens(back, model) == draft_tokens(run, model)


def test_the_report_on_a_linked_model_is_found_where_bench_leaves_it(
    tmp_path: Path, model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    linked = tmp_path / "mine"
    linked.symlink_to(save_run(tmp_path / "x1", model).path)
    report = tmp_path / "runs" / "mine" / "bench" / "2026-01.json"
    report.parent.mkdir(parents=True)
    report.write_text(json.dumps({"drafting": {"medusa": {STAMP: stamp_of(linked / "drafter")}}}))
    report.with_suffix(".md").write_text("the table")
    assert Source(Run(linked), str(linked), "medusa", None, {}).bench == "the table"


def test_a_failed_write_leaves_the_earlier_export(tmp_path: Path, model: str, monkeypatch) -> None:
    run = medusa_run(tmp_path / "run", model)
    export_medusa(find_source(f"{run.path}/"), tmp_path / "out")
    before = (tmp_path / "out" / "SHA256SUMS").read_text()

    def fail(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("medusa_cli.export.medusa_format.write_json", fail)
    with pytest.raises(OSError, match="No space"):
        export_medusa(find_source(f"{run.path}/"), tmp_path / "out", overwrite=True)
    assert (tmp_path / "out" / "SHA256SUMS").read_text() == before
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".")] == []
