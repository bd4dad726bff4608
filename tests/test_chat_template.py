"""Chat templates: token ids and answer spans, templates given for a run, and templates or texts that fail."""

import itertools
import json
import resource
import signal
import time
from pathlib import Path
from typing import Any

import pytest

from medusa_cli import Medusa
from medusa_cli.data.conversation import conversation_of, messages_of
from medusa_cli.distill.endpoint import Tokenizer
from medusa_cli.errors import UserError
from medusa_cli.files import catalogue, fetch, process
from medusa_cli.files.io import Malformed, ReadReport, read_jsonl
from medusa_cli.model import chat_template
from medusa_cli.model.chat_template import encode, token_ids
from medusa_cli.runs.recipe_files import load_recipe
from medusa_cli.runs.run import Run
from medusa_cli.serve.templates import TemplateProcess
from tests.helpers import (
    CHAT_TEMPLATE,
    medusa,
    save_model,
    tiny_backbone,
    tiny_tokenizer,
    write_lines,
)

RECIPES = Path(__file__).parent.parent / "recipes"
SYSTEM = (
    "A chat between a curious user and an artificial intelligence assistant. "
    "The assistant gives helpful, detailed, and polite answers to the user's questions."
)


@pytest.mark.quick("20")
@pytest.mark.parametrize("conversations", [20, 100])
def test_spans_are_the_answers_of_real_conversations(conversations: int) -> None:
    model = Tokenizer(catalogue.SMALL_MODEL)
    decode, checked = model.tokenizer.decode, 0
    for record in itertools.islice(
        read_jsonl(fetch.sharegpt_path(), array=True), 4 * conversations
    ):
        try:
            messages = messages_of(record)[:8]
            tokens, spans = encode(model, messages)
        except Malformed:
            continue
        if len(spans) < 2 or messages[0]["role"] != "user":
            continue
        answers = [m["content"] for m in messages if m["role"] == "assistant"]
        assert [decode(tokens[start:end]) for start, end in spans] == [
            f"{text}<|im_end|>" for text in answers
        ]
        # The other tokens are the template's rendering of the conversation with empty answers.
        last = max(i for i, m in enumerate(messages) if m["role"] == "assistant")
        silent = [
            {**m, "content": "" if m["role"] == "assistant" else m["content"]}
            for m in messages[: last + 1]
        ]
        expected = model.tokenizer.apply_chat_template(silent, tokenize=False)
        inside = {i for start, end in spans for i in range(start, end)}
        rest = decode([token for i, token in enumerate(tokens) if i not in inside])
        assert rest == expected.replace("assistant\n<|im_end|>", "assistant\n")
        checked += 1
        if checked == conversations:
            break
    assert checked == conversations


def llama_tokenizer() -> Any:
    """Returns a tokenizer like Llama's: a blank belongs to the word after it, and every text begins with one."""
    from tokenizers import Tokenizer, models, normalizers, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = [
        "<unk>",
        "<end>",
        "\u2581",
        *(f"\u2581{word}" for word in ("USER:", "BOT:", "w1", "w2", "w3", "w4")),
    ]
    inner = Tokenizer(
        models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<unk>")
    )
    inner.normalizer = normalizers.Sequence(
        [normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")]
    )
    inner.pre_tokenizer = pre_tokenizers.Split("\u2581", "merged_with_next")
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=inner, unk_token="<unk>", eos_token="<end>"
    )
    tokenizer.chat_template = (
        "{% for m in messages %}{{ 'USER: ' + m['content'] + ' BOT:' if m['role'] == 'user' else ' ' + m['content'] + "
        "eos_token }}{% endfor %}"
    )
    return tokenizer


class LlamaLike:
    id, tokenizer, vocab_size, eos_ids = "llama-like", llama_tokenizer(), 9, frozenset({1})


def test_answers_have_their_tokens_of_the_whole_conversation() -> None:
    turns = (("user", "w1"), ("assistant", "w2 w3"), ("user", "w4"), ("assistant", "w1"))
    messages = [{"role": role, "content": text} for role, text in turns]
    tokens, spans = encode(LlamaLike(), messages)
    assert tokens == LlamaLike.tokenizer.apply_chat_template(
        messages, tokenize=True, return_dict=False
    )
    names = [LlamaLike.tokenizer.convert_ids_to_tokens(tokens[start:end]) for start, end in spans]
    assert names == [["\u2581w2", "\u2581w3", "<end>"], ["\u2581w1", "<end>"]]


@pytest.mark.parametrize("record", [
    {"id": "a", "messages": [{"role": "user", "content": "w1 \ud83d"}, {"role": "assistant", "content": "w2"}]},
    {"id": "a\ud83d", "tokens": [1, 2, 3], "spans": [[1, 3]]},
])  # fmt: skip
def test_half_a_character_makes_a_record_malformed(record: dict) -> None:
    with pytest.raises(Malformed, match="half a character"):
        conversation_of(record, tiny_backbone(), ReadReport())


@pytest.mark.parametrize(
    "template", [None, "{{ 1 / 0 }}", "{{ messages + 1 }}", "{{ messages[0].x.y }}", "{{ {"]
)
def test_missing_or_failing_template_is_refused(template: str | None) -> None:
    backbone = tiny_backbone()
    backbone.tokenizer.chat_template = template
    with pytest.raises(UserError, match="chat template"):
        backbone.encode_chat([{"role": "user", "content": "w1"}])


def test_token_ids_beyond_the_models_vocabulary_are_refused() -> None:
    backbone = tiny_backbone()
    backbone.tokenizer.add_special_tokens(
        {"additional_special_tokens": [f"<more{i}>" for i in range(300)]}
    )
    assert token_ids(backbone, "w1")
    with pytest.raises(
        UserError, match=rf"gives token \d+, and the model has {backbone.vocab_size}"
    ):
        token_ids(backbone, "w1 <more299>")


def test_vicunas_template_equals_its_authors() -> None:
    tokenizer = tiny_tokenizer()
    tokenizer.add_special_tokens({"bos_token": "<s>", "eos_token": "</s>"})
    tokenizer.chat_template = load_recipe(RECIPES / "vicuna-7b-medusa1.yaml").chat_template
    turns = [("user", "Hello!"), ("assistant", "Hi!"), ("user", "How are you?")]
    messages = [{"role": role, "content": text} for role, text in turns]
    prompt = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert prompt == f"<s>{SYSTEM} USER: Hello! ASSISTANT: Hi!</s>USER: How are you? ASSISTANT:"
    brief = [{"role": "system", "content": "Be brief."}, *messages[:2]]
    text = tokenizer.apply_chat_template(brief, tokenize=False)
    assert text == "<s>Be brief. USER: Hello! ASSISTANT: Hi!</s>"


@pytest.fixture
def bare(tmp_path: Path) -> str:
    """Saves a tiny model whose tokenizer has no template."""
    model = Path(save_model(tmp_path / "model"))
    (model / "chat_template.jinja").unlink()
    return str(model)


@pytest.fixture
def words(bare: str, tmp_path: Path) -> list[str]:
    """Returns `distill` with seeds, beside a recipe that names the model and a template."""
    (tmp_path / "tiny.jinja").write_text(CHAT_TEMPLATE)
    (tmp_path / "recipe.yaml").write_text(f"model: {bare}\nchat_template: tiny.jinja\n")
    rows = [
        {"id": f"k{i}", "messages": [{"role": "user", "content": f"w{i}"}] * 2} for i in range(12)
    ]
    seeds = str(write_lines(tmp_path / "seed.jsonl", rows))
    return ["distill", "--seed", seeds, "--dtype", "fp32", "--max-new-tokens", "8", "--run", str(tmp_path / "run"),
            "--json"]  # fmt: skip


@pytest.mark.slow
def test_every_command_on_a_run_uses_the_template_of_its_distillation(
    words: list[str], bare: str, tmp_path: Path
) -> None:
    run, other = str(tmp_path / "run"), str(tmp_path / "other")
    done = medusa(*words, tmp_path / "recipe.yaml")
    assert json.loads(done.stdout)["conversations"] == 12
    # The template lays out conversations without token ids as well.
    lines = [json.loads(line) for line in Path(run, "distill.jsonl").read_text().splitlines()]
    raw = write_lines(
        tmp_path / "raw.jsonl", [{"id": line["id"], "messages": line["messages"]} for line in lines]
    )
    settings = [
        "--dtype",
        "fp32",
        "drafter.vocabulary=own",
        "drafter.num_heads=2",
        "train.max_tokens=64",
    ]
    for more in (["--run", run], ["--run", f"{run}/inner", "--data", raw],
                 ["--run", other, "--from", run, "train.stage=2", "--data", raw]):  # fmt: skip
        medusa("train", *more, *settings)
    for name in (run, other):
        output = Path(name, "calibration.json")
        medusa("calibrate", "--run", name, "--data", raw, "--output", output, "--dtype", "fp32")
        medusa("tree", "--run", name, "--budget", "4")
        medusa("chat", "--run", name, "--prompt", "w1", "--max-new-tokens", "4", "--dtype", "fp32")
    inner = Run(Path(run, "inner"))
    assert Run(Path(run)).chat_template == inner.chat_template == CHAT_TEMPLATE
    assert inner.owner is not None
    assert inner.owner["id"] == bare


def test_distillation_continues_with_its_own_template_alone(
    words: list[str], bare: str, tmp_path: Path
) -> None:
    words = [*words, "--model", bare]
    assert "chat template" in medusa(*words, exit_code=1).stderr
    template, other = tmp_path / "tiny.jinja", tmp_path / "other.jinja"
    first = medusa(*words, "--chat-template", template, "--max-samples", "3")
    assert json.loads(first.stdout)["conversations"] == 3
    assert json.loads(medusa(*words).stdout)["conversations"] == 12
    other.write_text(CHAT_TEMPLATE + "\n")
    assert "chat template" in medusa(*words, "--chat-template", other, exit_code=1).stderr


def test_template_does_not_join_conversations_without_it(words: list[str], tmp_path: Path) -> None:
    own = save_model(tmp_path / "own")
    medusa(*words, "--model", own, "--max-samples", "3")
    medusa(*words, "--model", own, "--chat-template", tmp_path / "tiny.jinja", exit_code=1)
    assert Run(tmp_path / "run").chat_template is None


LIMITS = resource.getrlimit(resource.RLIMIT_AS)


@pytest.mark.quick("{{ 'a' * 20000000 }}", "{{ 'a' * 99999999999 }}")
@pytest.mark.parametrize(
    "template",
    [
        "{{ 'a' * 20000000 }}",
        "{{ 'a' * 99999999999 }}",
        "{% set ns = namespace(text='ab') %}{% for i in range(60) %}{% set ns.text = ns.text ~ ns.text %}{% endfor %}",
        "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
    ],
)
def test_a_template_is_bounded_in_time_and_memory(
    template: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(chat_template, "MAX_SECONDS", 0.5)
    monkeypatch.setattr(chat_template, "MAX_BYTES", 1 << 26)
    monkeypatch.setattr(process, "owned", True)
    limits = resource.getrlimit(resource.RLIMIT_AS)
    model = save_model(tmp_path / "model")
    (tmp_path / "model" / "chat_template.jinja").write_text(template)
    with pytest.raises(UserError, match="template"):
        Medusa.from_pretrained(model, drafter=None, dtype="fp32")
    assert resource.getrlimit(resource.RLIMIT_AS) == limits


@pytest.mark.quick("0.2-True")
@pytest.mark.parametrize("owned", [False, True])
@pytest.mark.parametrize("left", [0.0, 0.2, 60.0])
def test_the_callers_alarm_is_given_back(
    monkeypatch: pytest.MonkeyPatch, owned: bool, left: float
) -> None:
    """A template that is refused, too, leaves the alarm's handler, its remaining time and its interval."""
    monkeypatch.setattr(process, "owned", owned)
    monkeypatch.setattr(chat_template, "MAX_SECONDS", 0.5)
    rung: list[int] = []
    before = signal.signal(signal.SIGALRM, lambda number, frame: rung.append(number))
    try:
        signal.setitimer(signal.ITIMER_REAL, left, 300.0 if left else 0.0)
        with pytest.raises(TimeoutError), chat_template._bounded():
            assert (resource.getrlimit(resource.RLIMIT_AS) == LIMITS) is not owned
            while True:
                pass
        remaining, interval = signal.getitimer(signal.ITIMER_REAL)
        assert signal.getsignal(signal.SIGALRM) is not before
        assert interval == (300 if left else 0)
        if left == 0.2:  # it fell due meanwhile
            while not rung:
                time.sleep(0.01)
        else:
            assert not rung
            assert remaining < left - 0.4 if left else remaining == 0
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    assert resource.getrlimit(resource.RLIMIT_AS) == LIMITS


@pytest.mark.quick("30.0")
@pytest.mark.parametrize("tick", [0.1, 30.0])
def test_a_caller_keeps_its_memory_while_a_template_is_rendered(
    monkeypatch: pytest.MonkeyPatch, tick: float
) -> None:
    monkeypatch.setattr(chat_template, "MAX_BYTES", 1 << 26)
    monkeypatch.setattr(chat_template, "TICK_S", tick)
    text = "ab"
    if tick > 1:  # another thread may take as much as it likes
        with chat_template._bounded():
            assert len(bytearray(1 << 28)) == 1 << 28
        return
    with pytest.raises(MemoryError), chat_template._bounded():
        for _ in range(29):
            text += text
            time.sleep(0.02)


def test_a_renderer_that_does_not_start_is_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = save_model(tmp_path / "model")
    messages = [{"role": "user", "content": "w1"}]
    with Medusa.from_pretrained(model, drafter=None, dtype="fp32") as medusa:
        process = TemplateProcess(medusa.backbone, 20.0)
        try:
            monkeypatch.setattr("medusa_cli.serve.templates.START_S", -1.0)
            first = process._process.pid
            with pytest.raises(UserError, match="did not start"):
                process.render(messages, {})
            assert process._process.pid != first
            monkeypatch.undo()
            assert "w1" in process.render(messages, {})
        finally:
            process.close()


@pytest.mark.parametrize(
    ("template", "before", "behind"),
    [("$A </s>", 0, 1), ("<s> $A </s> </s>", 1, 2), ("<s> $A", 1, 0), ("$A", 0, 0)],
)
def test_special_tokens_are_put_before_a_raw_prompt_only(
    template: str, before: int, behind: int
) -> None:
    from tokenizers.processors import TemplateProcessing

    backbone = tiny_backbone()
    backend = backbone.tokenizer.backend_tokenizer
    ids = [("<s>", 1), ("</s>", 2)]
    backend.post_processor = TemplateProcessing(single=template, special_tokens=ids)
    plain = token_ids(backbone, "w5 w6")
    whole = backbone.tokenizer.encode("w5 w6")
    assert len(whole) == len(plain) + before + behind
    assert token_ids(backbone, "w5 w6", begin=True) == whole[: before + len(plain)]
