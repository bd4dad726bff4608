"""Self-distillation: the model, or servers that run it, answer the seeds. A killed run can be resumed."""

import hashlib
import json
import logging
import os
import shutil
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing, suppress
from dataclasses import replace
from functools import partial
from itertools import chain
from typing import Any, NoReturn

from torch import Tensor

from medusa_cli.data.code_seeds import with_fim_tokens
from medusa_cli.data.conversation import Conversation, tokenized_of
from medusa_cli.data.seeds import distinct, in_order
from medusa_cli.data.states import StateStore, read_rows, states_digest, states_of
from medusa_cli.decode.processors import changes_of, check_generation_config
from medusa_cli.distill.endpoint import Tokenizer, answer_remotely, connect
from medusa_cli.distill.filters import refuses
from medusa_cli.distill.local import MAX_BATCH, Outcome, answer_locally, choose_batch_size
from medusa_cli.drafters.base import check_layers, with_last_layer
from medusa_cli.engine import load_backbone
from medusa_cli.errors import UsageError, UserError
from medusa_cli.files.io import (
    Malformed,
    check_regular,
    read_jsonl,
    read_object,
    repair_jsonl,
    replacing,
    write_json,
)
from medusa_cli.model import Backbone
from medusa_cli.model.distributed import Distributed
from medusa_cli.progress import ShowProgress, show_nothing
from medusa_cli.runs.load_options import LoadOptions
from medusa_cli.runs.recipe import COLDEST, DistillRecipe, Recipe
from medusa_cli.runs.run import Run, provenance

# The estimate of the total tokens starts with this many hypothetical conversations, whose answers
# have the maximum length.
DOUBT = 16
HEADER = "distill.json"
BETWEEN = ", "  # separates the seed names in the header
# Counts that a distillation returns.
COUNTS = ("failed", "skipped", "dropped", "refused", "new_tokens")
log = logging.getLogger(__name__)


def check_settings(settings: DistillRecipe) -> None:
    """Raises UsageError for settings that are invalid or exclude each other."""
    if 0 < settings.temperature < COLDEST:
        fault = f"distill.temperature={settings.temperature} is too close to 0"
        raise UsageError(fault, "use 0 for greedy")
    if any(tap < 1 for tap in settings.taps):
        fault = f"distill.taps={list(settings.taps)} is not valid"
        raise UsageError(fault, "name layers from 1 on, in rising order")
    if settings.max_new_tokens >= settings.context:
        fault = f"@max_new_tokens {settings.max_new_tokens} leaves no room for a prompt"
        raise UsageError(fault, f"lower it, or raise distill.context={settings.context}")


def distill(
    run: Run,
    seeds: Sequence[Conversation],
    recipe: Recipe,
    loading: LoadOptions,
    processes: Distributed,
    show: ShowProgress = show_nothing,
    should_stop: Callable[[], bool] = lambda: False,
) -> dict[str, Any] | None:
    """Answers the seeds that have no conversation in the run yet; returns counts in the first process, otherwise None.

    If there are several processes, each of them writes a part. The first process merges the parts
    at the end, or at the next start. show: called with a name, the tokens done, an estimate
    of the total, the unit, and the conversations done. should_stop: if it returns True, only the
    open answers are completed. A seed with answers of this model is kept as it is.
    """
    shared = processes.size > 1
    with processes.main_process_first():  # the first process downloads the files
        answer, model, settings = _source(recipe, loading, processes.size)
        run.bind(model.identity)
        header = _header(recipe.chat_template, settings, loading, model)
        width = model.hidden_size * (1 + len(settings.taps))
        records = Records(run, width, header) if processes.first else None
        if records is not None:
            merge_parts(run, records)  # parts that killed processes left
            run.failed_path.unlink(missing_ok=True)  # failed seeds are tried again
            run.keep_template(recipe.chat_template)

    done = set(processes.gather(sorted(records.done) if records else [])[0])
    # Processes with different free memory may choose different batch sizes, but they share one
    # order of seeds.
    batch_size = processes.gather(settings.batch_size or MAX_BATCH)[0]
    asked, duplicates = _choose(_fitting(seeds, settings, model), settings, batch_size, done)
    share = processes.strided_shard(asked)
    own = records
    if shared or own is None:
        own = Records(part_of(run, processes.rank), width, header)
    progress = Progress(share, settings, show)
    unanswered = [seed for seed in share if not seed.spans]
    outcomes: Iterator[Outcome] = chain(
        _complete(share, model, settings),
        answer(unanswered, on_tokens=progress.count, should_stop=should_stop),
    )
    # A training that runs the model in every step does not read stored states.
    if not settings.taps and (recipe.train.stage != 1 or recipe.train.states != "kept"):
        outcomes = (replace(outcome, states=None) for outcome in outcomes)
    with closing(own):
        counts, rate = _write(outcomes, run, own, settings, progress)

    every = processes.gather((counts, rate))
    with processes.main_process_first():
        if shared and records is not None:
            merge_parts(run, records)
            records.close()
    if records is None:
        return None
    counts = sum((count for count, _ in every), Counter())
    rate = sum(rate for _, rate in every)
    _report(run, counts, min(settings.context, model.max_positions))
    return {
        "run": str(run.path),
        "conversations": len(records.done),
        "answer_tokens": records.tokens,
        "duplicates": duplicates,
        **{key: counts[key] for key in COUNTS},
        "tokens_per_s": round(rate, 1),
    }


def _choose(
    seeds: Sequence[Conversation], settings: DistillRecipe, batch_size: int, done: set[str]
) -> tuple[list[Conversation], int]:
    """Returns the seeds that have no conversation yet, in order, and the number of duplicate seeds."""
    chosen = in_order(seeds, settings.random_seed, batch_size, settings.max_samples)
    answered = done.union(seed.id for seed in chosen if seed.spans)
    asked = distinct(chosen, answered) if settings.dedup else chosen
    left = [seed for seed in asked if seed.id not in done]
    duplicates = len(chosen) - len(asked)
    if duplicates:
        log.info(f"{duplicates:,} duplicate seeds are left out (distill.dedup=false keeps them)")
    if len(left) < len(asked):
        log.info(f"resuming: {len(asked) - len(left):,} conversations are done already")
    return left, duplicates


def _write(
    outcomes: Iterable[Outcome],
    run: Run,
    records: "Records",
    settings: DistillRecipe,
    progress: "Progress",
) -> tuple[Counter[str], float]:
    """Writes the outcomes of one process; returns their counts and the new tokens per second."""
    counts = Counter[str]()
    rate = 0.0
    start = time.perf_counter()
    for outcome in outcomes:
        counts[_keep(run, records, outcome, settings)] += 1
        counts["new_tokens"] += outcome.conversation.positions if outcome.conversation else 0
        rate = counts["new_tokens"] / (time.perf_counter() - start)
        progress.end()
    return counts, rate


def _complete(
    seeds: Sequence[Conversation], model: Backbone | Tokenizer, settings: DistillRecipe
) -> Iterator[Outcome]:
    """Yields the seeds that already have answers of this model, with their tokens' states if the model runs here."""
    for seed in seeds:
        if not seed.spans:
            continue
        states = None
        if isinstance(model, Backbone):
            states = states_of(model, seed.tokens, with_last_layer(settings.taps))[:-1]
        yield Outcome(seed.id, seed, states)


def _report(run: Run, counts: Counter[str], context: int) -> None:
    """Logs how many conversations were not kept, and why."""
    reasons = {
        "skipped": f"prompts were skipped: too long for a context of {context:,} (distill.context)",
        "dropped": "conversations were dropped: an answer is too short (distill.min_answer_tokens)",
        "refused": "conversations were dropped: an answer is a refusal (distill.drop_refusals)",
        "failed": f"conversations failed, see {run.failed_path}; the same command tries them again",
    }
    for name, reason in reasons.items():
        if counts[name]:
            log.log(
                logging.WARNING if name == "failed" else logging.INFO, f"{counts[name]:,} {reason}"
            )


class Progress:
    """Counts answer tokens and estimates the total for all conversations.

    Short conversations end first, so the tokens of unfinished conversations are counted as well. DOUBT hypothetical
    conversations with answers of the maximum length are also counted, with a weight that falls to 0.
    """

    def __init__(
        self, seeds: Sequence[Conversation], settings: DistillRecipe, show: ShowProgress
    ) -> None:
        self._seeds = len(seeds)
        self._show = show
        turns = sum(min(len(seed.turns), settings.max_turns) for seed in seeds)
        self._most = turns * settings.max_new_tokens
        self.tokens = self.ended = 0

    @property
    def total(self) -> int:
        """Returns the estimated total of answer tokens."""
        doubt = DOUBT * (1 - self.ended / self._seeds)
        each = (self.tokens + doubt * self._most / self._seeds) / (self.ended + doubt)
        return max(self.tokens, min(self._most, round(each * self._seeds)))

    def count(self, tokens: int) -> None:
        """Adds new answer tokens."""
        self.tokens += tokens
        ended = f"{self.ended:,} of {self._seeds:,} conversations"
        self._show("distilling", self.tokens, self.total, "tokens", ended)

    def end(self) -> None:
        """Counts a conversation that has ended."""
        self.ended += 1
        self.count(0)


def _source(
    recipe: Recipe, loading: LoadOptions, processes: int
) -> tuple[Callable[..., Iterator[Outcome]], Backbone | Tokenizer, DistillRecipe]:
    """Returns a function that answers seeds (here or on servers), the model or tokenizer, and the settings used."""
    settings = recipe.distill
    template = recipe.chat_template
    if settings.endpoint is not None:
        tokenizer = Tokenizer(recipe.model, template, trust_remote_code=loading.trust_remote_code)
        servers, silent = connect(settings.endpoint, settings.endpoint_model, tokenizer)
        for line in silent:
            log.warning(f"@endpoint {line}; the others take its work until it answers")
        settings = replace(settings, taps=())  # servers send no states
        # With this field, vLLM's connector for hidden states also writes those of the answer.
        with_answers = {"kv_transfer_params": {"include_output_tokens": True}}
        extra_body = with_answers if recipe.train.states == "vllm" else None
        answer = partial(
            answer_remotely, servers, tokenizer, settings=settings, extra_body=extra_body
        )
        return answer, tokenizer, settings
    backbone = load_backbone(recipe.model, loading, chat_template=template, chat=True)
    log.info(backbone.description)
    check_generation_config(backbone)
    check_layers(settings.taps, backbone.num_layers, "distill.taps")
    if settings.batch_size is None:
        settings = replace(settings, batch_size=choose_batch_size(backbone, settings, processes))
    return partial(answer_locally, backbone, settings=settings), backbone, settings


def _header(
    template: str | None, settings: DistillRecipe, loading: LoadOptions, model: Backbone | Tokenizer
) -> dict[str, Any]:
    """Returns the provenance of a file's conversations, with the settings that all of them share."""
    keys = ("max_new_tokens", "max_turns", "temperature", "random_seed")
    shared = {key: getattr(settings, key) for key in keys}
    digest = hashlib.sha256(template.encode()).hexdigest()[:16] if template else None
    is_rounded = settings.endpoint is None and loading.quantize != "none"
    rounding = loading.quantize if is_rounded else None
    optional: dict[str, Any] = {
        "system": settings.system,
        "rounding": rounding,
        "kv": None if loading.kv == "fp32" else loading.kv,
        "taps": list(settings.taps),
        "chat_template": digest,
        # Servers do not report their generation config.
        "generation_config": changes_of(model) if isinstance(model, Backbone) else [],
    }
    shared |= {key: value for key, value in optional.items() if value}
    return provenance(model.identity, seed=settings.seed, settings=shared)


def _fitting(
    seeds: Sequence[Conversation], settings: DistillRecipe, model: Backbone | Tokenizer
) -> list[Conversation]:
    """Returns the seeds that can be answered; adds the settings' system prompt to seeds without a system prompt.

    Fill-in-the-middle seeds need a tokenizer with tokens for them. With servers, which are only asked for chats, they
    are left out.
    """
    if settings.endpoint is None:
        reason = "the tokenizer has no tokens for it"
        kept = with_fim_tokens(seeds, model.tokenizer)
    else:
        reason = "servers are asked for chats"
        kept = [seed for seed in seeds if not seed.raw]
    if len(kept) < len(seeds):
        log.info(f"{len(seeds) - len(kept):,} seeds of fill-in-the-middle are left out: {reason}")
    if settings.system is None:
        return kept
    opening = {"role": "system", "content": settings.system}

    def opened(seed: Conversation) -> Conversation:
        if seed.raw or seed.system is not None:
            return seed
        return replace(seed, messages=[opening, *seed.messages])

    return [opened(seed) for seed in kept]


def _keep(run: Run, records: "Records", outcome: Outcome, settings: DistillRecipe) -> str:
    """Writes a seed's outcome; returns "kept", "dropped", "refused", "skipped" or "failed"."""
    if outcome.failure is not None:
        with run.failed_path.open("a", encoding="utf-8") as out:
            out.write(json.dumps({"id": outcome.id, "reason": outcome.failure}) + "\n")
        return "failed"
    if outcome.conversation is None:
        return "skipped"
    if min(end - start for start, end in outcome.conversation.spans) < settings.min_answer_tokens:
        return "dropped"
    if settings.drop_refusals and refuses(outcome.conversation):
        return "refused"
    records.write(outcome.conversation, outcome.states)
    return "kept"


class Records:
    """Manages a run's conversations: an append-only file of lines, and a file of state rows of a given width.

    If the process is killed at any moment, only the conversations in progress are lost and none is duplicated, because
    state rows go to disk before the line that refers to them. Opening drops a cut-off last line, and rows to which no
    line refers. For any other invalid line, or if the file has other settings than the header, it raises UserError and
    leaves the files unchanged. One file may hold answers to several seed sets.
    """

    def __init__(self, run: Run, width: int, header: dict[str, Any]) -> None:
        self.path = run.distill_path
        self.header = header
        self.done: set[str] = set()
        self.tokens = rows = 0
        check_regular(self.path)
        if self.path.exists():
            repair_jsonl(self.path)
        for conversation in read_distilled(run):
            self.done.add(conversation.id)
            self.tokens += conversation.positions
            rows = max(rows, sum(conversation.state_rows or ()))
        old = header
        if (run.path / HEADER).exists():
            old = read_object(run.path / HEADER, "the distillation's header")
        if self.done and old.get("settings") != header.get("settings"):
            raise UserError(
                f"{self.path} was distilled with settings {json.dumps(old.get('settings'))}, not "
                f"{json.dumps(header.get('settings'))}",
                "repeat the earlier settings to resume it, or choose another @run",
            )
        seed = header["seed"]
        if self.done:
            earlier = str(old.get("seed"))
            # The name of a seed file may contain the separator.
            if f"{BETWEEN}{seed}{BETWEEN}" in f"{BETWEEN}{earlier}{BETWEEN}":
                seed = earlier
            else:
                log.info(f"{self.path} has answers to {earlier}; they stay")
                seed = f"{earlier}{BETWEEN}{seed}"
        # The user may have deleted the file of states, as the error for damaged states advises.
        if rows and not run.states_path.exists():
            _forget_states(run)
            rows = 0
        held = run.states_path.stat().st_size // (2 * width) if rows else 0
        if held < rows:
            fault = f"{run.states_path} holds {held} state rows, but {self.path} names {rows}"
            raise UserError(fault, "delete it; training computes the states again")
        write_json(run.path / HEADER, {**header, "seed": seed})
        self.states = StateStore(run.states_path, width)
        self.states.truncate(rows)
        self._lines = self.path.open("a", encoding="utf-8")

    def write(self, conversation: Conversation, states: Tensor | None = None) -> None:
        """Appends a conversation: its states [n, W] first, then its line."""
        try:
            if states is not None:
                rows = (self.states.append(states), len(states))
                conversation = replace(
                    conversation, state_rows=rows, states_digest=states_digest(conversation, states)
                )
            self._lines.write(conversation.to_json() + "\n")
            self._lines.flush()
        except OSError as reason:
            reason.filename = str(self.path.parent)
            raise
        self.done.add(conversation.id)
        self.tokens += conversation.positions

    def sync(self) -> None:
        """Waits until everything is on disk."""
        self.states.sync()
        os.fsync(self._lines.fileno())

    def close(self) -> None:
        with suppress(OSError):  # an earlier failed flush raises again
            self._lines.close()
        self.states.close()


def read_distilled(run: Run) -> Iterator[Conversation]:
    """Yields the conversations of a distillation; raises UserError for any other line."""

    def refuse(number: int, reason: str) -> NoReturn:
        fault = (
            f"{run.distill_path} line {number} is not a conversation of `medusa distill` ({reason})"
        )
        raise UserError(fault, "fix or delete that line")

    if run.distill_path.exists():
        for number, record in enumerate(read_jsonl(run.distill_path, refuse), 1):
            try:
                yield tokenized_of(record)
            except Malformed as reason:
                refuse(number, str(reason))


def _forget_states(run: Run) -> None:
    """Removes the state rows from the lines of a distillation, so that training computes the states."""
    with replacing(run.distill_path) as part, part.open("w", encoding="utf-8") as out:
        for conversation in read_distilled(run):
            plain = replace(conversation, state_rows=None, states_digest=None)
            out.write(plain.to_json() + "\n")


def part_of(run: Run, rank: int) -> Run:
    """Returns the folder in which one of several processes stores its conversations, laid out like a run."""
    return Run.open(str(run.path / "parts" / f"{rank:03d}") + os.sep, create=True)


def merge_parts(run: Run, records: Records) -> None:
    """Moves the conversations of all parts into the run's own file; raises UserError for parts with other settings.

    A part is removed only after all of it is on disk, and conversations that are already in the run
    are skipped. If a merge is killed, the next merge therefore completes it. A conversation whose
    states do not match it is left out and answered again.
    """
    width = records.states.width
    for part in map(Run, sorted((run.path / "parts").glob("*"))):
        # Opening the records drops the incomplete data of a killed process.
        Records(part, width, records.header).close()
        for conversation in read_distilled(part):
            rows = conversation.state_rows
            states = None if rows is None else read_rows(part.states_path, width, *rows)
            whole = states is None or conversation.states_digest == states_digest(
                conversation, states
            )
            if whole and conversation.id not in records.done:
                records.write(replace(conversation, state_rows=None, states_digest=None), states)
        records.sync()
        # The lines are deleted first, because lines without their states would be refused.
        part.distill_path.unlink(missing_ok=True)
        shutil.rmtree(part.path)
