"""The bias from the token drafted before, for heads that guess at once: arithmetic, trees, training, losslessness."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional as F

from medusa_cli.drafters import DRAFTERS, Batch, NewTokens, load_drafter
from medusa_cli.drafters.heads import Conditional, HeadDrafter
from medusa_cli.errors import UsageError
from medusa_cli.model import Backbone
from medusa_cli.runs.recipe import TrainRecipe, load_recipe
from medusa_cli.runs.run import Run, provenance
from medusa_cli.train import Trainer, build_drafter, load_dataset
from medusa_cli.train.calibration import measure
from medusa_cli.train.losses import drafter_loss
from medusa_cli.train.setup import check_recipe
from medusa_cli.tree import DynamicTree, Tree
from tests.helpers import FAMILIES, generate, generate_batch, generate_plain, tiny_backbone, write_lines
from tests.test_training import SETTINGS

TREE = Tree.from_choices([[0], [1], [2], [0, 0], [0, 3], [1, 1], [2, 0], [0, 0, 2], [1, 1, 0], [1, 1, 1]])
PROMPT = [5, 9, 20, 11, 7]
KINDS: dict[str, dict[str, Any]] = {
    "medusa": {},
    "medusa of low rank": {"rank": 8},
    "amphista": {"matrices": "one", "context": "conversation"},
    "amphista, shared": {"vocabulary": "shared"},
    "firp": {"vocabulary": "shared", "layers": (1, 2, 3)},
    "firp, draft": {"vocabulary": "draft", "layers": (1, 2, 3)},
}


def conditioned(backbone: Backbone, kind: str, scale: float = 1.0) -> HeadDrafter:
    torch.manual_seed(0)
    own = {"vocabulary": "own", **KINDS[kind]}
    ids = torch.randperm(backbone.vocab_size)[:24] if own["vocabulary"] == "draft" else None
    drafter = DRAFTERS[kind.split(",")[0].split()[0]].create(backbone, 3, 1, draft_ids=ids, conditional=5, **own)
    with torch.no_grad():
        for weight in drafter.parameters():  # files hold bf16
            weight.copy_((weight + 0.2 * scale * torch.randn_like(weight)).to(torch.bfloat16))
    return drafter.eval()


def test_a_fresh_bias_adds_nothing_and_a_trained_one_a_product() -> None:
    torch.manual_seed(0)
    bias, states, matrix = Conditional(40, 20, 6), torch.randn(7, 8), torch.randn(20, 8)
    tokens = torch.randint(0, 40, (7,))
    left, right = bias.joined(states, matrix, tokens)
    assert torch.equal(left @ right.T, torch.cat([states, left[:, 8:]], 1) @ F.pad(matrix, (0, 6)).T)
    torch.nn.init.normal_(bias.after)
    left, right = bias.joined(states, matrix, tokens)
    assert torch.allclose(left @ right.T, states @ matrix.T + bias.before[tokens] @ bias.after.T, atol=1e-4)


def test_confidences_are_those_of_all_guesses_where_all_are_candidates_and_shares_stay_below_one(monkeypatch) -> None:
    torch.manual_seed(0)
    bias, scores, tokens = Conditional(40, 90, 6), 3 * torch.randn(1, 90), torch.tensor([3, 3, 17])
    torch.nn.init.normal_(bias.after)
    whole = ((scores + bias.before[tokens] @ bias.after.T) / 1.3).log_softmax(-1)
    found, places = bias.confident(scores, tokens, 4, 1.3)
    assert torch.allclose(found, whole.topk(4).values, atol=1e-5) and torch.equal(places, whole.topk(4).indices)
    assert torch.equal(bias.best(scores, tokens[None], 4)[0], places)
    monkeypatch.setattr("medusa_cli.drafters.heads.CANDIDATES", 8)
    found, places = bias.confident(scores, tokens, 8, 1.3)
    assert set(places[0].tolist()) == set(scores.topk(8).indices[0].tolist())  # the same guesses, in another order
    assert not torch.equal(places[0], places[2])
    assert (found.exp().sum(-1) < 1).all()
    # What is left out counts as the head itself has it.
    some = (scores + bias.before[tokens] @ bias.after.T).gather(1, places) / 1.3
    rest = (scores / 1.3).exp().sum() - (scores / 1.3).topk(8).values.exp().sum()
    assert torch.allclose(found, some - (some.exp().sum(-1, keepdim=True) + rest).log(), atol=1e-4)


@pytest.mark.parametrize("shape", [TREE, DynamicTree(20, 3)], ids=["static", "dynamic"])
@pytest.mark.parametrize("kind", ["medusa", "medusa of low rank", "amphista"])
def test_each_node_holds_the_guess_that_follows_its_parent(kind: str, shape: Tree | DynamicTree) -> None:
    backbone = tiny_backbone(layers=4)
    drafter = conditioned(backbone, kind)
    confirmed = NewTokens(torch.tensor([8]), torch.randn(1, backbone.hidden_size), 11, 0)
    (draft,) = drafter.draft(backbone, [drafter], [confirmed], shape)
    assert draft.tree.size > 9 and draft.tree.max_depth == 3
    parents = {parent for parent in draft.tree.parents if parent > 0}
    assert len({int(draft.tokens[one]) for one in parents}) > 1
    for node in range(1, draft.tree.size):
        # Teacher forcing with the path as the truth: the head's guesses must be the same.
        path = draft.tokens[draft.tree.path(node)]
        states = torch.cat([confirmed.hidden, torch.randn(len(path) - 1, backbone.hidden_size)])
        truth = Batch(states, path, torch.zeros(len(path), dtype=torch.long))
        scores = list(drafter.logits(backbone, truth))[draft.tree.depths[node] - 1][0]
        rank = draft.tree.ranks[node]
        assert draft.tokens[node] == drafter.draft_ids[scores.topk(rank + 1).indices[rank]], f"node {node}"


@pytest.mark.parametrize("engine", ["eager", "fast"])
@pytest.mark.parametrize(
    "shape", [TREE, DynamicTree(9, 3), DynamicTree(5, 3, min_chance=0.05)], ids=["static", "dynamic", "least"]
)
@pytest.mark.parametrize("kind", KINDS)
def test_conditional_drafting_is_lossless(kind: str, shape: Tree | DynamicTree, engine: str) -> None:
    for family in FAMILIES if kind == "medusa" else ("qwen3",):
        backbone = tiny_backbone(family, layers=4, engine=engine)
        drafted = generate(backbone, conditioned(backbone, kind), shape, PROMPT, max_new_tokens=40, stop_ids=())
        plain = generate_plain(backbone, PROMPT, max_new_tokens=40, stop_ids=())
        assert [t for s in drafted for t in s.tokens] == [t for s in plain for t in s.tokens]


def test_sequences_side_by_side_draft_what_each_drafts_alone() -> None:
    backbone = tiny_backbone(layers=4)
    drafter = conditioned(backbone, "amphista")
    prompts = [[5, 9, 20], [7] * 9, [30, 31], [12, 13, 14, 15]]
    rules = {"max_new_tokens": 20, "stop_ids": ()}
    alone = [[(s.tokens, s.accepted) for s in generate(backbone, drafter, TREE, one, **rules)] for one in prompts]
    together: list[list] = [[] for _ in prompts]
    for number, step in generate_batch(backbone, drafter, TREE, prompts, batch_size=3, **rules):
        together[number].append((step.tokens, step.accepted))
    assert together == alone


@pytest.mark.parametrize("kind", ["medusa", "medusa of low rank", "amphista"])
def test_the_loss_is_the_cross_entropy_after_the_true_token_before(kind: str) -> None:
    backbone = tiny_backbone(layers=4)
    drafter = conditioned(backbone, kind).train()
    hidden, tokens = torch.randn(9, backbone.hidden_size), torch.randint(5, 60, (9,))
    segment = torch.tensor([0] * 4 + [1] * 5)
    batch = Batch(hidden, tokens, segment)
    losses = drafter_loss(drafter, backbone, batch, TrainRecipe())
    rows_of, expected = [batch.targets(k) for k in range(1, 4)], torch.zeros(())
    for k, states in enumerate(drafter.head_states(backbone, batch, rows_of), 1):
        rows = rows_of[k - 1]
        scores = drafter.inner(k - 1, states) @ drafter.matrix(backbone, k - 1).T
        scores = scores + drafter.conditional.before[tokens[rows + k - 1]] @ drafter.conditional.after.T
        expected = expected + 0.8**k * len(rows) / 9 * F.cross_entropy(scores, tokens[rows + k])
    assert float(losses.total.detach()) == pytest.approx(float(expected.detach()), rel=1e-4)
    learning = [drafter.conditional.before, drafter.conditional.after]
    ours, theirs = (torch.autograd.grad(one, learning, retain_graph=True) for one in (losses.total, expected))
    assert all(torch.allclose(a, b, atol=1e-5) and a.abs().sum() > 0 for a, b in zip(ours, theirs, strict=True))


@pytest.mark.parametrize("kind", KINDS)
def test_files_hold_the_bias(kind: str, tmp_path: Path) -> None:
    backbone = tiny_backbone(layers=4)
    drafter = conditioned(backbone, kind)
    drafter.save(tmp_path, provenance(backbone.identity))
    loaded = load_drafter(tmp_path, backbone)
    assert loaded.config == drafter.config and loaded.config.conditional == 5
    rules = {"max_new_tokens": 25, "stop_ids": ()}
    ours, theirs = (list(generate(backbone, one, TREE, PROMPT, **rules)) for one in (drafter, loaded))
    assert [(s.tokens, s.accepted) for s in ours] == [(s.tokens, s.accepted) for s in theirs]
    assert torch.equal(loaded.conditional.after, drafter.conditional.after)


def test_a_language_that_only_the_token_before_tells_is_learnt_and_measured(tmp_path: Path) -> None:
    """Every word is followed by one of its own, from a first one that the prompt does not tell: at once, heads 2 and
    later can but guess the most frequent; told the token before, they know."""
    run = Run.open(f"{tmp_path}/run", create=True)
    chance, lines = torch.Generator().manual_seed(0), []
    for number in range(60):
        first = int(torch.randint(0, 8, (), generator=chance))
        words = []
        for _ in range(4):  # w0 .. w7 come by chance, each begins a run of three that it alone has
            words += [f"w{first}", f"w{first + 10}", f"w{first + 20}"]
            first = int(torch.randint(0, 8, (), generator=chance))
        messages = [{"role": "user", "content": "w9"}, {"role": "assistant", "content": " ".join(words)}]
        lines.append({"id": f"c{number}", "messages": messages})
    write_lines(run.distill_path, lines)
    right = {}
    for words in ([], ["drafter.conditional=12"]):
        backbone = tiny_backbone()
        recipe = load_recipe(None, [*SETTINGS, "train.epochs=12", "drafter=medusa", *words])
        dataset = load_dataset(run, backbone, fraction=0.2)
        torch.manual_seed(0)
        drafter = build_drafter(backbone, recipe.drafter, dataset)
        list(Trainer(backbone, drafter, dataset, recipe, run).events())
        right[bool(words)] = measure(backbone, drafter, dataset, top=4).accuracies
    assert right[True][0][0] > right[False][0][0] - 0.02
    assert right[True][1][0] > right[False][1][0] + 0.15, right


@pytest.mark.parametrize("name", ["hydra", "eagle"])
def test_kinds_that_know_their_path_refuse_it(name: str) -> None:
    recipe = load_recipe(None, [f"drafter={name}", "drafter.conditional=8"])
    with pytest.raises(UsageError, match=f"drafter.conditional=8 has no effect on {name}"):
        check_recipe(recipe)
