"""Acceptance: greedy and typical against brute force over paths, exact sampling against the target distribution."""

import math
import random

import pytest
import torch
from transformers import TopKLogitsWarper

from medusa_cli.decode import Sampling
from medusa_cli.decode import accept as accept_many
from medusa_cli.decode.accept import longest_path
from medusa_cli.decode.graph_step import choose, sampling_params
from medusa_cli.decode.sampler import NUCLEUS, Sampler, candidates, draw
from medusa_cli.errors import UsageError
from medusa_cli.tree import Draft, Tree
from medusa_cli.tree.tree import PADDING
from tests.helpers import assert_distributed

VOCAB = 7


def accept(
    logits: torch.Tensor, draft: Draft, sampling: Sampling, generator: torch.Generator
) -> tuple[list[int], int]:
    """Accepts one draft with these random numbers."""
    rule = Sampler(sampling)
    rule.generator = generator
    (path,) = accept_many(logits[None], [draft], [rule])
    return path


def target_probs(logits: torch.Tensor, sampling: Sampling) -> torch.Tensor:
    """Returns the distributions [N, V] to draw from, over the whole vocabulary in its order."""
    scores = logits.float() / sampling.temperature
    if 0 < sampling.top_k < scores.shape[-1]:
        lowest = scores.topk(sampling.top_k, dim=-1).values[..., -1:]
        scores = scores.masked_fill(scores < lowest, -torch.inf)
    probs = scores.softmax(-1)
    if sampling.top_p < 1:
        ordered, index = probs.sort(dim=-1, descending=True)
        ordered[ordered.cumsum(-1) - ordered >= sampling.top_p] = 0
        probs = torch.zeros_like(probs).scatter_(-1, index, ordered)
        probs /= probs.sum(-1, keepdim=True)
    return probs


def random_tree(chance: random.Random, nodes: int) -> Tree:
    parents = [-1, *(chance.randrange(i) for i in range(1, nodes))]
    ranks = [0] + [parents[1:i].count(parents[i]) for i in range(1, nodes)]
    return Tree(tuple(parents), tuple(ranks))


def random_case(seed: int, sharpness: float = 2.0) -> tuple[torch.Tensor, Draft]:
    chance = random.Random(seed)
    tree = random_tree(chance, 14)
    tokens = torch.tensor([chance.randrange(VOCAB) for _ in range(tree.size)])
    logits = sharpness * torch.randn(
        tree.size, VOCAB, generator=torch.Generator().manual_seed(seed)
    )
    return logits, Draft(tokens, tree)


GENERATOR = torch.Generator()


@pytest.mark.parametrize("seed", range(40))
def test_greedy_takes_the_longest_path_of_argmaxes(seed: int) -> None:
    logits, draft = random_case(seed)
    best = logits.argmax(-1)
    accepted, bonus = accept(logits, draft, Sampling(), GENERATOR)
    good = [
        path
        for path in (draft.tree.path(node) for node in range(draft.tree.size))
        if all(draft.tokens[b] == best[a] for a, b in zip(path, path[1:], strict=False))
    ]
    assert len(accepted) == max(map(len, good))
    tokens = [int(draft.tokens[node]) for node in accepted]
    assert tokens in [[int(draft.tokens[n]) for n in path] for path in good]
    assert bonus == int(best[accepted[-1]])


@pytest.mark.parametrize(
    "sampling", [Sampling(), Sampling("exact", 1.0, seed=4), Sampling("exact", 0.7, 0.8, 5)]
)
def test_tensors_accept_the_paths_of_the_host(sampling: Sampling) -> None:
    """Random trees of many sizes, padded to one: the tensors' path is that of the walk from node to node."""
    drafts, logits, samplers = (
        [],
        torch.zeros(60, 20, VOCAB),
        [Sampler(sampling, stream) for stream in range(60)],
    )
    tree_mask = torch.eye(20, dtype=torch.bool).repeat(60, 1, 1)
    tokens, depth, parents = torch.zeros(3, 60, 20, dtype=torch.long).unbind()
    parents.fill_(PADDING)
    for i in range(60):
        chance = random.Random(i)
        tree = random_tree(chance, chance.randrange(1, 20))
        while max(tree.ranks) >= VOCAB:
            tree = random_tree(chance, tree.size)
        starts = [chance.randrange(VOCAB) for _ in range(tree.size)]  # siblings differ
        ids = [
            (starts[parent] + rank) % VOCAB
            for parent, rank in zip(tree.parents, tree.ranks, strict=True)
        ]
        drafts.append(Draft(torch.tensor(ids), tree))
        logits[i, : tree.size] = 2 * torch.randn(
            tree.size, VOCAB, generator=torch.Generator().manual_seed(i)
        )
        tokens[i, : tree.size], depth[i, : tree.size] = drafts[-1].tokens, tree.depth
        parents[i, : tree.size], tree_mask[i, : tree.size, : tree.size] = (
            torch.tensor(tree.parents),
            tree.mask,
        )
    params = sampling_params(samplers, 60, 20)
    chosen, certain = (
        choose(logits, params, depth) if sampling.exact else (logits.argmax(-1), torch.ones(()))
    )
    assert certain.all()
    results, on_path = longest_path(chosen, tokens, depth, parents, tree_mask, 12)
    expected = accept_many(logits, drafts, samplers)
    assert max(len(nodes) for nodes, _ in expected) >= 3
    for i, (nodes, bonus) in enumerate(expected):
        count = len(nodes)
        path = [*nodes, *range(count, 12)]
        assert results[i].tolist() == [count, bonus, *path, *tokens[i, path].tolist()]
        assert on_path[i].nonzero()[:, 0].tolist() == nodes


def test_token_zero_is_a_token_like_any_other() -> None:
    tree = Tree.from_choices([[0], [1], [0, 0]])
    logits = torch.full((4, VOCAB), -5.0)
    logits[0, 3] = logits[1, 0] = logits[2, 0] = logits[3, 0] = 5.0
    shallow = Draft(torch.tensor([1, 3, 2, 5]), tree)  # node 1 is followed by 5, the model wants 0
    accepted, bonus = accept(logits, shallow, Sampling(), GENERATOR)
    assert accepted == [0, 1]
    assert bonus == 0


@pytest.mark.parametrize("seed", range(60))
@pytest.mark.parametrize("temperature", [0.5, 1.0, 1.7])
def test_typical_takes_the_longest_plausible_path(seed: int, temperature: float) -> None:
    logits, draft = random_case(seed, sharpness=1.0)
    rule = Sampling("typical", temperature, epsilon=0.15, delta=0.5)
    probs = (logits.double() / temperature).softmax(-1)
    limit = [min(0.15, 0.5 * math.exp(float((p * p.log()).sum()))) for p in probs]
    best, key = [0], (1, 0.0)
    for node in range(draft.tree.size):
        path = draft.tree.path(node)
        chances = [float(probs[a, draft.tokens[b]]) for a, b in zip(path, path[1:], strict=False)]
        if all(chance > limit[a] for chance, a in zip(chances, path, strict=False)):
            own = (len(path), sum(math.log(chance) for chance in chances))
            if own > (key[0], key[1] + 1e-6):
                best, key = path, own
    accepted, bonus = accept(logits, draft, rule, GENERATOR)
    assert [int(draft.tokens[n]) for n in accepted] == [int(draft.tokens[n]) for n in best]
    assert bonus == int(logits[accepted[-1]].argmax())


@pytest.mark.parametrize("temperature", [0.0, 1e-39, 1e-50, 1e-320])
@pytest.mark.parametrize("mode", ["exact", "typical"])
def test_temperature_near_zero_is_greedy_in_every_mode(mode: str, temperature: float) -> None:
    for seed in range(10):
        logits, draft = random_case(seed)
        cold = accept(logits, draft, Sampling(mode, temperature), GENERATOR)
        assert cold == accept(logits, draft, Sampling(), GENERATOR)


@pytest.mark.quick("0.8-0-3000")
@pytest.mark.parametrize("runs", [3000, 10_000])
@pytest.mark.parametrize(("top_p", "top_k"), [(1.0, 0), (0.8, 0), (1.0, 3)])
def test_exact_sampling_keeps_the_distribution(top_p: float, top_k: int, runs: int) -> None:
    """The first two tokens that come out through a tree are distributed as two plain draws."""
    tree = Tree.from_choices([[0], [1], [2], [0, 0], [0, 1], [1, 0]])
    rule = Sampling("exact", 0.9, top_p, top_k)
    # The target depends on the last token alone, as a bigram model's would.
    bigram = 1.5 * torch.randn(VOCAB, VOCAB, generator=torch.Generator().manual_seed(3))
    # Token 2 twice below the root, on purpose.
    draft = Draft(torch.tensor([0, 1, 2, 2, 3, 1, 4]), tree)
    probs = target_probs(bigram, rule).double()
    generator = torch.Generator().manual_seed(7)
    seen = torch.zeros(VOCAB, VOCAB, dtype=torch.double)
    for _ in range(runs):
        accepted, bonus = accept(bigram[draft.tokens], draft, rule, generator)
        out = [*(int(draft.tokens[n]) for n in accepted[1:]), bonus]
        second = (
            out[1]
            if len(out) > 1
            else int(torch.multinomial(probs[out[0]], 1, generator=generator))
        )
        seen[out[0], second] += 1
    assert_distributed(seen, runs * probs[0][:, None] * probs)


CUTS = [(1.0, 0), (0.9, 0), (0.01, 0), (1.0, 5), (0.7, 40), (0.999, 3 * NUCLEUS)]


@pytest.mark.parametrize(("top_p", "top_k"), CUTS)
@pytest.mark.parametrize("sharpness", [0.1, 3.0])  # a nucleus of nearly all tokens, and one of few
def test_candidates_are_the_distribution_after_its_cuts(
    top_p: float, top_k: int, sharpness: float
) -> None:
    logits = sharpness * torch.randn(3, 4 * NUCLEUS, generator=torch.Generator().manual_seed(1))
    rule = Sampling("exact", 0.8, top_p, top_k)
    weights, ids = candidates(logits, rule)
    drawn = weights / weights.sum(-1, keepdim=True)
    if ids is not None:
        drawn = torch.zeros_like(logits).scatter_(-1, ids, drawn)
    assert torch.allclose(drawn, target_probs(logits, rule), atol=1e-6)


@pytest.mark.parametrize("top_p", [1e-50, 1e-9])
def test_the_likeliest_token_stays_for_any_top_p(top_p: float) -> None:
    logits = torch.randn(3, 600)
    sampler = Sampler(Sampling("exact", 1.0, top_p))
    assert sampler.sample(logits, [0.0, 0.5, 0.999]) == logits.argmax(-1).tolist()


def test_all_that_tie_with_the_last_of_top_k_stay() -> None:
    logits = (2 * torch.randn(50, 30, generator=torch.Generator().manual_seed(1))).round()
    weights, ids = candidates(logits, Sampling("exact", 0.8, top_k=5))
    assert ids is not None
    assert int((weights > 0).sum(-1).max()) > 5
    drawn = torch.zeros_like(logits).scatter_(-1, ids, weights)
    assert torch.allclose(drawn, TopKLogitsWarper(5)(None, logits / 0.8).softmax(-1), atol=1e-6)


@pytest.mark.parametrize("size", [5000, 5120])
def test_draw_among_many_weights_is_that_of_their_running_sum(size: int) -> None:
    generator = torch.Generator().manual_seed(0)
    weights = torch.rand(3, 4, size, generator=generator) * (
        torch.rand(3, 4, size, generator=generator) > 0.7
    )
    weights[..., :200] = weights[..., -200:] = 0
    summed = weights[0, 0].double().cumsum(0)
    for draws in (
        torch.rand(300, generator=generator, dtype=torch.double),
        torch.tensor([0.0, 1 - 2.0**-53]).double(),
    ):
        expected = torch.searchsorted(summed, draws * summed[-1] * (1 - 2.0**-52), right=True)
        drawn = draw(weights[0, 0].expand(len(draws), -1), draws)
        assert torch.equal(drawn, expected)
        assert (weights[0, 0][drawn] > 0).all()
    drawn = draw(weights, torch.full((3, 4), 0.5, dtype=torch.double))
    assert drawn.tolist() == [
        [int(draw(row, torch.tensor(0.5))) for row in rows] for rows in weights
    ]
    assert draw(torch.full((2, size), torch.nan), torch.rand(2)).max() < size  # no place beyond


@pytest.mark.parametrize(
    ("changes", "name"),
    [
        ({"mode": "magic"}, "sampling"),
        ({"temperature": -1.0}, "temperature"),
        ({"temperature": math.inf}, "temperature"),
        ({"top_p": 0.0}, "top_p"),
        ({"top_p": 1.5}, "top_p"),
        ({"top_k": -1}, "top_k"),
        ({"min_p": 1.5}, "min_p"),
        ({"mode": "typical", "temperature": 0.7, "min_p": 0.1}, "min_p"),
        ({"epsilon": 0.0}, "epsilon"),
        ({"mode": "typical", "temperature": 0.7, "top_p": 0.9}, "top_p"),
        ({"mode": "typical", "temperature": 0.7, "top_k": 5}, "top_k"),
    ],
)
def test_impossible_sampling_is_named(changes: dict, name: str) -> None:
    with pytest.raises(UsageError, match=name):
        Sampling(**changes)
