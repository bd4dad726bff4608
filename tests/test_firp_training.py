"""FIRP in training: its states are decoding's, its loss by hand, learning, resuming, the commands, refusals."""

import dataclasses
import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from medusa_cli import console
from medusa_cli.cli import app
from medusa_cli.drafters import Batch
from medusa_cli.drafters.base import Objective
from medusa_cli.drafters.firp import check_layers
from medusa_cli.engines.trace import ahead, trace
from medusa_cli.errors import UserError
from medusa_cli.runs.recipe import load_recipe
from medusa_cli.runs.run import Run
from medusa_cli.training import Stepped, Stopped, Trainer, Validated, build_drafter
from medusa_cli.training.conversations import Conversation, batch_of
from medusa_cli.training.setup import whole_conversations
from medusa_cli.training.trials import figures, try_layers
from tests.test_firp import DEPTH, backbone_of, firp, reference
from tests.test_training import conversation, write_lines
from tests.tiny import FAMILIES

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


@pytest.fixture(autouse=True)
def loud():
    yield
    console.configure()


def conversations(*lengths: int) -> list[Conversation]:
    chance = random.Random(1)
    made = []
    for i, length in enumerate(lengths):
        tokens = torch.tensor([chance.randrange(5, 60) for _ in range(length)])
        made.append(Conversation(f"c{i}", tokens, [(3, length // 2), (length // 2 + 1, length)]))
    return made


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("masked", [False, True])
def test_training_sees_the_states_that_decoding_does(family: str, masked: bool, monkeypatch) -> None:
    monkeypatch.setattr("medusa_cli.engines.trace.CHUNK", 4)
    backbone = backbone_of(family)
    drafter = firp(backbone, masked=masked, layers=[2, 3, 3])
    items = conversations(13, 22, 9)
    batch = batch_of(backbone, items, traced=True)
    with torch.no_grad():
        found = ahead(backbone, batch.trace, drafter._pseudo(list(drafter.steps)), batch.rows)
    row = 0
    for one in items:
        for start, end in one.spans:
            # An answer of one token has no target that a head could learn.
            for at in range(start, end) if end - start > 1 else ():
                assert batch.next[row] == one.tokens[at]
                if at % 3 == 0:
                    expected = reference(family, drafter, one.tokens[:at].tolist())
                    assert torch.allclose(found[row], expected, atol=1e-4), (one.id, at)
                row += 1
    assert row == len(batch.next)


@pytest.mark.parametrize("vocabulary", ["draft", "shared"])
def test_the_loss_is_the_kl_to_the_distribution_so_many_steps_on(vocabulary: str) -> None:
    backbone = backbone_of()
    drafter = firp(backbone, vocabulary=vocabulary)
    [one] = conversations(17)[:1]
    one = Conversation(one.id, one.tokens, [(4, 17)])
    batch = batch_of(backbone, [one], traced=True)
    drafter.train()
    losses = drafter.loss(backbone, batch, Objective(0.7))
    states = ahead(backbone, batch.trace, drafter._pseudo(list(drafter.steps)), batch.rows)
    rows = backbone.lm_head_weight[drafter.draft_ids]
    known = drafter.places(torch.device("cpu")) >= 0
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
    pseudo = drafter._pseudo(list(drafter.steps))
    both, alone = batch_of(backbone, items, traced=True), batch_of(backbone, items[:1], traced=True)
    with torch.no_grad():
        mixed = ahead(backbone, both.trace, pseudo, both.rows)[: len(alone.next)]
        assert torch.allclose(mixed, ahead(backbone, alone.trace, pseudo, alone.rows), atol=1e-5)
    made = trace(backbone, items[0].tokens[None])
    assert len(made.states) == DEPTH + 1 and len(made.keys) == DEPTH


@pytest.fixture
def run(tmp_path: Path) -> Run:
    found = Run.open(f"{tmp_path}/run", create=True)
    write_lines(found.distill_path, [conversation(n, turns=1 + n % 2) for n in range(40)])
    return found


def trainer(run: Run, *words: str, resume: bool = False, stop=lambda: False) -> Trainer:
    recipe = load_recipe(None, [*SETTINGS, *words])
    backbone = backbone_of()
    dataset = whole_conversations(run, backbone, recipe, None, recipe.train.validation_fraction)
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


def medusa(*words: str) -> Any:
    return CliRunner().invoke(app, list(words))


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
    from medusa_cli.engines import load_backbone

    gradients = []
    for backbone in (backbone_of(), load_backbone(model, dtype="fp32", engine="eager", gradients=True)):
        drafter = firp(backbone).train()
        drafter.loss(backbone, batch_of(backbone, conversations(20), traced=True)).total.backward()
        gradients.append([weight.grad for weight in drafter.parameters()])
    assert all(torch.allclose(*both, atol=1e-5) for both in zip(*gradients, strict=True))
    packed = load_backbone(model, dtype="fp32", engine="eager")
    with pytest.raises(UserError, match="packed weights lose gradients"):
        drafter.loss(packed, batch_of(packed, conversations(20), traced=True))


def test_bad_settings_end_in_one_line(run: Run, model: str) -> None:
    for more, part in (
        (["drafter.layers=[2]"], "names 1 layers for 2 heads"),
        (["firp.layers=[2,6]"], "outside this model's 6 layers"),
        (["drafter.layers=[0,3]"], "outside this model's 6 layers"),
        (["drafter.layers=[4,3]"], "falls"),
        (["drafter.layers=[1.5,2]"], "is not a list of whole numbers"),
        (["drafter.masked=perhaps"], "is not true or false"),
        (["drafter.rank=4"], "says nothing to firp"),
        (["drafter.matrices=one"], "says nothing to firp"),
        (["drafter.prefix_layers=1"], "says nothing to firp"),
        (["train.regress=1"], "train.regress=1 says nothing to firp"),
        (["drafter.vocabulary=own"], "none that firp can score"),
        (["drafter=medusa", "drafter.layers=[2,3]"], "says nothing to medusa"),
        (["--engine", "fast"], "--engine fast cannot run firp"),
        (["--stage", "2"], "train.stage=2 cannot train drafter=firp"),
    ):
        result = medusa(*words_of(run, model, *more))
        errors = [line for line in result.stderr.splitlines() if line.startswith("error: ")]
        assert result.exit_code != 0 and len(errors) == 1 and part in errors[0], (more, result.stderr)
        assert "Traceback" not in result.stderr


def test_layers_and_mask_are_compared(run: Run, model: str) -> None:
    words = [
        "bench-firp",
        *SETTINGS[3:],
        "--run",
        str(run.path),
        "--model",
        model,
        "--dtype",
        "fp32",
        "--tokens",
        "200",
    ]
    result = medusa(*words, "--json", "--quiet")
    assert result.exit_code == 0, result.output
    document = json.loads(result.stdout)
    assert document == json.loads((run.path / "bench" / "firp-layers.json").read_text())
    tried = {key: [(one["layers"], one["masked"]) for one in rows] for key, rows in document["figures"].items()}
    assert tried["5"] == [([layer], False) for layer in range(1, DEPTH)]
    assert tried["6"] == [([3, 4], False), ([3, 5], False)] and tried["7"] == [([3, 4], False), ([3, 4], True)]
    assert all(0 <= share <= 1 for rows in document["figures"].values() for one in rows for share in one["accuracies"])
    result = medusa(*words, "--figure", "7")
    assert result.exit_code == 0 and "3, 4 masked" in result.stdout
    assert medusa(*words, "--figure", "8").exit_code == 2
    assert not (run.path / "checkpoint.pt").exists()  # a bench leaves the run's own training alone


@pytest.mark.parametrize("depth", range(2, 40))
def test_every_layer_that_is_tried_is_one_that_heads_can_enter_at(depth: int) -> None:
    for choices in figures(depth).values():
        for layers, _ in choices:
            check_layers(layers, len(layers), depth)


def test_layers_cannot_be_compared_without_room_or_held_out_conversations(run: Run, model: str) -> None:
    with pytest.raises(UserError, match="a model of one layer"):
        figures(1)
    words = ["bench-firp", *SETTINGS[3:], "--run", str(run.path), "--model", model, "--dtype", "fp32", "--quiet"]
    result = medusa(*words, "train.validation_fraction=0")
    assert result.exit_code == 1 and "no conversation is held out" in result.stderr, result.output
    assert "train.validation_fraction=0" in result.stderr


def test_a_trial_says_what_was_trained_not_what_was_asked_for(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    built = []

    def unmasked(backbone, recipe, dataset):
        built.append(recipe.masked)
        return build_drafter(backbone, dataclasses.replace(recipe, masked=False), dataset)

    monkeypatch.setattr("medusa_cli.training.trials.build_drafter", unmasked)
    recipe = load_recipe(None, [*SETTINGS, "train.epochs=1", "train.max_tokens=100"])
    backbone = backbone_of()
    dataset = whole_conversations(run, backbone, recipe, None, 0.2)
    [trial] = try_layers(backbone, dataset, recipe, [((3, 4), True)])
    assert built == [True] and trial.masked is False and trial.layers == (3, 4)


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
        firp(backbone).loss(backbone, batch)
