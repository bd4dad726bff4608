"""Decoding methods that a bench compares: our loop and transformers' generate; peers.py has other programs."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from medusa_cli.bench.stats import Measurement
from medusa_cli.decode import Decoder, DraftPolicy, Request, Sampling
from medusa_cli.decode.processors import MODELS_OWN, generate_arguments
from medusa_cli.drafters import DRAFTERS, Drafter
from medusa_cli.errors import UsageError, UserError
from medusa_cli.files.catalogue import DEFAULT_MODEL
from medusa_cli.files.model_source import ModelSource
from medusa_cli.model import Backbone
from medusa_cli.runs.resolve import Choice, choose, shipped_for
from medusa_cli.runs.run import RUNS, Run, describe_drafter

TRANSFORMERS = ("hf", "hf-lookup", "hf-assisted")
DRAFTED = ("medusa", "medusa-alone", "lookup", *sorted(set(DRAFTERS) - {"medusa"}))
# llama.cpp on a GGUF file: without drafts, and with its own n-gram drafts.
LLAMA = ("llama.cpp", "llama.cpp-ngram")
METHODS = (*TRANSFORMERS, "ar", *DRAFTED, *LLAMA)
# Methods that can decode only one sequence at a time.
UNBATCHED = ("hf-lookup", "hf-assisted", *LLAMA)
LOOKUP_TOKENS = 10  # draft tokens per step of prompt lookup
OnTokens = Callable[[list[int]], None]
# A method continues prompts in parallel, with at most the given number of new tokens each. It
# reports new tokens immediately if it can.
Method = Callable[[Sequence[Sequence[int]], int, OnTokens], list[Measurement]]


def split_names(text: str) -> list[str]:
    """Returns the names in a comma-separated list, in order and without duplicates."""
    return list(dict.fromkeys(name.strip() for name in text.split(",") if name.strip()))


def choose_files(
    names: Sequence[str],
    model: ModelSource | None,
    run: str | None,
    drafter: str | None,
    tree: str | None,
    lookup: bool | None,
) -> tuple[Choice, dict[str, Choice]]:
    """Returns the files that the methods share, and the files of each method.

    A method with the name of a drafter kind uses the run of that name inside `run`. If there is no such run, the method
    uses the drafter of `run` itself, which must be of that kind. If "medusa" is the only such method, it uses the
    drafter of `run` itself, whatever its kind. Raises UserError if a drafter does not exist, and UsageError for a
    file or flag that no method uses.
    """
    outer = Run.open(run) if run else shipped_for(model or ModelSource.of(DEFAULT_MODEL))
    files = {
        name: choose(model, source, None, tree, lookup=lookup)
        for name, source in _runs_of(names, outer, run).items()
    }
    own = "medusa" not in files and any(name.startswith("medusa") for name in names)
    for text, value, used in (
        (f"@drafter {drafter}", drafter, own),
        ("@tree", tree, own or files),
        ("@lookup" if lookup else "@no_lookup", lookup, own or files),
    ):
        if value is not None and not used:
            text = f"{text} has no effect with @methods {','.join(names)}"
            raise UsageError(text, "leave one of them out")
    shared = choose(model, run, drafter, tree, need_drafter=own, lookup=lookup if own else None)
    if own and shared.drafter is None:
        fault = f"@methods {','.join(names)}: there is no drafter for {shared.model!r}"
        raise UsageError(fault, "use @methods ar,lookup, or give a @run or @drafter")
    medusa = files.get("medusa", shared)
    files |= {"medusa": medusa, "medusa-alone": replace(medusa, lookup=False)}
    return shared, {name: files[name] for name in names if name in files and files[name].drafter}


def _runs_of(names: Sequence[str], outer: Run | None, run: str | None) -> dict[str, str | None]:
    """Returns the run of each drafter among the names: the run of that name inside `outer`, or `run` itself."""
    inner = {name for name in names if run and outer is not None and _kind(outer.path / name)}
    named = [name for name in names if name in DRAFTERS or name in inner]
    if named == ["medusa"]:
        return {}
    return {
        name: str(outer.path / name) if outer and name in inner else _own_run(name, outer, run)
        for name in named
    }


def _own_run(name: str, outer: Run | None, run: str | None) -> str | None:
    """Returns `run` if its own drafter is of the kind `name`; raises UserError otherwise."""
    if outer is not None and _kind(outer.path) == name:
        return run
    folder = outer.path if outer and run else RUNS / "NAME"
    raise UserError(
        f"@methods {name}: there is no {name} drafter in {outer.path if outer else 'any run'}",
        f"run `medusa train drafter={name} --run {Run(folder / name).argument}` and give @run {run or 'NAME'}",
    )


def _kind(folder: Path) -> str | None:
    """Returns the kind of the drafter in a run; None if there is none."""
    drafter = Run(folder).drafter_dir
    return describe_drafter(drafter).drafter if (drafter / "config.json").is_file() else None


def our_method(
    backbone: Backbone,
    drafter: Drafter | None,
    policy: DraftPolicy | None,
    sampling: Sampling,
    batch_size: int,
    cached: bool = False,
) -> Method:
    """Returns our decoding loop, which does not draft if there is no policy. cached: the loop keeps prefixes."""
    decoder = Decoder(backbone, drafter, policy, slots=batch_size)

    def answer(
        prompts: Sequence[Sequence[int]], max_new_tokens: int, on_tokens: OnTokens
    ) -> list[Measurement]:
        if not cached:
            decoder.prefixes.clear()  # the other methods run every prompt from its start, too
        answers = [Measurement([[]]) for _ in prompts]
        requests = (Request(prompt, max_new_tokens, sampling) for prompt in prompts)
        for sequence, step in decoder.run(requests):
            answers[sequence.number].add(step)
            answers[sequence.number].cached = [sequence.reused]
            on_tokens(step.tokens)
        return answers

    return answer


def transformers_method(
    backbone: Backbone, sampling: Sampling, lookup: bool = False, assistant: Any = None
) -> Method:
    """Returns transformers' generate on the unmodified model; multiple prompts are padded on the left.

    lookup: use the prompt lookup of transformers. assistant: a smaller model with the same
    vocabulary that drafts the tokens.
    """
    model = backbone.model
    ends = sorted(backbone.eos_ids)
    pad = ends[0] if ends else 0
    # transformers has no typical acceptance.
    rule = sampling if sampling.greedy else replace(sampling, mode="exact")
    drafting = {
        "prompt_lookup_num_tokens": LOOKUP_TOKENS if lookup else None,
        "assistant_model": assistant,
    }

    def answer(
        prompts: Sequence[Sequence[int]], max_new_tokens: int, on_tokens: OnTokens
    ) -> list[Measurement]:
        width = max(map(len, prompts))
        padded = [[pad] * (width - len(prompt)) + list(prompt) for prompt in prompts]
        mask = [[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts]
        ids = torch.tensor(padded, device=model.device)
        mask_ids = torch.tensor(mask, device=model.device)
        # transformers can stream only one sequence.
        streamer = _Streamer(on_tokens) if len(prompts) == 1 else None
        with torch.inference_mode():
            out = model.generate(
                ids,
                attention_mask=mask_ids,
                max_length=width + max_new_tokens,
                max_new_tokens=None,
                eos_token_id=ends or None,
                pad_token_id=pad,
                streamer=streamer,
                **drafting,
                **generate_arguments(rule, MODELS_OWN, width),
            )
        # tolist waits for the device.
        return [Measurement([_until_end(row, ends)]) for row in out[:, width:].tolist()]

    return answer


def _until_end(tokens: list[int], ends: Sequence[int]) -> list[int]:
    """Returns an answer without the padding after its end token."""
    end = next((at for at, token in enumerate(tokens) if token in ends), len(tokens))
    return tokens[: end + 1]


class _Streamer:
    """Passes on new token ids as a transformers streamer; the first call receives the prompt, which is left out."""

    def __init__(self, on_tokens: OnTokens) -> None:
        self._on_tokens = on_tokens
        self._prompt_seen = False

    def put(self, ids: torch.Tensor) -> None:
        if self._prompt_seen:
            self._on_tokens(ids.flatten().tolist())
        self._prompt_seen = True

    def end(self) -> None:
        """Does nothing, because nothing is buffered."""
