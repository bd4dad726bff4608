"""The eager engine against the plain model, and both engines' slots: chains, trees, kept paths, growth, windows."""

import itertools

import pytest
import torch
from torch import nn

from medusa_cli.decode import Request
from medusa_cli.drafters import HydraHeads
from medusa_cli.engine import Cache, Plan
from medusa_cli.engine.eager import EagerEngine
from medusa_cli.errors import UserError
from medusa_cli.model import Backbone
from medusa_cli.tree import Draft, Tree
from medusa_cli.tree.tree import batch_drafts
from tests.helpers import (
    FAMILIES,
    PROMPT,
    SPARSE,
    Oracle,
    decoder_of,
    forward,
    generate,
    generate_plain,
    plain,
    prefilled,
    rows_of,
    tiny_backbone,
    tiny_model,
    tokens_of,
)

TREE = Tree((-1, 0, 0, 1, 1, 2, 3, 6), (0, 0, 1, 0, 1, 0, 0, 0))
ENGINES = pytest.mark.parametrize("engine", ["eager", "fast"])


def ids_of(count: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(5, 60, (count,), generator=torch.Generator().manual_seed(seed))


def reference(backbone: Backbone, ids: torch.Tensor) -> torch.Tensor:
    """Returns logits [n, V] of one plain pass without a cache."""
    return forward(backbone, ids).logits


@pytest.mark.parametrize("family", FAMILIES)
def test_chain_equals_the_unmodified_model(family: str) -> None:
    backbone = tiny_backbone(family)
    ids = ids_of(21)
    ours = reference(backbone, ids)
    backbone.model.set_attn_implementation("eager")
    with torch.inference_mode():
        theirs = backbone.model(ids[None]).logits[0]
    assert torch.allclose(ours, theirs, atol=2e-5)


@pytest.mark.parametrize("family", FAMILIES)
def test_nodes_see_their_own_path_alone_and_kept_ones_stay(family: str) -> None:
    backbone = tiny_backbone(family)
    prompt, nodes, tail = ids_of(13), ids_of(TREE.size, seed=1), ids_of(3, seed=2)
    cache = backbone.engine.new_cache(1, 4)
    forward(backbone, prompt, cache)
    out = forward(backbone, nodes, cache, TREE)
    for node in range(TREE.size):
        alone = reference(backbone, torch.cat([prompt, nodes[TREE.path(node)]]))
        assert torch.allclose(out.logits[node], alone[-1], atol=2e-5), f"node {node}"
    path = TREE.path(7)  # 0, 1, 3, 6, 7: not contiguous
    cache.keep(0, path)
    assert cache.lengths == [len(prompt) + len(path)]
    alone = reference(backbone, torch.cat([prompt, nodes[path], tail]))
    assert torch.allclose(forward(backbone, tail, cache).logits, alone[-3:], atol=2e-5)


def test_prefill_in_pieces_equals_one_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    backbone = tiny_backbone()
    ids = ids_of(50)
    whole = forward(backbone, ids)
    monkeypatch.setattr("medusa_cli.engine.engine.PREFILL_ROWS", 7)
    cache = backbone.engine.new_cache(1, 1)
    pieces = forward(backbone, ids, cache)
    assert cache.lengths == [50]
    assert torch.allclose(whole.logits, pieces.logits, atol=2e-5)
    assert torch.allclose(whole.hidden, pieces.hidden, atol=2e-5)
    last = forward(backbone, ids, logits="last")
    assert last.logits.shape[0] == 1 and torch.allclose(last.logits[0], whole.logits[-1], atol=2e-5)


@ENGINES
def test_growing_cache_is_copied_a_few_times(engine: str) -> None:
    backbone = tiny_backbone(engine=engine)
    cache, ids = backbone.engine.new_cache(1, 1), ids_of(200)
    buffers = []
    for token in ids:
        forward(backbone, token[None], cache, logits="none")
        if not buffers or cache.values is not buffers[-1]:
            buffers.append(cache.values)
    assert len(buffers) == (9 if engine == "eager" else 1)  # capacities 1, 2, 4, .. 256, or a block at once
    expected = reference(backbone, torch.cat([ids, ids[:1]]))[-1]
    assert torch.allclose(forward(backbone, ids[:1], cache).logits[0], expected, atol=1e-4)


def test_values_of_another_width_stay_when_the_cache_grows() -> None:
    cache = Cache(2, 2, 4)
    cache.allocate(3, 8, torch.empty(0), 6)
    assert cache.keys is not None and cache.values is not None
    keys, values = torch.randn(2, 2, 3, 4, 8), torch.randn(2, 2, 3, 4, 6)
    cache.keys.copy_(keys)
    cache.values.copy_(values)
    cache.lengths = [2, 4]
    cache.reserve(9)
    cache.swap(0, 1)
    for buffer, before in ((cache.keys, keys), (cache.values, values)):
        assert buffer.shape[3] >= 9 and torch.equal(buffer[:, 0, :, :4], before[:, 1])
        assert torch.equal(buffer[:, 1, :, :2], before[:, 0, :, :2])


def test_taps_are_the_layers_outputs() -> None:
    backbone, ids = tiny_backbone(), ids_of(6)
    out = forward(backbone, ids, taps=(0, -1))
    causal = torch.full((6, 6), torch.finfo(torch.float32).min).triu(1)[None, None]
    with torch.inference_mode():
        states = backbone.model.base_model(ids[None], attention_mask=causal, output_hidden_states=True)
    expected = torch.cat([states.hidden_states[1][0], states.last_hidden_state[0]], dim=-1)
    assert torch.allclose(out.hidden, expected, atol=1e-5)


@pytest.mark.parametrize("family", FAMILIES)
@ENGINES
def test_slots_verify_and_keep_on_their_own(family: str, engine: str) -> None:
    backbone, alone = tiny_backbone(family, engine=engine), tiny_backbone(family)
    prompts = [ids_of(n, seed=n) for n in (3, 11, 7)]
    cache = backbone.engine.new_cache(4, 8)  # one slot stays empty; it grows
    for slot, prompt in enumerate(prompts):
        forward(backbone, prompt, cache, slot=slot)
    nodes = torch.stack([ids_of(TREE.size, seed=20 + i) for i in range(3)])
    out = backbone.engine.forward(Plan(nodes, TREE.depth, TREE.mask, taps=(0, -1)), cache)
    for i, prompt in enumerate(prompts):
        expected = forward(alone, nodes[i], prefilled(alone, prompt), TREE, taps=(0, -1))
        assert torch.allclose(out.logits[i], expected.logits, atol=1e-4)
        assert torch.allclose(out.hidden[i], expected.hidden, atol=1e-4)
    paths = [TREE.path(node) for node in (7, 0, 4)]
    for slot, path in enumerate(paths):
        cache.keep(slot, path)
    kept = [torch.cat([prompt, nodes[i][paths[i]]]) for i, prompt in enumerate(prompts)]
    cache.swap(2, 0)
    assert cache.lengths == [len(kept[2]), len(kept[1]), len(kept[0]), 0]
    after = backbone.engine.forward(Plan(torch.tensor([[9], [10], [11]])), cache)
    for i, (ids, token) in enumerate(((kept[2], 9), (kept[1], 10), (kept[0], 11))):
        expected = reference(alone, torch.cat([ids, torch.tensor([token])]))
        assert torch.allclose(after.logits[i, 0], expected[-1], atol=1e-4)


@ENGINES
def test_pass_over_later_slots_leaves_earlier_ones_alone(engine: str) -> None:
    backbone, alone = tiny_backbone("gemma3", engine=engine), tiny_backbone("gemma3")
    cache = backbone.engine.new_cache(3, 4)
    for slot, count in enumerate((5, 9, 2)):
        forward(backbone, ids_of(count, seed=slot), cache, slot=slot)
    before = rows_of(cache, 0).clone()
    out = backbone.engine.forward(Plan(torch.tensor([[7], [8]]), first=1), cache)
    assert cache.lengths == [5, 10, 3] and torch.equal(rows_of(cache, 0), before)
    for i, (count, token) in enumerate(((9, 7), (2, 8))):
        expected = reference(alone, torch.cat([ids_of(count, seed=i + 1), torch.tensor([token])]))
        assert torch.allclose(out.logits[i, 0], expected[-1], atol=1e-4)


@ENGINES
def test_different_trees_side_by_side_equal_each_alone(engine: str) -> None:
    backbone, alone = tiny_backbone("mistral-window", engine=engine), tiny_backbone("mistral-window")
    trees = [TREE, Tree.root_only(), Tree.chain(4)]
    cache = backbone.engine.new_cache(3, 4)
    prompts = [ids_of(n, seed=n) for n in (13, 2, 9)]
    for slot, prompt in enumerate(prompts):
        forward(backbone, prompt, cache, slot=slot)
    nodes = [ids_of(tree.size, seed=30 + i) for i, tree in enumerate(trees)]
    out = backbone.engine.forward(Plan(*batch_drafts([Draft(*pair) for pair in zip(nodes, trees, strict=True)])), cache)
    for i, tree in enumerate(trees):
        expected = forward(alone, nodes[i], prefilled(alone, prompts[i]), tree)
        assert torch.allclose(out.logits[i, : tree.size], expected.logits, atol=1e-4)
        assert torch.allclose(out.hidden[i, : tree.size], expected.hidden, atol=1e-4)


@ENGINES
def test_accepted_states_equal_those_of_a_plain_pass(engine: str) -> None:
    backbone = tiny_backbone("qwen3", engine=engine)
    cache, decoder = prefilled(backbone, PROMPT), decoder_of(backbone, Oracle(plain(backbone, 60), 0.8), SPARSE)
    sequence, _ = decoder.admit(Request(PROMPT, max_new_tokens=40, stop_ids=()))
    accepted = 0
    while decoder.sequences:
        root, before = sequence.root, len(sequence.tokens)
        [(_, step)] = decoder.step()
        path = [root, *step.tokens[:-1]]
        out = forward(backbone, path, cache)
        assert out.logits.argmax(-1).tolist() == step.tokens
        if decoder.sequences:
            [pending] = sequence.unread[-1:]
            assert sequence.tokens[before:] == pending.tokens.tolist() == path and pending.start == before
            assert torch.allclose(pending.hidden, out.hidden, atol=1e-4) and pending.root == step.tokens[-1]
        accepted += step.accepted
    assert accepted > 10


@ENGINES
def test_answers_that_take_turns_do_not_disturb_each_other(engine: str) -> None:
    """Engines and drafters are shared with their buffers; caches and states are not."""
    backbone = tiny_backbone(engine=engine)
    heads = HydraHeads.create(backbone, 4, 2, "own", prefix_layers=1).eval()
    rules = {"max_new_tokens": 20, "stop_ids": ()}
    answers = [generate(backbone, heads, SPARSE, prompt, **rules) for prompt in (PROMPT, PROMPT[::-1])]
    tokens: list[list[int]] = [[], []]
    for steps in itertools.zip_longest(*answers):
        for text, step in zip(tokens, steps, strict=True):
            text += step.tokens if step is not None else []
    assert tokens == [plain(backbone, 20), tokens_of(generate_plain(backbone, PROMPT[::-1], **rules))]


def test_layers_with_other_key_heads_are_refused() -> None:
    model = tiny_model()
    attention = model.model.layers[1].self_attn
    for name in ("k_proj", "v_proj"):
        linear = getattr(attention, name)
        setattr(attention, name, nn.Linear(linear.in_features, linear.out_features // 2, bias=False))
    attention.num_key_value_groups *= 2
    with pytest.raises(UserError, match="differ in key heads"):
        EagerEngine(Backbone(model)).check()


def test_packing_replaces_every_plain_linear_and_keeps_the_logits() -> None:
    backbone = tiny_backbone()
    before = reference(backbone, ids_of(9))
    assert sum(type(module) is torch.nn.Linear for module in backbone.model.modules()) == 7 * backbone.num_layers + 1
    backbone.engine = EagerEngine(backbone, pack=True)
    assert not any(type(module) is torch.nn.Linear for module in backbone.model.modules())
    assert torch.allclose(reference(backbone, ids_of(9)), before, atol=1e-4)
