"""The step that CUDA graphs capture, run without a graph, against the ordinary step; and the trial that chooses."""

import itertools
import logging
from dataclasses import replace
from typing import Any

import pytest
import torch

from medusa_cli.decode import (
    AdaptivePolicy,
    Decoder,
    LogitsOptions,
    Request,
    Sampling,
    cuda_graph,
    graph_step,
    graph_trial,
)
from medusa_cli.decode.policy import DynamicTreePolicy, StaticTreePolicy, policy_of
from medusa_cli.decode.sampler import Sampler
from medusa_cli.engine.engine import LayoutEngine
from medusa_cli.tree import DynamicTree, Tree
from medusa_cli.tree.search import SizedTree, StepTimes
from medusa_cli.tree.tree import PADDING
from tests.helpers import (
    FAMILIES,
    PROMPT,
    SPARSE,
    Oracle,
    answer,
    assert_distributed,
    decoder_of,
    generate_plain,
    medusa_drafter,
    plain,
    steps_of,
    tiny_backbone,
    tokens_of,
)
from tests.test_accept import target_probs
from tests.test_drafters import drafter_of

SAMPLINGS = {
    "greedy": Sampling(),
    "exact": Sampling("exact", 1.2, seed=5),
    "top-p": Sampling("exact", 1.2, 0.8, seed=5),
    "top-k": Sampling("exact", 0.9, 0.9, 6, seed=2),
}


class StandIn:
    """Stands for a CUDA graph on a CPU: it runs a step's computation again, and spoils what the run before returned."""

    def __init__(self) -> None:
        self.captured, self.runs = 0, 0

    def __call__(self, run: Any) -> Any:
        self.captured += 1
        before: list[torch.Tensor] = []

        def replay() -> Any:
            self.runs += 1
            for tensor in before:
                tensor.fill_(torch.nan if tensor.is_floating_point() else -999)
            before[:] = run()
            return tuple(before)

        return replay


@pytest.fixture
def graphs(whole_weights: None, monkeypatch: pytest.MonkeyPatch) -> StandIn:
    """Captures the steps of every decoder with cuda_graphs=True by a stand-in.

    As on a GPU, weights of drafters are not packed.
    """
    stand_in, init = StandIn(), cuda_graph.CudaGraphs.__init__
    monkeypatch.setattr(
        cuda_graph.CudaGraphs,
        "__init__",
        lambda self, *args, **named: init(self, *args, capture=stand_in, **named),
    )
    return stand_in


@pytest.mark.quick("llama-greedy")
@pytest.mark.parametrize("sampling", SAMPLINGS.values(), ids=SAMPLINGS)
@pytest.mark.parametrize("family", FAMILIES)
def test_graph_steps_give_the_tokens_of_ordinary_ones(
    family: str, sampling: Sampling, graphs: StandIn
) -> None:
    backbone = tiny_backbone(family, engine="torch")
    expected = plain(backbone, 40, sampling=sampling)
    decoder = decoder_of(backbone, Oracle(expected, 0.6), SPARSE, cuda_graphs=True)
    steps = list(answer(decoder, PROMPT, max_new_tokens=40, stop_ids=(), sampling=sampling))
    assert tokens_of(steps) == expected
    assert graphs.runs == len(steps) - 1
    assert sum(step.accepted for step in steps) > 5


SHALLOW = SPARSE.truncate(3)  # as deep as drafters have heads


@pytest.mark.quick("adaptive")
@pytest.mark.parametrize("policy", ["dynamic", "adaptive", "n-grams"])
def test_trees_of_every_policy_run_in_the_same_graphs(policy: str, graphs: StandIn) -> None:
    backbone = tiny_backbone("qwen3", engine="torch")
    prompt = [*PROMPT, *range(8, 20), *PROMPT, *range(8, 14)]
    expected = tokens_of(answer(decoder_of(backbone), prompt, max_new_tokens=60, stop_ids=()))
    trees = [SizedTree(SPARSE.truncate(2), 1.5), SizedTree(SPARSE, 2.0)]
    policies = {
        "dynamic": DynamicTreePolicy(DynamicTree(12, 4), ngrams=True),
        "adaptive": AdaptivePolicy(
            trees, StepTimes({1: 1.0, 9: 1.1}, {1: 0.1, 3: 0.1}), ngrams=True
        ),
        "n-grams": StaticTreePolicy(SPARSE, ngrams=True),
    }
    decoder = Decoder(backbone, medusa_drafter(backbone), policies[policy], cuda_graphs=True)
    captured = graphs.captured
    steps = list(answer(decoder, prompt, max_new_tokens=60, stop_ids=()))
    assert tokens_of(steps) == expected
    assert graphs.runs == len(steps) - 1
    assert len({(step.nodes, step.looked_up) for step in steps}) > 1
    assert graphs.captured == captured == 2 * len(cuda_graph.ROWS)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "dynamic"), [("medusa", False), ("eagle-draft", False), ("eagle-draft", True)]
)
def test_few_graphs_serve_sequences_of_all_sampling_and_trees_side_by_side(
    kind: str, dynamic: bool, graphs: StandIn
) -> None:
    backbone = tiny_backbone("qwen3", layers=4, engine="torch")
    tree = (
        DynamicTreePolicy(DynamicTree(20, 3), ngrams=True)
        if dynamic
        else StaticTreePolicy(SHALLOW, ngrams=True)
    )
    decoder = Decoder(backbone, drafter_of(backbone, kind), tree, slots=8, cuda_graphs=True)
    before = graphs.captured
    assert before <= 24
    requests = [
        Request(PROMPT * (1 + i), max_new_tokens=12 + i, stop_ids=(), sampling=sampling)
        for i, sampling in enumerate([*SAMPLINGS.values()] * 2)
    ]
    expected = [tokens_of(steps) for steps in steps_of(decoder_of(backbone), requests)]
    for _ in range(2):  # slots hold prefixes the second time
        assert [tokens_of(steps) for steps in steps_of(decoder, requests)] == expected
    assert graphs.captured == before
    assert graphs.runs > 20


DYNAMIC = DynamicTree(12, 3, (0.5,), width=6)


@pytest.mark.quick("amphista-prompt-shape8", "hydra++-shape0")
@pytest.mark.parametrize(
    ("kind", "shape"),
    [
        *itertools.product(["hydra++", "hydra++-prompt", "amphista-prompt", "amphista"], [SHALLOW]),
        *itertools.product(
            ["medusa", "medusa-bias", "hydra", "hydra++", "amphista-prompt"], [DYNAMIC]
        ),
        *itertools.product(["eagle-draft"], [SHALLOW, DYNAMIC]),
    ],
)
def test_graphs_draft_what_drafters_draft(
    kind: str, shape: Tree | DynamicTree, graphs: StandIn, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Slots change owners, prompts share prefixes, and sequences of other sampling run beside the graphs."""
    backbone, steps, drafts = tiny_backbone("qwen3", layers=4, engine="torch"), [], []
    drafter = drafter_of(backbone, kind)
    draft, fill = type(drafter).draft, type(drafter).fill

    def record_draft(*args: Any) -> Any:
        drafted = draft(*args)
        drafts[-1].update((*own.ids, *own.tree.parents) for own in drafted)
        return drafted

    def record_fill(*args: Any) -> None:
        fill(*args)
        for tokens, parents in zip(
            args[-1].tokens.tolist(), args[-1].parents.tolist(), strict=True
        ):
            size = len(parents) - parents.count(PADDING)
            drafts[-1].add((*tokens[:size], *parents[:size]))

    monkeypatch.setattr(type(drafter), "draft", record_draft)
    monkeypatch.setattr(type(drafter), "fill", record_fill)
    requests = [Request([5 + i, 9, 20, 11, 7] * (1 + i), 10 + 3 * i, stop_ids=()) for i in range(5)]
    requests += [
        replace(requests[i], prompt=[*requests[i].prompt, 12, 9], max_new_tokens=14) for i in (4, 0)
    ]
    requests[2:2] = [Request([9, 9, 21], 6, sampling=Sampling("typical", 0.7), stop_ids=())]
    for captured in (False, True):
        drafts.append(set[tuple[int, ...]]())
        decoder = Decoder(backbone, drafter, policy_of(shape), slots=3, cuda_graphs=captured)
        before = graphs.captured
        steps.append(
            [(s.number, tuple(step.tokens), step.path) for s, step in decoder.run(requests)]
        )
        assert graphs.captured == before
    assert steps[0] == steps[1]
    assert graphs.runs > 20
    assert len(drafts[0]) > 50
    assert drafts[0] <= drafts[1]


def test_drafter_reads_at_once_what_a_graph_has_no_room_for(
    graphs: StandIn, monkeypatch: pytest.MonkeyPatch
) -> None:
    backbone, read = tiny_backbone("qwen3", layers=4, engine="torch"), []
    decoder = Decoder(
        backbone, drafter_of(backbone, "eagle-draft"), StaticTreePolicy(SHALLOW), cuda_graphs=True
    )
    inner = type(decoder.drafter).read
    monkeypatch.setattr(
        type(decoder.drafter),
        "read",
        lambda *args: read.append(len(args[3][0].tokens)) or inner(*args),
    )
    prompt = [8 + i % 40 for i in range(graph_step.DEPTHS + 9)]
    assert tokens_of(answer(decoder, prompt, max_new_tokens=40, stop_ids=())) == tokens_of(
        generate_plain(backbone, prompt, max_new_tokens=40, stop_ids=())
    )
    assert read == [9]


def test_states_of_a_step_outlive_the_graphs_next_run(graphs: StandIn) -> None:
    decoder = decoder_of(tiny_backbone(engine="torch"), cuda_graphs=True)
    sequence, _ = decoder.admit(Request(PROMPT, 8, stop_ids=()))
    decoder.step()
    hidden = sequence.unread[-1].hidden
    before = hidden.clone()
    decoder.step()
    assert graphs.runs == 2
    assert torch.equal(hidden, before)


@pytest.mark.slow
def test_growth_of_the_cache_drops_graphs_and_changes_no_token(graphs: StandIn) -> None:
    backbone = tiny_backbone(engine="torch")
    expected = plain(backbone, 300)
    decoder = decoder_of(backbone, Oracle(expected, 0.6), SPARSE, cuda_graphs=True)
    before = graphs.captured
    assert tokens_of(answer(decoder, PROMPT, max_new_tokens=300, stop_ids=())) == expected
    assert graphs.captured > before


def test_failed_graph_is_given_up_and_the_step_runs_as_usual(graphs: StandIn, caplog: Any) -> None:
    backbone = tiny_backbone(engine="torch")
    expected = plain(backbone, 40)
    decoder = decoder_of(backbone, Oracle(expected, 0.6), SPARSE, cuda_graphs=True)
    steps = answer(decoder, PROMPT, max_new_tokens=40, stop_ids=())
    tokens = [token for _ in range(4) for token in next(steps).tokens]
    runs = graphs.runs

    def fail(*args: Any) -> Any:
        raise RuntimeError("CUDA error: an illegal memory access\nand more lines")

    for step in decoder.cuda_graphs._steps.values():
        step._run_again = fail
    with caplog.at_level(logging.WARNING):
        assert tokens + tokens_of(steps) == expected
    warnings = [record.message for record in caplog.records if record.levelno == logging.WARNING]
    assert graphs.runs == runs
    assert len(warnings) == 1
    assert "\n" not in warnings[0]
    assert backbone.engine.captures is False


@pytest.mark.parametrize(
    "sampling", [Sampling("exact", 1.2, 0.95, seed=5), Sampling("exact", 1.2, 1.0, 6, seed=5)]
)
def test_step_that_needs_more_than_the_likeliest_tokens_runs_as_usual(
    sampling: Sampling, graphs: StandIn, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(graph_step, "LIKELIEST", 6)
    backbone = tiny_backbone(engine="torch")
    expected = plain(backbone, 40, sampling=sampling)
    decoder = decoder_of(backbone, Oracle(expected, 0.6), SPARSE, cuda_graphs=True)
    assert (
        tokens_of(answer(decoder, PROMPT, max_new_tokens=40, stop_ids=(), sampling=sampling))
        == expected
    )


def test_typical_acceptance_processors_and_firp_run_without_graphs(graphs: StandIn) -> None:
    backbone = tiny_backbone(engine="torch", layers=4)
    decoder, sampling = decoder_of(backbone, cuda_graphs=True), Sampling("typical", 0.7)
    assert len(list(answer(decoder, PROMPT, max_new_tokens=5, stop_ids=(), sampling=sampling))) == 5
    options = LogitsOptions(repetition_penalty=1.3)
    assert (
        len(list(answer(decoder, PROMPT, max_new_tokens=5, stop_ids=(), logits_options=options)))
        == 5
    )
    rides = decoder_of(backbone, drafter_of(backbone, "firp"), SPARSE, cuda_graphs=True)
    assert not graphs.runs
    assert rides.cuda_graphs is None


@pytest.mark.quick("sampling0", "sampling2")
@pytest.mark.parametrize(
    "sampling", [sampling for sampling in SAMPLINGS.values() if not sampling.greedy]
)
def test_chosen_tokens_are_distributed_as_the_target(sampling: Sampling) -> None:
    nodes, draws = 3, 4000
    logits = 1.5 * torch.randn(nodes, 12, generator=torch.Generator().manual_seed(3))
    logits = (2 * logits).round() / 2  # with ties
    tree, samplers = (
        Tree.from_choices([[0], [1]]),
        [Sampler(sampling, stream) for stream in range(draws)],
    )
    params = graph_step.sampling_params(samplers, draws, tree.max_depth + 1)
    chosen, certain = graph_step.choose(
        logits.expand(draws, -1, -1), params, tree.depth.expand(draws, -1)
    )
    assert certain.all()
    expected = draws * target_probs(logits, sampling).double()
    for node in range(nodes):
        assert_distributed(torch.bincount(chosen[:, node], minlength=12).double(), expected[node])


@pytest.mark.parametrize("temperature", [0.05, 0.1])
def test_cold_sampling_with_top_k_needs_no_ordinary_step(temperature: float) -> None:
    sampling, nodes = Sampling("exact", temperature, top_k=40, seed=3), 200
    # As spread as a model's.
    logits = 5 * torch.randn(nodes, 3000, generator=torch.Generator().manual_seed(2))
    samplers = [Sampler(sampling, stream) for stream in range(nodes)]
    params = graph_step.sampling_params(samplers, nodes, 1)
    chosen, certain = graph_step.choose(
        logits[:, None], params, torch.zeros(nodes, 1, dtype=torch.long)
    )
    assert certain.all()
    assert chosen[:, 0].tolist() == [
        Sampler(sampling, stream).choose(row) for stream, row in enumerate(logits)
    ]


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
    seconds: float,
    fault: str | None,
    captured: bool,
    logged: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: Any,
) -> None:
    backbone = tiny_backbone(engine="torch")
    backbone.engine.captures = None
    clock, trials = [0.0], []
    run, ordinary_step = cuda_graph.CudaGraphs.run, graph_trial._ordinary_step
    monkeypatch.setattr("medusa_cli.device.time.perf_counter", lambda: clock[0])

    def graph_step(self: Any, *args: Any) -> Any:
        trials.append(1)
        clock[0] += seconds
        if fault and fault != "wrong":
            raise RuntimeError(f"CUDA error: {fault}\nand more lines")
        (accepted,) = run(self, *args)
        if fault:
            accepted.hidden.mul_(1.1)
        return [accepted]

    def plain_step(*args: Any) -> Any:
        clock[0] += 2.0
        return ordinary_step(*args)

    monkeypatch.setattr(cuda_graph.CudaGraphs, "run", graph_step)
    monkeypatch.setattr(graph_trial, "_ordinary_step", plain_step)
    with caplog.at_level(logging.WARNING):
        assert (decoder_of(backbone).cuda_graphs is not None) == captured
        before = len(trials)
        decoder_of(backbone)
    assert len(trials) == before > 0
    assert [logged in record.message for record in caplog.records] == [True] * bool(logged)
    assert "\n" not in caplog.text.strip()


def test_no_trial_on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(graph_trial, "_trial", lambda engine: pytest.fail("a trial ran"))
    assert decoder_of(tiny_backbone(engine="torch")).cuda_graphs is None


def test_a_distribution_too_flat_for_a_graph_is_no_difference(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    engine = tiny_backbone(engine="torch").engine
    assert isinstance(engine, LayoutEngine)
    monkeypatch.setattr(graph_step, "LIKELIEST", 1)
    graph_trial._trial(engine)
    assert "differ" not in caplog.text
