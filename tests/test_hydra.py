"""Hydra heads: guesses that follow the path, the loss by hand, the prefix layer's cache, files."""

from pathlib import Path

import pytest
import torch
from torch.nn import functional as F

from medusa_cli.drafters import Batch, HydraHeads, NewTokens, load_drafter
from medusa_cli.model import Backbone
from medusa_cli.runs.io import ReadReport
from medusa_cli.runs.recipe import TrainRecipe
from medusa_cli.runs.run import provenance
from medusa_cli.train.losses import drafter_loss
from medusa_cli.tree import DynamicTree, Tree
from tests.helpers import FAMILIES, Recording, drafted, generate, generate_plain, guesses, tiny_backbone

TREE = Tree.from_choices([[0], [1], [2], [0, 0], [0, 3], [1, 1], [0, 0, 2], [1, 1, 0], [1, 1, 1]])
DRAFT_IDS = torch.tensor([7, 3, 40, 12, 9, 55, 21, 30])
KINDS = [("own", "each", 0), ("draft", "one", 0), ("shared", "each", 0), ("draft", "each", 1), ("own", "one", 2)]


def hydra(backbone: Backbone, vocabulary: str = "draft", matrices: str = "one", prefix: int = 0) -> HydraHeads:
    torch.manual_seed(0)
    ids = DRAFT_IDS if vocabulary == "draft" else None
    heads = HydraHeads.create(backbone, 3, 2, vocabulary, ids, matrices, prefix_layers=prefix)
    with torch.no_grad():
        for weight in heads.parameters():  # files hold bf16
            weight.copy_((weight + 0.2 * torch.randn_like(weight)).to(torch.bfloat16))
    return heads.eval()


@pytest.mark.parametrize("kind", KINDS)
def test_each_node_holds_the_guess_that_follows_its_path(kind: tuple[str, str, int]) -> None:
    backbone = tiny_backbone()
    heads = hydra(backbone, *kind)
    hidden = torch.randn(1, backbone.hidden_size)
    heads.truncate(0)
    draft = drafted(heads, backbone, NewTokens(torch.arange(1), hidden, 11, 0), TREE)
    assert draft.tokens[0] == 11
    for node in range(1, TREE.size):
        # Teacher forcing with the path as the truth: the head's guesses must be the same.
        path = draft.tokens[TREE.path(node)]
        states = torch.cat([hidden, torch.zeros(len(path) - 1, backbone.hidden_size)])
        truth = Batch(states, path, torch.zeros(len(path), dtype=torch.long))
        expected = guesses(heads, backbone, truth, 4)[0, TREE.depths[node] - 1, TREE.ranks[node]]
        assert draft.tokens[node] == expected, f"node {node}"


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("kind", KINDS)
def test_hydra_heads_are_lossless(family: str, kind: tuple[str, str, int]) -> None:
    backbone = tiny_backbone(family)
    prompt = [5, 9, 20, 11, 7]
    steps = generate(backbone, hydra(backbone, *kind), TREE, prompt, max_new_tokens=50, stop_ids=())
    plain = generate_plain(backbone, prompt, max_new_tokens=50, stop_ids=())
    assert [t for s in steps for t in s.tokens] == [t for s in plain for t in s.tokens]


def test_the_prefix_layers_cache_is_what_one_pass_over_the_answer_gives() -> None:
    backbone = tiny_backbone()
    heads = hydra(backbone, prefix=2)
    hidden, tokens = torch.randn(9, backbone.hidden_size), torch.randint(5, 60, (9,))
    heads.truncate(0)
    # A prompt of four states, of which the last alone counts, then runs of three and two.
    for first, last in ((0, 4), (4, 7), (7, 9)):
        confirmed = NewTokens(tokens[first:last], hidden[first:last], int(tokens[last - 1]), first)
        state = heads._context(confirmed if first else heads.first_input(confirmed))
    batch = Batch(hidden[3:], tokens[3:], torch.zeros(6, dtype=torch.long))
    states = next(heads.head_states(backbone, batch, [torch.tensor([5])]))
    embedded = heads.embed(backbone, tokens[8:9])
    assert torch.allclose(heads.blocks[0](torch.cat([state, embedded], dim=-1)), states, atol=1e-5)
    heads.truncate(0)
    again = heads._context(heads.first_input(NewTokens(tokens[:4], hidden[:4], 5, 0)))
    alone = heads.prefix[1](heads.prefix[0](hidden[None, 3:4]))[0]
    assert torch.allclose(again, alone, atol=1e-5)


class Watched(Recording, HydraHeads):
    pass


@pytest.mark.parametrize("shape", [TREE, DynamicTree(20, 3)], ids=["static", "dynamic"])
@pytest.mark.parametrize("prefix", [0, 1, 2])
def test_cached_drafting_equals_recomputing_the_whole_answer(prefix: int, shape: Tree | DynamicTree) -> None:
    backbone = tiny_backbone()
    heads = hydra(backbone, "own", prefix=prefix)
    heads.__class__ = Watched
    heads.seen = []
    list(generate(backbone, heads, shape, [5, 9, 20, 11, 7], max_new_tokens=30, stop_ids=()))
    assert any(len(confirmed.tokens) > 1 for confirmed, _ in heads.seen[1:])  # acceptance did happen
    hidden = heads.seen[0][0].hidden[-1:]
    following: list[int] = []
    for number, (confirmed, draft) in enumerate(heads.seen):
        if number:
            hidden = torch.cat([hidden, confirmed.hidden])
            following += confirmed.tokens[1:].tolist()
        following.append(confirmed.root)
        for leaf in draft.tree.leaves:
            path = draft.tree.path(leaf)[1:]
            tokens = torch.tensor(following + draft.tokens[path].tolist())
            states = torch.cat([hidden, torch.zeros(len(path), backbone.hidden_size)])
            truth = Batch(states, tokens, torch.zeros(len(tokens), dtype=torch.long))
            found = guesses(heads, backbone, truth, 20)[len(following) - 1]
            for head, node in enumerate(path):
                assert draft.tokens[node] == found[head, draft.tree.ranks[node]], (number, node)


@pytest.mark.parametrize("prefix", [0, 1])
def test_segments_do_not_see_one_another(prefix: int) -> None:
    backbone = tiny_backbone()
    heads = hydra(backbone, prefix=prefix)
    hidden, tokens = torch.randn(12, backbone.hidden_size), DRAFT_IDS[torch.randint(0, 8, (12,))]
    segment = torch.tensor([0] * 5 + [1] * 7)
    found = guesses(heads, backbone, Batch(hidden, tokens, segment), 3)
    alone = guesses(heads, backbone, Batch(hidden[5:], tokens[5:], segment[5:]), 3)
    assert torch.equal(found[5:], alone)


@pytest.mark.parametrize("soft", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("prefix", [0, 1])
def test_the_loss_is_each_heads_cross_entropy_after_the_true_tokens(soft: float, prefix: int) -> None:
    backbone = tiny_backbone()
    heads = hydra(backbone, prefix=prefix)
    count = 7
    hidden, tokens = torch.randn(count, backbone.hidden_size), DRAFT_IDS[torch.randint(0, 8, (count,))]
    heads.train()
    losses = drafter_loss(
        heads,
        backbone,
        Batch(hidden, tokens, torch.zeros(count, dtype=torch.long)),
        TrainRecipe(decay=0.8, soft=soft, regress=0.0),
    )
    context = hidden[None]
    for layer in heads.prefix:
        context = layer(context)
    embedded = F.rms_norm(backbone.embedding(tokens), (backbone.hidden_size,))
    total = 0.0
    for k in range(1, 4):
        terms = []
        for p in range(count - k):
            state = heads.blocks[k - 1](torch.cat([context[0, p], *embedded[p : p + k]]))
            scores = (heads.matrices[0] @ state).log_softmax(-1)
            place = DRAFT_IDS.tolist().index(int(tokens[p + k]))
            aim = (backbone.lm_head_weight[DRAFT_IDS] @ hidden[p + k]).softmax(-1)
            terms.append(-(1 - soft) * scores[place] - soft * (aim * scores).sum())
        total = total + 0.8**k * sum(terms) / count
        assert float(losses.per_head[k - 1].detach()) == pytest.approx(
            float(sum(terms).detach()) / len(terms), rel=1e-4
        )
    given = torch.autograd.grad(losses.total, list(heads.parameters()))
    expected = torch.autograd.grad(total, list(heads.parameters()))
    for ours, theirs in zip(given, expected, strict=True):
        assert torch.allclose(ours, theirs, atol=1e-5)


@pytest.mark.parametrize("kind", KINDS)
def test_loaded_heads_draft_what_saved_ones_did(tmp_path: Path, kind: tuple[str, str, int]) -> None:
    backbone = tiny_backbone()
    heads = hydra(backbone, *kind)
    heads.save(tmp_path, provenance(backbone.identity))
    loaded = load_drafter(tmp_path, backbone)
    assert isinstance(loaded, HydraHeads) and loaded.config == heads.config
    confirmed = NewTokens(torch.arange(1), torch.randn(1, backbone.hidden_size), 5, 0)
    ours, theirs = (drafted(d, backbone, confirmed, TREE).tokens for d in (heads, loaded))
    assert torch.equal(ours, theirs)


def test_a_setting_that_says_nothing_to_a_drafter_is_refused() -> None:
    from medusa_cli.errors import UsageError
    from medusa_cli.runs.recipe import load_recipe
    from medusa_cli.train import Dataset, build_drafter

    recipe = load_recipe(None, ["drafter.prefix_layers=1"]).drafter
    with pytest.raises(UsageError, match="drafter.prefix_layers=1 says nothing to medusa"):
        build_drafter(tiny_backbone(), recipe, Dataset([], [], ReadReport(), "", torch.zeros(0, 32)))
