"""Streamed text is the text decoded at once; an answer's text ends before a stop string, however the tokens fall."""

import random
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast

from medusa_cli.decode import Answer, Request, Step
from medusa_cli.decode.stop_strings import StopStrings
from medusa_cli.decode.text_stream import MAX_BYTE_RUN, MAX_LINE_TOKENS, TextStream
from medusa_cli.model.vocabulary import BYTES, Vocabulary
from medusa_cli.tree import Tree
from tests.helpers import (
    PROMPT,
    Oracle,
    decoder_of,
    forward,
    medusa_drafter,
    plain,
    steps_of,
    tiny_backbone,
    tokens_of,
)

BLANK = "\u2581"
DECODERS = {
    # As in the files of Llama 2 and Vicuna, and the same by another name.
    "llama": decoders.Sequence(
        [
            decoders.Replace(BLANK, " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    ),
    "metaspace": decoders.Sequence([decoders.ByteFallback(), decoders.Metaspace(BLANK, "always")]),
}
WORDS = [f"{BLANK}def", f"{BLANK}return", "f", "()", ":", f"{BLANK}x"]
PIECES = ["<unk>", "</s>", BLANK, BLANK * 3, "<0x0A>", *WORDS, "\n"]
CODE = [5, 10, 8, 9, 4, 3, 6, 10, 4, 4, 2, 2, 2, 10, 4, 3, 7]


class Decoding:
    """Stands for a backbone; decodes only."""

    vocabulary = Vocabulary(None)

    def __init__(self, kind: str) -> None:
        self._tokenizer = Tokenizer(
            models.WordLevel({piece: id for id, piece in enumerate(PIECES)}, "<unk>")
        )
        self._tokenizer.decoder = DECODERS[kind]
        self._tokenizer.add_special_tokens(["</s>"])

    def decode(self, ids, *_, **__) -> str:
        return str(self._tokenizer.decode(list(ids), skip_special_tokens=True))


def streamed(backbone: Decoding, ids: list[int], size: int) -> str:
    stream = TextStream(backbone)  # type: ignore[arg-type]
    return (
        "".join([stream.add(ids[at : at + size]) for at in range(0, len(ids), size)])
        + stream.flush()
    )


@pytest.mark.parametrize("kind", DECODERS)
def test_long_line_is_decoded_in_parts(kind: str) -> None:
    backbone, chance = Decoding(kind), random.Random(1)
    ids = [chance.randrange(2, len(PIECES) - 1) for _ in range(1500)]
    ids = [id if PIECES[id] != "<0x0A>" else 5 for id in ids]
    expected, decode, read = backbone.decode(ids), backbone.decode, []
    backbone.decode = lambda some, *_, **__: read.append(len(some)) or decode(some)  # type: ignore[method-assign]
    assert streamed(backbone, ids, 1) == expected
    assert max(read) <= 2 * MAX_LINE_TOKENS + 1


@pytest.mark.parametrize("kind", DECODERS)
def test_pieces_join_to_the_text(kind: str) -> None:
    backbone, chance = Decoding(kind), random.Random(0)
    for _ in range(200):
        ids = [chance.randrange(1, len(PIECES)) for _ in range(chance.randrange(1, 40))]
        assert streamed(backbone, ids, chance.randrange(1, 5)) == backbone.decode(ids)


class Letters:
    """A backbone whose tokens are characters."""

    tokenizer = SimpleNamespace(added_tokens_decoder={})
    vocabulary = Vocabulary(None)

    def decode(self, ids: list[int], *_, **__) -> str:
        return "".join(map(chr, ids))


def reply_to(
    text: str, sizes: list[int], stops: list[str], reason: str | None = "length"
) -> tuple[Answer, list[str]]:
    """Returns a reply to a text that came in steps of so many characters, and what it showed after each."""
    reply, shown, ids = Answer(Letters(), stops), [], [ord(letter) for letter in text]  # type: ignore[arg-type]
    for size in sizes:
        part, ids = ids[:size], ids[size:]
        pieces = reply.add(Step(part), None if ids else reason)
        shown.append("".join(piece.text for piece in pieces))
        if reply.finish_reason:
            break
    return reply, shown


@pytest.mark.parametrize("sizes", [[1] * 12, [12], [5, 7], [7, 5], [8, 4]])
def test_text_ends_before_the_first_stop_string(sizes: list[int]) -> None:
    reply, shown = reply_to("one <end> x<", sizes, ["nothing", "<end>"])
    assert reply.text == "".join(shown) == "one "
    assert reply.finish_reason == "stop"


@pytest.mark.parametrize("sizes", [[1] * 12, [12], [5, 7], [8, 4]])
def test_tokens_end_with_the_one_that_completes_the_stop_string(sizes: list[int]) -> None:
    reply, _ = reply_to("one <end> x<", sizes, ["<end>"])
    assert "".join(map(chr, reply.tokens)) == "one <end>"
    assert reply.stats.tokens == 9
    assert reply.step.tokens == reply.tokens[-len(reply.step.tokens) :]


@pytest.mark.quick("True")
@pytest.mark.parametrize("drafts", [False, True])
def test_stop_string_leaves_out_the_rest_of_a_step(drafts: bool) -> None:
    backbone = tiny_backbone()
    whole = plain(backbone, 60)
    text = backbone.decode(whole[6:8])
    drafter = Oracle(whole, 1.0) if drafts else None
    tree = Tree.chain(4) if drafts else None
    reply = Answer(backbone, [text])
    [steps] = steps_of(
        decoder_of(backbone, drafter, tree), [Request(PROMPT, 60, stop_ids=(), top=1)]
    )
    for step in steps:
        reply.add(step, None)
        if reply.finish_reason:
            break
    assert reply.tokens == whole[: len(reply.tokens)]
    assert len(reply.tokens) <= 8
    assert [likely.token for likely in reply.likelihoods] == reply.tokens
    assert text in backbone.decode(reply.tokens)
    assert text not in backbone.decode(reply.tokens[:-1])
    assert text not in reply.text


def test_stop_string_whose_characters_take_several_tokens_each() -> None:
    stop = "\u9f98\u9f98\u0e2a\u0e27" * 3

    class Bytes:
        """A backbone whose tokens are bytes."""

        tokenizer = Letters.tokenizer
        vocabulary = Vocabulary(None)

        def decode(self, ids: list[int], *_, **__) -> str:
            return bytes(ids).decode(errors="replace")

    reply = Answer(Bytes(), [stop])  # type: ignore[arg-type]
    reply.add(Step([*f"a{stop}b".encode()]), None)
    assert (reply.text, reply.finish_reason) == ("a", "stop")
    assert bytes(reply.tokens).decode() == f"a{stop}"


def test_stop_string_may_be_a_special_token_or_contain_one() -> None:
    backbone = tiny_backbone()
    whole = plain(backbone, 60)
    names = backbone.tokenizer.convert_ids_to_tokens(whole[:7])
    backbone.tokenizer.add_special_tokens({"additional_special_tokens": [names[6]]})
    first = whole.index(whole[6])
    assert backbone.decode([whole[6]]) == ""
    for stop in (names[6], f"{names[first - 1]} {names[6]}"):
        reply = Answer(backbone, [stop])
        reply.add(Step(whole), None)
        assert reply.finish_reason == "stop"
        assert reply.tokens == whole[: first + 1]
        assert stop not in reply.text


def test_beginning_of_a_stop_string_is_shown_in_the_end() -> None:
    reply, shown = reply_to("a<en b<e", [3, 2, 3], ["<end>"])
    assert shown == ["a", "<en ", "b<e"]
    assert (reply.text, reply.finish_reason) == ("a<en b<e", "length")


def test_cancelled_answer_shows_what_waited() -> None:
    reply, shown = reply_to("ab<e", [4], ["<end>"], reason=None)
    assert (shown, reply.finish_reason) == (["ab"], None)
    assert [piece.text for piece in reply.cancel()] == ["<", "e"]
    assert (reply.text, reply.finish_reason, reply.cancel()) == ("ab<e", "cancelled", [])


def test_pieces_name_accepted_draft_tokens() -> None:
    reply = Answer(Letters())  # type: ignore[arg-type]
    pieces = reply.add(Step([97, 98, 99]), None)
    assert [(piece.text, piece.accepted) for piece in pieces] == [("ab", True), ("c", False)]


def test_likelihoods_are_the_models_for_every_token() -> None:
    backbone = tiny_backbone()
    drafter, tree = medusa_drafter(backbone), Tree.from_choices([[0], [1], [0, 0], [0, 0, 0]])
    requests = [
        Request(prompt, max_new_tokens=40, stop_ids=(), top=top)
        for prompt, top in (([5, 9, 20, 11], 3), ([8, 30], 2))
    ]
    steps = steps_of(decoder_of(backbone, drafter, tree, slots=2), requests)
    assert any(len(step.tokens) > 1 for step in [*steps[0], *steps[1]])
    for request, own in zip(requests, steps, strict=True):
        answer, likely = (
            tokens_of(own),
            [likelihood for step in own for likelihood in step.likelihoods],
        )
        log_p = forward(backbone, [*request.prompt, *answer]).logits.log_softmax(-1)
        assert [likelihood.token for likelihood in likely] == answer
        for place, likelihood in enumerate(likely, len(request.prompt) - 1):
            values, ids = log_p[place].topk(request.top)
            assert likelihood.logprob == pytest.approx(
                float(log_p[place, likelihood.token]), abs=1e-4
            )
            assert [token for token, _ in likelihood.top] == ids.tolist()
            assert [value for _, value in likelihood.top] == pytest.approx(
                values.tolist(), abs=1e-4
            )


def backbone_of(tokenizer: Tokenizer, clean_up: bool = False) -> Any:
    """Returns the part of a backbone that decodes, with a tokenizer."""
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, clean_up_tokenization_spaces=clean_up, unk_token=None
    )
    backbone = tiny_backbone()
    backbone.tokenizer = fast
    vars(backbone).pop("vocabulary", None)
    return backbone


def byte_level() -> Tokenizer:
    """Returns a byte-level tokenizer whose token i is byte i."""
    tokenizer = Tokenizer(models.BPE({letter: byte for letter, byte in BYTES.items()}, []))
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def byte_fallback() -> Tokenizer:
    """Returns a tokenizer whose token i is byte i, and whose others are words."""
    names = [f"<0x{byte:02X}>" for byte in range(256)] + WORDS
    tokenizer = Tokenizer(models.BPE({name: id for id, name in enumerate(names)}, []))
    tokenizer.decoder = DECODERS["llama"]
    return tokenizer


def words_cleaned() -> Tokenizer:
    words = [
        "do",
        "n't",
        "'",
        "s",
        "'s",
        ",",
        ".",
        "n",
        "v",
        "re",
        "'re",
        "x",
        "' ",
        "  ",
        "?",
        "'ve",
    ]
    return Tokenizer(models.WordLevel({word: id for id, word in enumerate(words)}, "x"))


@pytest.mark.parametrize("size", [1, 3])
def test_parts_of_wrong_bytes_join_to_the_text(size: int) -> None:
    chance = random.Random(0)
    backbone = backbone_of(byte_level())
    for _ in range(100):
        ids = [chance.choice([0xE0, 0xA4, 0x94, 0xF0, 0x41, 0xC3, 0x0A, 0xFF]) for _ in range(60)]
        assert streamed(backbone, ids, size) == backbone.decode(ids)


def test_parts_of_byte_tokens_join_to_the_text() -> None:
    chance = random.Random(0)
    backbone = backbone_of(byte_fallback())
    text = "aé漢🙂\n" * 50
    assert streamed(backbone, [*text.encode()], 1) == text
    for _ in range(200):
        ids = []
        while len(ids) < 80:
            ids.append(256 + chance.randrange(len(WORDS)))
            ids += [
                chance.choice([0x41, 0xE0, 0xA4, 0x94, 0x0A]) for _ in range(chance.randrange(8))
            ]
        assert streamed(backbone, ids, chance.randrange(1, 5)) == backbone.decode(ids)


def test_parts_that_are_cleaned_up_join_to_the_text() -> None:
    chance = random.Random(0)
    backbone = backbone_of(words_cleaned(), clean_up=True)
    for _ in range(500):
        ids = [chance.randrange(16) for _ in range(chance.randrange(1, 30))]
        assert streamed(backbone, ids, chance.randrange(1, 5)) == backbone.decode(ids)


@pytest.mark.quick("byte_fallback")
@pytest.mark.parametrize("make", [byte_level, byte_fallback])
def test_bytes_that_are_no_character_are_shown_in_time_that_grows_with_their_number(
    make: Callable[[], Tokenizer],
) -> None:
    backbone = backbone_of(make())
    decode, read = backbone.decode, []
    backbone.decode = lambda ids, *args, **rules: (
        read.append(len(ids)) or decode(ids, *args, **rules)
    )
    stream = TextStream(backbone)
    parts = [stream.add([0xBB]) for _ in range(3000)]
    assert "".join(parts) + stream.flush() == "\ufffd" * 3000
    assert max(map(len, parts)) <= 2 * MAX_BYTE_RUN
    assert max(read) <= 2 * MAX_LINE_TOKENS + 1
    assert len(read) <= 2 * 3000


def test_all_stop_strings_are_found_as_a_search_for_each_finds_them() -> None:
    chance = random.Random(0)
    for include in (False, True):
        for _ in range(300):
            text = "".join(chance.choice("ab ") for _ in range(40))
            stops = [
                "".join(chance.choice("ab ") for _ in range(chance.randrange(1, 7)))
                for _ in range(4)
            ]
            reply, shown = Answer(Letters(), stops, include_stop=include), ""  # type: ignore[arg-type]
            for place, letter in enumerate(text, 1):
                pieces = reply.add(Step([ord(letter)]), "length" if place == len(text) else None)
                shown += "".join(piece.text for piece in pieces)
                if reply.finish_reason:
                    break
            found = [(text.find(stop) + len(stop), -len(stop)) for stop in stops if stop in text]
            end, length = min(found, default=(len(text), 0))
            assert reply.text == shown == text[: end if include else end + length]
            assert reply.finish_reason == ("stop" if found else "length")


def test_work_on_stop_strings_does_not_grow_with_their_number() -> None:
    names = {id: SimpleNamespace(content=f"<|special {id}|>", special=True) for id in range(6000)}

    class Named(Letters):
        tokenizer = SimpleNamespace(added_tokens_decoder=names)

    stops = StopStrings(Named(), [f"{number} " + "a" * 20 + "b" for number in range(1000)])  # type: ignore[arg-type]
    steps = 0
    step = stops.automaton.step

    def counted(state: int, letter: str) -> int:
        nonlocal steps
        steps += 1
        return step(state, letter)

    stops.automaton.step = counted  # type: ignore[method-assign]
    reply = Answer(Named(), stops)  # type: ignore[arg-type]
    for _ in range(500):
        reply.add(Step([ord("a")]), None)
    assert steps == 500


def test_special_tokens_are_found_in_stop_strings() -> None:
    names = ["<|a|>", "<|a|><|b|>", "b|>", "<|c|>"]
    added = {id: SimpleNamespace(content=name, special=True) for id, name in enumerate(names)}

    class Named(Letters):
        tokenizer = SimpleNamespace(added_tokens_decoder=added)

    assert StopStrings(Named(), ["x<|a|><|b|>y"]).named == {0, 1, 2}  # type: ignore[arg-type]
