"""The fast engine against transformers' own layers: chains, trees, kept paths, slots, taps, pseudo rows, refusals."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as hf

from medusa_cli.engine import Plan, attach, load_backbone
from medusa_cli.engine import fast as lean_engine
from medusa_cli.engine import jit as tracing
from medusa_cli.engine.kernels import PackedKernel, PlainKernel
from medusa_cli.errors import UsageError
from medusa_cli.model import Backbone
from medusa_cli.runs.resolve import LoadOptions
from medusa_cli.tree import Tree
from medusa_cli.tree.tree import batch_trees
from tests.helpers import (
    FAMILIES,
    SPARSE,
    forward,
    generate,
    generate_plain,
    medusa_drafter,
    rows_of,
    save_network,
    tiny_backbone,
    tiny_model,
    tiny_tokenizer,
)
from tests.test_firp import firp

LATER = tracing.TRACED_FROM


@pytest.fixture(autouse=True)
def traced_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """What decoding does from the third pass of a kind on, these tests do from the first."""
    monkeypatch.setattr(tracing, "TRACED_FROM", 1)


TREE = Tree((-1, 0, 0, 1, 1, 2, 3, 6), (0, 0, 1, 0, 1, 0, 0, 0))


def both(family: str = "llama", layers: int = 2, positions: int = 512) -> tuple[Backbone, Backbone]:
    fast = tiny_backbone(family, layers=layers, positions=positions, engine="fast")
    assert fast.engine.name == "fast"
    return fast, tiny_backbone(family, layers=layers, positions=positions)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("taps", [(-1,), (0, -1), (1, 2, -1), (0, 2)])
def test_chain_tree_and_kept_path_equal_the_eager_engine(family: str, taps: tuple[int, ...]) -> None:
    outputs = []
    for backbone in both(family, layers=4):
        cache = backbone.engine.new_cache(1, 4)
        prompt = forward(backbone, torch.arange(5, 18), cache, taps=taps)
        nodes = forward(backbone, torch.arange(20, 20 + TREE.size), cache, TREE, taps=taps)
        cache.keep(0, TREE.path(7))  # not contiguous
        after = forward(backbone, torch.tensor([9, 8]), cache, taps=taps)
        outputs.append([part for out in (prompt, nodes, after) for part in (out.logits, out.hidden)])
    for ours, theirs in zip(*outputs, strict=True):
        assert torch.allclose(ours, theirs, atol=1e-4)


def test_what_was_forgotten_or_never_written_is_not_seen() -> None:
    backbone, outputs = both("llama")[0], []
    for rest in (0.0, 50.0):
        cache = backbone.engine.new_cache(1, 200)
        forward(backbone, torch.arange(5, 18), cache)
        with torch.inference_mode():
            cache.values[:, :, :, 13:] = rest
            cache.keys[:, :, :, 13:] = rest
        outputs.append(forward(backbone, torch.arange(20, 20 + TREE.size), cache, TREE).logits.clone())
    assert torch.equal(*outputs)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("taps", [(-1,), (0, -1)])
@pytest.mark.parametrize("plain", [False, True], ids=["several rows", "one row"])
def test_slots_of_different_lengths_equal_the_eager_engine(family: str, taps: tuple[int, ...], plain: bool) -> None:
    trees = [TREE, Tree.chain(3), Tree.root_only()]
    results = []
    for backbone in both(family):
        cache = backbone.engine.new_cache(3, 4, plain=plain)  # grows
        assert cache.transposed == (backbone.engine.name == "fast" and not plain)
        for slot, count in enumerate((3, 21, 7)):
            forward(backbone, torch.arange(5, 5 + count), cache, slot=slot)
        found = [backbone.engine.forward(Plan(torch.tensor([[9], [10], [11]]), taps=taps), cache)]
        nodes = [torch.arange(30 + i, 30 + i + tree.size) for i, tree in enumerate(trees)]
        found.append(backbone.engine.forward(Plan(*batch_trees(nodes, trees), taps=taps), cache))
        for slot, path in enumerate((TREE.path(7), [0, 1, 2], [0])):
            cache.keep(slot, path)
        found.append(backbone.engine.forward(Plan(torch.tensor([[8], [7], [6]]), taps=taps), cache))
        assert cache.lengths == [4 + 5 + 1, 22 + 3 + 1, 8 + 1 + 1]
        results.append(([part for out in found for part in (out.logits, out.hidden)], cache))
    (ours, fast), (theirs, eager) = results
    for one, other in zip(ours, theirs, strict=True):
        assert torch.allclose(one, other, atol=1e-4)
    assert all(torch.allclose(rows_of(fast, slot), rows_of(eager, slot), atol=1e-4) for slot in range(3))


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("masked", [False, True])
def test_pseudo_rows_of_one_and_of_many_equal_the_eager_engine(family: str, masked: bool) -> None:
    results = []
    for backbone in both(family, layers=6):
        pseudo = firp(backbone, masked=masked, layers=[2, 3, 3]).extra_rows(3)
        cache = backbone.engine.new_cache(3, 4)
        found = [
            backbone.engine.forward(Plan.chain(torch.arange(5, 5 + count), slot=slot, pseudo=pseudo), cache)
            for slot, count in enumerate((3, 21, 7))
        ]
        nodes = torch.stack([torch.arange(30 + i, 30 + i + TREE.size) for i in range(3)])
        found.append(backbone.engine.forward(Plan(nodes, TREE.depth, TREE.mask, pseudo=pseudo), cache))
        assert found[0].ahead.shape == (1, 1, 3, 32) and found[-1].ahead.shape == (3, TREE.size, 3, 32)
        results.append([part.clone() for out in found for part in (out.logits, out.hidden, out.ahead)])
    for ours, theirs in zip(*results, strict=True):
        assert torch.allclose(ours, theirs, atol=2e-4)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_pass_of_many_rows_equals_the_eager_engine(family: str) -> None:
    """More rows than two plain products are taken for, and a prompt of several pieces."""
    ids = torch.arange(700) * 37 % 59 + 5
    found = []
    for backbone in both(family, positions=1024):
        cache = backbone.engine.new_cache(2, 4)
        out = forward(backbone, ids, cache, slot=1)
        after = backbone.engine.forward(Plan(torch.tensor([[9], [8]])), cache)
        found.append((out.logits, out.hidden, after.logits.clone()))
    assert lean_engine.MANY < 512 < len(ids)
    for ours, theirs in zip(*found, strict=True):
        assert torch.allclose(ours, theirs, atol=1e-3)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("kernel", [PackedKernel(torch.float32), PlainKernel(torch.float32)], ids=lambda one: one.name)
def test_every_fp32_kernel_computes_what_the_network_does(family: str, kernel: Any) -> None:
    fast, eager = Backbone(tiny_model(family)), tiny_backbone(family)
    attach(fast, "fast", kernel)
    for rows in (1, 5, 40):
        ours, theirs = (forward(one, torch.arange(5, 5 + rows)) for one in (fast, eager))
        assert torch.allclose(ours.logits, theirs.logits, atol=1e-4)


@pytest.mark.parametrize("family", FAMILIES)
def test_traced_and_untraced_layers_compute_the_same(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    traced = tiny_backbone(family, engine="fast")
    made = []
    inner = tracing.trace
    monkeypatch.setattr(tracing, "trace", lambda *given: made.append(inner(*given)) or made[-1])
    ours = passes(traced)
    assert made and all(one is not None for one in made)
    monkeypatch.setattr(tracing, "trace", lambda *given: None)
    theirs = passes(tiny_backbone(family, engine="fast"))
    assert all(torch.allclose(one, other, atol=1e-5) for one, other in zip(ours, theirs, strict=True))


def passes(backbone: Backbone) -> list[torch.Tensor]:
    """The logits of passes of several sizes, of one slot and of two."""
    cache, found = backbone.engine.new_cache(2, 4), []
    for count in (9, 1, 30):
        found.append(forward(backbone, torch.arange(5, 5 + count), cache).logits.clone())
        found.append(forward(backbone, torch.arange(20, 20 + TREE.size), cache, TREE).logits.clone())
        found.append(backbone.engine.forward(Plan(torch.tensor([[9], [8]])), cache).logits.clone())
    return found


def test_the_head_of_a_family_keeps_its_bias() -> None:
    model = tiny_model("llama")
    model.lm_head = torch.nn.Linear(32, 64, bias=True)
    fast, eager = (Backbone(one) for one in (model, copy.deepcopy(model)))
    attach(fast, "fast")
    attach(eager)
    assert torch.allclose(forward(fast, [5, 6, 7]).logits, forward(eager, [5, 6, 7]).logits, atol=1e-4)


@pytest.mark.parametrize("family", FAMILIES)
def test_drafted_greedy_decoding_is_the_eager_engines_plain_decoding(family: str) -> None:
    fast, eager = both(family)
    prompt = [5, 9, 20, 11, 7]
    drafted = generate(fast, medusa_drafter(eager), SPARSE, prompt, max_new_tokens=60, stop_ids=())
    plain = generate_plain(eager, prompt, max_new_tokens=60, stop_ids=())
    assert [t for s in drafted for t in s.tokens] == [t for s in plain for t in s.tokens]


def test_logits_come_in_fp32_whatever_the_weights_are() -> None:
    for engine in ("eager", "fast"):
        backbone = Backbone(tiny_model().to(torch.bfloat16), tiny_tokenizer())
        attach(backbone, engine)
        for rows in (1, 3):
            logits = forward(backbone, torch.arange(5, 5 + rows)).logits
            assert logits is not None and logits.dtype == torch.float32 and logits.shape == (rows, backbone.vocab_size)


class _Odd(torch.nn.Module):
    """An MLP with the usual parts that does something unusual with them."""

    def __init__(self, mlp: Any) -> None:
        super().__init__()
        self.gate_proj, self.up_proj, self.down_proj, self.act_fn = (
            mlp.gate_proj,
            mlp.up_proj,
            mlp.down_proj,
            mlp.act_fn,
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down_proj(self.act_fn(self.up_proj(x)) * self.gate_proj(x))


def strange(kind: str) -> Any:
    if kind == "gpt2":
        return hf.GPT2LMHeadModel(hf.GPT2Config(vocab_size=64, n_embd=32, n_layer=2, n_head=4, n_positions=64)).eval()
    if kind == "partly rotary":
        config = hf.StableLmConfig(
            vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
            num_key_value_heads=2, partial_rotary_factor=0.5,
        )  # fmt: skip
        return hf.StableLmForCausalLM(config).eval()
    model = tiny_model("llama")
    model.model.layers[1].mlp = _Odd(model.model.layers[1].mlp)
    return model


@pytest.mark.parametrize("kind", ["gpt2", "partly rotary"])
def test_models_it_does_not_know_keep_the_eager_engine(kind: str, tmp_path: Path) -> None:
    model = save_network(strange(kind), tmp_path)
    assert load_backbone(model, LoadOptions(dtype="fp32")).engine.name == "eager"
    with pytest.raises(UsageError, match="engine fast cannot run the model"):
        load_backbone(model, LoadOptions(dtype="fp32", engine="fast"))


def test_layers_with_the_usual_parts_that_compute_something_else_are_found_out() -> None:
    with pytest.raises(UsageError, match="engine fast cannot run the model .* its states differ"):
        attach(Backbone(strange("odd mlp")), "fast")


def test_a_pass_is_traced_only_when_its_kind_comes_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """An answer of a token does not wait for a trace; one of many gets it, and the same states."""
    made: list[int] = []
    inner = tracing.trace
    monkeypatch.setattr(tracing, "TRACED_FROM", LATER)
    monkeypatch.setattr(tracing, "trace", lambda *given: made.append(1) or inner(*given))
    backbone, eager = tiny_backbone("qwen3", engine="fast"), tiny_backbone("qwen3")
    for count in range(1, LATER + 3):
        found, expected = (forward(one, [5, 9, 11 + count]).hidden for one in (backbone, eager))
        assert torch.allclose(found, expected, atol=1e-4)
        assert len(made) == (count + 1 >= LATER)  # the check at loading was the first pass
