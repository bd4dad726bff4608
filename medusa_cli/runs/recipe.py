"""A recipe: YAML plus `key=value` overrides, checked into frozen dataclasses; an unknown key is an error."""

import dataclasses
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from medusa_cli.errors import UsageError, UserError, shown
from medusa_cli.runs.reading import read_text, read_yaml
from medusa_cli.runs.run import Run
from medusa_cli.runs.settings import MANY, checked, fields_of, known_key, parsed
from medusa_cli.runs.settings import setting as _setting

# A temperature below this divides scores out of their numbers' range.
COLDEST = 1e-3
# What may be said for a key.
SHORT = {"drafter": "drafter.name", "firp.layers": "drafter.layers"}


@dataclass(frozen=True)
class DrafterRecipe:
    """Which drafter to train: its name, heads, residual layers a head, and the vocabulary its heads score.

    vocabulary "draft" scores the draft_vocab_size most frequent tokens of the training data, "own" gives each
    head a full matrix, "shared" reads the frozen lm_head; "auto" is "draft" where that is smaller than "own".
    matrices: one for "each" head, or "one" for all of them. rank: their inner size, null for whole matrices.
    prefix_layers: Hydra's decoder layers before its heads (0: Hydra, 1: Hydra++); taps: after which of the model's
    layers it and EAGLE read states too, beside the final ones (EAGLE, where none is named: a low, a middle and a high
    one). attention_layers: Amphista's self-attention layers over its heads (1; 2 is its alpha variant). context: what
    Hydra's prefix and Amphista's adaptation layers see, the whole conversation or the answer alone. conditional: the
    rank of a bias that the token drafted before gives the scores of heads that draft at once (Medusa's, Amphista's,
    FIRP's), null for none. layers: after which of the model's layers the pseudo state of each of FIRP's heads enters,
    null for 1/2 to 5/6 of the depth; masked: whether it sees none of the earlier ones.
    """

    name: str = "medusa"
    num_heads: int = _setting(5, least=1, most=64)
    num_layers: int = _setting(1, least=1, most=16)
    vocabulary: str = _setting("auto", among=("auto", "draft", "own", "shared"))
    draft_vocab_size: int = _setting(12288, least=1, most=MANY)
    matrices: str = _setting("each", among=("each", "one"))
    rank: int | None = _setting(None, least=1, most=65_536)
    prefix_layers: int = _setting(0, least=0, most=4)
    taps: tuple[int, ...] = ()
    attention_layers: int = _setting(1, least=0, most=4)
    context: str = _setting("conversation", among=("conversation", "answer"))
    conditional: int | None = _setting(None, least=1)
    layers: tuple[int, ...] | None = None
    masked: bool = False


@dataclass(frozen=True)
class DistillRecipe:
    """The data: seed, conversations, tokens an answer, turns, temperature, random seed, positions.

    batch_size: conversations that are decoded side by side, null for as many as the memory holds, at most 64. taps:
    after which of the model's layers states are kept, too, for drafters that read them.
    """

    seed: str = "sharegpt"
    max_samples: int | None = _setting(None, least=1)
    max_new_tokens: int = _setting(256, least=1, most=MANY)
    max_turns: int = _setting(2, least=1, most=MANY)
    temperature: float = _setting(0.0, least=0.0, most=100.0)
    random_seed: int = _setting(0, least=0, most=2**62)
    context: int = _setting(512, least=16, most=MANY)
    batch_size: int | None = _setting(None, least=1, most=MANY)
    taps: tuple[int, ...] = ()


@dataclass(frozen=True)
class TrainRecipe:
    """How to train: sizes are in positions (answer tokens), intervals in optimiser steps.

    A step takes `accumulation` micro-batches of `batch_tokens` positions. max_tokens bounds the positions of
    all epochs together (null: no bound). lr: the heads' peak rate (null: the drafter's own). optimizer muon takes the
    matrices inside the drafter, at the peak rate muon_lr (null: lr), and leaves the rest to adamw. Head k's loss weighs
    decay^k (Medusa, section 3.2.1). loss: ce, cross-entropy; kl, the divergence from the backbone's own distribution;
    lk, that and the total variation from it, which counts the more the more is accepted (arXiv:2602.23881). soft, for
    ce, is the share of the backbone's distribution in a target, the rest is the token it emitted. regress weighs how
    far the state of a head that sees the tokens before its target (each of Hydra's, Amphista's first) is from the
    backbone's own there (null: what suits the drafter in stage 1, 0 in stage 2). scored: how many tokens of the heads'
    vocabulary a micro-batch scores, its targets among them and a random part standing for the rest (null: all, as
    everything that is measured does). heads_in_turn: FIRP's maps learn one after another, each for its share of the
    steps, as in its section 3.3; else at once. states: those of the model that stage 1 learns from are "kept" in the
    run, or made "fresh" in every step from whole conversations, which takes longer and no room on the disk (max_length
    and batch_tokens are then as in stage 2). shard: of several processes each holds a part of the backbone's layers,
    and gathers a layer to run it.

    Stage 2 alone reads what follows (section 3.2.2). tuning: LoRA, LoRA over 4-bit weights, or every weight.
    lora_layers: how many of the last layers it is on, beside the lm_head (null: all). objective: KL to the original
    model, or cross-entropy. lambda_0 weighs the heads' loss, by `schedule`: constant, warmup (heads alone for the share
    heads_first of the steps, 1 for all, then rising to the end) or sine. backbone_lr: null is a quarter of the heads'.
    max_length: where conversations are cut; batch_tokens counts their tokens then, padding included.
    gradient_checkpointing: keep the states between layers alone and compute the rest again on the way back.
    """

    stage: int = _setting(1, least=1, most=2)
    tuning: str = _setting("lora", among=("lora", "qlora", "full"))
    lora_rank: int = _setting(32, least=1, most=65_536)
    lora_alpha: float = _setting(16.0, least=0.0)
    lora_dropout: float = _setting(0.05, least=0.0, most=1.0)
    lora_layers: int | None = _setting(None, least=1, most=65_536)
    objective: str = _setting("kl", among=("kl", "ce"))
    lambda_0: float = _setting(0.2, least=0.0)
    schedule: str = _setting("warmup", among=("constant", "warmup", "sine"))
    heads_first: float = _setting(0.1, least=0.0, most=1.0)
    backbone_lr: float | None = _setting(None, least=0.0)
    max_length: int = _setting(1024, least=16)
    gradient_checkpointing: bool = False
    shard: bool = False
    optimizer: str = _setting("adamw", among=("adamw", "adamw8bit", "muon"))
    muon_lr: float | None = _setting(None, least=0.0)
    epochs: int = _setting(2, least=1, most=10_000)
    max_tokens: int | None = _setting(800_000, least=1)
    lr: float | None = _setting(None, least=0.0)
    min_lr_ratio: float = _setting(0.05, least=0.0, most=1.0)
    warmup_steps: int = _setting(20, least=0)
    batch_tokens: int = _setting(1024, least=2)
    accumulation: int = _setting(1, least=1)
    clip: float = _setting(1.0, least=0.0)
    weight_decay: float = _setting(0.0, least=0.0)
    beta1: float = _setting(0.9, least=0.0, below=1.0)
    beta2: float = _setting(0.95, least=0.0, below=1.0)
    decay: float = _setting(0.8, least=0.0, most=1.0)
    loss: str = _setting("ce", among=("ce", "kl", "lk"))
    soft: float = _setting(0.0, least=0.0, most=1.0)
    regress: float | None = _setting(None, least=0.0)
    scored: int | None = _setting(None, least=64, most=MANY)
    heads_in_turn: bool = False
    states: str = _setting("kept", among=("kept", "fresh"))
    validation_fraction: float = _setting(0.05, least=0.0, most=0.5)
    validation_every: int = _setting(50, least=1)
    validation_tokens: int = _setting(16_384, least=1)
    checkpoint_every: int = _setting(100, least=1)
    seed: int = _setting(0, least=0, most=2**62)
    dtype: str = _setting("bf16", among=("bf16", "fp32"))


@dataclass(frozen=True)
class Recipe:
    """The whole recipe: the backbone's name and one section for each stage of the work.

    chat_template takes the place of the tokenizer's own, which some models lack: the name of a Jinja file, in a recipe
    beside it, or the template itself.
    """

    model: str = "smollm2-135m"
    chat_template: str | None = None
    drafter: DrafterRecipe = DrafterRecipe()
    distill: DistillRecipe = DistillRecipe()
    train: TrainRecipe = TrainRecipe()

    def to_dict(self) -> dict[str, Any]:
        """Every key and value as plain nested dictionaries."""
        return dataclasses.asdict(self)

    def to_yaml(self) -> str:
        """The recipe as YAML that load_recipe reads back."""
        import yaml

        return str(yaml.safe_dump(self.to_dict(), sort_keys=False))


def load_recipe(path: str | Path | None = None, overrides: Sequence[str] = ()) -> Recipe:
    """Read a recipe file (None: the defaults) and apply overrides, "train.lr=1e-3" or "drafter=medusa".

    Raises UserError for an unreadable file, UsageError for an unknown key (with the nearest) or a bad value.
    """
    values: dict[str, Any] = {}
    if path is not None:
        values.update(_check(_flatten(_read(Path(path))), f"the recipe {path}", Path(path).parent))
    pairs: list[tuple[str, Any]] = []
    for override in overrides:
        key, equals, text = override.partition("=")
        if not equals:
            raise UsageError(f"{shown(override)} is no override", "write key=value, such as train.lr=1e-3")
        pairs.append((_known(key.strip(), "the command line"), text.strip()))
    pairs = [(key, text if fields_of(Recipe)[key][0] is str else parsed(text)) for key, text in pairs]
    return _build({**values, **_check(pairs, "the command line")})


def from_dict(data: dict[str, Any], source: str) -> Recipe:
    """A recipe from nested dictionaries (what to_dict gives); `source` names them in errors."""
    return _build(_check(_flatten(data), source))


def _check(pairs: Iterable[tuple[str, Any]], source: str, folder: Path | None = None) -> dict[str, Any]:
    """Checked values by their full names; a file that one of them names is read, out of `folder` where there is one."""
    named = [(_known(key, source), value) for key, value in pairs]
    values = {key: checked(key, value, *fields_of(Recipe)[key]) for key, value in named}
    if values.get("chat_template") is not None:
        values["chat_template"] = _template(values["chat_template"], folder)
    return values


def _template(value: str, folder: Path | None) -> str:
    """The text of a chat template: the value itself, which then has braces, or what the file of that name holds.

    A recipe names a file in its own `folder`, not any file of the machine; the command line (None) may.
    """
    if "{" in value:
        return value
    name, remedy = f"chat_template={shown(value)}", "give a Jinja file, beside the recipe"
    try:
        path = (folder or Path()) / value
        if folder is not None and not path.resolve().is_relative_to(folder.resolve()):
            raise UserError(f"{name} lies outside the recipe's folder", f"{remedy}, or name it on the command line")
        if not path.is_file():
            raise UserError(f"{name}: {path} cannot be read", remedy)
        return read_text(path, f"{name}:", remedy=remedy)
    except (OSError, ValueError) as reason:  # no name of a file at all
        raise UserError(f"{name} cannot be read", remedy) from reason


def _known(key: str, source: str) -> str:
    return known_key(SHORT.get(key, key), fields_of(Recipe), source)


def _build(values: dict[str, Any]) -> Recipe:
    """A recipe from checked dotted keys; whatever is not named keeps its default."""
    recipe = Recipe()
    for key, value in values.items():
        section, dot, name = key.partition(".")
        changed = dataclasses.replace(getattr(recipe, section), **{name: value}) if dot else value
        recipe = dataclasses.replace(recipe, **{section: changed})
    return recipe


def differences(old: Recipe, new: Recipe, sections: Sequence[str]) -> list[str]:
    """The dotted keys of the given sections whose values differ."""
    before, after = dict(_flatten(old.to_dict())), dict(_flatten(new.to_dict()))
    return [key for key in before if key.split(".")[0] in sections and before[key] != after[key]]


def _read(path: Path) -> dict[str, Any]:
    data = read_yaml(path, "the recipe")
    if data is None:
        raise UserError(f"the recipe {path} is empty", "write keys such as `train: {lr: 1e-3}`, or give no recipe")
    if not isinstance(data, dict):
        raise UserError(f"the recipe {path} is no mapping of keys", "write keys such as `train: {lr: 1e-3}`")
    return data


def _flatten(data: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in data.items():
        if isinstance(value, dict):
            yield from _flatten(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def recipe_file(target: Run, words: Sequence[str], resume: bool) -> Path | None:
    """The recipe file among KEY=VALUE words; where none is named, a resumed run's own if it has one."""
    files = [word for word in words if _is_file(word)]
    if len(files) > 1:
        raise UsageError(f"{files[1]!r} is a second recipe", "give one recipe file and KEY=VALUE settings")
    return Path(files[0]) if files else target.recipe_path if resume and target.recipe_path.is_file() else None


def _is_file(word: str) -> bool:
    return "=" not in word or word.endswith((".yaml", ".yml"))


def plan_of(target: Run, words: Sequence[str], given: Mapping[str, Any], resume: bool, origin: Run) -> Recipe:
    """The recipe in force: the file (a resumed run's own if none is named), KEY=VALUE words, then what is given.

    Where none of them names a model or a chat template, it is that of the run `origin`.
    """
    path = recipe_file(target, words, resume)
    settings = [word for word in words if not _is_file(word)]
    more = [f"{key}={value}" for key, value in given.items() if value is not None]
    named_model = path is not None or any(one.startswith("model=") for one in settings + more)
    if not named_model and origin.model is not None:
        settings.insert(0, f"model={origin.model}")
    plan = load_recipe(path, settings + more)
    return dataclasses.replace(plan, chat_template=target.template_with(plan.chat_template or origin.chat_template))
