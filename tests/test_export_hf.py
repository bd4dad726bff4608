"""Exported folders under transformers alone: the same tokens as plain `generate`, for each kind of drafter."""

import hashlib
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM
from typer.testing import CliRunner

from medusa_cli.cli import app
from medusa_cli.drafters import DRAFTERS, Amphista, Firp, HydraHeads, MedusaHeads
from medusa_cli.errors import UsageError, UserError
from medusa_cli.exporting.hf import export_hf
from medusa_cli.exporting.source import find_source
from medusa_cli.tree import Tree
from medusa_cli.tree.saved import load_tree, save_tree
from tests.runs import save_model, save_run

PROMPT = torch.tensor([[3, 6, 9, 20, 31, 44, 12]])
KINDS = {
    "medusa": (MedusaHeads, {}),
    "hydra": (HydraHeads, {}),
    "hydra++": (HydraHeads, {"prefix_layers": 1, "taps": (1,)}),
    "amphista": (Amphista, {"attention_layers": 2}),
}
# Kinds and settings that not every version has.
if "context" in HydraHeads.settings:
    KINDS["hydra over conversations"] = (HydraHeads, {"prefix_layers": 1, "context": "conversation"})
    KINDS["amphista over conversations"] = (Amphista, {"context": "conversation"})
if "conditional" in MedusaHeads.settings:
    KINDS["medusa, conditional"] = (MedusaHeads, {"conditional": 4})
if "eagle" in DRAFTERS:
    KINDS["eagle"] = (DRAFTERS["eagle"], {"taps": (1, 2, 3)})
FAMILIES = ("mistral-window", "qwen3", "gemma3")


def exported(tmp_path: Path, name: str = "hydra", *, layers: int = 2, **shape) -> Path:
    kind, settings = KINDS[name]
    model = save_model(tmp_path / "model", **{"layers": 4, **shape})
    run = trained(tmp_path / "run", model, kind, layers=layers, **settings)
    return export_hf(find_source(f"{run.path}/"), tmp_path / "out").folder


def trained(folder: Path, model: str, kind, *, layers: int = 2, **settings):
    """A run whose random drafter is often right: its tree is wide, the vocabulary small."""
    from medusa_cli.engines import load_backbone
    from medusa_cli.runs.run import provenance

    run = save_run(folder, model, heads=3, tree=Tree.dense([6, 4, 2]), calibrated=True)
    backbone = load_backbone(model, dtype="fp32")
    torch.manual_seed(1)
    ids = torch.randperm(backbone.vocab_size)[:40]
    drafter = kind.create(backbone, 3, 1 if kind.name == "eagle" else layers, "draft", draft_ids=ids, **settings)
    for weight in drafter.parameters():
        weight.data += 0.05 * torch.randn_like(weight)
    drafter.save(run.drafter_dir, provenance(backbone.identity))
    return run


def both(folder: Path, **asked) -> tuple[torch.Tensor, torch.Tensor, int]:
    """The tokens of plain `generate`, of the exported one, and how many passes the latter took."""
    model = AutoModelForCausalLM.from_pretrained(folder)
    passes = []
    model.register_forward_hook(lambda *_: passes.append(1))
    torch.manual_seed(5)
    plain = model.generate(PROMPT, max_new_tokens=48, **asked)
    passes.clear()
    torch.manual_seed(5)
    drafting = {"custom_generate": str(folder), "trust_remote_code": True, "drafts": "always"}
    drafted = model.generate(PROMPT, max_new_tokens=48, **drafting, **asked)
    return plain, drafted, len(passes)


@pytest.mark.parametrize("name", KINDS)
def test_every_kind_gives_the_tokens_of_plain_decoding_in_fewer_passes(tmp_path: Path, name: str) -> None:
    plain, drafted, passes = both(exported(tmp_path, name))
    assert drafted.tolist() == plain.tolist()
    assert passes < plain.shape[1] - PROMPT.shape[1]


@pytest.mark.parametrize("name", KINDS)
def test_what_is_drafted_is_what_our_own_drafter_drafts(tmp_path: Path, name: str) -> None:
    """As many passes as our own decoding takes steps: the guesses are the same."""
    from medusa_cli.decoding import generate as decode
    from medusa_cli.drafters import load_drafter
    from medusa_cli.engines import load_backbone

    folder = exported(tmp_path, name)
    plain, drafted, passes = both(folder)
    backbone = load_backbone(str(tmp_path / "model"), dtype="fp32", engine="eager")
    drafter = load_drafter(tmp_path / "run" / "drafter", backbone)
    tree = load_tree(tmp_path / "run" / "tree.json")
    steps = list(decode(backbone, drafter, tree, PROMPT[0].tolist(), max_new_tokens=48))
    assert [token for step in steps for token in step.tokens] == plain[0, PROMPT.shape[1] :].tolist()
    assert passes == len(steps)


@pytest.mark.parametrize("family", FAMILIES)
def test_windows_and_other_families(tmp_path: Path, family: str) -> None:
    plain, drafted, passes = both(exported(tmp_path, family=family))
    assert drafted.tolist() == plain.tolist()


@pytest.mark.parametrize(
    "asked",
    [
        {"do_sample": True, "temperature": 0.8, "top_p": 0.9},
        {"do_sample": True, "top_k": 5, "repetition_penalty": 1.3},
        {"repetition_penalty": 1.5, "no_repeat_ngram_size": 2},
    ],
    ids=["nucleus", "penalty", "greedy-penalty"],
)
def test_sampling_draws_what_plain_generate_draws(tmp_path: Path, asked: dict) -> None:
    plain, drafted, _ = both(exported(tmp_path), **asked)
    assert drafted.tolist() == plain.tolist()


def test_it_runs_offline_without_this_package(tmp_path: Path) -> None:
    folder = exported(tmp_path)
    code = (
        "import sys, torch; sys.modules['medusa_cli'] = None\n"
        "from transformers import AutoModelForCausalLM\n"
        "model = AutoModelForCausalLM.from_pretrained('.')\n"
        f"prompt = torch.tensor({PROMPT.tolist()})\n"
        "found = model.generate(prompt, max_new_tokens=12, custom_generate='.', trust_remote_code=True)\n"
        "assert found.tolist() == model.generate(prompt, max_new_tokens=12).tolist()\n"
        "print('identical')"
    )
    env = {**os.environ, "HF_HUB_OFFLINE": "1", "HF_MODULES_CACHE": str(tmp_path / "modules")}
    env.pop("PYTHONPATH", None)
    done = subprocess.run([sys.executable, "-c", code], cwd=folder, env=env, capture_output=True, text=True)
    assert done.stdout.strip() == "identical", done.stderr


def test_the_adapter_is_merged(tmp_path: Path) -> None:
    from medusa_cli.backbone import adapter

    model = save_model(tmp_path / "model")
    run = trained(tmp_path / "run", model, HydraHeads)
    network = AutoModelForCausalLM.from_pretrained(model)
    adapter.attach(network, rank=4, alpha=8, dropout=0.0)
    for name, weight in network.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(weight, std=0.2)
    adapter.save(network, run.adapter_dir, model)
    folder = export_hf(find_source(f"{run.path}/"), tmp_path / "out").folder
    plain, drafted, _ = both(folder)
    expected = AutoModelForCausalLM.from_pretrained(folder)(PROMPT).logits[0]
    found = adapter.merge(AutoModelForCausalLM.from_pretrained(model), run.adapter_dir)(PROMPT).logits[0]
    torch.testing.assert_close(found, expected, atol=1e-3, rtol=1e-3)
    assert drafted.tolist() == plain.tolist()
    untouched = AutoModelForCausalLM.from_pretrained(model)(PROMPT).logits[0]
    assert not torch.allclose(untouched, expected, atol=1e-2)


@pytest.mark.parametrize(
    ("stored", "written"),
    [(torch.float32, torch.float32), (torch.float16, torch.float16), (torch.float64, torch.bfloat16)],
)
def test_weights_keep_the_type_they_are_stored_in_where_the_config_names_none(
    tmp_path: Path, stored: torch.dtype, written: torch.dtype
) -> None:
    model = Path(save_model(tmp_path / "model"))
    run = trained(tmp_path / "run", str(model), MedusaHeads)
    weights = load_file(model / "model.safetensors")
    save_file({name: one.to(stored) for name, one in weights.items()}, model / "model.safetensors", {"format": "pt"})
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(
        json.dumps({k: v for k, v in config.items() if k not in ("dtype", "torch_dtype")})
    )
    done = export_hf(find_source(f"{run.path}/"), tmp_path / "out")
    assert {one.dtype for one in load_file(done.folder / "model.safetensors").values()} == {written}
    assert done.notes == (
        () if stored == written else ("the model's weights are stored as float64, and written as bfloat16",)
    )


def test_the_checksums_hold_and_the_card_says_what_was_measured(tmp_path: Path) -> None:
    folder = exported(tmp_path)
    lines = (folder / "SHA256SUMS").read_text().splitlines()
    named = dict(reversed(line.split("  ")) for line in lines)
    files = {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()} - {"SHA256SUMS"}
    assert set(named) == files
    assert all(hashlib.sha256((folder / name).read_bytes()).hexdigest() == digest for name, digest in named.items())
    card = (folder / "README.md").read_text()
    assert "a tree of 79 nodes, 1/6/24/48 by depth" in card
    assert "| 1 | 50.0 | 20.0 | 10.0 |" in card
    assert "Not measured yet" in card


def test_the_newest_report_on_this_drafter_is_in_the_card(tmp_path: Path) -> None:
    from medusa_cli.runs.accuracies import STAMP, stamp_of

    model = save_model(tmp_path / "model")
    run = trained(tmp_path / "run", model, HydraHeads)
    run.bench_dir.mkdir()
    for stem, stamp in (("2026-01", stamp_of(run.drafter_dir)), ("2026-02", "another drafter")):
        (run.bench_dir / f"{stem}.json").write_text(json.dumps({"drafting": {"medusa": {STAMP: stamp}}}))
        (run.bench_dir / f"{stem}.md").write_text(f"the table of {stem}")
    card = (export_hf(find_source(f"{run.path}/"), tmp_path / "out").folder / "README.md").read_text()
    assert "the table of 2026-01" in card


def test_what_cannot_be_exported_is_said(tmp_path: Path) -> None:
    model = save_model(tmp_path / "model")
    run = save_run(tmp_path / "run", model, tree=None)
    with pytest.raises(UserError, match="has no tree"):
        export_hf(find_source(f"{run.path}/"), tmp_path / "out")
    save_tree(run.tree_path, Tree.chain(5), {})
    with pytest.raises(UserError, match="5 deep, the drafter has 3 heads"):
        export_hf(find_source(f"{run.path}/"), tmp_path / "out")
    assert not (tmp_path / "out").exists()
    firp = tmp_path / "firp"
    from medusa_cli.engines import load_backbone
    from medusa_cli.runs.run import provenance

    backbone = load_backbone(model, dtype="fp32")
    drafter = Firp.create(backbone, 1, 1, "shared", layers=(1,))
    drafter.save(firp / "drafter", provenance(backbone.identity))
    with pytest.raises(UserError, match="is a firp drafter"):
        export_hf(find_source(f"{firp}/"), tmp_path / "out")


def test_the_tree_has_the_nodes_asked_for_or_those_that_pay(tmp_path: Path) -> None:
    run = trained(tmp_path / "run", save_model(tmp_path / "model"), MedusaHeads)
    source = find_source(f"{run.path}/")
    for budget, sizes in (("auto", range(2, 41)), (5, [5]), (None, [1 + 6 + 24 + 48])):
        folder = export_hf(source, tmp_path / str(budget), budget=budget).folder
        size = load_tree(folder / "drafter" / "tree.json").size
        assert size in sizes
        assert f"a tree of {size} nodes" in (folder / "README.md").read_text()
    plain, drafted, _ = both(tmp_path / "auto")
    assert drafted.tolist() == plain.tolist()
    with pytest.raises(UsageError, match="these heads allow 1 to 40 nodes"):
        export_hf(source, tmp_path / "large", budget=41)
    run.calibration_path.unlink()
    with pytest.raises(UserError, match="has no calibration to search a tree by"):
        export_hf(source, tmp_path / "unmeasured", budget=5)
    assert not (tmp_path / "large").exists() and not (tmp_path / "unmeasured").exists()


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("hf", "few"), "is no number"),
        (("hf", "0"), "is no number"),
        (("hf", "9" * 5000), "is no number"),
        (("eagle3", "5"), "says nothing to"),
    ],
)
def test_a_budget_that_cannot_be_is_a_mistake_of_usage(tmp_path: Path, words: tuple[str, str], said: str) -> None:
    to, budget = words
    done = CliRunner().invoke(app, ["export", "--to", to, "--output", str(tmp_path / "out"), "--budget", budget])
    assert done.exit_code == 2 and said in done.stderr


def test_the_command_writes_and_says_how_to_use_it(tmp_path: Path) -> None:
    model = save_model(tmp_path / "model")
    run = trained(tmp_path / "run", model, MedusaHeads)
    out = tmp_path / "out"
    words = ["export", "--to", "hf", "--run", f"{run.path}/", "--output", str(out)]
    done = CliRunner().invoke(app, [*words, "--json"])
    assert done.exit_code == 0, done.output
    assert json.loads(done.stdout)["format"] == "hf"
    again = CliRunner().invoke(app, words)
    assert again.exit_code == 1
    assert "is not empty" in again.stderr
    assert CliRunner().invoke(app, [*words, "--overwrite"]).exit_code == 0
    other = tmp_path / "other"
    other.mkdir()
    (other / "thesis.txt").write_text("mine")
    kept = CliRunner().invoke(app, [*words[:-1], str(other), "--overwrite"])
    assert kept.exit_code == 1 and (other / "thesis.txt").is_file()
    unknown = CliRunner().invoke(app, ["export", "--to", "onnx", "--output", str(out)])
    assert unknown.exit_code == 2
    assert re.search("hf, eagle3, medusa", unknown.stderr)
