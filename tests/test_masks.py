"""What is learnt from: the assistant's tokens alone, on real conversations; and no conversation sees its neighbours."""

import itertools

import pytest
import torch

from medusa_cli import assets
from medusa_cli.data.conversation import messages_of
from medusa_cli.distill.endpoint import Tokenizer
from medusa_cli.drafters import DRAFTERS, Batch
from medusa_cli.model.chat_template import encode
from medusa_cli.runs.io import Malformed, read_jsonl
from tests.helpers import tiny_backbone

WANTED = 200


def test_the_mask_is_the_assistants_words_on_real_conversations_of_several_turns() -> None:
    speaker = Tokenizer(assets.DEFAULT_MODEL)
    decode, seen, answers = speaker.tokenizer.decode, 0, 0
    for record in itertools.islice(read_jsonl(assets.sharegpt_path(), array=True), 4 * WANTED):
        try:
            messages = messages_of(record)[:8]
            tokens, spans = encode(speaker, messages)
        except Malformed:
            continue
        if len(spans) < 2 or messages[0]["role"] != "user":
            continue
        seen += 1
        answered = [m["content"] for m in messages if m["role"] == "assistant"]
        assert [decode(tokens[start:end]) for start, end in spans] == [f"{text}<|im_end|>" for text in answered]
        # What is left is the template's rendering of the same conversation with nothing said by the assistant.
        last = max(i for i, m in enumerate(messages) if m["role"] == "assistant")
        silent = [{**m, "content": "" if m["role"] == "assistant" else m["content"]} for m in messages[: last + 1]]
        expected = speaker.tokenizer.apply_chat_template(silent, tokenize=False)
        learnt = {at for start, end in spans for at in range(start, end)}
        rest = decode([token for at, token in enumerate(tokens) if at not in learnt])
        assert rest == expected.replace("assistant\n<|im_end|>", "assistant\n")
        answers += len(spans)
        if seen == WANTED:
            break
    assert seen == WANTED and answers > 2 * WANTED


@pytest.mark.parametrize("name", ["medusa", "hydra", "amphista"])
def test_packed_conversations_are_each_alone(name: str) -> None:
    backbone = tiny_backbone("llama")
    torch.manual_seed(1)
    extra = {"prefix_layers": 1} if name == "hydra" else {"attention_layers": 1} if name == "amphista" else {}
    heads = DRAFTERS[name].create(backbone, 3, 1, "own", **extra).eval()
    for weight in heads.parameters():  # fresh layers are zero and would let nothing through
        weight.data += 0.1 * torch.randn_like(weight)
    lengths = (6, 2, 9)
    hidden, following = torch.randn(sum(lengths), backbone.hidden_size), torch.randint(0, 64, (sum(lengths),))
    segment = torch.repeat_interleave(torch.arange(3), torch.tensor(lengths))
    packed = [head.detach() for head in heads.logits(backbone, Batch(hidden, following, segment))]
    for number in range(3):
        mine = segment == number
        other = Batch(
            torch.where(mine[:, None], hidden, torch.randn_like(hidden)),
            torch.where(mine, following, torch.randint(0, 64, following.shape)),
            segment,
        )
        alone = Batch(hidden[mine], following[mine], segment[mine])
        for at, (there, here) in enumerate(
            zip(heads.logits(backbone, other), heads.logits(backbone, alone), strict=True)
        ):
            # A head's target lies at + 1 places on: where that is another conversation's, nothing is learnt.
            targets = torch.nonzero(segment[at + 1 :] == segment[: -at - 1]).squeeze(1)
            rows = targets[mine[targets]]
            assert torch.allclose(packed[at][rows], there[rows], atol=1e-5)
            assert torch.allclose(packed[at][rows], here[rows - int(mine.nonzero()[0])], atol=1e-5)
