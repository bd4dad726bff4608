"""Drafters of other tools become runs bit for bit; unfit, damaged and hostile checkpoints are refused."""

import json
import os
import pickle
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from medusa_cli.drafters.incoming import INDEX, read_tensors
from medusa_cli.errors import UserError
from medusa_cli.export.importing import import_drafter
from medusa_cli.model import Backbone
from tests.checkpoints import (
    EAGLE,
    H,
    V,
    draft_of,
    eagle3,
    hydra_heads,
    medusa_heads,
    vllm_names,
    write,
)
from tests.helpers import TREE, medusa, save_model
from tests.test_run import writing

FIRST, FILE = "0.0.linear.weight", "medusa_lm_head.pt"
Tensors = dict[str, Tensor]


pytestmark = pytest.mark.usefixtures("whole_weights")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_model(tmp_path_factory.mktemp("model"), layers=5)


def take(
    folder: Path, model: str | None, tensors: Tensors, config: dict | None = None, file: str = FILE
) -> tuple[dict, list[str], Tensors]:
    """Imports a checkpoint; returns facts and notes of the import, and the tensors of the run's drafter."""
    write(folder / "theirs", file, tensors, config)
    run, facts, notes = import_drafter(str(folder / "theirs"), f"{folder}/run", model)
    [path] = run.drafter_dir.glob("*.safetensors")
    return facts, notes, load_file(path)


def refuse(folder: Path, model: str, part: str) -> None:
    """Asserts that the import of `theirs` ends in one line that names `part`, and writes no drafter."""
    done = medusa(
        "import", folder / "theirs", "--model", model, "--run", f"{folder}/run", exit_code=1
    )
    assert "internal error" not in done.stderr
    assert done.stderr.count("\n") == 1
    assert part in done.stderr
    assert not (folder / "run" / "drafter").exists()


def medusa_reference(
    tensors: Tensors, hidden: Tensor, root: int, lm_head: Tensor | None = None
) -> list[int]:
    """Returns the tokens of TREE by FasterDecoding's heads, computed from their state dict."""
    ranked = []
    for k in range(3):
        x = hidden
        for layer in range(2):
            name = f"{k}.{layer}.linear"
            x = x + torch.nn.functional.silu(
                x @ tensors[f"{name}.weight"].float().T + tensors[f"{name}.bias"].float()
            )
        matrix = lm_head if lm_head is not None else tensors[f"{k}.2.weight"].float()
        ranked.append((x @ matrix.T)[0].argsort(descending=True).tolist())
    return [root, *(ranked[len(path) - 1][path[-1]] for path in TREE.choices)]


@pytest.mark.quick("pytorch_model.bin")
@pytest.mark.parametrize("file", [FILE, "medusa_lm_head.safetensors", "pytorch_model.bin"])
def test_fasterdecoding_heads_draft_as_their_own_code(
    tmp_path: Path, model: str, backbone: Backbone, file: str
) -> None:
    tensors = medusa_heads()
    *_, kept = take(tmp_path, model, tensors, {"medusa_num_heads": 3, "medusa_num_layers": 2}, file)
    assert all(
        torch.equal(kept[name], tensors[name]) and kept[name].dtype == torch.float16
        for name in tensors
    )
    tokens, hidden, root = draft_of(tmp_path / "run" / "drafter", backbone)
    assert tokens == medusa_reference(tensors, hidden, root)


def test_the_second_form_reads_the_models_own_lm_head(
    tmp_path: Path, model: str, backbone: Backbone
) -> None:
    tensors = medusa_heads(vocabulary=None)
    take(tmp_path, None, tensors, {"base_model_name_or_path": model})
    tokens, hidden, root = draft_of(tmp_path / "run" / "drafter", backbone)
    assert tokens == medusa_reference(tensors, hidden, root, backbone.lm_head_weight)


def test_vllm_names_token_map_and_missing_biases(
    tmp_path: Path, model: str, backbone: Backbone
) -> None:
    tensors, ids = medusa_heads(vocabulary=20), torch.randperm(V)[:20]
    theirs = {
        name: tensor for name, tensor in vllm_names(tensors).items() if "bias" not in name
    } | {"token_map": ids}
    _, notes, kept = take(
        tmp_path, model, theirs, {"num_heads": 3, "vocab_size": V}, "model.safetensors"
    )
    assert len(notes) == 1
    assert torch.equal(kept["1.2.weight"], tensors["1.2.weight"])
    assert not kept["2.1.linear.bias"].any()
    flat = {
        name: torch.zeros_like(tensor) if "bias" in name else tensor
        for name, tensor in tensors.items()
    }
    tokens, hidden, root = draft_of(tmp_path / "run" / "drafter", backbone)
    expected = medusa_reference(flat, hidden, root)
    assert tokens == [root, *ids[torch.tensor(expected[1:])].tolist()]


def test_tied_matrices_become_one_each(tmp_path: Path, model: str) -> None:
    tensors = medusa_heads()
    # Several names for one storage, as in a state dict of heads that share a matrix.
    for head in (1, 2):
        tensors[f"{head}.2.weight"] = tensors["0.2.weight"]
    facts, notes, kept = take(tmp_path, model, tensors, {"medusa_num_heads": 2})
    assert torch.equal(kept["2.2.weight"], tensors["0.2.weight"])
    assert facts["heads"] == 3
    assert len(notes) == 1


def test_hydra_heads_draft_as_their_own_code(
    tmp_path: Path, model: str, backbone: Backbone
) -> None:
    tensors = hydra_heads()
    take(
        tmp_path, model, tensors, {"hydra_num_heads": 3, "grounded_heads": True}, "hydra_lm_head.pt"
    )
    tokens, hidden, root = draft_of(tmp_path / "run" / "drafter", backbone)

    def best(path: list[int], rank: int) -> int:
        k = len(path) - 1
        x = torch.cat([hidden[0], *(backbone.embedding.weight[token] for token in path)])
        y = (
            x @ tensors[f"hydra_mlp.{k}.0.linear.weight"].T
            + tensors[f"hydra_mlp.{k}.0.linear.bias"]
        )
        r = (
            x @ tensors[f"hydra_mlp.{k}.0.res_connection.weight"].T
            + tensors[f"hydra_mlp.{k}.0.res_connection.bias"]
        )
        x = r + torch.nn.functional.silu(y)
        y = (
            x @ tensors[f"hydra_mlp.{k}.1.linear.weight"].T
            + tensors[f"hydra_mlp.{k}.1.linear.bias"]
        )
        x = x + torch.nn.functional.silu(y)
        return int((tensors[f"hydra_lm_head.{k}.weight"] @ x).argsort(descending=True)[rank])

    for node in range(1, TREE.size):
        above = [tokens[ancestor] for ancestor in TREE.path(node)[:-1]]
        assert tokens[node] == best(above, TREE.ranks[node])


def test_hydra_biases_that_are_left_out_are_noted(tmp_path: Path, model: str) -> None:
    tensors = hydra_heads()
    tensors["hydra_lm_head.1.bias"][3] = -0.25
    _, notes, _ = take(tmp_path, model, tensors, {"grounded_heads": True}, "hydra_lm_head.pt")
    assert len(notes) == 1
    assert "0.25" in notes[0]


@pytest.mark.parametrize("file", ["model.safetensors", "pytorch_model.bin"])
def test_eagle3_folders_become_eagle_drafters(
    tmp_path: Path, model: str, backbone: Backbone, file: str
) -> None:
    theirs = eagle3()
    facts, _, kept = take(tmp_path, model, theirs, EAGLE, file)
    assert (facts["drafter"], facts["format"]) == ("eagle", "eagle3")
    draft_of(tmp_path / "run" / "drafter", backbone)
    # Every query head gets a copy of its shared keys.
    each, shared = (
        kept["midlayer.self_attn.k_proj.weight"],
        theirs["midlayer.self_attn.k_proj.weight"],
    )
    assert torch.equal(
        each.unflatten(0, (2, 2, 8)), shared.unflatten(0, (2, 1, 8)).expand(2, 2, 8, 2 * H)
    )


@pytest.mark.parametrize("name", ["heads-1.7b", "link"])
def test_a_run_is_named_after_its_folder_or_file(
    tmp_path: Path, model: str, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    write(tmp_path / "heads-1.7b", FILE, medusa_heads())
    (tmp_path / "link").symlink_to(tmp_path / "heads-1.7b")
    monkeypatch.chdir(tmp_path)
    assert import_drafter(f"{tmp_path}/{name}", model=model)[0].path.name == name
    assert import_drafter(f"{name}/{FILE}", model=model)[0].path.name == "medusa_lm_head"


@pytest.mark.slow
def test_an_imported_run_goes_through_calibrate_tree_chat_and_bench(
    tmp_path: Path, model: str
) -> None:
    write(tmp_path / "theirs", FILE, medusa_heads())
    run = f"{tmp_path}/run"
    medusa("import", tmp_path / "theirs", "--run", run, "--model", model)
    talks, questions = tmp_path / "talks.jsonl", tmp_path / "questions.jsonl"
    turns = [
        {"from": "human", "value": "w1 w2 w3"},
        {"from": "gpt", "value": " ".join(f"w{i}" for i in range(30))},
    ]
    talks.write_text(
        "\n".join(json.dumps({"id": str(i), "conversations": turns}) for i in range(3)) + "\n"
    )
    questions.write_text(json.dumps({"question_id": 1, "category": "a", "turns": ["w1 w2"]}) + "\n")
    common = ("--run", run, "--dtype", "fp32")
    medusa("calibrate", *common, "--data", talks, "--top", "4")
    medusa("tree", "--run", run, "--budget", "6")
    common = (*common, "--max-new-tokens", "12", "--json")
    assert json.loads(medusa("chat", *common, "--prompt", "w1 w2").stdout)["tokens"] == 12
    words = ("--questions", questions, "--methods", "ar,medusa")
    report = json.loads(medusa("bench", *common, *words).stdout)
    assert report["methods"]["medusa"]["identical"] == 1


def first(tensor: Tensor) -> Tensors:
    return {**medusa_heads(dtype=torch.float32), FIRST: tensor}


def mapped(ids: Tensor) -> Tensors:
    return {**medusa_heads(dtype=torch.float32), "token_map": ids}


UNFIT: dict[str, tuple[Callable[[], Tensors], dict | None, str]] = {
    "missing": (
        lambda: medusa_heads() | {"1.0.linear.bias": None},
        {"medusa_fc_bias": True},
        "1.0.linear.bias",
    ),
    "extra": (lambda: {**medusa_heads(), "0.0.extra": torch.zeros(3)}, None, "0.0.extra"),
    "vocabulary": (
        lambda: {**medusa_heads(), "2.2.weight": torch.zeros(V + 1, H)},
        None,
        "2.2.weight is 65x32",
    ),
    "width": (lambda: first(torch.zeros(16, 16)), None, f"{FIRST} is 16x16"),
    "not finite": (lambda: first(torch.full((H, H), float("nan"))), None, FIRST),
    "too few heads": (medusa_heads, {"medusa_num_heads": 4}, "4 heads"),
    "a billion heads": (
        lambda: {**medusa_heads(), "1000000000.0.linear.weight": torch.zeros(H, H)},
        None,
        "1000000000",
    ),
    "a head of many digits": (
        lambda: {**medusa_heads(), "9" * 5000 + ".0.linear.weight": torch.zeros(1)},
        None,
        "999",
    ),
    "no axes": (lambda: first(torch.tensor(1.0)), None, FIRST),
    "integers": (lambda: first(torch.ones(H, H, dtype=torch.int8)), None, FIRST),
    "eight-bit floats": (lambda: first(torch.ones(H, H).to(torch.float8_e4m3fn)), None, FIRST),
    "sparse": (lambda: first(torch.ones(H, H).to_sparse()), None, FIRST),
    "a number as 10^12": (lambda: first(torch.zeros(1).expand(10**12)), None, "1000000000000"),
    "no name": (lambda: {**medusa_heads(), "": torch.zeros(1)}, None, "unknown"),
    "a map without axes": (lambda: mapped(torch.tensor(3)), None, "token_map"),
    "a map outside": (lambda: mapped(torch.arange(V) + 1), None, "token_map"),
    "a map of one token": (lambda: mapped(torch.ones(V, dtype=torch.int64)), None, "token_map"),
    "a map of floats": (lambda: mapped(torch.arange(V) * 1.0), None, "token_map"),
    "no known layout": (lambda: {"transformer.weight": torch.zeros(2)}, None, "transformer.weight"),
    "no tensors": (lambda: {"a": [1, 2]}, None, FILE),
    "a map beside its marks": (lambda: eagle3() | {"d2t": eagle3()["d2t"] + 1}, EAGLE, "d2t"),
    "hydra, prefix": (hydra_heads, {"hydra_head_arch": "prefix-mlp"}, "prefix-mlp"),
    "hydra, 4 billion heads": (
        lambda: {**hydra_heads(), "hydra_mlp.4000000000.0.linear.weight": torch.zeros(1)},
        None,
        "hydra_mlp.4000000000.0.linear.weight",
    ),
}


@pytest.mark.quick(
    "a map beside its marks",
    "a map outside",
    "a number as 10^12",
    "eight-bit floats",
    "extra",
    "hydra, 4 billion heads",
    "hydra, prefix",
    "missing",
    "no known layout",
    "no tensors",
    "too few heads",
)
@pytest.mark.parametrize("name", UNFIT)
def test_unfit_tensors_are_named_and_nothing_is_written(
    tmp_path: Path, model: str, name: str
) -> None:
    tensors, config, part = UNFIT[name]
    present = {name: tensor for name, tensor in tensors().items() if tensor is not None}
    write(tmp_path / "theirs", FILE, present, config)
    refuse(tmp_path, model, part)


@pytest.mark.parametrize(
    ("change", "part"),
    [
        ({"rope_parameters": {"rope_type": "llama3", "rope_theta": 1e4}}, "rope_type"),
        ({"norm_before_residual": "x"}, "norm_before_residual"),
        ({"norm_before_fc": True}, "input_norm.weight"),  # which the file does not hold
        ({"fc_norm": True}, "fc_norm"),
        ({"num_hidden_layers": 2}, "num_hidden_layers"),
        ({"num_hidden_layers": "x"}, "num_hidden_layers"),
        ({"rope_theta": "x"}, "rope_theta"),
        ({"rms_norm_eps": [1]}, "rms_norm_eps"),
        ({"num_attention_heads": 10**12}, "num_attention_heads"),
        ({"head_dim": -8}, "head_dim"),
        ({"draft_vocab_size": 10**30}, "draft_vocab_size"),
        ({"draft_vocab_size": 23}, "d2t"),
        ({"eagle_aux_hidden_state_layer_ids": "abc"}, "layer_ids"),
        ({"eagle_aux_hidden_state_layer_ids": [1, 2, 9]}, "9"),
        (
            {"speculators_config": {"proposal_methods": [{"speculative_tokens": 10**12}]}},
            "num_heads",
        ),
    ],
)
def test_unfit_eagle3_configs_are_refused(
    tmp_path: Path, model: str, change: dict, part: str
) -> None:
    write(tmp_path / "theirs", "model.safetensors", eagle3(), {**EAGLE, **change})
    refuse(tmp_path, model, part)


class Hostile:
    """A call that a pickle makes when it is read."""

    def __init__(self, target: Path) -> None:
        self.target = target

    def __reduce__(self):
        return (Path.touch, (self.target,))


@pytest.mark.parametrize("way", ["torch", "legacy", "plain pickle"])
def test_no_pickle_is_executed(tmp_path: Path, model: str, way: str) -> None:
    path, touched = tmp_path / "theirs" / FILE, tmp_path / "touched"
    path.parent.mkdir()
    hostile = {**medusa_heads(), FIRST: Hostile(touched)}
    if way == "plain pickle":
        path.write_bytes(pickle.dumps(hostile))
    else:
        torch.save(hostile, path, _use_new_zipfile_serialization=way == "torch")
    refuse(tmp_path, model, str(path))
    assert not touched.exists()
    # The trap works: a reader that executes pickles springs it.
    torch.load(path, weights_only=False) if way != "plain pickle" else pickle.loads(
        path.read_bytes()
    )
    assert touched.exists()


def test_a_file_that_unpacks_to_more_than_its_size_is_refused(tmp_path: Path) -> None:
    torch.save({FIRST: torch.zeros(4 << 20)}, tmp_path / "plain.pt")
    with (
        zipfile.ZipFile(tmp_path / "plain.pt") as plain,
        zipfile.ZipFile(tmp_path / "bomb.pt", "w", zipfile.ZIP_DEFLATED) as bomb,
    ):
        for entry in plain.infolist():
            bomb.writestr(entry.filename, plain.read(entry))
    assert (tmp_path / "bomb.pt").stat().st_size < 1 << 20
    with pytest.raises(UserError, match="bomb.pt"):
        read_tensors(tmp_path / "bomb.pt")


def test_damaged_files_and_pipes_are_refused_at_once(tmp_path: Path, model: str) -> None:
    for file in (FILE, "medusa_lm_head.safetensors"):
        path = write(tmp_path / "theirs", file, medusa_heads()) / file
        path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
        refuse(tmp_path, model, file)
        path.unlink()
    for data in (
        (1 << 62).to_bytes(8, "little") + b"{",
        (64).to_bytes(8, "little") + b"{" * 64,
        b"",
    ):
        path.write_bytes(data)
        refuse(tmp_path, model, path.name)
    path.unlink()
    os.mkfifo(path)
    refuse(tmp_path, model, "theirs")
    os.mkfifo(path.with_name("config.json"))
    refuse(tmp_path, model, "theirs")


def test_an_index_cannot_name_files_outside_its_folder(tmp_path: Path, model: str) -> None:
    cache = tmp_path / "models--a--b"  # the hub's own links to its blobs are followed
    plain, snapshot = tmp_path / "theirs", cache / "snapshots" / "0123"
    for path in (
        plain / "part.safetensors",
        tmp_path / "outside.safetensors",
        cache / "blobs" / "sum",
    ):
        path.parent.mkdir(parents=True, exist_ok=True)
        save_file(medusa_heads(), path)
    snapshot.mkdir(parents=True)
    (snapshot / "blob.safetensors").symlink_to(cache / "blobs" / "sum")
    for folder in (plain, snapshot):
        (folder / "link.safetensors").symlink_to(tmp_path / "outside.safetensors")
        for name in (
            "../outside.safetensors",
            str(tmp_path / "outside.safetensors"),
            "link.safetensors",
        ):
            (folder / INDEX).write_text(json.dumps({"weight_map": {FIRST: name}}))
            with pytest.raises(UserError, match="outside"):
                import_drafter(str(folder), f"{tmp_path}/run", model)
    for number, (folder, name) in enumerate(((plain, "part"), (snapshot, "blob"))):
        (folder / INDEX).write_text(json.dumps({"weight_map": {FIRST: f"{name}.safetensors"}}))
        assert import_drafter(str(folder), f"{tmp_path}/run{number}", model)[1]["heads"] == 3


def test_a_drafter_made_for_fewer_positions_is_told(tmp_path: Path, model: str) -> None:
    notes = take(
        tmp_path, model, eagle3(), {**EAGLE, "max_position_embeddings": 32}, "model.safetensors"
    )[1]
    assert any("32 positions" in note for note in notes)
    words = ("doctor", "--run", f"{tmp_path}/run", "--model", model, "--quick", "--json")
    assert "32 positions" in medusa(*words, exit_code=None).stdout
    nested = {**EAGLE, "transformer_layer_config": {"max_position_embeddings": 64}}
    notes = take(tmp_path / "nested", model, eagle3(), nested, "model.safetensors")[1]
    assert any("64 positions" in note for note in notes)
    large = {**EAGLE, "max_position_embeddings": 4096}
    notes = take(tmp_path / "large", model, eagle3(), large, "model.safetensors")[1]
    assert not any("positions" in note for note in notes)


def shard(folder: Path, tensors: Tensors, count: int = 2) -> dict[str, str]:
    """Writes a checkpoint in shards with an index; returns the shard of each tensor."""
    files = {name: f"model-{i % count}.safetensors" for i, name in enumerate(tensors)}
    for file in set(files.values()):
        save_file({n: t for n, t in tensors.items() if files[n] == file}, folder / file)
    (folder / INDEX).write_text(json.dumps({"weight_map": files}))
    return files


@pytest.mark.parametrize("stray", [None, "model.safetensors", "pytorch_model.bin"])
def test_an_index_names_the_shard_of_each_tensor(
    tmp_path: Path, model: str, stray: str | None
) -> None:
    theirs = eagle3()
    other = {name: tensor + 1 for name, tensor in theirs.items() if tensor.is_floating_point()}
    write(tmp_path / "theirs", stray or "model.safetensors", {**theirs, **other}, EAGLE)
    files = shard(tmp_path / "theirs", theirs)
    if stray is None:
        (tmp_path / "theirs" / "model.safetensors").unlink()
    # Duplicates in a shard that the index does not name for them.
    path = tmp_path / "theirs" / "model-1.safetensors"
    save_file({**other, **load_file(path)}, path)
    run, _, notes = import_drafter(str(tmp_path / "theirs"), f"{tmp_path}/run", model)
    kept = load_file(next(run.drafter_dir.glob("*.safetensors")))
    for name in ("fc.weight", "lm_head.weight", "norm.weight"):
        assert torch.equal(kept[name], theirs[name])
    assert any((stray or "?") in note and INDEX in note for note in notes) == (stray is not None)

    lost = next(name for name in files if files[name] == "model-0.safetensors")
    path = tmp_path / "theirs" / "model-0.safetensors"
    whole = load_file(path)
    save_file({name: tensor for name, tensor in whole.items() if name != lost}, path)
    save_file(load_file(tmp_path / "theirs" / "model-1.safetensors"), tmp_path / "x.safetensors")
    with pytest.raises(UserError, match=rf"model-0.safetensors lacks 1 .*{lost}"):
        import_drafter(str(tmp_path / "theirs"), f"{tmp_path}/again", model)
    for data in (b"", b"version https://git-lfs", path.read_bytes()[:-1]):
        path.write_bytes(data)
        with pytest.raises(UserError, match="model-0.safetensors is .*download"):
            import_drafter(str(tmp_path / "theirs"), f"{tmp_path}/again", model)
    for number in range(2):
        (tmp_path / "theirs" / f"model-{number}.safetensors").unlink()
    with pytest.raises(UserError, match="model-0.safetensors, model-1.safetensors.*download"):
        import_drafter(str(tmp_path / "theirs"), f"{tmp_path}/again", model)


def test_heads_beside_the_index_of_a_model_are_read(tmp_path: Path, model: str) -> None:
    write(tmp_path / "theirs", FILE, medusa_heads())
    (tmp_path / "theirs" / INDEX).write_text(json.dumps({"weight_map": {"a": "gone.safetensors"}}))
    assert import_drafter(str(tmp_path / "theirs"), f"{tmp_path}/run", model)[1]["heads"] == 3


def test_missing_parts_are_named(tmp_path: Path, model: str) -> None:
    write(tmp_path / "theirs", FILE, medusa_heads())
    (tmp_path / "empty").mkdir()
    for place, owner, part in (
        ("empty", model, "no weights"),
        ("theirs", None, "model"),
        ("nowhere", model, "nowhere"),
        ("theirs", str(tmp_path / "empty"), "config.json"),
    ):
        with pytest.raises(UserError, match=part):
            import_drafter(str(tmp_path / place), f"{tmp_path}/run", owner)


def test_a_run_with_a_drafter_or_a_writer_is_not_overwritten(tmp_path: Path, model: str) -> None:
    write(tmp_path / "theirs", FILE, medusa_heads())
    (tmp_path / "run").mkdir()
    with writing(tmp_path / "run"):
        refuse(tmp_path, model, "medusa distill")
    import_drafter(str(tmp_path / "theirs"), f"{tmp_path}/run", model)
    with pytest.raises(UserError, match="run"):
        import_drafter(str(tmp_path / "theirs"), f"{tmp_path}/run", model)
