"""Exported folders under transformers alone: the tokens of plain `generate`, for each kind of drafter."""

import hashlib
import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, GenerationConfig, TextStreamer

from medusa_cli.drafters import Amphista, Eagle, Firp, HydraHeads, MedusaHeads, load_drafter
from medusa_cli.engine import load_backbone
from medusa_cli.errors import UsageError, UserError
from medusa_cli.export.custom_generate import generate
from medusa_cli.export.custom_generate.policy import AdaptivePolicy, NgramIndex
from medusa_cli.export.folder import find_source
from medusa_cli.export.hf import export_hf
from medusa_cli.model import lora
from medusa_cli.runs.accuracies import STAMP, stamp_of
from medusa_cli.runs.resolve import LoadOptions
from medusa_cli.runs.run import Run, provenance
from medusa_cli.tree import Tree
from medusa_cli.tree.io import load_tree, save_tree
from tests.helpers import generate as decode
from tests.helpers import medusa, medusa_json, save_model, save_run, tiny_tokenizer

PROMPT = torch.tensor([[3, 6, 9, 20, 31, 44, 12]])
KINDS = {
    "medusa": (MedusaHeads, {}),
    "medusa, conditional": (MedusaHeads, {"conditional": 4}),
    "medusa, low rank": (MedusaHeads, {"rank": 8}),
    "medusa, shared": (MedusaHeads, {"vocabulary": "shared"}),
    "hydra": (HydraHeads, {}),
    "hydra++": (HydraHeads, {"prefix_layers": 1, "taps": (1,)}),
    "hydra over conversations": (HydraHeads, {"prefix_layers": 1, "context": "conversation"}),
    "amphista": (Amphista, {"attention_layers": 2}),
    "amphista over conversations": (Amphista, {"context": "conversation"}),
    "eagle": (Eagle, {"taps": (1, 2, 3)}),
}


def train(folder: Path, model: str, name: str = "hydra", **settings) -> Run:
    """Saves a run whose random drafter is often right: its tree is wide, the vocabulary small."""
    kind, own = KINDS[name]
    run = save_run(folder, model, heads=3, tree=Tree.dense([6, 4, 2]), calibrated=True)
    backbone = load_backbone(model, LoadOptions(dtype="fp32"))
    torch.manual_seed(1)
    settings = {"vocabulary": "draft", **own, **settings}
    if settings["vocabulary"] == "draft":
        settings["draft_ids"] = torch.randperm(backbone.vocab_size)[:40]
    drafter = kind.create(backbone, 3, 1 if kind is Eagle else 2, **settings)
    for weight in drafter.parameters():
        weight.data += 0.05 * torch.randn_like(weight)
    drafter.save(run.drafter_dir, provenance(backbone.identity))
    return run


def export(tmp_path: Path, name: str = "hydra", **shape) -> Path:
    """Exports a random drafter of a kind; returns the folder."""
    run = train(tmp_path / "run", save_model(tmp_path / "model", **{"layers": 4, **shape}), name)
    export_hf(find_source(f"{run.path}/"), tmp_path / "out")
    return tmp_path / "out"


def compare(folder: Path, **asked) -> tuple[torch.Tensor, torch.Tensor, int]:
    """Returns the tokens of plain `generate`, of the exported one, and how many passes the latter took."""
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
    plain, drafted, passes = compare(export(tmp_path, name))
    assert drafted.tolist() == plain.tolist()
    assert passes < plain.shape[1] - PROMPT.shape[1]


@pytest.mark.parametrize("name", KINDS)
def test_drafts_are_those_of_our_own_drafter(tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As many passes as our own decoding takes steps."""
    folder, passes = export(tmp_path, name), []
    model = AutoModelForCausalLM.from_pretrained(folder)
    model.register_forward_hook(lambda *_: passes.append(1))
    monkeypatch.setattr(NgramIndex, "find", lambda index, root: [])
    drafted = generate.generate(PROMPT, model=model, drafter=str(folder), drafts="always", max_new_tokens=48)
    backbone = load_backbone(str(tmp_path / "model"), LoadOptions(dtype="fp32", engine="eager"))
    drafter = load_drafter(tmp_path / "run" / "drafter", backbone)
    tree = load_tree(tmp_path / "run" / "tree.json")
    steps = list(decode(backbone, drafter, tree, PROMPT[0].tolist(), max_new_tokens=48))
    assert [token for step in steps for token in step.tokens] == drafted[0, PROMPT.shape[1] :].tolist()
    assert len(passes) == len(steps)


@pytest.mark.parametrize("family", ["mistral-window", "qwen3", "gemma3"])
def test_windows_and_other_families(tmp_path: Path, family: str) -> None:
    plain, drafted, _ = compare(export(tmp_path, family=family))
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
    plain, drafted, _ = compare(export(tmp_path), **asked)
    assert drafted.tolist() == plain.tolist()


def test_it_runs_offline_without_this_package(tmp_path: Path) -> None:
    folder = export(tmp_path)
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
    done = subprocess.run([sys.executable, "-c", code], cwd=folder, env=env, capture_output=True, text=True)
    assert done.stdout.strip() == "identical", done.stderr


def test_the_adapter_is_merged(tmp_path: Path) -> None:
    model = save_model(tmp_path / "model")
    run = train(tmp_path / "run", model)
    network = AutoModelForCausalLM.from_pretrained(model)
    lora.attach(network, rank=4, alpha=8, dropout=0.0)
    for name, weight in network.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(weight, std=0.2)
    lora.save(network, run.adapter_dir, model)
    export_hf(find_source(f"{run.path}/"), tmp_path / "out")
    plain, drafted, _ = compare(tmp_path / "out")
    exported = AutoModelForCausalLM.from_pretrained(tmp_path / "out")(PROMPT).logits[0]
    merged = lora.merge(AutoModelForCausalLM.from_pretrained(model), run.adapter_dir)(PROMPT).logits[0]
    torch.testing.assert_close(merged, exported, atol=1e-3, rtol=1e-3)
    assert drafted.tolist() == plain.tolist()
    untouched = AutoModelForCausalLM.from_pretrained(model)(PROMPT).logits[0]
    assert not torch.allclose(untouched, exported, atol=1e-2)


@pytest.mark.parametrize(
    ("stored", "written"),
    [(torch.float32, torch.float32), (torch.float16, torch.float16), (torch.float64, torch.bfloat16)],
)
def test_weights_keep_their_stored_type_if_the_config_names_none(tmp_path: Path, stored, written) -> None:
    model = Path(save_model(tmp_path / "model"))
    run = train(tmp_path / "run", str(model), "medusa")
    weights = load_file(model / "model.safetensors")
    save_file({name: one.to(stored) for name, one in weights.items()}, model / "model.safetensors", {"format": "pt"})
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(
        json.dumps({k: v for k, v in config.items() if k not in ("dtype", "torch_dtype")})
    )
    _, notes = export_hf(find_source(f"{run.path}/"), tmp_path / "out")
    assert {one.dtype for one in load_file(tmp_path / "out" / "model.safetensors").values()} == {written}
    assert len(notes) == (stored != written)


def test_every_file_has_its_checksum(tmp_path: Path) -> None:
    folder = export(tmp_path)
    sums = dict(reversed(line.split("  ")) for line in (folder / "SHA256SUMS").read_text().splitlines())
    files = {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()} - {"SHA256SUMS"}
    assert set(sums) == files
    assert all(hashlib.sha256((folder / name).read_bytes()).hexdigest() == digest for name, digest in sums.items())


def test_the_card_holds_the_newest_report_on_this_drafter(tmp_path: Path) -> None:
    run = train(tmp_path / "run", save_model(tmp_path / "model"))
    run.bench_dir.mkdir()
    for stem, stamp in (("2026-01", stamp_of(run.drafter_dir)), ("2026-02", "another drafter")):
        (run.bench_dir / f"{stem}.json").write_text(json.dumps({"drafting": {"medusa": {STAMP: stamp}}}))
        (run.bench_dir / f"{stem}.md").write_text(f"the table of {stem}")
    export_hf(find_source(f"{run.path}/"), tmp_path / "out")
    assert "the table of 2026-01" in (tmp_path / "out" / "README.md").read_text()


def test_the_tree_is_the_runs_or_of_the_budget(tmp_path: Path) -> None:
    run = train(tmp_path / "run", save_model(tmp_path / "model"), "medusa")
    source = find_source(f"{run.path}/")
    for budget, size in ((5, 5), (None, 1 + 6 + 24 + 48)):
        export_hf(source, tmp_path / str(budget), budget=budget)
        assert load_tree(tmp_path / str(budget) / "drafter" / "tree.json").size == size
    with pytest.raises(UsageError, match="budget"):
        export_hf(source, tmp_path / "large", budget=41)
    run.tree_path.unlink()
    export_hf(source, tmp_path / "default")
    assert load_tree(tmp_path / "default" / "drafter" / "tree.json").size == 16
    run.calibration_path.unlink()
    for budget in (5, None):
        with pytest.raises(UserError, match="no calibration"):
            export_hf(source, tmp_path / "unmeasured", budget=budget)
    save_tree(run.tree_path, Tree.chain(5), {})
    with pytest.raises(UserError, match="5 deep"):
        export_hf(source, tmp_path / "deep")
    assert not any((tmp_path / name).exists() for name in ("large", "unmeasured", "deep"))


def test_firp_is_refused(tmp_path: Path) -> None:
    backbone = load_backbone(save_model(tmp_path / "model"), LoadOptions(dtype="fp32"))
    drafter = Firp.create(backbone, 1, 1, "shared", layers=(1,))
    drafter.save(tmp_path / "run" / "drafter", provenance(backbone.identity))
    with pytest.raises(UserError, match="firp"):
        export_hf(find_source(f"{tmp_path}/run"), tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("words", [("hf", "few"), ("hf", "0"), ("hf", "9" * 5000), ("eagle3", "5")])
def test_an_impossible_budget_is_a_usage_error(tmp_path: Path, words: tuple[str, str]) -> None:
    done = medusa("export", "--to", words[0], "--output", tmp_path / "out", "--budget", words[1])
    assert done.exit_code == 2 and "--budget" in done.stderr


def test_the_command_writes_once_and_replaces_only_exports(tmp_path: Path) -> None:
    run, other = train(tmp_path / "run", save_model(tmp_path / "model"), "medusa"), tmp_path / "other"
    words = ["export", "--to", "hf", "--run", f"{run.path}/", "--output"]
    assert medusa_json(*words, tmp_path / "out")["format"] == "hf"
    assert "--overwrite" in medusa(*words, tmp_path / "out", exit_code=1).stderr
    medusa(*words, tmp_path / "out", "--overwrite", exit_code=0)
    other.mkdir()
    (other / "thesis.txt").write_text("mine")
    medusa(*words, other, "--overwrite", exit_code=1)
    assert (other / "thesis.txt").is_file()
    assert "--to" in medusa("export", "--to", "onnx", "--output", tmp_path / "out", exit_code=2).stderr


class Alternating(AdaptivePolicy):
    """Drafts in every third step."""

    def __init__(self, every: int = 3) -> None:
        self.every, self.steps = every, 0

    @property
    def drafts(self) -> bool:
        return self.steps % self.every == 0

    def record(self, drafts: bool, seconds: float, tokens: int) -> None:
        self.steps += 1


@pytest.mark.parametrize("name", KINDS)
def test_steps_without_drafts_between_change_no_token_and_no_later_draft(
    tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = export(tmp_path, name)
    model = AutoModelForCausalLM.from_pretrained(folder)
    drafter = generate.load_drafter(str(folder), model)
    plain = model.generate(PROMPT, max_new_tokens=60)

    def drafts(every: int) -> dict[int, list[int]]:
        """Returns the draft after so many tokens of the text."""
        found: dict[int, list[int]] = {}
        read, draft = [0], type(drafter).draft

        def recorded(self, tokens, states, root):
            read[0] += len(tokens)
            found[read[0]] = draft(self, tokens, states, root)
            return found[read[0]]

        drafter.policy = Alternating(every)
        with monkeypatch.context() as patched:
            patched.setattr(type(drafter), "draft", recorded)
            answer = generate.generate(PROMPT, model=model, drafter=str(folder), max_new_tokens=60)
        assert answer.tolist() == plain.tolist()
        return found

    always, rarely = drafts(1), drafts(3)
    common = always.keys() & rarely.keys()
    assert len(common) > 3 and len(always) > len(rarely)
    assert {end: rarely[end] for end in common} == {end: always[end] for end in common}


def paced(steps: int, **seconds: float) -> Counter[bool]:
    """Returns how many of so many steps draft, by the seconds of a token with and without drafts."""
    policy, counts = AdaptivePolicy(), Counter[bool]()
    for _ in range(steps):
        counts[policy.drafts] += 1
        policy.record(policy.drafts, 2 * seconds["drafted" if policy.drafts else "plain"], 2)
    return counts


@pytest.mark.parametrize("pays", [True, False])
def test_the_faster_way_is_used_and_the_other_is_tried_again(pays: bool) -> None:
    times = {"drafted": 0.5 if pays else 1.5, "plain": 1.0}
    early, late = paced(200, **times), paced(4000, **times)
    assert late[pays] > 3900 and late[not pays] > early[not pays] > 0


def test_repeated_text_is_drafted_as_far_as_it_is_accepted(tmp_path: Path) -> None:
    index, root = NgramIndex([1, 2, 3, 4, 5, 1]), 2
    assert index.find(2) == [3, 4, 5, 1]
    for _ in range(10):  # 1 to 5 go round
        accepted = [root, *index.find(root)]
        root = accepted[-1] % 5 + 1
        index.extend(accepted, root)
    assert len(index.find(root)) == 10 and index.find(root)[0] == root % 5 + 1
    index.extend([root], 9)  # not what the match says
    index.extend([9, 1], 2)
    assert index.find(2) == [3]
    folder, prompt, passes = export(tmp_path, "medusa"), PROMPT.repeat(1, 4), []
    model = AutoModelForCausalLM.from_pretrained(folder)
    plain = model.generate(prompt, max_new_tokens=60)
    model.register_forward_hook(lambda *_: passes.append(1))
    drafted = generate.generate(prompt, model=model, drafter=str(folder), drafts="always", max_new_tokens=60)
    assert drafted.tolist() == plain.tolist() and len(passes) < 60


def test_left_padding_scores_and_logits(tmp_path: Path) -> None:
    folder = export(tmp_path)
    model = AutoModelForCausalLM.from_pretrained(folder)
    drafting = {"custom_generate": str(folder), "trust_remote_code": True}
    padded = torch.cat([torch.zeros(1, 3, dtype=torch.long), PROMPT], dim=1)
    mask = (torch.arange(padded.shape[1]) >= 3).long()[None]
    asked = {"max_new_tokens": 20, "return_dict_in_generate": True, "attention_mask": mask, "repetition_penalty": 1.3}
    for wanted, other in (("scores", "logits"), ("logits", "scores")):
        flags = {f"output_{wanted}": True}
        plain = model.generate(padded, **flags, **asked)
        drafted = model.generate(padded, **flags, **drafting, **asked)
        assert drafted.sequences.tolist() == plain.sequences.tolist() and getattr(drafted, other) is None
        rows = torch.cat(getattr(drafted, wanted))
        torch.testing.assert_close(rows, torch.cat(getattr(plain, wanted)), atol=1e-4, rtol=1e-4)
        assert not rows.requires_grad


def test_the_streamer_gets_every_token(tmp_path: Path) -> None:
    folder = export(tmp_path)
    # Loaded in this way, model.generate is the exported function itself.
    model = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True)
    pieces: list[str] = []

    class Kept(TextStreamer):
        def on_finalized_text(self, text: str, stream_end: bool = False) -> None:
            pieces.append(text)

    answer = model.generate(PROMPT, max_new_tokens=20, streamer=Kept(tiny_tokenizer(), skip_prompt=True))
    assert "".join(pieces).split() == tiny_tokenizer().decode(answer[0, PROMPT.shape[1] :]).split()
    for refused in ({"inputs": PROMPT.repeat(2, 1)}, {"inputs": PROMPT, "num_beams": 2}):
        with pytest.raises(ValueError, match="one prompt at a time"):
            model.generate(max_new_tokens=4, **refused)


def test_stop_strings_end_an_answer_as_without(tmp_path: Path) -> None:
    folder, tokenizer = export(tmp_path), tiny_tokenizer()
    tokenizer.add_tokens("abcdef")  # before which StopStringCriteria sets every token, to see what it adds
    model = AutoModelForCausalLM.from_pretrained(folder)
    drafting = {"custom_generate": str(folder), "trust_remote_code": True}
    full = model.generate(PROMPT, max_new_tokens=40)
    asked = {"max_new_tokens": 40, "stop_strings": [tokenizer.decode(full[0, 20:22])]}
    plain = model.generate(PROMPT, tokenizer=tokenizer, **asked)
    assert plain.shape[1] < full.shape[1]
    assert model.generate(PROMPT, tokenizer=tokenizer, **drafting, **asked).tolist() == plain.tolist()
    config = GenerationConfig(**asked)
    drafted = model.generate(PROMPT, generation_config=config, tokenizer=tokenizer, **drafting)
    assert drafted.tolist() == plain.tolist() and config.stop_strings == asked["stop_strings"]
    with pytest.raises(ValueError, match="tokenizer="):
        model.generate(PROMPT, **drafting, **asked)


@pytest.mark.parametrize("name", ["hydra++", "amphista", "eagle"])
def test_answers_of_one_model_at_the_same_time_keep_their_own_texts(tmp_path: Path, name: str) -> None:
    folder = export(tmp_path, name)
    model = AutoModelForCausalLM.from_pretrained(folder)
    drafter = generate.load_drafter(str(folder), model)
    other, cache = PROMPT.flip(1).repeat(1, 3), dict(drafter.cache)
    asked = {"drafter": str(folder), "drafts": "always", "max_new_tokens": 12}
    alone = [generate.generate(prompt, model=model, **asked).tolist() for prompt in (PROMPT, other)]
    answers = []

    class Between:
        """Answers the other prompt in the middle of the first."""

        def put(self, tokens: torch.Tensor) -> None:
            if not answers and tokens.numel() == 1:
                answers.append(generate.generate(other, model=model, **asked).tolist())

        def end(self) -> None:
            pass

    assert [generate.generate(PROMPT, model=model, streamer=Between(), **asked).tolist(), *answers] == alone
    assert drafter.cache == cache


def test_a_prompt_needs_no_mask_of_its_length_squared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = export(tmp_path, "hydra++")
    model = AutoModelForCausalLM.from_pretrained(folder)
    drafter, masks = generate.load_drafter(str(folder), model), list[torch.Tensor]()
    attend = torch.nn.functional.scaled_dot_product_attention

    def watched(*given, attn_mask=None, **more):
        masks.extend([] if attn_mask is None else [attn_mask])
        return attend(*given, attn_mask=attn_mask, **more)

    x = torch.randn(9, drafter.size)
    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", watched)
    drafter.reset()
    at_once = drafter.decoder_layer("prefix.0", x)
    assert not masks
    drafter.reset()
    parts = torch.cat([drafter.decoder_layer("prefix.0", x[:4]), drafter.decoder_layer("prefix.0", x[4:])])
    torch.testing.assert_close(at_once, parts, atol=1e-5, rtol=1e-4)


def test_impossible_requests_are_refused_by_name(tmp_path: Path) -> None:
    folder = export(tmp_path)
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    asked = {"max_new_tokens": 8, "custom_generate": str(folder), "trust_remote_code": True}
    with pytest.raises(ValueError, match="drafter="):
        model.generate(PROMPT, **asked)
    drafted = model.generate(PROMPT, drafter=str(folder), **asked)
    assert drafted.tolist() == model.generate(PROMPT, max_new_tokens=8).tolist()
    for flag in ("output_hidden_states", "output_attentions"):
        with pytest.raises(ValueError, match=flag):
            model.generate(PROMPT, drafter=str(folder), return_dict_in_generate=True, **{flag: True}, **asked)
    with pytest.raises(ValueError, match="drafts="):
        model.generate(PROMPT, drafter=str(folder), drafts="often", **asked)
