"""Streamed text against the text decoded at once, with tokenizers whose decoders strip a leading blank."""

import random

import pytest
from tokenizers import Tokenizer, decoders, models

from medusa_cli.decode.stream import MAX_LINE_TOKENS, TextStream

BLANK = "\u2581"
DECODERS = {
    # As in the files of Llama 2 and Vicuna, and the same by another name.
    "llama": decoders.Sequence(
        [decoders.Replace(BLANK, " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    ),
    "metaspace": decoders.Sequence([decoders.ByteFallback(), decoders.Metaspace(BLANK, "always")]),
}
WORDS = [f"{BLANK}def", f"{BLANK}return", "f", "()", ":", f"{BLANK}x"]
PIECES = ["<unk>", "</s>", BLANK, BLANK * 3, "<0x0A>", *WORDS, "\n"]
CODE = [5, 10, 8, 9, 4, 3, 6, 10, 4, 4, 2, 2, 2, 10, 4, 3, 7]


class Backbone:
    """A backbone of which only decode is asked."""

    def __init__(self, kind: str) -> None:
        self._tokenizer = Tokenizer(models.WordLevel({piece: id for id, piece in enumerate(PIECES)}, "<unk>"))
        self._tokenizer.decoder = DECODERS[kind]
        self._tokenizer.add_special_tokens(["</s>"])

    def decode(self, ids) -> str:
        return str(self._tokenizer.decode(list(ids), skip_special_tokens=True))


def streamed(backbone: Backbone, ids: list[int], size: int) -> str:
    stream = TextStream(backbone)  # type: ignore[arg-type]
    return "".join([stream.add(ids[at : at + size]) for at in range(0, len(ids), size)]) + stream.flush()


@pytest.mark.parametrize("kind", DECODERS)
def test_streaming_keeps_the_indentation_of_every_line(kind: str) -> None:
    backbone = Backbone(kind)
    assert streamed(backbone, CODE, 1) == backbone.decode(CODE) == "def x():\n    return x\n\n    x\n   f"


@pytest.mark.parametrize("kind", DECODERS)
def test_a_long_answer_of_one_line_is_not_decoded_over_and_over(kind: str) -> None:
    backbone, chance = Backbone(kind), random.Random(1)
    ids = [chance.randrange(2, len(PIECES) - 1) for _ in range(1500)]
    ids = [id if PIECES[id] != "<0x0A>" else 5 for id in ids]
    expected, decode, read = backbone.decode(ids), backbone.decode, []
    backbone.decode = lambda some: read.append(len(some)) or decode(some)  # type: ignore[method-assign]
    assert streamed(backbone, ids, 1) == expected
    assert max(read) <= 2 * MAX_LINE_TOKENS + 1


@pytest.mark.parametrize("kind", DECODERS)
def test_any_pieces_of_any_answer_join_to_its_text(kind: str) -> None:
    backbone, chance = Backbone(kind), random.Random(0)
    for _ in range(200):
        ids = [chance.randrange(1, len(PIECES)) for _ in range(chance.randrange(1, 40))]
        assert streamed(backbone, ids, chance.randrange(1, 5)) == backbone.decode(ids)
