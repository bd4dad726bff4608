"""The exact path by its kernels' plain twins: steps over trees have the bits of plain decoding, and so its tokens."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from medusa_cli.decode import Decoder, Request
from medusa_cli.decode.policy import DynamicTreePolicy
from medusa_cli.engine import exact, load_backbone, plain_kernels
from medusa_cli.engine.exact import ExactPath, difference, use_exact_path
from medusa_cli.engine.torch_layers import TorchEngine
from medusa_cli.errors import UsageError, UserError
from medusa_cli.model import Backbone
from medusa_cli.runs.load_options import LoadOptions
from medusa_cli.tree import DynamicTree, Tree
from tests.helpers import (
    Oracle,
    answer,
    decoder_of,
    generate_plain,
    save_model,
    tiny_backbone,
    tokens_of,
)
from tests.test_drafters import drafter_of

TREES = {
    "chain": Tree.chain(4),
    "deeper than the lag": Tree.chain(40),
    "16 nodes": Tree.dense([3, 2, 1]),
    "64 nodes": Tree.dense([9, 2, 1, 1]),
}
# A prompt so long that some columns are read in chunks, and the tokens of its answer.
LONG = [5 + 7 * i % 50 for i in range(90)]
ANSWER = 30


def backbone_with(family: str, kernels: Any, **shape: int) -> tuple[Backbone, TorchEngine]:
    """Returns a backbone whose steps take the exact path, or the ordinary one for None."""
    backbone = tiny_backbone(family, engine="torch", **shape)
    engine = backbone.engine
    assert isinstance(engine, TorchEngine)
    engine.exact = None if kernels is None else ExactPath(engine, kernels)
    return backbone, engine


def undecided(backbone: Backbone) -> None:
    """Makes each pair of tokens nearly as likely, so that the last bits of a state decide between them."""
    weight = backbone.lm_head_weight
    noise = torch.randn(weight[1::2].shape, generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        weight[1::2] = weight[::2] * (1 + 1e-7 * noise)


def plain_answer(backbone: Backbone) -> list[int]:
    return tokens_of(generate_plain(backbone, LONG, max_new_tokens=ANSWER, stop_ids=()))


def drafted(
    backbone: Backbone, expected: list[int], tree: str, graphs: bool | None = None
) -> list[int]:
    """Returns the answer with drafts whose tokens are right in 6 of 10 cases."""
    oracle = Oracle(expected, 0.6, {tuple(LONG): (expected, 0.6)})
    decoder = decoder_of(backbone, oracle, TREES[tree], cuda_graphs=graphs)
    return tokens_of(answer(decoder, LONG, max_new_tokens=ANSWER, stop_ids=()))


def several_rows(x: Tensor, weight: Tensor) -> Tensor:
    """Multiplies all rows at once, as torch does: the bits of a row depend on their number."""
    return (x.float() @ weight.float().T)[None]


@pytest.mark.quick("mistral-window", "qwen3")
@pytest.mark.parametrize("family", ["llama", "mistral-window", "qwen2", "qwen3", "gemma3"])
def test_probe_finds_a_tree_with_the_bits_of_plain_decoding(family: str) -> None:
    _, engine = backbone_with(family, plain_kernels)
    assert difference(engine) is None
    assert engine.row_invariant
    assert not engine.prompt_invariant


def test_probe_in_16_bits() -> None:
    backbone = tiny_backbone("qwen3")
    backbone.model.half()
    exact_engine = TorchEngine(backbone)
    exact_engine.exact = ExactPath(exact_engine, plain_kernels)
    assert difference(exact_engine) is None


def test_probe_tells_kernels_that_depend_on_rows_or_are_wrong() -> None:
    own = vars(plain_kernels)
    _, engine = backbone_with("llama", SimpleNamespace(**own | {"matmul": several_rows}))
    assert "rows" in (difference(engine) or "")
    wrong = SimpleNamespace(**own | {"matmul": lambda x, weight: 1.1 * several_rows(x, weight)})
    engine.exact = ExactPath(engine, wrong)
    assert "differ" in (difference(engine) or "")


def test_kernels_that_do_not_run_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    _, engine = backbone_with("llama", None)
    with pytest.raises(UserError, match="bf16"):
        use_exact_path(engine)

    def fail(*args: Any) -> None:
        raise RuntimeError("no kernel image is available\nand more lines")

    engine.dtype = torch.float16
    monkeypatch.setattr(exact, "ExactPath", fail)
    with pytest.raises(UserError) as refused:
        use_exact_path(engine)
    assert engine.exact is None
    assert not engine.row_invariant
    assert "no kernel image" in refused.value.message
    assert "more lines" not in refused.value.message


def test_a_cpu_needs_no_exact_path(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="GPU"):
        load_backbone(str(save_model(tmp_path / "model")), LoadOptions(exact=True))


@pytest.mark.slow
@pytest.mark.parametrize("graphs", [False, True])
@pytest.mark.parametrize("tree", TREES)
def test_greedy_answers_over_trees_are_those_of_plain_decoding(tree: str, graphs: bool) -> None:
    backbone, _ = backbone_with("qwen3", plain_kernels)
    undecided(backbone)
    expected = plain_answer(backbone)
    assert drafted(backbone, expected, tree, graphs) == expected


def test_tokens_run_again_for_a_drafter_leave_the_rows_of_steps() -> None:
    backbone, _ = backbone_with("llama", plain_kernels)
    decoder = decoder_of(backbone, Oracle([], 0.0, {tuple(LONG): ([], 0.0)}), TREES["chain"])
    sequence, _ = decoder.admit(Request(LONG, 9, stop_ids=()))
    decoder.step()
    before = decoder.cache.both.clone()
    sequence.unread = []
    decoder._catch_up(0, sequence)
    assert torch.equal(decoder.cache.both, before)
    assert decoder.cache.lengths[0] == len(sequence.tokens)


def test_ordinary_path_parts_at_near_ties() -> None:
    """The tests of the exact path would be blind if the ordinary one passed them, too."""
    backbone, _ = backbone_with("qwen3", None)
    undecided(backbone)
    # The oracle notices that it no longer knows the answer.
    with pytest.raises(AssertionError):
        drafted(backbone, plain_answer(backbone), "64 nodes")


@pytest.mark.quick("False")
@pytest.mark.parametrize("graphs", [False, True])
def test_dynamic_trees_side_by_side_give_the_answers_of_plain_decoding(graphs: bool) -> None:
    backbone, _ = backbone_with("llama", plain_kernels, layers=4)
    undecided(backbone)
    requests = [Request(LONG[i : 62 + 9 * i], 9, stop_ids=()) for i in range(3)]

    def answers(decoder: Decoder) -> list[list[int]]:
        tokens: list[list[int]] = [[] for _ in requests]
        for sequence, step in decoder.run(requests):
            tokens[sequence.number] += step.tokens
        return tokens

    expected = [answers(decoder_of(backbone, slots=slots, cuda_graphs=graphs)) for slots in (1, 3)]
    assert expected[0] == expected[1]
    policy = DynamicTreePolicy(DynamicTree(12, 3), ngrams=True)
    drafter = drafter_of(backbone, "eagle-draft")
    decoder = Decoder(backbone, drafter, policy, slots=3, cuda_graphs=graphs)
    assert answers(decoder) == expected[0]
