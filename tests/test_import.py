"""Drafters of other tools into runs: bit for bit, strictly, and without executing anything."""

import json
import os
import pickle
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from typer.testing import Result

from medusa_cli.drafters import load_drafter
from medusa_cli.drafters.base import NewTokens
from medusa_cli.engine import load_backbone
from medusa_cli.errors import UserError
from medusa_cli.export.eagle3_format import import_eagle3
from medusa_cli.export.incoming import import_drafter
from medusa_cli.export.tensors import Base, read_tensors
from medusa_cli.runs.resolve import LoadOptions
from tests.checkpoints import EAGLE, H, V, eagle3, hydra_heads, medusa_heads, vllm_names, write
from tests.helpers import TREE, medusa, save_model
from tests.test_lock import held

FIRST, WEIGHTS = "0.0.linear.weight", "medusa_lm_head.safetensors"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_model(tmp_path_factory.mktemp("model"), layers=5)


def drafted(run: Path, model: str) -> tuple[list[int], torch.Tensor, int]:
    """What the run's drafter drafts after some states, those states, and the root."""
    backbone = load_backbone(model, LoadOptions(dtype="fp32", engine="eager"))
    drafter = load_drafter(run / "drafter", backbone)
    torch.manual_seed(8)
    hidden, root = torch.randn(1, backbone.hidden_size * len(drafter.taps)), 11
    [draft] = drafter.draft(backbone, [drafter], [NewTokens(torch.tensor([5]), hidden, root, 0)], TREE)
    return draft.tokens.tolist(), hidden, root


def by_hand(tensors: dict, hidden: torch.Tensor, root: int, lm_head: torch.Tensor | None = None) -> list[int]:
    """The tokens of TREE from FasterDecoding's heads, computed from their state dict."""
    ranked = []
    for k in range(3):
        x = hidden
        for layer in range(2):
            name = f"{k}.{layer}.linear"
            x = x + torch.nn.functional.silu(x @ tensors[f"{name}.weight"].float().T + tensors[f"{name}.bias"].float())
        matrix = lm_head if lm_head is not None else tensors[f"{k}.2.weight"].float()
        ranked.append((x @ matrix.T)[0].argsort(descending=True).tolist())
    return [root, *(ranked[len(path) - 1][path[-1]] for path in TREE.choices)]


@pytest.mark.parametrize("file", ["medusa_lm_head.pt", "medusa_lm_head.safetensors", "pytorch_model.bin"])
def test_fasterdecoding_heads_draft_what_their_own_code_would(tmp_path: Path, model: str, file: str) -> None:
    tensors = medusa_heads()
    write(tmp_path / "theirs", file, tensors, {"medusa_num_heads": 3, "medusa_num_layers": 2})
    done = import_drafter(str(tmp_path / "theirs"), f"{tmp_path}/run", model)
    tokens, hidden, root = drafted(done.run.path, model)
    assert tokens == by_hand(tensors, hidden, root)
    kept = load_file(done.run.drafter_dir / "medusa_lm_head.safetensors")
    assert all(torch.equal(kept[name], tensors[name]) and kept[name].dtype == torch.float16 for name in tensors)


def test_the_second_form_reads_the_models_own_lm_head(tmp_path: Path, model: str) -> None:
    tensors = medusa_heads(vocabulary=None)
    write(tmp_path / "theirs", "medusa_lm_head.safetensors", tensors, {"base_model_name_or_path": model})
    done = import_drafter(str(tmp_path / "theirs"), f"{tmp_path}/run")
    tokens, hidden, root = drafted(done.run.path, model)
    lm_head = load_backbone(model, LoadOptions(dtype="fp32", engine="eager")).lm_head_weight
    assert tokens == by_hand(tensors, hidden, root, lm_head)


@pytest.mark.parametrize("named", ["heads-1.7b", "link"])
def test_a_run_is_named_after_the_folder_as_it_was_called(
    tmp_path: Path, model: str, monkeypatch: pytest.MonkeyPatch, named: str
) -> None:
    config = {"medusa_num_heads": 3, "medusa_num_layers": 2}
    write(tmp_path / "heads-1.7b", "medusa_lm_head.safetensors", medusa_heads(), config)
    (tmp_path / "link").symlink_to(tmp_path / "heads-1.7b")
    monkeypatch.chdir(tmp_path)
    assert import_drafter(f"{tmp_path}/{named}", model=model).run.path.name == named
    again = import_drafter(f"{named}/medusa_lm_head.safetensors", model=model)
    assert again.run.path.name == "medusa_lm_head"


def test_vllm_names_token_map_and_missing_biases(tmp_path: Path, model: str) -> None:
    tensors = medusa_heads(vocabulary=20)
    ids = torch.randperm(V)[:20]
    bare = {name: one for name, one in vllm_names(tensors).items() if "bias" not in name}
    write(tmp_path / "theirs", "model.safetensors", {**bare, "token_map": ids}, {"num_heads": 3, "vocab_size": V})
    done = import_drafter(str(tmp_path / "theirs"), f"{tmp_path}/run", model)
    assert len(done.notes) == 1
    kept = load_file(done.run.drafter_dir / "medusa_lm_head.safetensors")
    assert torch.equal(kept["1.2.weight"], tensors["1.2.weight"])
    assert not kept["2.1.linear.bias"].any()
    flat = {name: torch.zeros_like(one) if "bias" in name else one for name, one in tensors.items()}
    tokens, hidden, root = drafted(done.run.path, model)
    expected = by_hand(flat, hidden, root)
    assert tokens == [root, *ids[torch.tensor(expected[1:])].tolist()]


def test_more_heads_than_the_config_counts_are_taken(tmp_path: Path, model: str) -> None:
    write(tmp_path / "theirs", "medusa_lm_head.pt", medusa_heads(), {"medusa_num_heads": 2})
    done = import_drafter(str(tmp_path / "theirs"), f"{tmp_path}/run", model)
    assert done.heads == 3
    assert len(done.notes) == 1
    write(tmp_path / "more", "medusa_lm_head.pt", medusa_heads(), {"medusa_num_heads": 4})
    with pytest.raises(UserError, match="counts 4 heads, the file holds 3"):
        import_drafter(str(tmp_path / "more"), f"{tmp_path}/other", model)


def test_hydra_heads_draft_what_their_own_code_would(tmp_path: Path, model: str) -> None:
    tensors = hydra_heads()
    write(tmp_path / "theirs", "hydra_lm_head.pt", tensors, {"hydra_num_heads": 3, "grounded_heads": True})
    done = import_drafter(str(tmp_path / "theirs"), f"{tmp_path}/run", model)
    tokens, hidden, root = drafted(done.run.path, model)
    embedding = load_backbone(model, LoadOptions(dtype="fp32", engine="eager")).embedding.weight

    def best(path: list[int], rank: int) -> int:
        k = len(path) - 1
        x = torch.cat([hidden[0], *(embedding[token] for token in path)])
        y = x @ tensors[f"hydra_mlp.{k}.0.linear.weight"].T + tensors[f"hydra_mlp.{k}.0.linear.bias"]
        r = x @ tensors[f"hydra_mlp.{k}.0.res_connection.weight"].T + tensors[f"hydra_mlp.{k}.0.res_connection.bias"]
        x = r + torch.nn.functional.silu(y)
        y = x @ tensors[f"hydra_mlp.{k}.1.linear.weight"].T + tensors[f"hydra_mlp.{k}.1.linear.bias"]
        x = x + torch.nn.functional.silu(y)
        return int((tensors[f"hydra_lm_head.{k}.weight"] @ x).argsort(descending=True)[rank])

    for node in range(1, TREE.size):
        above = [tokens[one] for one in TREE.path(node)[:-1]]
        assert tokens[node] == best(above, TREE.ranks[node])


def test_hydra_biases_that_are_left_out_are_said(tmp_path: Path, model: str) -> None:
    tensors = hydra_heads()
    tensors["hydra_lm_head.1.bias"][3] = -0.25
    write(tmp_path / "theirs", "hydra_lm_head.pt", tensors, {"grounded_heads": True})
    done = import_drafter(str(tmp_path / "theirs"), f"{tmp_path}/run", model)
    assert len(done.notes) == 1 and "0.25" in done.notes[0]
    prefixed = {**tensors, "prefix_embeding_layer.layers.0.mlp.up_proj.weight": torch.zeros(2)}
    write(tmp_path / "prefix", "hydra_lm_head.pt", prefixed, {"hydra_head_arch": "prefix-mlp"})
    with pytest.raises(UserError, match="prefix-mlp"):
        import_drafter(str(tmp_path / "prefix"), f"{tmp_path}/other", model)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda one: one.pop("1.0.linear.bias"), "1.0.linear.bias is missing"),
        (lambda one: one.update({"0.0.extra": torch.zeros(3)}), "0.0.extra is unknown"),
        (lambda one: one.update({"2.2.weight": torch.zeros(V + 1, H)}), "2.2.weight is 65x32 instead of 64x32"),
        (
            lambda one: one.update({"0.0.linear.weight": torch.zeros(16, 16)}),
            "0.0.linear.weight is 16x16",
        ),
        (lambda one: one["0.0.linear.weight"].fill_(float("nan")), "0.0.linear.weight is not finite"),
    ],
    ids=["missing", "extra", "vocabulary", "width", "nan"],
)
def test_what_does_not_fit_is_named_and_nothing_is_written(tmp_path: Path, model: str, change, words: str) -> None:
    tensors = medusa_heads()
    change(tensors)
    write(tmp_path / "theirs", "medusa_lm_head.pt", tensors, {"medusa_fc_bias": True})
    with pytest.raises(UserError, match=words):
        import_drafter(str(tmp_path / "theirs"), f"{tmp_path}/run", model)
    assert not (tmp_path / "run").exists()


class Hostile:
    """What a pickle may hold: a call, made on reading."""

    def __init__(self, target: Path) -> None:
        self.target = target

    def __reduce__(self):
        return (Path.touch, (self.target,))


@pytest.mark.parametrize("way", ["torch", "legacy", "plain pickle"])
def test_no_pickle_is_executed(tmp_path: Path, model: str, way: str) -> None:
    folder, touched = tmp_path / "theirs", tmp_path / "touched"
    folder.mkdir()
    hostile = {**medusa_heads(), "0.0.linear.weight": Hostile(touched)}
    path = folder / "medusa_lm_head.pt"
    if way == "plain pickle":
        path.write_bytes(pickle.dumps(hostile))
    else:
        torch.save(hostile, path, _use_new_zipfile_serialization=way == "torch")
    done = medusa("import", str(folder), "--run", f"{tmp_path}/run", "--model", model)
    assert done.exit_code == 1
    assert str(path) in done.stderr and len(done.stderr.strip().splitlines()) == 1
    assert not touched.exists()
    # The file is what it says: read as pickles are by default elsewhere, it does its work.
    torch.load(path, weights_only=False) if way != "plain pickle" else pickle.loads(path.read_bytes())
    assert touched.exists()


def test_files_that_are_cut_off_or_are_no_tensors(tmp_path: Path) -> None:
    write(tmp_path, "heads.pt", medusa_heads())
    write(tmp_path, "heads.safetensors", medusa_heads())
    for name in ("heads.pt", "heads.safetensors"):
        data = (tmp_path / name).read_bytes()
        (tmp_path / f"cut-{name}").write_bytes(data[: len(data) // 2])
        with pytest.raises(UserError, match=f"cut-{name}"):
            read_tensors(tmp_path / f"cut-{name}")
    torch.save({"a": [1, 2]}, tmp_path / "list.pt")
    with pytest.raises(UserError, match="list.pt"):
        read_tensors(tmp_path / "list.pt")


def test_an_index_cannot_name_files_outside_its_folder(tmp_path: Path, model: str) -> None:
    folder = write(tmp_path / "theirs", "part.safetensors", medusa_heads(), {})
    save_file(medusa_heads(), tmp_path / "outside.safetensors")
    index = folder / "model.safetensors.index.json"
    for name in ("../outside.safetensors", str(tmp_path / "outside.safetensors")):
        index.write_text(json.dumps({"weight_map": {"0.0.linear.weight": name}}))
        with pytest.raises(UserError, match="outside"):
            import_drafter(str(folder), f"{tmp_path}/run", model)
    (folder / "link.safetensors").symlink_to(tmp_path / "outside.safetensors")
    index.write_text(json.dumps({"weight_map": {"0.0.linear.weight": "link.safetensors"}}))
    with pytest.raises(UserError, match="outside"):
        import_drafter(str(folder), f"{tmp_path}/run", model)
    index.write_text(json.dumps({"weight_map": {"0.0.linear.weight": "part.safetensors"}}))
    assert import_drafter(str(folder), f"{tmp_path}/run", model).heads == 3


def test_what_is_no_checkpoint_is_said(tmp_path: Path, model: str) -> None:
    write(tmp_path / "theirs", "model.safetensors", {"transformer.weight": torch.zeros(2)}, {})
    with pytest.raises(UserError, match=r"no known layout \(its tensors are transformer.weight"):
        import_drafter(str(tmp_path / "theirs"), f"{tmp_path}/run", model)
    (tmp_path / "empty").mkdir()
    with pytest.raises(UserError, match="@model|model"):
        import_drafter(str(tmp_path / "empty"), f"{tmp_path}/run")
    with pytest.raises(UserError, match="holds no weights"):
        import_drafter(str(tmp_path / "empty"), f"{tmp_path}/run", model)
    with pytest.raises(UserError, match="does not exist"):
        import_drafter(str(tmp_path / "nowhere"), f"{tmp_path}/run", model)
    with pytest.raises(UserError, match="has no config.json"):
        import_drafter(str(tmp_path / "theirs"), f"{tmp_path}/run", str(tmp_path / "empty"))


def test_a_run_that_has_a_drafter_is_not_written_over(tmp_path: Path, model: str) -> None:
    write(tmp_path / "theirs", "medusa_lm_head.pt", medusa_heads())
    import_drafter(str(tmp_path / "theirs"), f"{tmp_path}/run", model)
    with pytest.raises(UserError, match="has a drafter already"):
        import_drafter(str(tmp_path / "theirs"), f"{tmp_path}/run", model)


def test_an_imported_run_goes_through_calibrate_tree_chat_and_bench(tmp_path: Path, model: str) -> None:
    write(tmp_path / "theirs", "medusa_lm_head.pt", medusa_heads())
    run = f"{tmp_path}/run"

    def call(*words: str) -> str:
        return medusa(*words, *(["--dtype", "fp32"] if words[0] not in ("import", "tree") else []), exit_code=0).stdout

    call("import", str(tmp_path / "theirs"), "--run", run, "--model", model)
    talks = tmp_path / "talks.jsonl"
    turns = [{"from": "human", "value": "w1 w2 w3"}, {"from": "gpt", "value": " ".join(f"w{i}" for i in range(30))}]
    talks.write_text("\n".join(json.dumps({"id": str(i), "conversations": turns}) for i in range(3)) + "\n")
    call("calibrate", "--run", run, "--data", str(talks), "--top", "4")
    call("tree", "--run", run, "--budget", "6")
    said = json.loads(call("chat", "--run", run, "--prompt", "w1 w2", "--max-new-tokens", "12", "--json"))
    assert said["tokens"] == 12
    questions = tmp_path / "questions.jsonl"
    questions.write_text(json.dumps({"question_id": 1, "category": "a", "turns": ["w1 w2"]}) + "\n")
    words = ("--questions", str(questions), "--methods", "ar,medusa", "--max-new-tokens", "12")
    found = json.loads(call("bench", "--run", run, *words, "--json"))
    assert found["methods"]["medusa"]["identical"] == 1


@pytest.mark.parametrize("file", ["model.safetensors", "pytorch_model.bin"])
def test_eagle3_folders_become_the_kind_eagle(tmp_path: Path, model: str, file: str) -> None:
    write(tmp_path / "theirs", file, eagle3(), EAGLE)
    done = import_drafter(str(tmp_path / "theirs"), f"{tmp_path}/run", model)
    assert (done.kind, done.format) == ("eagle", "eagle3")
    drafted(done.run.path, model)


def test_eagle3_variants_that_cannot_be_run_are_refused(tmp_path: Path, model: str) -> None:
    faults = {
        "norm_before_residual": {"norm_before_residual": True},
        "speculators": {"speculators_model_type": "eagle3"},  # norm_before_residual by default
        "fc_norm": {"fc_norm": True},
        "layers": {"num_hidden_layers": 2},
    }
    for name, change in faults.items():
        write(tmp_path / name, "model.safetensors", eagle3(), {**EAGLE, **change})
        with pytest.raises(UserError, match="norm_before_residual" if name == "speculators" else next(iter(change))):
            import_drafter(str(tmp_path / name), f"{tmp_path}/run", model)
    wrong = eagle3()
    wrong["d2t"][3] += 1
    write(tmp_path / "maps", "model.safetensors", wrong, EAGLE)
    with pytest.raises(UserError, match="contradict"):
        import_drafter(str(tmp_path / "maps"), f"{tmp_path}/run", model)
    write(tmp_path / "taps", "model.safetensors", eagle3(), {**EAGLE, "eagle_aux_hidden_state_layer_ids": [1, 2, 9]})
    with pytest.raises(UserError, match="the model has 5"):
        import_drafter(str(tmp_path / "taps"), f"{tmp_path}/run", model)


def test_shared_keys_and_values_get_a_copy_for_every_query_head() -> None:
    theirs = eagle3()
    _, tensors, _ = import_eagle3(theirs, EAGLE, Base("model", "llama", H, V, 5))
    each = tensors["midlayer.self_attn.k_proj.weight"].unflatten(0, (4, 8))
    shared = theirs["midlayer.self_attn.k_proj.weight"].unflatten(0, (2, 8))
    assert torch.equal(each[0], each[1]) and torch.equal(each[0], shared[0]) and torch.equal(each[3], shared[1])


def import_into(folder: Path, model: str, run: Path) -> Result:
    return medusa("import", str(folder), "--model", model, "--run", str(run))


def refused(folder: Path, model: str, part: str) -> None:
    """Asserts that an import ends in one error that names `part`, and writes no drafter."""
    done = import_into(folder, model, folder.parent / "run")
    assert done.exit_code == 1, (done.exception, done.output)
    assert "internal error" not in done.stderr and done.stderr.count("error: ") == 1 and part in done.stderr
    assert not (folder.parent / "run" / "drafter").exists()


DAMAGE: dict[str, tuple[Callable[[dict[str, Tensor]], Any], str]] = {
    "a billion heads": (lambda one: one.update({"1000000000.0.linear.weight": torch.zeros(H, H)}), "1000000000.0"),
    "a head of many digits": (lambda one: one.update({"9" * 5000 + ".0.linear.weight": torch.zeros(1)}), "999"),
    "a weight without axes": (lambda one: one.update({FIRST: torch.tensor(1.0)}), FIRST),
    FIRST: (lambda one: one.update({FIRST: torch.ones(H, H, dtype=torch.int8)}), FIRST),
    "eight-bit floats": (lambda one: one.update({FIRST: torch.ones(H, H).to(torch.float8_e4m3fn)}), FIRST),
    "a sparse one": (lambda one: one.update({FIRST: torch.ones(H, H).to_sparse()}), FIRST),
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
    refused(tmp_path / "theirs", model, "hydra_mlp.4000000000.0.linear.weight is unknown")


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
    done = import_into(tmp_path / "theirs", model, tmp_path / "run")
    assert "internal error" not in done.stderr, done.stderr
    if done.exit_code == 0:  # a nonsense that says nothing
        assert change.get("rope_parameters") == "x"
    else:
        assert done.exit_code == 1 and done.stderr.count("\n") == 1


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
    with pytest.raises(UserError, match="bomb.pt"):
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
    with pytest.raises(UserError, match="outside"):
        import_drafter(str(folder), f"{tmp_path}/other", model)


def test_headers_that_claim_too_much_and_pipes_are_refused_at_once(tmp_path: Path, model: str) -> None:
    theirs = tmp_path / "theirs"
    theirs.mkdir()
    for data in ((1 << 62).to_bytes(8, "little") + b"{", (64).to_bytes(8, "little") + b"{" * 64, b""):
        (theirs / "medusa_lm_head.safetensors").write_bytes(data)
        refused(theirs, model, "medusa_lm_head.safetensors")
    (theirs / "medusa_lm_head.safetensors").unlink()
    os.mkfifo(theirs / "medusa_lm_head.safetensors")
    refused(theirs, model, "theirs")
    os.mkfifo(theirs / "config.json")
    refused(theirs, model, "theirs")


def test_a_run_that_is_being_written_is_not_imported_into(tmp_path: Path, model: str) -> None:
    write(tmp_path / "theirs", "medusa_lm_head.pt", medusa_heads(), {})
    (tmp_path / "run").mkdir()
    with held(tmp_path / "run"):
        refused(tmp_path / "theirs", model, "medusa distill")
    assert import_into(tmp_path / "theirs", model, tmp_path / "run").exit_code == 0
