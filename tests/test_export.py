"""Drafters in the layouts of serving engines, and back again bit for bit."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from typer.testing import CliRunner

from medusa_cli.cli import app
from medusa_cli.drafters import DRAFTERS, HydraHeads, MedusaHeads
from medusa_cli.engines import load_backbone
from medusa_cli.errors import UserError
from medusa_cli.exporting.eagle3 import export_eagle3, import_eagle3
from medusa_cli.exporting.imported import Base
from medusa_cli.exporting.incoming import import_drafter
from medusa_cli.exporting.medusa import export_medusa
from medusa_cli.exporting.source import Source, find_source
from medusa_cli.runs.accuracies import STAMP, stamp_of
from medusa_cli.runs.run import Run, provenance
from tests.checkpoints import EAGLE, H, V, eagle3
from tests.runs import save_model, save_run

VLLM = {"base_model_name_or_path", "model_type", "medusa_num_heads", "medusa_num_layers", "hidden_size", "vocab_size"}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_model(tmp_path_factory.mktemp("model"), layers=5)


def medusa_run(folder: Path, model: str, vocabulary: str = "own", layers: int = 2, **settings) -> Run:
    """A run with random Medusa heads of a vocabulary, a calibration and a tree."""
    run = save_run(folder, model, calibrated=True)
    backbone = load_backbone(model, dtype="fp32", engine="eager")
    torch.manual_seed(2)
    ids = torch.randperm(V)[:24] if vocabulary == "draft" else None
    heads = MedusaHeads.create(backbone, 3, layers, vocabulary, ids, **settings)
    for weight in heads.parameters():
        weight.data += 0.1 * torch.randn_like(weight)
    heads.save(run.drafter_dir, provenance(backbone.identity))
    return run


def same(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    """Whether two files hold the same names, types and bits."""
    return one.keys() == other.keys() and all(
        one[name].dtype == other[name].dtype and torch.equal(one[name], other[name]) for name in one
    )


SHAPES = {
    "own": {"vocabulary": "own"},
    "one matrix": {"vocabulary": "own", "matrices": "one"},
    "draft": {"vocabulary": "draft"},
    "draft, one matrix": {"vocabulary": "draft", "matrices": "one", "layers": 1},
    "shared": {"vocabulary": "shared"},
    "low rank": {"vocabulary": "own", "rank": 8},
    "draft, low rank": {"vocabulary": "draft", "rank": 8},
    "draft, one matrix of low rank": {"vocabulary": "draft", "matrices": "one", "rank": 8},
}


@pytest.mark.parametrize("name", SHAPES)
def test_what_is_exported_comes_back_bit_for_bit(tmp_path: Path, model: str, name: str) -> None:
    run = medusa_run(tmp_path / "run", model, **SHAPES[name])
    export_medusa(find_source(f"{run.path}/"), tmp_path / "out")
    back = import_drafter(str(tmp_path / "out"), f"{tmp_path}/back").run
    kept, before = (load_file(one.drafter_dir / "medusa_lm_head.safetensors") for one in (back, run))
    assert same(kept, before)
    configs = [json.loads((one.drafter_dir / "config.json").read_text()) for one in (back, run)]
    assert configs[0] == configs[1]
    assert stamp_of(back.drafter_dir) == stamp_of(run.drafter_dir)  # so calibration and tree are known as its own
    for path in ("calibration_path", "tree_path"):
        assert json.loads(getattr(back, path).read_text()) == json.loads(getattr(run, path).read_text())


@pytest.mark.parametrize("name", ["own", "draft, one matrix"])
def test_the_layout_is_the_one_that_engines_read(tmp_path: Path, model: str, name: str) -> None:
    run = medusa_run(tmp_path / "run", model, **SHAPES[name])
    done = export_medusa(find_source(f"{run.path}/"), tmp_path / "out")
    layers = SHAPES[name].get("layers", 2)
    found = load_file(tmp_path / "out" / "medusa_lm_head.safetensors")
    expected = {f"{k}.{layer}.linear.{end}" for k in range(3) for layer in range(layers) for end in ("weight", "bias")}
    assert found.keys() == expected | {f"{k}.{layers}.weight" for k in range(3)}
    assert all(found[f"{k}.{layers}.weight"].shape == (V, H) for k in range(3))
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config.keys() == VLLM | {"medusa_fc_bias"}
    assert config["medusa_fc_bias"] is True
    assert f'"num_speculative_tokens": {3}' in done.launch[0]


def test_a_widened_draft_vocabulary_has_its_rows_in_place_and_zeros_elsewhere(tmp_path: Path, model: str) -> None:
    run = medusa_run(tmp_path / "run", model, "draft")
    export_medusa(find_source(f"{run.path}/"), tmp_path / "out")
    narrow = load_file(run.drafter_dir / "medusa_lm_head.safetensors")
    wide = load_file(tmp_path / "out" / "medusa_lm_head.safetensors")["1.2.weight"]
    ids = narrow["draft_ids"].long()
    assert torch.equal(wide[ids], narrow["1.2.weight"])
    outside = torch.ones(V, dtype=torch.bool).index_fill(0, ids, False)
    assert not wide[outside].any() and outside.sum() == V - 24


def test_matrices_of_low_rank_are_multiplied_out(tmp_path: Path, model: str) -> None:
    run = medusa_run(tmp_path / "run", model, "draft", rank=8)
    export_medusa(find_source(f"{run.path}/"), tmp_path / "out")
    narrow = load_file(run.drafter_dir / "medusa_lm_head.safetensors")
    wide = load_file(tmp_path / "out" / "medusa_lm_head.safetensors")["2.2.weight"]
    product = narrow["2.2.weight"].float() @ narrow["2.2.factor"].float()
    assert torch.equal(wide[narrow["draft_ids"].long()], product.to(torch.bfloat16))
    # Engines see these alone, and so does an import of what engines see.
    (tmp_path / "out" / "medusa_cli.json").unlink()
    back = import_drafter(str(tmp_path / "out"), f"{tmp_path}/back").run
    assert torch.equal(load_file(back.drafter_dir / "medusa_lm_head.safetensors")["2.2.weight"], wide)


def test_factors_of_other_heads_are_refused(tmp_path: Path, model: str) -> None:
    run = medusa_run(tmp_path / "run", model, rank=8)
    export_medusa(find_source(f"{run.path}/"), tmp_path / "out")
    factors = load_file(tmp_path / "out" / "medusa_cli.safetensors")
    save_file({name: one + 1 for name, one in factors.items()}, tmp_path / "out" / "medusa_cli.safetensors")
    with pytest.raises(UserError, match="medusa_cli.safetensors does not belong to these heads"):
        import_drafter(str(tmp_path / "out"), f"{tmp_path}/back")


def test_guesses_that_lean_on_the_token_before_have_no_place(tmp_path: Path, model: str) -> None:
    run = medusa_run(tmp_path / "run", model, conditional=4)
    with pytest.raises(UserError, match="lean on the token drafted before \\(drafter.conditional\\)"):
        export_medusa(find_source(f"{run.path}/"), tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_what_lies_beside_other_heads_is_refused(tmp_path: Path, model: str) -> None:
    run = medusa_run(tmp_path / "run", model, "draft")
    out = tmp_path / "out"
    export_medusa(find_source(f"{run.path}/"), out)
    beside = json.loads((out / "medusa_cli.json").read_text())
    for ids in (beside["draft_ids"][:-1], [*beside["draft_ids"][:-1], V], [-1, *beside["draft_ids"][1:]], "no list"):
        (out / "medusa_cli.json").write_text(json.dumps({**beside, "draft_ids": ids}))
        with pytest.raises(UserError, match="does not belong to these heads"):
            import_drafter(str(out), f"{tmp_path}/back")
    (out / "medusa_cli.json").unlink()
    back = import_drafter(str(out), f"{tmp_path}/back").run
    assert json.loads((back.drafter_dir / "config.json").read_text())["vocabulary"] == "own"


def test_heads_for_another_model_are_refused(tmp_path: Path, model: str) -> None:
    run = medusa_run(tmp_path / "run", model)
    export_medusa(find_source(f"{run.path}/"), tmp_path / "out")
    wider = save_model(tmp_path / "wider", hidden=48)
    with pytest.raises(UserError, match="0.0.linear.weight is 32x32 where 48x48 is wanted"):
        import_drafter(str(tmp_path / "out"), f"{tmp_path}/back", wider)


def test_other_kinds_are_refused(tmp_path: Path, model: str) -> None:
    run = save_run(tmp_path / "run", model, kind=HydraHeads)
    for format, kind in (("medusa", "medusa heads"), ("eagle3", "eagle ones")):
        words = ["export", "--to", format, "--run", f"{run.path}/", "--output", str(tmp_path / "out")]
        done = CliRunner().invoke(app, words)
        assert done.exit_code == 1 and f"is a hydra drafter, and this layout is for {kind}" in done.stderr
    assert not (tmp_path / "out").exists()


def eagle_source(folder: Path, model: str, **changes) -> Source:
    """A drafter of the kind eagle as its folder holds it, random."""
    base = Base(model, "llama", H, V, 5)
    found = import_eagle3(eagle3(), EAGLE, base, {})
    config = {"drafter": "eagle", "base_model_name_or_path": model, **found.config, **changes}
    return Source(Run(folder), model, config, found.tensors)


def test_an_eagle3_folder_is_the_one_that_engines_read(tmp_path: Path, model: str) -> None:
    source = eagle_source(tmp_path / "run", model)
    done = export_eagle3(source, tmp_path / "out")
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    wanted = {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "num_hidden_layers": 1,
        "hidden_size": H,
        "intermediate_size": 48,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "vocab_size": V,
        "draft_vocab_size": 24,
        "tie_word_embeddings": False,
        "eagle_aux_hidden_state_layer_ids": [1, 2, 3],
        "eagle_config": {"eagle_aux_hidden_state_layer_ids": [0, 1, 2], "use_aux_hidden_state": True},
        "max_position_embeddings": 512,
    }
    assert {key: config[key] for key in wanted} == wanted
    found = load_file(tmp_path / "out" / "model.safetensors")
    assert found["fc.weight"].shape == (H, 3 * H) and found["midlayer.self_attn.k_proj.weight"].shape == (H, 2 * H)
    assert found["d2t"].dtype == torch.int64 and found["t2d"].dtype == torch.bool
    # target = i + d2t[i], in rising order
    ids = torch.arange(24) + found["d2t"]
    assert torch.equal(found["t2d"].nonzero()[:, 0], ids)
    assert len(done.launch) == 3 and all(line in (tmp_path / "out" / "README.md").read_text() for line in done.launch)


def test_an_eagle3_drafter_comes_back_bit_for_bit(tmp_path: Path, model: str) -> None:
    source = eagle_source(tmp_path / "run", model)
    export_eagle3(source, tmp_path / "out")
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    back = import_eagle3(load_file(tmp_path / "out" / "model.safetensors"), config, Base(model, "llama", H, V, 5), {})
    assert same(back.tensors, source.tensors)
    assert back.config == {key: source.config[key] for key in back.config}
    del config["eagle_aux_hidden_state_layer_ids"]  # and by what SGLang reads
    back = import_eagle3(load_file(tmp_path / "out" / "model.safetensors"), config, Base(model, "llama", H, V, 5), {})
    assert back.config["taps"] == source.config["taps"]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda one: one.tensors.pop("norm.weight"), "missing norm.weight"),
        (lambda one: one.tensors.update({"midlayer.extra": torch.zeros(1)}), "unknown midlayer.extra"),
        (lambda one: one.tensors.update({"fc.weight": torch.zeros(H, H)}), "fc.weight is 32x32 where 32x96 is wanted"),
        (lambda one: one.config.pop("head_dim"), "config.json lacks head_dim"),
    ],
    ids=["missing", "extra", "width", "config"],
)
def test_an_eagle_drafter_that_is_not_whole_is_named(tmp_path: Path, model: str, change, words: str) -> None:
    source = eagle_source(tmp_path / "run", model)
    change(source)
    with pytest.raises(UserError, match=words):
        export_eagle3(source, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_two_taps_are_no_drafter_for_llama_cpp(tmp_path: Path, model: str) -> None:
    source = eagle_source(tmp_path / "run", model, taps=[1, 2])
    source.tensors["fc.weight"] = source.tensors["fc.weight"][:, : 2 * H].contiguous()
    assert export_eagle3(source, tmp_path / "out").notes == ("it reads 2 layers, and llama.cpp takes exactly 3",)


@pytest.mark.skipif("eagle" not in DRAFTERS, reason="no drafter of the kind eagle yet")
def test_a_trained_eagle_drafter_is_exported_from_its_run(tmp_path: Path, model: str) -> None:
    run = save_run(tmp_path / "run", model, kind=DRAFTERS["eagle"])
    export_eagle3(find_source(f"{run.path}/"), tmp_path / "out")
    back = import_drafter(str(tmp_path / "out"), f"{tmp_path}/back", model).run
    assert same(load_file(back.drafter_dir / "model.safetensors"), load_file(run.drafter_dir / "model.safetensors"))


def test_the_report_on_a_linked_model_is_sought_where_bench_leaves_it(
    tmp_path: Path, model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    linked = tmp_path / "mine"
    linked.symlink_to(save_run(tmp_path / "x1", model).path)
    report = tmp_path / "runs" / "mine" / "bench" / "2026-01.json"
    report.parent.mkdir(parents=True)
    report.write_text(json.dumps({"drafting": {"medusa": {STAMP: stamp_of(linked / "drafter")}}}))
    report.with_suffix(".md").write_text("the table")
    assert Source(Run(linked), str(linked), {}, {}).bench == "the table"


def test_a_write_that_fails_leaves_the_earlier_export(tmp_path: Path, model: str, monkeypatch) -> None:
    run = medusa_run(tmp_path / "run", model)
    export_medusa(find_source(f"{run.path}/"), tmp_path / "out")
    before = (tmp_path / "out" / "SHA256SUMS").read_text()

    def fail(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("medusa_cli.exporting.medusa.write_json", fail)
    with pytest.raises(OSError, match="No space"):
        export_medusa(find_source(f"{run.path}/"), tmp_path / "out", overwrite=True)
    assert (tmp_path / "out" / "SHA256SUMS").read_text() == before
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".")] == []
