"""Values checked against what dataclasses declare: their types, and what `setting` says of their range."""

import dataclasses
import difflib
import math
import types
import typing
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from medusa_cli.errors import UsageError, UserError, shown
from medusa_cli.runs.io import parse_yaml, read_text, read_yaml
from medusa_cli.runs.run import Run

Fields = dict[str, tuple[Any, Any]]
# Of what nobody counts further: a larger number is a slip of the hand.
MANY = 10_000_000


def setting(
    default: Any,
    *,
    least: float | None = None,
    most: float | None = None,
    below: float | None = None,
    among: Sequence[str] = (),
) -> Any:
    """A field with a default and the values it accepts: at least, at most, below, or one of a few words."""
    return field(default=default, metadata={"least": least, "most": most, "below": below, "among": tuple(among)})


@cache
def fields_of(schema: type) -> Fields:
    """Dotted key -> (type, metadata) of every setting of a dataclass and of the sections in it."""
    found: Fields = {}
    for section, kind in typing.get_type_hints(schema).items():
        if not dataclasses.is_dataclass(kind):
            found[section] = (kind, {})
            continue
        hints = typing.get_type_hints(kind)
        found.update({f"{section}.{one.name}": (hints[one.name], one.metadata) for one in dataclasses.fields(kind)})
    return found


def known_key(key: str, known: Fields, source: str) -> str:
    """A key that is known; UsageError, with the nearest, if it is not."""
    if key in known:
        return key
    near = difflib.get_close_matches(key, known, n=1, cutoff=0.5)
    if not near:  # the section may be missing or wrong: compare the last part alone
        by_last = {one.rpartition(".")[2]: one for one in known}
        near = [by_last[name] for name in difflib.get_close_matches(key.rpartition(".")[2], by_last, n=1)]
    sections = ", ".join(dict.fromkeys(one.partition(".")[0] for one in known))
    raise UsageError(
        f"{source} has the unknown key {shown(key)}",
        f"did you mean {near[0]!r}?" if near else f"use one of {sections}",
    )


def parsed(text: str) -> Any:
    """What a word of the command line says as YAML; the word itself where it is none."""
    import yaml

    try:
        return parse_yaml(text)
    except (yaml.YAMLError, ValueError, OverflowError):
        return text


def checked(key: str, value: Any, kind: Any, limits: Any) -> Any:
    """The value in its field's own type; UsageError, naming key and value, where it cannot be."""
    optional = isinstance(kind, types.UnionType)
    if optional:
        if value is None:
            return None
        kind = next(one for one in typing.get_args(kind) if one is not type(None))
    plain = {int: "a whole number", float: "a number", str: "a word", bool: "true or false"}
    words = plain.get(kind, "a list of whole numbers such as [1,2]") + (" or null" if optional else "")
    fault = UsageError(f"{key}={shown(value)} is not {words}", f"give {words}")
    if kind is bool:
        if not isinstance(value, bool):
            raise fault
        return value
    if kind not in plain:
        if not isinstance(value, list | tuple) or not all(type(one) is int for one in value):
            raise fault
        return tuple(value)
    if isinstance(value, bool) or value is None:
        raise fault
    if kind is str:
        if not isinstance(value, str):
            raise fault
    else:
        # YAML reads 1e-3, without a point, as a string.
        try:
            number = float(value)
        except (TypeError, ValueError, OverflowError):
            raise fault from None
        if not math.isfinite(number) or (kind is int and number != int(number)):
            raise fault
        value = value if type(value) is kind else kind(number)  # a whole number above 2**53 is no float
    return _within(key, value, limits)


def _within(key: str, value: Any, limits: Any) -> Any:
    least, most, among = limits.get("least"), limits.get("most"), limits.get("among")
    if least is not None and value < least:
        raise UsageError(f"{key}={value} is too small", f"use {least:g} or more")
    if most is not None and value > most:
        raise UsageError(f"{key}={value} is too large", f"use {most:g} or less")
    below = limits.get("below")
    if below is not None and value >= below:
        raise UsageError(f"{key}={value} is too large", f"use less than {below:g}")
    if among and value not in among:
        raise UsageError(f"{key}={shown(value)} is unknown", f"use one of {', '.join(among)}")
    return value


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
    num_heads: int = setting(5, least=1, most=64)
    num_layers: int = setting(1, least=1, most=16)
    vocabulary: str = setting("auto", among=("auto", "draft", "own", "shared"))
    draft_vocab_size: int = setting(12288, least=1, most=MANY)
    matrices: str = setting("each", among=("each", "one"))
    rank: int | None = setting(None, least=1, most=65_536)
    prefix_layers: int = setting(0, least=0, most=4)
    taps: tuple[int, ...] = ()
    attention_layers: int = setting(1, least=0, most=4)
    context: str = setting("conversation", among=("conversation", "answer"))
    conditional: int | None = setting(None, least=1)
    layers: tuple[int, ...] | None = None
    masked: bool = False


@dataclass(frozen=True)
class DistillRecipe:
    """The data: seed, conversations, tokens an answer, turns, temperature, random seed, positions.

    batch_size: conversations that are decoded side by side, null for as many as the memory holds, at most 64. taps:
    after which of the model's layers states are kept, too, for drafters that read them.
    """

    seed: str = "sharegpt"
    max_samples: int | None = setting(None, least=1)
    max_new_tokens: int = setting(256, least=1, most=MANY)
    max_turns: int = setting(2, least=1, most=MANY)
    temperature: float = setting(0.0, least=0.0, most=100.0)
    random_seed: int = setting(0, least=0, most=2**62)
    context: int = setting(512, least=16, most=MANY)
    batch_size: int | None = setting(None, least=1, most=MANY)
    taps: tuple[int, ...] = ()


@dataclass(frozen=True)
class TrainRecipe:
    """How to train: sizes are in positions (answer tokens), intervals in optimiser steps.

    A step takes `accumulation` micro-batches of `batch_tokens` positions. max_tokens bounds the positions of
    all epochs together (null: no bound). lr: the heads' peak rate (null: the drafter's own). optimizer muon takes the
    matrices inside the drafter, at the peak rate muon_lr (null: lr), and leaves the rest to adamw. Head k's loss weighs
    decay^k (Medusa, section 3.2.1). loss: ce, cross-entropy; lk, KL from the backbone's distribution plus the
    total variation, which counts the more the more is accepted (arXiv:2602.23881). soft, for ce, is the share of the
    backbone's distribution in a target; the rest is the token it emitted. regress weighs the distance of the states of
    autoregressive heads (Hydra, EAGLE) from the backbone's own (null: the drafter's default in stage 1, 0 in stage 2).
    scored: how many tokens of the heads'
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

    stage: int = setting(1, least=1, most=2)
    tuning: str = setting("lora", among=("lora", "qlora", "full"))
    lora_rank: int = setting(32, least=1, most=65_536)
    lora_alpha: float = setting(16.0, least=0.0)
    lora_dropout: float = setting(0.05, least=0.0, most=1.0)
    lora_layers: int | None = setting(None, least=1, most=65_536)
    objective: str = setting("kl", among=("kl", "ce"))
    lambda_0: float = setting(0.2, least=0.0)
    schedule: str = setting("warmup", among=("constant", "warmup", "sine"))
    heads_first: float = setting(0.1, least=0.0, most=1.0)
    backbone_lr: float | None = setting(None, least=0.0)
    max_length: int = setting(1024, least=16)
    gradient_checkpointing: bool = False
    shard: bool = False
    optimizer: str = setting("adamw", among=("adamw", "adamw8bit", "muon"))
    muon_lr: float | None = setting(None, least=0.0)
    epochs: int = setting(2, least=1, most=10_000)
    max_tokens: int | None = setting(800_000, least=1)
    lr: float | None = setting(None, least=0.0)
    min_lr_ratio: float = setting(0.05, least=0.0, most=1.0)
    warmup_steps: int = setting(20, least=0)
    batch_tokens: int = setting(1024, least=2)
    accumulation: int = setting(1, least=1)
    clip: float = setting(1.0, least=0.0)
    weight_decay: float = setting(0.0, least=0.0)
    beta1: float = setting(0.9, least=0.0, below=1.0)
    beta2: float = setting(0.95, least=0.0, below=1.0)
    decay: float = setting(0.8, least=0.0, most=1.0)
    loss: str = setting("ce", among=("ce", "lk"))
    soft: float = setting(0.0, least=0.0, most=1.0)
    regress: float | None = setting(None, least=0.0)
    scored: int | None = setting(None, least=64, most=MANY)
    heads_in_turn: bool = False
    states: str = setting("kept", among=("kept", "fresh"))
    validation_fraction: float = setting(0.05, least=0.0, most=0.5)
    validation_every: int = setting(50, least=1)
    validation_tokens: int = setting(16_384, least=1)
    checkpoint_every: int = setting(100, least=1)
    seed: int = setting(0, least=0, most=2**62)
    dtype: str = setting("bf16", among=("bf16", "fp32"))


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
