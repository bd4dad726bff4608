"""The fast engine against the network it was built from: chains, trees, kept paths, slots, refusals."""

from typing import Any

import pytest
import torch
import transformers as hf

from medusa_cli.backbone import Backbone
from medusa_cli.decoding import generate, generate_plain
from medusa_cli.errors import UsageError
from medusa_cli.tree import Tree
from tests.test_generate import SPARSE, medusa
from tests.tiny import FAMILIES, tiny_backbone, tiny_model

TREE = Tree((-1, 0, 0, 1, 1, 2, 3, 6), (0, 0, 1, 0, 1, 0, 0, 0))  # more rows than FEW


def both(family: str = "llama") -> tuple[Backbone, Backbone]:
    fast = tiny_backbone(family, engine="fast")
    assert fast.engine == "fast"
    return fast, tiny_backbone(family)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("taps", [(-1,), (0, -1)])
def test_chain_tree_and_kept_path_equal_the_eager_engine(family: str, taps: tuple[int, ...]) -> None:
    outputs = []
    for backbone in both(family):
        cache = backbone.new_cache(4)
        prompt = backbone.forward(torch.arange(5, 18), cache, taps=taps)
        nodes = backbone.forward(torch.arange(20, 20 + TREE.size), cache, TREE, taps=taps)
        cache.keep(13, TREE.path(7))  # not contiguous
        after = backbone.forward(torch.tensor([9, 8]), cache, taps=taps)
        outputs.append([part for out in (prompt, nodes, after) for part in (out.logits, out.hidden)])
    for ours, theirs in zip(*outputs, strict=True):
        assert torch.allclose(ours, theirs, atol=1e-4)


def test_what_was_forgotten_or_never_written_is_not_seen() -> None:
    backbone, outputs = both("llama")[0], []
    for rest in (0.0, 50.0):
        cache = backbone.new_cache(200)
        backbone.forward(torch.arange(5, 18), cache)
        with torch.inference_mode():
            cache.buffer[:, :, :, 13:] = rest
            cache._turned[..., 13:] = rest
        outputs.append(backbone.forward(torch.arange(20, 20 + TREE.size), cache, TREE).logits.clone())
    assert torch.equal(*outputs)


@pytest.mark.parametrize("family", FAMILIES)
def test_slots_equal_the_eager_engine(family: str) -> None:
    results = []
    for backbone in both(family):
        slots = backbone.new_slots(3, 32)
        for slot, count in enumerate((3, 11, 7)):
            backbone.forward(torch.arange(5, 5 + count), slots.slots[slot])
        results.append(backbone.forward_slots(torch.tensor([[9], [10], [11]]), slots))
    assert torch.allclose(results[0].logits, results[1].logits, atol=1e-4)
    assert torch.allclose(results[0].hidden, results[1].hidden, atol=1e-4)


@pytest.mark.parametrize("family", FAMILIES)
def test_drafted_greedy_decoding_is_the_eager_engines_plain_decoding(family: str) -> None:
    fast, eager = both(family)
    prompt = [5, 9, 20, 11, 7]
    drafted = generate(fast, medusa(eager), SPARSE, prompt, max_new_tokens=60, stop_ids=())
    plain = generate_plain(eager, prompt, max_new_tokens=60, stop_ids=())
    assert [t for s in drafted for t in s.tokens] == [t for s in plain for t in s.tokens]


def test_logits_come_in_fp32_whatever_the_weights_are() -> None:
    backbone = Backbone(tiny_model().to(torch.bfloat16), engine="auto")
    for rows in (1, 3):
        logits = backbone.forward(torch.arange(5, 5 + rows), backbone.new_cache()).logits
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


@pytest.mark.parametrize("kind", ["gpt2", "partly rotary", "odd mlp"])
def test_models_it_does_not_know_keep_the_eager_engine(kind: str) -> None:
    assert Backbone(strange(kind), engine="auto").engine == "eager"
    with pytest.raises(UsageError, match="--engine fast cannot run the model"):
        Backbone(strange(kind), engine="fast")
