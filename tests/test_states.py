"""Layers with a running state: each node of a tree has its own, slots go back to snapshots, prompts run in pieces."""

from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from medusa_cli.decode import Request
from medusa_cli.drafters import Eagle, Firp
from medusa_cli.engine import Plan, eager, engine, load_backbone
from medusa_cli.engine.layer_cache import LayerCache
from medusa_cli.engine.state_cache import SNAPSHOTS
from medusa_cli.engine.view import View
from medusa_cli.errors import UserError
from medusa_cli.model import Backbone
from medusa_cli.runs.load_options import LoadOptions
from medusa_cli.tree import Tree
from tests.helpers import (
    SPARSE,
    answer,
    attach,
    decoder_of,
    forward,
    plain,
    save_network,
    steps_of,
    tokens_of,
)
from tests.models import CHAIN, COUNT, PROMPTS, RULES, Known, generated, tiny_network

# Convolutions, gated delta nets, Mamba 2 beside attention, Mamba 1 alone, and layers that forget where pieces follow.
KINDS = ("lfm2", "qwen3_5_text", "falcon_h1", "mamba", "jamba")
EACH = pytest.mark.parametrize("kind", KINDS)
TREE = Tree((-1, 0, 0, 1, 1, 2, 3, 6), (0, 0, 1, 0, 1, 0, 0, 0))
PATH = TREE.path(7)


@cache
def network_of(kind: str) -> Any:
    return tiny_network(kind)


@cache
def answer_of(kind: str, prompt: tuple[int, ...]) -> list[int]:
    return generated(network_of(kind), prompt)


def backbone_of(kind: str) -> Backbone:
    backbone = Backbone(tiny_network(kind))
    attach(backbone).check()
    return backbone


def logits_of(kind: str, *texts: Sequence[int]) -> torch.Tensor:
    """Returns the network's own logits [n, V] of a text in parts."""
    with torch.inference_mode():
        logits: torch.Tensor = network_of(kind)(
            torch.tensor([[id for text in texts for id in text]])
        ).logits[0]
    return logits


@pytest.mark.quick("falcon_h1", "jamba", "lfm2")
@EACH
def test_nodes_and_what_follows_the_kept_path_are_scored_as_texts(kind: str) -> None:
    backbone = backbone_of(kind)
    cache, prompt, nodes = backbone.engine.new_cache(), PROMPTS[2], list(range(20, 20 + TREE.size))
    forward(backbone, prompt, cache, logits="none")
    out = forward(backbone, nodes, cache, TREE)
    for node in range(TREE.size):
        path = [nodes[i] for i in TREE.path(node)]
        assert torch.allclose(out.logits[node], logits_of(kind, prompt, path)[-1], atol=2e-3), node
    cache.keep(0, PATH)
    path, tail = [nodes[i] for i in PATH], [33, 7, 51]
    out = forward(backbone, tail, cache)
    assert torch.allclose(out.logits, logits_of(kind, prompt, path, tail)[-len(tail) :], atol=2e-3)


@pytest.mark.quick("jamba", "qwen3_5_text")
@EACH
def test_states_of_the_root_in_place_of_the_parents_give_other_tokens(
    kind: str, monkeypatch
) -> None:
    backbone, prompt = backbone_of(kind), PROMPTS[0]
    text = [*prompt, *answer_of(kind, tuple(prompt))]
    levels: Any = View._levels
    from_root = property(
        lambda view: [(slot, row, 0 * parent) for slot, row, parent in levels.func(view)]
    )
    monkeypatch.setattr(View, "_levels", from_root)
    tokens = tokens_of(answer(decoder_of(backbone, Known([text], 1.0), CHAIN), prompt, **RULES))
    assert tokens != text[len(prompt) :]


@pytest.mark.quick("mamba", "lfm2")
@EACH
def test_long_prompts_run_in_pieces(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine, "PREFILL_ROWS", 7)
    backbone, prompt = backbone_of(kind), PROMPTS[1]
    tokens = tokens_of(answer(decoder_of(backbone), prompt, **RULES))
    assert tokens == answer_of(kind, tuple(prompt))
    assert backbone.engine.new_cache().by_token == (kind in ("jamba", "mamba"))


@pytest.mark.quick("qwen3_5_text")
@EACH
def test_answers_of_several_lengths_change_slots(kind: str) -> None:
    backbone, lengths = backbone_of(kind), (5, 32, 17, 30)
    prompts = [*PROMPTS, PROMPTS[0]]
    expected = [
        answer_of(kind, tuple(prompt))[:count]
        for prompt, count in zip(prompts, lengths, strict=True)
    ]
    texts = [[*prompt, *answer_of(kind, tuple(prompt))] for prompt in PROMPTS]
    requests = [
        Request(prompt, count, stop_ids=()) for prompt, count in zip(prompts, lengths, strict=True)
    ]
    steps = steps_of(decoder_of(backbone, Known(texts, 0.6), SPARSE, slots=3), requests)
    assert [tokens_of(of_request) for of_request in steps] == expected


@pytest.mark.quick("qwen3_5_text")
@pytest.mark.parametrize("kind", ["qwen3_5_text", "mamba2", "jamba"])
def test_models_of_16_bits_pass_their_check(kind: str, tmp_path: Path) -> None:
    path = save_network(tiny_network(kind).to(torch.bfloat16), tmp_path)
    backbone = load_backbone(path, LoadOptions(dtype="bf16", engine="eager"))
    assert backbone.states(torch.tensor([PROMPTS[0]])).dtype == backbone.dtype == torch.bfloat16
    text = [*PROMPTS[0], *plain(backbone, COUNT)]
    steps = answer(decoder_of(backbone, Known([text], 1.0), SPARSE), PROMPTS[0], **RULES)
    assert len(tokens_of(steps)) == COUNT


def reuse(
    backbone: Backbone, prompts: Sequence[Sequence[int]], drafter: Any = None, tree: Any = None
) -> list[int]:
    """Asks prompts one after another in one slot; checks the answers; returns how many tokens each reused."""
    decoder, reused = decoder_of(backbone, drafter, tree), []
    for prompt in prompts:
        sequence, first = decoder.admit(Request(prompt, **RULES))
        tokens = list(first.tokens)
        while not sequence.done:
            tokens += tokens_of(step for _, step in decoder.step())
        alone = tokens_of(answer(decoder_of(backbone), prompt, **RULES))
        assert tokens == alone
        reused.append(sequence.reused)
    return reused


@pytest.mark.slow
def test_prompts_reuse_what_ends_where_a_prompt_or_an_answer_ended() -> None:
    backbone = backbone_of("qwen3_5_text")
    prompt = PROMPTS[1]
    text = [*prompt, *answer_of("qwen3_5_text", tuple(prompt))[:-1]]
    continued, edited, other = [*text, 9, 30], [*prompt, 60, 61, 62], [*prompt[:-2], 60, 61]
    assert reuse(backbone, [prompt, continued, edited, prompt, other]) == [
        0,
        len(text),
        len(prompt),
        0,
        0,
    ]


def test_states_of_another_formula_in_decoding_are_not_reused() -> None:
    backbone = backbone_of("zamba2")
    prompt = PROMPTS[1]
    text = [*prompt, *answer_of("zamba2", tuple(prompt))[:-1]]
    assert not backbone.engine.new_cache().decoded_states
    assert reuse(backbone, [prompt, [*text, 9, 30]]) == [0, len(prompt)]


def test_drafter_that_reads_the_last_token_again_makes_the_slot_begin_anew() -> None:
    backbone = backbone_of("lfm2")
    torch.manual_seed(1)
    drafter = Eagle.create(backbone, 3, 1, "own").eval()
    prompt = PROMPTS[1]
    text = [*prompt, *answer_of("lfm2", tuple(prompt))[:-1]]
    reused = reuse(backbone, [prompt, [*text, 9, 30], [*prompt, 60]], drafter, SPARSE.truncate(3))
    assert reused[0] == 0
    assert all(count in (0, len(prompt), len(text)) for count in reused[1:])


@pytest.mark.parametrize("engine_name", ["eager", "native"])
def test_prompt_that_fails_midway_leaves_no_states(
    engine_name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    backbone = Backbone(tiny_network("qwen3_5_text"))
    attach(backbone, engine_name)
    decoder = decoder_of(backbone)
    prompt = PROMPTS[1]
    text = [*prompt, *tokens_of(answer(decoder, prompt, **RULES))[:-1], 9, 30]
    expected = answer_of("qwen3_5_text", tuple(text))
    run_pass = backbone.engine.run_pass

    def fail(*what: Any) -> None:
        run_pass(*what)  # the states advance, and a snapshot is taken
        raise MemoryError

    with monkeypatch.context() as patch:
        patch.setattr(backbone.engine, "run_pass", fail)
        with pytest.raises(MemoryError):
            decoder.admit(Request(text, **RULES))
    assert tokens_of(answer(decoder, text, **RULES)) == expected


def test_large_states_cut_trees(monkeypatch: pytest.MonkeyPatch) -> None:
    backbone, prompt = backbone_of("qwen3_5_text"), PROMPTS[0]
    monkeypatch.setattr(eager, "NODE_STATES", 4 * backbone.engine._state_bytes)
    text = [*prompt, *answer_of("qwen3_5_text", tuple(prompt))]
    steps = list(answer(decoder_of(backbone, Known([text], 1.0), SPARSE), prompt, **RULES))
    assert tokens_of(steps) == text[len(prompt) :]
    assert max(step.nodes for step in steps) == 4


def test_cache_goes_back_to_its_latest_snapshots_only() -> None:
    cache = LayerCache(1, 2)
    assert cache.reusable(0, 9) == 9  # no layer has a state
    for length in range(1, SNAPSHOTS + 3):
        cache.put((0, "conv", 0), slice(0, 1), torch.full((1, 3), float(length)))
        cache.lengths[0] = length
        cache.take_snapshot(0, length)
    last = SNAPSHOTS + 2
    assert [cache.reusable(0, rows) for rows in (2, 3, last - 1, 99)] == [0, 3, last - 1, last]
    before = cache.nbytes
    cache.swap(0, 1)
    cache.truncate(1, 4)
    assert cache.states[0, "conv", 0][1].tolist() == [4.0] * 3
    assert cache.lengths == [0, 4]
    assert cache.nbytes < before
    cache.lengths[1] = 9
    with pytest.raises(ValueError, match="slot 1"):
        cache.truncate(1, 7)


def test_chains_that_begin_and_chains_that_go_on_do_not_mix() -> None:
    backbone = backbone_of("lfm2")
    cache = backbone.engine.new_cache(2)
    forward(backbone, [5, 6], cache)
    with pytest.raises(ValueError, match="slots"):
        backbone.engine.forward(Plan(torch.tensor([[7], [8]])), cache)


@pytest.mark.parametrize("kind", ["lfm2", "granite", "gemma4_text"])
def test_extra_rows_are_refused_where_layers_cannot_run_one_by_one(
    kind: str, tmp_path: Path
) -> None:
    network = tiny_network(kind, **({"embedding_multiplier": 12.0} if kind == "granite" else {}))
    backbone = load_backbone(
        save_network(network, tmp_path), LoadOptions(dtype="fp32", engine="eager")
    )
    drafter = Firp.create(backbone, 2, vocabulary="shared")
    with pytest.raises(UserError, match="firp"):
        list(answer(decoder_of(backbone, drafter, SPARSE.truncate(2)), PROMPTS[0], **RULES))


def test_modules_keep_their_own_forward_between_passes() -> None:
    backbone = backbone_of("lfm2")
    module = backbone.engine.stateful[0]
    module.forward = module.forward  # as hooks of other libraries set it
    own = vars(module)["forward"]
    assert len(plain(backbone, COUNT)) == COUNT
    assert vars(module)["forward"] is own
    assert not any("forward" in vars(other) for other in backbone.engine.stateful[1:])
