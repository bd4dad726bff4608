"""Exported folders under transformers alone give the tokens of plain `generate`, for each kind of drafter."""

import hashlib
import itertools
import json
import os
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, GenerationConfig, TextStreamer

from medusa_cli.decode.ngram import NgramIndex
from medusa_cli.drafters import Amphista, Eagle, HydraHeads, MedusaHeads, load_drafter
from medusa_cli.drafters.io import save_drafter
from medusa_cli.engine import load_backbone
from medusa_cli.errors import UsageError, UserError
from medusa_cli.export import custom_generate
from medusa_cli.export.custom_generate import DraftSwitch, generate
from medusa_cli.export.folder import find_source
from medusa_cli.export.hf import export_hf
from medusa_cli.model import lora
from medusa_cli.runs.load_options import LoadOptions
from medusa_cli.runs.run import Run, provenance
from medusa_cli.tree import Tree
from medusa_cli.tree.io import load_tree, save_tree
from tests.helpers import (
    attach_adapter,
    medusa,
    medusa_json,
    python,
    save_model,
    save_network,
    save_run,
    tiny_tokenizer,
)
from tests.helpers import generate as decode
from tests.models import tiny_network

PROMPT = torch.tensor([[3, 6, 9, 20, 31, 44, 12]])
TOKENS = 30
KINDS = {
    "medusa": (MedusaHeads, {}),
    "medusa, conditional": (MedusaHeads, {"conditional": 4}),
    "medusa, shared": (MedusaHeads, {"vocabulary": "shared"}),
    "hydra": (HydraHeads, {}),
    "hydra++": (HydraHeads, {"prefix_layers": 1}),
    "hydra over conversations": (HydraHeads, {"prefix_layers": 1, "context": "conversation"}),
    "amphista": (Amphista, {"attention_layers": 2}),
    "amphista over conversations": (Amphista, {"context": "conversation"}),
    "eagle": (Eagle, {"taps": (1, 2, 3)}),
    "eagle in int8": (Eagle, {"taps": (1, 2, 3)}),
    "hydra in int8": (HydraHeads, {}),
}
Export = Callable[..., Path]


def drafting(folder: Path, **more: Any) -> dict[str, Any]:
    """Returns the arguments by which transformers' `generate` drafts."""
    return {"custom_generate": str(folder), "trust_remote_code": True, **more}


def random_run(folder: Path, model: str, name: str = "hydra") -> Run:
    """Saves a run whose random drafter is often right: its tree is wide, the vocabulary small."""
    kind, own = KINDS[name]
    run = save_run(folder, model, tree=Tree.dense([6, 4, 2]), calibrated=True)
    backbone = load_backbone(model, LoadOptions(dtype="fp32"))
    torch.manual_seed(1)
    settings = {"vocabulary": "draft", **own}
    if settings["vocabulary"] == "draft":
        settings["draft_ids"] = torch.randperm(backbone.vocab_size)[:40]
    drafter = kind.create(backbone, 3, 1 if kind is Eagle else 2, **settings)
    for weight in drafter.parameters():
        weight.data += 0.05 * torch.randn_like(weight)
    int8 = name.endswith("int8")
    save_drafter(drafter, run.drafter_dir, provenance(backbone.identity), int8=int8)
    return run


@pytest.fixture(scope="module")
def export(tmp_path_factory: pytest.TempPathFactory) -> Export:
    """Exports a random drafter of a kind, once; its run and model lie beside the folder."""
    folders: dict[tuple[str, str], Path] = {}

    def write(name: str = "hydra", family: str = "llama") -> Path:
        if (name, family) not in folders:
            place = tmp_path_factory.mktemp("exported")
            run = random_run(
                place / "run", save_model(place / "model", layers=4, family=family), name
            )
            export_hf(find_source(f"{run.path}/"), place / "out")
            folders[name, family] = place / "out"
        return folders[name, family]

    return write


def compare(folder: Path, prompt: torch.Tensor = PROMPT, **settings) -> int:
    """Asserts that exported and plain `generate` give the same tokens; returns the passes of the former."""
    model, answers, passes = AutoModelForCausalLM.from_pretrained(folder), [], list[int]()
    model.register_forward_hook(lambda *_: passes.append(1))
    for how in ({}, drafting(folder, drafts="always")):
        passes.clear()
        torch.manual_seed(5)
        answers.append(model.generate(prompt, max_new_tokens=TOKENS, **how, **settings).tolist())
    assert answers[0] == answers[1]
    return len(passes)


@pytest.mark.slow
@pytest.mark.parametrize("name", KINDS)
def test_every_kind_drafts_as_in_our_own_decoding(
    export: Export, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, passes = export(name), list[int]()
    assert compare(folder) < TOKENS
    model = AutoModelForCausalLM.from_pretrained(folder)
    model.register_forward_hook(lambda *_: passes.append(1))
    monkeypatch.setattr(NgramIndex, "find", lambda index, text, root: [])
    answer = generate(
        PROMPT, model=model, drafter=str(folder), drafts="always", max_new_tokens=TOKENS
    )
    backbone = load_backbone(
        str(folder.parent / "model"), LoadOptions(dtype="fp32", engine="eager")
    )
    drafter, tree = (
        load_drafter(folder.parent / "run" / "drafter", backbone),
        load_tree(folder / "drafter" / "tree.json"),
    )
    steps = list(decode(backbone, drafter, tree, PROMPT[0].tolist(), max_new_tokens=TOKENS))
    assert [token for step in steps for token in step.tokens] == answer[
        0, PROMPT.shape[1] :
    ].tolist()
    assert len(passes) == len(steps)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "settings"),
    [
        ("mistral-window", {}),
        ("qwen3", {}),
        ("gemma3", {}),
        ("llama", {"do_sample": True, "temperature": 0.8, "top_p": 0.9}),
        ("llama", {"do_sample": True, "top_k": 5, "repetition_penalty": 1.3}),
        ("llama", {"repetition_penalty": 1.5, "no_repeat_ngram_size": 2}),
    ],
)
def test_families_samples_and_penalties_give_the_tokens_of_plain_generate(
    export: Export, family: str, settings: dict
) -> None:
    compare(export(family=family), **settings)


@pytest.mark.slow
def test_nothing_is_drafted_beyond_learned_positions(tmp_path: Path) -> None:
    network = tiny_network("gpt2", vocab_size=64, max_position_embeddings=PROMPT.shape[1] + TOKENS)
    run = random_run(tmp_path / "run", save_network(network, tmp_path / "model"), "medusa")
    export_hf(find_source(f"{run.path}/"), tmp_path / "out")
    assert compare(tmp_path / "out", eos_token_id=None) < TOKENS


def test_repeated_text_is_drafted(export: Export) -> None:
    assert compare(export("medusa"), PROMPT.repeat(1, 4)) < TOKENS


@pytest.mark.slow
def test_it_runs_offline_without_this_package(export: Export, tmp_path: Path) -> None:
    code = (
        "import sys, torch; sys.modules['medusa_cli'] = None\n"
        "from transformers import AutoModelForCausalLM\n"
        "model = AutoModelForCausalLM.from_pretrained('.')\n"
        f"prompt = torch.tensor({PROMPT.tolist()})\n"
        "drafted = model.generate(prompt, max_new_tokens=12, custom_generate='.', trust_remote_code=True)\n"
        "assert drafted.tolist() == model.generate(prompt, max_new_tokens=12).tolist()\n"
        "print('identical')"
    )
    env = {**os.environ, "HF_HUB_OFFLINE": "1", "HF_MODULES_CACHE": str(tmp_path / "modules")}
    env.pop("PYTHONPATH", None)
    done = python(code, cwd=export(), env=env)
    assert done.stdout.strip() == "identical", done.stderr


def test_the_adapter_is_merged(tmp_path: Path) -> None:
    model = save_model(tmp_path / "model")
    run = random_run(tmp_path / "run", model)
    network = AutoModelForCausalLM.from_pretrained(model)
    attach_adapter(network, std=0.2)
    lora.save(network, run.adapter_dir, model)
    export_hf(find_source(f"{run.path}/"), tmp_path / "out")
    compare(tmp_path / "out")
    plain, exported = (
        AutoModelForCausalLM.from_pretrained(folder) for folder in (model, tmp_path / "out")
    )
    assert not torch.allclose(plain(PROMPT).logits, exported(PROMPT).logits, atol=1e-2)
    merged = lora.merge(plain, run.adapter_dir)(PROMPT).logits
    torch.testing.assert_close(merged, exported(PROMPT).logits, atol=1e-3, rtol=1e-3)


@pytest.mark.quick("stored2-written2")
@pytest.mark.parametrize(
    ("stored", "written"),
    [
        (torch.float32, torch.float32),
        (torch.float16, torch.float16),
        (torch.float64, torch.bfloat16),
    ],
)
def test_weights_keep_their_stored_type_if_the_config_names_none(
    tmp_path: Path, stored, written
) -> None:
    model = Path(save_model(tmp_path / "model"))
    run = random_run(tmp_path / "run", str(model), "medusa")
    weights = {
        name: weight.to(stored) for name, weight in load_file(model / "model.safetensors").items()
    }
    save_file(weights, model / "model.safetensors", {"format": "pt"})
    config = json.loads((model / "config.json").read_text())
    untyped = {key: value for key, value in config.items() if key not in ("dtype", "torch_dtype")}
    (model / "config.json").write_text(json.dumps(untyped))
    _, notes = export_hf(find_source(f"{run.path}/"), tmp_path / "out")
    assert {
        weight.dtype for weight in load_file(tmp_path / "out" / "model.safetensors").values()
    } == {written}
    assert len(notes) == (stored != written)


def test_the_tree_is_the_runs_or_of_the_budget(tmp_path: Path) -> None:
    run = random_run(tmp_path / "run", save_model(tmp_path / "model"), "medusa")
    source = find_source(f"{run.path}/")
    for budget, size in ((5, 5), (None, 1 + 6 + 24 + 48)):
        export_hf(source, tmp_path / str(budget), budget=budget)
        assert load_tree(tmp_path / str(budget) / "drafter" / "tree.json").size == size
    with pytest.raises(UsageError, match="budget"):
        export_hf(source, tmp_path / "refused", budget=41)
    run.tree_path.unlink()
    export_hf(source, tmp_path / "default")
    assert load_tree(tmp_path / "default" / "drafter" / "tree.json").size == 16
    run.calibration_path.unlink()
    for budget in (5, None):
        with pytest.raises(UserError, match="calibration"):
            export_hf(source, tmp_path / "refused", budget=budget)
    save_tree(run.tree_path, Tree.chain(5), {})
    with pytest.raises(UserError, match="5 deep"):
        export_hf(source, tmp_path / "refused")
    assert not (tmp_path / "refused").exists()


def test_the_command_writes_checksums_and_replaces_only_exports(tmp_path: Path) -> None:
    run, other = (
        random_run(tmp_path / "run", save_model(tmp_path / "model"), "medusa"),
        tmp_path / "other",
    )
    words = ["export", "--to", "hf", "--run", f"{run.path}/", "--output"]
    assert medusa_json(*words, tmp_path / "out")["format"] == "hf"
    assert "--overwrite" in medusa(*words, tmp_path / "out", exit_code=1).stderr
    medusa(*words, tmp_path / "out", "--overwrite")
    sums = [line.split("  ") for line in (tmp_path / "out" / "SHA256SUMS").read_text().splitlines()]
    files = [
        path
        for path in (tmp_path / "out").rglob("*")
        if path.is_file() and path.name != "SHA256SUMS"
    ]
    assert {tmp_path / "out" / name for _, name in sums} == set(files)
    assert all(
        hashlib.sha256((tmp_path / "out" / name).read_bytes()).hexdigest() == digest
        for digest, name in sums
    )
    other.mkdir()
    (other / "thesis.txt").write_text("not an export")
    medusa(*words, other, "--overwrite", exit_code=1)
    assert (other / "thesis.txt").is_file()


@pytest.mark.quick("eagle")
@pytest.mark.parametrize("name", ["medusa", "hydra over conversations", "amphista", "eagle"])
def test_steps_without_drafts_change_no_token_and_no_later_draft(
    export: Export, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = str(export(name))
    model = AutoModelForCausalLM.from_pretrained(folder)
    loaded = custom_generate.load_drafter(folder, model)
    plain, draft = model.generate(PROMPT, max_new_tokens=60), type(loaded.drafter).draft

    def drafts(every: int) -> dict[int, list[int]]:
        """Returns the drafts of every n-th step by their position in the text."""
        by_position: dict[int, list[int]] = {}

        def recorded(self, backbone, sequences, new, tree):
            drafts = draft(self, backbone, sequences, new, tree)
            by_position[new[0].end] = drafts[0].tokens.tolist()
            return drafts

        steps = itertools.count(1)
        loaded.switch = SimpleNamespace(drafts=True)
        loaded.switch.record = lambda *_: setattr(loaded.switch, "drafts", next(steps) % every == 0)
        monkeypatch.setattr(type(loaded.drafter), "draft", recorded)
        answer = generate(PROMPT, model=model, drafter=folder, max_new_tokens=60)
        assert answer.tolist() == plain.tolist()
        return by_position

    always, rarely = drafts(1), drafts(3)
    common = always.keys() & rarely.keys()
    assert len(common) > 3
    assert len(always) > len(rarely)
    assert {end: rarely[end] for end in common} == {end: always[end] for end in common}


@pytest.mark.parametrize("pays", [True, False])
def test_the_faster_way_is_used_and_the_other_is_retried(pays: bool) -> None:
    def count(steps: int) -> Counter[bool]:
        policy, counts = DraftSwitch(), Counter[bool]()
        for _ in range(steps):
            counts[policy.drafts] += 1
            policy.record(policy.drafts, 1.0 if policy.drafts == pays else 2.0, 2)
        return counts

    early, late = count(200), count(4000)
    assert late[pays] > 3900
    assert late[not pays] > early[not pays] > 0


@pytest.mark.slow
def test_left_padding_scores_and_logits(export: Export) -> None:
    folder = export()
    model = AutoModelForCausalLM.from_pretrained(folder)
    padded = torch.cat([torch.zeros(1, 3, dtype=torch.long), PROMPT], dim=1)
    mask = (torch.arange(padded.shape[1]) >= 3).long()[None]
    settings = {"max_new_tokens": 20, "return_dict_in_generate": True, "attention_mask": mask}
    for wanted, other in (("scores", "logits"), ("logits", "scores")):
        settings |= {f"output_{wanted}": True, f"output_{other}": False, "repetition_penalty": 1.3}
        plain, drafted = (
            model.generate(padded, **how, **settings) for how in ({}, drafting(folder))
        )
        assert drafted.sequences.tolist() == plain.sequences.tolist()
        assert getattr(drafted, other) is None
        rows = torch.cat(getattr(drafted, wanted))
        torch.testing.assert_close(rows, torch.cat(getattr(plain, wanted)), atol=1e-4, rtol=1e-4)
        assert not rows.requires_grad


def test_the_streamer_gets_every_token(export: Export) -> None:
    # Loaded in this way, model.generate is the exported function itself.
    model = AutoModelForCausalLM.from_pretrained(export(), trust_remote_code=True)
    pieces: list[str] = []

    class Kept(TextStreamer):
        def on_finalized_text(self, text: str, stream_end: bool = False) -> None:
            pieces.append(text)

    answer = model.generate(
        PROMPT, max_new_tokens=20, streamer=Kept(tiny_tokenizer(), skip_prompt=True)
    )
    assert "".join(pieces).split() == tiny_tokenizer().decode(answer[0, PROMPT.shape[1] :]).split()


@pytest.mark.slow
def test_stop_strings_end_an_answer_as_in_plain_generate(export: Export) -> None:
    folder, tokenizer = export(), tiny_tokenizer()
    # Before which StopStringCriteria sets every token, to see what it adds.
    tokenizer.add_tokens("abcdef")
    model, how = AutoModelForCausalLM.from_pretrained(folder), drafting(folder)
    full = model.generate(PROMPT, max_new_tokens=40)
    settings = {"max_new_tokens": 40, "stop_strings": [tokenizer.decode(full[0, 20:22])]}
    plain = model.generate(PROMPT, tokenizer=tokenizer, **settings)
    assert plain.shape[1] < full.shape[1]
    assert model.generate(PROMPT, tokenizer=tokenizer, **how, **settings).tolist() == plain.tolist()
    config = GenerationConfig(**settings)
    drafted = model.generate(PROMPT, generation_config=config, tokenizer=tokenizer, **how)
    assert drafted.tolist() == plain.tolist()
    assert config.stop_strings == settings["stop_strings"]
    with pytest.raises(ValueError, match="tokenizer="):
        model.generate(PROMPT, **how, **settings)


@pytest.mark.quick("eagle")
@pytest.mark.parametrize("name", ["hydra++", "amphista", "eagle"])
def test_interleaved_answers_of_one_model_keep_their_own_texts(export: Export, name: str) -> None:
    folder = export(name)
    model = AutoModelForCausalLM.from_pretrained(folder)
    other = PROMPT.flip(1).repeat(1, 3)
    settings = {"drafter": str(folder), "drafts": "always", "max_new_tokens": 12}
    alone = [generate(prompt, model=model, **settings).tolist() for prompt in (PROMPT, other)]
    answers = []

    class Between:
        """Answers the other prompt in the middle of the first."""

        def put(self, tokens: torch.Tensor) -> None:
            if not answers and tokens.numel() == 1:
                answers.append(generate(other, model=model, **settings).tolist())

        def end(self) -> None:
            pass

    assert [
        generate(PROMPT, model=model, streamer=Between(), **settings).tolist(),
        *answers,
    ] == alone


@pytest.mark.slow
def test_unsupported_arguments_are_refused_by_name(export: Export) -> None:
    folder = export()
    model = AutoModelForCausalLM.from_pretrained(folder.parent / "model")
    how = drafting(folder, max_new_tokens=8)
    with pytest.raises(ValueError, match="drafter="):
        model.generate(PROMPT, **how)
    how["drafter"] = str(folder)
    assert (
        model.generate(PROMPT, **how).tolist() == model.generate(PROMPT, max_new_tokens=8).tolist()
    )
    for wrong, part in (
        ({"output_hidden_states": True, "return_dict_in_generate": True}, "output_hidden_states"),
        ({"output_attentions": True, "return_dict_in_generate": True}, "output_attentions"),
        ({"drafts": "often"}, "drafts="),
        ({"num_beams": 2}, "one prompt at a time"),
        ({"inputs": PROMPT.repeat(2, 1)}, "one prompt at a time"),
    ):
        with pytest.raises(ValueError, match=part):
            model.generate(**{"inputs": PROMPT, **wrong}, **how)


def test_models_with_running_states_are_refused(tmp_path: Path) -> None:
    model = save_network(tiny_network("lfm2", vocab_size=64), tmp_path / "model")
    run = random_run(tmp_path / "run", model, "medusa")
    with pytest.raises(UserError, match="running state"):
        export_hf(find_source(f"{run.path}/"), tmp_path / "out")
    assert not (tmp_path / "out").exists()
