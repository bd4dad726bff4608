"""lm-evaluation-harness over the server: its log-likelihoods are those of transformers in fp32."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from medusa_cli.api import Medusa
from tests.serving import MODEL, Served, serving, tiny_medusa

CLOSE = 1e-3
# Token ids of contexts, and of what follows them.
PAIRS = [
    ([5, 9, 20, 11, 7], [8, 4]),
    ([5, 9, 20, 11, 7], [30]),
    ([12], [13, 14, 15, 16, 17, 18]),
    ([40, 41, 42], [43, 44, 45]),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("lm_eval")


@pytest.fixture(scope="module")
def medusa(folder: Path) -> Medusa:
    return tiny_medusa(folder)


@pytest.fixture(scope="module")
def server(medusa: Medusa) -> Iterator[Served]:
    with serving(medusa, slots=4) as running:
        yield running


def likelihood(network: Any, context: list[int], rest: list[int]) -> tuple[float, bool]:
    """Returns the log probability of tokens after a context, and if each is the likeliest one."""
    with torch.inference_mode():
        logits = network(torch.tensor([context + rest])).logits[0].log_softmax(-1)
    rows = logits[len(context) - 1 : -1]
    chosen = rows[range(len(rest)), rest]
    return float(chosen.sum()), bool((rows.argmax(-1) == torch.tensor(rest)).all())


@pytest.mark.slow
def test_echoed_log_likelihoods_are_those_of_transformers(server: Served, folder: Path) -> None:
    network = AutoModelForCausalLM.from_pretrained(folder / "model", dtype=torch.float32)
    greedy = network.generate(torch.tensor([[5, 9, 20]]), max_new_tokens=4, do_sample=False)
    pairs = [*PAIRS, ([5, 9, 20], greedy[0, 3:].tolist())]
    # The body that its local-completions sends: one token is generated, and not read.
    body = {"model": MODEL, "temperature": 0, "max_tokens": 1, "logprobs": 1, "seed": 1234}
    body |= {"prompt": [context + rest for context, rest in pairs], "echo": True}
    status, _, answer = server.post(body)
    assert status == 200
    assert len(answer["choices"]) == len(pairs)
    flags = []
    for (context, rest), choice in zip(pairs, answer["choices"], strict=True):
        expected, is_greedy = likelihood(network, context, rest)
        logprobs = choice["logprobs"]["token_logprobs"][len(context) : -1]
        tops = choice["logprobs"]["top_logprobs"][len(context) : -1]
        assert sum(logprobs) == pytest.approx(expected, abs=CLOSE)
        pairs_of = zip(logprobs, tops, strict=True)
        assert all(own == max(top.values()) for own, top in pairs_of) == is_greedy
        flags.append(is_greedy)
    assert set(flags) == {True, False}


@pytest.mark.slow
def test_lm_eval_reads_the_same_from_the_server_and_from_transformers(
    server: Served, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("lm_eval")
    from lm_eval.api.instance import Instance
    from lm_eval.models.huggingface import HFLM
    from lm_eval.models.openai_completions import LocalCompletionsAPI

    monkeypatch.setenv("OPENAI_API_KEY", "none")
    model = str(folder / "model")
    theirs = HFLM(pretrained=model, dtype="float32", device="cpu", batch_size=2)
    ours = LocalCompletionsAPI(
        model=MODEL,
        base_url=f"{server.url}/v1/completions",
        tokenizer=model,
        tokenizer_backend="huggingface",
        batch_size=2,
        max_length=64,
    )
    texts = [("w1 w2 w3", " w4"), ("w1 w2 w3", " w9 w1"), ("w7", " w8 w9 w10 w11")]
    asked = [Instance("loglikelihood", {}, pair, i) for i, pair in enumerate(texts)]
    for own, other in zip(ours.loglikelihood(asked), theirs.loglikelihood(asked), strict=True):
        assert own[0] == pytest.approx(other[0], abs=CLOSE)
        assert own[1] == other[1]
    whole = [("w1 w2 w3 w4 w5 w6 w7",), ("w20 w1 w20 w1",)]
    asked = [Instance("loglikelihood_rolling", {}, text, i) for i, text in enumerate(whole)]
    rolling = [other.loglikelihood_rolling(asked) for other in (ours, theirs)]
    assert rolling[0] == pytest.approx(rolling[1], abs=CLOSE)
    settings = {"until": ["w5"], "max_gen_toks": 12}
    asked = [
        Instance("generate_until", {}, (text, {**settings}), i) for i, (text, _) in enumerate(texts)
    ]
    answers = [[text.strip() for text in other.generate_until(asked)] for other in (ours, theirs)]
    assert answers[0] == answers[1]
