"""A chat template for a model that has none: given once, and known to every later command on the run."""

import json
from pathlib import Path

import pytest

from medusa_cli.errors import UserError
from medusa_cli.runs.recipe import load_recipe
from medusa_cli.runs.run import Run
from tests.helpers import CHAT_TEMPLATE, medusa, save_model, tiny_tokenizer

RECIPES = Path(__file__).parent.parent / "recipes"
SYSTEM = (
    "A chat between a curious user and an artificial intelligence assistant. "
    "The assistant gives helpful, detailed, and polite answers to the user's questions."
)


@pytest.fixture
def bare(tmp_path: Path) -> str:
    """A tiny model whose tokenizer has no template."""
    model = Path(save_model(tmp_path / "model"))
    (model / "chat_template.jinja").unlink()
    return str(model)


@pytest.fixture
def words(bare: str, tmp_path: Path) -> list[str]:
    """`distill` from a recipe that names a template, with which the model can answer."""
    (tmp_path / "tiny.jinja").write_text(CHAT_TEMPLATE)
    (tmp_path / "recipe.yaml").write_text(f"model: {bare}\nchat_template: tiny.jinja\n")
    rows = [{"id": f"k{i}", "messages": [{"role": "user", "content": f"w{i}"}] * 2} for i in range(12)]
    (tmp_path / "seed.jsonl").write_text("\n".join(map(json.dumps, rows)))
    return ["distill", "--seed", str(tmp_path / "seed.jsonl"), "--dtype", "fp32", "--max-new-tokens", "8",
            "--run", str(tmp_path / "run"), "--json"]  # fmt: skip


def test_vicunas_template_says_what_its_authors_do() -> None:
    tokenizer = tiny_tokenizer()
    tokenizer.add_special_tokens({"bos_token": "<s>", "eos_token": "</s>"})
    tokenizer.chat_template = load_recipe(RECIPES / "vicuna-7b-medusa1.yaml").chat_template
    turns = [("user", "Hello!"), ("assistant", "Hi!"), ("user", "How are you?")]
    messages = [{"role": role, "content": text} for role, text in turns]
    asked = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert asked == f"<s>{SYSTEM} USER: Hello! ASSISTANT: Hi!</s>USER: How are you? ASSISTANT:"
    told = tokenizer.apply_chat_template([{"role": "system", "content": "Be brief."}, *messages[:2]], tokenize=False)
    assert told == "<s>Be brief. USER: Hello! ASSISTANT: Hi!</s>"


def test_a_recipe_reads_the_template_beside_it_and_keeps_its_text(tmp_path: Path) -> None:
    path = tmp_path / "recipe.yaml"
    path.write_text("chat_template: own.jinja\n")
    with pytest.raises(UserError, match=r"chat_template='own.jinja': .*own.jinja cannot be read"):
        load_recipe(path)
    (tmp_path / "own.jinja").write_text(CHAT_TEMPLATE)
    recipe = load_recipe(path)
    assert recipe.chat_template == CHAT_TEMPLATE
    path.write_text(recipe.to_yaml())
    assert load_recipe(path) == recipe == load_recipe(None, [f"chat_template={tmp_path / 'own.jinja'}"])


def test_every_command_on_the_run_knows_the_template_of_its_distillation(words: list[str], tmp_path: Path) -> None:
    run, recipe = str(tmp_path / "run"), str(tmp_path / "recipe.yaml")
    done = medusa(*words, "--recipe", recipe)
    assert json.loads(done.stdout)["conversations"] == 12, done.output
    # Conversations without token ids are laid out by the template as well.
    raw = tmp_path / "raw.jsonl"
    lines = [json.loads(line) for line in Path(run, "distill.jsonl").read_text().splitlines()]
    raw.write_text("\n".join(json.dumps({"id": one["id"], "messages": one["messages"]}) for one in lines))
    settings = ["--dtype", "fp32", "drafter.vocabulary=own", "drafter.num_heads=2", "train.max_tokens=64"]
    for more in (["--run", run], ["--run", f"{run}/inner", "--data", str(raw)],
                 ["--run", str(tmp_path / "other"), "--from", run, "train.stage=2", "--data", str(raw)]):  # fmt: skip
        trained = medusa("train", *more, *settings)
        assert trained.exit_code == 0, trained.output
    for place in (run, str(tmp_path / "other")):
        output = str(Path(place, "calibration.json"))
        measured = medusa("calibrate", "--run", place, "--data", str(raw), "--output", output, "--dtype", "fp32")
        assert measured.exit_code == 0, measured.output
        assert medusa("tree", "--run", place, "--budget", "4").exit_code == 0
        said = medusa("chat", "--run", place, "--prompt", "w1", "--max-new-tokens", "4", "--dtype", "fp32")
        assert said.exit_code == 0, said.output
    assert Run(Path(run)).chat_template == Run(Path(run, "inner")).chat_template == CHAT_TEMPLATE


def test_a_distillation_goes_on_with_its_own_template_alone(words: list[str], bare: str, tmp_path: Path) -> None:
    refused = medusa(*words, "--model", bare)
    assert refused.exit_code == 1 and "has no chat template; " in refused.stderr
    template, other = tmp_path / "tiny.jinja", tmp_path / "other.jinja"
    first = medusa(*words, "--model", bare, "--chat-template", str(template), "--max-samples", "3")
    assert json.loads(first.stdout)["conversations"] == 3, first.output
    assert json.loads(medusa(*words, "--model", bare).stdout)["conversations"] == 12
    other.write_text(CHAT_TEMPLATE + "\n")
    mixed = medusa(*words, "--model", bare, "--chat-template", str(other))
    assert mixed.exit_code == 1 and "with another chat template" in mixed.stderr


def test_a_template_does_not_join_conversations_made_without_it(words: list[str], tmp_path: Path) -> None:
    own = save_model(tmp_path / "own")
    assert medusa(*words, "--model", own, "--max-samples", "3").exit_code == 0
    mixed = medusa(*words, "--model", own, "--chat-template", str(tmp_path / "tiny.jinja"))
    assert mixed.exit_code == 1 and "was distilled with settings" in mixed.stderr
    assert Run(tmp_path / "run").chat_template is None
