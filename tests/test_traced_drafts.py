"""What drafters compute, traced after a few calls, against the same without: every kind, several prompts and shapes."""

from typing import Any

import pytest
import torch

from medusa_cli.decode import Decoder, Request
from medusa_cli.drafters import DRAFTERS, Drafter, heads
from medusa_cli.engine import jit as tracing
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


def made(backbone: Backbone, kind: str) -> Drafter:
    name, settings = KINDS[kind]
    torch.manual_seed(3)
    settings = {"vocabulary": "draft", **settings}
    ids = torch.arange(5, 45) if settings["vocabulary"] == "draft" else None
    drafter = DRAFTERS[name].create(backbone, 3, draft_ids=ids, **settings)
    with torch.no_grad():
        for weight in drafter.parameters():
            weight.add_(0.1 * torch.randn_like(weight))
    return drafter.eval().requires_grad_(False)


def drafts_of(kind: str, shape: Tree | DynamicTree) -> list[Any]:
    """What two texts gain a step, one beginning in the midst of the other."""
    backbone = tiny_backbone("llama", layers=4)
    decoder = Decoder(backbone, made(backbone, kind), shape, slots=2)
    decoder.admit(Request([5, 9, 23, 17, 8], max_new_tokens=40, stop_ids=()))
    found = []
    for number in range(24):
        if number == 8:
            decoder.admit(Request([7, 6], max_new_tokens=12, stop_ids=()))
        found.append([(step.tokens, step.path, step.nodes) for _, step in decoder.step()])
    return found


def test_where_rows_choose_the_product_what_is_traced_has_one_number_of_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """And a cache that grows brings no computation of its own for each of its lengths."""
    backbone, asked, given = tiny_backbone("llama", layers=4), [0], dict[int, set[int]]()
    call = heads.TracedModule.__call__

    def called(self: heads.TracedModule, *inputs: Any) -> torch.Tensor:
        asked[0] = id(self)
        return call(self, *inputs)

    monkeypatch.setattr(tracing, "trace", lambda *given: None)
    monkeypatch.setattr(heads.TracedModule, "__call__", called)
    score = heads.HeadDrafter.score

    def scored(self: Any, backbone: Backbone, head: int, states: torch.Tensor) -> torch.Tensor:
        given.setdefault(asked[0], set()).add(states.shape[:-1].numel())
        return score(self, backbone, head, states)

    monkeypatch.setattr(heads.HeadDrafter, "score", scored)
    for kind in ("hydra++ that sees the prompt", "hydra", "eagle"):
        drafter = made(backbone, kind)
        monkeypatch.setattr(type(drafter.kernel), "exact", False)
        for shape in (*SHAPES.values(), Tree.dense([4, 4, 4])):
            list(generate(backbone, drafter, shape, [5, 9, 23], max_new_tokens=16, stop_ids=()))
        assert len(drafter._repeated) < 60
    assert given and all(len(rows) == 1 for rows in given.values())


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("kind", KINDS)
def test_traced_drafters_draft_what_they_do_untraced(kind: str, shape: str, monkeypatch: pytest.MonkeyPatch) -> None:
    traces = []
    inner = tracing.trace
    monkeypatch.setattr(tracing, "trace", lambda *given: traces.append(inner(*given)) or traces[-1])
    ours = drafts_of(kind, SHAPES[shape])
    assert traces and all(one is not None for one in traces)
    monkeypatch.setattr(tracing, "trace", lambda *given: None)
    assert drafts_of(kind, SHAPES[shape]) == ours
