"""Stage 2: the joint loss by hand, schedules, who learns when, quality, resume, adapters merged at load."""

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch.nn import functional as F
from transformers import AutoModelForCausalLM, GPT2Config, PhiConfig, PhimoeConfig
from typer.testing import Result

from medusa_cli import engine as engines
from medusa_cli.data.packing import Dataset, held_out_ids, split_conversations
from medusa_cli.drafters import MedusaHeads
from medusa_cli.errors import UsageError, UserError
from medusa_cli.files.io import ReadReport
from medusa_cli.files.model_source import ModelSource
from medusa_cli.model import Backbone
from medusa_cli.model import lora as adapter
from medusa_cli.model.load import load_network
from medusa_cli.runs.load_options import LoadOptions
from medusa_cli.runs.recipe_files import load_recipe
from medusa_cli.runs.run import Run
from medusa_cli.train import Trainer, setup
from medusa_cli.train.log import read_log
from medusa_cli.train.losses import BatchLoss, stage_2_loss
from medusa_cli.train.schedules import lambda_0, peak_rates
from medusa_cli.train.setup import joint_backbone
from medusa_cli.train.training import _tuned_run
from tests import helpers
from tests.helpers import (
    FAMILIES,
    adapted_backbone,
    attach,
    attach_adapter,
    medusa,
    medusa_json,
    random_conversations,
    save_conversations,
    save_model,
    save_network,
    tiny_backbone,
    tiny_model,
    tiny_tokenizer,
    write_lines,
)
from tests.test_gguf import write_gguf

SETTINGS = [
    "train.stage=2",
    "train.dtype=fp32",
    "train.lora_rank=4",
    "train.lora_alpha=8",
    "train.lora_dropout=0",
]


def joint(*words: str) -> tuple[Backbone, MedusaHeads, Dataset, Callable[..., BatchLoss]]:
    """Returns an adapted model, heads, conversations, and the loss of some of them at a share of the training."""
    recipe = load_recipe(None, [*SETTINGS, *words])
    backbone = adapted_backbone()
    heads = MedusaHeads.create(backbone, 2, 1, "own")
    data = split_conversations(random_conversations(), ReadReport(), max_length=24, fraction=0.2)
    return backbone, heads, data, partial(stage_2_loss, backbone, heads, recipe.train)


@pytest.mark.parametrize("family", FAMILIES)
def test_padded_rows_equal_each_sequence_alone(family: str) -> None:
    backbone = tiny_backbone(family)
    rows = [torch.randint(5, 60, (n,)) for n in (5, 19, 12)]
    padded = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)
    with torch.no_grad():
        result = backbone.states(padded)
    for i, ids in enumerate(rows):
        alone = helpers.forward(backbone, ids).hidden
        assert torch.allclose(result[i, : len(ids)], alone, atol=2e-5)


@pytest.mark.parametrize("objective", ["kl", "ce"])
def test_joint_loss_is_that_of_the_model_plus_lambda_0_times_that_of_the_heads(
    objective: str,
) -> None:
    backbone, heads, data, loss = joint(f"train.objective={objective}", "train.schedule=constant")
    items = data.train[:3]
    result = loss(items, 0.5)
    model, terms = [], [[], []]
    with torch.no_grad():
        for item in items:
            out = helpers.forward(backbone, item.tokens)
            with adapter.adapter_off(backbone.model):
                original = helpers.forward(backbone, item.tokens)
            for start, end in item.spans:
                for at in range(start, end):
                    log_p, log_q = (
                        out.logits[at - 1].log_softmax(-1),
                        original.logits[at - 1].log_softmax(-1),
                    )
                    kl = (log_q.exp() * (log_q - log_p)).sum()
                    model.append(kl if objective == "kl" else -log_p[item.tokens[at]])
                    for k in (1, 2):
                        if at + k < end:
                            state = heads.blocks[k - 1](out.hidden[at - 1])
                            scores = heads.matrices[k - 1] @ state
                            terms[k - 1].append(
                                F.cross_entropy(scores[None], torch.tensor([item.tokens[at + k]]))
                            )
    expected = sum(model) / len(model) + 0.2 * sum(
        0.8 ** (k + 1) * sum(t) / len(model) for k, t in enumerate(terms)
    )
    assert float(result.total.detach()) == pytest.approx(float(expected.detach()), rel=1e-4)
    assert result.positions == sum(item.positions for item in items)
    assert result.parts["lambda_0"] == 0.2


def test_the_lambda_0_schedules() -> None:
    rules = {"peak": 0.2, "share": 0.25}
    assert [lambda_0(p, schedule="constant", **rules) for p in (0.0, 1.0)] == [(0.2, True)] * 2
    assert lambda_0(0.2, schedule="warmup", **rules) == (1.0, False)
    assert lambda_0(0.25, schedule="warmup", **rules) == (0.0, True)
    assert lambda_0(1.0, schedule="warmup", **rules) == (pytest.approx(0.2), True)
    sines = [lambda_0(p, schedule="sine", **rules)[0] for p in (0.0, 1 / 3, 1.0)]
    assert sines == pytest.approx([0.0, 0.1, 0.2])


def test_adapter_gets_no_gradient_while_the_heads_learn_alone() -> None:
    backbone, heads, data, loss = joint("train.schedule=warmup", "train.heads_first=0.5")
    learned = adapter.trained_weights(backbone.model).values()
    loss(data.train[:3], 0.1).total.backward()
    assert all(weight.grad is None for weight in learned)
    assert all(weight.grad is not None for weight in heads.parameters())
    loss(data.train[:3], 0.8).total.backward()
    assert all(weight.grad is not None and weight.grad.abs().sum() > 0 for weight in learned)


def test_every_linear_layer_learns_at_the_backbones_rate() -> None:
    backbone, heads, *_ = joint()
    learned = adapter.trained_weights(backbone.model)
    names = {name.split(".lora_")[0].rpartition(".")[2] for name in learned}
    assert names == {
        "q_proj",
        "k_proj",
        "v_proj",
        "o_proj",
        "gate_proj",
        "up_proj",
        "down_proj",
        "lm_head",
    }
    assert all("lora_" in name for name in learned)
    fast, slow = peak_rates(heads, load_recipe().train)
    assert fast == pytest.approx(4 * slow)


def test_fresh_adapter_has_no_kl_to_the_original() -> None:
    backbone, _, data, loss = joint()
    moved = loss(data.held_out, 1.0)
    with torch.no_grad():
        changed = loss(data.held_out, 1.0).parts
        for name, weight in adapter.trained_weights(backbone.model).items():
            if "lora_B" in name:
                weight.zero_()
        fresh = loss(data.held_out, 1.0).parts
    assert "kl" not in moved.parts
    assert fresh["kl"] == pytest.approx(0.0, abs=1e-6)
    assert fresh["agreement"] == 1.0
    assert fresh["nll"] == pytest.approx(fresh["nll_original"])
    assert changed["kl"] > 1e-4
    assert changed["nll_original"] == pytest.approx(fresh["nll"])


@pytest.fixture
def place(tmp_path: Path) -> tuple[str, str]:
    """A tiny model and a run with conversations."""
    return save_model(tmp_path / "model"), str(save_conversations(tmp_path / "run"))


def train(place: tuple[str, str], *words: str, exit_code: int = 0) -> Result:
    model, run = place
    common = [
        "--run",
        run,
        "--model",
        model,
        "--dtype",
        "fp32",
        "drafter.num_heads=2",
        "drafter.vocabulary=own",
    ]
    small = [
        "train.batch_tokens=96",
        "train.epochs=1",
        "train.lora_rank=4",
        "train.validation_every=4",
    ]
    return medusa("train", *common, *small, *words, exit_code=exit_code)


def test_stage_2_starts_from_stage_1_and_its_model_decodes(place: tuple[str, str]) -> None:
    model, run = place
    first = train(place, "--json")
    words = (
        "--stage",
        "2",
        "--schedule",
        "sine",
        "--tuning",
        "lora",
        "--json",
        "train.backbone_lr=0.01",
    )
    done = train(place, *words)
    assert "the heads start from" in done.stderr
    assert "step 0: held-out loss" in done.stderr
    summary = json.loads(done.stdout)
    assert (
        summary["expected_acceptance_at_start"] == json.loads(first.stdout)["expected_acceptance"]
    )
    assert summary["validation"]["parts"]["kl"] >= 0
    config = json.loads((Path(run) / "drafter" / "config.json").read_text())
    assert config["provenance"]["backbone"]["adapter"] == adapter.digest(Path(run) / "adapter")
    saved = json.loads((Path(run) / "adapter" / "adapter_config.json").read_text())
    assert saved["r"] == 4
    assert "lm_head" in saved["target_modules"]
    medusa("calibrate", "--run", run, "--top", "3")
    medusa("tree", "--run", run, "--budget", "5")
    questions = write_lines(
        Path(run) / "q.jsonl", [{"question_id": 1, "category": "a", "turns": ["w1 w2"]}]
    )
    words = (
        "--run",
        run,
        "--questions",
        questions,
        "--dtype",
        "fp32",
        "--max-new-tokens",
        "16",
        "--json",
    )
    methods = json.loads(medusa("bench", *words).stdout)["methods"]
    assert methods["hf"]["identical"] == methods["medusa"]["identical"] == 1
    # Without the adapter the drafter is refused, and a new stage-1 training drops it.
    words = (
        "--drafter",
        f"{run}/drafter",
        "--tree",
        f"{run}/tree.json",
        "--model",
        model,
        "--prompt",
        "w1",
    )
    assert "adapter" in medusa("chat", *words, exit_code=1).stderr
    train(place)
    assert not (Path(run) / "adapter").exists()


@pytest.mark.filterwarnings("error::FutureWarning")  # users should see none
def test_merged_adapter_computes_the_same(tmp_path: Path) -> None:
    # Tied: the trap is a merge into the embeddings.
    model = save_model(tmp_path / "model", family="qwen2")
    network, _ = load_network(ModelSource.of(model), LoadOptions(dtype="fp32"))
    embedding = network.get_input_embeddings().weight.clone()
    attach_adapter(network)
    adapter.save(network, tmp_path / "adapter", "tiny")
    unmerged = Backbone(network)
    attach(unmerged)
    ids = torch.arange(5, 25)
    expected = helpers.forward(unmerged, ids).logits
    with adapter.adapter_off(network):
        original = helpers.forward(unmerged, ids).logits
    assert not torch.allclose(expected, original, atol=1e-2)
    for engine in ("eager", "native"):
        merged = engines.load_backbone(
            model, LoadOptions(dtype="fp32", engine=engine), adapter=tmp_path / "adapter"
        )
        assert torch.allclose(helpers.forward(merged, ids).logits, expected, atol=1e-4)
        assert torch.equal(merged.embedding(torch.arange(len(embedding))), embedding)
    plain = engines.load_backbone(model, LoadOptions(dtype="fp32"))
    assert merged.identity == {**plain.identity, "adapter": adapter.digest(tmp_path / "adapter")}
    with pytest.raises(UserError, match="holds no adapter"):
        engines.load_backbone(model, LoadOptions(dtype="fp32"), adapter=tmp_path / "nothing")


def test_bf16_model_is_trained_in_fp32_by_the_recipe(tmp_path: Path) -> None:
    model = tmp_path / "model"
    tiny_model().to(torch.bfloat16).save_pretrained(model)
    tiny_tokenizer().save_pretrained(model)
    words = ["--run", save_conversations(tmp_path / "run", 8), "--model", model, *SETTINGS]
    medusa("train", *words, "drafter.num_heads=2", "drafter.vocabulary=own", "train.epochs=1")


@pytest.mark.slow
def test_validation_does_not_depend_on_batches(tmp_path: Path) -> None:
    model = save_model(tmp_path / "model")
    data = split_conversations(random_conversations(24), ReadReport(), max_length=30, fraction=0.4)
    result = []
    for tokens in (32, 96, 1024):
        recipe = load_recipe(None, [*SETTINGS, f"model={model}", f"train.batch_tokens={tokens}"])
        backbone = joint_backbone(recipe, LoadOptions(device="cpu", dtype="fp32"))
        torch.manual_seed(0)
        heads = MedusaHeads.create(backbone, 2, 1, "own")
        item = Trainer(backbone, heads, data, recipe, Run(tmp_path / "run")).validate()
        result.append(
            [*item.head_losses, *item.accuracies, item.parts["nll"], item.parts["agreement"]]
        )
    assert result[1] == pytest.approx(result[0], rel=1e-4)
    assert result[2] == pytest.approx(result[0], rel=1e-4)


@pytest.mark.quick("PhiConfig")
@pytest.mark.parametrize("config", [GPT2Config, PhiConfig, PhimoeConfig])
def test_joint_training_has_no_noise_of_the_model(config: Any, tmp_path: Path) -> None:
    torch.manual_seed(0)
    rates = {"attention_dropout": 0.5, "resid_pdrop": 0.5, "embd_pdrop": 0.5}
    rates |= {"router_jitter_noise": 0.5, "input_jitter_noise": 0.5, "attn_pdrop": 0.5}
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "vocab_size": 64}
    sizes |= {"num_attention_heads": 2, "num_key_value_heads": 2, "max_position_embeddings": 64}
    network = AutoModelForCausalLM.from_config(config(**sizes, **rates))
    model = save_network(network, tmp_path / "model")
    recipe = load_recipe(None, [*SETTINGS, f"model={model}"])
    backbone = joint_backbone(recipe, LoadOptions(device="cpu", dtype="fp32"))
    tokens = torch.randint(5, 60, (2, 9))
    assert backbone.model.training
    assert torch.equal(backbone.states(tokens), backbone.states(tokens))


def test_fully_tuned_model_gets_a_run_of_its_own(
    place: tuple[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    _, run = place
    # A JSON array, with what is no conversation in it and a line separator in an answer.
    lines = [json.loads(line) for line in Path(run, "distill.jsonl").read_text().splitlines()]
    messages = [
        {"role": "user", "content": "w1"},
        {"role": "assistant", "content": "w2\u2028 w3 w4"},
    ]
    other = Path(run, "other.json")
    other.write_text(
        json.dumps([*lines, "nothing", {"id": "odd", "messages": messages}], ensure_ascii=False)
    )
    words = [
        "--stage",
        "2",
        "--tuning",
        "full",
        "train.objective=ce",
        "train.validation_fraction=0.4",
    ]
    done = train(place, *words, "--data", str(other))
    assert f"--run {run}/tuned" in done.stdout.replace("\n", " ")
    assert Path(run, "train.png").is_file()
    validation = [
        line for line in read_log(Path(run, "train.jsonl")) if line["event"] == "validated"
    ][-1]
    copied = [
        json.loads(line)
        for line in Path(run, "tuned", "distill.jsonl").read_bytes().split(b"\n")[:-1]
    ]
    assert copied == [*lines, {"id": "odd", "messages": messages}]
    beside = compared(run)[0]
    assert beside["kl"] is None
    assert beside["agreement"] is None
    assert "in full" in medusa("compare", run, "--data", f"{run}/distill.jsonl", exit_code=1).stderr
    tuned = Path(run) / "tuned"
    assert (
        medusa_json("calibrate", "--run", tuned, "--top", "3")["positions"]
        == validation["positions"]
    )
    medusa(
        "chat", "--run", tuned, "--tree", "static:4", "--prompt", "w1 w2", "--max-new-tokens", "8"
    )
    # An earlier tuned model stays until the new one is whole.
    before = {path: path.read_bytes() for path in tuned.rglob("*") if path.is_file()}
    backbone = tiny_backbone()
    monkeypatch.setattr(backbone.tokenizer, "save_pretrained", lambda folder: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        _tuned_run(backbone, Run(Path(run)))
    assert {path: path.read_bytes() for path in tuned.rglob("*") if path.is_file()} == before
    moved = tuned.rename(Path(run) / "elsewhere")
    assert Run(moved).model == str(moved / "model")


def test_length_without_a_token_to_learn_is_refused(place: tuple[str, str], tmp_path: Path) -> None:
    data = write_lines(
        tmp_path / "long.jsonl", [{"id": "a", "tokens": list(range(8, 38)), "spans": [[20, 30]]}]
    )
    done = train(place, "--stage", "2", "train.max_length=16", "--data", str(data), exit_code=1)
    assert "train.max_length" in done.stderr


def test_model_far_from_the_original_is_warned_of(place: tuple[str, str]) -> None:
    far = [
        "train.objective=ce",
        "train.backbone_lr=0.05",
        "train.lambda_0=1",
        "--schedule",
        "constant",
    ]
    for words, warned in ((far, True), (["train.backbone_lr=0"], False)):
        assert ("moves away" in train(place, "--stage", "2", *words).stderr) == warned


def compared(*words: Any) -> list[dict]:
    return medusa_json("compare", *words)


def test_runs_of_both_stages_are_compared(place: tuple[str, str], tmp_path: Path) -> None:
    model, run = place
    train(place)
    for name, words in {
        "medusa2": ["--schedule", "sine"],
        "direct": [
            "--schedule",
            "constant",
            "train.objective=ce",
            "train.lambda_0=1",
            "train.backbone_lr=0.01",
        ],
    }.items():
        done = train((model, str(tmp_path / name)), "--stage", "2", "--from", run, *words)
        assert f"the heads start from {run}/drafter" in done.stderr
    runs = [run, str(tmp_path / "medusa2"), str(tmp_path / "direct")]
    rows = frozen, medusa2, direct = compared(*runs)
    assert frozen["kl"] == 0
    assert frozen["agreement"] == frozen["perplexity_ratio"] == 1
    assert direct["kl"] > medusa2["kl"] >= 0
    assert len({row["data"] for row in rows}) == 1
    # Measured anew on the held-out conversations, the figures are those of the trainings.
    lines = [json.loads(line) for line in Path(run, "distill.jsonl").read_text().splitlines()]
    out = held_out_ids([line["id"] for line in lines], 0.05)
    held_out = write_lines(tmp_path / "held.jsonl", [line for line in lines if line["id"] in out])
    trained = write_lines(
        tmp_path / "trained.jsonl", [line for line in lines if line["id"] not in out]
    )
    on_held, few = (
        compared(*runs, "--data", held_out),
        compared(*runs, "--data", trained, "--max-samples", "2"),
    )
    for again, row in zip(on_held, rows, strict=True):
        assert again["kl"] == pytest.approx(row["kl"], rel=1e-3, abs=1e-5)
        assert again["accuracies"] == pytest.approx(row["accuracies"])
        assert again["measured"] == row["measured"]
    assert on_held[0]["agreement"] == 1
    assert few[2]["kl"] != on_held[2]["kl"]
    for words, code in (
        (["--max-samples", "2"], 2),
        (["--dtype", "fp16"], 2),
        (["--quantize", "int8"], 2),
        (["--engine", "native"], 2),
        (["--activations", "fp32"], 2),
        (["--data", "gone"], 1),
    ):
        assert words[-2] in medusa("compare", *runs, *words, exit_code=code).stderr


def test_no_gradients_pass_through_a_network_in_fp16(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = load_recipe(None, [*SETTINGS, f"model={save_model(tmp_path / 'model')}"])
    with pytest.raises(UsageError, match="dtype fp16"):
        joint_backbone(recipe, LoadOptions(device="cpu", dtype="fp16"))
    # As of an fp16 checkpoint on a GPU; a CPU loads these in fp32.
    resolve = setup.resolve_dtype
    monkeypatch.setattr(
        setup,
        "resolve_dtype",
        lambda dtype, *more: torch.float16 if dtype == "auto" else resolve(dtype, *more),
    )
    network = joint_backbone(recipe, LoadOptions(device="cpu")).model
    assert {weight.dtype for weight in network.parameters()} <= {torch.bfloat16, torch.float32}


def test_qlora_of_a_gguf_file_names_its_setting(tmp_path: Path) -> None:
    file = tmp_path / "tiny.gguf"
    write_gguf(file)
    recipe = load_recipe(None, [f"model={file}", "train.tuning=qlora"])
    with pytest.raises(UsageError, match=r"train.tuning=qlora .* GGUF"):
        joint_backbone(recipe, LoadOptions())


def test_stage_2_starts_from_heads_and_adapter(place: tuple[str, str], tmp_path: Path) -> None:
    model, run = place
    train(place)
    first, again, last = (tmp_path / name for name in ("first", "again", "last"))
    train((model, str(first)), "--stage", "2", "--from", run, "train.backbone_lr=0.01")
    words = ["--stage", "2", "--from", str(first), "--data", f"{run}/distill.jsonl", "train.lr=0"]
    done = train((model, str(again)), *words, "train.backbone_lr=0")
    assert "the heads start from" in done.stderr
    (before,), (row,) = compared(first), compared(again)
    assert row["kl"] == pytest.approx(before["kl"], rel=1e-3)
    assert row["accuracies"] == before["accuracies"]
    # With heads_first=1 the heads learn alone, and the adapter stays.
    train((model, str(last)), *words[:-1], "--schedule", "warmup", "train.heads_first=1")
    for part, same in (
        (f"adapter/{adapter.WEIGHTS}", True),
        (f"drafter/{MedusaHeads.weights_file}", False),
    ):
        theirs, ours = (load_file(place / part) for place in (first, last))
        assert all(
            torch.equal(ours[name], weight) == same
            for name, weight in theirs.items()
            if "weight" in name
        )
    assert compared(last)[0]["lambda_0"] == "heads only"
    assert (
        "train.lora_rank"
        in train((model, str(again)), *words, "train.lora_rank=2", exit_code=1).stderr
    )
    third = str(tmp_path / "third")
    words = ["--stage", "2", "--from", run, "drafter.num_heads=1"]
    assert "--from" in train((model, third), *words, exit_code=1).stderr
    assert "no training" in medusa("compare", third, exit_code=1).stderr


def test_gradient_checkpointing_gives_the_same_gradients() -> None:
    def gradients(again: bool) -> list[torch.Tensor]:
        backbone, _, data, loss = joint("train.schedule=constant")
        if again:
            backbone.model.gradient_checkpointing_enable({"use_reentrant": False})
        backbone.model.train()
        assert backbone.model.is_gradient_checkpointing == again
        loss(data.train[:3], 0.5).total.backward()
        return [weight.grad for weight in adapter.trained_weights(backbone.model).values()]

    kept, again = gradients(False), gradients(True)
    assert any(float(grad.abs().max()) > 0 for grad in kept)
    for item, other in zip(kept, again, strict=True):
        assert torch.allclose(item, other, atol=1e-6)
