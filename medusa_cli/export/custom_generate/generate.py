"""Several tokens a step from `model.generate`, and the same tokens as without.

    model = AutoModelForCausalLM.from_pretrained(FOLDER)
    model.generate(**inputs, custom_generate=FOLDER, trust_remote_code=True)

A small drafter proposes a tree of tokens, and matches of earlier text propose more. One pass of the model verifies all
of them and accepts those that it chooses itself. transformers copies this file away from the weights: they are found by
the folder or hub id that the model was loaded from, or by `drafter=FOLDER`.
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
from .policy import AdaptivePolicy, NgramIndex


def generate(inputs=None, *, model, drafter=None, drafts="auto", streamer=None, tokenizer=None, **kwargs):
    """Returns what `model.generate` returns for one prompt, in fewer passes; drafter: the folder or hub id of it.

    drafts: "auto" leaves drafts out while they do not pay on this machine and in this text; "always" drafts every step.
    """
    if drafts not in ("auto", "always"):
        raise ValueError(f"drafts={drafts!r} is unknown: give 'auto' or 'always'")
    for key in ("custom_generate", "trust_remote_code"):  # given again if `model.generate` is this function already
        kwargs.pop(key, None)
    if model.config._attn_implementation not in ("sdpa", "eager"):
        raise ValueError("a tree needs its own mask: load the model with attn_implementation='sdpa'")
    drafting = copy.copy(load_drafter(drafter or model.name_or_path, model))
    drafting.cache = {}  # of this call alone
    add_stop_strings(model, tokenizer, kwargs)

    def decode(model, input_ids, logits_processor, stopping_criteria, generation_config, **model_kwargs):
        if len(input_ids) != 1 or generation_config.num_beams != 1:
            raise ValueError("drafts are for one prompt at a time and without beams: leave custom_generate out")
        as_dict = generation_config.return_dict_in_generate
        for name in ("output_hidden_states", "output_attentions"):
            if as_dict and getattr(generation_config, name):
                raise ValueError(f"{name}=True would include rejected drafts: leave custom_generate out")
        padding = model_kwargs.get("attention_mask")
        prompt = input_ids if padding is None else input_ids[:, padding[0].bool()]
        answer = Answer(input_ids, logits_processor, stopping_criteria, generation_config, streamer)
        cache = run(model, drafting, prompt.to(model.device), answer, drafting.policy if drafts == "auto" else None)
        if streamer is not None:
            streamer.end()
        if not as_dict:
            return answer.ids
        return GenerateDecoderOnlyOutput(sequences=answer.ids, past_key_values=cache, **answer.kept)

    # The class's own `generate` prepares prompt, processors and criteria as always, without gradients.
    return type(model).generate(model, inputs, custom_generate=decode, streamer=streamer, **kwargs)


def add_stop_strings(model, tokenizer, kwargs):
    """Turns stop strings into stopping criteria: transformers hands no tokenizer to a function in its place."""
    configs = (kwargs.get("generation_config"), model.generation_config)
    given = [kwargs.get("stop_strings"), *(config.stop_strings for config in configs if config is not None)]
    stops = next((strings for strings in given if strings), None)
    if stops is None:
        return
    if tokenizer is None:
        raise ValueError(f"stop_strings={stops!r} need the tokenizer: give tokenizer=TOKENIZER as well")
    criteria = [StopStringCriteria(tokenizer, stops), *(kwargs.get("stopping_criteria") or ())]
    kwargs |= {"stop_strings": None, "stopping_criteria": StoppingCriteriaList(criteria)}


def run(model, drafter, prompt, answer, policy):
    """Drafts (policy None: always), verifies, accepts and keeps rows until the answer ends; returns the cache."""
    cache = DynamicCache()  # without a config every layer keeps all rows, so that rejected ones can be removed
    out = model(prompt, past_key_values=cache, use_cache=True, output_hidden_states=True, logits_to_keep=1)
    tokens, states = prompt[0], drafter.states(out.hidden_states)  # [n], [n, H * taps]
    if not drafter.reads_prompt:
        tokens, states = tokens[-1:], states[-1:]
    root = answer.choose(out.logits[0, -1])
    index = NgramIndex(prompt[0].tolist())
    while not answer.done:
        began, start, drafts = time.perf_counter(), cache.get_seq_length(), policy is None or policy.drafts
        tree, nodes = ROOT, [root]
        if drafts:
            tree, nodes = with_match(drafter.tree, drafter.draft(tokens, states, root), index.find(root))  # [N]
        depths = torch.tensor(tree.depths, device=prompt.device)
        out = model(
            torch.tensor([nodes], device=prompt.device),
            attention_mask=masks(model, tree.mask, start, depths),
            position_ids=(start + depths)[None],
            past_key_values=cache,
            use_cache=True,
            output_hidden_states=True,
        )
        path, root = accept(out.logits[0], nodes, tree, answer)
        rows = torch.tensor(path, device=prompt.device)
        keep(cache, start, rows)
        accepted = [nodes[node] for node in path]
        index.extend(accepted, root)
        new, new_states = torch.tensor(accepted, device=prompt.device), drafter.states(out.hidden_states)[rows]
        # Tokens of steps without drafts wait until the drafter is used again.
        tokens = new if drafts else torch.cat([tokens, new])
        states = new_states if drafts else torch.cat([states, new_states])
        if policy is not None:
            policy.record(drafts, time.perf_counter() - began, len(path))
    return cache


def accept(logits, nodes, tree, answer):
    """Walks down the tree while a child holds the token that the model chooses [N, V]; the path and the next token."""
    path = [0]
    while True:
        token = answer.choose(logits[path[-1]])
        child = next((node for node in tree.children[path[-1]] if nodes[node] == token), None)
        if child is None or answer.done:
            return path, token
        path.append(child)


def with_match(tree, nodes, match):
    """Returns the tree and its tokens with one more path from the root; tokens that are there are not drafted twice."""
    if not match:
        return tree, nodes
    parents, nodes, node = [*tree.parents], [*nodes], 0
    for token in match:
        child = next((child for child in range(1, len(parents)) if (parents[child], nodes[child]) == (node, token)), 0)
        if not child:
            child = len(parents)
            parents.append(node)
            nodes.append(token)
        node = child
    return Tree(parents), nodes


def masks(model, tree_mask, start, depths):
    """Returns the mask by kind of layer: a node sees all cached rows [start], its ancestors and itself."""
    config = model.config.get_text_config()
    kinds = set(getattr(config, "layer_types", None) or ())
    window = getattr(config, "sliding_window", None)
    if not kinds:
        kinds = {"sliding_attention" if window and getattr(config, "use_sliding_window", True) else "full_attention"}
    visible = torch.cat([tree_mask.new_ones(len(depths), start), tree_mask], dim=1).to(depths.device)
    columns = torch.cat([torch.arange(start, device=depths.device), start + depths])
    near = start + depths[:, None] - columns < (window or 1 << 60)  # a window counts positions, not rows
    by_kind = {}
    for kind in kinds:
        hidden = ~visible if kind == "full_attention" else ~(visible & near)
        mask = torch.zeros(hidden.shape, dtype=model.dtype, device=depths.device)
        by_kind[kind] = mask.masked_fill(hidden, torch.finfo(model.dtype).min)[None, None]
    return by_kind if len(by_kind) > 1 else by_kind.popitem()[1]


def keep(cache, start, rows):
    """Keeps the accepted rows of those from `start` on."""
    for layer in cache.layers:
        for name in ("keys", "values"):
            every = getattr(layer, name)
            every[:, :, start : start + len(rows)] = every[:, :, start + rows.to(every.device)]
            setattr(layer, name, every[:, :, : start + len(rows)])


class Answer:
    """The tokens so far, chosen and stopped one by one as `generate` does."""

    def __init__(self, ids, processors, criteria, config, streamer):
        self.ids, self.done = ids, False
        self.kept = {name: () for name in ("scores", "logits") if getattr(config, f"output_{name}")}  # of each token
        self._processors, self._criteria, self._streamer = processors, criteria, streamer
        self._sample = config.do_sample

    def choose(self, logits):
        """Returns the next token for logits [V]: the most likely one, or a draw from the distribution asked for."""
        raw = logits[None].to(self.ids.device, torch.float32, copy=True)
        scores = self._processors(self.ids, raw)
        token = torch.multinomial(scores.softmax(-1), 1) if self._sample else scores.argmax(-1, keepdim=True)
        self.ids = torch.cat([self.ids, token], dim=1)
        for name, rows in (("scores", scores), ("logits", raw)):
            if name in self.kept:
                self.kept[name] += (rows,)
        if self._streamer is not None:
            self._streamer.put(token[0].cpu())
        self.done = bool(self._criteria(self.ids, scores).all())
        return token.item()


class Tree:
    """N nodes by their parents and ranks: node 0 is the root, a node of rank r its parent's r-th best follower."""

    def __init__(self, parents, ranks=()):
        self.parents, self.ranks, size = parents, ranks, len(parents)
        self.depths, self.mask = [0] * size, torch.eye(size, dtype=torch.bool)
        self.children = [[] for _ in parents]
        for node in range(1, size):
            self.depths[node] = self.depths[parents[node]] + 1
            self.mask[node] |= self.mask[parents[node]]
            self.children[parents[node]].append(node)
        self.levels = [[i for i in range(size) if self.depths[i] == d] for d in range(1, max(self.depths) + 1)]

    def path(self, node):
        """Returns the nodes from the root to this one."""
        return self.mask[node].nonzero()[:, 0].tolist()


ROOT = Tree([-1])
# The drafter of each model in use, and what it was loaded from.
_loaded = WeakKeyDictionary()


def load_drafter(source, model):
    """Returns the drafter of a folder or hub id with its tree, in the model's type on its device; read once."""
    key = (source, model.dtype, model.device)
    known, drafter = _loaded.get(model, (None, None))
    if known == key:
        return drafter
    try:
        files = [cached_file(source, f"drafter/{name}.json") for name in ("config", "tree")]
    except OSError as reason:
        raise ValueError(f"{source!r} holds no drafter/: name the exported folder with drafter=FOLDER") from reason
    config, tree = (json.loads(Path(file).read_text("utf-8")) for file in files)
    kind = KINDS[config["drafter"]]
    weights = load_file(cached_file(source, f"drafter/{kind.weights_file}"))
    weights = {k: v.to(model.device, model.dtype if v.is_floating_point() else v.dtype) for k, v in weights.items()}
    drafter = kind(config, weights, Tree(tree["parents"], tree["ranks"]), model)
    drafter.policy = AdaptivePolicy()
    _loaded[model] = (key, drafter)
    return drafter
