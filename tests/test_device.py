"""Whole steps on a simulated CUDA device: no devices mix, one wait a step, and few launches beside the graph."""

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.attention import bias

from medusa_cli.decode import (
    AdaptivePolicy,
    Decoder,
    DraftPolicy,
    Request,
    Sampling,
    graph_step,
    sampler,
)
from medusa_cli.decode.accept import longest_path
from medusa_cli.decode.cuda_graph import CudaGraphs
from medusa_cli.decode.policy import DynamicTreePolicy, StaticTreePolicy
from medusa_cli.decode.sampler import Sampler
from medusa_cli.drafters.heads import HeadDrafter
from medusa_cli.engine import Plan
from medusa_cli.errors import UserError
from medusa_cli.model import Backbone
from medusa_cli.runs.run import Run
from medusa_cli.train import Trainer
from medusa_cli.train.checkpoint import checkpoint_path
from medusa_cli.train.loop import optimizer_of
from medusa_cli.tree import DynamicTree, Tree
from medusa_cli.tree.search import SizedTree, StepTimes
from medusa_cli.tree.tensors import GrowingTrees
from tests import helpers
from tests.device import NAME, Device, Stray
from tests.helpers import (
    attach,
    conversation,
    decoder_of,
    forward,
    tiny_backbone,
    tiny_model,
    tiny_tokenizer,
    tokens_of,
    write_lines,
)
from tests.test_distill import SEEDS, answers
from tests.test_distill import settings as distill_settings
from tests.test_drafters import drafter_of
from tests.test_training import losses, trainer

TREE = Tree.from_choices([[0], [1], [2], [0, 0], [0, 1], [1, 0], [0, 0, 0]])
PROMPT = [5, 9, 20, 11, 7, 5, 9, 20, 11]  # with matches for its end
REQUESTS = [
    Request(PROMPT, max_new_tokens=8, stop_ids=()),
    Request(
        PROMPT[2:], max_new_tokens=7, stop_ids=(), sampling=Sampling("exact", 0.9, 0.9, seed=3)
    ),
]
POLICIES: dict[str, Callable[[], DraftPolicy]] = {
    "static": lambda: StaticTreePolicy(TREE),
    "n-grams": lambda: StaticTreePolicy(TREE, ngrams=True),
    "dynamic": lambda: DynamicTreePolicy(DynamicTree(8, 3), ngrams=True),
    "adaptive": lambda: AdaptivePolicy(
        [SizedTree(TREE, 2.0)], StepTimes({1: 1.0, 8: 1.1}, {1: 0.1, 3: 0.1}), ngrams=True
    ),
}
# Launches beside the graph in a step of two sequences.
LAUNCHES = 20
# Kernels of a captured step: of each layer, and besides the layers, at 1 and at 64 rows. Then what three levels of
# drafting 64 nodes add, for a static and a dynamic tree. The last number is that with the kernels of `tree.kernels`.
KERNELS = {1: (15, 12, 12), 64: (21, 50, 21)}
DRAFTING = {
    "medusa": (54, 126, 46),
    "hydra++-prompt": (90, 162, 82),
    "eagle-draft": (150, 228, 148),
}
CAPTURED = ("medusa", "medusa-bias", "hydra", "hydra++-prompt", "amphista-prompt", "eagle-draft")


def causal(rows: int, columns: int) -> Tensor:
    """Stands for torch's lazy causal mask, which cannot be made on the simulated device."""
    return torch.ones(rows, columns, dtype=torch.bool, device=NAME).tril(columns - rows)


def backbone_on(device: Device, family: str, engine: str, layers: int = 4) -> Backbone:
    """Returns a backbone and its engine on the simulated device."""
    backbone = Backbone(device.put(tiny_model(family, layers=layers)), tiny_tokenizer())
    attach(backbone, engine)
    return backbone


@pytest.fixture(scope="module")
def backbone() -> Iterator[Backbone]:
    with pytest.MonkeyPatch.context() as patch, Device() as device:
        patch.setattr(bias, "causal_lower_right", causal)
        yield backbone_on(device, "qwen3", "torch")


@pytest.fixture
def device(backbone: Backbone, monkeypatch: pytest.MonkeyPatch) -> Iterator[Device]:
    """Returns the simulated device; what is captured on it looks at nothing."""
    with Device() as device:

        def capture(run: Callable[[], Any]) -> Callable[[], Any]:
            def replay() -> Any:
                with device.capture():
                    return run()

            return replay

        init = CudaGraphs.__init__
        monkeypatch.setattr(
            CudaGraphs,
            "__init__",
            lambda self, *args, **named: init(self, *args, capture=capture, **named),
        )
        # Each is captured when it is first used.
        monkeypatch.setattr(CudaGraphs, "warm_up", lambda self, drafting: None)
        yield device


@pytest.fixture(scope="module")
def expected() -> list[list[int]]:
    """Returns the answers of plain decoding on the CPU."""
    return [
        tokens_of(steps)
        for steps in helpers.steps_of(decoder_of(tiny_backbone("qwen3", layers=4)), REQUESTS)
    ]


def drafter_on(device: Device, kind: str) -> HeadDrafter:
    drafter = drafter_of(tiny_backbone("qwen3", layers=4), kind)
    device.put(drafter)
    drafter.eval().truncate(0)
    return drafter


def steps_of(
    decoder: Decoder, device: Device
) -> tuple[list[list[int]], list[tuple[int, list[str]]]]:
    """Returns the answers to REQUESTS side by side; launches and waits of each step that is no graph's first."""
    tokens: list[list[int]] = []
    for number, request in enumerate(REQUESTS):
        tokens.append(list(decoder.admit(request, number)[1].tokens))
    records = []
    while decoder.sequences:
        device.reset()
        captured = decoder.cuda_graphs.count if decoder.cuda_graphs is not None else 0
        for sequence, step in decoder.step():
            tokens[sequence.number] += step.tokens
        if decoder.cuda_graphs is None or decoder.cuda_graphs.count == captured:
            records.append((len(device.kernels) + len(device.copies), device.waits))
    return tokens, records


# N-gram matches are added to any drafter's draft alike.
@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "policy"),
    [(kind, policy) for kind in CAPTURED for policy in ("static", "dynamic")]
    + [
        (kind, policy)
        for kind in ("medusa-bias", "eagle-draft")
        for policy in ("n-grams", "adaptive")
    ],
)
def test_captured_steps_wait_once_for_the_device(
    kind: str, policy: str, backbone: Backbone, device: Device, expected: list[list[int]]
) -> None:
    decoder = Decoder(
        backbone, drafter_on(device, kind), POLICIES[policy](), slots=2, cuda_graphs=True
    )
    assert decoder.drafter.packed("matrices") is decoder.drafter.matrices  # weights are held once
    tokens, records = steps_of(decoder, device)
    assert tokens == expected
    assert records
    assert decoder.cuda_graphs.count
    for launches, waits in records:
        assert len(waits) == 1, (waits, launches)
        assert launches <= LAUNCHES, (waits, launches)


def kernels_of(
    device: Device, backbone: Backbone, rows: int, kind: str = "", limits: DynamicTree | None = None
) -> int:
    """Returns the number of kernels in a captured step."""
    drafter = drafter_on(device, kind) if kind else None
    cache = backbone.engine.new_cache(1, 256)
    taps = drafter.taps if drafter else (-1,)
    graphs = CudaGraphs(backbone.engine, cache, taps, drafter, limits)
    step = graphs._step(1, rows, False)
    device.reset()
    with torch.inference_mode():
        step._run()
    return len(device.kernels)


@pytest.fixture
def tree_kernels(
    device: Device, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> bool:
    """Lets operations on trees count as one kernel each if asked for, as those of `tree.kernels`."""

    def once(run: Callable[..., Any]) -> Callable[..., Any]:
        def counted(*args: Any) -> Any:
            before, device.kernels = device.kernels, []
            result = run(*args)
            device.kernels = [*before, run.__name__]
            return result

        return counted

    class Grown(GrowingTrees):
        extend = once(GrowingTrees.extend)

    if request.param:
        monkeypatch.setattr(graph_step, "tree_operations", lambda _: (Grown, once(longest_path)))
    return bool(request.param)


@pytest.mark.quick("64-True")
@pytest.mark.parametrize("tree_kernels", [False, True], indirect=True)
@pytest.mark.parametrize("rows", KERNELS)
def test_captured_steps_have_few_kernels(rows: int, tree_kernels: bool, device: Device) -> None:
    shallow, deep = (
        kernels_of(device, backbone_on(device, "llama", "torch", layers), rows) for layers in (2, 4)
    )
    layer = (deep - shallow) // 2
    of_layer, *besides = KERNELS[rows]
    assert layer <= of_layer
    assert shallow - 2 * layer <= besides[tree_kernels]


@pytest.mark.quick("hydra++-prompt-True")
@pytest.mark.parametrize("tree_kernels", [False, True], indirect=True)
@pytest.mark.parametrize("kind", DRAFTING)
def test_drafting_within_graphs_adds_few_kernels(
    kind: str, tree_kernels: bool, backbone: Backbone, device: Device
) -> None:
    without = kernels_of(device, backbone, 64)
    static, *dynamic = DRAFTING[kind]
    for limits, added in ((None, static), (DynamicTree(64, 3), dynamic[tree_kernels])):
        assert kernels_of(device, backbone, 64, kind, limits) - without <= added


@pytest.mark.quick("firp-draft")
@pytest.mark.parametrize("kind", ["firp-draft", "medusa", "eagle"])
def test_steps_without_graphs_keep_to_the_device(
    kind: str, backbone: Backbone, device: Device, expected: list[list[int]]
) -> None:
    for policy in ("n-grams", "dynamic"):
        decoder = Decoder(
            backbone, drafter_on(device, kind), POLICIES[policy](), slots=2, cuda_graphs=False
        )
        tokens, records = steps_of(decoder, device)
        assert tokens == expected
        assert [waits for _, waits in records if len(waits) > 14] == []


@pytest.mark.quick("beside the graph")
@pytest.mark.parametrize("where", ["beside the graph", "within the graph"])
def test_simulated_device_tells_stray_looks_and_tensors(
    where: str, backbone: Backbone, device: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The tests above fail for a value that is read, and for a tensor of the host among the device's."""
    decoder = Decoder(backbone, None, StaticTreePolicy(Tree.root_only()), cuda_graphs=True)
    decoder.admit(REQUESTS[0])
    decoder.step()
    read, run = decoder.cuda_graphs.run, backbone.engine.lm_head

    def look(*args: Any) -> Any:
        accepted = read(*args)
        accepted[0].hidden.sum().item()
        return accepted

    device.reset()
    if where == "beside the graph":
        monkeypatch.setattr(decoder.cuda_graphs, "run", look)
        decoder.step()
        assert len(device.waits) == 2
    else:
        for stray in (
            lambda states: run(states * states.sum().item()),
            lambda states: run(states + torch.ones(1)),
        ):
            monkeypatch.setattr(backbone.engine, "lm_head", stray)
            with pytest.raises(Stray):
                decoder.step()
            # The error has ended the sequence.
            monkeypatch.setattr(backbone.engine, "lm_head", run)
            decoder.admit(REQUESTS[0])


@pytest.mark.quick("qwen2-eager")
@pytest.mark.parametrize("engine", ["eager", "torch"])
@pytest.mark.parametrize("family", ["qwen2", "mistral-window", "gemma3"])
def test_first_piece_of_a_prompt_needs_no_mask_on_a_gpu(
    family: str, engine: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # More than a sliding window.
    monkeypatch.setattr("medusa_cli.engine.engine.GPU_PREFILL_ROWS", 12)
    prompt = torch.arange(5, 35)
    expected = forward(tiny_backbone(family, layers=4, engine=engine), prompt)
    with Device() as device:
        out = forward(backbone_on(device, family, engine), prompt)
        assert torch.allclose(out.logits.cpu(), expected.logits, atol=1e-4)
        assert torch.allclose(out.hidden.cpu(), expected.hidden, atol=1e-4)


class WithoutDouble(Device):
    """A device without fp64, such as Apple's."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = super().__torch_dispatch__(func, types, args, kwargs)
        if isinstance(out, Tensor) and out.device.type == NAME and out.dtype == torch.double:
            raise TypeError("Cannot convert a tensor to float64: the device does not support it")
        return out


@pytest.mark.parametrize("cut", [{}, {"top_k": 5}, {"top_p": 0.8}], ids=str)
def test_exact_sampling_needs_no_doubles_of_the_device(
    cut: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sampler, "WITHOUT_DOUBLE", (NAME,))
    logits, rule = 3 * torch.randn(9, 64), Sampling("exact", 0.8, seed=4, **cut)
    uniforms = Sampler(rule).peek_uniforms(9)
    expected = Sampler(rule).sample(logits, uniforms)
    with WithoutDouble():
        remote = logits.to(NAME)
        assert Sampler(rule).sample(remote, uniforms) == expected
        assert Sampler(rule).choose(remote[0]) == Sampler(rule).choose(logits[0])


def test_request_beyond_the_devices_memory_is_refused_at_admission(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    backbone = tiny_backbone()
    # Keys and values, layers, heads, width, fp32.
    decoder, row = (
        decoder_of(backbone, slots=2),
        2 * 2 * 2 * 8 * 4,
    )
    assert backbone.engine.row_bytes == row
    long, short = Request(PROMPT, 300, stop_ids=()), Request(PROMPT, 20, stop_ids=())
    monkeypatch.setattr("medusa_cli.decode.decoder.free_memory", lambda device: 2 * 512 * row - 1)
    with pytest.raises(UserError, match="max_new_tokens"):
        decoder.admit(long)
    decoder.admit(short)
    monkeypatch.setattr("medusa_cli.decode.decoder.free_memory", lambda device: 2 * 512 * row)
    decoder.admit(long)


# Kernels of the forward and backward passes of a training step. Until 28 November 2026, they were, in order, 217, 293,
# 428, 537, 1,166 and 1,286, and a step waited 26 to 37 times.
FOUR = "drafter.num_heads=4"
TRAINING = {
    "medusa": (["drafter=medusa", FOUR], 101),
    "hydra": (["drafter=hydra", FOUR], 136),
    "hydra++": (["drafter=hydra", FOUR, "drafter.prefix_layers=1", "drafter.matrices=one"], 218),
    "amphista": (["drafter=amphista", FOUR, "train.soft=0.5"], 308),
    "eagle": (["drafter=eagle", "drafter.num_heads=5"], 561),
    "eagle-fresh": (["drafter=eagle", "drafter.num_heads=5", "train.states=fresh"], 617),
}


def move(work: Trainer, device: Device) -> None:
    """Moves a training to the device."""
    work.backbone = backbone_on(device, "llama", "torch", 3)
    device.put(work.drafter, trained=True)
    work.parameters = list(work.drafter.parameters())
    work.optimizer = optimizer_of([work.parameters], work.peaks, work.recipe.train, NAME)


@pytest.mark.quick("eagle-fresh")
@pytest.mark.parametrize("kind", TRAINING)
def test_training_steps_wait_once_and_start_few_kernels(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    words, most = TRAINING[kind]
    run = Run.open(f"{tmp_path}/run", create=True)
    write_lines(run.distill_path, [conversation(n, turns=1 + n % 2) for n in range(24)])
    expected = losses(trainer(run, *words), 3)
    checkpoint_path(run).unlink(missing_ok=True)
    # It has no autocast, which fp32 does not need.
    monkeypatch.setattr(torch, "autocast", lambda *args, **named: nullcontext())
    clip = torch.nn.utils.clip_grad_norm_
    counts = []
    with Device() as device:

        def count(*args: Any) -> Tensor:
            counts.append(len(device.kernels))
            return clip(*args)

        monkeypatch.setattr(torch.nn.utils, "clip_grad_norm_", count)
        work = trainer(run, *words)
        move(work, device)
        for loss in expected:
            device.reset()
            assert work.train_step().loss == pytest.approx(loss, abs=1e-5)
            assert len(device.waits) == 1, device.waits
    # The first one also makes tables that stay.
    assert max(counts[1:]) <= most


@pytest.mark.slow
def test_prompts_run_in_packs_and_change_no_answer(
    backbone: Backbone, device: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    rules = distill_settings(batch_size=8)
    expected = answers(tiny_backbone("qwen3", layers=4), SEEDS, rules)
    monkeypatch.setattr("medusa_cli.distill.local.PACKS", 2)
    sizes = []
    forward = backbone.engine.forward

    def watch(plan: Plan, cache: Any) -> Any:
        if plan.logits == "none":
            sizes.append(len(plan.tokens))
        return forward(plan, cache)

    monkeypatch.setattr(backbone.engine, "forward", watch)
    device.reset()
    ours = answers(backbone, SEEDS, rules)
    turns = sum(len(outcome.conversation.spans) for outcome in ours.values())
    assert sum(sizes) == turns
    assert max(sizes) == 4
    assert len(sizes) <= turns // 2
    # Each conversation's states are read once.
    assert len([wait for wait in device.waits if "_to_copy" in wait]) >= len(SEEDS)
    for id, outcome in expected.items():
        assert ours[id].conversation == outcome.conversation
        assert torch.allclose(ours[id].states.float(), outcome.states.float(), atol=0.05)


def test_prompts_in_a_pack_wait_once_and_start_a_share_of_the_kernels(
    backbone: Backbone, device: Device
) -> None:
    requests = [Request(PROMPT[n:], max_new_tokens=8, stop_ids=()) for n in range(4)]
    counts = []
    for size in (1, 4):
        decoder = Decoder(backbone, slots=4, cuda_graphs=False)
        device.reset()
        for first in range(0, 4, size):
            decoder.admit_all(requests[first : first + size], [0] * size)
        counts.append((len(device.kernels), len(device.waits)))
    [(alone, waits), (together, pack_waits)] = counts
    assert waits == 4
    assert pack_waits == 1
    assert 3 * together < alone


@pytest.mark.slow
def test_states_of_a_pack_are_those_of_each_text(device: Device) -> None:
    texts = [torch.arange(5, 5 + count) for count in (3, 14, 9)]
    padded = torch.nn.utils.rnn.pad_sequence(texts, batch_first=True)
    for family, engine in (("gemma3", "torch"), ("mistral-window", "eager")):
        backbone, plain = backbone_on(device, family, engine), tiny_backbone(family, layers=4)
        states = backbone.engine.states(padded.to(NAME), (0, -1)).cpu()
        for own, text in zip(states, texts, strict=True):
            expected = forward(plain, text, taps=(0, -1)).hidden
            assert torch.allclose(own[: len(text)], expected, atol=1e-4)
