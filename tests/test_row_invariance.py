"""A row of a pass has the same bits alone, in a tree, in a batch, in a prompt and behind a reused prefix."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from medusa_cli.decode import Decoder
from medusa_cli.decode.policy import ROOT, AdaptivePolicy, StaticTreePolicy
from medusa_cli.engine import Plan, attach
from medusa_cli.engine.attention import BLOCK, PIECE, attend, padding_of, pieces_of, powers
from medusa_cli.engine.kernels import Kernel, can_pack, has_fp16_weights
from medusa_cli.model import Backbone
from medusa_cli.model.load import has_bf16
from medusa_cli.tree import DynamicTree, Tree
from medusa_cli.tree.search import SizedTree, StepTimes
from tests.helpers import (
    FAMILIES,
    PROMPT,
    SPARSE,
    Oracle,
    answer,
    decoder_of,
    forward,
    generate_batch,
    generate_plain,
    medusa_drafter,
    tiny_model,
    tiny_tokenizer,
    tokens_of,
)

CPU = torch.device("cpu")
KERNELS = [
    pytest.param("fp16-weights", marks=pytest.mark.skipif(not has_fp16_weights(), reason="no fp16 kernel")),
    pytest.param("fp32", marks=pytest.mark.skipif(not can_pack(torch.float32, CPU), reason="no oneDNN")),
    pytest.param("bf16", marks=pytest.mark.skipif(not has_bf16(), reason="no bf16 kernels")),
]
# A path 0, 3, 5, 8 among siblings, so that its rows do not stand side by side.
TREE = Tree((-1, 0, 0, 0, 2, 3, 3, 5, 5, 8), (0, 0, 1, 2, 0, 0, 1, 0, 1, 0))
PATH = [0, 3, 5, 8]


def backbone_of(kernel: str, family: str = "llama", **shape: Any) -> Backbone:
    """Returns a random model over a kernel; wide enough that products add in more than one way."""
    network = tiny_model(family, **{"hidden": 128, "vocab": 512, "positions": 2048, **shape})
    rows = Kernel(kernel).rows
    backbone = Backbone(network.to(torch.bfloat16 if kernel == "bf16" else rows), tiny_tokenizer(512))
    attach(backbone, "fast", Kernel(kernel))
    return backbone


def slow_attention(query: Any, keys: Any, values: Any, mask: Any, scale: float) -> Any:
    """Attends one row [heads, D] to keys and values [KV, L, D] in fp64, key head by key head."""
    groups = len(query) // len(keys)
    heads = []
    for head, row in enumerate(query.double()):
        scores = keys[head // groups].double() @ row * scale + mask.double()
        heads.append(scores.softmax(-1) @ values[head // groups].double())
    return torch.cat(heads)


@pytest.mark.parametrize("size, rows, groups", [(1, 1, 1), (1, 9, 3), (3, 2, 2), (1, PIECE + 70, 3)])
def test_attention_equals_a_slow_reference(size: int, rows: int, groups: int) -> None:
    torch.manual_seed(0)
    kv, dim, wide, more = 2, 16, 2 * BLOCK, 1
    width = padding_of(dim)[1]
    query = torch.randn(size * rows, kv * groups, dim)
    keys = torch.randn(size * kv, dim, wide).transpose(1, 2)
    values = torch.randn(size * kv, wide, width)
    values[..., dim] = 1
    start = wide - rows if size == 1 else None
    mask = torch.zeros(size, rows, wide).masked_fill_(torch.rand(size, rows, wide) < 0.3, torch.finfo().min)
    if start is not None:
        mask[:, torch.arange(wide) > start + torch.arange(rows)[:, None]] = torch.finfo().min
    _, pieces, back = pieces_of(size, rows, kv * groups, kv, dim, more, 1, 1)
    masks = [piece.mask(mask, kv, start) for piece in pieces]
    beside = torch.cat([query, torch.randn(size * rows, kv, dim)], dim=1)
    attended = attend(beside, keys, values, masks, [piece.order for piece in pieces], back, 0.3)
    attended = attended.view(-1, kv * groups * dim)
    assert len(attended) == size * rows + more
    for i in range(size * rows + more):
        slot, row = divmod(i % (size * rows), rows)
        part = slice(slot * kv, slot * kv + kv)
        expected = slow_attention(query[i % (size * rows)], keys[part], values[part, :, :dim], mask[slot, row], 0.3)
        assert torch.allclose(attended[i].double(), expected, atol=1e-5)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("kernel", KERNELS)
def test_rows_have_the_same_bits_whatever_stands_beside_them(kernel: str, family: str) -> None:
    backbone = backbone_of(kernel, family)
    engine = backbone.engine
    assert engine.row_invariant
    torch.manual_seed(1)
    text = torch.randint(0, 512, (600,))
    whole = forward(backbone, text)  # in two pieces
    for start in (3, 77, 130, 246, BLOCK, 512):
        # The prompt alone, a prompt in other pieces, and tokens one by one.
        cache = engine.new_cache(3)
        forward(backbone, text[: start - 2], cache, slot=0, logits="none")
        for token in (start - 2, start - 1):
            out = forward(backbone, text[token : token + 1], cache, slot=0)
            assert torch.equal(out.hidden[0], whole.hidden[token]) and torch.equal(out.logits[0], whole.logits[token])
        # A tree, of which only a path is the text.
        nodes = torch.randint(0, 512, (TREE.size,))
        nodes[PATH] = text[start : start + len(PATH)]
        fits = engine.tree_rows(start) >= TREE.size
        assert fits == (start % BLOCK <= BLOCK - TREE.size)
        out = forward(backbone, nodes, cache, TREE, slot=0)
        for depth, node in enumerate(PATH):
            assert torch.equal(out.hidden[node], whole.hidden[start + depth]), (start, depth)
            assert torch.equal(out.logits[node], whole.logits[start + depth])
        cache.keep(0, PATH)
        # Beside a longer and a shorter text, in a batch of trees.
        forward(backbone, text[:560], cache, slot=1, logits="none")
        forward(backbone, text[:9], cache, slot=2, logits="none")
        here = start + len(PATH)
        nodes = nodes.repeat(3, 1)
        for slot, length in enumerate((here, 560, 9)):
            nodes[slot, PATH] = text[length : length + len(PATH)]
        batch = engine.forward(Plan(nodes, TREE.depth, TREE.mask), cache)
        for slot, length in enumerate((here, 560, 9)):
            for depth, node in enumerate(PATH):
                if engine.tree_rows(length) >= TREE.size:
                    assert torch.equal(batch.hidden[slot, node], whole.hidden[length + depth]), (start, slot, depth)


@pytest.mark.parametrize("kernel", KERNELS)
def test_greedy_output_over_drafts_is_plain_decodings_in_every_number_type(kernel: str) -> None:
    backbone = backbone_of(kernel, layers=4)
    expected = tokens_of(answer(Decoder(backbone), PROMPT, max_new_tokens=300, stop_ids=()))
    for tree in (Tree.dense([3, 2, 2, 1]), Tree.dense([8, 6])):
        decoder = decoder_of(backbone, Oracle(expected, 0.6), tree)
        for _ in range(2):  # the second time the prompt is in the cache
            steps = list(answer(decoder, PROMPT, max_new_tokens=300, stop_ids=()))
            assert tokens_of(steps) == expected and len(steps) < 200


@pytest.mark.skipif(not has_bf16(), reason="no bf16 kernels")
def test_few_bits_keep_plain_decodings_bits_in_trees_that_auto_takes() -> None:
    """Over 600 tokens trees meet the ends of blocks, and matches would make them wider than the kernel's few rows."""
    backbone, rules = backbone_of("int4", layers=4), {"max_new_tokens": 600, "stop_ids": ()}
    nodes = backbone.engine.few_nodes
    assert nodes is not None and nodes >= 8 and not backbone.engine.row_invariant
    expected = tokens_of(answer(Decoder(backbone), PROMPT, **rules))
    free = StepTimes({1: 0.01, 64: 0.01}, {1: 0.0001})
    policy = AdaptivePolicy([SizedTree(Tree.dense([2, 1, 1]), 3.0)], free, ngrams=True, max_nodes=nodes)
    steps = list(answer(Decoder(backbone, Oracle(expected, 0.6), policy), PROMPT, **rules))
    assert tokens_of(steps) == expected and any(step.looked_up for step in steps)
    assert 7 < max(step.nodes for step in steps) <= nodes
    # A grammar may force a longer path.
    text, forced = [*PROMPT, *expected], StaticTreePolicy(ROOT)
    forced.next = lambda of: [(ROOT, [tuple(text[len(sequence.tokens) + 1 :][:40])]) for sequence in of]  # type: ignore
    steps = list(answer(Decoder(backbone, None, forced), PROMPT, **rules))
    assert tokens_of(steps) == expected and max(step.nodes for step in steps) == nodes


@pytest.mark.parametrize("tree", [SPARSE, DynamicTree(24, 4)], ids=["static", "dynamic"])
@pytest.mark.parametrize("kernel", KERNELS)
def test_greedy_output_in_a_batch_is_that_alone_in_every_number_type(kernel: str, tree: Any) -> None:
    backbone, rules = backbone_of(kernel, layers=4), {"max_new_tokens": 60, "stop_ids": ()}
    prompts = [list(range(5, 5 + count)) for count in (4, 230, 90)]
    together = generate_batch(backbone, medusa_drafter(backbone), tree, prompts, batch_size=2, **rules)
    for prompt, steps in zip(prompts, together, strict=True):
        assert tokens_of(steps) == tokens_of(generate_plain(backbone, prompt, **rules))


def test_traced_passes_have_the_bits_of_untraced_ones() -> None:
    backbone, text = backbone_of("fp16-weights"), torch.arange(40) * 37 % 512
    whole = forward(backbone, text)
    cache = backbone.engine.new_cache()
    forward(backbone, text[:20], cache)
    for token in range(20, 30):  # the third pass of a kind is traced
        assert torch.equal(forward(backbone, text[token : token + 1], cache).hidden[0], whole.hidden[token])


@pytest.fixture
def threads() -> Iterator[None]:
    """Sets five threads, which share few tensors evenly."""
    before = torch.get_num_threads()
    torch.set_num_threads(5)
    yield
    torch.set_num_threads(before)


def test_shares_of_threads_change_no_bit(threads: None) -> None:
    scores = -20 * torch.rand(7, 53, 256)
    assert torch.equal(powers(scores.clone()), torch.stack([powers(row[None].clone())[0] for row in scores]))
    backbone = backbone_of("fp16-weights", layers=8)
    for rows in (301, 389, 431, 503):
        text = torch.arange(rows) * 37 % 512
        cache = backbone.engine.new_cache()
        parts = [forward(backbone, part, cache).hidden for part in text.split(100)]  # each by one thread
        assert torch.equal(forward(backbone, text).hidden, torch.cat(parts))
