"""FIRP in training: its states are decoding's, its loss by hand, learning, resuming, the commands, refusals."""

import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch

from medusa_cli.data.conversation import Conversation
from medusa_cli.data.packing import batch_of
from medusa_cli.drafters import Batch
from medusa_cli.engine.extra_rows import ahead, trace
from medusa_cli.errors import UserError
from medusa_cli.runs.recipe import TrainRecipe, load_recipe
from medusa_cli.runs.resolve import LoadOptions
from medusa_cli.runs.run import Run
from medusa_cli.train import Stepped, Stopped, Trainer, Validated, build_drafter
from medusa_cli.train.losses import drafter_loss
from medusa_cli.train.setup import whole_conversations
from tests.helpers import FAMILIES, conversation, medusa, write_lines
from tests.test_firp import DEPTH, backbone_of, firp, reference

SETTINGS = [
    "drafter=firp",
    "drafter.num_heads=2",
    "drafter.draft_vocab_size=40",
    "train.batch_tokens=128",
    "train.max_tokens=null",
    "train.epochs=3",
    "train.lr=1e-2",
    "train.warmup_steps=0",
    "train.dtype=fp32",
    "train.validation_fraction=0.2",
    "train.validation_every=5",
    "train.checkpoint_every=4",
]


def conversations(*lengths: int) -> list[Conversation]:
    chance = random.Random(1)
    made = []
    for i, length in enumerate(lengths):
        tokens = [chance.randrange(5, 60) for _ in range(length)]
        made.append(Conversation(f"c{i}", tokens=tokens, spans=[(3, length // 2), (length // 2 + 1, length)]))
    return made


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("masked", [False, True])
def test_training_sees_the_states_that_decoding_does(family: str, masked: bool, monkeypatch) -> None:
    monkeypatch.setattr("medusa_cli.engine.extra_rows.CHUNK", 4)
    backbone = backbone_of(family)
    drafter = firp(backbone, masked=masked, layers=[2, 3, 3])
    items = conversations(13, 22, 9)
    batch = batch_of(backbone, items, traced=True)
    with torch.no_grad():
        found = ahead(backbone, batch.trace, drafter.rows_of(list(drafter.steps)), batch.rows)
    row = 0
    for one in items:
        for start, end in one.spans:
            # An answer of one token has no target that a head could learn.
            for at in range(start, end) if end - start > 1 else ():
                assert batch.next[row] == one.tokens[at]
                if at % 3 == 0:
                    expected = reference(family, drafter, one.tokens[:at])
                    assert torch.allclose(found[row], expected, atol=1e-4), (one.id, at)
                row += 1
    assert row == len(batch.next)


@pytest.mark.parametrize("vocabulary", ["draft", "shared"])
def test_the_loss_is_the_kl_to_the_distribution_so_many_steps_on(vocabulary: str) -> None:
    backbone = backbone_of()
    drafter = firp(backbone, vocabulary=vocabulary)
    [one] = conversations(17)[:1]
    one = Conversation(one.id, tokens=one.tokens, spans=[(4, 17)])
    batch = batch_of(backbone, [one], traced=True)
    drafter.train()
    losses = drafter_loss(drafter, backbone, batch, TrainRecipe(decay=0.7))
    states = ahead(backbone, batch.trace, drafter.rows_of(list(drafter.steps)), batch.rows)
    rows = backbone.lm_head_weight[drafter.draft_ids]
    known = drafter.vocabulary_index(torch.device("cpu")) >= 0
    total: Any = 0.0
    for k in (1, 2, 3):
        terms, count = [], len(batch.next)
        for p in range(count - k):
            if known[batch.next[p + k]]:
                target = (rows @ batch.hidden[p + k]).log_softmax(-1)
                found = (rows @ states[p, k - 1]).log_softmax(-1)
                divergence = (target.exp() * (target - found)).sum()
                terms.append(divergence - (target.exp() * target).sum())
        mean = sum(terms) / len(terms)
        assert float(losses.per_head[k - 1].detach()) == pytest.approx(float(mean.detach()), rel=1e-4)
        assert int(losses.counted[k - 1]) == count - k
        total = total + 0.7**k * sum(terms) / count
    given = torch.autograd.grad(losses.total, list(drafter.parameters()))
    for ours, theirs in zip(given, torch.autograd.grad(total, list(drafter.parameters())), strict=True):
        assert torch.allclose(ours, theirs, atol=1e-5)
    assert all(weight.grad is None for weight in backbone.model.parameters())


def test_a_trace_stops_at_the_answers_and_sees_no_other_conversation() -> None:
    backbone = backbone_of()
    drafter = firp(backbone)
    items = conversations(9, 30)
    pseudo = drafter.rows_of(list(drafter.steps))
    both, alone = batch_of(backbone, items, traced=True), batch_of(backbone, items[:1], traced=True)
    with torch.no_grad():
        mixed = ahead(backbone, both.trace, pseudo, both.rows)[: len(alone.next)]
        assert torch.allclose(mixed, ahead(backbone, alone.trace, pseudo, alone.rows), atol=1e-5)
    made = trace(backbone, torch.tensor([items[0].tokens]))
    assert len(made.states) == DEPTH + 1 and len(made.keys) == DEPTH


@pytest.fixture
def run(tmp_path: Path) -> Run:
    found = Run.open(f"{tmp_path}/run", create=True)
    write_lines(found.distill_path, [conversation(n, turns=1 + n % 2) for n in range(40)])
    return found


def trainer(run: Run, *words: str, resume: bool = False, stop=lambda: False) -> Trainer:
    recipe = load_recipe(None, [*SETTINGS, *words])
    backbone = backbone_of()
    dataset = whole_conversations(backbone, recipe, run.data_path, recipe.train.validation_fraction)
    torch.manual_seed(0)
    drafter = build_drafter(backbone, recipe.drafter, dataset)
    return Trainer(backbone, drafter, dataset, recipe, run, resume=resume, should_stop=stop)


def test_the_loss_falls_and_the_backbone_stays(run: Run) -> None:
    one = trainer(run, "train.epochs=8")
    before = {name: weight.clone() for name, weight in one.backbone.model.named_parameters()}
    start = one.validate(0)
    last = [event for event in one.events() if isinstance(event, Validated)][-1]
    assert last.loss < 0.85 * start.loss
    assert all(after < first for after, first in zip(last.head_losses, start.head_losses, strict=True))
    assert all(torch.equal(weight, before[name]) for name, weight in one.backbone.model.named_parameters())


def test_a_training_cut_off_goes_on_as_if_it_had_not_been(run: Run, tmp_path: Path) -> None:
    whole = [event.loss for event in trainer(run).events() if isinstance(event, Stepped)]
    other = Run.open(f"{tmp_path}/other", create=True)
    other.distill_path.write_bytes(run.distill_path.read_bytes())
    seen: list[float] = []
    first = trainer(other, stop=lambda: len(seen) == 6)
    for event in first.events():
        if isinstance(event, Stepped):
            seen.append(event.loss)
    assert isinstance(event, Stopped) and event.step == 6
    seen += [event.loss for event in trainer(other, resume=True).events() if isinstance(event, Stepped)]
    assert seen == pytest.approx(whole, rel=1e-5)


@pytest.fixture
def model(tmp_path: Path) -> str:
    backbone = backbone_of()
    backbone.model.set_attn_implementation("eager")
    backbone.model.save_pretrained(tmp_path / "model")
    backbone.tokenizer.save_pretrained(tmp_path / "model")
    return str(tmp_path / "model")


def words_of(run: Run, model: str, *more: str) -> list[str]:
    return ["train", *SETTINGS, *more, "--run", str(run.path), "--model", model, "--dtype", "fp32", "--quiet"]


def test_the_commands_from_train_to_chat(run: Run, model: str) -> None:
    result = medusa(*words_of(run, model))
    assert result.exit_code == 0, result.output
    config = json.loads((run.drafter_dir / "config.json").read_text())
    assert (config["drafter"], config["layers"], config["masked"]) == ("firp", [3, 5], False)
    last = [json.loads(line) for line in (run.path / "train.jsonl").read_text().splitlines()]
    checked = [line for line in last if line["event"] == "validated"][-1]
    place = ["--run", str(run.path), "--dtype", "fp32", "--quiet"]
    result = medusa("calibrate", *place, "--top", "4", "--json")
    assert result.exit_code == 0, result.output
    document = json.loads(result.stdout)
    assert document["positions"] == checked["positions"]
    assert [row[0] for row in document["accuracies"]] == pytest.approx(checked["accuracies"], abs=0.05)
    assert medusa("tree", "--budget", "5", "--run", str(run.path), "--quiet").exit_code == 0
    for engine in ("eager", "fast"):
        for tree in ([], ["--tree", "dynamic"]):
            result = medusa("chat", *place, "--engine", engine, *tree, "--prompt", "w3", "--max-new-tokens", "9")
            assert result.exit_code == 0, result.output


def test_no_gradient_is_lost_in_packed_weights(model: str) -> None:
    from medusa_cli.engine import load_backbone

    gradients = []
    for backbone in (backbone_of(), load_backbone(model, LoadOptions(dtype="fp32", engine="eager"), gradients=True)):
        drafter = firp(backbone).train()
        drafter_loss(
            drafter, backbone, batch_of(backbone, conversations(20), traced=True), TrainRecipe()
        ).total.backward()
        gradients.append([weight.grad for weight in drafter.parameters()])
    assert all(torch.allclose(*both, atol=1e-5) for both in zip(*gradients, strict=True))
    packed = load_backbone(model, LoadOptions(dtype="fp32", engine="eager"))
    with pytest.raises(UserError, match="packed weights lose gradients"):
        drafter_loss(drafter, packed, batch_of(packed, conversations(20), traced=True), TrainRecipe())


def test_bad_settings_end_in_one_line(run: Run, model: str) -> None:
    for more, part in (
        (["drafter.layers=[2]"], "drafter.layers"),
        (["drafter.layers=[2,6]"], "drafter.layers"),
        (["drafter.layers=[4,3]"], "drafter.layers"),
        (["drafter.matrices=one"], "drafter.matrices=one"),
        (["drafter.prefix_layers=1"], "drafter.prefix_layers=1"),
        (["train.regress=1"], "train.regress=1"),
        (["drafter.vocabulary=own"], "none that firp can score"),
        (["drafter=medusa", "drafter.layers=[2,3]"], "drafter.layers"),
        (["--engine", "fast"], "--engine fast"),
        (["--stage", "2"], "train.stage=2"),
    ):
        result = medusa(*words_of(run, model, *more))
        errors = [line for line in result.stderr.splitlines() if line.startswith("error: ")]
        assert result.exit_code != 0 and len(errors) == 1 and part in errors[0], (more, result.stderr)


def test_a_finished_training_is_measured_anew_on_other_conversations(run: Run, model: str, tmp_path: Path) -> None:
    assert medusa(*words_of(run, model)).exit_code == 0
    data = write_lines(tmp_path / "other.jsonl", [conversation(n) for n in range(50, 56)])
    result = medusa("compare", str(run.path), "--data", str(data), "--dtype", "fp32", "--json")
    assert result.exit_code == 0, result.output
    [row] = json.loads(result.stdout)
    assert (row["kl"], row["agreement"], row["data"]) == (0.0, 1.0, str(data))
    assert row["measured"] == sum(10 for _ in range(6)) and len(row["accuracies"]) == 2
    words = ["calibrate", "--run", str(run.path), "--data", str(data), "--dtype", "fp32", "--top", "1", "--json"]
    calibrated = json.loads(medusa(*words).stdout)["accuracies"]
    assert row["accuracies"] == pytest.approx([one for [one] in calibrated], abs=1e-6)


def test_a_batch_without_a_trace_is_refused() -> None:
    backbone = backbone_of()
    batch = Batch(torch.randn(4, 32), torch.arange(4), torch.zeros(4, dtype=torch.long))
    with pytest.raises(UserError, match="traces of whole sequences"):
        drafter_loss(firp(backbone), backbone, batch, TrainRecipe())
