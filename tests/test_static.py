"""Steps of fixed shapes: accepted and compacted by tensors alone, and the same tokens as the ordinary loops give."""

import pytest
import torch

from medusa_cli.backbone import Backbone, lean
from medusa_cli.decoding import generate_plain, graphs
from medusa_cli.decoding.graphs import StaticDecoder
from medusa_cli.decoding.static import generate_static
from medusa_cli.decoding.types import Stats
from medusa_cli.drafters import HydraHeads
from medusa_cli.tree import Tree
from tests.test_generate import PROMPT, SPARSE, TREES, Oracle, plain
from tests.tiny import FAMILIES, tiny_backbone, tiny_model, tiny_tokenizer


@pytest.fixture(autouse=True)
def narrow(monkeypatch: pytest.MonkeyPatch) -> None:
    """Few columns a graph, so that short answers pass through several."""
    monkeypatch.setattr(graphs, "COLUMNS", 16)


def tokens_of(steps) -> list[int]:
    return [token for step in steps for token in step.tokens]


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("shape", TREES)
@pytest.mark.parametrize("right", [0.0, 0.6, 1.0])
def test_greedy_is_token_identical(family: str, shape: str, right: float) -> None:
    backbone = tiny_backbone(family)
    expected = plain(backbone)
    steps = list(
        generate_static(backbone, Oracle(expected, right), TREES[shape], PROMPT, max_new_tokens=90, stop_ids=())
    )
    assert tokens_of(steps) == expected
    if right == 1.0:
        assert all(step.accepted == TREES[shape].max_depth for step in steps[1:-2])
    if right == 0.0:
        assert Stats.of(steps).acceptance_rate < 1.3


@pytest.mark.parametrize("family", FAMILIES)
def test_the_fast_engine_and_a_drafter_with_state_run_through_it(family: str) -> None:
    fast, eager = tiny_backbone(family, engine="fast"), tiny_backbone(family)
    torch.manual_seed(1)
    heads = HydraHeads.create(fast, 4, 2, "own", prefix_layers=1)
    for weight in heads.parameters():
        weight.data += 0.3 * torch.randn_like(weight)
    steps = generate_static(fast, heads.eval(), SPARSE, PROMPT, max_new_tokens=60, stop_ids=())
    assert tokens_of(steps) == plain(eager, 60)


def test_without_a_drafter_it_is_plain_decoding() -> None:
    backbone = tiny_backbone("gemma3")
    steps = list(generate_static(backbone, None, Tree.root_only(), PROMPT, max_new_tokens=60, stop_ids=()))
    assert tokens_of(steps) == plain(backbone, 60) and all(len(step.tokens) == 1 for step in steps)


def test_what_a_step_settles_is_what_the_ordinary_pass_gives() -> None:
    backbone = tiny_backbone("qwen3")
    prompts = [torch.arange(5, 14), torch.arange(20, 24)]
    decoder = StaticDecoder(backbone, 64, sequences=2, taps=(0, -1))
    caches = [backbone.new_cache() for _ in prompts]
    for number, (prompt, cache) in enumerate(zip(prompts, caches, strict=True)):
        ours = decoder.prefill(prompt, number)
        theirs = backbone.forward(prompt, cache, taps=(0, -1), logits="last")
        assert torch.equal(ours.hidden, theirs.hidden) and torch.equal(ours.logits, theirs.logits)
    drafts = torch.randint(5, 60, (2, SPARSE.size), generator=torch.Generator().manual_seed(0))
    # Only the first sequence is offered what the model wants: nodes 1, 4 and 7 of the tree.
    for node, parent in ((1, 0), (4, 1), (7, 4)):
        known = backbone.forward(drafts[0], caches[0], SPARSE).logits.argmax(-1)
        caches[0].truncate(len(prompts[0]))
        drafts[0, node] = known[parent]
    assert [SPARSE.parents[node] for node in (1, 4, 7)] == [0, 1, 4]
    settled = decoder.step(drafts, SPARSE)
    for cache, row, one in zip(caches, drafts, settled, strict=True):
        start = cache.length
        out = backbone.forward(row, cache, SPARSE, taps=(0, -1))
        chosen, path = out.logits.argmax(-1).tolist(), [0]
        while child := [n for n in SPARSE.children[path[-1]] if row[n] == chosen[path[-1]]]:
            path.append(child[0])
        cache.keep(start, path)
        assert one.tokens == row[path].tolist() and one.bonus == chosen[path[-1]]
        assert torch.allclose(one.hidden, out.hidden[path], atol=1e-4)
    assert len(settled[0].tokens) >= 4 > len(settled[1].tokens)
    # What was compacted serves the next step.
    after = decoder.step(torch.tensor([[one.bonus] for one in settled]), Tree.root_only())
    for cache, one, later in zip(caches, settled, after, strict=True):
        out = backbone.forward(torch.tensor([one.bonus]), cache)
        assert later.bonus == int(out.logits.argmax())


def test_the_context_limit_and_a_full_cache_hold() -> None:
    backbone = tiny_backbone(positions=32)
    expected = plain(backbone, 100)
    steps = generate_static(backbone, Oracle(expected, 0.6), SPARSE, PROMPT, max_new_tokens=100, stop_ids=())
    assert tokens_of(steps) == expected
    decoder = StaticDecoder(backbone, 16)
    decoder.prefill(torch.arange(5, 20))
    with pytest.raises(ValueError, match="a cache of 16 rows cannot hold 25"):
        decoder.step(torch.zeros(1, SPARSE.size, dtype=torch.long), SPARSE)


def test_a_generous_token_limit_makes_no_cache_beyond_the_context() -> None:
    backbone = tiny_backbone(positions=80)
    rules = {"max_new_tokens": 1_000_000, "stop_ids": ()}
    steps = generate_static(backbone, Oracle(plain(backbone, 100), 0.6), SPARSE, PROMPT, **rules)
    assert len(tokens_of(steps)) == 80 - len(PROMPT)
    assert [one.cache.capacity for one in backbone.idle_decoders] == [96]  # 80 positions and 10 nodes, in columns of 16
    # A shorter answer's decoder has some room to spare, within the context.
    backbone.idle_decoders.clear()
    steps = generate_static(backbone, None, Tree.root_only(), PROMPT, max_new_tokens=61, stop_ids=())
    assert len(tokens_of(steps)) == 61
    assert [one.cache.capacity for one in backbone.idle_decoders] == [80]


def test_a_decoder_is_kept_for_the_next_answer_and_never_shared() -> None:
    backbone = tiny_backbone()
    rules = {"max_new_tokens": 20, "stop_ids": ()}
    one = generate_static(backbone, None, Tree.root_only(), PROMPT, **rules)
    other = generate_static(backbone, None, Tree.root_only(), PROMPT[::-1], **rules)
    pairs = list(zip(one, other, strict=True))  # interleaved
    assert tokens_of(a for a, _ in pairs) == plain(backbone, 20)
    expected = [s for s in generate_plain(backbone, PROMPT[::-1], **rules)]
    assert tokens_of(b for _, b in pairs) == tokens_of(expected)
    kept = list(backbone.idle_decoders)
    assert tokens_of(generate_static(backbone, None, Tree.root_only(), PROMPT, **rules)) == plain(backbone, 20)
    assert len(backbone.idle_decoders) == len(kept) and set(backbone.idle_decoders) == set(kept)


def test_layers_that_are_fused_but_not_packed_compute_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the fast engine does where there is no oneDNN."""
    monkeypatch.setattr(lean, "PLAIN", ("cpu",))
    for family in FAMILIES:
        backbone = tiny_backbone(family, engine="fast")
        assert plain(backbone, 40) == plain(tiny_backbone(family), 40)


@pytest.mark.gpu
@pytest.mark.parametrize("family", FAMILIES)
def test_captured_steps_give_what_the_eager_engine_gives(family: str) -> None:
    eager = Backbone(tiny_model(family).cuda(), tiny_tokenizer(), engine="eager")
    fast = Backbone(tiny_model(family).cuda(), tiny_tokenizer(), engine="fast")
    assert fast.captures and not eager.captures
    expected = plain(eager, 60)
    assert plain(fast, 60) == expected
    torch.manual_seed(1)
    heads = HydraHeads.create(fast, 4, 2, "own", prefix_layers=1)
    for weight in heads.parameters():
        weight.data += 0.3 * torch.randn_like(weight)
    for _ in range(2):  # captured, then replayed from the start
        steps = generate_static(fast, heads.eval(), SPARSE, PROMPT, max_new_tokens=60, stop_ids=())
        assert tokens_of(steps) == expected
