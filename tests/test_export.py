"""Drafters in the layouts of serving engines, and back again."""

import json
import logging
import re
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from medusa_cli.drafters import Eagle, Firp, HydraHeads, MedusaHeads
from medusa_cli.drafters.io import save_drafter
from medusa_cli.engine import load_backbone
from medusa_cli.errors import UserError
from medusa_cli.export import medusa_format
from medusa_cli.export.eagle3_format import export_eagle3, served_model
from medusa_cli.export.folder import Source, find_source
from medusa_cli.export.importing import import_drafter
from medusa_cli.export.medusa_format import export_medusa
from medusa_cli.export.speculators_format import export_speculators
from medusa_cli.files.model_source import ModelSource
from medusa_cli.model import Backbone
from medusa_cli.runs.load_options import LoadOptions
from medusa_cli.runs.run import STAMP, Run, provenance, stamp_of
from tests.checkpoints import EAGLE, H, V, draft_of, eagle3, write
from tests.helpers import change_json, medusa, save_model, save_run
from tests.test_gguf import write_gguf


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_model(tmp_path_factory.mktemp("model"), layers=5)


def medusa_run(
    folder: Path, backbone: Backbone, vocabulary: str = "own", layers: int = 2, **settings: Any
) -> Run:
    """Saves a run with random Medusa heads of a vocabulary."""
    run = save_run(folder, backbone.id)
    torch.manual_seed(2)
    ids = torch.randperm(V)[:24] if vocabulary == "draft" else None
    heads = MedusaHeads.create(backbone, 3, layers, vocabulary, ids, **settings)
    for weight in heads.parameters():
        weight.data += 0.1 * torch.randn_like(weight)
    save_drafter(heads, run.drafter_dir, provenance(backbone.identity))
    return run


@pytest.mark.slow
def test_size_of_heads_with_full_matrices_is_told_before_they_are_written(
    model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    backbone = load_backbone(model, LoadOptions(dtype="fp32"))
    run = medusa_run(tmp_path / "run", backbone, "draft")
    told: list[str] = []
    full_matrix = medusa_format._full_matrix
    monkeypatch.setattr(
        medusa_format, "_full_matrix", lambda *args: told.append(caplog.text) or full_matrix(*args)
    )
    with caplog.at_level(logging.INFO):
        export_medusa(find_source(str(run.path) + "/"), tmp_path / "out")
    file = tmp_path / "out" / MedusaHeads.weights_file
    figure = re.search(r"takes (\S+) GB", told[0])
    assert figure is not None
    assert float(figure[1]) * 1e9 == pytest.approx(file.stat().st_size, rel=0.1)


def eagle_run(folder: Path, model: str) -> Run:
    """Imports a random EAGLE-3 drafter into a run."""
    theirs = write(folder / "theirs", "model.safetensors", eagle3(EAGLE), EAGLE)
    return import_drafter(str(theirs), f"{folder}/run", model)[0]


def rows_run(folder: Path, backbone: Backbone) -> Run:
    """Saves a run with a random EAGLE drafter that scores with 24 rows of the model's lm_head."""
    run = save_run(folder, backbone.id)
    torch.manual_seed(2)
    ids = torch.randperm(V)[:24].sort().values
    drafter = Eagle.create(backbone, 3, 1, "draft", ids, matrices="none")
    for weight in drafter.parameters():
        weight.data += 0.1 * torch.randn_like(weight)
    save_drafter(drafter, run.drafter_dir, provenance(backbone.identity))
    return run


def source_of(run: Run) -> Source:
    return find_source(f"{run.path}/")


def weights_of(folder: Path) -> dict[str, Tensor]:
    [path] = folder.glob("*.safetensors")
    return load_file(path)


def same(tensors: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    """Returns True if two files hold the same names, types and bits."""
    return tensors.keys() == other.keys() and all(
        tensors[name].dtype == other[name].dtype and torch.equal(tensors[name], other[name])
        for name in tensors
    )


def draft_tokens(run: Run, backbone: Backbone) -> list[int]:
    """Returns what the run's drafter drafts after some states."""
    return draft_of(run.drafter_dir, backbone)[0]


@pytest.mark.quick("shared-settings4")
@pytest.mark.parametrize(
    ("vocabulary", "settings"),
    [
        ("own", {}),
        ("own", {"matrices": "one"}),
        ("draft", {}),
        ("draft", {"matrices": "one", "layers": 1}),
        ("shared", {}),
    ],
)
def test_medusa_heads_are_written_for_engines_and_come_back(
    tmp_path: Path, model: str, backbone: Backbone, vocabulary: str, settings: dict[str, Any]
) -> None:
    run, layers = (
        medusa_run(tmp_path / "run", backbone, vocabulary, **settings),
        settings.get("layers", 2),
    )
    launch, _ = export_medusa(source_of(run), tmp_path / "out")
    tensors = load_file(tmp_path / "out" / "medusa_lm_head.safetensors")
    blocks = {
        f"{k}.{layer}.linear.{end}"
        for k in range(3)
        for layer in range(layers)
        for end in ("weight", "bias")
    }
    matrices = {f"{k}.{layers}.weight" for k in range(3)} if vocabulary != "shared" else set()
    assert tensors.keys() == blocks | matrices
    assert all(tensors[matrix].shape == (V, H) for matrix in matrices)
    assert json.loads((tmp_path / "out" / "config.json").read_text()) == {
        "base_model_name_or_path": model,
        "model_type": "medusa",
        "medusa_num_heads": 3,
        "medusa_num_layers": layers,
        "hidden_size": H,
        "vocab_size": V,
        "medusa_fc_bias": True,
    }
    assert '"num_speculative_tokens": 3' in launch[0]
    back = import_drafter(str(tmp_path / "out"), f"{tmp_path}/back")[0]
    assert same(weights_of(back.drafter_dir), tensors)
    if not settings and vocabulary != "draft":
        assert same(tensors, weights_of(run.drafter_dir))
    assert draft_tokens(back, backbone) == draft_tokens(run, backbone)
    if vocabulary == "draft":
        narrow, last = weights_of(run.drafter_dir), f"{0 if settings else 2}.{layers}.weight"
        assert torch.equal(tensors[f"2.{layers}.weight"][narrow["draft_ids"].long()], narrow[last])


def test_no_token_outside_the_draft_vocabulary_is_the_likeliest(
    tmp_path: Path, backbone: Backbone
) -> None:
    run = medusa_run(tmp_path / "run", backbone, "draft")
    weights = weights_of(run.drafter_dir)
    weights["0.2.weight"] += 2  # so that some states have no logit above 0
    save_file(weights, run.drafter_dir / MedusaHeads.weights_file)
    export_medusa(source_of(run), tmp_path / "out")
    logits = (0.2 * torch.randn(500, H) - 1) @ weights_of(tmp_path / "out")["0.2.weight"].float().T
    ids = weights["draft_ids"].long()
    assert (logits[:, ids] < 0).all()
    assert torch.isin(logits.argmax(1), ids).all()


@pytest.mark.quick("hf-firp", "speculators-hydra")
@pytest.mark.parametrize(
    ("format", "kind"),
    [
        ("medusa", "hydra"),
        ("medusa", "conditional"),
        ("eagle3", "hydra"),
        ("speculators", "hydra"),
        ("hf", "firp"),
    ],
)
def test_what_a_layout_cannot_hold_is_refused(
    tmp_path: Path, model: str, backbone: Backbone, format: str, kind: str
) -> None:
    if kind == "conditional":
        run = medusa_run(tmp_path / "run", backbone, conditional=4)
    else:
        run = save_run(tmp_path / "run", model, kind=HydraHeads)
    if kind == "firp":
        save_drafter(
            Firp.create(backbone, 1, 1, "shared", layers=(1,)),
            run.drafter_dir,
            provenance(backbone.identity),
        )
    done = medusa(
        "export", "--to", format, "--run", f"{run.path}/", "--output", tmp_path / "out", exit_code=1
    )
    assert kind in done.stderr
    assert f"--to {format}" in done.stderr
    assert not (tmp_path / "out").exists()


def test_an_eagle3_folder_is_the_one_that_engines_read(tmp_path: Path, model: str) -> None:
    launch, notes = export_eagle3(source_of(eagle_run(tmp_path, model)), tmp_path / "out")
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    wanted = {
        **EAGLE,
        "num_key_value_heads": 4,
        "head_dim": 8,
        "tie_word_embeddings": False,
        "eagle_config": {
            "eagle_aux_hidden_state_layer_ids": [0, 1, 2],
            "use_aux_hidden_state": True,
        },
        "max_position_embeddings": 512,
        "torch_dtype": "bfloat16",
    }
    assert {key: config[key] for key in wanted} == wanted
    tensors = weights_of(tmp_path / "out")
    assert tensors["fc.weight"].shape == (H, 3 * H)
    assert tensors["midlayer.self_attn.k_proj.weight"].shape == (H, 2 * H)
    assert tensors["d2t"].dtype == torch.int64
    assert tensors["t2d"].dtype == torch.bool
    # target = i + d2t[i], in rising order
    assert torch.equal(tensors["t2d"].nonzero()[:, 0], torch.arange(24) + tensors["d2t"])
    assert len(launch) == 3
    assert not notes
    assert all(line in (tmp_path / "out" / "README.md").read_text() for line in launch)


def test_a_drafter_of_a_gguf_file_is_served_with_the_models_safetensors(tmp_path: Path) -> None:
    file = tmp_path / "model.gguf"
    write_gguf(file)
    origin = ModelSource.of(str(file))
    run = SimpleNamespace(adapter=None)
    source = SimpleNamespace(origin=origin, model=origin.name, run=run)
    model, notes = served_model(source)  # type: ignore[arg-type]
    assert model == "MODEL"
    assert str(file) in notes[0]


@pytest.mark.parametrize("left_out", ["eagle_config", "eagle_aux_hidden_state_layer_ids"])
def test_an_eagle3_drafter_comes_back_bit_for_bit(
    tmp_path: Path, model: str, backbone: Backbone, left_out: str
) -> None:
    run = eagle_run(tmp_path, model)
    export_eagle3(source_of(run), tmp_path / "out")
    # vLLM reads the other one, SGLang this one, or vice versa
    change_json(tmp_path / "out" / "config.json", lambda config: config.pop(left_out))
    back = import_drafter(str(tmp_path / "out"), f"{tmp_path}/back", model)[0]
    assert same(weights_of(back.drafter_dir), weights_of(run.drafter_dir))
    configs = [
        json.loads((folder.drafter_dir / "config.json").read_text()) for folder in (back, run)
    ]
    assert {**configs[0], "provenance": 0} == {**configs[1], "provenance": 0}
    assert draft_tokens(back, backbone) == draft_tokens(run, backbone)


def test_a_speculators_checkpoint_is_the_librarys_and_comes_back(
    tmp_path: Path, model: str, backbone: Backbone
) -> None:
    run = eagle_run(tmp_path, model)
    launch, notes = export_speculators(source_of(run), tmp_path / "out")
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    own = config["speculators_config"]
    assert config["speculators_model_type"] == own["algorithm"] == "eagle3"
    assert config["draft_vocab_size"] == 24
    assert own["verifier"] == {"name_or_path": model, "architectures": ["LlamaForCausalLM"]}
    assert own["default_proposal_method"] in [
        method["proposal_type"] for method in own["proposal_methods"]
    ]
    assert config["eagle_aux_hidden_state_layer_ids"] == [1, 2, 3]
    assert config["norm_before_residual"] is False
    layer = config["transformer_layer_config"]
    assert (layer["model_type"], layer["hidden_size"], layer["vocab_size"]) == ("llama", H, V)
    tensors = weights_of(tmp_path / "out")
    shapes = {
        "fc.weight": (H, 3 * H),
        "lm_head.weight": (24, H),
        "layers.0.self_attn.q_proj.weight": (H, 2 * H),
    }
    shapes |= {"layers.0.hidden_norm.weight": (H,), "norm.weight": (H,), "d2t": (24,), "t2d": (V,)}
    assert {name: tuple(tensors[name].shape) for name in shapes} == shapes
    assert all(str(tmp_path / "out") in line for line in launch)
    assert not notes
    # Its config names the model.
    back = import_drafter(str(tmp_path / "out"), f"{tmp_path}/back", None)[0]
    assert same(weights_of(back.drafter_dir), weights_of(run.drafter_dir))
    assert draft_tokens(back, backbone) == draft_tokens(run, backbone)


def test_a_model_of_other_sizes_than_the_drafters_is_refused(tmp_path: Path, model: str) -> None:
    run = save_run(tmp_path / "run", model)
    other = save_model(tmp_path / "other", layers=3)
    with pytest.raises(UserError, match="the drafter in"):
        find_source(f"{run.path}/", other)
    tuned = save_model(tmp_path / "tuned", layers=5, seed=9)
    assert find_source(f"{run.path}/", tuned).model == tuned


def test_a_damaged_drafter_is_not_exported(tmp_path: Path, model: str) -> None:
    run = eagle_run(tmp_path, model)
    weights = weights_of(run.drafter_dir)
    del weights["norm.weight"]
    save_file(weights, run.drafter_dir / "model.safetensors")
    with pytest.raises(UserError, match="norm.weight"):
        source_of(run)


def test_the_newest_report_on_this_drafter_is_found(
    tmp_path: Path, model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    run = save_run(tmp_path / "x1", model)
    # `bench` writes its reports on a shipped drafter to a run of the model's name.
    monkeypatch.setattr(Run, "pretrained", classmethod(lambda cls, name: run))
    folder = tmp_path / "runs" / "x1" / "bench"
    folder.mkdir(parents=True)
    for name, stamp in (
        ("2026-01", "old"),
        ("2026-02", stamp_of(run.drafter_dir)),
        ("2026-03", "another drafter"),
    ):
        (folder / f"{name}.json").write_text(json.dumps({"drafting": {"medusa": {STAMP: stamp}}}))
        (folder / f"{name}.md").write_text(f"the table of {name}")
    source = Source(run, ModelSource.of(str(run.path)), "medusa", None, {})
    assert source.bench == "the table of 2026-02"


def test_a_failed_write_leaves_the_earlier_export(
    tmp_path: Path, backbone: Backbone, monkeypatch
) -> None:
    source = source_of(medusa_run(tmp_path / "run", backbone))
    export_medusa(source, tmp_path / "out")
    before = (tmp_path / "out" / "SHA256SUMS").read_text()

    def fail(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("medusa_cli.export.folder.write_json", fail)
    with pytest.raises(OSError, match="No space"):
        export_medusa(source, tmp_path / "out", overwrite=True)
    assert (tmp_path / "out" / "SHA256SUMS").read_text() == before
    assert not [path.name for path in tmp_path.iterdir() if path.name.startswith(".")]


@pytest.mark.quick("export_eagle3")
@pytest.mark.parametrize("export", [export_eagle3, export_speculators])
def test_an_eagle_without_a_matrix_is_written_with_its_rows_of_the_lm_head(
    tmp_path: Path, model: str, backbone: Backbone, export: Callable[..., Any]
) -> None:
    run = rows_run(tmp_path / "rows", backbone)
    export(source_of(run), tmp_path / "out")
    back = import_drafter(str(tmp_path / "out"), f"{tmp_path}/back", model)[0]
    config = json.loads((back.drafter_dir / "config.json").read_text())
    assert (config["matrices"], config["draft_vocab_size"]) == ("one", 24)
    assert draft_tokens(back, backbone) == draft_tokens(run, backbone)


def test_rows_of_an_lm_head_with_a_bias_are_refused(
    tmp_path: Path, backbone: Backbone, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = rows_run(tmp_path / "rows", backbone)
    rows = Backbone.lm_head_rows
    monkeypatch.setattr(
        Backbone, "lm_head_rows", lambda self, ids: (rows(self, ids)[0], torch.ones(len(ids)))
    )
    with pytest.raises(UserError, match="bias"):
        export_eagle3(source_of(run), tmp_path / "out")
