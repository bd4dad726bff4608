"""Amphista: what its heads read, caches that follow acceptance, losslessness, files, low-rank matrices."""

from pathlib import Path
from typing import Any

import pytest
import torch

from medusa_cli.drafters import DRAFTERS, Amphista, Batch, NewTokens, load_drafter
from medusa_cli.errors import UserError
from medusa_cli.model import Backbone
from medusa_cli.runs.recipe import TrainRecipe
from medusa_cli.runs.run import provenance
from medusa_cli.train.losses import drafter_loss
from medusa_cli.tree import DynamicTree, Tree
from tests.helpers import FAMILIES, Recording, drafted, generate, generate_plain, guesses, tiny_backbone

# The recipe's heads, those over the model's own lm_head, ones of low rank, and the paper's alpha variant.
VARIANTS: dict[str, dict[str, Any]] = {
    "one draft matrix": {"vocabulary": "draft", "matrices": "one"},
    "shared": {"vocabulary": "shared"},
    "low rank": {"vocabulary": "draft", "rank": 8},
    "alpha": {"attention_layers": 2},
}
TREE = Tree.from_choices([[0], [1], [2], [0, 0], [0, 3], [1, 1], [0, 0, 2], [1, 1, 0], [0, 0, 2, 1]])
PROMPT = [5, 9, 20, 11, 7]


def amphista(backbone: Backbone, vocabulary: str = "own", **own: Any) -> Amphista:
    torch.manual_seed(0)
    ids = torch.randperm(backbone.vocab_size)[:24] if vocabulary == "draft" else None
    heads = Amphista.create(backbone, 4, 1, vocabulary, ids, **own)
    with torch.no_grad():
        for weight in heads.parameters():  # files hold bf16
            weight.copy_((weight + 0.2 * torch.randn_like(weight)).to(torch.bfloat16))
    return heads.eval()


class Watched(Recording, Amphista):
    pass


@pytest.mark.parametrize("shape", [TREE, DynamicTree(20, 4)], ids=["static", "dynamic"])
@pytest.mark.parametrize("own", [{"attention_layers": 0}, {}, *VARIANTS.values()], ids=str)
def test_cached_drafting_equals_recomputing_the_whole_answer(own: dict[str, Any], shape: Tree | DynamicTree) -> None:
    backbone = tiny_backbone()
    heads = amphista(backbone, **own)
    heads.__class__ = Watched
    heads.seen = []
    list(generate(backbone, heads, shape, PROMPT, max_new_tokens=40, stop_ids=()))
    assert len(heads.seen) > 5
    assert any(len(confirmed.tokens) > 1 for confirmed, _ in heads.seen[1:])  # acceptance did happen
    hidden = heads.seen[0][0].hidden[-1:]
    following: list[int] = []
    for number, (confirmed, draft) in enumerate(heads.seen):
        if number:
            hidden = torch.cat([hidden, confirmed.hidden])
            following += confirmed.tokens[1:].tolist()
        following.append(confirmed.root)
        batch = Batch(hidden, torch.tensor(following), torch.zeros(len(following), dtype=torch.long))
        found = guesses(heads, backbone, batch, 20)[-1]
        for node in range(1, draft.tree.size):
            assert draft.tokens[node] == found[draft.tree.depths[node] - 1, draft.tree.ranks[node]], (number, node)


def test_the_halves_read_the_stages_in_turn() -> None:
    backbone = tiny_backbone()
    heads = amphista(backbone, attention_layers=0)
    batch = Batch(torch.randn(1, 32), torch.tensor([9]), torch.zeros(1, dtype=torch.long))
    before = guesses(heads, backbone, batch, 8)[0]
    with torch.no_grad():
        heads.stages[1].fc.weight.neg_()
    after = guesses(heads, backbone, batch, 8)[0]
    assert torch.equal(before[:2], after[:2]) and not torch.equal(before[2:], after[2:])


def test_with_attention_every_head_sees_every_other() -> None:
    backbone = tiny_backbone()
    heads = amphista(backbone)
    batch = Batch(torch.randn(1, 32), torch.tensor([9]), torch.zeros(1, dtype=torch.long))
    before = list(heads.logits(backbone, batch))
    with torch.no_grad():
        heads.blocks[3].get_submodule("0").linear.bias.add_(1.0)
    assert all(not torch.equal(one, two) for one, two in zip(before, heads.logits(backbone, batch), strict=True))


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("shape", [TREE, DynamicTree(9, 4)])
def test_amphista_is_lossless(family: str, shape: Tree | DynamicTree) -> None:
    backbone = tiny_backbone(family)
    steps = generate(backbone, amphista(backbone), shape, PROMPT, max_new_tokens=50, stop_ids=())
    plain = generate_plain(backbone, PROMPT, max_new_tokens=50, stop_ids=())
    assert [t for s in steps for t in s.tokens] == [t for s in plain for t in s.tokens]


@pytest.mark.parametrize("engine", ["eager", "fast"])
@pytest.mark.parametrize("shape", [TREE, DynamicTree(9, 4)], ids=["static", "dynamic"])
@pytest.mark.parametrize("variant", VARIANTS)
def test_every_variant_is_lossless_under_both_engines(variant: str, shape: Tree | DynamicTree, engine: str) -> None:
    backbone = tiny_backbone("qwen3", engine=engine)
    steps = generate(backbone, amphista(backbone, **VARIANTS[variant]), shape, PROMPT, max_new_tokens=50, stop_ids=())
    plain = generate_plain(tiny_backbone("qwen3"), PROMPT, max_new_tokens=50, stop_ids=())
    assert [t for s in steps for t in s.tokens] == [t for s in plain for t in s.tokens]


@pytest.mark.parametrize("variant", VARIANTS)
def test_every_variant_drafts_from_its_files_what_it_did(variant: str, tmp_path: Path) -> None:
    backbone = tiny_backbone()
    heads = amphista(backbone, **VARIANTS[variant])
    heads.save(tmp_path, provenance(backbone.identity))
    loaded = load_drafter(tmp_path, backbone)
    assert isinstance(loaded, Amphista) and loaded.config == heads.config
    rules = {"max_new_tokens": 30, "stop_ids": ()}
    ours, theirs = (list(generate(backbone, one, TREE, PROMPT, **rules)) for one in (heads, loaded))
    assert [(s.tokens, s.accepted) for s in ours] == [(s.tokens, s.accepted) for s in theirs]
    confirmed = NewTokens(torch.arange(5, 8), torch.randn(3, backbone.hidden_size), 5, 0)
    for one in (heads, loaded):
        one.truncate(0)
    ours, theirs = (drafted(one, backbone, confirmed, TREE).tokens for one in (heads, loaded))
    assert torch.equal(ours, theirs)


def test_segments_do_not_see_one_another_and_every_weight_learns() -> None:
    backbone = tiny_backbone()
    heads = amphista(backbone, rank=8)
    hidden, tokens = torch.randn(14, 32), torch.randint(5, 60, (14,))
    segment = torch.tensor([0] * 6 + [1] * 8)
    found = guesses(heads, backbone, Batch(hidden, tokens, segment), 3)
    assert torch.equal(found[6:], guesses(heads, backbone, Batch(hidden[6:], tokens[6:], segment[6:]), 3))
    heads.train()
    drafter_loss(heads, backbone, Batch(hidden, tokens, segment), TrainRecipe(soft=0.5, regress=0.0)).total.backward()
    assert all(p.grad is not None and p.grad.abs().sum() > 0 for p in heads.parameters())


@pytest.mark.parametrize("rank", [None, 8])
@pytest.mark.parametrize("name", sorted(name for name, kind in DRAFTERS.items() if "own" in kind.vocabularies))
def test_loaded_drafters_draft_what_saved_ones_did(tmp_path: Path, name: str, rank: int | None) -> None:
    backbone = tiny_backbone()
    if name == "eagle" and rank:
        pytest.skip("its one matrix is whole, as engines read it")
    torch.manual_seed(0)
    heads = DRAFTERS[name].create(backbone, 4, 1, "own", rank=rank)
    with torch.no_grad():
        for weight in heads.parameters():
            weight.copy_((weight + 0.2 * torch.randn_like(weight)).to(torch.bfloat16))
    heads.eval().save(tmp_path, provenance(backbone.identity))
    loaded = load_drafter(tmp_path, backbone)
    assert loaded.config == heads.config and loaded.name == name
    confirmed = NewTokens(torch.arange(5, 8), torch.randn(3, backbone.hidden_size * len(heads.taps)), 5, 0)
    ours, theirs = (drafted(d, backbone, confirmed, TREE).tokens for d in (heads, loaded))
    assert torch.equal(ours, theirs)


def test_low_rank_matrices_start_as_the_best_approximation() -> None:
    backbone = tiny_backbone()
    heads = DRAFTERS["medusa"].create(backbone, 2, 1, "own", rank=31)
    product = heads.matrices[0] @ heads.factors[0]
    left, scales, right = torch.linalg.svd(backbone.lm_head_weight)
    best = left[:, :31] @ torch.diag(scales[:31]) @ right[:31]
    assert torch.allclose(product, best, atol=1e-4)
    for rank, vocabulary in ((0, "own"), (32, "own"), (8, "shared")):
        with pytest.raises(UserError, match=f"rank {rank} cannot be"):
            DRAFTERS["medusa"].create(backbone, 2, 1, vocabulary, rank=rank)
