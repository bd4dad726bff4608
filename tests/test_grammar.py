"""Answers by a grammar: the tokens of plain constrained decoding, and its distribution, whatever is drafted."""

import json
import random
import re
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import AddedToken
from transformers import LogitsProcessorList, TemperatureLogitsWarper

from medusa_cli.api import Medusa
from medusa_cli.decode import LogitsOptions, Sampling, Step
from medusa_cli.decode.accept import accept
from medusa_cli.decode.grammar import Grammar, GrammarProcessor, closed, matcher_of
from medusa_cli.decode.policy import StaticTreePolicy
from medusa_cli.decode.processors import SequenceProcessors
from medusa_cli.decode.sampler import Sampler
from medusa_cli.errors import UsageError, UserError
from medusa_cli.files import extras
from medusa_cli.loading import LoadedModel
from medusa_cli.model import Backbone
from medusa_cli.tree import Draft, Tree
from tests.helpers import (
    END_ID,
    FASTEST,
    PROMPT,
    SPARSE,
    TREE,
    assert_distributed,
    byte_backbone,
    byte_tokenizer,
    forward,
    generate,
    medusa,
    medusa_drafter,
    medusa_json,
    save_model,
    tiny_backbone,
    tokens_of,
)
from tests.schemas import PERSON, random_schema
from tests.test_drafters import drafter_of

jsonschema = pytest.importorskip("jsonschema_rs")
pytest.importorskip("llguidance")
SAMPLED = Sampling("exact", 1.0, seed=3)
# Drafters, and what they draft; plain decoding drafts nothing.
DRAFTED: dict[str, tuple[str, Any]] = {
    "heads": ("medusa", SPARSE),
    "firp": ("firp", TREE),
    "n-grams": ("medusa", StaticTreePolicy(TREE, ngrams=True)),
}


def answers(backbone: Backbone, grammar: Grammar, drafted: str | None, **rules: Any) -> list[Step]:
    """Returns the steps of an answer that follows a grammar."""
    kind, policy = DRAFTED[drafted] if drafted else (None, None)
    drafter = kind and (
        medusa_drafter(backbone) if kind == "medusa" else drafter_of(backbone, kind)
    )
    rules = {"max_new_tokens": 400, "logits_options": LogitsOptions(grammar=grammar), **rules}
    return list(generate(backbone, drafter, policy, PROMPT, **rules))


@pytest.mark.slow
@pytest.mark.parametrize("drafted", DRAFTED)
@pytest.mark.parametrize("sampling", [Sampling(), SAMPLED], ids=["greedy", "sampled"])
def test_answers_by_a_schema_do_not_depend_on_drafts(drafted: str, sampling: Sampling) -> None:
    backbone, grammar = byte_backbone(layers=4), Grammar.of(json_schema=PERSON)
    plain = answers(backbone, grammar, None, sampling=sampling)
    steps = answers(backbone, grammar, drafted, sampling=sampling)
    assert tokens_of(steps) == tokens_of(plain)
    assert tokens_of(plain)[-1] == END_ID
    assert len(steps) < 0.8 * len(plain)
    assert all(len(step.tokens) == 1 for step in plain)
    jsonschema.validate(PERSON, json.loads(backbone.decode(tokens_of(steps))))


@pytest.mark.slow
@pytest.mark.parametrize("count", [4, 12])
def test_random_schemas_are_followed(count: int) -> None:
    chance, backbone = random.Random(1), byte_backbone()
    for number in range(count):
        schema = random_schema(chance)
        for sampling in (Sampling(), Sampling("exact", 1.0, seed=number), Sampling("typical", 0.7)):
            tokens = tokens_of(
                answers(backbone, Grammar.of(json_schema=schema), "n-grams", sampling=sampling)
            )
            assert tokens[-1] == END_ID, schema
            jsonschema.validate(schema, json.loads(backbone.decode(tokens)))


# Where one text alone may follow, its usual tokens are the only ones allowed: no text here is forced that far.
LANGUAGE = ["{", '{"', "na", "nam", "name", "tr", "true", "trua", "[]"]


def next_tokens(backbone: Backbone, text: str) -> list[int]:
    """Returns the tokens that may follow a text of LANGUAGE, the end among them: the slow, obvious way."""
    tokenizer, allowed = backbone.tokenizer, [END_ID] if text in LANGUAGE else []
    for token in range(len(tokenizer)):
        piece = tokenizer.decode([token], skip_special_tokens=True)
        if piece and any(word.startswith(text + piece) for word in LANGUAGE):
            allowed.append(token)
    return sorted(allowed)


@pytest.mark.slow
@pytest.mark.parametrize("sort", ["regex", "grammar", "gbnf"])
def test_greedy_tokens_are_the_best_allowed_ones(sort: str) -> None:
    choices = " | ".join(json.dumps(word) for word in LANGUAGE)
    escaped = "|".join(map(re.escape, LANGUAGE))
    source = {"regex": escaped, "grammar": f"start: {choices}", "gbnf": f"root ::= {choices}"}[sort]
    grammar = Grammar.of(**{"grammar" if sort == "gbnf" else sort: source})
    for seed in range(3):
        backbone = byte_backbone(seed=seed)
        expected: list[int] = []
        while END_ID not in expected:
            logits = forward(backbone, [*PROMPT, *expected]).logits[-1]
            allowed = next_tokens(backbone, backbone.decode(expected))
            expected.append(allowed[int(logits[allowed].argmax())])
        assert backbone.decode(expected) in LANGUAGE
        for drafted in (None, "heads"):
            assert tokens_of(answers(backbone, grammar, drafted)) == expected


@pytest.mark.slow
@pytest.mark.parametrize("runs", [1000, 3000])
def test_sampling_keeps_the_constrained_distribution(runs: int) -> None:
    """Texts that come out through drafts are distributed as those of plain constrained sampling."""
    backbone = byte_backbone()
    choices = " | ".join(json.dumps(word) for word in LANGUAGE)
    matcher = matcher_of(backbone, Grammar.of(grammar=f"start: {choices}"))
    bigram = 0.6 * torch.randn(320, 320, generator=torch.Generator().manual_seed(3))
    # Some drafts are allowed and some are not.
    tree = Tree.from_choices([[0], [1], [2], [0, 0], [0, 1], [1, 0], [0, 0, 0]])
    encode = backbone.tokenizer.encode
    guesses = [
        encode("{")[0],
        encode("t")[0],
        7,
        encode('"')[0],
        encode("r")[0],
        encode("r")[0],
        encode("a")[0],
    ]
    draft, seen = Draft(torch.tensor([0, *guesses]), tree), Counter[str]()

    def mass(text: str, last: int) -> dict[str, float]:
        allowed = next_tokens(backbone, text)
        chances = bigram[last, allowed].double().softmax(-1).tolist()
        total: dict[str, float] = Counter()
        for token, chance in zip(allowed, chances, strict=True):
            rest = {text: 1.0} if token == END_ID else mass(text + backbone.decode([token]), token)
            for word, share in rest.items():
                total[word] += chance * share
        return total

    sampler = Sampler(Sampling("exact", 1.0))
    for _ in range(runs):
        grammar = GrammarProcessor(matcher, 1, [END_ID])
        chain = LogitsProcessorList([grammar, TemperatureLogitsWarper(1.0)])
        sampler.processors = SequenceProcessors(chain, torch.tensor([0]), grammar)
        [(path, bonus)] = accept(bigram[draft.tokens][None], [draft], [sampler])
        tokens = [*draft.tokens[path[1:]].tolist(), bonus]
        while END_ID not in tokens:
            tokens.append(sampler.choose(bigram[tokens[-1]]))
        seen[backbone.decode(tokens)] += 1
    expected = {word: runs * share for word, share in mass("", 0).items()}
    assert set(seen) <= set(expected) == set(LANGUAGE)
    assert min(expected.values()) > 5
    assert_distributed(
        torch.tensor([seen[word] for word in expected]), torch.tensor([*expected.values()])
    )


def test_forced_tokens_are_drafted_to_the_end() -> None:
    backbone = byte_backbone()
    schema = {"type": "object", "properties": {"kind": {"const": "city"}}, "required": ["kind"]}
    grammar = Grammar.of(json_schema={**schema, "additionalProperties": False})
    steps = answers(backbone, grammar, "heads")
    assert backbone.decode(tokens_of(steps)) == '{"kind": "city"}'
    assert tokens_of(steps)[-1] == END_ID
    assert len(steps) <= 4
    assert len(answers(backbone, grammar, None)) == len(tokens_of(steps))


@pytest.mark.quick
@pytest.mark.parametrize("limit", ["max_tokens=3", 'stop="7"', 'suffix="7"'])
@pytest.mark.parametrize("drafted", [None, *DRAFTED])
def test_grammars_that_cannot_go_back_are_followed_with_drafts(
    limit: str, drafted: str | None
) -> None:
    """llguidance takes no token back of a grammar whose rules count tokens or end by a text."""
    source = (
        f'%llguidance {{}}\nstart: "A dog has " n " legs." m\nn[{limit}]: /[0-9]+/\nm: /[a-f]{{9}}/'
    )
    backbone, grammar = byte_backbone(layers=4), Grammar.of(grammar=source)
    # The digits may take the whole answer, unless a rule counts them.
    bias = {END_ID: 5.0, **{id: 5.0 for id in backbone.tokenizer.encode("7")}}
    options = LogitsOptions(grammar=grammar, logit_bias=bias)
    steps = answers(backbone, grammar, drafted, logits_options=options)
    text = backbone.decode(tokens_of(steps))
    assert re.fullmatch("A dog has [0-9]+ legs\\.[a-f]{9}", text)
    assert tokens_of(steps)[-1] == END_ID
    assert tokens_of(steps) == tokens_of(answers(backbone, grammar, None, logits_options=options))


@pytest.mark.slow
def test_forced_tokens_of_one_pass_are_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("medusa_cli.decode.policy.MAX_FORCED", 5)
    backbone = byte_backbone()
    grammar = Grammar.of(regex="x" * 40)
    steps = answers(backbone, grammar, "heads")
    assert backbone.decode(tokens_of(steps)) == "x" * 40
    assert max(step.nodes for step in steps) <= 6
    assert len(steps) < 20


def test_the_grammar_has_the_last_word() -> None:
    """Other options that forbid all that the grammar allows give way."""
    backbone = byte_backbone()
    grammar = Grammar.of(regex="yes")
    options = LogitsOptions(grammar=grammar, suppress_tokens=[*range(4, 320)], min_new_tokens=40)
    for sampling in (Sampling(), Sampling("exact", 0.8, 0.9, 5, seed=2)):
        tokens = tokens_of(
            answers(backbone, grammar, "heads", logits_options=options, sampling=sampling)
        )
        assert backbone.decode(tokens) == "yes"


def test_an_answer_beyond_the_limits_of_grammars_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    class Exhausted:
        def __init__(self, inner: Any) -> None:
            self.inner, self.broken = inner, False

        def deep_copy(self) -> "Exhausted":
            return Exhausted(self.inner.deep_copy())

        def __getattr__(self, name: str) -> Any:
            return getattr(self.inner, name)

        def compute_bitmask(self) -> bytes:
            if self.inner.is_accepting():
                self.inner.consume_token(4)  # an error, for good
            return self.inner.compute_bitmask()

    backbone = byte_backbone()
    grammar = Grammar.of(regex="a{3}a*")
    matcher = Exhausted(matcher_of(backbone, grammar))
    monkeypatch.setattr("medusa_cli.decode.processors.matcher_of", lambda *_: matcher)
    tokens = tokens_of(answers(backbone, grammar, None, max_new_tokens=30))
    assert tokens[-1] == END_ID
    assert backbone.decode(tokens) == "aaa"


@pytest.mark.slow
@pytest.mark.parametrize(
    "source",
    [
        {"grammar": "start: " + " | ".join(f'"x{i}"' for i in range(9000))},
        {"json_schema": {"type": "array", "items": {"type": "null"}, "minItems": 10**7}},
    ],
    ids=["alternatives", "items"],
)
def test_an_answer_that_the_limits_of_grammars_cut_off_says_so(source: dict[str, Any]) -> None:
    answer = Medusa(LoadedModel(byte_backbone())).generate(PROMPT, max_new_tokens=30, **source)
    assert (answer.finish_reason, len(answer.tokens) < 30) == ("length", True)


def test_objects_have_no_other_properties_than_named_ones() -> None:
    part = {"type": "object", "properties": {"const": {"type": "string"}}}
    schema = {
        "properties": {"enum": part, "free": {**part, "additionalProperties": True}},
        "default": part,
    }
    done = closed({**schema, "$defs": {"A": part}, "anyOf": [part]})
    # Combined ones are left as they are.
    assert done == {
        **schema,
        "$defs": {"A": part},
        "anyOf": [part],
    }
    done = closed({"$defs": {"A": part}, "anyOf": [part, {"allOf": [part, {}]}], "items": schema})
    shut = {**part, "additionalProperties": False}
    assert done["$defs"]["A"] == done["anyOf"][0] == done["items"]["properties"]["enum"] == shut
    assert done["anyOf"][1] == {"allOf": [part, {}]}
    assert done["items"]["default"] == part
    assert done["items"]["properties"]["free"]["additionalProperties"] is True
    assert closed({"allOf": [{"$ref": "#/$defs/A"}], "$defs": {"A": part}})["$defs"]["A"] == shut


def _has(*names: str) -> dict[str, Any]:
    return {
        "type": "object",
        "properties": {name: {"type": "boolean"} for name in names},
        "required": [*names],
    }


# Schemas that closed objects would make unsatisfiable.
OPEN: list[dict[str, Any]] = [
    {
        "allOf": [{"$ref": "#/$defs/A"}, {"$ref": "#/$defs/B"}],
        "$defs": {"A": _has("a"), "B": _has("b")},
    },
    {
        "allOf": [{"$ref": "#/$defs/A"}, _has("c")],
        "$defs": {"A": {"allOf": [{"$ref": "#/$defs/B"}]}, "B": _has("b")},
    },
    {
        "$ref": "#/definitions/A",
        "properties": {"b": {}},
        "required": ["b"],
        "definitions": {"A": _has("a")},
    },
    {
        "$ref": "#/$defs/a~1b%25",
        "anyOf": [{"$ref": "#/$defs/B"}],
        "$defs": {"a/b%": _has("a"), "B": _has("b")},
    },
    {"type": "object", "properties": {"a": {"type": "boolean"}}, "required": ["a", "b"]},
    {**_has("a"), "minProperties": 2},
    {**_has("a"), "enum": [{"a": True, "b": 1}]},
    {"$ref": "#/$defs/A", "required": ["b"], "$defs": {"A": _has("a")}},
    {
        "type": "array",
        "items": {"allOf": [_has("a"), {"$ref": "#/$defs/B"}]},
        "minItems": 1,
        "$defs": {"B": _has("b")},
    },
]


@pytest.mark.parametrize("schema", OPEN, ids=str)
def test_closing_leaves_schemas_satisfiable(schema: dict[str, Any]) -> None:
    backbone = byte_backbone()
    for seed in range(3):
        rules = {"sampling": Sampling("exact", 1.0, seed=seed), "max_new_tokens": 1500}
        tokens = tokens_of(answers(backbone, Grammar.of(json_schema=schema), None, **rules))
        if tokens[-1] == END_ID:  # open objects may go on and on
            jsonschema.validate(schema, json.loads(backbone.decode(tokens)))


@pytest.mark.quick("no-such-format")
@pytest.mark.parametrize("format", ["password", "path", "int32", "no-such-format"])
def test_unknown_formats_are_remarks(format: str) -> None:
    schema = {"type": "string", "format": format, "maxLength": 5}
    tokens = tokens_of(answers(byte_backbone(), Grammar.of(json_schema=schema), None))
    assert tokens[-1] == END_ID
    assert closed({"properties": {"format": {"format": "date"}}})["properties"]["format"] == {
        "format": "date"
    }


def test_one_of_overlapping_parts_is_followed() -> None:
    schema = {
        "oneOf": [{"type": "integer", "maximum": 9, "minimum": 0}, {"type": "number", "maximum": 9}]
    }
    backbone = byte_backbone()
    tokens = tokens_of(answers(backbone, Grammar.of(json_schema=schema), None, max_new_tokens=40))
    assert float(backbone.decode(tokens)) <= 9


def bracketed_backbone() -> Backbone:
    """Returns a tiny model whose vocabulary has `<tool_call>` as Qwen's: an added token that is not special."""
    backbone = byte_backbone()
    backbone.tokenizer.add_tokens(
        [AddedToken(text, special=False, normalized=False) for text in ADDED]
    )
    tokenizer, backbone = (
        backbone.tokenizer,
        tiny_backbone(vocab=len(backbone.tokenizer), positions=2048, engine=FASTEST),
    )
    backbone.tokenizer = tokenizer
    return backbone


ADDED = ("<tool_call>", "</tool_call>", "[CALL]", "<t>")
BRACKETED: list[tuple[dict[str, Any], str]] = [
    ({"regex": "<tool_call>x{2}"}, "<tool_call>xx"),
    ({"json_schema": {"const": "a<tool_call>b"}}, '"a<tool_call>b"'),
    ({"json_schema": {"enum": ["<end>"]}}, '"<end>"'),
    ({"grammar": 'start: "<tool_call>\\n" /<t>y/ // <tool_call>'}, "<tool_call>\n<t>y"),
    ({"grammar": 'start: <tool_call> "[CALL]" </tool_call>'}, "<tool_call>[CALL]</tool_call>"),
    ({"grammar": 'root ::= "<tool_call>" "x"'}, "<tool_call>x"),
]


@pytest.mark.quick("None-{'regex': '<tool_call>x{2}'}")
@pytest.mark.parametrize(
    ("source", "text"), BRACKETED, ids=[str(source) for source, _ in BRACKETED]
)
@pytest.mark.parametrize("drafted", [None, "heads"])
def test_texts_that_are_added_tokens_are_followed(
    source: dict[str, Any], text: str, drafted: str | None
) -> None:
    backbone = bracketed_backbone()
    tokens = tokens_of(answers(backbone, Grammar.of(**source), drafted))
    assert tokens[-1] == END_ID
    assert backbone.decode(tokens) == text
    named = "<tool_call>" in source.get("grammar", "").split('"')[0]
    assert (backbone.tokenizer.convert_tokens_to_ids("<tool_call>") in tokens) == named


def test_an_answer_ends_where_the_parser_refuses_what_it_allowed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Refusing:
        """Follows a grammar, but takes no third token."""

        def __init__(self, inner: Any) -> None:
            self.inner, self.count = inner, 0

        def deep_copy(self) -> "Refusing":
            return Refusing(self.inner.deep_copy())

        def try_consume_tokens(self, tokens: list[int]) -> int:
            taken = self.inner.try_consume_tokens(tokens[: max(0, 2 - self.count)])
            self.count += taken
            return taken

        def rollback(self, count: int) -> None:
            self.count -= count
            self.inner.rollback(count)

        def __getattr__(self, name: str) -> Any:
            return getattr(self.inner, name)

    backbone = byte_backbone()
    matcher = Refusing(matcher_of(backbone, Grammar.of(regex="[ab]{9}")))
    monkeypatch.setattr("medusa_cli.decode.processors.matcher_of", lambda *_: matcher)
    answer = Medusa(LoadedModel(backbone)).generate(PROMPT, max_new_tokens=30, regex="[ab]{9}")
    assert answer.tokens[-1] == END_ID
    assert len(answer.tokens) <= 4
    assert answer.finish_reason == "length"
    answer = Medusa(LoadedModel(backbone)).generate(
        PROMPT, max_new_tokens=30, regex="[ab]{9}", stop_ids=()
    )
    assert set(answer.text) <= {"a", "b"}
    assert answer.finish_reason == "length"


# Definitions that refer to one another in a chain, longer than a recursive parser can follow.
CHAIN = {
    "$ref": "#/$defs/0",
    "$defs": {**{str(i): {"items": {"$ref": f"#/$defs/{i + 1}"}} for i in range(9999)}, "9999": {}},
}


@pytest.mark.quick(
    "sources1-json_schema", "sources10-grammar", "sources13-regex", "sources3-json_schema"
)
@pytest.mark.parametrize(
    ("sources", "name"),
    [
        ({"json_schema": "{"}, "json_schema"),
        ({"json_schema": [1]}, "json_schema"),
        ({"json_schema": {"type": "objekt"}}, "json_schema"),
        ({"json_schema": {"uniqueItems": True, "type": "array"}}, "json_schema"),
        ({"json_schema": {"$ref": "#/$defs/none"}}, "json_schema"),
        ({"json_schema": {"default": object()}}, "json_schema"),
        ({"regex": "("}, "regex"),
        ({"regex": ""}, "regex"),
        ({"grammar": "start: x"}, "grammar"),
        ({"grammar": "root ::= ("}, "grammar"),
        (
            {
                "grammar": "start: a0"
                + "".join(f"\na{i}: a{i + 1}" for i in range(9999))
                + '\na9999: "y"'
            },
            "grammar",
        ),
        ({"json_schema": CHAIN}, "json_schema"),
        ({"grammar": "start: " + 9999 * "(" + '"a"' + 9999 * ")"}, "grammar"),
        ({"regex": 9999 * "(" + "a" + 9999 * ")"}, "regex"),
        ({"json_schema": 9999 * '{"items": ' + "{}" + 9999 * "}"}, "json_schema"),
        ({"grammar": "neither"}, "grammar"),
        ({"grammar": "start: start"}, "grammar"),
        ({"json_schema": {"$ref": "#"}}, "json_schema"),
        ({"regex": "a", "json_schema": {}}, "json_schema"),
    ],
)
def test_bad_grammars_are_named(sources: dict[str, Any], name: str) -> None:
    loaded = Medusa(LoadedModel(byte_backbone()))
    with pytest.raises(UsageError) as raised:
        loaded.request(PROMPT, **sources)
    assert raised.value.setting == name
    assert "\n" not in raised.value.text


def test_a_missing_package_and_a_foreign_tokenizer_are_named(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    grammar = Grammar.of(regex="a")
    assert grammar is not None
    with pytest.raises(UserError, match="tokenizer"):
        matcher_of(tiny_backbone(), grammar)
    monkeypatch.setattr(extras, "has_package", lambda name: False)
    with pytest.raises(UserError, match=r"\[grammar\]"):
        matcher_of(byte_backbone(), grammar)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = save_model(tmp_path_factory.mktemp("bytes") / "model", vocab=320, positions=2048)
    byte_tokenizer().save_pretrained(folder)
    return folder


@pytest.mark.slow
def test_chat_answers_by_a_form(model: str, tmp_path: Path) -> None:
    (tmp_path / "schema.json").write_text(json.dumps(PERSON))
    (tmp_path / "grammar.lark").write_text('start: "yes" | "no"')
    common = ["chat", "--model", model, "--lookup", "--dtype", "fp32", "--prompt", "Ada"]
    jsonschema.validate(
        PERSON,
        json.loads(medusa_json(*common, "--json-schema", tmp_path / "schema.json")["answer"]),
    )
    assert medusa_json(*common, "--grammar", tmp_path / "grammar.lark")["answer"] in ("yes", "no")
    assert re.fullmatch("[ab]{4}", medusa_json(*common, "--regex", "[ab]{4}")["answer"])


@pytest.mark.parametrize(
    ("words", "code", "name"),
    [
        (["--json-schema", "missing.json"], 1, "missing.json"),
        (["--regex", "("], 2, "--regex"),
        (["--regex", "a", "--json-schema", "SCHEMA"], 2, "--regex"),
    ],
)
def test_chat_names_a_bad_form(
    model: str, tmp_path: Path, words: list[str], code: int, name: str
) -> None:
    (tmp_path / "schema.json").write_text(json.dumps(PERSON))
    words = [str(tmp_path / "schema.json") if word == "SCHEMA" else word for word in words]
    common = ["chat", "--model", model, "--baseline", "--dtype", "fp32", "--prompt", "Ada"]
    result = medusa(*common, *words, exit_code=code)
    assert name in result.output
    assert "Traceback" not in result.output
