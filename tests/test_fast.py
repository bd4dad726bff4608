"""The fast engine against the eager one: chains, trees, kept paths, slots, taps, extra rows, traces, refusals."""

import copy
from typing import Any

import pytest
import torch

from medusa_cli.engine import Plan, attach, attention, jit
from medusa_cli.engine.kernels import Kernel
from medusa_cli.errors import UsageError
from medusa_cli.model import Backbone
from medusa_cli.tree import Tree
from tests.helpers import (
    FAMILIES,
    PROMPT,
    SPARSE,
    answer,
    decoder_of,
    forward,
    plain,
    tiny_backbone,
    tiny_model,
    tiny_tokenizer,
    tokens_of,
)
from tests.test_drafters import drafter_of
from tests.test_firp import firp

TRACED_FROM = jit.TRACED_FROM
TREE = Tree((-1, 0, 0, 1, 1, 2, 3, 6), (0, 0, 1, 0, 1, 0, 0, 0))


@pytest.fixture(autouse=True)
def traced_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Traces from the first pass of a kind on; decoding waits for the third."""
    monkeypatch.setattr(jit, "TRACED_FROM", 1)


def engines(family: str = "llama", **shape: int) -> tuple[Backbone, Backbone]:
    """Returns the same backbone with the fast and the eager engine."""
    ours = tiny_backbone(family, engine="fast", **shape)
    assert ours.engine.name == "fast"
    return ours, tiny_backbone(family, **shape)


def assert_close(results: list[list[torch.Tensor]], atol: float = 1e-4) -> None:
    for ours, theirs in zip(*results, strict=True):
        assert torch.allclose(ours, theirs, atol=atol)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("taps", [(-1,), (1, 2, -1), (0, 2)])
def test_chain_tree_and_kept_path_equal_the_eager_engine(family: str, taps: tuple[int, ...]) -> None:
    results = []
    for backbone in engines(family, layers=4):
        cache = backbone.engine.new_cache(1, 4)
        prompt = forward(backbone, torch.arange(5, 18), cache, taps=taps)
        nodes = forward(backbone, torch.arange(20, 20 + TREE.size), cache, TREE, taps=taps)
        cache.keep(0, TREE.path(7))  # not contiguous
        after = forward(backbone, torch.tensor([9, 8]), cache, taps=taps)
        results.append([part for out in (prompt, nodes, after) for part in (out.logits, out.hidden)])
    assert_close(results)


def test_free_cache_rows_are_not_seen() -> None:
    backbone, outputs = engines()[0], []
    for rest in (0.0, 50.0):
        cache = backbone.engine.new_cache(1, 200)
        forward(backbone, torch.arange(5, 18), cache)
        with torch.inference_mode():
            cache.values[:, :, :, 13:] = rest
            cache.keys[:, :, :, 13:] = rest
        outputs.append(forward(backbone, torch.arange(20, 20 + TREE.size), cache, TREE).logits.clone())
    assert torch.equal(*outputs)


@pytest.mark.parametrize("family", FAMILIES)
def test_extra_rows_equal_the_eager_engine(family: str) -> None:
    results = []
    for backbone in engines(family, layers=6):
        extra_rows = firp(backbone, layers=[2, 3, 3]).extra_rows(3)
        cache = backbone.engine.new_cache(3, 4)
        outputs = [
            backbone.engine.forward(Plan.chain(torch.arange(5, 5 + count), slot=slot, extra_rows=extra_rows), cache)
            for slot, count in enumerate((3, 21, 7))
        ]
        nodes = torch.stack([torch.arange(30 + i, 30 + i + TREE.size) for i in range(3)])
        outputs.append(backbone.engine.forward(Plan(nodes, TREE.depth, TREE.mask, extra_rows=extra_rows), cache))
        assert outputs[0].extra.shape == (1, 1, 3, 32) and outputs[-1].extra.shape == (3, TREE.size, 3, 32)
        results.append([part.clone() for out in outputs for part in (out.logits, out.hidden, out.extra)])
    assert_close(results, 2e-4)


@pytest.mark.parametrize("family", FAMILIES)
def test_prompt_of_several_pieces_equals_the_eager_engine(family: str) -> None:
    ids = torch.arange(700) * 37 % 59 + 5
    assert attention.PIECE < 512 < len(ids)
    results = []
    for backbone in engines(family, positions=1024):
        cache = backbone.engine.new_cache(2, 4)
        out = forward(backbone, ids, cache, slot=1)
        after = backbone.engine.forward(Plan(torch.tensor([[9], [8]])), cache)
        results.append([out.logits, out.hidden, after.logits.clone()])
    assert_close(results, 1e-3)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("name", ["fp32", "plain"])
def test_every_fp32_kernel_computes_as_the_network(family: str, name: str) -> None:
    ours, theirs = Backbone(tiny_model(family)), tiny_backbone(family)
    attach(ours, "fast", Kernel(name, torch.float32))
    for rows in (1, 5, 40):
        ids = torch.arange(5, 5 + rows)
        assert torch.allclose(forward(ours, ids).logits, forward(theirs, ids).logits, atol=1e-4)


def passes(backbone: Backbone) -> list[torch.Tensor]:
    """Returns the logits of passes of several sizes over one slot and two."""
    cache, logits = backbone.engine.new_cache(2, 4), []
    for count in (9, 1, 30):
        logits.append(forward(backbone, torch.arange(5, 5 + count), cache).logits.clone())
        logits.append(forward(backbone, torch.arange(20, 20 + TREE.size), cache, TREE).logits.clone())
        logits.append(backbone.engine.forward(Plan(torch.tensor([[9], [8]])), cache).logits.clone())
    return logits


@pytest.mark.parametrize("family", FAMILIES)
def test_traced_layers_compute_as_untraced_ones(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    traces, trace = [], jit.trace
    monkeypatch.setattr(jit, "trace", lambda *args: traces.append(trace(*args)) or traces[-1])
    ours = passes(tiny_backbone(family, engine="fast"))
    assert traces and None not in traces
    monkeypatch.setattr(jit, "trace", lambda *args: None)
    assert_close([ours, passes(tiny_backbone(family, engine="fast"))], 1e-5)


def test_a_pass_is_traced_from_its_third_time_on(monkeypatch: pytest.MonkeyPatch) -> None:
    traces, trace = [], jit.trace
    monkeypatch.setattr(jit, "TRACED_FROM", TRACED_FROM)
    monkeypatch.setattr(jit, "trace", lambda *args: traces.append(trace(*args)) or traces[-1])
    ours, theirs = engines("qwen3")
    for count in range(1, TRACED_FROM + 3):
        states = [forward(backbone, [5, 9, 11 + count]).hidden for backbone in (ours, theirs)]
        assert torch.allclose(*states, atol=1e-4)
        assert len(traces) == (count >= TRACED_FROM)  # those of the checks at loading do not count


def test_the_lm_heads_bias_is_kept() -> None:
    model = tiny_model()
    model.lm_head = torch.nn.Linear(32, 64, bias=True)
    ours, theirs = (Backbone(network) for network in (model, copy.deepcopy(model)))
    attach(ours, "fast")
    attach(theirs)
    assert torch.allclose(forward(ours, [5, 6, 7]).logits, forward(theirs, [5, 6, 7]).logits, atol=1e-4)


@pytest.mark.gpu
@pytest.mark.parametrize("family", FAMILIES)
def test_fast_engine_on_a_gpu_equals_its_eager_one(family: str) -> None:
    theirs, ours = (Backbone(tiny_model(family).cuda(), tiny_tokenizer()) for _ in range(2))
    attach(theirs)
    attach(ours, "fast")
    expected = plain(theirs, 60)
    assert plain(ours, 60) == expected
    for kind in ("medusa", "hydra++", "amphista-prompt", "eagle-draft"):
        decoder = decoder_of(ours, drafter_of(ours, kind).cuda(), SPARSE, cuda_graphs=True)
        for _ in range(2):  # the second prompt is in the prefix cache
            assert tokens_of(answer(decoder, PROMPT, max_new_tokens=60, stop_ids=())) == expected
        assert decoder.cuda_graphs is not None and not decoder.cuda_graphs.failed


@pytest.mark.parametrize("engine", ["eager", "fast"])
def test_logits_are_fp32_over_bf16_weights(engine: str) -> None:
    backbone = Backbone(tiny_model().to(torch.bfloat16), tiny_tokenizer())
    attach(backbone, engine)
    for rows in (1, 3):
        logits = forward(backbone, torch.arange(5, 5 + rows)).logits
        assert logits.dtype == torch.float32 and logits.shape == (rows, backbone.vocab_size)


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
        attach(Backbone(model), "fast")


def test_rotary_tables_grow_with_the_text() -> None:
    ours, theirs = engines(positions=50_000)
    ids = torch.arange(700) * 37 % 59 + 5
    assert torch.allclose(forward(ours, ids).logits, forward(theirs, ids).logits, atol=1e-3)
    [(cos, _)] = ours.engine._rotary.values()
    assert len(ids) <= len(cos) <= 2 * len(ids)
