"""With one seed, a sampled answer is the same with and without drafts, alone and beside others."""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from medusa_cli.api import Medusa
from medusa_cli.decode import LogitsOptions, Request, Sampling
from medusa_cli.loading import LoadedModel
from tests.helpers import (
    PROMPT,
    attach,
    decoder_of,
    generate,
    generate_plain,
    tiny_backbone,
    tokens_of,
)
from tests.serving import IDS, MODEL, serving, tiny_medusa
from tests.test_drafters import drafter_of
from tests.test_ngram import ROUND, policies

LIMITS: dict[str, Any] = {"max_new_tokens": 32, "stop_ids": ()}
CUTS: dict[str, dict[str, float]] = {
    "whole": {},
    "cut": {"top_p": 0.95, "top_k": 20, "min_p": 0.01},
}


def exact(seed: int, **cuts: Any) -> Sampling:
    return Sampling("exact", 0.8, seed=seed, **cuts)


@pytest.mark.quick("whole-None")
@pytest.mark.parametrize("quantize", [None, "int8"])
@pytest.mark.parametrize("cuts", CUTS.values(), ids=list(CUTS))
def test_drafts_do_not_change_a_sampled_answer(cuts: dict, quantize: str | None) -> None:
    backbone = tiny_backbone("qwen3")
    attach(backbone, "native", quantize=quantize)
    for seed in range(2):
        rules = {**LIMITS, "sampling": exact(seed, **cuts)}
        expected = tokens_of(generate_plain(backbone, ROUND, **rules))
        for kind, policy in policies().items():
            drafter = None if kind == "alone" else drafter_of(backbone, "hydra-draft")
            answer = tokens_of(generate(backbone, drafter, policy, ROUND, **rules))
            assert answer == expected, (kind, seed)


@pytest.mark.slow
def test_drafts_do_not_change_a_sampled_answer_with_a_penalty() -> None:
    backbone = tiny_backbone("gemma3", engine="native")
    options = LogitsOptions(repetition_penalty=1.2, frequency_penalty=0.3)
    for seed in range(2):
        rules = {**LIMITS, "sampling": exact(seed), "logits_options": options}
        expected = tokens_of(generate_plain(backbone, ROUND, **rules))
        for kind, policy in policies().items():
            drafter = None if kind == "alone" else drafter_of(backbone, "hydra-draft")
            answer = tokens_of(generate(backbone, drafter, policy, ROUND, **rules))
            assert answer == expected, (kind, seed)


@pytest.mark.quick("adaptive")
@pytest.mark.parametrize("kind", ["static", "dynamic", "adaptive", "alone"])
def test_neighbours_do_not_change_a_sampled_answer(kind: str) -> None:
    backbone = tiny_backbone("qwen3", engine="native")
    drafter = None if kind == "alone" else drafter_of(backbone, "hydra-draft")
    prompts = [ROUND, PROMPT, ROUND[3:], [*PROMPT, *PROMPT, *PROMPT]]
    requests = [Request(prompt, sampling=exact(7), **LIMITS) for prompt in prompts]
    decoder = decoder_of(backbone, drafter, policies()[kind], slots=3)
    answers: list[list[int]] = [[] for _ in prompts]
    for sequence, step in decoder.run(requests):
        answers[sequence.number] += step.tokens
    for number, prompt in enumerate(prompts):
        # The number of a request in a batch selects its random stream.
        rules = {**LIMITS, "sampling": exact(7 + number)}
        assert answers[number] == tokens_of(generate_plain(backbone, prompt, **rules))


@pytest.mark.slow
def test_a_server_gives_one_answer_to_one_seed(tmp_path: Path) -> None:
    drafted = tiny_medusa(tmp_path)
    plain = Medusa(LoadedModel(drafted.backbone))

    def answers(medusa: Medusa) -> list[str]:
        def ask(seed: int) -> str:
            body = {"model": MODEL, "prompt": IDS, "max_tokens": 40, "temperature": 0.8}
            body |= {"seed": seed, "ignore_eos": True, "top_p": 0.95}
            status, _, reply = server.post(body)
            assert status == 200, reply
            return reply["choices"][0]["text"]

        with serving(medusa) as server, ThreadPoolExecutor(6) as pool:
            return list(pool.map(ask, range(6)))

    expected = answers(plain)
    assert len(set(expected)) == 6
    assert answers(drafted) == expected
