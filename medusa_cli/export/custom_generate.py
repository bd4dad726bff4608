"""Custom `generate` for transformers: several tokens per step, and the same tokens as without drafts.

    model = AutoModelForCausalLM.from_pretrained(FOLDER)
    model.generate(**inputs, custom_generate=FOLDER, trust_remote_code=True)

A small drafter proposes a tree of tokens, and n-gram matches in the earlier text propose more. One
pass of the model verifies all of them and accepts the ones that the model itself would choose.
transformers copies this file but not the drafter's weights. These are read from the folder or hub
id from which the model was loaded, or from `drafter=FOLDER`.
"""

import json
import time
from dataclasses import dataclass, fields
from math import log
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from weakref import WeakKeyDictionary

import torch
from safetensors.torch import load_file
from torch import Tensor
from torch.nn import functional as F
from transformers import DynamicCache
from transformers.generation import (
    GenerateDecoderOnlyOutput,
    StoppingCriteriaList,
    StopStringCriteria,
)
from transformers.utils import cached_file

from medusa_cli.decode.ngram import NgramIndex, add_paths, ngram_trust
from medusa_cli.drafters.amphista import Amphista
from medusa_cli.drafters.base import NewTokens, concat
from medusa_cli.drafters.eagle import Eagle
from medusa_cli.drafters.heads import HeadDrafter
from medusa_cli.drafters.hydra import HydraHeads
from medusa_cli.drafters.medusa import MedusaHeads
from medusa_cli.model.grouped_attention import cache_name
from medusa_cli.model.masks import Masks
from medusa_cli.tree.tree import Draft, Tree

# FIRP is not supported, because its extra rows go through the model's layers.
KINDS: dict[str, type[HeadDrafter]] = {
    kind.name: kind for kind in (MedusaHeads, HydraHeads, Amphista, Eagle)
}
# Number of steps for which a mode (with or without drafts) is tried, and number of steps until the
# slower mode is tried again. The second number doubles up to LONGEST_RETRY.
TRY = 6
RETRY = 48
LONGEST_RETRY = 768
# Maximum number of positions for models whose config has no limit.
UNBOUNDED = 1 << 20
# Tokens of an n-gram match are drafted while their probability of acceptance is above this.
MIN_CHANCE = 0.25


def generate(
    inputs: Any = None,
    *,
    model: Any,
    drafter: str | None = None,
    drafts: str = "auto",
    streamer: Any = None,
    tokenizer: Any = None,
    **kwargs: Any,
) -> Any:
    """Returns the result of `model.generate` for one prompt, in fewer passes. drafter: the drafter's folder or hub id.

    drafts: "auto" skips drafts while they do not save time on this machine and for this text;
    "always" drafts in every step. Raises ValueError for unsupported settings, such as beams.
    """
    if drafts not in ("auto", "always"):
        raise ValueError(f"drafts={drafts!r} is unknown: give 'auto' or 'always'")
    # These arguments are passed again if `model.generate` already is this function.
    for key in ("custom_generate", "trust_remote_code"):
        kwargs.pop(key, None)
    if model.config._attn_implementation not in ("sdpa", "eager"):
        raise ValueError(
            "a tree needs its own mask: load the model with attn_implementation='sdpa'"
        )
    loaded = load_drafter(drafter or model.name_or_path, model)
    add_stop_strings(model, tokenizer, kwargs)

    def decode(
        model: Any,
        input_ids: Tensor,
        logits_processor: Any,
        stopping_criteria: Any,
        generation_config: Any,
        **model_kwargs: Any,
    ) -> Any:
        if len(input_ids) != 1 or generation_config.num_beams != 1:
            raise ValueError(
                "drafts are for one prompt at a time and without beams: leave custom_generate out"
            )
        as_dict = generation_config.return_dict_in_generate
        for name in ("output_hidden_states", "output_attentions"):
            if as_dict and getattr(generation_config, name):
                raise ValueError(
                    f"{name}=True would include rejected drafts: leave custom_generate out"
                )
        padding = model_kwargs.get("attention_mask")
        prompt = input_ids if padding is None else input_ids[:, padding[0].bool()]
        generation = Generation(
            input_ids, logits_processor, stopping_criteria, generation_config, streamer
        )
        switch = None if drafts == "always" else loaded.switch
        cache = run(model, loaded, prompt.to(model.device), generation, switch)
        if streamer is not None:
            streamer.end()
        if not as_dict:
            return generation.ids
        name = cache_name(GenerateDecoderOnlyOutput)
        return GenerateDecoderOnlyOutput(
            sequences=generation.ids, **{name: cache}, **generation.kept
        )

    # The class's own `generate` prepares the prompt, processors and criteria as usual, and disables
    # gradients.
    return type(model).generate(model, inputs, custom_generate=decode, streamer=streamer, **kwargs)


def add_stop_strings(model: Any, tokenizer: Any, kwargs: dict[str, Any]) -> None:
    """Turns stop strings into stopping criteria, because transformers passes no tokenizer to a custom function."""
    configs = (kwargs.get("generation_config"), model.generation_config)
    given = [config.stop_strings for config in configs if config is not None]
    stops = next(filter(None, [kwargs.get("stop_strings"), *given]), None)
    if stops is None:
        return
    if tokenizer is None:
        raise ValueError(
            f"stop_strings={stops!r} need the tokenizer: give tokenizer=TOKENIZER as well"
        )
    criteria = [StopStringCriteria(tokenizer, stops), *(kwargs.get("stopping_criteria") or ())]
    kwargs |= {"stop_strings": None, "stopping_criteria": StoppingCriteriaList(criteria)}


class DraftSwitch:
    """Chooses the mode with less time per token, with or without drafts; tries the slower mode again at intervals."""

    def __init__(self) -> None:
        self.drafts = True
        self._retry = RETRY
        # Tokens per second with and without drafts, for the modes tried so far.
        self._speeds: dict[bool, float] = {}
        self._steps: list[tuple[float, int]] = []

    def record(self, drafts: bool, seconds: float, tokens: int) -> None:
        """Records a step's time and tokens, unless another answer with this switch has changed the mode."""
        if drafts != self.drafts:
            return
        self._steps.append((seconds, tokens))
        if len(self._steps) <= (TRY if len(self._speeds) < 2 else self._retry):
            return
        # The first step of a mode is slower and is not counted.
        spent, accepted = map(sum, zip(*self._steps[1:], strict=True))
        if len(self._speeds) == 2:
            self._speeds = {}
            self._retry = min(2 * self._retry, LONGEST_RETRY)
        self._speeds[drafts] = accepted / spent
        self._steps = []
        self.drafts = not drafts
        if len(self._speeds) == 2:
            self.drafts = max(self._speeds, key=self._speeds.__getitem__)


class Generation:
    """Holds the tokens of prompt and answer; chooses each next token and decides when to stop, as `generate` does."""

    def __init__(
        self, ids: Tensor, processors: Any, criteria: Any, config: Any, streamer: Any
    ) -> None:
        self.ids = ids
        self.done = False
        wanted = [name for name in ("scores", "logits") if getattr(config, f"output_{name}")]
        self.kept: dict[str, tuple[Tensor, ...]] = {name: () for name in wanted}  # per token
        self._processors = processors
        self._criteria = criteria
        self._streamer = streamer
        self._sample = config.do_sample

    def choose(self, logits: Tensor) -> int:
        """Returns the next token for logits [V]: the most likely one, or a sample from the requested distribution."""
        raw = logits[None].to(self.ids.device, torch.float32, copy=True)
        scores = self._processors(self.ids, raw)
        token = scores.argmax(-1, keepdim=True)
        if self._sample:
            token = torch.multinomial(scores.softmax(-1), 1)
        self.ids = torch.cat([self.ids, token], dim=1)
        for name, rows in (("scores", scores), ("logits", raw)):
            if name in self.kept:
                self.kept[name] += (rows,)
        if self._streamer is not None:
            self._streamer.put(token[0].cpu())
        self.done = bool(self._criteria(self.ids, scores).all())
        return int(token)

    def accept(self, logits: Tensor, draft: Draft) -> tuple[list[int], int]:
        """Follows the nodes that hold the tokens chosen from logits [N, V]; returns the path and the next token."""
        tokens = draft.tokens.tolist()
        path = [0]
        while True:
            token = self.choose(logits[path[-1]])
            child = next(
                (node for node in draft.tree.children[path[-1]] if tokens[node] == token), None
            )
            if child is None or self.done:
                return path, token
            path.append(child)


def run(
    model: Any, loaded: "Loaded", prompt: Tensor, generation: Generation, switch: DraftSwitch | None
) -> DynamicCache:
    """Drafts, verifies, accepts and keeps rows until the answer ends; returns the cache.

    switch: decides whether a step drafts; None: every step drafts.
    """
    # In a cache without a config, every layer keeps all rows, so that rejected rows can be removed.
    cache = DynamicCache()
    backbone = backbone_of(model)
    drafter = loaded.drafter.fork()
    index = NgramIndex(ngram_trust())
    options = {"use_cache": True, "output_hidden_states": True}
    options[cache_name(type(model).forward)] = cache
    out = model(prompt, logits_to_keep=1, **options)
    states = tapped(out.hidden_states, drafter.taps, model.device)
    text = prompt[0].tolist()
    limit = getattr(model.config.get_text_config(), "max_position_embeddings", None) or UNBOUNDED
    new = drafter.first_input(NewTokens(prompt[0], states, generation.choose(out.logits[0, -1]), 0))

    while not generation.done:
        began = time.perf_counter()
        start = len(text)
        room = limit - start - 1  # learned position embeddings end with the context
        drafts = room > 0 and (switch is None or switch.drafts)
        draft = Draft(prompt.new_tensor([new.root]), Tree.root_only())
        if drafts:
            (draft,) = drafter.draft(backbone, [drafter], [new], loaded.tree.truncate(room))
            paths = []
            for match in index.find(text, new.root):
                length = int(log(MIN_CHANCE) / log(match.chance))
                paths.append(match.tokens[: min(room, length)])
            draft = add_paths(draft, paths)

        positions = start + draft.tree.depth.to(prompt.device)
        out = model(
            draft.tokens[None],
            attention_mask=tree_masks(model, draft.tree, start, positions),
            position_ids=positions[None],
            **options,
        )
        path, root = generation.accept(out.logits[0], draft)

        rows = torch.tensor(path, device=prompt.device)
        states = tapped(out.hidden_states, drafter.taps, model.device)
        keep(cache, start, rows)
        accepted = NewTokens(draft.tokens[rows], states[rows], root, start)
        # Tokens from steps without drafts are collected until the drafter is used again.
        new = accepted if drafts else concat([new, accepted])
        text += accepted.tokens.tolist()
        index.learn([*text[start + 1 :], root])
        if switch is not None:
            switch.record(drafts, time.perf_counter() - began, len(path))
    return cache


def tapped(states: Any, taps: tuple[int, ...], device: torch.device) -> Tensor:
    """Returns the tapped states [n, H * taps]. states: embeddings and outputs of all layers, each [1, n, H]."""
    return torch.cat([states[tap if tap < 0 else tap + 1][0].to(device) for tap in taps], dim=-1)


def tree_masks(model: Any, tree: Tree, start: int, positions: Tensor) -> Any:
    """Returns the attention mask, or one for each kind of layer if there are several kinds.

    Each node sees all `start` cached rows and its own path.
    """
    visible = F.pad(tree.mask.to(positions.device), (start, 0), value=True)
    columns = torch.cat([torch.arange(start, device=positions.device), positions])
    additive = Masks(model.config.get_text_config(), model.dtype).additive(
        visible, positions, columns
    )
    masks = {kind: mask[None, None] for kind, mask in additive.items()}
    return masks if len(masks) > 1 else masks.popitem()[1]


def keep(cache: DynamicCache, start: int, rows: Tensor) -> None:
    """Keeps only the accepted rows among the cache rows from `start` on."""
    for layer in cache.layers:
        for name in ("keys", "values"):
            every = getattr(layer, name)
            every[:, :, start : start + len(rows)] = every[:, :, start + rows.to(every.device)]
            setattr(layer, name, every[:, :, : start + len(rows)])


def backbone_of(model: Any) -> Any:
    """Returns the parts of a model that drafters read."""
    head = model.get_output_embeddings()
    return SimpleNamespace(
        embedding=model.get_input_embeddings(),
        lm_head_weight=head.weight,
        lm_head_bias=head.bias,
        lm_head_rows=lambda ids: (head.weight[ids], None if head.bias is None else head.bias[ids]),
        engine=SimpleNamespace(lm_head=head),
        device=model.device,
        dtype=model.dtype,
    )


@dataclass
class Loaded:
    """Holds a model's drafter with its tree and switch; key: the drafter's source, dtype and device."""

    key: tuple[Any, ...]
    drafter: HeadDrafter
    tree: Tree
    switch: DraftSwitch


_loaded: WeakKeyDictionary[Any, Loaded] = WeakKeyDictionary()  # for each model, while it is in use


def load_drafter(source: str, model: Any) -> Loaded:
    """Returns the drafter of a folder or hub id in the model's dtype and on its device.

    The drafter is read only once per model. Raises ValueError if the source holds no drafter.
    """
    key = (source, model.dtype, model.device)
    if model in _loaded and _loaded[model].key == key:
        return _loaded[model]
    try:
        files = [cached_file(source, f"drafter/{name}.json") for name in ("config", "tree")]
    except OSError as reason:
        raise ValueError(
            f"{source!r} holds no drafter/: name the exported folder with drafter=FOLDER"
        ) from reason
    data, tree = [json.loads(Path(file).read_text("utf-8")) for file in files]
    kind = KINDS[data["drafter"]]
    data = kind.read_config(data)
    config = kind.config_class(
        **{f.name: data[f.name] for f in fields(kind.config_class) if f.name in data}
    )
    # Initializing the drafter's weights must not change the caller's random draws.
    with torch.random.fork_rng(devices=[]):
        drafter = kind(config)
    tensors = load_file(cached_file(source, f"drafter/{kind.weights_file}"))
    for name, weight in drafter.named_weights().items():
        weight.data.copy_(tensors[name])
    if "draft_ids" in tensors:
        drafter.draft_ids.copy_(tensors["draft_ids"])
    drafter.to(model.device, model.dtype).requires_grad_(False)
    _loaded[model] = Loaded(key, drafter, Tree.from_json(tree), DraftSwitch())
    return _loaded[model]
