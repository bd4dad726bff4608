"""Several tokens a step from `model.generate`, and the same tokens as without.

    model = AutoModelForCausalLM.from_pretrained(FOLDER)
    model.generate(**inputs, custom_generate=FOLDER, trust_remote_code=True)

A small drafter guesses a tree of tokens, and what the text repeats is guessed again beside it. One pass of the model
judges them all, and those stand that the model chooses itself. transformers copies this file away from the weights:
they are found by the folder or hub id that the model was loaded from, or by `drafter=FOLDER`.
"""

import copy
import json
import time
from pathlib import Path
from weakref import WeakKeyDictionary

import torch
from safetensors.torch import load_file
from transformers import DynamicCache
from transformers.generation import GenerateDecoderOnlyOutput, StoppingCriteriaList, StopStringCriteria
from transformers.utils import cached_file

from .drafters import KINDS
from .pace import HEADS, LOOKUP, Pace
from .past import Past

FILES = ("config", "tree")
ASKED = {"auto": None, "always": HEADS, "lookup": LOOKUP}


def generate(inputs=None, *, model, drafter=None, drafts="auto", streamer=None, tokenizer=None, **kwargs):
    """What `model.generate` gives for one prompt, in fewer passes; drafter: the folder or hub id of the guesser.

    drafts: "auto" leaves them out where they do not pay, on this machine or in this text; "always" takes the drafter's
    in every step, and "lookup" what the text repeats, alone.
    """
    if drafts not in ASKED:
        raise ValueError(f"drafts={drafts!r} is unknown: give 'auto', 'always' or 'lookup'")
    for key in ("custom_generate", "trust_remote_code"):  # given again where `model.generate` is this function already
        kwargs.pop(key, None)
    if model.config._attn_implementation not in ("sdpa", "eager"):
        raise ValueError("a tree needs a mask of its own: load the model with attn_implementation='sdpa'")
    guesser = copy.copy(load_drafter(drafter or model.name_or_path, model))  # whose text is this call's alone
    look_for_stops(model, tokenizer, kwargs)

    def decode(model, input_ids, logits_processor, stopping_criteria, generation_config, **model_kwargs):
        if len(input_ids) != 1 or generation_config.num_beams != 1:
            raise ValueError("drafts are for one prompt at a time and without beams: leave custom_generate out")
        whole = generation_config.return_dict_in_generate
        for name in ("output_hidden_states", "output_attentions"):
            if whole and getattr(generation_config, name):
                raise ValueError(f"{name}=True: those of rejected drafts are among them; leave custom_generate out")
        padding = model_kwargs.get("attention_mask")
        prompt = input_ids if padding is None else input_ids[:, padding[0].bool()]
        answer = Answer(input_ids, logits_processor, stopping_criteria, generation_config, streamer)
        pace = guesser.pace if drafts == "auto" else Pace(ASKED[drafts])
        cache = run(model, guesser, prompt.to(model.device), answer, pace)
        if streamer is not None:
            streamer.end()
        if not whole:
            return answer.ids
        return GenerateDecoderOnlyOutput(sequences=answer.ids, past_key_values=cache, **answer.kept)

    # The class's own `generate` prepares prompt, processors and criteria as ever, without gradients.
    return type(model).generate(model, inputs, custom_generate=decode, streamer=streamer, **kwargs)


def look_for_stops(model, tokenizer, asked):
    """Let stop strings of what is asked be criteria: transformers gives a function in its place no tokenizer."""
    configs = (asked.get("generation_config"), model.generation_config)
    found = [asked.get("stop_strings"), *(one.stop_strings for one in configs if one is not None)]
    stops = next((one for one in found if one), None)
    if stops is None:
        return
    if tokenizer is None:
        raise ValueError(f"stop_strings={stops!r} need the tokenizer: give tokenizer=TOKENIZER as well")
    criteria = [StopStringCriteria(tokenizer, stops), *(asked.get("stopping_criteria") or ())]
    asked |= {"stop_strings": None, "stopping_criteria": StoppingCriteriaList(criteria)}


def run(model, guesser, prompt, answer, pace):
    """Draft, verify, accept, keep, until the answer ends; the cache of what the model has read."""
    # Without a config every layer keeps all rows, so that the rejected ones can be taken out again.
    cache = DynamicCache()
    guesser.reset()
    out = model(prompt, past_key_values=cache, use_cache=True, output_hidden_states=True, logits_to_keep=1)
    confirmed, states = guesser.opening(prompt[0], guesser.states(out.hidden_states))  # [n], [n, H * taps]
    root = answer.choose(out.logits[0, -1])
    past = Past(prompt[0].tolist())
    while not answer.done:
        began, start = time.perf_counter(), cache.get_seq_length()
        drafts, looks = pace.drafts, pace.looks  # another call may turn the pace meanwhile
        tree = guesser.tree if drafts else ROOT
        tokens = guesser.draft(confirmed, states, root) if drafts else [root]  # [N]
        if looks and (path := past.find(root)):
            tree, tokens = beside(tree, tokens, path)
        depths = torch.tensor(tree.depths, device=prompt.device)
        out = model(
            torch.tensor([tokens], device=prompt.device),
            attention_mask=masks(model, tree.mask, start, depths),
            position_ids=(start + depths)[None],
            past_key_values=cache,
            use_cache=True,
            output_hidden_states=True,
        )
        path, root = accept(out.logits[0], tokens, tree, answer)
        rows = torch.tensor(path, device=prompt.device)
        keep(cache, start, rows)
        fresh = torch.tensor([tokens[node] for node in path], device=prompt.device)
        past.learn([tokens[node] for node in path], root)
        found = guesser.states(out.hidden_states)[rows]
        # What was settled without drafts is told to the guesser when it is asked next.
        confirmed = fresh if drafts else torch.cat([confirmed, fresh])
        states = found if drafts else torch.cat([states, found])
        pace.record(time.perf_counter() - began, len(path))
    return cache


def accept(logits, tokens, tree, answer):
    """Walk down the tree for as long as a child holds what the model chooses [N, V]; the path, and the token after."""
    path = [0]
    while True:
        token = answer.choose(logits[path[-1]])
        child = next((node for node in tree.children[path[-1]] if tokens[node] == token), None)
        if child is None or answer.done:
            return path, token
        path.append(child)


def beside(tree, tokens, path):
    """A tree and its tokens with a path more from the root; what is there already is not drafted twice."""
    parents, ranks, tokens, node = [*tree.parents], [*tree.ranks], [*tokens], 0
    for token in path:
        below = [child for child in range(1, len(parents)) if parents[child] == node]
        found = next((child for child in below if tokens[child] == token), len(parents))
        if found == len(parents):
            parents.append(node)
            ranks.append(len(below))
            tokens.append(token)
        node = found
    return Tree(parents, ranks), tokens


def masks(model, tree_mask, start, depths):
    """Who sees whom, 0 or the lowest number: each node all cached rows [start], its ancestors and itself."""
    config = model.config.get_text_config()
    kinds = set(getattr(config, "layer_types", None) or ())
    window = getattr(config, "sliding_window", None)
    if not kinds:
        kinds = {"sliding_attention" if window and getattr(config, "use_sliding_window", True) else "full_attention"}
    visible = torch.cat([tree_mask.new_ones(len(depths), start), tree_mask], dim=1).to(depths.device)
    columns = torch.cat([torch.arange(start, device=depths.device), start + depths])
    near = start + depths[:, None] - columns < (window or 1 << 60)  # a window counts positions, not rows
    found = {}
    for kind in kinds:
        hidden = ~visible if kind == "full_attention" else ~(visible & near)
        mask = torch.zeros(hidden.shape, dtype=model.dtype, device=depths.device)
        found[kind] = mask.masked_fill(hidden, torch.finfo(model.dtype).min)[None, None]
    return found if len(found) > 1 else found.popitem()[1]


def keep(cache, start, rows):
    """Of the rows from `start` on, leave the accepted ones."""
    for layer in cache.layers:
        for name in ("keys", "values"):
            every = getattr(layer, name)
            every[:, :, start : start + len(rows)] = every[:, :, start + rows.to(every.device)]
            setattr(layer, name, every[:, :, : start + len(rows)])


class Answer:
    """The tokens so far, and how each is chosen and the end found: as `generate` does, one token after another."""

    def __init__(self, ids, processors, criteria, config, streamer):
        self.ids, self.done = ids, False
        self.kept = {name: () for name in ("scores", "logits") if getattr(config, f"output_{name}")}  # of each token
        self._processors, self._criteria, self._streamer = processors, criteria, streamer
        self._sample = config.do_sample

    def choose(self, logits):
        """The next token for logits [V]: the best one, or a draw from the distribution asked for."""
        raw = logits[None].to(self.ids.device, torch.float32, copy=True)
        scores = self._processors(self.ids, raw)
        token = torch.multinomial(scores.softmax(-1), 1) if self._sample else scores.argmax(-1, keepdim=True)
        self.ids = torch.cat([self.ids, token], dim=1)
        for name, one in (("scores", scores), ("logits", raw)):
            if name in self.kept:
                self.kept[name] += (one,)
        if self._streamer is not None:
            self._streamer.put(token[0].cpu())
        self.done = bool(self._criteria(self.ids, scores).all())
        return token.item()


class Tree:
    """N guesses by their parents and ranks: node 0 is the root, a node of rank r its parent's r-th best follower."""

    def __init__(self, parents, ranks):
        self.parents, self.ranks, size = parents, ranks, len(parents)
        self.depths, self.mask = [0] * size, torch.eye(size, dtype=torch.bool)
        self.children = [[] for _ in parents]
        for node in range(1, size):
            self.depths[node] = self.depths[parents[node]] + 1
            self.mask[node] |= self.mask[parents[node]]
            self.children[parents[node]].append(node)
        self.levels = [[i for i in range(size) if self.depths[i] == d] for d in range(1, max(self.depths) + 1)]
        self.paths = [self.mask[node].nonzero()[:, 0].tolist() for node in range(size)]  # from the root to each


ROOT = Tree([-1], [0])
# The drafter of each model in use, and where it came from.
_loaded = WeakKeyDictionary()


def load_drafter(source, model):
    """The drafter of a folder or hub id with its tree, on the model's device; read once."""
    known, guesser = _loaded.get(model, (None, None))
    if known == (source, model.dtype, model.device):
        return guesser
    try:
        config, tree = (json.loads(Path(cached_file(source, f"drafter/{name}.json")).read_text()) for name in FILES)
    except OSError as reason:
        raise ValueError(
            f"{source!r} holds no drafter/: load the model from the exported folder, or name it with drafter=FOLDER"
        ) from reason
    kind = KINDS[config["drafter"]]
    weights = load_file(cached_file(source, f"drafter/{kind.weights_file}"))
    dtype = number_type(weights, model)
    weights = {k: v.to(model.device, dtype if v.is_floating_point() else v.dtype) for k, v in weights.items()}
    guesser = kind(config, weights, Tree(tree["parents"], tree["ranks"]), model)
    guesser.pace = Pace()
    _loaded[model] = ((source, model.dtype, model.device), guesser)
    return guesser


def number_type(weights, model):
    """The model's number type, or the stored one where a CPU is quicker by it: rounding moves drafts, no answers."""
    largest = max((one for one in weights.values() if one.is_floating_point()), key=torch.Tensor.numel)
    if model.device.type != "cpu" or largest.dtype == model.dtype or largest.numel() < 1 << 20:
        return model.dtype

    def seconds(dtype):
        matrix, rows, taken = largest.to(dtype), torch.ones(4, largest.shape[1], dtype=dtype), []
        for _ in range(4):
            began = time.perf_counter()
            torch.nn.functional.linear(rows, matrix)
            taken.append(time.perf_counter() - began)
        return min(taken)

    return min((model.dtype, largest.dtype), key=seconds)
