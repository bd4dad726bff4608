"""Every kind of drafter: traced ones draft as untraced ones; packed conversations do not see each other."""

from typing import Any

import pytest
import torch

from medusa_cli.decode import Decoder, Request
from medusa_cli.drafters import DRAFTERS, Batch, Drafter, heads
from medusa_cli.engine import jit
from medusa_cli.model import Backbone
from medusa_cli.tree import DynamicTree, Tree
from tests.helpers import generate, tiny_backbone

KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "medusa": ("medusa", {}),
    "medusa after the token before": ("medusa", {"conditional": 8}),
    "medusa over all tokens": ("medusa", {"vocabulary": "own"}),
    "hydra": ("hydra", {"num_layers": 2}),
    "hydra++ that sees the prompt": ("hydra", {"prefix_layers": 1, "context": "conversation"}),
    "hydra with taps": ("hydra", {"prefix_layers": 1, "taps": (1,)}),
    "amphista": ("amphista", {"context": "conversation"}),
    "eagle": ("eagle", {}),
    "firp": ("firp", {}),
}
SHAPES = {
    "sparse": Tree.from_choices([[0], [1], [2], [0, 0], [0, 1], [1, 0], [0, 0, 0]]),
    "chain": Tree.chain(3),
    "dynamic": DynamicTree(budget=7, max_depth=3),
}


def create(backbone: Backbone, kind: str) -> Drafter:
    name, settings = KINDS[kind]
    torch.manual_seed(3)
    settings = {"vocabulary": "draft", **settings}
    ids = torch.arange(5, 45) if settings["vocabulary"] == "draft" else None
    drafter = DRAFTERS[name].create(backbone, 3, draft_ids=ids, **settings)
    with torch.no_grad():
        for weight in drafter.parameters():
            weight.add_(0.1 * torch.randn_like(weight))
    return drafter.eval().requires_grad_(False)


def steps_of(kind: str, shape: Tree | DynamicTree) -> list[Any]:
    """Returns the steps of two sequences, of which one begins later."""
    backbone = tiny_backbone(layers=4)
    decoder = Decoder(backbone, create(backbone, kind), shape, slots=2)
    decoder.admit(Request([5, 9, 23, 17, 8], max_new_tokens=40, stop_ids=()))
    steps = []
    for number in range(14):
        if number == 5:
            decoder.admit(Request([7, 6], max_new_tokens=12, stop_ids=()))
        steps.append([(step.tokens, step.path, step.nodes) for _, step in decoder.step()])
    return steps


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("kind", KINDS)
def test_traced_drafters_draft_as_untraced_ones(kind: str, shape: str, monkeypatch: pytest.MonkeyPatch) -> None:
    traces, trace = [], jit.trace
    monkeypatch.setattr(jit, "trace", lambda *args: traces.append(trace(*args)) or traces[-1])
    traced = steps_of(kind, SHAPES[shape])
    assert traces and None not in traces
    monkeypatch.setattr(jit, "trace", lambda *args: None)
    assert steps_of(kind, SHAPES[shape]) == traced


def test_a_trace_over_a_rounded_kernel_serves_one_number_of_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """A growing cache brings no trace for each of its lengths."""
    backbone, current, rows = tiny_backbone(layers=4), [0], dict[int, set[int]]()
    call, score = heads.TracedModule.__call__, heads.HeadDrafter.score

    def record_call(self: heads.TracedModule, *inputs: Any) -> torch.Tensor:
        current[0] = id(self)
        return call(self, *inputs)

    def record_score(self: Any, backbone: Backbone, head: int, states: torch.Tensor) -> torch.Tensor:
        rows.setdefault(current[0], set()).add(states.shape[:-1].numel())
        return score(self, backbone, head, states)

    monkeypatch.setattr(jit, "trace", lambda *args: None)
    monkeypatch.setattr(heads.TracedModule, "__call__", record_call)
    monkeypatch.setattr(heads.HeadDrafter, "score", record_score)
    for kind in ("hydra++ that sees the prompt", "hydra", "eagle"):
        drafter = create(backbone, kind)
        drafter._kernel = drafter.kernel
        drafter._kernel.exact = False
        for shape in (*SHAPES.values(), Tree.dense([4, 4, 4])):
            list(generate(backbone, drafter, shape, [5, 9, 23], max_new_tokens=16, stop_ids=()))
        assert len(drafter._repeated) < 60
    assert rows and all(len(counts) == 1 for counts in rows.values())


@pytest.mark.parametrize(("name", "extra"), [
    ("medusa", {}), ("hydra", {"prefix_layers": 1}), ("amphista", {"attention_layers": 1})
])  # fmt: skip
def test_packed_conversations_do_not_see_each_other(name: str, extra: dict[str, int]) -> None:
    backbone = tiny_backbone()
    torch.manual_seed(1)
    heads = DRAFTERS[name].create(backbone, 3, 1, "own", **extra).eval()
    for weight in heads.parameters():  # fresh layers are zero and would let nothing through
        weight.data += 0.1 * torch.randn_like(weight)
    lengths = (6, 2, 9)
    hidden, tokens = torch.randn(sum(lengths), backbone.hidden_size), torch.randint(0, 64, (sum(lengths),))
    segment = torch.repeat_interleave(torch.arange(3), torch.tensor(lengths))
    packed = [scores.detach() for scores in heads.logits(backbone, Batch(hidden, tokens, segment))]
    for number in range(3):
        rows = torch.nonzero(segment == number).squeeze(1)
        alone = heads.logits(backbone, Batch(hidden[rows], tokens[rows], segment[rows]))
        for head, (together, scores) in enumerate(zip(packed, alone, strict=True)):
            # The targets of head k are k + 1 positions ahead, in the same conversation.
            kept = len(rows) - head - 1
            assert torch.allclose(together[rows[: max(kept, 0)]], scores[: max(kept, 0)], atol=1e-5)
