"""A step as one function of tensors alone: what captured graphs run, held against the ordinary step without a graph."""

import logging

import pytest
import torch

from medusa_cli.decode import Decoder, Request, Sampling
from medusa_cli.decode import cuda_graph as captured
from medusa_cli.decode import cuda_graph as choosing
from medusa_cli.decode import cuda_graph as trial
from medusa_cli.decode.sampling import Sampler
from medusa_cli.tree import DynamicTree, Tree
from tests.helpers import FAMILIES, PROMPT, SPARSE, Oracle, answer, plain, tiny_backbone
from tests.test_accept import target_probs

RULES = {
    "greedy": Sampling(),
    "whole": Sampling("exact", 1.2, seed=5),
    "nucleus": Sampling("exact", 1.2, 0.8, seed=5),
    "top-k": Sampling("exact", 0.9, 0.9, 6, seed=2),
}


@pytest.fixture
def verified(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The kinds of the steps that ran as captured ones do."""
    kinds: list[str] = []
    inner = captured._GraphStep.__call__

    def called(self, *given):
        kinds.append(self._kind)
        return inner(self, *given)

    monkeypatch.setattr(captured._GraphStep, "__call__", called)
    return kinds


@pytest.mark.parametrize("rule", RULES.values(), ids=RULES)
@pytest.mark.parametrize("family", FAMILIES)
def test_fixed_steps_give_what_ordinary_ones_give(family: str, rule: Sampling, verified: list[str]) -> None:
    """Greedy and sampled, the same tokens by the same seed."""
    backbone = tiny_backbone(family, engine="fast")
    expected = plain(backbone, 40, sampling=rule)
    decoder = Decoder(backbone, Oracle(expected, 0.6), SPARSE, cuda_graphs=True)
    steps = list(answer(decoder, PROMPT, max_new_tokens=40, stop_ids=(), sampling=rule))
    assert [t for s in steps for t in s.tokens] == expected
    assert len(verified) == len(steps) - 1 and sum(step.accepted for step in steps) > 5


def test_sequences_of_every_kind_step_side_by_side(verified: list[str]) -> None:
    backbone = tiny_backbone("qwen3", engine="fast")
    decoder = Decoder(backbone, slots=4, cuda_graphs=True)
    rows = [decoder.admit(Request(PROMPT, max_new_tokens=20, stop_ids=(), sampling=rule)) for rule in RULES.values()]
    found = {id(sequence): list(first.tokens) for sequence, first in rows}
    while decoder.sequences:
        for sequence, step in decoder.step():
            found[id(sequence)] += step.tokens
    for (sequence, _), rule in zip(rows, RULES.values(), strict=True):
        assert found[id(sequence)] == plain(backbone, 20, sampling=rule)
    assert set(verified) == {choosing.CUT}


def test_trees_that_grow_are_not_captured(verified: list[str]) -> None:
    backbone = tiny_backbone("llama", engine="fast")
    backbone.engine.captures = True
    assert Decoder(backbone, Oracle([1], 0.6), DynamicTree(8, 3)).cuda_graphs is None
    assert Decoder(backbone, Oracle([1], 0.6), SPARSE).cuda_graphs is not None


def test_typical_acceptance_is_not_captured(verified: list[str]) -> None:
    backbone = tiny_backbone("llama", engine="fast")
    steps = list(
        answer(
            Decoder(backbone, cuda_graphs=True),
            PROMPT,
            max_new_tokens=5,
            stop_ids=(),
            sampling=Sampling("typical", 0.7),
        )
    )
    assert len(steps) == 5 and not verified


@pytest.mark.parametrize("rule", [rule for rule in RULES.values() if not rule.greedy])
def test_what_is_chosen_is_distributed_as_the_target_is(rule: Sampling) -> None:
    """Chi-square over many draws, each by the number of its node's depth."""
    nodes, draws = 3, 4000
    logits = 1.5 * torch.randn(nodes, 12, generator=torch.Generator().manual_seed(3))
    tree = Tree.from_choices([[0], [1]])
    rules = [Sampler(rule, number) for number in range(draws)]
    kind = choosing.kind_of(rules)
    said = choosing.demands(rules, tree, kind)
    assert said is not None
    found = choosing.choose(logits.expand(draws, -1, -1), said, tree.depth, kind)
    expected = draws * target_probs(logits, rule).double()
    for node in range(nodes):
        seen = torch.bincount(found[:, node], minlength=12).double()
        live = expected[node] > 0
        assert not seen[~live].any()
        statistic = float(((seen - expected[node])[live] ** 2 / expected[node][live]).sum())
        freedom = max(int(live.sum()) - 1, 1)
        assert statistic < freedom + 4.5 * (2 * freedom) ** 0.5


@pytest.mark.parametrize(
    ("faster", "fault", "taken", "said"),
    [
        (True, None, True, ""),
        (False, None, False, ""),
        (True, "operation not permitted when stream is capturing", False, "operation not permitted"),
        (True, "wrong", False, "give something else"),
    ],
    ids=["faster", "slower", "fails", "differs"],
)
def test_a_trial_decides_once_whether_steps_are_captured(
    faster: bool, fault: str | None, taken: bool, said: str, monkeypatch: pytest.MonkeyPatch, caplog
) -> None:
    backbone = tiny_backbone(engine="fast")
    backbone.engine.captures = None
    clock, inner, tried = [0.0], captured.CudaGraphs.verify, []
    monkeypatch.setattr(trial.time, "perf_counter", lambda: clock[0])

    def verify(self, *given):
        tried.append(1)
        clock[0] += 1.0 if faster else 3.0
        if fault and fault != "wrong":
            raise RuntimeError(f"CUDA error: {fault}\nand more lines of it")
        (settled,) = inner(self, *given)
        if fault == "wrong":
            settled.hidden.mul_(1.1)
        return [settled]

    ordinary = trial._uncaptured

    def uncaptured(*given):
        clock[0] += 2.0
        return ordinary(*given)

    monkeypatch.setattr(captured.CudaGraphs, "verify", verify)
    monkeypatch.setattr(trial, "_uncaptured", uncaptured)
    with caplog.at_level(logging.WARNING):
        assert (Decoder(backbone).cuda_graphs is not None) == taken
        before = len(tried)
        Decoder(backbone)
    assert len(tried) == before > 0  # once for an engine
    assert [said in record.message for record in caplog.records] == [True] * bool(said)
    if said:
        assert "\n" not in caplog.text.strip()


def test_engines_on_a_cpu_are_not_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trial, "_trial", lambda engine: pytest.fail("tried"))
    assert Decoder(tiny_backbone(engine="fast")).cuda_graphs is None
