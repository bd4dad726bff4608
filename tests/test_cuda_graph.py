"""The step that CUDA graphs capture, run without a graph, against the ordinary step; and the trial that chooses."""

import logging
from typing import Any

import pytest
import torch

from medusa_cli.decode import LogitsOptions, Request, Sampling, cuda_graph
from medusa_cli.decode.sampling import Sampler
from medusa_cli.tree import DynamicTree, Tree
from tests.helpers import FAMILIES, PROMPT, SPARSE, Oracle, answer, decoder_of, plain, tiny_backbone, tokens_of
from tests.test_accept import target_probs

SAMPLINGS = {
    "greedy": Sampling(),
    "exact": Sampling("exact", 1.2, seed=5),
    "top-p": Sampling("exact", 1.2, 0.8, seed=5),
    "top-k": Sampling("exact", 0.9, 0.9, 6, seed=2),
}


@pytest.fixture
def kinds(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Returns the kinds of sampling of the graph steps that run."""
    seen: list[str] = []
    call = cuda_graph._GraphStep.__call__

    def record(self: Any, *args: Any) -> Any:
        seen.append(self.kind)
        return call(self, *args)

    monkeypatch.setattr(cuda_graph._GraphStep, "__call__", record)
    return seen


@pytest.mark.parametrize("sampling", SAMPLINGS.values(), ids=SAMPLINGS)
@pytest.mark.parametrize("family", FAMILIES)
def test_graph_steps_give_the_tokens_of_ordinary_ones(family: str, sampling: Sampling, kinds: list[str]) -> None:
    backbone = tiny_backbone(family, engine="fast")
    expected = plain(backbone, 40, sampling=sampling)
    decoder = decoder_of(backbone, Oracle(expected, 0.6), SPARSE, cuda_graphs=True)
    steps = list(answer(decoder, PROMPT, max_new_tokens=40, stop_ids=(), sampling=sampling))
    assert tokens_of(steps) == expected
    assert len(kinds) == len(steps) - 1 and sum(step.accepted for step in steps) > 5


def test_sequences_of_every_sampling_step_side_by_side(kinds: list[str]) -> None:
    backbone = tiny_backbone("qwen3", engine="fast")
    decoder = decoder_of(backbone, slots=4, cuda_graphs=True)
    requests = [Request(PROMPT, max_new_tokens=20, stop_ids=(), sampling=sampling) for sampling in SAMPLINGS.values()]
    admitted = [decoder.admit(request) for request in requests]
    tokens = {id(sequence): list(first.tokens) for sequence, first in admitted}
    while decoder.sequences:
        for sequence, step in decoder.step():
            tokens[id(sequence)] += step.tokens
    for (sequence, _), sampling in zip(admitted, SAMPLINGS.values(), strict=True):
        assert tokens[id(sequence)] == plain(backbone, 20, sampling=sampling)
    assert set(kinds) == {cuda_graph.TRUNCATED}


def test_dynamic_trees_typical_acceptance_and_processors_run_without_graphs(kinds: list[str]) -> None:
    backbone = tiny_backbone(engine="fast")
    decoder = decoder_of(backbone, cuda_graphs=True)
    for rules in ({"sampling": Sampling("typical", 0.7)}, {"logits_options": LogitsOptions(1.3)}):
        assert len(list(answer(decoder, PROMPT, max_new_tokens=5, stop_ids=(), **rules))) == 5 and not kinds
    backbone.engine.captures = True
    assert decoder_of(backbone, Oracle([1], 0.6), DynamicTree(8, 3)).cuda_graphs is None
    assert decoder_of(backbone, Oracle([1], 0.6), SPARSE).cuda_graphs is not None


@pytest.mark.parametrize("sampling", [sampling for sampling in SAMPLINGS.values() if not sampling.greedy])
def test_chosen_tokens_are_distributed_as_the_target(sampling: Sampling) -> None:
    """Chi-square over independent draws."""
    nodes, draws = 3, 4000
    logits = 1.5 * torch.randn(nodes, 12, generator=torch.Generator().manual_seed(3))
    logits = (2 * logits).round() / 2  # with ties
    tree, samplers = Tree.from_choices([[0], [1]]), [Sampler(sampling, stream) for stream in range(draws)]
    kind, params = cuda_graph.sampling_kind(samplers), cuda_graph.sampling_params(samplers, tree)
    chosen = cuda_graph.choose(logits.expand(draws, -1, -1), params, tree.depth, kind)
    expected = draws * target_probs(logits, sampling).double()
    for node in range(nodes):
        seen = torch.bincount(chosen[:, node], minlength=12).double()
        live = expected[node] > 0
        assert not seen[~live].any()
        statistic = float(((seen - expected[node])[live] ** 2 / expected[node][live]).sum())
        freedom = max(int(live.sum()) - 1, 1)
        assert statistic < freedom + 4.5 * (2 * freedom) ** 0.5


@pytest.mark.parametrize(
    ("seconds", "fault", "captured", "logged"),
    [
        (1.0, None, True, ""),
        (3.0, None, False, ""),
        (1.0, "operation not permitted when stream is capturing", False, "operation not permitted"),
        (1.0, "wrong", False, "differ"),
    ],
    ids=["faster", "slower", "fails", "differs"],
)
def test_trial_decides_once_on_cuda_graphs(
    seconds: float, fault: str | None, captured: bool, logged: str, monkeypatch: pytest.MonkeyPatch, caplog: Any
) -> None:
    backbone = tiny_backbone(engine="fast")
    backbone.engine.captures = None
    clock, trials = [0.0], []
    verify, ordinary_step = cuda_graph.CudaGraphs.verify, cuda_graph._ordinary_step
    monkeypatch.setattr("medusa_cli.engine.autotune.time.perf_counter", lambda: clock[0])

    def graph_step(self: Any, *args: Any) -> Any:
        trials.append(1)
        clock[0] += seconds
        if fault and fault != "wrong":
            raise RuntimeError(f"CUDA error: {fault}\nand more lines")
        (accepted,) = verify(self, *args)
        if fault:
            accepted.hidden.mul_(1.1)
        return [accepted]

    def plain_step(*args: Any) -> Any:
        clock[0] += 2.0
        return ordinary_step(*args)

    monkeypatch.setattr(cuda_graph.CudaGraphs, "verify", graph_step)
    monkeypatch.setattr(cuda_graph, "_ordinary_step", plain_step)
    with caplog.at_level(logging.WARNING):
        assert (decoder_of(backbone).cuda_graphs is not None) == captured
        before = len(trials)
        decoder_of(backbone)
    assert len(trials) == before > 0
    assert [logged in record.message for record in caplog.records] == [True] * bool(logged)
    assert "\n" not in caplog.text.strip()


def test_no_trial_on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda_graph, "_trial", lambda engine: pytest.fail("a trial ran"))
    assert decoder_of(tiny_backbone(engine="fast")).cuda_graphs is None
