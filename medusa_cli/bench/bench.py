"""A bench: loads the model in transformers, then in our engine; lets all methods answer; returns one document."""

import gc
import importlib.metadata
import os
import platform
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

from medusa_cli.bench.answers import Watch, answer_all, first_difference, likelihood, unwatched
from medusa_cli.bench.methods import (
    LLAMA,
    METHODS,
    TRANSFORMERS,
    UNBATCHED,
    Method,
    our_method,
    transformers_method,
)
from medusa_cli.bench.peers import (
    check_reader,
    llama_facts,
    llama_method,
    plain_of,
    served_models,
    server_method,
)
from medusa_cli.bench.questions import Question
from medusa_cli.bench.stats import Result, by_turn, reference_of, summarize
from medusa_cli.decode import DraftPolicy, Sampling
from medusa_cli.decode.policy import DynamicTreePolicy
from medusa_cli.decode.processors import check_generation_config
from medusa_cli.device import processor
from medusa_cli.drafters import Drafter
from medusa_cli.engine import load_backbone
from medusa_cli.errors import UsageError, UserError
from medusa_cli.files.io import write_json
from medusa_cli.files.model_source import ModelSource
from medusa_cli.loading import load_drafting, static_tree
from medusa_cli.model import Backbone
from medusa_cli.model.backbone import identity_of, text_config
from medusa_cli.model.digest import weights_of
from medusa_cli.model.load import (
    load_network,
    name_of_dtype,
    read_config,
    resolve_device,
    resolve_dtype,
)
from medusa_cli.runs.load_options import LoadOptions
from medusa_cli.runs.resolve import Choice
from medusa_cli.runs.run import STAMP, check_backbone, describe_drafter, provenance, stamp_of

PACKAGES = ("torch", "transformers", "numpy", "peft", "bitsandbytes", "xllamacpp")


# The drafter and the policy of each method that drafts.
Loaded = Mapping[str, tuple[Drafter | None, DraftPolicy]]


@dataclass(frozen=True)
class Bench:
    """Holds the settings of a measurement: method names, questions, and at most `max_new_tokens` per turn.

    drafts: the files of the methods that use a drafter. gguf: the file for llama.cpp.
    draft_model: the model that drafts for hf-assisted. peers: addresses of servers that also
    answer, by method name. cached: methods keep the prefixes of earlier turns. Raises UsageError if
    a method is unknown or cannot run.
    """

    choice: Choice
    drafts: Mapping[str, Choice]
    methods: list[str]
    questions: list[Question]
    max_new_tokens: int
    sampling: Sampling
    title: str
    options: LoadOptions
    batch_size: int = 1
    gguf: Path | None = None
    draft_model: ModelSource | None = None
    peers: Mapping[str, str] = field(default_factory=dict)
    cached: bool = False

    def __post_init__(self) -> None:
        names = self.methods
        text = ",".join(self.methods)
        known = {*METHODS, *self.drafts, *self.peers}
        unknown = [name for name in names if name not in known]
        if unknown or not names:
            fault = f"@methods {text!r}: {''.join(unknown[:1])!r} is unknown"
            raise UsageError(fault, f"use {','.join(METHODS)}")
        unbatched = {*UNBATCHED, *self.peers}
        if self.batch_size > 1 and (alone := [name for name in names if name in unbatched]):
            remedy = "leave it out, or use @batch_size 1"
            raise UsageError(f"@methods {alone[0]} decodes one sequence at a time", remedy)
        for name in (name for name in names if name in LLAMA):
            if self.choice.adapter is not None and self.gguf is None:
                fault = f"@methods {name}: the GGUF file of {self.choice.model!r} lacks the run's adapter"
                raise UsageError(fault, "leave it out, or give the @gguf of the merged model")
            check_reader(name, self.choice.model, self.gguf, self.sampling)
        if self.peers and not self.sampling.greedy:
            fault = f"@peer {next(iter(self.peers))} is compared in greedy decoding only"
            raise UsageError(fault, "leave @temperature out")
        if "hf-assisted" in names and self.draft_model is None:
            fault = "@methods hf-assisted needs a model that drafts"
            raise UsageError(fault, "give @draft_model NAME")
        for flag, value, users in (
            ("@gguf", self.gguf, LLAMA),
            ("@draft_model", self.draft_model and self.draft_model.name, ("hf-assisted",)),
        ):
            if value is not None and not set(users) & set(names):
                remedy = f"leave it out, or add {users[0]}"
                raise UsageError(f"{flag} {value} has no effect with @methods {text}", remedy)

    def run(self, watch: Watch = unwatched) -> dict[str, Any]:
        """Runs the bench and returns its document; only one copy of the model is loaded at a time."""
        trees = {name: static_tree(choice) for name, choice in self.drafts.items()}
        self._check_fit()
        results = [Result(question) for question in self.questions]
        self._answer_by_transformers(results, watch)
        backbone = self._load(self.options)
        check_generation_config(backbone)
        if self.choice.run is not None:
            self.choice.run.bind(backbone.identity)
        loaded = {
            name: load_drafting(choice, backbone, trees[name])
            for name, choice in self.drafts.items()
        }
        self._answer(backbone, self._our_methods(backbone, loaded), results, watch)
        for result in results:
            result.answers = {name: result.answers[name] for name in self.methods}
        return self._document(backbone, loaded, results)

    def _answer(
        self, backbone: Backbone, methods: Mapping[str, Method], results: list[Result], watch: Watch
    ) -> None:
        count = self.max_new_tokens
        answer_all(backbone, methods, results, count, self.batch_size, self.cached, watch)

    def _document(
        self, backbone: Backbone, loaded: Loaded, results: list[Result]
    ) -> dict[str, Any]:
        """Returns all measured figures, and the settings and versions with which they were measured."""
        plain = {name: plain_of(name, self.methods, self.peers) for name in self.methods}
        summary = summarize(results, self._differences(backbone, results), plain)
        for name, figures in summary["methods"].items():
            if self.cached:
                figures["by_turn"] = by_turn(results, name)
            for row, result in zip(figures["answers"], results, strict=True):
                turns = result.answers[name].turns
                row["turns"] = [backbone.decode(turn).strip() for turn in turns]
        # Quantized weights form a different model. The likelihood of the unmodified model's answers
        # under the quantized model shows how far the two differ.
        asks_quality = not self.sampling.greedy or backbone.engine.quantize is not None
        return {
            "title": self.title,
            "facts": self._facts(backbone, loaded, results),
            **provenance(backbone.identity),
            "drafting": {
                name: _describe(self.drafts[name], *parts) for name, parts in loaded.items()
            },
            "peers": dict(self.peers),
            "max_new_tokens": self.max_new_tokens,
            "batch_size": self.batch_size,
            "dtype": _dtype(backbone.dtype),
            "engine": backbone.engine.name,
            "kernel": backbone.engine.title,
            "row_invariant": backbone.engine.row_invariant,
            "device": str(backbone.device),
            "sampling": {
                name: value for name, value in vars(self.sampling).items() if value is not None
            },
            **summary,
            "environment": environment(backbone.device),
            "quality": likelihood(backbone, results) if asks_quality else None,
            "questions": [asdict(question) for question in self.questions],
        }

    def _differences(
        self, backbone: Backbone, results: list[Result]
    ) -> dict[str, list[dict[str, Any]]] | None:
        """Returns where each method's answers differ from the reference's; None unless decoding is greedy."""
        if not self.sampling.greedy:
            return None
        reference = reference_of(self.methods)
        differences = {}
        for name in self.methods:
            places = (first_difference(backbone, result, name, reference) for result in results)
            differences[name] = [place for place in places if place]
        return differences

    def _facts(self, backbone: Backbone, loaded: Loaded, results: list[Result]) -> list[str]:
        """Returns sentences about the model, the questions, the drafters, other programs and caches."""
        mode = "greedy" if self.sampling.greedy else self.sampling.mode
        facts = [
            f"{self.choice.model}, {_dtype(backbone.dtype)} on {backbone.device}, {backbone.engine.title}, "
            f"{len(results)} questions, up to {self.max_new_tokens} new tokens a turn, {mode} decoding."
        ]
        for name, (drafter, policy) in loaded.items():
            if drafter is not None:
                folder = self.drafts[name].drafter
                facts.append(f"{name}: {drafter.name} drafter {folder}, {policy.description}.")
        if any(name in LLAMA for name in self.methods):
            facts.append(llama_facts())
        if self.cached:
            longest = max(len(prompt) for result in results for prompt in result.prompts)
            size = longest * backbone.engine.row_bytes
            facts.append(
                f"The longest prompt has {longest:,} tokens; our cache of it takes {size / 1e6:,.0f} MB."
            )
        return facts

    def _check_fit(self) -> None:
        """Raises UserError, before loading a model, if a peer lists no models or a run or drafter has another model."""
        for name, url in self.peers.items():
            served_models(name, url)
        model = self.choice.source
        config = read_config(model, self.options.trust_remote_code, whole=True)
        vocab_size = text_config(config).vocab_size
        identity = identity_of(
            config, vocab_size, id=model.name, weights=weights_of(model), adapter=None
        )
        run = self.choice.run
        if run is not None and run.owner is not None:
            check_backbone(run.owner, identity, f"the run {run.path}")
        for folder in filter(None, (choice.drafter for choice in self.drafts.values())):
            known = describe_drafter(folder).provenance.identity
            check_backbone(known, identity, f"the drafter in {folder}", tuned=True)

    def _answer_by_transformers(self, results: list[Result], watch: Watch) -> None:
        """Runs the transformers methods on the unmodified model, then frees it."""
        names = [name for name in self.methods if name in TRANSFORMERS]
        if not names:
            return
        backbone = self._plain_backbone()
        methods = {}
        for name in names:
            assistant = None
            if name == "hf-assisted" and self.draft_model is not None:
                assistant = self._assistant(self.draft_model, backbone)
            lookup = name == "hf-lookup"
            methods[name] = transformers_method(backbone, self.sampling, lookup, assistant)
        self._answer(backbone, methods, results, watch)
        del backbone, assistant, methods
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()

    def _plain_backbone(self) -> Backbone:
        """Loads the transformers model with the run's adapter, in the number type that our engine will use."""
        options = self.options
        device = resolve_device(options.device)
        dtype = resolve_dtype(options.dtype, self.choice.source, device, options.trust_remote_code)
        name = name_of_dtype(dtype)
        quantize = options.quantize if options.quantized else None
        options = replace(
            options, engine="eager", dtype=name, quantize=quantize, activations="auto", kv="fp32"
        )
        # A model that is loaded for gradients keeps its own layers.
        backbone = self._load(options, gradients=True)
        backbone.take_own_attention()
        return backbone

    def _load(self, options: LoadOptions, gradients: bool = False) -> Backbone:
        return load_backbone(
            self.choice.source,
            options,
            adapter=self.choice.adapter,
            chat_template=self.choice.template,
            gradients=gradients,
            chat=True,
        )

    def _assistant(self, model: ModelSource, backbone: Backbone) -> Any:
        """Loads the model that drafts for hf-assisted; raises UserError if its vocabulary differs."""
        network, tokenizer = load_network(model, self.options)
        if tokenizer.get_vocab() != backbone.tokenizer.get_vocab():
            raise UserError(
                f"@draft_model {model.name!r} has another vocabulary than the model",
                "give a smaller model of the same family, one that shares its tokenizer",
            )
        return network.eval()

    def _our_methods(self, backbone: Backbone, loaded: Loaded) -> dict[str, Method]:
        methods: dict[str, Method] = {}
        for name in self.methods:
            if name in LLAMA:
                file = self.gguf or self.choice.source.gguf
                assert file is not None  # check_reader ensures this
                methods[name] = llama_method(name, file, backbone, self.cached)
            elif name in self.peers:
                methods[name] = server_method(name, self.peers[name], backbone, self.cached)
            elif name not in TRANSFORMERS:
                drafter, policy = loaded.get(name, (None, None))
                if name == "lookup":
                    alone = replace(self.choice, drafter=None, lookup=True)
                    _, policy = load_drafting(alone, backbone, None)
                methods[name] = our_method(
                    backbone, drafter, policy, self.sampling, self.batch_size, self.cached
                )
        return methods


def _describe(choice: Choice, drafter: Drafter | None, policy: DraftPolicy) -> dict[str, Any]:
    """Returns a description of a method's drafter and policy.

    tree: the file from which the tree was read, or None if the tree was searched.
    """
    assert choice.drafter is not None and drafter is not None
    return {
        "drafter": str(choice.drafter),
        "kind": drafter.name,
        STAMP: stamp_of(choice.drafter),
        "tree": str(choice.tree.file) if choice.tree.file else None,
        "dynamic": isinstance(policy, DynamicTreePolicy),
        "lookup": policy.ngrams,
        "nodes": policy.size,
    }


def _dtype(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def environment(device: torch.device) -> dict[str, str | int]:
    """Returns the operating system, CPU, accelerator and the versions of the compute libraries."""
    facts: dict[str, str | int] = {
        "system": platform.platform(),
        "processor": processor(),
        "cores": os.cpu_count() or 0,
        "threads": torch.get_num_threads(),
        "capability": torch.backends.cpu.get_cpu_capability(),
    }
    if device.type == "cuda":
        facts |= {
            "accelerator": torch.cuda.get_device_name(device),
            "cuda": str(torch.version.cuda),
        }
    facts["python"] = platform.python_version()
    for name in PACKAGES:
        with suppress(importlib.metadata.PackageNotFoundError):
            facts[name] = importlib.metadata.version(name)
    return facts


def save(document: dict[str, Any], folder: Path) -> Path:
    """Writes a bench to a folder in a file named after the current time; returns the file's path."""
    path = folder / f"{datetime.now(UTC):%Y-%m-%dT%H%M%S-%f}.json"
    write_json(path, document)
    return path
