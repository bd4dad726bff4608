"""Medusa heads: K residual heads on the final hidden state, head k guessing the token k places past the next one."""

from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.nn import functional as F

from medusa_cli.backbone import Backbone, KVCache
from medusa_cli.backbone.packed import pack_linear
from medusa_cli.drafters.base import Batch, Confirmed, Draft, Drafter, Losses
from medusa_cli.drafters.cross_entropy import linear_cross_entropy
from medusa_cli.errors import UserError
from medusa_cli.run import read_json, write_json
from medusa_cli.tree import Tree

WEIGHTS = "medusa_lm_head.safetensors"
VOCABULARIES = ("draft", "own", "shared")


@dataclass(frozen=True)
class MedusaConfig:
    """K heads of L residual layers; which vocabulary they score, and of how many tokens."""

    num_heads: int
    num_layers: int
    hidden_size: int
    vocab_size: int
    vocabulary: str = "draft"
    draft_vocab_size: int | None = None


class ResidualBlock(nn.Module):
    """x + SiLU(W1 x + b) with W1 and b starting at zero, so that a fresh head is the lm_head (section 3.1.1)."""

    def __init__(self, hidden_size: int) -> None:
        super().__init__()
        self.linear = nn.Linear(hidden_size, hidden_size)
        nn.init.zeros_(self.linear.weight)
        nn.init.zeros_(self.linear.bias)

    def forward(self, x: Tensor) -> Tensor:
        return x + F.silu(self.linear(x))


class Stack(nn.Module):
    """L residual blocks, each with its own weights."""

    def __init__(self, hidden_size: int, layers: int) -> None:
        super().__init__()
        self.layers = [ResidualBlock(hidden_size) for _ in range(layers)]
        for index, layer in enumerate(self.layers):
            self.add_module(str(index), layer)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


class MedusaHeads(Drafter):
    """K heads of L residual blocks, each with its own weights, and a vocabulary matrix [M, H] each (none if shared).

    vocabulary "own": M = V; "draft": M most frequent tokens, draft_ids [M] mapping back; "shared": the frozen lm_head.
    """

    name = "medusa"
    draft_ids: Tensor

    def __init__(self, config: MedusaConfig) -> None:
        super().__init__()
        self.config = config
        self.num_heads = config.num_heads
        self.blocks = nn.ModuleList(Stack(config.hidden_size, config.num_layers) for _ in range(config.num_heads))
        rows = {"draft": config.draft_vocab_size or 0, "own": config.vocab_size, "shared": 0}[config.vocabulary]
        self.matrices = nn.ParameterList(
            [nn.Parameter(torch.empty(rows, config.hidden_size)) for _ in range(config.num_heads if rows else 0)]
        )
        ids = torch.arange(config.vocab_size) if config.vocabulary != "draft" else torch.zeros(rows, dtype=torch.long)
        self.register_buffer("draft_ids", ids, persistent=False)
        self._packed: list[Callable[[Tensor], Tensor]] = []

    @classmethod
    def create(
        cls,
        backbone: Backbone,
        num_heads: int = 5,
        num_layers: int = 1,
        vocabulary: str = "draft",
        draft_ids: Tensor | None = None,
    ) -> "MedusaHeads":
        """Fresh fp32 heads for a backbone, their matrices copied from its lm_head; draft_ids [M] for "draft"."""
        if vocabulary not in VOCABULARIES:
            raise UserError(f"the vocabulary {vocabulary!r} is unknown", f"use one of {', '.join(VOCABULARIES)}")
        if vocabulary == "draft" and (draft_ids is None or not len(draft_ids)):
            raise UserError("a draft vocabulary needs its token ids", "give draft_ids")
        size = len(draft_ids) if vocabulary == "draft" and draft_ids is not None else None
        config = MedusaConfig(num_heads, num_layers, backbone.hidden_size, backbone.vocab_size, vocabulary, size)
        heads = cls(config)
        if vocabulary == "draft" and draft_ids is not None:
            heads.draft_ids.copy_(draft_ids)
        for matrix in heads.matrices:
            matrix.data.copy_(backbone.lm_head_weight[heads.draft_ids.to(backbone.lm_head_weight.device)])
        return heads.to(backbone.device)

    def train(self, mode: bool = True) -> "MedusaHeads":
        self._packed = []  # the packed copy is stale as soon as a weight may change
        super().train(mode)
        return self

    @property
    def _dtype(self) -> torch.dtype:
        return next(self.parameters()).dtype

    def _matrix(self, backbone: Backbone, head: int) -> Tensor:
        return backbone.lm_head_weight if self.config.vocabulary == "shared" else self.matrices[head]

    def _scores(self, backbone: Backbone, state: Tensor, heads: int) -> Tensor:
        """Logits [heads, M] of the first `heads` heads for one hidden state [H]."""
        if self.config.vocabulary == "shared":
            states = torch.stack([block(state) for block in list(self.blocks)[:heads]])
            return F.linear(states, backbone.lm_head_weight.to(states.dtype))
        if not self._packed:
            self._packed = [pack_linear(matrix.detach()) for matrix in self.matrices]
        return torch.cat([self._packed[k](self.blocks[k](state[None])) for k in range(heads)])

    @torch.inference_mode()
    def draft(self, backbone: Backbone, cache: KVCache, confirmed: Confirmed, tree: Tree) -> Draft:
        """Fill each node with the guess of its head and rank, all from the last confirmed hidden state."""
        tokens = torch.full((tree.size,), confirmed.root, dtype=torch.long, device=backbone.device)
        if tree.max_depth:
            state = confirmed.hidden[-1].to(self._dtype)
            # Top-k over bf16 is several times slower than over fp32.
            scores = self._scores(backbone, state, tree.max_depth).float()
            best = scores.topk(max(tree.widths), dim=-1).indices  # [heads, widest]
            nodes = _lookup(tree, backbone.device)
            tokens[1:] = self.draft_ids[best[nodes[0], nodes[1]]]
        return Draft(tokens, tree)

    def loss(self, backbone: Backbone, batch: Batch, decay: float = 0.8) -> Losses:
        """Sum over heads k of decay^k times the mean cross-entropy to the token k places on (equation 1).

        A target outside the draft vocabulary can be neither learnt nor guessed: it is left out of the
        cross-entropy and counts as a miss in the accuracy.
        """
        place = self._places(batch.next.device)
        none = torch.zeros((), dtype=torch.long, device=batch.next.device)
        per_head, correct, counted = [], [], []
        for k in range(1, self.num_heads + 1):
            rows = torch.nonzero(batch.segment[k:] == batch.segment[:-k]).squeeze(-1) if len(batch.next) > k else None
            if rows is None or not len(rows):
                per_head.append(batch.hidden.sum() * 0.0)
                correct.append(none)
                counted.append(none)
                continue
            targets = place[batch.next[rows + k]]
            known = targets >= 0
            counted.append(none + len(rows))
            if not known.any():
                per_head.append(batch.hidden.sum() * 0.0)
                correct.append(none)
                continue
            states = self.blocks[k - 1](batch.hidden[rows[known]])
            loss, hits = linear_cross_entropy(states, self._matrix(backbone, k - 1), targets[known])
            per_head.append(loss)
            correct.append(hits)
        total = torch.stack([decay**k * loss for k, loss in enumerate(per_head, 1)]).sum()
        return Losses(total, per_head, torch.stack(correct), torch.stack(counted))

    def _places(self, device: torch.device) -> Tensor:
        """Token id -> row of the vocabulary matrices [V], -1 for tokens outside the draft vocabulary."""
        place = torch.full((self.config.vocab_size,), -1, dtype=torch.long, device=device)
        place[self.draft_ids.to(device)] = torch.arange(len(self.draft_ids), device=device)
        return place

    @torch.inference_mode()
    def guesses(self, backbone: Backbone, batch: Batch, top: int) -> Tensor:
        """Token ids of each head's `top` best guesses at every position, [P, K, top]."""
        found = []
        for k, block in enumerate(self.blocks):
            hidden = batch.hidden.to(self._dtype)
            matrix = self._matrix(backbone, k).to(hidden.dtype)
            best = F.linear(block(hidden), matrix).float().topk(top, dim=-1).indices
            found.append(self.draft_ids[best])
        return torch.stack(found, dim=1)

    def save(self, folder: Path, provenance: dict[str, Any]) -> None:
        """Write config.json and the weights in bf16, in the layout that serving engines read."""
        folder.mkdir(parents=True, exist_ok=True)
        tensors: dict[str, Tensor] = {}
        for k, block in enumerate(self.blocks):
            for name, tensor in block.named_parameters():  # "{layer}.linear.weight", "{layer}.linear.bias"
                tensors[f"{k}.{name}"] = tensor
            if self.matrices:
                tensors[f"{k}.{self.config.num_layers}.weight"] = self.matrices[k]
        tensors = {name: tensor.detach().to("cpu", torch.bfloat16).contiguous() for name, tensor in tensors.items()}
        if self.config.vocabulary == "draft":
            tensors["draft_ids"] = self.draft_ids.to("cpu", torch.int32)
        save_file(tensors, folder / WEIGHTS)
        backbone = provenance.get("backbone", {})
        config = {
            "drafter": self.name,
            "base_model_name_or_path": backbone.get("id") if isinstance(backbone, dict) else backbone,
            "medusa_num_heads": self.config.num_heads,
            "medusa_num_layers": self.config.num_layers,
            # Without this key, engines that read this layout drop the biases silently.
            "medusa_fc_bias": True,
            **{k: v for k, v in asdict(self.config).items() if k not in ("num_heads", "num_layers")},
            "provenance": provenance,
        }
        write_json(folder / "config.json", config)

    @classmethod
    def load(cls, folder: Path, backbone: Backbone) -> "MedusaHeads":
        """Read heads in the backbone's dtype, ready to draft."""
        data = read_json(folder / "config.json", "the drafter's config")
        try:
            config = MedusaConfig(
                data["medusa_num_heads"],
                data["medusa_num_layers"],
                data["hidden_size"],
                data["vocab_size"],
                data.get("vocabulary", "own"),
                data.get("draft_vocab_size"),
            )
            heads = cls(config)
            tensors = load_file(folder / WEIGHTS)
            with torch.no_grad():
                for k, block in enumerate(heads.blocks):
                    for name, tensor in block.named_parameters():
                        tensor.copy_(tensors[f"{k}.{name}"])
                    if heads.matrices:
                        heads.matrices[k].copy_(tensors[f"{k}.{config.num_layers}.weight"])
                if config.vocabulary == "draft":
                    heads.draft_ids.copy_(tensors["draft_ids"])
        except (KeyError, OSError, RuntimeError, ValueError, SafetensorError) as reason:
            raise UserError(
                f"the drafter in {folder} cannot be read: {type(reason).__name__}: {reason}",
                "train it again, or give another --drafter",
            ) from reason
        return heads.to(backbone.device, backbone.dtype).eval().requires_grad_(False)


@lru_cache(maxsize=64)
def _lookup(tree: Tree, device: torch.device) -> tuple[Tensor, Tensor]:
    """Head index and rank of every node but the root, [N-1] each."""
    heads = torch.tensor([depth - 1 for depth in tree.depths[1:]], device=device)
    return heads, torch.tensor(tree.ranks[1:], device=device)
