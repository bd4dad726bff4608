"""Recipes: every shipped file loads, overrides are typed, and what is wrong is named."""

import json
import re
import shutil
from pathlib import Path

import pytest

from medusa_cli.distill.distillation import check_settings
from medusa_cli.errors import LONGEST, UsageError, UserError
from medusa_cli.runs import recipe_files as recipes
from medusa_cli.runs import run as runs
from medusa_cli.runs.recipe import Recipe, meanings, types
from medusa_cli.runs.recipe_files import differences, find_recipe, load_recipe, recipe_of
from medusa_cli.runs.run import Run
from medusa_cli.train.setup import check_recipe

SHIPPED = Path(__file__).parent.parent / "recipes"
RECIPES = sorted(SHIPPED.glob("*.yaml"))


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.name)
def test_recipe_file_loads(path: Path) -> None:
    recipe = load_recipe(path)
    check_recipe(recipe)
    check_settings(recipe.distill)


# Medusa, sections 3.3.2, 4.1 and 4.2: on the data the models were tuned on, or on their own answers.
TUNED = {
    "lambda_0": 0.2,
    "schedule": "constant",
    "objective": "ce",
    "tuning": "qlora",
    "warmup_steps": 40,
}
SELF_DISTILLED = {
    "lambda_0": 0.01,
    "schedule": "sine",
    "objective": "kl",
    "tuning": "lora",
    "warmup_steps": 20,
}
LORA = {
    "lora_rank": 32,
    "lora_alpha": 16,
    "lora_dropout": 0.05,
    "optimizer": "adamw8bit",
    "epochs": 2,
    "decay": 0.8,
}


@pytest.mark.parametrize(
    ("name", "numbers", "backbone_lr", "sequences", "context"),
    [
        ("vicuna-7b-medusa2", TUNED, 5e-4, 64, 4096),
        ("vicuna-13b-medusa2", TUNED, 5e-4, 64, 4096),
        ("vicuna-33b-medusa2", SELF_DISTILLED, 1e-4, 128, 2048),
        ("zephyr-7b-medusa2", SELF_DISTILLED, 1e-4, 128, 4096),
    ],
)
def test_papers_recipe_has_the_papers_numbers(
    name: str, numbers: dict, backbone_lr: float, sequences: int, context: int
) -> None:
    recipe = load_recipe(SHIPPED / f"{name}.yaml")
    train, drafter = recipe.train, recipe.drafter
    expected = {
        **LORA,
        **numbers,
        "stage": 2,
        "max_length": 2048,
        "backbone_lr": backbone_lr,
        "lr": 4 * backbone_lr,
    }
    assert {key: getattr(train, key) for key in expected} == expected
    assert train.batch_tokens * train.accumulation == sequences * train.max_length
    assert (drafter.name, drafter.num_heads, drafter.num_layers) == ("medusa", 5, 1)
    assert recipe.distill.context == context


@pytest.mark.parametrize("size", ["7b", "13b"])
def test_papers_stage_1_gives_the_heads_of_its_stage_2(size: str) -> None:
    first, second = (load_recipe(SHIPPED / f"vicuna-{size}-medusa{stage}.yaml") for stage in (1, 2))
    assert (first.train.stage, first.train.epochs, first.train.lr, first.train.warmup_steps) == (
        1,
        2,
        2e-3,
        40,
    )
    assert (first.model, first.drafter, first.distill) == (
        second.model,
        second.drafter,
        second.distill,
    )


def test_defaults_and_overrides() -> None:
    assert load_recipe() == Recipe()
    words = [
        "train.lr=1e-4",
        "drafter.num_heads=4",
        "drafter=medusa",
        "train.max_tokens=null",
        "distill.seed=a: b",
    ]
    recipe = load_recipe(None, words)
    assert (recipe.train.lr, recipe.drafter.num_heads, recipe.drafter.name) == (1e-4, 4, "medusa")
    assert recipe.train.max_tokens is None
    large = 2**53 + 1  # more than a float tells apart
    assert load_recipe(None, [f"train.seed={large}"]).train.seed == large
    assert recipe.distill.seed == "a: b"  # text stays text, whatever YAML would make of it


def test_file_round_trips_and_an_override_wins(tmp_path: Path) -> None:
    path = tmp_path / "recipe.yaml"
    path.write_text("drafter: medusa\ntrain:\n  lr: 1e-3\n  epochs: 7\n")
    recipe = load_recipe(path, ["train.epochs=8"])
    assert (recipe.train.lr, recipe.train.epochs) == (1e-3, 8)
    path.write_text(recipe.to_yaml())
    assert load_recipe(path) == recipe


@pytest.mark.parametrize(
    ("override", "part"),
    [
        ("train.lrr=1", "'train.lr'"),
        ("drafter.heads=4", "'drafter.num_heads'"),
        ("batch_tokens=4", "'train.batch_tokens'"),
        ("trian.epochs=4", "'train.epochs'"),
        ("train.lr=fast", "train.lr='fast' .* a number"),
        ("train.lr=nan", "train.lr='nan' .* a number >= 0"),
        ("train.epochs=1.5", "train.epochs=1.5 .* a whole number"),
        ("train.epochs=true", "train.epochs=True"),
        ("train.epochs=null", "train.epochs=None"),
        ("train.epochs=0", "train.epochs=0 .* >= 1"),
        ("train.decay=2", "train.decay=2 .* <= 1"),
        ("train.stage=3", "train.stage=3 .* 1, 2"),
        ("drafter.taps=[1.5]", "drafter.taps=.* a list"),
        (f"drafter.matrices=0x{'f' * 5000}", "drafter.matrices="),
        (f"train.epochs=0x{'f' * 5000}", "train.epochs="),
        ("drafter.vocabulary=big", "use one of auto, draft, own, shared"),
        ("train.epochs", "write key=value"),
    ],
)
def test_bad_override_names_key_value_and_remedy(override: str, part: str) -> None:
    with pytest.raises(UsageError, match=part):
        load_recipe(None, [override])


DEEP, LONG = "[" * 5000 + "]" * 5000, "9" * 5000


@pytest.mark.parametrize(
    "text",
    [
        "",
        "- 1\n",
        "a: [",
        "train: {speed: 3}",
        "a: &x [1]\nb: *x\n",
        "a: &x\n  b: *x\n",
        DEEP,
        f"a: {LONG}",
        "a: \x01",
    ]
    + [
        "train: {lr: 1}\ntrain: {lr: 2}\n",
        "train:\n  lr: 1\n  epochs: 2\n  lr: 2\n",
        "? [a, b]\n: 1\n",
    ]
    + ["a: !!python/object/apply:os.system [ls]", "a: 1:" + ":".join(["59"] * 12) + ".5e", None],
)
def test_bad_file_is_named(tmp_path: Path, text: str | None) -> None:
    path = tmp_path / "bad.yaml"
    if text is not None:
        path.write_text(text)
    with pytest.raises(UserError, match=r"bad\.yaml") as raised:
        load_recipe(path)
    assert len(str(raised.value)) < 2 * LONGEST


@pytest.mark.quick(
    "drafter.num_heads=1e9", "drafter.num_layers=1000000000", "train.epochs=1e12", "train.seed=1e30"
)
@pytest.mark.parametrize(
    "override",
    [
        "train.lr=" + "x" * 100_000,
        "train.lr=[" + "1, " * 5_000 + "1]",
        "drafter.num_layers=1000000000",
    ]
    + ["drafter.num_heads=1e9", "train.epochs=1e12", "train.seed=1e30"],
    ids=lambda override: override[:30],
)
def test_values_that_nobody_has_are_refused_briefly(override: str) -> None:
    with pytest.raises(UserError, match=override.partition("=")[0]) as raised:
        load_recipe(None, [override])
    assert len(str(raised.value)) < LONGEST


def test_template_is_kept_as_text_and_read_from_the_recipes_own_folder_alone(
    tmp_path: Path,
) -> None:
    folder, template = tmp_path / "recipes", "{{ messages }}"
    folder.mkdir()
    (tmp_path / "secret").write_text("key")
    (folder / "link").symlink_to(tmp_path / "secret")
    path = folder / "recipe.yaml"
    for name in ("../secret", str(tmp_path / "secret"), "link", "/etc/passwd", "own.jinja"):
        path.write_text(json.dumps({"chat_template": name}))
        with pytest.raises(UserError, match="chat_template|outside"):
            load_recipe(path)
    (folder / "own.jinja").write_text(template)
    recipe = load_recipe(path)
    assert recipe.chat_template == template
    path.write_text(recipe.to_yaml())
    assert (
        load_recipe(path) == recipe == load_recipe(None, [f"chat_template={folder / 'own.jinja'}"])
    )


def test_differences_are_dotted_keys_of_the_sections() -> None:
    changed = load_recipe(None, ["train.lr=0.5", "model=other"])
    assert differences(Recipe().to_dict(), changed, ("train", "drafter")) == ["train.lr"]


def test_every_key_is_documented() -> None:
    page = (SHIPPED.parent / "docs" / "training.md").read_text(encoding="utf-8")
    rows = [line.split("|")[1] for line in page.splitlines() if line.startswith("| `")]
    documented = [name for row in rows for name in re.findall(r"`([a-z_0-9]+)`", row)]
    keys = [key.rpartition(".")[2] for key in types() if "." in key]
    assert sorted(set(keys) - set(documented)) == []


@pytest.mark.parametrize(
    "name", ["medusa1", "medusa1.yaml", "recipes/medusa1.yaml", "recipes/hydra", "eagle"]
)
@pytest.mark.parametrize("installed", [False, True])
def test_recipes_that_ship_are_found_from_anywhere(
    name: str, installed: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    if installed:  # the package stands elsewhere, and its recipes under share/
        shutil.copytree(SHIPPED, tmp_path / "share" / "medusa-cli" / "recipes")
        monkeypatch.setattr(
            recipes, "__file__", str(tmp_path / "medusa_cli" / "runs" / "recipe.py")
        )
    path = find_recipe(name)
    assert path.name == Path(name).stem + ".yaml"
    assert path.is_relative_to(tmp_path) == installed
    assert load_recipe(name) == load_recipe(SHIPPED / path.name)
    Path("recipes").mkdir()
    # A file of one's own comes first.
    Path("recipes", "medusa1.yaml").write_text("train: {lr: 0.5}")
    assert load_recipe("recipes/medusa1.yaml").train.lr == 0.5


def test_unknown_recipe_names_those_that_ship(tmp_path: Path) -> None:
    for name in ("medusa9", str(tmp_path / "medusa1.yaml"), "elsewhere/medusa1.yaml"):
        with pytest.raises(UserError, match="medusa1") as raised:
            load_recipe(name)
        assert name in str(raised.value)


def test_runs_own_model_is_trained_whatever_the_recipe_names(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run, fresh = (Run.open(f"{tmp_path}/{name}", create=True) for name in ("mine", "fresh"))
    run.bind(
        {"id": "me/mine", "architecture": "llama", "hidden_size": 8, "vocab_size": 9, "layers": 1}
    )

    def chosen(run: Run, *words: str, model: str | None = None) -> Recipe:
        caplog.clear()
        return recipe_of(run, words, {"model": model}, resume=False)

    for words in (("medusa1",), ("hydra", "train.lr=0.5"), ("eagle",), ()):
        assert chosen(run, *words).model == "me/mine"
        assert not caplog.records
    foreign = chosen(run, "vicuna-7b-medusa1")
    assert foreign.model == "me/mine"
    assert foreign.chat_template is None
    assert foreign.drafter.num_heads == 5
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "me/mine" in caplog.text
    named = load_recipe("vicuna-7b-medusa1")
    for recipe in (
        chosen(fresh, "vicuna-7b-medusa1"),
        chosen(run, "vicuna-7b-medusa1", model=named.model),
        chosen(run, "vicuna-7b-medusa1", f"model={named.model}"),
    ):
        assert recipe == named
        assert named.chat_template
        assert not caplog.records


@pytest.mark.parametrize("name", sorted(path.name for path in runs.SHIPPED.iterdir()))
def test_an_included_drafter_is_trained_on_for_its_own_model(name: str, tmp_path: Path) -> None:
    origin = Run.pretrained(name)
    assert origin is not None
    fresh = Run(tmp_path / "run")
    assert recipes.recipe_of(fresh, [], {}, False, origin).model == name
    other = recipes.recipe_of(fresh, ["model=me/mine"], {}, False, origin)
    assert other.model == "me/mine"


def test_every_key_has_a_meaning() -> None:
    known = meanings()
    assert set(known) == set(types())
    assert all(meaning for _, meaning in known.values())
    assert known["train.lr"][0] == "null"
    assert known["drafter.name"][0] == "medusa"
