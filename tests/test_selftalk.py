"""Self-talk and what filters the conversations: turns the model writes itself, duplicates, short answers."""

import json
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from medusa_cli.backbone import Backbone
from medusa_cli.cli import app
from medusa_cli.distilling import Distilled, Seed, Settings, distill
from medusa_cli.distilling.filters import unique
from medusa_cli.distilling.selftalk import check_self_talk, user_turn
from medusa_cli.errors import UserError
from tests import passes
from tests.runs import save_model
from tests.tiny import END_ID, tiny_backbone

SEEDS = [Seed(f"s{i}", (f"w{i} w{i + 2}", "never asked")) for i in range(6)]


def talkative() -> Backbone:
    """A tiny model whose turns end soon: a random one hardly ever says its end token."""
    backbone = tiny_backbone("llama")
    with torch.no_grad():
        backbone.model.get_output_embeddings().weight[END_ID] *= 2.0
    return backbone


@pytest.fixture(scope="module")
def made() -> tuple[Backbone, list[Distilled]]:
    backbone = talkative()
    settings = Settings(max_new_tokens=24, batch_size=3, capacity=400, max_turns=3, self_talk=True)
    told: list[int] = []
    samples = list(distill(backbone, SEEDS, settings, on_tokens=told.append))
    assert sum(told) == sum(end - start for one in samples for start, end in one.spans), "questions are no answers"
    return backbone, samples


def test_the_model_writes_the_users_turns(made: tuple[Backbone, list[Distilled]]) -> None:
    backbone, samples = made
    assert len(samples) == len(SEEDS) and any(len(one.spans) > 1 for one in samples)
    for one in samples:
        assert one.messages[0]["content"] == SEEDS[int(one.id[1:])].turns[0]
        assert [m["role"] for m in one.messages] == ["user", "assistant"] * len(one.spans) and len(one.spans) <= 3
        assert all(m["content"].strip() for m in one.messages if m["role"] == "user")
        assert "never asked" not in json.dumps(one.messages)
        for at in range(2, len(one.messages), 2):  # each question is what the model says after the user's header
            before = _tokens_before(backbone, one, at)
            said = []
            while len(said) < 128 and (not said or said[-1] != END_ID):
                out = passes.run(backbone, before + said)
                said.append(int(out.logits[-1].argmax()))
            assert backbone.decode(said).strip() == one.messages[at]["content"]


def _tokens_before(backbone: Backbone, one: Distilled, at: int) -> list[int]:
    end = one.spans[at // 2 - 1][1]
    header = user_turn(backbone, one.messages[:at])
    assert header is not None
    return one.tokens[:end] + (header[1:] if header[0] == one.tokens[end - 1] else header)


def test_answers_and_states_are_those_of_the_conversation_as_it_reads(
    made: tuple[Backbone, list[Distilled]],
) -> None:
    backbone, samples = made
    for one in samples:
        out = passes.run(backbone, one.tokens)
        places = torch.cat([torch.arange(start - 1, end - 1) for start, end in one.spans])
        assert out.logits[places].argmax(-1).tolist() == [t for s, e in one.spans for t in one.tokens[s:e]]
        assert torch.allclose(one.states.float(), out.hidden[:-1], rtol=2**-8, atol=1e-4)  # kept in bf16


def test_templates_that_cannot_play_both_roles_are_refused() -> None:
    backbone = tiny_backbone("llama")
    check_self_talk(backbone)
    backbone.tokenizer.chat_template = backbone.tokenizer.chat_template.replace(
        "' ' + message['content'] + ' <end> '",
        "' ' + message['content'] + (' <end> ' if message['role'] == 'assistant' else ' ')",
    )
    with pytest.raises(UserError, match="ends a user's turn without an end token"):
        check_self_talk(backbone)
    backbone.tokenizer.chat_template = "{% for m in messages[-1:] %}{{ m['content'] }} <end> {% endfor %}"
    with pytest.raises(UserError, match="cannot be cut before a user's turn"):
        check_self_talk(backbone)


def test_seeds_that_ask_the_same_are_answered_once() -> None:
    seeds = [
        Seed("a", ("Hello  there",)),
        Seed("b", (" hello\nTHERE ", "more")),
        Seed("c", ("hello there!",)),
        Seed("d", ("hello there",), system="be brief"),
        Seed("e", ("Ｈello there",)),
    ]
    assert [seed.id for seed in unique(seeds)] == ["a", "c", "d"]
    assert [seed.id for seed in unique(seeds, {"b"})] == ["b", "c", "d"]


def test_the_command_counts_what_it_leaves_out_and_does_not_ask_for_it_again(tmp_path: Path) -> None:
    model = save_model(tmp_path / "model")
    rows = [{"id": f"k{i}", "messages": [{"role": "user", "content": f"w{i % 9}"}]} for i in range(12)]
    seed = tmp_path / "seed.jsonl"
    seed.write_text("\n".join(map(json.dumps, rows)) + "\n")
    words = ["distill", "--seed", str(seed), "--run", str(tmp_path / "run"), "--model", model, "--dtype", "fp32",
             "--max-new-tokens", "40", "--json"]  # fmt: skip
    runner = CliRunner()
    first = json.loads(runner.invoke(app, [*words, "--min-answer-tokens", "40"]).stdout)
    assert first["duplicates"] == 3 and first["conversations"] + first["dropped"] == 9 and first["dropped"] > 0
    again = runner.invoke(app, [*words, "--min-answer-tokens", "40"])
    summary = json.loads(again.stdout)
    assert summary["new_tokens"] == 0 and summary["dropped"] == first["dropped"]
    assert "as they ask what another asks: 3" in again.stderr and "conversations were dropped" in again.stderr
    rest = json.loads(runner.invoke(app, words).stdout)
    assert rest["conversations"] == 9 and rest["dropped"] == 0


def test_self_talk_needs_the_model_here(tmp_path: Path) -> None:
    done = CliRunner().invoke(app, ["distill", "--self-talk", "--endpoint", "http://x", "--run", str(tmp_path / "r")])
    assert done.exit_code == 2 and "--self-talk needs the model here" in done.stderr
