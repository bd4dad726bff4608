"""Answers from servers that run the model; only the model's tokenizer is needed here."""

import sys
import zlib
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import suppress
from itertools import islice
from pathlib import Path
from typing import Any

from medusa_cli.data.conversation import Conversation
from medusa_cli.distill.local import TOKEN_CHARACTERS, Outcome
from medusa_cli.errors import UserError
from medusa_cli.files import catalogue
from medusa_cli.files.chat_servers import ChatServers
from medusa_cli.files.io import Malformed
from medusa_cli.files.model_source import ModelSource
from medusa_cli.model.backbone import identity_of
from medusa_cli.model.chat_template import ChatTokenizer, Message, encode, render, token_ids
from medusa_cli.model.checks import unloadable
from medusa_cli.model.load import read_config
from medusa_cli.model.vocabulary import eos_ids_of
from medusa_cli.runs.recipe import DistillRecipe


class Tokenizer:
    """Holds a model's tokenizer, sizes and end tokens without weights; raises UserError if they cannot be loaded.

    chat_template: replaces the tokenizer's own template. trust_remote_code: allows the model's Python files to run.
    """

    def __init__(
        self, model: str, chat_template: str | None = None, trust_remote_code: bool = False
    ) -> None:
        from transformers import AutoTokenizer, GenerationConfig

        self.id = model
        source = ModelSource.of(model)
        config = read_config(source, trust_remote_code)
        try:
            self.tokenizer = AutoTokenizer.from_pretrained(
                source.folder, trust_remote_code=trust_remote_code
            )
        except Exception as reason:  # damaged files can raise any exception
            raise unloadable(model, reason) from reason
        if chat_template is not None:
            self.tokenizer.chat_template = chat_template
        owners: list[Any] = [config, self.tokenizer]
        with suppress(OSError):
            owners.append(GenerationConfig.from_pretrained(source.folder))
        self.eos_ids: frozenset[int] = frozenset(eos_ids_of(owners))
        self.vocab_size: int = config.vocab_size
        self.hidden_size: int = config.hidden_size
        self.max_positions: int = getattr(config, "max_position_embeddings", None) or sys.maxsize
        self.identity = identity_of(config, config.vocab_size, id=model)


def connect(
    addresses: str, served_name: str | None, tokenizer: Tokenizer
) -> tuple[ChatServers, list[str]]:
    """Returns the model's servers at comma-separated addresses, and a message for each server that does not answer.

    served_name: the model's name on the servers. If `served_name` is None, likely names are tried
    with requests for one token. Raises UserError if no server answers for the model.
    """
    greeting = [{"role": "user", "content": "Hello"}]
    render(tokenizer, greeting, prompt=True)  # fails early without a template
    servers = ChatServers(addresses.split(","))
    name = tokenizer.id
    listed, silent = servers.check()
    # Servers of a model in the catalogue are usually started with its folder. The folder is tried
    # first, because a server that loads models on demand would spend minutes looking for the name
    # on the hub.
    local = [ModelSource.of(name).folder] if name in catalogue.MODELS else []
    local += [str(Path(name).resolve())] if Path(name).is_dir() else []
    reasons = []
    for candidate in dict.fromkeys([served_name] if served_name else [*local, name, *listed]):
        servers.model = candidate
        try:
            servers.complete(greeting, max_tokens=1, temperature=0.0)
            return servers, silent
        except UserError as reason:
            reasons.append(f"as {servers.model!r}: {reason.message}")
    fault = f"the model {name!r} is not served {'; '.join(reasons)}"
    raise UserError(fault, "give the name it is served under as distill.endpoint_model")


def answer_remotely(
    servers: ChatServers,
    tokenizer: Tokenizer,
    seeds: Sequence[Conversation],
    settings: DistillRecipe,
    on_tokens: Callable[[int], None] = lambda count: None,
    should_stop: Callable[[], bool] = lambda: False,
    extra_body: dict[str, Any] | None = None,
) -> Iterator[Outcome]:
    """Answers each seed's turns in order with the servers, several conversations at a time.

    Yields each seed's outcome as soon as its conversation ends. Outcomes have no hidden states; training computes them.
    A seed that fails does not stop the others. on_tokens: called with the number of answer tokens of each seed.
    should_stop: if it returns True, no further seed is sent. extra_body: further fields of each request.
    """
    waiting = iter(seeds)
    with ThreadPoolExecutor(max_workers=settings.concurrency) as pool:

        def ask(count: int) -> set[Future[Outcome]]:
            return {
                pool.submit(_converse, servers, tokenizer, seed, settings, extra_body or {})
                for seed in islice(waiting, 0 if should_stop() else count)
            }

        running = ask(settings.concurrency)
        try:
            while running:
                done, running = wait(running, return_when=FIRST_COMPLETED)
                # New questions are sent before answers are written, so that servers do not idle.
                running |= ask(len(done))
                for outcome in (future.result() for future in done):
                    on_tokens(outcome.conversation.positions if outcome.conversation else 0)
                    yield outcome
        finally:
            servers.stop()


def _converse(
    servers: ChatServers,
    tokenizer: Tokenizer,
    seed: Conversation,
    settings: DistillRecipe,
    extra_body: dict[str, Any],
) -> Outcome:
    """Answers one seed's turns with the servers; each answer becomes part of the next prompt.

    A later turn that is too long ends the conversation, because servers behave differently beyond the context.
    """
    messages: list[Message] = []
    options = {"max_tokens": settings.max_new_tokens, "temperature": settings.temperature}
    options |= extra_body
    if settings.temperature:  # the random seed is small enough for any server
        options["seed"] = zlib.crc32(f"{settings.random_seed}:{seed.id}".encode()) >> 1
    complete: list[bool] = []
    try:
        for question in seed.questions[: settings.max_turns]:
            prompt = [*messages, *question]
            if not _fits(tokenizer, prompt, settings):
                break
            text, finish_reason = servers.complete(prompt, **options)
            messages = [*prompt, {"role": "assistant", "content": text}]
            complete.append(finish_reason != "length")
        if not complete:
            return Outcome(seed.id)
        return Outcome(seed.id, tokenize(tokenizer, seed.id, messages, complete))
    except (UserError, Malformed) as reason:
        return Outcome(seed.id, failure=str(reason))


def _fits(tokenizer: Tokenizer, prompt: list[Message], settings: DistillRecipe) -> bool:
    """Returns True if an answer fits in the context after a prompt."""
    context = min(settings.context, tokenizer.max_positions)
    if len(prompt[-1]["content"]) > TOKEN_CHARACTERS * context:
        return False
    tokens = token_ids(tokenizer, render(tokenizer, prompt, prompt=True))
    return len(tokens) + settings.max_new_tokens <= context


def tokenize(
    tokenizer: ChatTokenizer, id: str, messages: list[Message], complete: Sequence[bool]
) -> Conversation:
    """Returns answered messages with token ids and spans; an answer cut by the length limit has no end token.

    Raises Malformed if the token ids do not decode to the text of the answers.
    """
    tokens, spans = encode(tokenizer, messages)
    answers = [message["content"] for message in messages if message["role"] == "assistant"]
    kept = []
    for (start, end), ended, text in zip(spans, complete, answers, strict=True):
        last = end if ended or tokens[end - 1] not in tokenizer.eos_ids else end - 1
        decoded = tokenizer.tokenizer.decode(tokens[start:last], skip_special_tokens=True)
        if last == start or decoded.strip() != text.strip():
            raise Malformed("its token ids do not give the text back")
        kept.append((start, last))
    return Conversation(id, messages, tokens, kept)
