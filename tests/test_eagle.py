"""EAGLE-3: training-time test against drafting and against a mask over all rows, trees, batches, its files."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch.nn import functional as F

from medusa_cli.drafters import Batch, Eagle, NewTokens, load_drafter
from medusa_cli.drafters.eagle import SharedPrefixAttention, merged_attention, plain_attention
from medusa_cli.drafters.layers import rotary, rotated
from medusa_cli.errors import UsageError
from medusa_cli.model import Backbone
from medusa_cli.runs.io import read_json
from medusa_cli.runs.recipe import TrainRecipe
from medusa_cli.runs.run import provenance
from medusa_cli.train.losses import drafter_loss
from medusa_cli.tree import DynamicTree, Tree
from tests.helpers import FAMILIES, Recording, generate, generate_batch, generate_plain, guesses, medusa, tiny_backbone

TREE = Tree.from_choices([[0], [1], [2], [0, 0], [0, 3], [1, 1], [0, 0, 2], [1, 1, 0], [1, 1, 1], [0, 0, 2, 0]])
DRAFT_IDS = torch.tensor([7, 3, 40, 12, 9, 55, 21, 30])
PROMPT = [5, 9, 20, 11, 7]


def eagle(backbone: Backbone, vocabulary: str = "draft", heads: int = 4) -> Eagle:
    torch.manual_seed(0)
    drafter = Eagle.create(backbone, heads, 1, vocabulary, DRAFT_IDS if vocabulary == "draft" else None)
    with torch.no_grad():
        for weight in drafter.parameters():  # files hold bf16
            weight.copy_((weight + 0.2 * torch.randn_like(weight)).to(torch.bfloat16))
    return drafter.eval()


class Watched(Recording, Eagle):
    pass


@pytest.mark.parametrize("shape", [TREE, DynamicTree(20, 4)], ids=["static", "dynamic"])
@pytest.mark.parametrize("vocabulary", ["draft", "own"])
def test_what_drafting_draws_is_what_training_reads(vocabulary: str, shape: Tree | DynamicTree) -> None:
    backbone = tiny_backbone(layers=4)
    drafter = eagle(backbone, vocabulary)
    drafter.__class__ = Watched
    drafter.seen = []
    list(generate(backbone, drafter, shape, PROMPT, max_new_tokens=30, stop_ids=()))
    assert any(len(confirmed.tokens) > 1 for confirmed, _ in drafter.seen[1:]) or vocabulary == "draft"
    hidden, following = torch.zeros(0, 4 * backbone.hidden_size), []
    for number, (confirmed, draft) in enumerate(drafter.seen):
        hidden = torch.cat([hidden, confirmed.hidden])  # the prompt's are the first
        following += confirmed.following.tolist()
        for leaf in draft.tree.leaves:
            # The path as the truth: every level's guesses must be the same, whatever else is in the tree.
            path = draft.tree.path(leaf)[1:]
            tokens = torch.tensor(following + draft.tokens[path].tolist())
            states = torch.cat([hidden, torch.randn(len(path), hidden.shape[1])])
            segment = torch.full((len(tokens),), -1)
            segment[len(following) - 1 :] = 0
            truth = Batch(states, tokens, segment, sequence=torch.zeros(len(tokens), dtype=torch.long))
            found = guesses(drafter, backbone, truth, len(drafter.draft_ids))[0]
            for head, node in enumerate(path):
                assert draft.tokens[node] == found[head, draft.tree.ranks[node]], (number, node)


def test_unrolled_steps_are_one_pass_under_the_papers_mask() -> None:
    backbone = tiny_backbone(layers=4)
    drafter = eagle(backbone, "own", heads=3)
    lengths, steps, size = (6, 9), 3, backbone.hidden_size
    hidden = torch.randn(15, 4 * size)
    tokens = torch.randint(5, 60, (15,))
    sequence = torch.repeat_interleave(torch.arange(2), torch.tensor(lengths))
    segment = torch.tensor([-1, -1, 0, 0, 0, 0, -1, -1, -1, 1, 1, 1, 1, 1, 1])
    batch = Batch(hidden, tokens, segment, sequence=sequence)
    learnt = [batch.targets(level + 1) for level in range(steps)]
    made = list(drafter.head_states(backbone, batch, learnt))
    for number in range(2):
        rows = torch.nonzero(sequence == number).squeeze(1)
        count = len(rows)
        embedded = backbone.embedding(tokens[rows])
        # Every step's rows below one another, [steps * count, H], each seeing what the figure says, and no clever part.
        at, step = torch.arange(count).repeat(steps), torch.arange(steps).repeat_interleave(count)
        sees = (step[None] == 0) & (at[None] <= at[:, None])
        sees |= (step[None] > 0) & (step[None] <= step[:, None]) & (at[None] == at[:, None])
        states, layer = drafter.fc(hidden[rows, : 3 * size]), drafter.midlayer
        every = layer.beside(states, embedded)
        expected = []
        for level in range(steps):
            if level:
                place = (torch.arange(count) + level).clamp(max=count - 1)
                every = torch.cat([every, layer.beside(states, embedded[place])])
            seen = int((level + 1) * count)
            positions = at[:seen] + step[:seen]
            keys, values = layer.keys_values(every, positions)
            q = layer.queries(every[-count:], positions[-count:])
            mask = sees[seen - count : seen, :seen]
            states = layer.leave(states, F.scaled_dot_product_attention(q, keys, values, attn_mask=mask))
            expected.append(drafter.norm(states))
        for level in range(steps):
            own = sequence[learnt[level]] == number
            wanted = expected[level][learnt[level][own] - int(rows[0])]
            assert len(wanted) and torch.allclose(made[level][own], wanted, atol=1e-4), (number, level)


def test_the_layer_turns_as_llama_does() -> None:
    q, positions = torch.randn(2, 5, 8), torch.tensor([3, 4, 9, 9, 20])
    turned = rotated(q, *rotary(positions, 8, 10_000.0))
    near, far = (turned[0, i] @ turned[0, j] for i, j in ((0, 1), (2, 3)))
    assert torch.allclose(far, q[0, 2] @ q[0, 3], atol=1e-4) and not torch.allclose(near, q[0, 0] @ q[0, 1])


@pytest.mark.parametrize("engine", ["eager", "fast"])
@pytest.mark.parametrize("shape", [TREE, DynamicTree(9, 4)], ids=["static", "dynamic"])
@pytest.mark.parametrize("family", FAMILIES)
def test_eagle_is_lossless(family: str, shape: Tree | DynamicTree, engine: str) -> None:
    backbone = tiny_backbone(family, layers=4, engine=engine)
    drafted = generate(backbone, eagle(backbone), shape, PROMPT, max_new_tokens=40, stop_ids=())
    plain = generate_plain(backbone, PROMPT, max_new_tokens=40, stop_ids=())
    assert [t for s in drafted for t in s.tokens] == [t for s in plain for t in s.tokens]


def test_sequences_side_by_side_draft_what_each_drafts_alone() -> None:
    backbone = tiny_backbone(layers=4)
    drafter = eagle(backbone, "own")
    prompts = [[5, 9, 20], [7] * 9, [30, 31], [12, 13, 14, 15]]
    rules = {"max_new_tokens": 20, "stop_ids": ()}
    alone = [[(s.tokens, s.accepted) for s in generate(backbone, drafter, TREE, one, **rules)] for one in prompts]
    together: list[list] = [[] for _ in prompts]
    for number, step in generate_batch(backbone, drafter, TREE, prompts, batch_size=3, **rules):
        together[number].append((step.tokens, step.accepted))
    assert together == alone


@pytest.mark.parametrize(
    "shape", [TREE, DynamicTree(20, 4), DynamicTree(6, 4, min_chance=0.05)], ids=["static", "dynamic", "least"]
)
def test_several_sequences_share_a_level_of_either_kind_of_tree(shape: Tree | DynamicTree) -> None:
    backbone = tiny_backbone(layers=4)
    drafter, width = eagle(backbone, "own"), 4 * backbone.hidden_size
    torch.manual_seed(3)
    first = [NewTokens(torch.randint(5, 60, (n,)), torch.randn(n, width), 9 + n, 0) for n in (1, 6, 3)]
    then = [NewTokens(torch.tensor([one.root, 8]), torch.randn(2, width), 30, len(one.tokens)) for one in first]
    forks = [drafter.fork() for _ in first]
    together = [drafter.draft(backbone, forks, one, shape) for one in (first, then)]
    for number in range(3):
        fork = drafter.fork()
        for at, one in enumerate((first[number], then[number])):
            alone = fork.draft(backbone, [fork], [one], shape)[0]
            assert torch.equal(alone.tokens, together[at][number].tokens) and alone.tree == together[at][number].tree
        assert fork._cache.length == len(first[number].tokens) + 2  # the drafts' own rows are gone


def test_every_weight_learns_by_the_answers_alone() -> None:
    backbone = tiny_backbone(layers=4)
    drafter = eagle(backbone).train()
    hidden, tokens = torch.randn(12, 4 * 32), DRAFT_IDS[torch.randint(0, 8, (12,))]
    segment, sequence = torch.tensor([-1] * 4 + [0] * 8), torch.zeros(12, dtype=torch.long)
    found = drafter_loss(
        drafter, backbone, Batch(hidden, tokens, segment, sequence=sequence), TrainRecipe(soft=0.5, regress=0.0)
    )
    assert found.counted.tolist() == [7, 6, 5, 4]
    found.total.backward()
    assert all(p.grad is not None and p.grad.abs().sum() > 0 for p in drafter.parameters())
    other = torch.where(torch.arange(12) < 4, DRAFT_IDS[torch.randint(0, 8, (12,))], tokens)
    # Other words in the prompt are seen (they move the loss), but the targets are as they were.
    again = drafter_loss(
        drafter, backbone, Batch(hidden, other, segment, sequence=sequence), TrainRecipe(soft=0.5, regress=0.0)
    )
    assert not torch.equal(again.total, found.total) and again.counted.tolist() == found.counted.tolist()


@pytest.mark.parametrize("vocabulary", ["draft", "own"])
def test_the_file_is_laid_out_as_serving_engines_read_it(vocabulary: str, tmp_path: Path) -> None:
    backbone = tiny_backbone(layers=8)
    drafter = eagle(backbone, vocabulary)
    drafter.save(tmp_path, provenance(backbone.identity))
    tensors, config = load_file(tmp_path / "model.safetensors"), read_json(tmp_path / "config.json", "the config")
    layer = ("input_layernorm", "hidden_norm", "post_attention_layernorm")
    parts = [f"self_attn.{one}_proj" for one in "qkvo"] + [f"mlp.{one}_proj" for one in ("gate", "up", "down")]
    names = {f"midlayer.{one}.weight" for one in (*layer, *parts)}
    assert set(tensors) == names | {"fc.weight", "norm.weight", "lm_head.weight", "d2t", "t2d"}
    rows = len(drafter.draft_ids)
    assert tensors["fc.weight"].shape == (32, 96) and tensors["lm_head.weight"].shape == (rows, 32)
    assert tensors["midlayer.self_attn.q_proj.weight"].shape == (32, 64)
    ids = tensors["d2t"] + torch.arange(rows)
    assert tensors["d2t"].dtype == torch.int64 and tensors["t2d"].dtype == torch.bool
    assert torch.equal(torch.nonzero(tensors["t2d"]).squeeze(1), ids) and torch.equal(ids, drafter.draft_ids)
    assert config["eagle_aux_hidden_state_layer_ids"] == [2, 4, 5] and drafter.taps == (1, 3, 4, -1)
    assert config["architectures"] == ["LlamaForCausalLMEagle3"] and config["draft_vocab_size"] == rows
    assert config["max_position_embeddings"] == backbone.max_positions
    assert (config["num_attention_heads"], config["num_key_value_heads"], config["head_dim"]) == (4, 4, 8)
    loaded = load_drafter(tmp_path, backbone)
    assert isinstance(loaded, Eagle) and loaded.config == drafter.config
    confirmed = NewTokens(torch.arange(5, 8), torch.randn(3, 4 * 32), 5, 0)
    ours, theirs = (one.draft(backbone, [one], [confirmed], TREE)[0].tokens for one in (drafter, loaded))
    assert torch.equal(ours, theirs)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("engine", ["eager", "fast"])
def test_a_fresh_one_guesses_what_the_lm_head_says_of_the_highest_state_it_reads(family: str, engine: str) -> None:
    backbone = tiny_backbone(family, layers=4, engine=engine)
    torch.nn.init.uniform_(backbone.model.base_model.norm.weight, 0.5, 2.0)
    drafter = Eagle.create(backbone, 2, 1, "own").eval()
    states = torch.randn(1, 4 * 32)
    confirmed = NewTokens(torch.tensor([5]), states, 6, 0)
    (draft,) = drafter.draft(backbone, [drafter], [confirmed], Tree.from_choices([[0], [1]]))
    scores = backbone.lm_head_weight @ backbone.model.base_model.norm(states[0, 64:96])
    assert draft.tokens[1:].tolist() == scores.topk(2).indices.tolist()


def test_what_says_nothing_to_one_layer_is_refused() -> None:
    with pytest.raises(UsageError, match="drafter.rank=8 says nothing to eagle"):
        Eagle.create(tiny_backbone(layers=4), 3, 1, "own", rank=8)
    assert [Eagle.default_taps(depth) for depth in (30, 8, 4, 3)] == [(2, 15, 27), (2, 4, 5), (1, 2, 3), (1, 2)]


@pytest.mark.parametrize("count", [0, 1, 4])
def test_attention_merged_of_two_parts_has_the_values_and_gradients_of_one_softmax(count: int) -> None:
    torch.manual_seed(0)
    heads, dim, longest, slots = 3, 8, 7, torch.tensor([0, 1, 2, 4, 5])  # two sequences of four places, some empty
    mask = torch.zeros(2, 1, 4, longest).masked_fill(torch.rand(2, 1, 4, longest) > 0.6, -torch.inf)
    mask[..., 0] = 0.0
    rows = [torch.randn(heads, 5, dim) for _ in range(1 + 2 * count)]
    leaves = [torch.randn(2, heads, longest, dim), torch.randn(2, heads, longest, dim), *rows]
    weight, found = torch.randn(heads, 5, dim), []
    for attention in (merged_attention, plain_attention):
        keys, values, queries, *own = (leaf.clone().requires_grad_() for leaf in leaves)
        pairs = list(zip(own[::2], own[1::2], strict=True))
        seen = attention(queries, SharedPrefixAttention(keys, values, mask, slots), pairs)
        seen.mul(weight).sum().backward()
        found.append([seen, *(leaf.grad for leaf in (keys, values, queries, *own))])
    for one, other in zip(*found, strict=True):
        assert torch.allclose(one, other, atol=1e-5)


def test_a_training_promises_the_time_that_its_kind_takes(tmp_path: Path) -> None:
    def minutes(kind: str) -> int:
        words = [
            "train",
            f"drafter={kind}",
            "train.max_tokens=9000000",
            "--run",
            f"{tmp_path}/run",
            "--data",
            "none.jsonl",
        ]
        said = " ".join(medusa(*words).stderr.split())
        return int(said.partition("at most ")[2].partition(" min")[0])

    assert minutes("eagle") > 2 * minutes("medusa") > 0
