"""FIRP: pseudo rows against a slow reference, in the verifying pass and in training; losslessness, runs, refusals."""

import copy
import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from typer.testing import CliRunner

from medusa_cli import console
from medusa_cli.backbone import Backbone
from medusa_cli.backbone.trace import ahead, trace
from medusa_cli.cli import app
from medusa_cli.decoding import generate, generate_plain
from medusa_cli.drafters import Batch, Firp, load_drafter
from medusa_cli.drafters.firp import spread
from medusa_cli.errors import UserError
from medusa_cli.recipe import load_recipe
from medusa_cli.run import Run, provenance
from medusa_cli.training import Stepped, Stopped, Trainer, Validated, build_drafter
from medusa_cli.training.conversations import Conversation, batch_of
from medusa_cli.training.setup import whole_conversations
from medusa_cli.tree import Growth, Tree
from tests.test_training import conversation, write_lines
from tests.tiny import FAMILIES, tiny_backbone

TREE = Tree.from_choices([[0], [1], [2], [0, 0], [0, 1], [1, 0], [0, 0, 0], [0, 1, 0], [0, 0, 1]])
PROMPT = [5, 9, 20, 11, 7, 31, 8, 44, 10, 12]
DEPTH = 6


@pytest.fixture(autouse=True)
def loud():
    yield
    console.configure()


def backbone_of(family: str = "llama", engine: str = "eager", positions: int = 512) -> Backbone:
    return tiny_backbone(family, layers=DEPTH, engine=engine, positions=positions)


def firp(backbone: Backbone, heads: int = 3, vocabulary: str = "shared", scale: float = 0.3, **own: Any) -> Firp:
    torch.manual_seed(0)
    ids = torch.randperm(backbone.vocab_size)[:24] if vocabulary == "draft" else None
    drafter = Firp.create(backbone, heads, vocabulary=vocabulary, draft_ids=ids, **own)
    with torch.no_grad():
        for weight in drafter.parameters():  # files hold bf16
            weight.copy_((weight + scale * torch.randn_like(weight) / 4).to(torch.bfloat16))
    return drafter.eval()


@torch.no_grad()
def reference(family: str, drafter: Firp, tokens: list[int], positions: int = 512) -> Tensor:
    """The last token's final pseudo states [K, H], from nothing: every row at once, a dense mask, eager attention."""
    model = copy.deepcopy(backbone_of(family, positions=positions).model)
    model.set_attn_implementation("eager")
    base, config, n = model.model, model.config.get_text_config(), len(tokens)
    x = base.embed_tokens(torch.tensor([tokens]))
    for index, layer in enumerate(base.layers):
        for at, step in zip(drafter.config.layers, drafter.steps, strict=True):
            if at == index:
                x = torch.cat([x, step(x[:, n - 1 : n])], dim=1)
        rows = torch.arange(x.shape[1])
        seen = rows[:, None] >= rows
        if drafter.config.masked:
            seen &= (rows < n) | (rows[:, None] == rows)
        kind = (getattr(config, "layer_types", None) or [None] * DEPTH)[index]
        if kind == "sliding_attention" or (kind is None and getattr(config, "sliding_window", None)):
            seen &= rows[:, None] - rows < config.sliding_window
        mask = torch.zeros(seen.shape).masked_fill(~seen, torch.finfo(torch.float32).min)[None, None]
        tables = base.rotary_emb(x, rows[None], kind) if family == "gemma3" else base.rotary_emb(x, rows[None])
        x = layer(x, attention_mask=mask, position_embeddings=tables, position_ids=rows[None])
    return base.norm(x)[0, n:]


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("engine", ["eager", "fast"])
@pytest.mark.parametrize("masked", [False, True])
def test_pseudo_rows_in_a_tree_are_those_of_each_path_alone(family: str, engine: str, masked: bool) -> None:
    backbone = backbone_of(family, engine)
    drafter = firp(backbone, masked=masked, layers=[2, 3, 3])
    cache = backbone.new_cache(4)  # grows
    out = backbone.forward(torch.tensor(PROMPT), cache, logits="last", pseudo=drafter.pseudo(3))
    assert out.logits is not None and out.logits.shape[0] == 1 and out.hidden.shape[0] == len(PROMPT)
    assert torch.allclose(out.ahead_of(-1), reference(family, drafter, PROMPT), atol=1e-4)
    tokens = torch.arange(20, 20 + TREE.size)
    out = backbone.forward(tokens, cache, TREE, pseudo=drafter.pseudo(3))
    assert out.ahead is not None and out.ahead.shape == (TREE.size, 3, backbone.hidden_size)
    for node in (0, 3, 8):
        path = PROMPT + tokens[TREE.path(node)].tolist()
        assert torch.allclose(out.ahead[node], reference(family, drafter, path), atol=1e-4), node


@pytest.mark.parametrize("engine", ["eager", "fast"])
def test_a_prompt_of_several_pieces_ends_in_its_last_tokens_pseudo_rows(engine: str) -> None:
    backbone = backbone_of("llama", engine, positions=1024)
    drafter = firp(backbone)
    prompt = [5 + i * 7 % 50 for i in range(530)]
    out = backbone.forward(torch.tensor(prompt), backbone.new_cache(), logits="last", pseudo=drafter.pseudo(2))
    expected = reference("llama", drafter, prompt, positions=1024)
    assert out.hidden.shape[0] == 530 and torch.allclose(out.ahead_of(-1), expected[:2], atol=1e-3)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("engine", ["eager", "fast"])
def test_no_real_row_sees_them_and_the_cache_keeps_none(family: str, engine: str) -> None:
    backbone = backbone_of(family, engine)
    drafter = firp(backbone)
    nodes, path = torch.arange(20, 20 + TREE.size), TREE.path(7)
    caches, outputs = [], []
    for pseudo in (None, drafter.pseudo(3)):
        cache = backbone.new_cache(8)
        backbone.forward(torch.tensor(PROMPT), cache, pseudo=pseudo)
        outputs.append(backbone.forward(nodes, cache, TREE, pseudo=pseudo))
        cache.keep(len(PROMPT), path)
        outputs.append(backbone.forward(torch.tensor([9, 8]), cache, pseudo=pseudo))
        caches.append(cache)
    for without, ridden in zip(outputs[:2], outputs[2:], strict=True):
        assert torch.allclose(without.logits, ridden.logits, atol=1e-4)
        assert torch.allclose(without.hidden, ridden.hidden, atol=1e-4)
    length = len(PROMPT) + len(path) + 2
    assert caches[0].length == caches[1].length == length
    assert torch.allclose(*(cache.buffer[:, :, :, :length] for cache in caches), atol=1e-4)
    # What comes after sees the kept rows alone: the same as one chain without any pseudo row.
    whole = PROMPT + nodes[path].tolist() + [9, 8]
    alone = backbone.forward(torch.tensor(whole), backbone.new_cache())
    assert torch.allclose(outputs[3].logits, alone.logits[-2:], atol=1e-4)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("engine", ["eager", "fast"])
@pytest.mark.parametrize("shape", [TREE, Tree.chain(3), Growth(9, 3), Tree.root_only()], ids=str)
def test_firp_is_lossless(family: str, engine: str, shape: Tree | Growth) -> None:
    backbone = backbone_of(family, engine)
    drafter = firp(backbone, vocabulary="draft" if engine == "fast" else "shared")
    steps = generate(backbone, drafter, shape, PROMPT, max_new_tokens=40, stop_ids=())
    plain = generate_plain(backbone_of(family), PROMPT, max_new_tokens=40, stop_ids=())
    assert [t for s in steps for t in s.tokens] == [t for s in plain for t in s.tokens]


def test_the_contexts_end_is_reached_and_not_passed() -> None:
    backbone = backbone_of(positions=32)
    steps = generate(backbone, firp(backbone), TREE, PROMPT, max_new_tokens=60, stop_ids=())
    plain = generate_plain(backbone, PROMPT, max_new_tokens=60, stop_ids=())
    found = [t for s in steps for t in s.tokens]
    assert found == [t for s in plain for t in s.tokens] and len(found) == 32 - len(PROMPT)


@pytest.mark.parametrize("engine", ["eager", "fast"])
@pytest.mark.parametrize("shape", [TREE, Growth(9, 3)], ids=str)
def test_a_step_is_one_backbone_pass(engine: str, shape: Tree | Growth) -> None:
    backbone = backbone_of("llama", engine)
    drafter = firp(backbone)
    backbone.forward(torch.tensor([1]), backbone.new_cache(), pseudo=drafter.pseudo(1))  # the engine is checked once
    passes: list[int] = []
    norm = "_norm" if engine == "fast" else "norm"
    owner = backbone._decoder if engine == "fast" else backbone.model.model
    assert owner is not None
    inner = getattr(owner, norm)
    # Whatever reaches the last norm has gone through the layers: rows are counted there.
    object.__setattr__(owner, norm, lambda x: passes.append(x.shape[1]) or inner(x))
    steps = list(generate(backbone, drafter, shape, PROMPT, max_new_tokens=40, stop_ids=()))
    assert len(passes) == len(steps)
    assert passes[0] == len(PROMPT) + 3
    assert passes[1:] == [4 * (step.drafted + 1) for step in steps[1:]]


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
    monkeypatch.setattr("medusa_cli.backbone.trace.CHUNK", 4)
    backbone = backbone_of(family)
    drafter = firp(backbone, masked=masked, layers=[2, 3, 3])
    items = conversations(13, 22, 9)
    batch = batch_of(backbone, items, traced=True)
    with torch.no_grad():
        found = ahead(backbone, batch.trace, drafter._pseudo(list(drafter.steps)), batch.rows)
    row = 0
    for one in items:
        for start, end in one.spans:
            for at in range(start, end):
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
    losses = drafter.loss(backbone, batch, decay=0.7)
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
        total = total + 0.7**k * mean
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
    made = trace(backbone, items[0].tokens[None], torch.tensor([9]))
    assert len(made.states) == DEPTH + 1 and len(made.keys) == DEPTH


def test_what_is_saved_is_loaded(tmp_path: Path) -> None:
    backbone = backbone_of()
    for vocabulary in ("draft", "shared"):
        drafter = firp(backbone, vocabulary=vocabulary, masked=True, layers=[1, 4, 5])
        drafter.save(tmp_path, provenance(backbone.identity))
        loaded = load_drafter(tmp_path, backbone)
        assert isinstance(loaded, Firp) and loaded.config == drafter.config
        assert sum(weight.numel() for weight in loaded.parameters()) == 3 * (32 * 32 + 32)
        rule = {"max_new_tokens": 30, "stop_ids": ()}
        ours, theirs = (list(generate(backbone, one, TREE, PROMPT, **rule)) for one in (drafter, loaded))
        assert [(s.tokens, s.accepted) for s in ours] == [(s.tokens, s.accepted) for s in theirs]


def test_the_default_layers_are_a_half_to_five_sixths_of_the_depth() -> None:
    assert spread(3, 30) == (15, 20, 25) and spread(1, 30) == (15,)
    assert spread(4, 30) == (15, 18, 22, 25) and spread(4, 2) == (1, 1, 1, 1)


# --- training ---------------------------------------------------------------------------------------------------------

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
    drafter, _ = build_drafter(backbone, recipe.drafter, dataset)
    return Trainer(backbone, drafter, dataset, recipe, run, resume=resume, should_stop=stop)


def test_the_loss_falls_and_the_backbone_stays(run: Run) -> None:
    one = trainer(run, "train.epochs=8")
    before = {name: weight.clone() for name, weight in one.backbone.model.named_parameters()}
    start = one.validate(0)
    last = [event for event in one.events() if isinstance(event, Validated)][-1]
    assert last.loss < 0.8 * start.loss
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
    from medusa_cli.backbone import load_backbone

    gradients = []
    for backbone in (backbone_of(), load_backbone(model, dtype="fp32", engine="eager", gradients=True)):
        drafter = firp(backbone).train()
        drafter.loss(backbone, batch_of(backbone, conversations(20), traced=True)).total.backward()
        gradients.append([weight.grad for weight in drafter.parameters()])
    assert all(torch.allclose(*both, atol=1e-5) for both in zip(*gradients, strict=True))
    packed = load_backbone(model, dtype="fp32", engine="eager")
    with pytest.raises(UserError, match="a gradient cannot pass through packed weights"):
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
        (["drafter.vocabulary=own"], "none that firp can score"),
        (["drafter=medusa", "drafter.layers=[2,3]"], "says nothing to medusa"),
        (["--engine", "fast"], "--engine fast cannot run firp"),
        (["--stage", "2"], "train.stage=2 cannot train drafter=firp"),
    ):
        result = medusa(*words_of(run, model, *more))
        errors = [line for line in result.stderr.splitlines() if line.startswith("error: ")]
        assert result.exit_code != 0 and len(errors) == 1 and part in errors[0], (more, result.stderr)
        assert "Traceback" not in result.stderr


def test_a_model_whose_layers_are_unknown_is_refused() -> None:
    import transformers as hf

    config = hf.GPT2Config(vocab_size=64, n_embd=32, n_layer=2, n_head=4, n_positions=64)
    backbone = Backbone(hf.GPT2LMHeadModel(config).eval(), id="tiny-gpt2")
    drafter = firp(backbone)
    with pytest.raises(UserError, match="cannot be run one by one: its parts are not named as in Llama"):
        next(generate(backbone, drafter, TREE, PROMPT, max_new_tokens=5))


def test_a_batch_without_a_trace_is_refused() -> None:
    backbone = backbone_of()
    batch = Batch(torch.randn(4, 32), torch.arange(4), torch.zeros(4, dtype=torch.long))
    with pytest.raises(UserError, match="traces of whole sequences"):
        firp(backbone).loss(backbone, batch)
