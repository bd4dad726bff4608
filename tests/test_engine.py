"""All engines against the plain model: chains, trees, kept paths, slots, long prompts; refusals."""

import copy
from typing import Any

import pytest
import torch
from torch import nn

from medusa_cli.decode import Request
from medusa_cli.engine import Cache, Output, Plan
from medusa_cli.errors import UsageError
from medusa_cli.model import Backbone
from medusa_cli.tree import Tree
from tests.helpers import (
    FAMILIES,
    PROMPT,
    SPARSE,
    Oracle,
    answer,
    attach,
    decoder_of,
    forward,
    plain,
    prefilled,
    rows_of,
    tiny_backbone,
    tiny_model,
    tiny_tokenizer,
    tokens_of,
)
from tests.test_drafters import drafter_of

TREE = Tree((-1, 0, 0, 1, 1, 2, 3, 6), (0, 0, 1, 0, 1, 0, 0, 0))
PATH = TREE.path(7)  # 0, 1, 3, 6, 7: not contiguous
TAPS = (0, 2, -1)
EACH_FAMILY = pytest.mark.parametrize("family", FAMILIES)
ENGINES = pytest.mark.parametrize("engine", ["eager", "native", "torch"])


def ids_of(count: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(5, 60, (count,), generator=torch.Generator().manual_seed(seed))


def reference(network: Any, *parts: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns logits and states after TAPS that the plain model gives for a text of several parts."""
    network.set_attn_implementation("eager")
    with torch.inference_mode():
        out = network(torch.cat(parts)[None], output_hidden_states=True)
    first, middle, last = (out.hidden_states[layer][0] for layer in (1, 3, -1))
    return out.logits[0], torch.cat([first, middle, last], dim=-1)


def assert_close(
    out: Output, expected: tuple[torch.Tensor, torch.Tensor], atol: float = 1e-4
) -> None:
    assert torch.allclose(out.logits, expected[0], atol=atol, rtol=1e-4)
    assert torch.allclose(out.hidden, expected[1], atol=atol, rtol=1e-4)


def last(
    expected: tuple[torch.Tensor, torch.Tensor], rows: int = 1
) -> tuple[torch.Tensor, torch.Tensor]:
    return expected[0][-rows:], expected[1][-rows:]


@pytest.mark.quick
@EACH_FAMILY
@ENGINES
def test_chain_tree_and_kept_path_equal_the_plain_model(engine: str, family: str) -> None:
    network, backbone = tiny_model(family, layers=4), Backbone(tiny_model(family, layers=4))
    attach(backbone, engine)
    prompt, nodes, tail = ids_of(13), ids_of(TREE.size, seed=1), ids_of(3, seed=2)
    cache = backbone.engine.new_cache(1, 4)  # grows
    assert_close(forward(backbone, prompt, cache, taps=TAPS), reference(network, prompt))
    out = forward(backbone, nodes, cache, TREE, taps=TAPS)
    for node in range(TREE.size):
        alone = last(reference(network, prompt, nodes[TREE.path(node)]))
        assert_close(Output(out.logits[node : node + 1], out.hidden[node : node + 1], None), alone)
    cache.keep(0, PATH)
    assert cache.lengths == [len(prompt) + len(PATH)]
    alone = last(reference(network, prompt, nodes[PATH], tail), 3)
    assert_close(forward(backbone, tail, cache, taps=TAPS), alone)


@pytest.mark.quick
@EACH_FAMILY
@ENGINES
def test_slots_verify_and_keep_on_their_own(engine: str, family: str) -> None:
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
    paths = [PATH, [0], TREE.path(4)]
    for slot, path in enumerate(paths):
        cache.keep(slot, path)
    kept = [torch.cat([prompt, nodes[i][paths[i]]]) for i, prompt in enumerate(prompts)]
    cache.swap(2, 0)
    assert cache.lengths == [len(kept[2]), len(kept[1]), len(kept[0]), 0]
    before = rows_of(cache, 0).clone()
    after = backbone.engine.forward(Plan(torch.tensor([[10], [11]]), first=1), cache)
    # A pass over later slots leaves earlier ones alone.
    assert torch.equal(rows_of(cache, 0), before)
    for row, text in zip(after.logits[:, 0], ([*kept[1], 10], [*kept[0], 11]), strict=True):
        assert torch.allclose(row, forward(alone, text).logits[-1], atol=1e-4)


@pytest.mark.quick
@EACH_FAMILY
@ENGINES
def test_long_prompts_in_pieces_equal_the_plain_model(engine: str, family: str) -> None:
    ids = torch.arange(700) * 37 % 59 + 5
    shape = {"layers": 4, "positions": 50_000}
    network, backbone = tiny_model(family, **shape), tiny_backbone(family, engine=engine, **shape)
    cache = backbone.engine.new_cache(2, 4)
    expected = reference(network, ids)
    assert_close(forward(backbone, ids, cache, slot=1, taps=TAPS), expected, 1e-3)
    after = backbone.engine.forward(Plan(torch.tensor([[8]]), first=1, taps=TAPS), cache)
    assert_close(
        Output(after.logits[0], after.hidden[0], None),
        last(reference(network, ids, torch.tensor([8]))),
        1e-3,
    )
    out = forward(backbone, ids, logits="last")
    assert torch.allclose(out.logits, expected[0][-1:], atol=1e-3)


@ENGINES
def test_growing_cache_is_copied_a_few_times(engine: str) -> None:
    backbone = tiny_backbone(engine=engine)
    cache, ids, buffers = backbone.engine.new_cache(1, 1), ids_of(200), []
    for token in ids:
        forward(backbone, token[None], cache, logits="none")
        if not buffers or cache.values is not buffers[-1]:
            buffers.append(cache.values)
    # Capacities 1, 2, 4, .. 256; the native engine's begin with a tile of 16.
    assert len(buffers) == (5 if engine == "native" else 9)
    expected = forward(backbone, [*ids, 7]).logits[-1]
    assert torch.allclose(forward(backbone, [7], cache).logits[0], expected, atol=1e-4)


def test_values_of_another_width_stay_when_the_cache_grows() -> None:
    cache = Cache(2, 2, 4)
    cache.allocate(3, 8, torch.empty(0), 6)
    assert cache.keys is not None
    assert cache.values is not None
    keys, values = torch.randn(2, 2, 3, 4, 8), torch.randn(2, 2, 3, 4, 6)
    cache.keys.copy_(keys)
    cache.values.copy_(values)
    cache.lengths = [2, 4]
    cache.reserve(9)
    cache.swap(0, 1)
    for buffer, before in ((cache.keys, keys), (cache.values, values)):
        assert buffer.shape[3] >= 9
        assert torch.equal(buffer[:, 0, :, :4], before[:, 1])
        assert torch.equal(buffer[:, 1, :, :2], before[:, 0, :, :2])


@ENGINES
def test_accepted_states_equal_those_of_a_plain_pass(engine: str) -> None:
    backbone = tiny_backbone("qwen3", engine=engine)
    cache, decoder = (
        prefilled(backbone, PROMPT),
        decoder_of(backbone, Oracle(plain(backbone, 60), 0.8), SPARSE),
    )
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
            assert sequence.tokens[before:] == pending.tokens.tolist() == path
            assert pending.start == before
            assert torch.allclose(pending.hidden, out.hidden, atol=1e-4)
            assert pending.root == step.tokens[-1]
        accepted += step.accepted
    assert accepted > 10


def test_layers_with_other_key_heads_decode_as_the_network() -> None:
    model = tiny_model(layers=4)
    attention = model.model.layers[1].self_attn
    for name in ("k_proj", "v_proj"):
        linear = getattr(attention, name)
        setattr(
            attention, name, nn.Linear(linear.in_features, linear.out_features // 2, bias=False)
        )
    attention.num_key_value_groups *= 2
    expected, backbone = reference(model, torch.tensor(PROMPT)), Backbone(model)
    attach(backbone).check()
    assert torch.allclose(forward(backbone, PROMPT).logits, expected[0], atol=1e-4)


@pytest.mark.parametrize("engine", ["eager", "torch"])
def test_free_cache_rows_are_not_seen(engine: str) -> None:
    backbone, outputs = tiny_backbone(engine=engine), []
    for rest in (0.0, 50.0):
        cache = backbone.engine.new_cache(1, 200)
        forward(backbone, ids_of(13), cache)
        with torch.inference_mode():
            cache.values[:, :, :, 13:] = rest
            cache.keys[:, :, :, 13:] = rest
        outputs.append(forward(backbone, ids_of(TREE.size), cache, TREE).logits.clone())
    assert torch.equal(*outputs)


@pytest.mark.parametrize("engine", ["native", "torch"])
def test_the_lm_heads_bias_is_kept(engine: str) -> None:
    model = tiny_model()
    model.lm_head = torch.nn.Linear(32, 64, bias=True)
    ours, theirs = (Backbone(network) for network in (model, copy.deepcopy(model)))
    attach(ours, engine)
    attach(theirs)
    assert torch.allclose(
        forward(ours, [5, 6, 7]).logits, forward(theirs, [5, 6, 7]).logits, atol=1e-4
    )


@pytest.mark.gpu
@EACH_FAMILY
def test_torch_engine_on_a_gpu_equals_its_eager_one(family: str) -> None:
    theirs, ours = (Backbone(tiny_model(family).cuda(), tiny_tokenizer()) for _ in range(2))
    attach(theirs)
    attach(ours, "torch")
    expected = plain(theirs, 60)
    assert plain(ours, 60) == expected
    for kind in ("medusa", "hydra++", "amphista-prompt", "eagle-draft"):
        drafter = drafter_of(ours, kind).cuda()
        decoder = decoder_of(ours, drafter, SPARSE.truncate(drafter.num_heads), cuda_graphs=True)
        for _ in range(2):  # the second prompt is in the prefix cache
            assert tokens_of(answer(decoder, PROMPT, max_new_tokens=60, stop_ids=())) == expected
        assert decoder.cuda_graphs is not None
        assert not decoder.cuda_graphs.failed


@ENGINES
def test_logits_are_fp32_over_bf16_weights(engine: str) -> None:
    backbone = Backbone(tiny_model().to(torch.bfloat16), tiny_tokenizer())
    attach(backbone, engine)
    for rows in (1, 3):
        logits = forward(backbone, ids_of(rows)).logits
        assert logits.dtype == torch.float32
        assert logits.shape == (rows, backbone.vocab_size)


class SwappedMLP(torch.nn.Module):
    """An MLP with the usual parts that activates the other factor."""

    def __init__(self, mlp: Any) -> None:
        super().__init__()
        self.gate_proj, self.up_proj, self.down_proj = mlp.gate_proj, mlp.up_proj, mlp.down_proj
        self.act_fn = mlp.act_fn

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down_proj(self.act_fn(self.up_proj(x)) * self.gate_proj(x))


def test_layers_that_compute_something_else_are_refused() -> None:
    model = tiny_model()
    model.model.layers[1].mlp = SwappedMLP(model.model.layers[1].mlp)
    with pytest.raises(UsageError, match="states differ"):
        attach(Backbone(model), "torch")
