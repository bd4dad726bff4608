"""A bench: loads the model twice in turn (transformers' own, ours), measures all methods, writes one document."""

import copy
import gc
import importlib.metadata
import itertools
import logging
import os
import platform
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from medusa_cli.api import LoadedModel, add_ngrams, dynamic_tree, load_drafting, ngrams_alone, static_tree
from medusa_cli.assets import gguf_path
from medusa_cli.bench.measure import (
    SILENT,
    Result,
    Watcher,
    first_difference,
    likelihood,
    measure,
    reference_of,
    summarise,
)
from medusa_cli.bench.methods import (
    DRAFTED,
    TRANSFORMERS,
    Method,
    llama_method,
    our_method,
    transformers_method,
)
from medusa_cli.bench.questions import Question
from medusa_cli.bench.steps import time_passes
from medusa_cli.decode import AdaptivePolicy, DraftPolicy, Sampling
from medusa_cli.decode.decoder import policy_of
from medusa_cli.decode.policy import DynamicTreePolicy, StaticTreePolicy
from medusa_cli.drafters import Drafter
from medusa_cli.engine.autotune import processor
from medusa_cli.engine.kernels import BITS
from medusa_cli.engine.load import choose_kernel
from medusa_cli.errors import UserError
from medusa_cli.model import Backbone, lora
from medusa_cli.model.identity import weights_of
from medusa_cli.model.load import DTYPES, has_own_code, load_network, resolve_device, resolve_dtype
from medusa_cli.runs.accuracies import STAMP, stamp_of
from medusa_cli.runs.io import write_json
from medusa_cli.runs.provenance import describe_drafter
from medusa_cli.runs.resolve import Choice, LoadOptions
from medusa_cli.runs.run import provenance

PACKAGES = ("torch", "transformers", "numpy", "peft", "bitsandbytes", "llama-cpp-python")
# By method and question id, the text of each turn.
Texts = dict[str, dict[str, list[str]]]
Drafting = tuple[Choice, Drafter, DraftPolicy]  # a method's files, its drafter and its draft policy
log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Bench:
    """Settings of a measurement: methods by name, questions, and at most `max_new_tokens` a turn.

    competitors: the files of methods that name a drafter. gguf: llama.cpp's file. draft_model: drafts for hf-assisted.
    """

    choice: Choice
    methods: list[str]
    questions: list[Question]
    max_new_tokens: int
    sampling: Sampling
    title: str
    options: LoadOptions
    batch_size: int = 1
    competitors: Mapping[str, Choice] = field(default_factory=dict)
    gguf: Path | None = None
    draft_model: str | None = None

    def run(
        self, load: Callable[[Choice], LoadedModel], watcher: Watcher = SILENT, time_rows: bool = False
    ) -> tuple[dict[str, Any], Texts]:
        """Returns the bench's document and the answers' texts; only one copy of the model is loaded at a time.

        time_rows: times passes by rows for the report, too.
        """
        results = [Result(question) for question in self.questions]
        plain = [name for name in self.methods if name in TRANSFORMERS]
        plain_dtype = self._measure_transformers(plain, results, watcher) if plain else None
        loaded = load(self.choice)
        backbone, drafting = loaded.backbone, self._drafting(loaded)
        for name, (choice, drafter, policy) in drafting.items():
            if name in self.competitors:
                log.info("%s: %s drafter %s, %s", name, drafter.name, choice.drafter, policy.description)
        self._measure(backbone, self._our_methods(backbone, drafting), results, watcher)
        for result in results:
            result.answers = {name: result.answers[name] for name in self.methods}
        kernel = backbone.engine.kernel.name
        # Rounded weights answer as a model of their own: the plain model's answers tell how far it moved.
        asks_quality = not self.sampling.greedy or kernel in BITS
        document = {
            "title": self.title,
            "facts": self._facts(backbone, drafting, plain_dtype),
            **provenance(backbone.identity),
            "drafting": {name: _describe(*parts) for name, parts in drafting.items()},
            "max_new_tokens": self.max_new_tokens,
            "batch_size": self.batch_size,
            "dtype": _dtype(backbone.dtype),
            "engine": backbone.engine.name,
            "kernel": kernel,
            "device": str(backbone.device),
            "sampling": vars(self.sampling),
            **summarise(results, self._differences(backbone, results)),
            "environment": environment(backbone.device),
            "quality": likelihood(backbone, results) if asks_quality else None,
            "rows": time_passes(backbone) if time_rows else None,
        }
        texts = {
            name: {r.question.id: [backbone.decode(turn).strip() for turn in r.answers[name].turns] for r in results}
            for name in self.methods
        }
        return document, texts

    def _measure(
        self, backbone: Backbone, methods: Mapping[str, Method], results: Sequence[Result], watcher: Watcher
    ) -> None:
        if methods:
            limits = {"batch_size": self.batch_size, "watcher": watcher}
            measure(backbone, methods, results, self.max_new_tokens, **limits)  # type: ignore[arg-type]

    def _measure_transformers(self, names: Sequence[str], results: Sequence[Result], watcher: Watcher) -> torch.dtype:
        """Measures transformers' methods on the unmodified model, frees it, and returns its number type."""
        backbone = self._plain_backbone()
        assistant = None if self.draft_model is None else self._assistant(backbone)
        methods = {
            name: transformers_method(
                backbone, self.sampling, name == "hf-lookup", assistant if name == "hf-assisted" else None
            )
            for name in names
        }
        self._measure(backbone, methods, results, watcher)
        dtype = backbone.dtype
        del backbone, assistant, methods
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
        return dtype

    def _plain_backbone(self) -> Backbone:
        """Loads the transformers model with the run's adapter, in the number type that our engine will compute in."""
        options, model = self.options, self.choice.model
        device, foreign = resolve_device(options.device), options.trust_remote_code and has_own_code(model)
        if options.engine == "eager" or foreign or (options.engine == "auto" and options.quantised):
            dtype = resolve_dtype(options.dtype, model, device, options.trust_remote_code)
        else:
            dtype = choose_kernel(model, device, options.dtype, options.engine, None).rows
        options = replace(options, dtype=next(name for name, known in DTYPES.items() if known == dtype))
        template = self.choice.run.chat_template if self.choice.run else None
        network, tokenizer = load_network(model, options, chat_template=template)
        if self.choice.adapter is not None:
            network = lora.merge(network, self.choice.adapter, beside=options.quantised)
        backbone = Backbone(network, tokenizer, id=model, weights=weights_of(model))
        network.set_attn_implementation("sdpa")  # transformers' own again
        return backbone

    def _assistant(self, backbone: Backbone) -> Any:
        """Loads the model that drafts for hf-assisted; raises UserError for another vocabulary."""
        network, tokenizer = load_network(str(self.draft_model), self.options)
        if tokenizer.get_vocab() != backbone.tokenizer.get_vocab():
            raise UserError(
                f"@draft_model {self.draft_model!r} has another vocabulary than the model",
                "give a smaller model of the same family, one that shares its tokenizer",
            )
        return network.eval()

    def _drafting(self, loaded: LoadedModel) -> dict[str, Drafting]:
        """Returns what each method with a drafter drafts with."""
        backbone = loaded.backbone
        drafting = {
            name: (choice, *load_drafting(choice, backbone, static_tree(choice)))
            for name, choice in self.competitors.items()
        }
        if loaded.drafter is not None and loaded.policy is not None:
            drafting["medusa"] = (self.choice, loaded.drafter, loaded.policy)
        if "medusa" in drafting:
            choice, drafter, policy = drafting["medusa"]
            drafting["medusa-alone"] = drafting["medusa-dynamic"] = (choice, drafter, policy)
            if "medusa-alone" in self.methods:
                # A copy, which learns nothing from the steps of another method.
                drafting["medusa-alone"] = (choice, drafter, copy.deepcopy(policy.without_ngrams()))
            if "medusa-dynamic" in self.methods and choice.dynamic is None:
                alone = policy.without_ngrams()
                tree = dynamic_tree(choice, getattr(alone, "max_size", alone.size), drafter)
                policy = add_ngrams(choice, policy_of(tree), backbone, drafter)
                drafting["medusa-dynamic"] = (choice, drafter, policy)
        return {name: drafting[name] for name in self.methods if name in drafting}

    def _our_methods(self, backbone: Backbone, drafting: Mapping[str, Drafting]) -> dict[str, Method]:
        methods: dict[str, Method] = {}
        for name in self.methods:
            if name == "llama.cpp":
                file = self.gguf or gguf_path(self.choice.model)
                assert file is not None  # parse_methods has seen to it
                methods[name] = llama_method(file, backbone)
            elif name not in TRANSFORMERS:
                _, drafter, policy = drafting.get(name, (None, None, None))
                policy = ngrams_alone(backbone) if name == "lookup" else policy
                assert policy is not None or name not in DRAFTED
                methods[name] = our_method(backbone, drafter, policy, self.sampling, self.batch_size)
        return methods

    def _differences(self, backbone: Backbone, results: Sequence[Result]) -> dict[str, list[Any]] | None:
        """Returns each method's first differences from plain decoding; None for sampling, which may differ."""
        if not self.sampling.greedy:
            return None
        reference = reference_of(self.methods)
        parted = {
            name: [first_difference(backbone, result, name, reference) for result in results] for name in self.methods
        }
        return {name: [one for one in rows if one is not None] for name, rows in parted.items()}

    def _facts(
        self, backbone: Backbone, drafting: Mapping[str, Drafting], plain_dtype: torch.dtype | None
    ) -> list[str]:
        """Returns sentences on what was measured."""
        mode = "greedy" if self.sampling.greedy else self.sampling.mode
        facts = [
            f"{self.choice.model}, {_dtype(backbone.dtype)} on {backbone.device}, {backbone.engine.title}, "
            f"{len(self.questions)} questions, up to {self.max_new_tokens} new tokens a turn, {mode} decoding."
        ]
        for name, (choice, drafter, policy) in drafting.items():
            day = _describe(choice, drafter, policy)["created"][:10]
            facts.append(f"{name}: {drafter.name} drafter {choice.drafter} of {day}, {policy.description}.")
        if plain_dtype is not None and plain_dtype != backbone.dtype:
            facts.append(f"hf ran in {_dtype(plain_dtype)}.")
        if self.draft_model:
            facts.append(f"hf-assisted: transformers' assisted generation, {self.draft_model} drafts.")
        if self.batch_size > 1:
            facts.append(f"{self.batch_size} questions side by side; their seconds are shared by their tokens.")
        return facts


def _describe(choice: Choice, drafter: Drafter, policy: DraftPolicy) -> dict[str, Any]:
    """Returns what a method drafted with. tree: the file it is from, None if it was searched."""
    assert choice.drafter is not None
    alone = policy.without_ngrams()
    return {
        "drafter": str(choice.drafter),
        "kind": drafter.name,
        "created": describe_drafter(choice.drafter).provenance.created or "",
        STAMP: stamp_of(choice.drafter),
        "tree": str(choice.tree) if choice.tree else None,
        "dynamic": isinstance(alone, DynamicTreePolicy),
        "auto": isinstance(alone, AdaptivePolicy),
        "lookup": alone is not policy,
        "nodes": policy.size,
        "static_tree": policy.tree.to_json() if isinstance(policy, StaticTreePolicy) else None,
    }


def _dtype(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def environment(device: torch.device) -> dict[str, str | int]:
    """Returns operating system, processor, memory, accelerator, and versions of what computes."""
    facts: dict[str, str | int] = {
        "system": platform.platform(),
        "processor": processor(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 0,
        "threads": torch.get_num_threads(),
        "capability": torch.backends.cpu.get_cpu_capability(),
    }
    with suppress(ValueError, OSError, AttributeError):  # where the system does not say
        facts["memory_gb"] = round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 1e9)
    if device.type == "cuda":
        facts |= {"accelerator": torch.cuda.get_device_name(device), "cuda": str(torch.version.cuda)}
    facts["python"] = platform.python_version()
    for name in PACKAGES:
        with suppress(importlib.metadata.PackageNotFoundError):
            facts[name] = importlib.metadata.version(name)
    return facts


def save(document: dict[str, Any], folder: Path) -> Path:
    """Writes a bench into a folder under a name of its own, by its time; returns its path."""
    stem = document["created"].replace(":", "").replace("+0000", "")
    folder.mkdir(parents=True, exist_ok=True)
    for number in itertools.count(1):  # two benches may end in one second
        path = folder / (f"{stem}.json" if number == 1 else f"{stem}_{number}.json")
        with suppress(FileExistsError):
            path.with_suffix(".md").touch(exist_ok=False)  # takes the name in one move: no other process can
            write_json(path, document)
            return path
    raise AssertionError
