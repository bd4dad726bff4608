"""Reads recipes from YAML files, KEY=VALUE words and flags, and the settings that a run's drafter records."""

import dataclasses
import difflib
import json
import logging
import math
import re
import site
import sysconfig
import typing
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import msgspec

from medusa_cli.errors import UsageError, UserError, shown
from medusa_cli.files.io import is_whole, parse_yaml, read_text, read_yaml
from medusa_cli.runs.recipe import Recipe, types
from medusa_cli.runs.run import Provenance, Run, describe_drafter

SHARED = Path("share", "medusa-cli", "recipes")  # in an installed package
WORDS = {
    "int": "a whole number",
    "float": "a number",
    "str": "a word",
    "bool": "true or false",
    "|": "or",
}
WORDS |= {"array": "a list of whole numbers such as [1,2]"}
log = logging.getLogger(__name__)


def recipe_folders() -> list[Path]:
    """Returns the folders with the recipes that ship, in a clone or in an installed package."""
    above = Path(__file__).parents[2]
    clone = [above / "recipes"] if (above / "pyproject.toml").is_file() else []
    roots = dict.fromkeys([Path(sysconfig.get_path("data")), Path(site.getuserbase()), above])
    return [folder for folder in [*clone, *(root / SHARED for root in roots)] if folder.is_dir()]


def find_recipe(name: str | Path) -> Path:
    """Returns a recipe's path: `name` if it exists, else the shipped recipe of that name (with or without recipes/).

    Raises UserError, which lists the shipped recipes, if there is neither.
    """
    path = Path(name)
    if path.exists():
        return path
    files = (file for folder in reversed(recipe_folders()) for file in folder.glob("*.yaml"))
    shipped = {file.stem: file for file in files}
    own = shipped.get(path.name.removesuffix(".yaml"))
    if own is not None and path.parent in (Path(), Path("recipes")):
        return own
    fault = f"the recipe {name} is not a file"
    raise UserError(fault, f"give one, or the name of one that ships: {', '.join(shipped)}")


def load_recipe(path: str | Path | None = None, overrides: Sequence[str] = ()) -> Recipe:
    """Reads a recipe file (None: the defaults) and applies overrides, such as "train.lr=1e-3" or "drafter=hydra".

    A recipe that ships may be given by its name. Raises UserError for an unreadable file, UsageError for an unknown key
    or a value that is not valid.
    """
    recipe = Recipe()
    if path is not None:
        path = find_recipe(path)
        data = read_yaml(path)
        if not isinstance(data, dict):
            fault = "is empty" if data is None else "is not a mapping of keys"
            raise UserError(f"the recipe {path} {fault}", "write keys such as `train: {lr: 1e-3}`")
        for key, value in _flatten(data):
            recipe = _with(recipe, _full_name(key, f"the recipe {path}"), value, path.parent)
    for override in overrides:
        key, equals, text = override.partition("=")
        if not equals:
            raise UsageError(
                f"{shown(override)} is not an override", "write key=value, such as train.lr=1e-3"
            )
        name = _full_name(key.strip(), "the command line")
        text = text.strip()
        # If a key takes text, its value is the text itself, and not what YAML would read.
        whole = types()[name] in (str, str | None) and text != "null"
        recipe = _with(recipe, name, text if whole else _parsed(text))
    return recipe


def _with(recipe: Recipe, key: str, value: Any, folder: Path | None = None) -> Recipe:
    """Returns the recipe with one setting changed; a chat template is read from its file, in `folder` if given."""
    value = _valid(key, value)
    if key == "chat_template" and value is not None:
        value = template_text(value, folder)
    section, dot, name = key.partition(".")
    if dot:
        value = dataclasses.replace(getattr(recipe, section), **{name: value})
    return dataclasses.replace(recipe, **{section: value})


def _full_name(key: str, source: str) -> str:
    """Returns the full name of a key; for an unknown key, raises UsageError with the nearest known key."""
    key = "drafter.name" if key == "drafter" else key
    if key in types():
        return key
    near = difflib.get_close_matches(key, types(), n=1, cutoff=0.5)
    if not near:  # the section may be missing or wrong: compare the last part only
        by_last = {known.rpartition(".")[2]: known for known in types()}
        names = difflib.get_close_matches(key.rpartition(".")[2], by_last, n=1)
        near = [by_last[name] for name in names]
    sections = ", ".join(dict.fromkeys(known.partition(".")[0] for known in types()))
    fault = f"{source} has the unknown key {shown(key)}"
    raise UsageError(fault, f"did you mean {near[0]!r}?" if near else f"use one of {sections}")


def _valid(key: str, value: Any) -> Any:
    """Returns the value in its key's type; raises UsageError, with key and value, if it does not fit the type."""
    kind = types()[key]
    choices = typing.get_args(kind) if typing.get_origin(kind) is Literal else ()
    try:
        # Not strict, because YAML reads 1e-3, which has no decimal point, as text.
        number = msgspec.convert(value, kind, strict=False)
        if isinstance(number, float) and not math.isfinite(number):
            expected = "a finite number"
        elif isinstance(number, str) and not is_whole(number):
            expected = "text in UTF-8"
        else:
            return number
    except msgspec.ValidationError as reason:
        text = "Expected `array`" if "$[" in str(reason) else str(reason)
        words = re.findall(r"Expected (.*?)(?:, got .*)?$", text) or ["a smaller number"]
        expected = re.sub(
            r"[a-z]+|\|", lambda word: WORDS.get(word[0], word[0]), words[0].replace("`", "")
        )
        expected = f"one of {', '.join(map(str, choices))}" if choices else expected
    raise UsageError(f"{key}={shown(value)} is not valid", f"use {expected}")


def _parsed(text: str) -> Any:
    """Returns the value that YAML reads from a word, or the word itself if it is not YAML."""
    import yaml

    try:
        return parse_yaml(text)
    except (yaml.YAMLError, ValueError, OverflowError):
        return text


def template_text(value: str, folder: Path | None = None) -> str:
    """Returns the text of a chat template: the value itself if it has braces, otherwise the text of the file it names.

    A recipe may refer only to a file in its own `folder`; the command line (None) may refer to any file. Raises
    UserError for other files, and for a file that cannot be read.
    """
    if "{" in value:
        return value
    name = f"@chat_template {shown(value)}"
    remedy = "give a Jinja file"
    try:
        path = (folder or Path()) / value
        if folder is not None and not path.resolve().is_relative_to(folder.resolve()):
            fault = f"{name} lies outside the recipe's folder"
            raise UserError(fault, f"{remedy} in it, or name it on the command line")
        return read_text(path, f"{name}:", remedy=remedy)
    except (OSError, ValueError) as reason:  # not a valid file name
        raise UserError(f"{name} cannot be read", remedy) from reason


def _flatten(data: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in data.items():
        if isinstance(value, dict):
            yield from _flatten(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def differences(old: dict[str, Any], new: Recipe, sections: Sequence[str]) -> list[str]:
    """Returns the dotted keys in the sections whose values differ from those of an old recipe, given as a dict."""
    before = dict(_flatten(old))
    changed = [key for key, value in _flatten(new.to_dict()) if before.get(key) != value]
    return [key for key in changed if key.split(".")[0] in sections]


def split_words(words: Sequence[str]) -> tuple[str | None, dict[str, str]]:
    """Returns the recipe's file, if one is given, and the text of each KEY=VALUE setting."""
    files = [word for word in words if "=" not in word or word.endswith((".yaml", ".yml"))]
    if len(files) > 1:
        fault = f"{files[1]!r} is a second recipe"
        raise UsageError(fault, "give one recipe file and KEY=VALUE settings")
    settings = {}
    for word in words:
        if word not in files:
            key, _, value = word.partition("=")
            settings[key.strip()] = value
    return next(iter(files), None), settings


def recipe_of(
    run: Run,
    words: Sequence[str],
    flags: Mapping[str, Any],
    resume: bool,
    origin: Run | None = None,
) -> Recipe:
    """Returns a command's recipe: from its file (by default, a resumed run's), then KEY=VALUE words, then flags.

    Unless words or flags set the model, it comes from the run, or else from the run `origin`. So does the chat
    template, unless the recipe has one. Without a file, the settings of the drafter and its loss are those of `origin`.
    """
    file, settings = split_words(words)
    settings |= {key: str(value) for key, value in flags.items() if value is not None}
    if file is None and origin is not None and not resume:
        settings = _settings_of(origin, settings) | settings
    overrides = [f"{key}={value}" for key, value in settings.items()]
    giver = run if origin is None or run.recorded_model is not None else origin
    if resume and file is None and run.recipe_path.is_file():
        recipe = load_recipe(run.recipe_path, overrides)
    else:
        recipe = load_recipe(file, overrides)
        model: str | int | None = None
        if "model" not in settings:
            model = giver.model
            if model is None and giver is origin and (recorded := _recorded(giver)) is not None:
                model = recorded.identity.get("id")  # of a drafter that ships, which is in no run
        if model not in (None, recipe.model):
            recipe = _of_model(recipe, str(model), file, keep_template="chat_template" in settings)
    return dataclasses.replace(
        recipe, chat_template=run.template_with(recipe.chat_template or giver.chat_template)
    )


def _recorded(run: Run) -> Provenance | None:
    """Returns the provenance that a run's drafter records; None if the run has no drafter."""
    return describe_drafter(run.drafter_dir).provenance if run.has_drafter else None


def _settings_of(origin: Run, asked: Mapping[str, str]) -> dict[str, str]:
    """Returns the settings of a run's drafter, its loss and its held-out part, as its training recorded them.

    The result is empty if another kind of drafter is requested.
    """
    provenance = _recorded(origin)
    if provenance is None:
        return {}
    recorded = provenance.recipe
    kind = asked.get("drafter") or asked.get("drafter.name")
    if kind not in (None, recorded.drafter.get("name")):
        return {}
    # With another held-out part, the new run would be judged on conversations that the heads were trained on.
    keys = ("decay", "soft", "regress", "scored", "validation_fraction")
    loss = {key: getattr(recorded.train, key) for key in keys}
    settings = {f"drafter.{key}": value for key, value in recorded.drafter.items()}
    settings |= {f"train.{key}": value for key, value in loss.items() if value is not None}
    own = {key: value for key, value in settings.items() if key in types()}
    texts = {key: value for key, value in own.items() if isinstance(value, str)}
    return {key: json.dumps(value) for key, value in own.items()} | texts


def _of_model(recipe: Recipe, model: str, file: str | None, keep_template: bool) -> Recipe:
    """Returns a recipe for a run's model; if the file names another model, warns and drops the file's chat template."""
    if file is not None and "model" in read_yaml(find_recipe(file)):
        log.warning(
            f"the recipe {file} is for the model {recipe.model}, and the run's is {model}, which is taken; "
            f"@model {recipe.model} takes the recipe's"
        )
        if not keep_template:
            recipe = dataclasses.replace(recipe, chat_template=None)
    return dataclasses.replace(recipe, model=model)
