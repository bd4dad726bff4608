"""Decoding with what the text repeats: the same tokens and draws as plain decoding, alone and side by side."""

from pathlib import Path
from typing import Any

import pytest

from medusa_cli.decode import (
    AdaptivePolicy,
    Decoder,
    NgramPolicy,
    Request,
    Sampling,
    Stats,
)
from medusa_cli.decode.policy import DynamicTreePolicy, SizedTree, StaticTreePolicy
from medusa_cli.drafters.base import Draft
from medusa_cli.engine import load_backbone
from medusa_cli.runs.resolve import LoadOptions
from medusa_cli.runs.run import provenance
from medusa_cli.tree import DynamicTree, Tree
from medusa_cli.tree.search import Costs, search
from tests.helpers import (
    FAMILIES,
    PROMPT,
    SPARSE,
    Oracle,
    answer,
    generate,
    generate_batch,
    medusa,
    plain,
    save_model,
    save_run,
    tiny_backbone,
)
from tests.test_firp import firp
from tests.test_hydra import hydra
from tests.test_ngram import ACCURACIES, CHEAP, DEAR, ROUND
from tests.test_reuse import MAKE


def shapes() -> dict[str, NgramPolicy]:
    tree = search(ACCURACIES, 8)
    return {
        "tree": NgramPolicy(StaticTreePolicy(tree, ACCURACIES)),
        "unmeasured": NgramPolicy(StaticTreePolicy(tree)),
        "growth": NgramPolicy(DynamicTreePolicy(DynamicTree(8, 3))),
        "pace": NgramPolicy(AdaptivePolicy([SizedTree(tree, 2.0)], CHEAP)),
        "dear": NgramPolicy(AdaptivePolicy([SizedTree(tree, 2.0)], DEAR)),
        "alone": NgramPolicy(AdaptivePolicy([], CHEAP)),
    }


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("kind", shapes())
def test_greedy_is_token_identical(family: str, kind: str) -> None:
    backbone, shape = tiny_backbone(family), shapes()[kind]
    drafter = None if kind == "alone" else hydra(backbone)
    rules = {"max_new_tokens": 80, "stop_ids": ()}
    expected = [t for s in generate(backbone, None, None, ROUND, **rules) for t in s.tokens]
    steps = list(generate(backbone, drafter, shape, ROUND, **rules))
    assert [t for s in steps for t in s.tokens] == expected
    if kind != "dear":
        assert any(step.looked_up for step in steps)
    if kind in ("tree", "growth"):
        assert all(step.nodes <= 8 for step in steps)


def test_texts_that_repeat_themselves_are_decoded_in_fewer_steps() -> None:
    backbone = tiny_backbone("llama")
    expected = plain(backbone, 100)
    # The answer is in the prompt already: what an extraction or an edit is like.
    prompt = [*PROMPT, *expected, 3, *PROMPT]
    rules = {"max_new_tokens": 60, "stop_ids": ()}
    plainly = [t for s in generate(backbone, None, None, prompt, **rules) for t in s.tokens]
    prompt += plainly[:30] + prompt
    found = {}
    for name, shape in (("alone", shapes()["alone"]), ("plain", None)):
        steps = list(generate(backbone, None, shape, prompt, **rules))
        found[name] = [t for s in steps for t in s.tokens], Stats.of(steps)
    assert found["alone"][0] == found["plain"][0]
    assert found["alone"][1].steps <= found["plain"][1].steps


def test_an_oracle_that_is_never_asked_hears_of_all_when_it_is() -> None:
    """Steps of looked-up tokens alone leave the drafter out; what they settled comes to it together (Oracle checks)."""
    backbone = tiny_backbone("llama")
    expected = plain(backbone, 120)
    oracle = Oracle(expected, 0.5)
    shape = NgramPolicy(
        AdaptivePolicy([SizedTree(Tree.chain(2), 1.6)], Costs({1: 0.010, 32: 0.0104}, {1: 0.004, 4: 0.008}))
    )
    steps = list(generate(backbone, oracle, shape, PROMPT, max_new_tokens=120, stop_ids=()))
    assert [t for s in steps for t in s.tokens] == expected
    assert oracle.drafts < len(steps) - 1 or not any(step.looked_up for step in steps)


@pytest.mark.parametrize("sampling", [Sampling("exact", 0.8, seed=3), Sampling("exact", 1.3, 0.9, seed=5)])
def test_samples_are_those_of_plain_decoding(sampling: Sampling) -> None:
    backbone = tiny_backbone("llama")
    rules = {"max_new_tokens": 60, "stop_ids": (), "sampling": sampling}
    expected = [t for s in generate(backbone, None, None, ROUND, **rules) for t in s.tokens]
    for kind in ("tree", "growth", "pace"):
        steps = generate(backbone, hydra(backbone), shapes()[kind], ROUND, **rules)
        assert [t for s in steps for t in s.tokens] == expected


@pytest.mark.parametrize("kind", ["tree", "growth", "pace", "alone"])
def test_side_by_side_each_gets_what_it_gets_alone(kind: str) -> None:
    backbone = tiny_backbone("llama")
    prompts = [ROUND, PROMPT, ROUND[3:], [*PROMPT, *PROMPT, *PROMPT]]
    rules = {"max_new_tokens": 40, "stop_ids": ()}
    drafter = None if kind == "alone" else hydra(backbone)
    answers: list[list[int]] = [[] for _ in prompts]
    for number, step in generate_batch(backbone, drafter, shapes()[kind], prompts, batch_size=3, **rules):
        answers[number] += step.tokens
    for prompt, found in zip(prompts, answers, strict=True):
        assert found == [t for s in generate(backbone, None, None, prompt, **rules) for t in s.tokens]


def test_it_stays_within_the_context() -> None:
    backbone = tiny_backbone("llama")
    prompt = (ROUND * 40)[: backbone.max_positions - 9]
    for kind, shape in shapes().items():
        drafter = None if kind == "alone" else hydra(backbone)
        steps = list(answer(Decoder(backbone, drafter, shape), prompt, max_new_tokens=50, stop_ids=()))
        assert sum(len(step.tokens) for step in steps) == 9, kind


def test_captured_steps_and_rows_that_ride_do_without() -> None:
    backbone = tiny_backbone("llama")
    shape = shapes()["tree"]
    assert Decoder(backbone, hydra(backbone), shape, cuda_graphs=True).policy is shape.over
    assert Decoder(backbone, hydra(backbone), shape, cuda_graphs=False).policy is shape
    assert Decoder(backbone, firp(backbone, layers=[1, 1, 1]), shape, cuda_graphs=False).policy is shape.over


@pytest.mark.parametrize("asked", ["--tree=static:4", "--tree=auto"])
def test_a_drafter_whose_rows_ride_is_greeted_without_lookups(tmp_path: Path, asked: str) -> None:
    model = save_model(tmp_path / "model", layers=4)
    run = save_run(tmp_path / "run", model, heads=3, calibrated=True)
    backbone = load_backbone(model, LoadOptions(dtype="fp32"))
    firp(backbone, layers=[1, 1, 2]).save(run.drafter_dir, provenance(backbone.identity))
    result = medusa("chat", "--run", f"{run.path}/", asked, "--lookup", "--prompt", "w5 w9", "--max-new-tokens", "4")
    assert result.exit_code == 0, result.output
    assert "firp drafter" in result.stderr and "n-grams" not in result.stderr
    assert "--lookup has no effect" in result.stderr


@pytest.mark.parametrize("name", [name for name in MAKE if name not in ("plain", "firp")])
def test_a_drafter_that_was_not_asked_for_some_steps_drafts_what_it_would_have(name: str) -> None:
    backbone = tiny_backbone("llama", layers=6)

    def drafted(shapes: list[Tree]) -> dict[int, list[int]]:
        """What is drafted after so many tokens of one text, where each step is over the next of the shapes."""
        drafter, found = MAKE[name](backbone), dict[int, list[int]]()
        draft = drafter.draft

        def kept(*given: Any) -> list[Draft]:
            (made,) = draft(*given)
            found[given[2][0].start + len(given[2][0].tokens)] = made.tokens.tolist()
            return [made]

        drafter.draft = kept
        decoder = Decoder(backbone, drafter)
        decoder.admit(Request(ROUND, max_new_tokens=60, stop_ids=()))
        for number in range(40):
            decoder.use_tree(shapes[number % len(shapes)])
            decoder.step()
        return found

    always, rarely = drafted([SPARSE.truncate(3)]), drafted([Tree.root_only(), Tree.root_only(), SPARSE.truncate(3)])
    both = always.keys() & rarely.keys()
    assert len(both) > 5 and len(always) > len(rarely)
    assert {place: rarely[place] for place in both} == {place: always[place] for place in both}
