"""Conversations as token ids: those of the whole, wherever it can be cut, and no broken text let through."""

from typing import Any

import pytest

from medusa_cli.data.conversation import conversation_of
from medusa_cli.errors import UserError
from medusa_cli.model.chat_template import encode, token_ids
from medusa_cli.runs.io import Malformed
from tests.helpers import tiny_backbone


def blank_tokenizer() -> Any:
    """One like Llama's: a blank belongs to the word after it, and every text begins with one."""
    from tokenizers import Tokenizer, models, normalizers, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = ["<unk>", "<end>", "\u2581", *(f"\u2581{word}" for word in ("USER:", "BOT:", "w1", "w2", "w3", "w4"))]
    inner = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<unk>"))
    inner.normalizer = normalizers.Sequence([normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")])
    inner.pre_tokenizer = pre_tokenizers.Split("\u2581", "merged_with_next")
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=inner, unk_token="<unk>", eos_token="<end>")
    tokenizer.chat_template = (
        "{% for m in messages %}{{ 'USER: ' + m['content'] + ' BOT:' if m['role'] == 'user' else ' ' + m['content'] + "
        "eos_token }}{% endfor %}"
    )
    return tokenizer


class ChatTokenizer:
    id, tokenizer, vocab_size, eos_ids = "blank", blank_tokenizer(), 9, frozenset({1})


def test_answers_have_the_tokens_that_they_have_in_the_whole_conversation() -> None:
    messages = [{"role": role, "content": text} for role, text in
                (("user", "w1"), ("assistant", "w2 w3"), ("user", "w4"), ("assistant", "w1"))]  # fmt: skip
    tokens, spans = encode(ChatTokenizer(), messages)
    assert tokens == ChatTokenizer.tokenizer.apply_chat_template(messages, tokenize=True, return_dict=False)
    names = ChatTokenizer.tokenizer.convert_ids_to_tokens
    assert [names(tokens[start:end]) for start, end in spans] == [
        ["\u2581w2", "\u2581w3", "<end>"],
        ["\u2581w1", "<end>"],
    ]


@pytest.mark.parametrize("record", [
    {"id": "a", "messages": [{"role": "user", "content": "w1 \ud83d"}, {"role": "assistant", "content": "w2"}]},
    {"id": "a\ud83d", "tokens": [1, 2, 3], "spans": [[1, 3]]},
])  # fmt: skip
def test_half_a_character_makes_a_record_malformed(record: dict) -> None:
    with pytest.raises(Malformed, match="half a character"):
        conversation_of(record, tiny_backbone("llama"))


@pytest.mark.parametrize(
    "template",
    [
        "{{ 1 / 0 }}",
        "{{ messages + 1 }}",
        "{% for one in range(10**9) %}x{% endfor %}",
        "{{ messages[0].x.y }}",
        "{{ {",
    ],
)
def test_a_template_that_fails_is_said_to_refuse(template: str) -> None:
    backbone = tiny_backbone()
    backbone.tokenizer.chat_template = template
    with pytest.raises(UserError, match="the chat template refuses it"):
        backbone.encode_chat([{"role": "user", "content": "w1"}])


def test_a_tokenizer_with_more_tokens_than_the_model_is_refused_where_it_gives_one() -> None:
    backbone = tiny_backbone()
    backbone.tokenizer.add_special_tokens({"additional_special_tokens": [f"<more{i}>" for i in range(300)]})
    assert token_ids(backbone, "w1")
    with pytest.raises(UserError, match=rf"gives token \d+, and the model has {backbone.vocab_size}"):
        token_ids(backbone, "w1 <more299>")
