"""Shared by tests: tiny models, stub drafters, the command line, saved runs, and plain decoding as reference."""

import itertools
import json
import math
import os
import random
import subprocess
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from typer.testing import CliRunner, Result

from medusa_cli.cli import app
from medusa_cli.data.conversation import Conversation
from medusa_cli.data.packing import Dataset, read_dataset
from medusa_cli.data.states import with_hidden_states
from medusa_cli.decode import Decoder, DraftPolicy, Request, Step, policy_of
from medusa_cli.drafters import Drafter, MedusaHeads, NewTokens
from medusa_cli.drafters.base import Batch
from medusa_cli.drafters.heads import HeadDrafter
from medusa_cli.drafters.io import save_drafter
from medusa_cli.engine import Cache, ExtraRows, Output, Plan, load_backbone
from medusa_cli.engine.eager import EagerEngine
from medusa_cli.engine.engine import Engine
from medusa_cli.engine.native_cache import NativeCache
from medusa_cli.engine.native_engine import NativeEngine
from medusa_cli.engine.native_model import NativeModel
from medusa_cli.engine.packed import pack_in_memory
from medusa_cli.engine.probes import rotary_of
from medusa_cli.engine.torch_layers import TorchEngine
from medusa_cli.engine.twin import verified
from medusa_cli.errors import UsageError
from medusa_cli.files.io import write_json
from medusa_cli.model import Backbone
from medusa_cli.model import lora as adapter
from medusa_cli.model.backbone import Unsupported
from medusa_cli.model.weights import NetworkWeights
from medusa_cli.native import is_available
from medusa_cli.runs.load_options import LoadOptions
from medusa_cli.runs.run import Run, provenance
from medusa_cli.train.losses import BatchLoss
from medusa_cli.tree import Draft, DynamicTree, Tree
from medusa_cli.tree.io import save_tree

# For long answers of tests that no engine concerns.
FASTEST = "native" if is_available() else "eager"
# Drafters that are trained from nothing; the others come along with their models.
FRESH = ("medusa", "hydra", "amphista", "eagle", "firp")
FAMILIES = ("llama", "mistral", "mistral-window", "qwen2", "qwen3", "gemma3")
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ '<start> ' + message['role'] + ' ' + message['content'] + ' <end> ' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<start> assistant ' }}{% endif %}"
)
SPECIAL = ("<pad>", "<unk>", "<end>", "<start>")
ROLES = ("system", "user", "assistant")
END_ID = SPECIAL.index("<end>")
PROMPT = [5, 9, 20, 11, 7]
TREE = Tree.from_choices([[0], [1], [0, 0], [0, 1], [0, 0, 0]])  # of what save_run writes
SPARSE = Tree.from_choices(
    [[0], [1], [2], [0, 0], [0, 1], [1, 0], [0, 0, 0], [0, 1, 0], [0, 0, 0, 0]]
)


def attach(
    backbone: Backbone,
    engine: str = "eager",
    *,
    quantize: str | None = None,
    rows: str = "auto",
    kv: str = "fp32",
) -> Engine:
    """Attaches the named engine to a backbone whose network is in memory, and returns the engine.

    Raises UsageError if the engine cannot run the network.
    """
    try:
        if engine == "native":
            network = backbone.model
            description = verified(network)
            int8 = rows != "fp32" and quantize is not None
            packed = pack_in_memory(description, NetworkWeights(network), quantize, int8)
            model = NativeModel(description, packed, rotary_of(network), backbone.max_positions)
            backbone.engine = NativeEngine(backbone, model, int8, quantize, kv)
        elif engine == "torch":
            backbone.engine = TorchEngine(backbone)
        elif engine == "eager":
            backbone.engine = EagerEngine(backbone)
        else:
            raise UsageError(f"@engine {engine!r} is unknown", "use native, torch or eager")
    except Unsupported as reason:
        raise UsageError(
            f"@engine {engine} cannot run the model {backbone.id!r}: {reason}",
            "use @engine auto or eager",
        ) from reason
    return backbone.engine


def medusa(*words: Any, exit_code: int | None = 0, input: str | bytes | None = None) -> Result:
    """Runs `medusa WORDS` in this process; its exit code is asserted, None allows any."""
    result = CliRunner().invoke(app, [str(word) for word in words], input=input)
    assert exit_code is None or result.exit_code == exit_code, result.output
    return result


def program(*words: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Runs `medusa WORDS` in a process of its own."""
    command = [sys.executable, "-m", "medusa_cli", *words]
    return subprocess.run(
        command, capture_output=True, text=True, env={**os.environ, **environment}, check=False
    )


def python(code: str, **how: Any) -> subprocess.CompletedProcess[str]:
    """Runs a program in a Python of its own."""
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, **how)


def medusa_json(*words: Any) -> Any:
    """Returns the document that `medusa WORDS --json` prints."""
    return json.loads(medusa(*words, "--json", "--quiet").stdout)


def tiny_tokenizer(vocab: int = 64) -> Any:
    """Returns a tokenizer of the words w0, w1, ... after the special tokens and the roles; ids below `vocab`."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = [*SPECIAL, *ROLES, *(f"w{i}" for i in range(vocab - len(SPECIAL) - len(ROLES)))]
    inner = Tokenizer(
        models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<unk>")
    )
    inner.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=inner,
        pad_token="<pad>",
        unk_token="<unk>",
        eos_token="<end>",
        clean_up_tokenization_spaces=False,
    )
    tokenizer.add_special_tokens({"additional_special_tokens": ["<start>"]})
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer


JSON_WORDS = [
    '{"name": "Ada", "age": 36, "tags": ["new", "sale"], "nested": {"kind": "city"}}, ',
    "true false null ",
]


def byte_tokenizer(vocab: int = 320) -> Any:
    """Returns a tokenizer over bytes and some merges of them, with the special tokens first and words of JSON."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    inner = Tokenizer(models.BPE())
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(
        vocab_size=vocab,
        special_tokens=list(SPECIAL),
        initial_alphabet=alphabet,
        show_progress=False,
    )
    inner.train_from_iterator(JSON_WORDS * 8, trainer)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=inner, pad_token="<pad>", eos_token="<end>"
    )
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer


def byte_backbone(**shape: Any) -> Backbone:
    """Returns a tiny random model that writes bytes."""
    backbone = tiny_backbone(vocab=320, engine=FASTEST, **shape)
    backbone.tokenizer = byte_tokenizer()
    return backbone


def tiny_model(
    family: str = "llama",
    *,
    vocab: int = 64,
    hidden: int = 32,
    layers: int = 2,
    positions: int = 512,
    seed: int = 0,
) -> Any:
    """Returns a random fp32 causal LM of a family, whose greedy text is not one token repeated."""
    import transformers as hf

    kinds = (["sliding_attention", "full_attention"] * layers)[:layers]
    config_class, model_class, own = {
        "llama": (hf.LlamaConfig, hf.LlamaForCausalLM, {}),
        "mistral": (hf.MistralConfig, hf.MistralForCausalLM, {"sliding_window": None}),
        "mistral-window": (hf.MistralConfig, hf.MistralForCausalLM, {"sliding_window": 8}),
        "qwen2": (hf.Qwen2Config, hf.Qwen2ForCausalLM, {"tie_word_embeddings": True}),
        "qwen3": (hf.Qwen3Config, hf.Qwen3ForCausalLM, {"head_dim": 8}),
        "gemma3": (
            hf.Gemma3TextConfig,
            hf.Gemma3ForCausalLM,
            {"head_dim": 8, "sliding_window": 8, "layer_types": kinds},
        ),
    }[family]
    common = {
        "vocab_size": vocab,
        "hidden_size": hidden,
        "intermediate_size": 2 * hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": positions,
        "eos_token_id": END_ID,
        "bos_token_id": None,
        "pad_token_id": 0,
        "initializer_range": 0.4,
        "tie_word_embeddings": False,
    }
    torch.manual_seed(seed + 4)  # with the first few seeds some families repeat one token forever
    return model_class(config_class(**common | own)).eval()


def tiny_backbone(
    family: str = "llama", *, vocab: int = 64, engine: str = "eager", **shape: int
) -> Backbone:
    """Returns a backbone over tiny_model, in fp32."""
    backbone = Backbone(
        tiny_model(family, vocab=vocab, **shape), tiny_tokenizer(vocab), id=f"tiny-{family}"
    )
    attach(backbone, engine)
    return backbone


def guesses(heads: HeadDrafter, backbone: Backbone, batch: Batch, top: int) -> torch.Tensor:
    """Returns the token ids of each head's best guesses at the trained positions, best first, [n, K, top]."""
    return torch.stack(
        [heads.draft_ids[scores.topk(top).indices] for scores in heads.logits(backbone, batch)],
        dim=1,
    )


def head_means(loss: BatchLoss) -> torch.Tensor:
    """Returns each head's mean loss [K]."""
    return loss.by_head * loss.scale.to(loss.by_head.device) / loss.learned.clamp(min=1)


def load_dataset(
    run: Run, backbone: Backbone, *, data: Path | None = None, fraction: float = 0.05, **more: Any
) -> Dataset:
    """Returns a run's conversations, or those of the file `data`, with their states."""
    path = data or run.data_path
    return with_hidden_states(read_dataset(path, backbone, fraction), run, backbone, path, **more)


def random_conversations(count: int = 12, length: int = 30) -> list[Conversation]:
    """Returns conversations of two answers of random tokens, of 14 to `length` - 1 tokens."""
    chance, items = random.Random(0), []
    for number in range(count):
        tokens = [chance.randrange(8, 60) for _ in range(chance.randrange(14, length))]
        items.append(Conversation(f"c{number}", tokens=tokens, spans=[(4, 8), (10, len(tokens))]))
    return items


def save_conversations(folder: Path, count: int = 30) -> Path:
    """Makes a run's folder with random conversations."""
    items = random_conversations(count)
    write_lines(
        folder / "distill.jsonl",
        [{"id": c.id, "tokens": c.tokens, "spans": c.spans} for c in items],
    )
    return folder


def adapted_backbone() -> Backbone:
    """Returns a model with a trainable adapter that changes its output."""
    network = tiny_model()
    attach_adapter(network)
    backbone = Backbone(network, tiny_tokenizer())
    attach(backbone)
    adapter.unfreeze(network)
    return backbone


def attach_adapter(network: Any, std: float = 0.1) -> None:
    """Attaches an adapter that changes the network's output."""
    torch.manual_seed(1)
    adapter.attach(network, rank=4, alpha=8, dropout=0.0)
    for name, weight in network.named_parameters():
        if "lora_B" in name:  # fresh ones are zero
            torch.nn.init.normal_(weight, std=std)


def answers_of(*answers: Tensor | Sequence[int], at: int = 0) -> list[Conversation]:
    """Returns conversations of one answer after one token, whose states follow one another from row `at` on."""
    items = []
    for number, answer in enumerate(answers):
        tokens = [0, *map(int, answer)]
        items.append(Conversation(f"a{number}", [], tokens, [(1, len(tokens))], (at, len(answer))))
        at += len(answer)
    return items


def forward(
    backbone: Backbone,
    tokens: Tensor | Sequence[int],
    cache: Cache | None = None,
    tree: Tree | None = None,
    *,
    slot: int = 0,
    taps: Sequence[int] = (-1,),
    logits: str = "all",
    extra_rows: ExtraRows | None = None,
) -> Output:
    """Runs tokens [n] as a chain or a tree in one slot; returns logits [n, V], hidden [n, ..], extra [n, K, H]."""
    shape = (None, None) if tree is None else (tree.depth, tree.mask)
    plan = Plan(torch.as_tensor(tokens)[None], *shape, slot, tuple(taps), logits, extra_rows)
    out = backbone.engine.forward(plan, backbone.engine.new_cache() if cache is None else cache)
    return Output(
        None if out.logits is None else out.logits[0],
        out.hidden[0],
        None if out.extra is None else out.extra[0],
    )


def prefilled(backbone: Backbone, prompt: Tensor | Sequence[int]) -> Cache:
    """Returns a cache of one slot that holds a prompt."""
    cache = backbone.engine.new_cache()
    forward(backbone, prompt, cache, logits="none")
    return cache


def rows_of(cache: Cache, slot: int = 0) -> Tensor:
    """Returns the keys and values of a slot [2, layers, KV, length, D]."""
    assert cache.keys is not None
    assert cache.values is not None
    if isinstance(cache, NativeCache):  # keys lie in tiles of columns, values are padded
        places = [cache.at(place, slot) for place in range(cache.layers)]
        keys = torch.stack([keys for keys, _ in places]).mT.flatten(2, 3)
        values = torch.stack([values for _, values in places])[..., : keys.shape[-1]]
    else:
        keys, values = cache.keys[:, slot], cache.values[:, slot]
    return torch.stack([keys, values])[:, :, :, : cache.lengths[slot]]


def drafted(
    drafter: Drafter, backbone: Backbone, new: NewTokens, shape: Tree | DynamicTree
) -> Draft:
    """Returns the draft for one sequence, whose state is the drafter's own."""
    [draft] = drafter.draft(backbone, [drafter], [new], shape)
    return draft


def save_network(model: Any, folder: Path) -> str:
    """Saves a network with a tokenizer of its vocabulary; returns the path to give as --model."""
    model.save_pretrained(folder)
    tiny_tokenizer(model.config.get_text_config().vocab_size).save_pretrained(folder)
    return str(folder)


class Oracle(Drafter):
    """Stub drafter that knows the answer to PROMPT, or to `others`, and puts right tokens on a share of the nodes."""

    name = "oracle"
    num_heads = 8
    prompt_tokens = 1 << 30
    config = None

    def __init__(self, answer: Sequence[int], right: float, others: dict | None = None) -> None:
        super().__init__()
        self.known, self.drafts = others or {tuple(PROMPT): (list(answer), right)}, 0
        self.chance = torch.Generator().manual_seed(0)

    def draft(
        self, backbone: Backbone, sequences, new: Sequence[NewTokens], tree: Tree
    ) -> list[Draft]:
        self.drafts += len(new)
        return [
            own.guess(backbone, tokens, tree) for own, tokens in zip(sequences, new, strict=True)
        ]

    def guess(self, backbone: Backbone, new: NewTokens, tree: Tree) -> Draft:
        assert new.hidden.shape == (len(new.tokens), backbone.hidden_size)
        if new.start == 0:
            self.prompt = next(
                prompt
                for prompt in self.known
                if (*prompt,) == (*new.tokens[: len(prompt)].tolist(),)
            )
        answer, right = self.known[self.prompt]
        done = new.end - len(self.prompt)
        assert answer[done : done + 1] in ([new.root], [])
        tokens = [new.root]
        for node in range(1, tree.size):
            ahead = answer[done + tree.depths[node] : done + tree.depths[node] + 1]
            good = float(torch.rand(1, generator=self.chance)) < right
            wrong = int(torch.randint(5, backbone.vocab_size, (1,), generator=self.chance))
            tokens.append(ahead[0] if good and ahead else wrong)
        return Draft(torch.tensor(tokens), tree)


def plain(backbone: Backbone, count: int = 90, **rules) -> list[int]:
    """Returns the tokens of plain decoding after PROMPT."""
    return tokens_of(generate_plain(backbone, PROMPT, max_new_tokens=count, stop_ids=(), **rules))


class Recording:
    """Mixin for a drafter's class that records its inputs and drafts."""

    seen: list[tuple[NewTokens, Draft]]

    def draft(self, backbone, sequences, new, shape) -> list[Draft]:
        drafts = super().draft(backbone, sequences, new, shape)
        self.seen += zip(new, drafts, strict=True)
        return drafts


def medusa_drafter(backbone: Backbone, vocabulary: str = "own") -> MedusaHeads:
    """Returns four random Medusa heads with a draft vocabulary on request."""
    torch.manual_seed(1)
    ids = torch.randperm(backbone.vocab_size)[:20] if vocabulary == "draft" else None
    heads = MedusaHeads.create(backbone, 4, 2, vocabulary, ids)
    for weight in heads.parameters():
        weight.data += 0.3 * torch.randn_like(weight)
    return heads.eval()


def save_model(folder: Path, **shape: Any) -> str:
    """Saves a tiny Llama with its tokenizer; returns the path to give as --model."""
    return save_network(tiny_model(**shape), folder)


def save_run(
    folder: Path,
    model: str,
    *,
    heads: int = 3,
    tree: Tree | None = TREE,
    kind: type[HeadDrafter] = MedusaHeads,
    calibrated: bool = False,
) -> Run:
    """Saves a run with random heads for the tiny model, a tree, and accuracies on request."""
    run = Run.open(str(folder) + "/", create=True)
    backbone = load_backbone(model, LoadOptions(dtype="fp32"))
    torch.manual_seed(0)
    drafter = kind.create(backbone, heads, 1, "own")
    for weight in drafter.parameters():
        weight.data += 0.05 * torch.randn_like(weight)
    save_drafter(drafter, run.drafter_dir, provenance(backbone.identity))
    run.bind(backbone.identity)
    if tree is not None:
        save_tree(run.tree_path, tree, {})
    if calibrated:
        write_json(run.calibration_path, {"accuracies": [[0.5, 0.2, 0.1]] * heads})
    return run


def save_questions(path: Path, count: int = 4) -> str:
    """Saves questions of two turns in two categories, and one malformed line."""
    lines = [
        json.dumps(
            {"question_id": i, "category": "ab"[i % 2], "turns": [f"w{i} w{i + 1}", f"w{i + 9}"]}
        )
        for i in range(count)
    ]
    path.write_text("\n".join([*lines, '{"question_id": 99}']) + "\n")
    return str(path)


def save_bench(folder: Path) -> Path:
    """Saves a tiny model, a run of it called mine, and questions; returns the folder."""
    save_run(folder / "mine", save_model(folder / "model"))
    save_questions(folder / "q.jsonl")
    return folder


def bench(folder: Path, *words: Any, exit_code: int = 0) -> Result:
    """Runs `medusa bench` in fp32 over what save_bench wrote."""
    common = [
        "--questions",
        str(folder / "q.jsonl"),
        "--run",
        str(folder / "mine"),
        "--dtype",
        "fp32",
    ]
    return medusa("bench", *common, "--max-new-tokens", "20", *words, exit_code=exit_code)


def conversation(number: int, turns: int = 1, length: int = 9) -> dict:
    """Returns a conversation whose answers count on from the question's number: a language that a head can learn."""
    words = [f"w{(number + i) % 50}" for i in range(length)]
    messages = []
    for turn in range(turns):
        messages.append({"role": "user", "content": f"w{(number + turn) % 50}"})
        messages.append({"role": "assistant", "content": " ".join(words)})
    return {"id": f"c{number}", "messages": messages}


def write_lines(path: Path, records: list[dict]) -> Path:
    """Writes records as JSON lines."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def tokens_of(steps: Iterable[Step]) -> list[int]:
    """Returns the tokens of an answer's steps."""
    return [token for step in steps for token in step.tokens]


Drafting = DraftPolicy | Tree | DynamicTree | None


def decoder_of(
    backbone: Backbone, drafter: Drafter | None = None, policy: Drafting = None, **options: Any
) -> Decoder:
    """Returns a decoder over a policy, or over one tree."""
    tree = isinstance(policy, Tree | DynamicTree)
    return Decoder(backbone, drafter, policy_of(policy) if tree else policy, **options)


def answer(decoder: Decoder, prompt: Sequence[int], **rules: Any) -> Iterator[Step]:
    """Yields the steps of one request, whose fields the rules are. Closing the iterator frees the slot."""
    sequence, first = decoder.admit(Request(prompt, **rules))
    try:
        yield first
        while not sequence.done:
            yield from (step for other, step in decoder.step() if other is sequence)
    finally:
        sequence.cancel()


def generate(
    backbone: Backbone,
    drafter: Drafter | None,
    policy: Drafting,
    prompt: Sequence[int],
    **rules: Any,
) -> Iterator[Step]:
    """Yields the steps of one prompt; without a drafter decoding is plain."""
    yield from answer(decoder_of(backbone, drafter, policy), prompt, **rules)


def generate_plain(backbone: Backbone, prompt: Sequence[int], **rules: Any) -> Iterator[Step]:
    """Yields the steps of plain decoding, the reference of every drafter."""
    yield from generate(backbone, None, None, prompt, **rules)


def generate_batch(
    backbone: Backbone,
    drafter: Drafter | None,
    policy: Drafting,
    prompts: Sequence[Sequence[int]],
    *,
    batch_size: int,
    **rules: Any,
) -> list[list[Step]]:
    """Returns the steps of each of many prompts, of which `batch_size` run at a time."""
    decoder = decoder_of(backbone, drafter, policy, slots=batch_size)
    return steps_of(decoder, [Request(prompt, **rules) for prompt in prompts])


def steps_of(decoder: Decoder, requests: Sequence[Request]) -> list[list[Step]]:
    """Returns the steps of each request, as many of which run at a time as the decoder has slots."""
    steps: list[list[Step]] = [[] for _ in requests]
    for sequence, step in decoder.run(requests):
        steps[sequence.number].append(step)
    return steps


def change_json(path: Path, change: Callable[[Any], object] | None = None, **fields: Any) -> None:
    """Changes a JSON document by a function, or the fields of its object."""
    document = json.loads(path.read_text())
    if change is not None:
        change(document)
    write_json(path, document | fields if fields else document)


def assert_distributed(seen: Tensor, expected: Tensor) -> None:
    """Asserts that counts are drawn from a distribution, given as the counts to expect (chi-square)."""
    live = expected > 0
    assert not seen[~live].any()
    statistic = float(((seen - expected)[live] ** 2 / expected[live]).sum())
    freedom = max(int(live.sum()) - 1, 1)
    assert statistic < freedom + 4.5 * math.sqrt(2 * freedom)


class TokenServer(ThreadingHTTPServer):
    """Server of completions for the last of the `listed` models: `say` makes the choice of the n-th request.

    Warm-ups count; requests of one token, which ask whether a model is served, do not.
    """

    def __init__(self, say: Callable[[int], dict], *listed: str) -> None:
        numbers = itertools.count()
        names = listed or ("served",)

        class Handler(BaseHTTPRequestHandler):
            def log_message(self, *args: object) -> None:
                """Silent."""

            def do_GET(self) -> None:
                self._send({"data": [{"id": name} for name in names]})

            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                if body["model"] != names[-1]:
                    return self._send({"error": "no such model"}, 404)
                choice = {} if body["max_tokens"] == 1 else say(next(numbers))
                document = {"choices": [{"finish_reason": "length", **choice}]}
                if body.get("stream"):
                    self._stream([document, {"choices": [], "usage": {}}])
                else:
                    self._send(document)

            def _stream(self, chunks: list[dict]) -> None:
                self.send_response(200)
                self.end_headers()
                for chunk in chunks:
                    self.wfile.write(f"data: {json.dumps(chunk)}\n\n".encode())
                self.wfile.write(b"data: [DONE]\n\n")

            def _send(self, document: dict, status: int = 200) -> None:
                data = json.dumps(document).encode()
                self.send_response(status)
                self.send_header("Content-Length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

        super().__init__(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server_port}"
        threading.Thread(target=lambda: self.serve_forever(0.01), daemon=True).start()

    def __exit__(self, *reason: object) -> None:
        self.shutdown()
        super().__exit__(*reason)


class ChatServer:
    """OpenAI-compatible server: `say` makes text and finish reason of a request; `fault` may give an error status."""

    def __init__(self, say: Callable[[dict], tuple[str, str]]) -> None:
        self.say, self.requests, self.headers = say, [], {}
        self.fault: Callable[[int, dict], int | None] = lambda number, body: None
        self.together = self.most_together = 0
        outer, lock = self, threading.Lock()

        class Handler(BaseHTTPRequestHandler):
            def log_message(self, *args: object) -> None:
                """Silent."""

            def do_GET(self) -> None:
                self._send(200, {"data": [{"id": "served"}]})

            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                with lock:
                    outer.requests.append(
                        {**body, "path": self.path, "key": self.headers.get("Authorization")}
                    )
                    number = len(outer.requests)
                    outer.together += 1
                    outer.most_together = max(outer.most_together, outer.together)
                threading.Event().wait(0.02)
                with lock:
                    outer.together -= 1
                if status := outer.fault(number, body):
                    return self._send(status, {"error": "spoiled"})
                text, reason = outer.say(body)
                self._send(
                    200, {"choices": [{"message": {"content": text}, "finish_reason": reason}]}
                )

            def _send(self, status: int, document: dict) -> None:
                data = json.dumps(document).encode()
                self.send_response(status)
                self.send_header("Content-Length", str(len(data)))
                for name, value in outer.headers.items():
                    self.send_header(name, value)
                self.end_headers()
                self.wfile.write(data)

        self.http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.http.server_port}"
        threading.Thread(
            target=lambda: self.http.serve_forever(poll_interval=0.01), daemon=True
        ).start()

    def stop(self) -> None:
        """Answers pending requests and refuses every connection from now on."""
        self.http.shutdown()
        self.http.server_close()
