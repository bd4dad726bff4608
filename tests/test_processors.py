"""Logits processors: the tokens of transformers' generate with the same options, whatever is drafted beside them."""

import logging
import math
from collections import Counter
from typing import Any

import pytest
import torch
from transformers import (
    LogitsProcessorList,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopPLogitsWarper,
)

from medusa_cli.api import Medusa
from medusa_cli.decode import LogitsOptions, Request, Sampling, accept
from medusa_cli.decode.processors import AdditivePenalties, SequenceProcessors, sequence_processors
from medusa_cli.decode.sampler import Sampler
from medusa_cli.errors import UsageError, UserError
from medusa_cli.model import Backbone
from medusa_cli.tree import Draft, DynamicTree, Tree
from tests.helpers import (
    FASTEST,
    PROMPT,
    SPARSE,
    Oracle,
    assert_distributed,
    decoder_of,
    generate,
    save_model,
    steps_of,
    tiny_backbone,
    tiny_model,
    tokens_of,
)
from tests.test_drafters import drafter_of

COUNT = 24
PROMPTS = [PROMPT, [8], [30, 31, 32, 33, 34, 35]]
# Fields of a generation config; those of None depend on the model's own tokens.
CASES: dict[str, dict[str, Any] | None] = {
    "repetition": {"repetition_penalty": 1.3},
    "n-grams": {"no_repeat_ngram_size": 1},
    "bad words": None,
    "suppressed": None,
    "suppressed at the beginning": None,
    "shortest answer": None,
    "shortest text": None,
    "bias": {"sequence_bias": [[[5], 3.0], [[9, 20], 5.0], [[30], -4.0]]},
    "forced end": {"forced_eos_token_id": 17},
    "growing end": {"exponential_decay_length_penalty": (4, 1.5)},
    "prompt": {"encoder_repetition_penalty": 1.5, "encoder_no_repeat_ngram_size": 2},
    "watermark": {"watermarking_config": {"bias": 4.0, "seeding_scheme": "selfhash"}},
    "several": {
        "repetition_penalty": 1.6,
        "no_repeat_ngram_size": 2,
        "min_new_tokens": 20,
        "renormalize_logits": True,
    },
}
OPTIONS: dict[str, dict[str, Any]] = {
    "repetition": {"repetition_penalty": 2.0},
    "n-grams": {"no_repeat_ngram_size": 2, "repetition_penalty": 1.0},
    "bias": {"logit_bias": {5: 20.0, 30: -4}, "bad_words_ids": [[9, 20], [11]]},
    "penalties": {"presence_penalty": 2, "frequency_penalty": 1.7, "repetition_penalty": 1.0},
    "several": {
        "frequency_penalty": 1.0,
        "suppress_tokens": [9, 20],
        "min_new_tokens": 15,
        "repetition_penalty": 1.1,
    },
}
INVALID: dict[str, list[Any]] = {
    "repetition_penalty": [0.0, math.nan], "presence_penalty": [2.5], "frequency_penalty": ["much"],
    "no_repeat_ngram_size": [-1], "bad_words_ids": [[[]], [5]], "suppress_tokens": [[-1]], "min_new_tokens": [1.5],
    "logit_bias": [{5: math.inf}, [5]],
}  # fmt: skip


def theirs(
    family: str, prompt: list[int], config: dict[str, Any] | None = None, **given: Any
) -> list[int]:
    """Returns the answer of transformers' generate, after a generation config of its own."""
    model = tiny_model(family)
    model.generation_config.update(**(config or {}))
    given = {"do_sample": False, "max_new_tokens": COUNT, "pad_token_id": 0, **given}
    ids = torch.tensor([prompt])
    return model.generate(ids, attention_mask=torch.ones_like(ids), **given)[
        0, len(prompt) :
    ].tolist()


def arguments(options: dict[str, Any], prompt: list[int]) -> dict[str, Any]:
    """Returns options as transformers' generate takes them; penalties that it has not go by a slow processor."""
    options = dict(options)
    presence, frequency = (
        options.pop("presence_penalty", 0.0),
        options.pop("frequency_penalty", 0.0),
    )
    if bias := options.pop("logit_bias", None):
        options["sequence_bias"] = [[[token], float(value)] for token, value in bias.items()]

    def penalised(ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        scores = scores.clone()
        for token, count in Counter(ids[0, len(prompt) :].tolist()).items():
            scores[0, token] -= presence + frequency * count
        return scores

    return {**options, "logits_processor": LogitsProcessorList([penalised])}


def configured(family: str, config: dict[str, Any], engine: str = FASTEST) -> Backbone:
    """Returns a backbone whose model has a generation config of its own."""
    backbone = tiny_backbone(family, engine=engine)
    backbone.model.generation_config.update(**config)
    return backbone


def ours(backbone: Backbone, expected: list[int], prompt: list[int] = PROMPT, **rules: Any) -> None:
    """Checks plain answers, and those over a static and a dynamic tree."""
    rules = {"max_new_tokens": COUNT, **rules}
    oracle = Oracle([], 0, {tuple(prompt): (expected, 0.6)})
    for drafter, tree in (
        (None, None),
        (oracle, SPARSE),
        (drafter_of(backbone, "hydra"), DynamicTree(9, 3)),
    ):
        steps = list(generate(backbone, drafter, tree, prompt, **rules))
        assert tokens_of(steps) == expected, tree
        assert drafter is not oracle or len(steps) < len(expected)


@pytest.mark.slow
@pytest.mark.parametrize("family", ["llama", "gemma3"])
@pytest.mark.parametrize("case", CASES)
def test_greedy_answers_are_those_of_generate_by_the_models_own_config(
    family: str, case: str
) -> None:
    plain = theirs(family, PROMPT)
    end = plain[5]
    config = (
        CASES[case]
        or {
            "bad words": {"bad_words_ids": [[plain[3]], plain[6:8]]},
            "suppressed": {"suppress_tokens": plain[2:4]},
            "suppressed at the beginning": {"begin_suppress_tokens": plain[:1]},
            "shortest answer": {"min_new_tokens": 9, "eos_token_id": [end]},
            "shortest text": {"min_length": len(PROMPT) + 8, "eos_token_id": [end]},
        }[case]
    )
    expected = theirs(family, PROMPT, config)
    ends = [end] if "eos_token_id" in config else None
    assert expected != (plain[: plain.index(end) + 1] if ends else plain)
    ours(configured(family, config), expected, stop_ids=ends)


@pytest.mark.slow
def test_first_token_may_be_forced() -> None:
    config = {"forced_bos_token_id": 17}
    expected = theirs("llama", [8], config)
    assert expected[0] == 17
    ours(configured("llama", config), expected, [8])


@pytest.mark.slow
@pytest.mark.parametrize("family", ["llama", "qwen3"])
@pytest.mark.parametrize("case", OPTIONS)
def test_options_take_the_place_of_the_models_own(family: str, case: str) -> None:
    config, options = {"repetition_penalty": 1.3, "min_new_tokens": 3}, OPTIONS[case]
    expected = theirs(family, PROMPT, config, **arguments(options, PROMPT))
    assert expected != theirs(family, PROMPT, config)
    ours(configured(family, config), expected, logits_options=LogitsOptions(**options))


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["eager", "native", "torch"])
def test_rows_of_a_batch_have_processors_of_their_own(engine: str) -> None:
    backbone = tiny_backbone(engine=engine)
    rules = [{}, OPTIONS["penalties"], OPTIONS["several"]]
    expected = [
        theirs("llama", p, **arguments(own, p)) for p, own in zip(PROMPTS, rules, strict=True)
    ]
    assert all(
        tokens != theirs("llama", p) for p, tokens in list(zip(PROMPTS, expected, strict=True))[1:]
    )
    known = {tuple(p): (tokens, 0.6) for p, tokens in zip(PROMPTS, expected, strict=True)}
    requests = [
        Request(p, COUNT, logits_options=LogitsOptions(**own))
        for p, own in zip(PROMPTS, rules, strict=True)
    ]
    for drafter, tree in ((None, None), (Oracle([], 0, known), SPARSE)):
        answers = steps_of(decoder_of(backbone, drafter, tree, slots=3), requests)
        assert list(map(tokens_of, answers)) == expected


@pytest.mark.slow
def test_second_turn_over_cached_rows_counts_the_whole_text() -> None:
    backbone, options = tiny_backbone(), OPTIONS["several"]
    decoder, prompt = (
        decoder_of(backbone, drafter_of(backbone, "hydra"), SPARSE.truncate(3)),
        PROMPT,
    )
    for reused in (0, len(PROMPT) + 1):
        sequence, step = decoder.admit(
            Request(prompt, COUNT, logits_options=LogitsOptions(**options))
        )
        tokens = list(step.tokens)
        while not sequence.done:
            tokens += tokens_of(step for _, step in decoder.step())
        assert sequence.reused >= reused
        assert tokens == theirs("llama", prompt, **arguments(options, prompt))
        prompt = [*prompt, *tokens, 8, 30]


@pytest.mark.slow
@pytest.mark.parametrize(
    "sampling",
    [
        Sampling("exact", 1.2, 0.9, seed=5),
        Sampling("exact", 1.2, top_k=9, min_p=0.05),
        Sampling("typical", 0.7),
    ],
    ids=["nucleus", "min-p", "typical"],
)
def test_sampled_answers_do_not_depend_on_drafts(sampling: Sampling) -> None:
    backbone = configured("qwen3", {"no_repeat_ngram_size": 2, "typical_p": 0.95})
    rules = {
        "max_new_tokens": 40,
        "sampling": sampling,
        "logits_options": LogitsOptions(frequency_penalty=0.5),
    }
    plain = tokens_of(generate(backbone, None, None, PROMPT, **rules))
    bare = tokens_of(
        generate(
            tiny_backbone("qwen3"),
            None,
            None,
            PROMPT,
            **{**rules, "logits_options": LogitsOptions()},
        )
    )
    assert plain != bare
    if sampling.mode == "exact":
        ours(backbone, plain, **rules)
    else:  # accepts plausible tokens, but none that the processors forbid
        tokens = tokens_of(generate(backbone, Oracle(plain, 0.6), SPARSE, PROMPT, **rules))
        assert len({*zip(tokens, tokens[1:], strict=False)}) == len(tokens) - 1
        assert tokens[:2] == plain[:2]


def test_typical_acceptance_reads_each_node_after_its_path() -> None:
    tree = Tree.from_choices([[0], [1], [0, 0], [0, 1], [0, 0, 0]])
    draft, options = Draft(torch.tensor([4, 1, 2, 1, 3, 5]), tree), AdditivePenalties(2, 1.0, 2.0)
    rule = Sampling("typical", 1.0, epsilon=0.2, delta=0.8)
    for seed in range(40):
        logits = torch.randn(tree.size, 7, generator=torch.Generator().manual_seed(seed))
        texts = [
            torch.tensor([[6, 6, *draft.tokens[tree.path(node)].tolist()]])
            for node in range(tree.size)
        ]
        changed = torch.cat(
            [options(text, row[None]) for text, row in zip(texts, logits, strict=True)]
        )
        processors = SequenceProcessors(LogitsProcessorList([options]), torch.tensor([6, 6, 4]))
        [path] = accept(logits[None], [draft], [Sampler(rule, 0, processors)])
        assert [path] == accept(changed[None], [draft], [Sampler(rule)])


@pytest.mark.slow
@pytest.mark.parametrize("runs", [1500, 6000])
def test_sampling_keeps_the_distribution_after_processors(runs: int) -> None:
    """The first two tokens that come out through a tree are distributed as two plain draws."""
    tree, vocabulary = Tree.from_choices([[0], [1], [0, 0], [0, 1], [1, 0]]), 6
    chain = LogitsProcessorList(
        [RepetitionPenaltyLogitsProcessor(1.8), TemperatureLogitsWarper(0.9), TopPLogitsWarper(0.9)]
    )
    bigram = 1.5 * torch.randn(vocabulary, vocabulary, generator=torch.Generator().manual_seed(3))
    draft = Draft(torch.tensor([0, 1, 2, 1, 3, 4]), tree)

    def target(*text: int) -> torch.Tensor:
        return chain(torch.tensor([text]), bigram[text[-1]][None])[0].softmax(-1).double()

    seen = torch.zeros(vocabulary, vocabulary, dtype=torch.double)
    sampler = Sampler(Sampling("exact", 0.9, 0.9))
    for _ in range(runs):
        sampler.processors = SequenceProcessors(chain, torch.tensor([0]))
        [(path, bonus)] = accept(bigram[draft.tokens][None], [draft], [sampler])
        first, *rest = [*draft.tokens[path[1:]].tolist(), bonus]
        seen[first, rest[0] if rest else sampler.choose(bigram[first])] += 1
    expected = torch.stack([target(0)[first] * target(0, first) for first in range(vocabulary)])
    assert_distributed(seen, runs * expected)


@pytest.mark.quick("sampling3-config3-options3", "sampling4-config4-options4")
@pytest.mark.parametrize(
    ("sampling", "config", "options"),
    [
        (Sampling(), {"min_p": 0.1, "top_k": 5, "temperature": 0.5, "do_sample": True}, {}),
        (Sampling(), {"repetition_penalty": 1.3}, {"repetition_penalty": 1}),
        (Sampling("exact", 0.7, 0.9, 5), {"top_k": 3}, {"presence_penalty": 0}),
        (
            Sampling("exact", 0.7, min_p=0.0),
            {"min_p": 0.1},
            {"bad_words_ids": [], "logit_bias": {}},
        ),
        (Sampling("typical", 0.7), {"min_p": 0.1}, {"suppress_tokens": []}),
    ],
)
def test_nothing_to_process_costs_nothing(sampling: Sampling, config: dict, options: dict) -> None:
    backbone = configured("llama", config)
    assert sequence_processors(backbone, PROMPT, 9, [2], sampling, LogitsOptions(**options)) is None


def test_models_own_min_p_is_taken_in_sampling() -> None:
    sampling, options = Sampling("exact", 0.7), LogitsOptions()
    backbone = configured("llama", {"min_p": 1.0})
    processors = sequence_processors(backbone, PROMPT, 9, [2], sampling, options)
    logits = torch.arange(64.0)
    assert processors is not None
    assert int(processors(logits).isfinite().sum()) == 1
    rules = {"max_new_tokens": COUNT, "sampling": sampling}
    assert tokens_of(generate(backbone, None, None, PROMPT, **rules)) == theirs("llama", PROMPT)


@pytest.mark.parametrize(
    "config", [{"repetition_penalty": 1.3}, {"no_repeat_ngram_size": 2, "min_new_tokens": 3}]
)
def test_prompt_is_scored_alone_whatever_changes_the_logits(config: dict[str, Any]) -> None:
    def scores(backbone: Backbone, **options: Any) -> list[float]:
        request = Request(
            PROMPT, 0, top=0, prompt_logprobs=True, logits_options=LogitsOptions(**options)
        )
        sequence, step = decoder_of(backbone).admit(request)
        assert sequence.done
        return [likelihood.logprob for likelihood in step.likelihoods][1:]

    expected = scores(tiny_backbone())
    assert len(expected) == len(PROMPT) - 1
    assert scores(configured("llama", config, "eager")) == expected
    assert scores(tiny_backbone(), presence_penalty=1.0, logit_bias={5: 20.0}) == expected


def test_loading_names_what_is_not_done_and_refuses_what_is_not_valid(
    tmp_path: Any, caplog: pytest.LogCaptureFixture
) -> None:
    folder = save_model(tmp_path / "model")
    model = tiny_model()

    def load(**config: Any) -> Medusa:
        model.generation_config.update(**config)
        model.generation_config.save_pretrained(folder)
        return Medusa.from_pretrained(folder, drafter=None, dtype="fp32")

    with caplog.at_level(logging.INFO, "medusa_cli"):
        medusa = load(repetition_penalty=1.3, do_sample=True, temperature=0.6, num_beams=4)
    named = {
        record.levelname: record.getMessage()
        for record in caplog.records
        if "config" in record.getMessage()
    }
    assert "num_beams" in named["WARNING"]
    assert "temperature" in named["INFO"]
    assert medusa.generate(PROMPT, max_new_tokens=COUNT).tokens == theirs(
        "llama", PROMPT, {"repetition_penalty": 1.3}
    )
    with pytest.raises(UserError, match="generation_config"):
        load(num_beams=1, sequence_bias=[[[64], 1.0]])
    with pytest.raises(UserError, match="generation_config"):
        load(sequence_bias=None, no_repeat_ngram_size="many")


@pytest.mark.parametrize(
    ("name", "value"), [(name, value) for name in INVALID for value in INVALID[name]]
)
def test_invalid_options_are_named(name: str, value: Any) -> None:
    with pytest.raises(UsageError, match=f"^{name}"):
        LogitsOptions(**{name: value})


def test_top_k_holds_beside_a_processor_between_temperature_and_truncation() -> None:
    backbone = tiny_backbone()
    backbone.generation_config.top_h = 0.9
    sampling = Sampling("exact", 0.7, top_k=1)
    processors = sequence_processors(backbone, [5], 9, backbone.eos_ids, sampling, LogitsOptions())
    assert processors is not None
    assert processors.truncates
    assert int(processors(torch.randn(backbone.vocab_size)).isfinite().sum()) == 1
