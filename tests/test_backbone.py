"""The eager engine against the plain model: chains, trees, kept paths, growth, slots, windows, refusals."""

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as hf

from medusa_cli.engine import Plan, load_backbone
from medusa_cli.engine.eager import EagerEngine
from medusa_cli.errors import UsageError, UserError
from medusa_cli.model import Backbone
from medusa_cli.model.backbone import refuse_unsupported
from medusa_cli.runs.resolve import LoadOptions
from medusa_cli.tree import Tree
from medusa_cli.tree.tree import batch_trees
from tests.helpers import FAMILIES, forward, prefilled, rows_of, save_network, tiny_backbone

TREE = Tree((-1, 0, 0, 1, 1, 2, 3, 6), (0, 0, 1, 0, 1, 0, 0, 0))


def tokens_of(count: int, seed: int = 0, vocab: int = 60) -> torch.Tensor:
    return torch.randint(5, vocab, (count,), generator=torch.Generator().manual_seed(seed))


def reference(backbone: Backbone, ids: torch.Tensor) -> torch.Tensor:
    """Logits [n, V] of one plain pass without a cache, masks built from scratch."""
    logits = forward(backbone, ids).logits
    assert logits is not None
    return logits


@pytest.mark.parametrize("family", FAMILIES)
def test_the_chain_equals_the_unmodified_model(family: str) -> None:
    backbone = tiny_backbone(family)
    ids = tokens_of(21)
    ours = reference(backbone, ids)
    backbone.model.set_attn_implementation("eager")
    with torch.inference_mode():
        theirs = backbone.model(ids[None]).logits[0]
    assert torch.allclose(ours, theirs, atol=2e-5)


@pytest.mark.parametrize("family", FAMILIES)
def test_each_node_of_a_tree_sees_its_own_path_alone(family: str) -> None:
    backbone = tiny_backbone(family)
    prompt, nodes = tokens_of(13), tokens_of(TREE.size, seed=1)
    cache = backbone.engine.new_cache(1, 4)
    forward(backbone, prompt, cache)
    out = forward(backbone, nodes, cache, TREE)
    for node in range(TREE.size):
        path = TREE.path(node)
        alone = reference(backbone, torch.cat([prompt, nodes[path]]))
        assert torch.allclose(out.logits[node], alone[-1], atol=2e-5), f"node {node}"


@pytest.mark.parametrize("family", FAMILIES)
def test_a_kept_path_leaves_the_cache_as_if_it_had_been_decoded_alone(family: str) -> None:
    backbone = tiny_backbone(family)
    prompt, nodes = tokens_of(13), tokens_of(TREE.size, seed=1)
    cache = backbone.engine.new_cache(1, 4)
    forward(backbone, prompt, cache)
    forward(backbone, nodes, cache, TREE)
    path = TREE.path(7)  # 0, 1, 3, 6, 7: not contiguous
    cache.keep(0, path)
    assert cache.lengths == [len(prompt) + len(path)]
    tail = tokens_of(3, seed=2)
    out = forward(backbone, tail, cache)
    alone = reference(backbone, torch.cat([prompt, nodes[path], tail]))
    assert torch.allclose(out.logits, alone[-3:], atol=2e-5)


def test_a_long_prompt_is_prefilled_in_pieces_with_the_same_result(monkeypatch: pytest.MonkeyPatch) -> None:
    backbone = tiny_backbone("llama")
    ids = tokens_of(50)
    whole = forward(backbone, ids, backbone.engine.new_cache())
    monkeypatch.setattr("medusa_cli.engine.engine.PREFILL_ROWS", 7)
    cache = backbone.engine.new_cache(1, 1)
    pieces = forward(backbone, ids, cache)
    assert cache.lengths == [50]
    assert torch.allclose(whole.logits, pieces.logits, atol=2e-5)
    assert torch.allclose(whole.hidden, pieces.hidden, atol=2e-5)
    last = forward(backbone, ids, backbone.engine.new_cache(), logits="last")
    assert last.logits.shape[0] == 1 and torch.allclose(last.logits[0], whole.logits[-1], atol=2e-5)


@pytest.mark.parametrize("engine", ["eager", "fast"])
def test_a_long_text_moves_the_cache_a_few_times_and_not_every_step(engine: str) -> None:
    backbone = tiny_backbone("llama", engine=engine)
    cache, ids = backbone.engine.new_cache(1, 1), tokens_of(400)
    buffers, copied = [], 0
    for token in ids:
        before = cache.lengths[0]
        forward(backbone, token[None], cache, logits="none")
        if not buffers or cache.values is not buffers[-1]:
            buffers.append(cache.values)
            copied += before
    assert len(buffers) == 10  # capacities 1, 2, 4, .. 512
    assert copied < 2 * len(ids)
    assert torch.allclose(
        forward(backbone, ids[:1], cache).logits[0], reference(backbone, torch.cat([ids, ids[:1]]))[-1], atol=1e-4
    )


def test_taps_read_middle_layers_beside_the_final_state() -> None:
    backbone = tiny_backbone("llama")
    ids = tokens_of(6)
    out = forward(backbone, ids, backbone.engine.new_cache(), taps=(0, -1))
    with torch.inference_mode():
        states = backbone.model.base_model(ids[None], attention_mask=_causal(6), output_hidden_states=True)
    assert out.hidden.shape == (6, 2 * backbone.hidden_size)
    assert torch.allclose(out.hidden[:, : backbone.hidden_size], states.hidden_states[1][0], atol=1e-5)
    assert torch.allclose(out.hidden[:, backbone.hidden_size :], states.last_hidden_state[0], atol=1e-5)


def _causal(n: int) -> torch.Tensor:
    return torch.full((n, n), torch.finfo(torch.float32).min).triu(1)[None, None]


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("engine", ["eager", "fast"])
def test_slots_verify_a_tree_each_and_keep_paths_of_their_own(family: str, engine: str) -> None:
    backbone, plain = tiny_backbone(family, engine=engine), tiny_backbone(family)
    prompts = [tokens_of(n, seed=n) for n in (3, 11, 7)]
    cache = backbone.engine.new_cache(4, 8)  # one stays empty; it grows
    for slot, prompt in enumerate(prompts):
        forward(backbone, prompt, cache, slot=slot)
    nodes = torch.stack([tokens_of(TREE.size, seed=20 + i) for i in range(3)])
    out = backbone.engine.forward(Plan(nodes, TREE.depth, TREE.mask, taps=(0, -1)), cache)
    assert out.hidden.shape == (3, TREE.size, 2 * backbone.hidden_size)
    for i, prompt in enumerate(prompts):
        alone = forward(plain, nodes[i], prefilled(plain, prompt), TREE, taps=(0, -1))
        assert torch.allclose(out.logits[i], alone.logits, atol=1e-4)
        assert torch.allclose(out.hidden[i], alone.hidden, atol=1e-4)
    paths = [TREE.path(node) for node in (7, 0, 4)]
    for slot, path in enumerate(paths):
        cache.keep(slot, path)
    kept = [torch.cat([prompt, nodes[i][paths[i]]]) for i, prompt in enumerate(prompts)]
    assert cache.lengths == [*map(len, kept), 0]
    cache.swap(2, 0)
    assert cache.lengths == [len(kept[2]), len(kept[1]), len(kept[0]), 0]
    after = backbone.engine.forward(Plan(torch.tensor([[9], [10], [11]])), cache)
    for i, (ids, token) in enumerate(((kept[2], 9), (kept[1], 10), (kept[0], 11))):
        alone = reference(plain, torch.cat([ids, torch.tensor([token])]))
        assert torch.allclose(after.logits[i, 0], alone[-1], atol=1e-4)


@pytest.mark.parametrize("engine", ["eager", "fast"])
def test_a_pass_from_a_later_slot_on_leaves_those_before_it_alone(engine: str) -> None:
    backbone = tiny_backbone("gemma3", engine=engine)
    cache = backbone.engine.new_cache(3, 4)
    for slot, count in enumerate((5, 9, 2)):
        forward(backbone, tokens_of(count, seed=slot), cache, slot=slot)
    before = rows_of(cache, 0).clone()
    out = backbone.engine.forward(Plan(torch.tensor([[7], [8]]), first=1), cache)
    assert cache.lengths == [5, 10, 3] and torch.equal(rows_of(cache, 0), before)
    for i, (count, token) in enumerate(((9, 7), (2, 8))):
        ids = torch.cat([tokens_of(count, seed=i + 1), torch.tensor([token])])
        assert torch.allclose(out.logits[i, 0], reference(tiny_backbone("gemma3"), ids)[-1], atol=1e-4)


@pytest.mark.parametrize("engine", ["eager", "fast"])
def test_trees_of_several_shapes_side_by_side_are_those_of_each_alone(engine: str) -> None:
    backbone, plain = tiny_backbone("mistral-window", engine=engine), tiny_backbone("mistral-window")
    trees = [TREE, Tree.root_only(), Tree.chain(4)]
    cache = backbone.engine.new_cache(3, 4)
    prompts = [tokens_of(n, seed=n) for n in (13, 2, 9)]
    for slot, prompt in enumerate(prompts):
        forward(backbone, prompt, cache, slot=slot)
    nodes = [tokens_of(tree.size, seed=30 + i) for i, tree in enumerate(trees)]
    out = backbone.engine.forward(Plan(*batch_trees(nodes, trees)), cache)
    for i, tree in enumerate(trees):
        alone = forward(plain, nodes[i], prefilled(plain, prompts[i]), tree)
        assert torch.allclose(out.logits[i, : tree.size], alone.logits, atol=1e-4)
        assert torch.allclose(out.hidden[i, : tree.size], alone.hidden, atol=1e-4)


def test_packing_replaces_every_plain_linear_and_keeps_the_answers() -> None:
    backbone = tiny_backbone("llama")
    before = reference(backbone, tokens_of(9))
    linears = [one for one in backbone.model.modules() if type(one) is torch.nn.Linear]
    assert len(linears) == 7 * backbone.num_layers + 1
    backbone.engine = EagerEngine(backbone, pack=True)
    assert not any(type(one) is torch.nn.Linear for one in backbone.model.modules())
    assert torch.allclose(reference(backbone, tokens_of(9)), before, atol=1e-4)


def test_the_fingerprint_survives_a_change_of_dtype_and_tells_models_apart() -> None:
    one, other = tiny_backbone("llama", seed=0), tiny_backbone("llama", seed=1)
    print_of = one.identity["fingerprint"]
    assert Backbone(one.model.to(torch.bfloat16)).identity["fingerprint"] == print_of
    assert other.identity["fingerprint"] != print_of


def test_models_a_tree_cannot_verify_are_refused_with_the_reason() -> None:
    refused = ((hf.Gemma2Config(), "soft-capped"), (hf.T5Config(), "encoder"), (hf.MambaConfig(), "softmax"))
    for config, reason in refused:
        with pytest.raises(UserError, match=reason):
            refuse_unsupported(config)


@pytest.mark.parametrize(
    ("config", "named"),
    [
        (hf.GraniteConfig(logits_scaling=8.0), "'granite' .*logits_scaling=8.0"),
        (hf.CohereConfig(), "'cohere' .*logit_scale=0.0625"),
        (hf.Gemma3TextConfig(final_logit_softcapping=30.0), "'gemma3_text' .*final_logit_softcapping=30.0"),
    ],
)
def test_models_whose_logits_are_not_the_lm_heads_scores_are_refused(config: Any, named: str) -> None:
    with pytest.raises(UserError, match=named):
        refuse_unsupported(config)


def test_multipliers_within_the_layers_are_the_networks_own_business(tmp_path: Path) -> None:
    """The eager engine runs the network as it is; the fast one knows no such factors and says so."""
    config = hf.GraniteConfig(
        vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, initializer_range=0.4, embedding_multiplier=12.0, residual_multiplier=0.22,
        attention_multiplier=0.2, logits_scaling=1.0,
    )  # fmt: skip
    torch.manual_seed(0)
    model = hf.GraniteForCausalLM(config).eval()
    ids = tokens_of(13)
    with torch.inference_mode():
        theirs = model(ids[None]).logits[0]
    with pytest.raises(UsageError, match="engine fast cannot run the model"):
        load_backbone(save_network(model, tmp_path), LoadOptions(dtype="fp32", engine="fast"))
    backbone = load_backbone(save_network(model, tmp_path), LoadOptions(dtype="fp32"))
    assert backbone.engine.name == "eager" and torch.allclose(reference(backbone, ids), theirs, atol=2e-5)
    for factor in ("embedding_multiplier", "residual_multiplier"):
        alone = {"embedding_multiplier": 1.0, "residual_multiplier": 1.0, factor: 0.5, "attention_multiplier": 0.35}
        for key, value in alone.items():
            setattr(config, key, value)
        other = load_backbone(save_network(hf.GraniteForCausalLM(config).eval(), tmp_path), LoadOptions(dtype="fp32"))
        assert other.engine.name == "eager", factor


def test_bad_devices_types_and_folders_are_named(tmp_path) -> None:
    for device in ("mps", "cuda:64"):
        with pytest.raises(UsageError, match=f"device '{device}': this machine has no"):
            load_backbone("x", LoadOptions(device=device))
    with pytest.raises(UsageError, match="device 'tpu9'"):
        load_backbone("x", LoadOptions(device="tpu9"))
    with pytest.raises(UsageError, match="dtype 'int3'"):
        load_backbone("x", LoadOptions(dtype="int3"))
    with pytest.raises(UserError, match="no config.json"):
        load_backbone(str(tmp_path))
    with pytest.raises(UserError, match="no model folder"):
        load_backbone(str(tmp_path / "missing"))
    (tmp_path / "config.json").write_text('{"model_type": "llama"')
    with pytest.raises(UserError, match="cut off or no JSON"):
        load_backbone(str(tmp_path))


def test_a_model_without_chat_template_is_refused_when_chatting() -> None:
    backbone = tiny_backbone("llama")
    backbone.tokenizer.chat_template = None
    with pytest.raises(UserError, match="no chat template"):
        backbone.encode_chat([{"role": "user", "content": "hi"}])
