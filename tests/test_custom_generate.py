"""The exported `generate` itself: when it drafts, what it streams, returns and refuses, and answers side by side."""

from collections import Counter
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, GenerationConfig, TextStreamer

from medusa_cli.exporting.custom_generate import generate
from medusa_cli.exporting.custom_generate.pace import BOTH, HEADS, LOOKUP, NONE
from medusa_cli.exporting.custom_generate.past import MOST, Past
from tests.test_export_hf import KINDS, PROMPT, exported
from tests.tiny import tiny_tokenizer


@pytest.mark.parametrize("name", KINDS)
def test_steps_without_drafts_between_change_no_token(tmp_path: Path, name: str, monkeypatch) -> None:
    class Changing(generate.Pace):
        def record(self, seconds: float, tokens: int) -> None:
            self.way = next(turns)

    folder = exported(tmp_path, name)
    model = AutoModelForCausalLM.from_pretrained(folder)
    plain = model.generate(PROMPT, max_new_tokens=48)
    both, lookup, none = BOTH, LOOKUP, NONE
    turns = iter([both, lookup, none, lookup, both, both, none] * 10)
    monkeypatch.setattr(generate, "Pace", Changing)
    found = generate.generate(PROMPT, model=model, drafter=str(folder), max_new_tokens=48)
    assert found.tolist() == plain.tolist()
    with pytest.raises(ValueError, match="drafts='often' is unknown"):
        generate.generate(PROMPT, model=model, drafter=str(folder), drafts="often")


def paced(steps: int, **seconds: float) -> Counter[str]:
    """How many of so many steps go each way, where a token takes so many seconds by it."""
    pace, found = generate.Pace(), Counter[str]()
    for _ in range(steps):
        found[pace.way] += 1
        pace.record(2 * seconds[pace.way], 2)
    return found


@pytest.mark.parametrize("best", [BOTH, LOOKUP, NONE])
def test_what_pays_is_drafted_and_the_other_ways_are_tried_now_and_then(best: str) -> None:
    times = {BOTH: 1.2, LOOKUP: 1.1, NONE: 1.0} | {best: 0.5}
    early, late = paced(200, **times), paced(2000, **times)
    assert late[best] > 1900 and set(late) == set(times)
    assert all(late[way] > early[way] for way in times)  # tried again
    assert [generate.Pace(way).drafts for way in (HEADS, LOOKUP)] == [True, False]


def test_what_the_text_repeats_is_drafted_as_it_comes_true(tmp_path: Path) -> None:
    past = Past([1, 2, 3, 4, 5, 1])
    first = past.find(2)
    assert first == [3, 4, 5, 1] and past.find(2) == first  # a pair is trusted a little
    root = 2
    for _ in range(60):  # all comes true: 1 to 5 go round
        settled = [root, *past.find(root)]
        root = settled[-1] % 5 + 1
        past.learn(settled, root)
    assert len(past.find(root)) == MOST and past.find(root)[0] == root % 5 + 1
    for _ in range(200):
        past.find(root)
        past.learn([], 9)
    assert past.find(root) == []
    for _ in range(40):  # what was given up comes true again: 1 to 5 go on round
        past.find(root)
        following = root % 5 + 1
        past.learn([root], following)
        root = following
    assert past.find(root)[:2] == [root % 5 + 1, (root + 1) % 5 + 1]
    folder = exported(tmp_path, "medusa")
    model = AutoModelForCausalLM.from_pretrained(folder)
    prompt = PROMPT.repeat(1, 4)
    asked = {"custom_generate": str(folder), "trust_remote_code": True, "drafts": "lookup"}
    passes: list[int] = []
    plain = model.generate(prompt, max_new_tokens=60)
    model.register_forward_hook(lambda *_: passes.append(1))
    assert model.generate(prompt, max_new_tokens=60, **asked).tolist() == plain.tolist()
    assert len(passes) <= plain.shape[1] - prompt.shape[1]


class Turns:
    """A pace that asks the drafter in every third step, or in all."""

    looks = False

    def __init__(self, every: int) -> None:
        self.every, self.steps = every, 0

    @property
    def drafts(self) -> bool:
        return self.steps % self.every == self.every - 1

    def record(self, seconds: float, tokens: int) -> None:
        self.steps += 1


@pytest.mark.parametrize("name", KINDS)
def test_a_drafter_that_was_not_asked_for_some_steps_drafts_what_it_would_have(
    tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = exported(tmp_path, name)
    model = AutoModelForCausalLM.from_pretrained(folder)
    guesser = generate.load_drafter(str(folder), model)

    def drafted(every: int) -> dict[int, list[int]]:
        """What is drafted after so many tokens of the text."""
        found: dict[int, list[int]] = {}
        read, draft = [0], type(guesser).draft

        def kept(one, tokens, states, root):
            read[0] += len(tokens)
            found[read[0]] = draft(one, tokens, states, root)
            return found[read[0]]

        guesser.pace = Turns(every)
        with monkeypatch.context() as patched:
            patched.setattr(type(guesser), "draft", kept)
            generate.generate(PROMPT, model=model, drafter=str(folder), max_new_tokens=60)
        return found

    always, rarely = drafted(1), drafted(3)
    both = always.keys() & rarely.keys()
    assert len(both) > 3 and len(always) > len(rarely)
    assert {place: rarely[place] for place in both} == {place: always[place] for place in both}


def test_left_padding_and_the_longer_return(tmp_path: Path) -> None:
    folder = exported(tmp_path)
    model = AutoModelForCausalLM.from_pretrained(folder)
    padded = torch.cat([torch.zeros(1, 3, dtype=torch.long), PROMPT], dim=1)
    mask = torch.cat([torch.zeros(1, 3, dtype=torch.long), torch.ones_like(PROMPT)], dim=1)
    asked = {"max_new_tokens": 20, "return_dict_in_generate": True, "output_scores": True, "attention_mask": mask}
    plain = model.generate(padded, **asked)
    drafted = model.generate(padded, custom_generate=str(folder), trust_remote_code=True, **asked)
    assert drafted.sequences.tolist() == plain.sequences.tolist()
    assert len(drafted.scores) == len(plain.scores)
    torch.testing.assert_close(torch.cat(drafted.scores), torch.cat(plain.scores), atol=1e-4, rtol=1e-4)


def test_the_streamer_gets_every_token_and_no_gradient_is_kept(tmp_path: Path) -> None:
    folder = exported(tmp_path)
    # So loaded, model.generate is the exported function itself.
    model = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True)
    said: list[str] = []

    class Kept(TextStreamer):
        def on_finalized_text(self, text: str, stream_end: bool = False) -> None:
            said.append(text)

    answer = model.generate(PROMPT, max_new_tokens=20, streamer=Kept(tiny_tokenizer(), skip_prompt=True))
    assert "".join(said).split() == tiny_tokenizer().decode(answer[0, PROMPT.shape[1] :]).split()
    out = model.generate(PROMPT, max_new_tokens=4, return_dict_in_generate=True, output_scores=True)
    assert not any(one.requires_grad for one in out.scores)


def test_stop_strings_end_an_answer_as_without(tmp_path: Path) -> None:
    folder, tokenizer = exported(tmp_path), tiny_tokenizer()
    tokenizer.add_tokens("abcdef")  # before which StopStringCriteria sets every token, to see what it adds
    model = AutoModelForCausalLM.from_pretrained(folder)
    drafting = {"custom_generate": str(folder), "trust_remote_code": True}
    whole = model.generate(PROMPT, max_new_tokens=40)
    asked = {"max_new_tokens": 40, "stop_strings": [tokenizer.decode(whole[0, 20:22])]}
    plain = model.generate(PROMPT, tokenizer=tokenizer, **asked)
    assert plain.shape[1] < whole.shape[1]
    assert model.generate(PROMPT, tokenizer=tokenizer, **drafting, **asked).tolist() == plain.tolist()
    config = GenerationConfig(**asked)
    found = model.generate(PROMPT, generation_config=config, tokenizer=tokenizer, **drafting)
    assert found.tolist() == plain.tolist() and config.stop_strings == asked["stop_strings"]
    with pytest.raises(ValueError, match="give tokenizer=TOKENIZER"):
        model.generate(PROMPT, **drafting, **asked)


@pytest.mark.parametrize("name", ["hydra++", "amphista", *(["eagle"] if "eagle" in KINDS else [])])
def test_answers_of_one_model_at_the_same_time_keep_their_own_texts(tmp_path: Path, name: str) -> None:
    folder = exported(tmp_path, name)
    model = AutoModelForCausalLM.from_pretrained(folder)
    guesser = generate.load_drafter(str(folder), model)
    other, began = PROMPT.flip(1).repeat(1, 3), dict(guesser.past)
    asked = {"drafter": str(folder), "drafts": "always", "max_new_tokens": 12}
    alone = [generate.generate(prompt, model=model, **asked).tolist() for prompt in (PROMPT, other)]
    found = []

    class Between:
        """Answers the other prompt in the middle of the first."""

        def put(self, tokens: torch.Tensor) -> None:
            if not found and tokens.numel() == 1:
                found.append(generate.generate(other, model=model, **asked).tolist())

        def end(self) -> None:
            pass

    assert [generate.generate(PROMPT, model=model, streamer=Between(), **asked).tolist(), *found] == alone
    assert guesser.past == began


def test_the_models_own_logits_come_back_and_what_cannot_is_refused_by_name(tmp_path: Path) -> None:
    folder = exported(tmp_path)
    model = AutoModelForCausalLM.from_pretrained(folder)
    drafting = {"custom_generate": str(folder), "trust_remote_code": True}
    asked = {"max_new_tokens": 12, "repetition_penalty": 1.3, "return_dict_in_generate": True}
    plain = model.generate(PROMPT, output_logits=True, **asked)
    drafted = model.generate(PROMPT, output_logits=True, **drafting, **asked)
    torch.testing.assert_close(torch.cat(drafted.logits), torch.cat(plain.logits), atol=1e-4, rtol=1e-4)
    assert drafted.scores is None
    for name in ("output_hidden_states", "output_attentions"):
        with pytest.raises(ValueError, match=f"{name}=True"):
            model.generate(PROMPT, **{name: True}, **drafting, **asked)


def test_a_prompt_is_read_without_a_mask_of_its_length_squared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = exported(tmp_path, "hydra++")
    model = AutoModelForCausalLM.from_pretrained(folder)
    guesser, masks = generate.load_drafter(str(folder), model), list[torch.Tensor]()
    attend = torch.nn.functional.scaled_dot_product_attention

    def watched(*given, attn_mask=None, **more):
        masks.extend([] if attn_mask is None else [attn_mask])
        return attend(*given, attn_mask=attn_mask, **more)

    x = torch.randn(9, guesser.size)
    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", watched)
    guesser.reset()
    whole = guesser.decoder_layer("prefix.0", x)
    assert not masks
    guesser.reset()
    parts = torch.cat([guesser.decoder_layer("prefix.0", x[:4]), guesser.decoder_layer("prefix.0", x[4:])])
    torch.testing.assert_close(whole, parts, atol=1e-5, rtol=1e-4)


def test_two_prompts_or_beams_are_refused(tmp_path: Path) -> None:
    folder = exported(tmp_path)
    model = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True)
    with pytest.raises(ValueError, match="one prompt at a time"):
        model.generate(PROMPT.repeat(2, 1), max_new_tokens=4)
    with pytest.raises(ValueError, match="one prompt at a time"):
        model.generate(PROMPT, max_new_tokens=4, num_beams=2)


def test_a_model_from_elsewhere_names_its_drafter(tmp_path: Path) -> None:
    folder = exported(tmp_path)
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    asked = {"max_new_tokens": 8, "custom_generate": str(folder), "trust_remote_code": True}
    with pytest.raises(ValueError, match="drafter=FOLDER"):
        model.generate(PROMPT, **asked)
    found = model.generate(PROMPT, drafter=str(folder), **asked)
    assert found.tolist() == model.generate(PROMPT, max_new_tokens=8).tolist()
