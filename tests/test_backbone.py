"""The backbone against the plain model: chains, trees, kept paths, growth, slots, windows, refusals."""

from typing import Any

import pytest
import torch
import transformers as hf
from medusa_cli.backbone.packed import can_pack, pack_linear, pack_linears

from medusa_cli.backbone import Backbone
from medusa_cli.backbone.support import refuse_unsupported
from medusa_cli.errors import UsageError, UserError
from medusa_cli.tree import Tree
from tests.tiny import FAMILIES, tiny_backbone

TREE = Tree((-1, 0, 0, 1, 1, 2, 3, 6), (0, 0, 1, 0, 1, 0, 0, 0))


def tokens_of(count: int, seed: int = 0, vocab: int = 60) -> torch.Tensor:
    return torch.randint(5, vocab, (count,), generator=torch.Generator().manual_seed(seed))


def reference(backbone: Backbone, ids: torch.Tensor) -> torch.Tensor:
    """Logits [n, V] of one plain pass without a cache, masks built from scratch."""
    return backbone.forward(ids, backbone.new_cache()).logits


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
    cache = backbone.new_cache(4)
    backbone.forward(prompt, cache)
    out = backbone.forward(nodes, cache, TREE)
    for node in range(TREE.size):
        path = TREE.path(node)
        alone = reference(backbone, torch.cat([prompt, nodes[path]]))
        assert torch.allclose(out.logits[node], alone[-1], atol=2e-5), f"node {node}"


@pytest.mark.parametrize("family", FAMILIES)
def test_a_kept_path_leaves_the_cache_as_if_it_had_been_decoded_alone(family: str) -> None:
    backbone = tiny_backbone(family)
    prompt, nodes = tokens_of(13), tokens_of(TREE.size, seed=1)
    cache = backbone.new_cache(4)
    backbone.forward(prompt, cache)
    backbone.forward(nodes, cache, TREE)
    path = TREE.path(7)  # 0, 1, 3, 6, 7: not contiguous
    cache.keep(len(prompt), path)
    assert cache.length == len(prompt) + len(path)
    tail = tokens_of(3, seed=2)
    out = backbone.forward(tail, cache)
    alone = reference(backbone, torch.cat([prompt, nodes[path], tail]))
    assert torch.allclose(out.logits, alone[-3:], atol=2e-5)


def test_a_long_prompt_is_prefilled_in_pieces_with_the_same_result(monkeypatch: pytest.MonkeyPatch) -> None:
    backbone = tiny_backbone("llama")
    ids = tokens_of(50)
    whole = backbone.forward(ids, backbone.new_cache())
    monkeypatch.setattr("medusa_cli.backbone.model.PREFILL_ROWS", 7)
    cache = backbone.new_cache(1)
    pieces = backbone.forward(ids, cache)
    assert cache.length == 50
    assert torch.allclose(whole.logits, pieces.logits, atol=2e-5)
    assert torch.allclose(whole.hidden, pieces.hidden, atol=2e-5)
    last = backbone.forward(ids, backbone.new_cache(), logits="last")
    assert last.logits.shape[0] == 1 and torch.allclose(last.logits[0], whole.logits[-1], atol=2e-5)


@pytest.mark.parametrize("engine", ["eager", "fast"])
def test_a_long_text_moves_the_cache_a_few_times_and_not_every_step(engine: str) -> None:
    backbone = tiny_backbone("llama", engine=engine)
    cache, ids = backbone.new_cache(1), tokens_of(400)
    buffers, copied = [], 0
    for token in ids:
        before = cache.length
        backbone.forward(token[None], cache, logits="none")
        if not buffers or cache.buffer is not buffers[-1]:
            buffers.append(cache.buffer)
            copied += before
    assert len(buffers) == 10  # capacities 1, 2, 4, .. 512
    assert copied < 2 * len(ids)
    assert torch.allclose(
        backbone.forward(ids[:1], cache).logits[0], reference(backbone, torch.cat([ids, ids[:1]]))[-1], atol=1e-4
    )


def test_taps_read_middle_layers_beside_the_final_state() -> None:
    backbone = tiny_backbone("llama")
    ids = tokens_of(6)
    out = backbone.forward(ids, backbone.new_cache(), taps=(0, -1))
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
    slots = backbone.new_slots(4, 32)  # one stays empty
    for prompt, slot in zip(prompts, slots.slots, strict=False):
        backbone.forward(prompt, slot)
    nodes = torch.stack([tokens_of(TREE.size, seed=20 + i) for i in range(3)])
    out = backbone.forward_slots(nodes, slots, TREE, taps=(0, -1))
    assert out.hidden.shape == (3, TREE.size, 2 * backbone.hidden_size)
    for i, prompt in enumerate(prompts):
        alone = plain.forward(nodes[i], prefilled(plain, prompt), TREE)
        assert torch.allclose(out.logits[i], alone.logits, atol=1e-4)
        assert torch.allclose(out.hidden[i, :, backbone.hidden_size :], alone.hidden, atol=1e-4)
    paths = [TREE.path(node) for node in (7, 0, 4)]
    slots.keep(paths)
    kept = [torch.cat([prompt, nodes[i][paths[i]]]) for i, prompt in enumerate(prompts)]
    assert [slot.length for slot in slots.slots] == [*map(len, kept), 0]
    slots.move(2, 0)
    after = backbone.forward_slots(torch.tensor([[9], [10]]), slots)
    for i, (ids, token) in enumerate(((kept[2], 9), (kept[1], 10))):
        alone = reference(plain, torch.cat([ids, torch.tensor([token])]))
        assert torch.allclose(after.logits[i, 0], alone[-1], atol=1e-4)


def prefilled(backbone: Backbone, prompt: torch.Tensor) -> KVCache:
    cache = backbone.new_cache()
    backbone.forward(prompt, cache)
    return cache


def test_a_slot_never_leaves_its_capacity() -> None:
    backbone = tiny_backbone()
    slots = backbone.new_slots(2, 8)
    backbone.forward(tokens_of(7), slots.slots[0])
    with pytest.raises(ValueError, match="a slot of 8 rows cannot take 2 after 7"):
        backbone.forward_slots(torch.zeros(2, 2, dtype=torch.long), slots)
    with pytest.raises(ValueError, match="a slot of 8 rows cannot take 9 after 0"):
        backbone.forward(tokens_of(9), slots.slots[1])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_packed_layers_compute_what_plain_ones_do(dtype: torch.dtype) -> None:
    weight, bias = torch.randn(33, 24, dtype=dtype), torch.randn(33, dtype=dtype)
    if not can_pack(weight):
        pytest.skip("no packed kernel for this type on this processor")
    for rows in (1, 5, 70):
        x = torch.randn(rows, 24, dtype=dtype)
        expected = torch.nn.functional.linear(x.float(), weight.float(), bias.float())
        error = (pack_linear(weight, bias)(x).float() - expected).abs().max()
        assert error <= (1e-4 if dtype == torch.float32 else 0.2)


def test_packing_replaces_every_plain_linear_and_keeps_the_answers() -> None:
    backbone = tiny_backbone("llama")
    before = reference(backbone, tokens_of(9))
    assert pack_linears(backbone.model) == 7 * backbone.num_layers + 1
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


def test_multipliers_within_the_layers_are_the_networks_own_business() -> None:
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
    with pytest.raises(UsageError, match="--engine fast cannot run the model"):
        Backbone(model, engine="fast")
    backbone = Backbone(model, engine="auto")
    assert backbone.engine == "eager" and torch.allclose(reference(backbone, ids), theirs, atol=2e-5)
    for factor in ("embedding_multiplier", "residual_multiplier"):
        alone = {"embedding_multiplier": 1.0, "residual_multiplier": 1.0, factor: 0.5, "attention_multiplier": 0.35}
        for key, value in alone.items():
            setattr(config, key, value)
        assert Backbone(hf.GraniteForCausalLM(config).eval(), engine="auto").engine == "eager", factor


def test_bad_devices_types_and_folders_are_named(tmp_path) -> None:
    for device in ("mps", "cuda:64"):
        with pytest.raises(UsageError, match=f"--device '{device}': this machine has no"):
            load_backbone("x", device=device)
    with pytest.raises(UsageError, match="--device 'tpu9'"):
        load_backbone("x", device="tpu9")
    with pytest.raises(UsageError, match="--dtype 'int3'"):
        load_backbone("x", dtype="int3")
    with pytest.raises(UserError, match="no config.json"):
        load_backbone(str(tmp_path))
    with pytest.raises(UserError, match="no model folder"):
        load_backbone(str(tmp_path / "missing"))
    (tmp_path / "config.json").write_text('{"model_type": "llama"')
    with pytest.raises(UserError, match="could not be loaded"):
        load_backbone(str(tmp_path))


def test_a_model_without_chat_template_is_refused_when_chatting() -> None:
    backbone = tiny_backbone("llama")
    backbone.tokenizer.chat_template = None
    with pytest.raises(UserError, match="no chat template"):
        backbone.encode_chat([{"role": "user", "content": "hi"}])
