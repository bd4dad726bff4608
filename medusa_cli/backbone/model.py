"""A Hugging Face decoder seen as a verifier: forward over a chain or a tree of tokens, states for the drafter."""

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from medusa_cli.backbone import attention
from medusa_cli.backbone.cache import KVCache
from medusa_cli.backbone.dialogue import Malformed, render
from medusa_cli.backbone.layered import LayeredDecoder, Unsupported
from medusa_cli.backbone.lean import LeanDecoder, release_linears
from medusa_cli.backbone.pseudo import Pseudo, Riders
from medusa_cli.backbone.rounded import BITS, check_rounding
from medusa_cli.backbone.slots import SlotCache, run_slots
from medusa_cli.backbone.support import check_agreement, layered_decoder, refuse_unsupported
from medusa_cli.backbone.trace import padded_pass
from medusa_cli.errors import UsageError, UserError

# Rows of one prefill pass: long enough for full matmul speed, short enough that its mask stays small.
PREFILL_ROWS = 512
# At most so many rows of fp32 logits are kept for the steps of decoding.
SCRATCH_ROWS = 256


class TreeShape(Protocol):
    """What verification needs of a tree of N nodes: who sees whom, and how deep each node is."""

    @property
    def mask(self) -> Tensor: ...  # bool [N, N]

    @property
    def depth(self) -> Tensor: ...  # long [N]


@dataclass(frozen=True)
class Output:
    """fp32 logits [n, V] (or [1, V], or None) and the tapped hidden states [n, H * taps] of one forward pass.

    ahead: the final states [n, K, H] (or [1, K, H]) of pseudo rows, where there were any. The logits of a step on a
    CPU are overwritten by the next pass: copy them to keep them.
    """

    logits: Tensor | None
    hidden: Tensor
    ahead: Tensor | None = None

    def ahead_of(self, row: int) -> Tensor | None:
        """The states [K, H] of a row's pseudo rows."""
        return None if self.ahead is None else self.ahead[row]


class Backbone:
    """A frozen causal LM with one token sequence at a time; unmodified but for its attention function.

    With engine "fast" its layers run through LeanDecoder, with "auto" where that knows the model, with "int8" and
    "int4" over rounded weights, which change the model. The network's own linear layers are then given up. Raises
    UserError for models whose attention a tree mask cannot express, UsageError for an engine that cannot be had.
    """

    def __init__(
        self, model: Any, tokenizer: Any = None, id: str = "model", engine: str = "eager", adapter: str | None = None
    ) -> None:
        refuse_unsupported(model.config)
        attention.register()
        model.set_attn_implementation(attention.NAME)
        self.model = model.eval().requires_grad_(False)
        self.tokenizer = tokenizer
        self.id = id
        self.adapter = adapter
        self.config = model.config.get_text_config()
        self.hidden_size: int = self.config.hidden_size
        self.num_layers: int = self.config.num_hidden_layers
        self.max_positions: int = self.config.max_position_embeddings
        self.embedding: nn.Embedding = model.get_input_embeddings()
        self.vocab_size: int = self.embedding.weight.shape[0]
        self.device: torch.device = self.embedding.weight.device
        self.dtype: torch.dtype = self.embedding.weight.dtype
        # What a step reads: all weights but an embedding table that is not also the lm_head.
        tied = model.get_output_embeddings().weight is self.embedding.weight
        every = sum(one.numel() * one.element_size() for one in model.parameters())
        self.weight_bytes: int = every - (0 if tied else self.embedding.weight.numel() * self.dtype.itemsize)
        # Read before the linear layers are packed, which keeps no plain weight.
        self.lm_head_weight: Tensor = model.get_output_embeddings().weight.detach()
        self.lm_head: Callable[[Tensor], Tensor] = model.get_output_embeddings()
        # What decoding with captured steps keeps from answer to answer.
        self.idle_decoders: list[Any] = []
        self._scratch: Tensor | None = None
        self.masks = attention.Masks(self.config, self.dtype)
        # What passes run through in the network's place; None: the network itself.
        self._decoder: LeanDecoder | LayeredDecoder | None = None
        self.engine = "eager"
        if engine != "eager":
            self._decoder = self._make_lean(engine)
        if self._decoder is not None:
            self.engine = engine if engine in BITS else "fast"

    @property
    def captures(self) -> bool:
        """Whether greedy decoding runs captured steps of fixed shapes: under the fast engine on CUDA."""
        return self._decoder is not None and self.device.type == "cuda"

    def _make_lean(self, engine: str) -> LeanDecoder | None:
        """The lean decoder, once it has agreed with the network itself; None where "auto" must do without it."""
        if engine == "auto" and self.device.type == "cuda":
            return None  # not measured there yet
        if engine in BITS:
            check_rounding(engine, self.dtype, self.device)
        try:
            lean = LeanDecoder(self.model)
            check_agreement(self, lean)
            if engine in BITS:  # the same layers once more, over other weights
                lean = LeanDecoder(self.model, BITS[engine])
                self.weight_bytes = lean.weight_bytes
        except Unsupported as reason:
            if engine == "auto":
                return None
            raise UsageError(
                f"--engine {engine} cannot run the model {self.id!r}: {reason}", "use --engine auto or eager"
            ) from reason
        self.lm_head = lean.lm_head
        release_linears(self.model)
        return lean

    @cached_property
    def _layered(self) -> LayeredDecoder:
        return layered_decoder(self)

    @cached_property
    def eos_ids(self) -> frozenset[int]:
        """The token ids that end an answer."""
        ids: set[int] = set()
        for owner in (self.model.generation_config, self.config, self.tokenizer):
            found = getattr(owner, "eos_token_id", None)
            ids.update(found if isinstance(found, list) else [] if found is None else [found])
        return frozenset(ids)

    @cached_property
    def identity(self) -> dict[str, Any]:
        """What names this backbone in a run: id, architecture, widths, fingerprint of its weights, adapter.

        The fingerprint hashes norm and embedding weights rounded to bf16, so that fp32, bf16 and 4-bit loads agree.
        """
        digest = hashlib.sha256()
        norms = [p for name, p in self.model.named_parameters() if "norm" in name and p.dim() == 1]
        for weight in (*norms[-3:], self.embedding.weight[:16]):
            digest.update(weight.detach().to(torch.bfloat16).float().cpu().contiguous().numpy().tobytes())
        return {
            "id": self.id,
            "architecture": self.config.model_type,
            "hidden_size": self.hidden_size,
            "vocab_size": self.vocab_size,
            "layers": self.num_layers,
            "fingerprint": digest.hexdigest()[:16],
            **({"adapter": self.adapter} if self.adapter else {}),
        }

    def new_cache(self, capacity: int = 256) -> KVCache:
        """An empty cache of one sequence with room for `capacity` tokens; it grows as needed."""
        return KVCache(self.num_layers, capacity, turn=self._decoder is not None and self.device.type == "cpu")

    def new_slots(self, slots: int, capacity: int) -> SlotCache:
        """Empty caches of `slots` sequences of at most `capacity` tokens each."""
        return SlotCache(self.num_layers, slots, capacity, self.device)

    @torch.inference_mode()
    def forward(
        self,
        tokens: Tensor,
        cache: KVCache,
        tree: TreeShape | None = None,
        *,
        taps: Sequence[int] = (-1,),
        logits: str = "all",
        pseudo: Pseudo | None = None,
    ) -> Output:
        """Run tokens [n] after the cached ones, as a chain or as the nodes of a tree, and append n rows to the cache.

        A node sits at position length + depth and attends to the cached tokens and to its ancestors and itself.
        taps name the layers whose outputs [n, H] are returned side by side; -1 is the final state after the last
        norm, which the lm_head reads. logits: "all" rows, the "last" row alone, or "none". pseudo: rows that ride
        with every node, or with the last token of a chain, and leave nothing in the cache; the tap is -1 then.
        """
        tokens = torch.as_tensor(tokens, device=self.device)
        if tree is None and len(tokens) > PREFILL_ROWS:
            return self._prefill(tokens, cache, taps, logits, pseudo)
        start, rows = cache.length, len(tokens)
        depth = torch.arange(rows, device=self.device) if tree is None else tree.depth.to(self.device)
        among = (depth[:, None] >= depth) if tree is None else tree.mask.to(self.device)
        riders = None
        if pseudo is not None:
            every = torch.arange(rows, device=self.device)
            riders = Riders(pseudo, every if tree is not None else every[-1:])
            among, depth = riders.seat(among, depth)
        cache.extend(rows, riders.growth if riders else ())
        past = torch.ones(len(depth), start, dtype=torch.bool, device=self.device)
        # Near the end of the context pseudo rows may stand beyond it, where some models' rotary tables change.
        positions = (start + depth).clamp(max=self.max_positions - 1)
        columns = torch.cat([torch.arange(start, device=self.device), positions])
        mask = self.masks(torch.cat([past, among], dim=1), positions, columns)
        states = self._run(tokens[None], cache, mask, positions[None], taps, riders)[0]
        cache.length = start + rows
        states, ahead = riders.leave(states) if riders else (states, None)
        return Output(self._logits(states, logits), states, ahead)

    def _prefill(
        self, tokens: Tensor, cache: KVCache, taps: Sequence[int], logits: str, pseudo: Pseudo | None
    ) -> Output:
        cache.extend(len(tokens))  # room for all pieces at once
        pieces = tokens.split(PREFILL_ROWS)
        before = "none" if logits == "last" else logits
        outputs = [self.forward(piece, cache, taps=taps, logits=before) for piece in pieces[:-1]]
        outputs.append(self.forward(pieces[-1], cache, taps=taps, logits=logits, pseudo=pseudo))
        scores = [out.logits for out in outputs if out.logits is not None]
        hidden = torch.cat([out.hidden for out in outputs])
        return Output(torch.cat(scores) if scores else None, hidden, outputs[-1].ahead)

    def states(self, tokens: Tensor, taps: Sequence[int] = (-1,)) -> Tensor:
        """Tapped states [B, L, H * taps] of rows of tokens [B, L], padded at their ends, for training.

        Each row alone, and no cache; gradients reach whatever weights of the network learn.
        """
        return _tapped(padded_pass(self, tokens, output_hidden_states=_lower(taps)), taps)

    @torch.inference_mode()
    def forward_slots(
        self, tokens: Tensor, cache: SlotCache, tree: TreeShape | None = None, *, taps: Sequence[int] = (-1,)
    ) -> Output:
        """Run tokens [B, n] behind the first B slots' own, each row as forward would; `cache.keep` settles them.

        Returns logits [B, n, V] and the tapped hidden states [B, n, H * taps].
        """
        tokens = torch.as_tensor(tokens, device=self.device)
        slots, rows = tokens.shape
        depth = torch.arange(rows, device=self.device) if tree is None else tree.depth.to(self.device)
        among = (depth[:, None] >= depth) if tree is None else tree.mask.to(self.device)
        states = run_slots(self, tokens, cache, cache.begin(slots, rows), depth, among, taps)
        logits = self._logits(states.flatten(0, 1), "all")
        assert logits is not None
        return Output(logits.unflatten(0, (slots, rows)), states)

    def _run(
        self,
        tokens: Tensor,
        cache: Any,
        mask: Tensor | dict[str, Tensor],
        positions: Tensor,
        taps: Sequence[int],
        riders: Riders | None = None,
    ) -> Tensor:
        decoder = self._layered if riders is not None and self._decoder is None else self._decoder
        if decoder is not None:
            return decoder(tokens, cache, mask, positions, taps, riders)
        out = self.model.base_model(
            input_ids=tokens,
            attention_mask=mask,
            position_ids=positions,
            past_key_values=cache,
            use_cache=True,
            output_hidden_states=_lower(taps),
        )
        return _tapped(out, taps)

    def _logits(self, states: Tensor, which: str) -> Tensor | None:
        if which == "none":
            return None
        final = states[..., -self.hidden_size :] if states.shape[-1] != self.hidden_size else states
        return self._widen(self.lm_head(final if which == "all" else final[-1:]))

    def _widen(self, scores: Tensor) -> Tensor:
        """Logits in fp32, those of a step in a buffer that the next step overwrites.

        Fresh megabytes every step cost more than the cast itself: the system hands out and zeroes each page anew.
        """
        if scores.dtype == torch.float32 or len(scores) > SCRATCH_ROWS or scores.device.type != "cpu":
            return scores.float()
        if self._scratch is None or len(self._scratch) < len(scores):
            self._scratch = torch.empty(max(64, len(scores)), scores.shape[-1])
        return self._scratch[: len(scores)].copy_(scores)

    def encode_chat(self, messages: list[dict[str, str]], add_generation_prompt: bool = True) -> list[int]:
        """Token ids of a conversation under the model's chat template; UserError where it has none or refuses."""
        try:
            text = render(self, messages, prompt=add_generation_prompt)
        except Malformed as reason:
            raise UserError(
                f"the model {self.id!r} cannot be told this conversation: {reason}",
                "leave the system prompt out, or what the template names",
            ) from reason
        return list(self.tokenizer.encode(text, add_special_tokens=False))

    def decode(self, ids: Sequence[int]) -> str:
        """The text of token ids, special tokens left out."""
        return str(self.tokenizer.decode(list(ids), skip_special_tokens=True))


def _lower(taps: Sequence[int]) -> bool:
    """Whether states below the final ones are asked for."""
    return any(tap != -1 for tap in taps)


def _tapped(out: Any, taps: Sequence[int]) -> Tensor:
    """The tapped states [.., H * taps] of a network's output."""
    if tuple(taps) == (-1,):
        final: Tensor = out.last_hidden_state
        return final
    # hidden_states[0] is the embedding, so the output of layer t is at t + 1.
    return torch.cat([out.last_hidden_state if t == -1 else out.hidden_states[t + 1] for t in taps], dim=-1)
