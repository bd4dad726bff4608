"""The exact path of the torch engine on a GPU, on which greedy answers with drafts equal those of plain decoding.

Its kernels give a row the same bits by itself, in a tree and in a batch. Prompts run on the ordinary path, with drafts
and without.
"""

from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from medusa_cli.engine import plain_kernels
from medusa_cli.engine.plan import Plan
from medusa_cli.engine.reach import LAG, Reach
from medusa_cli.engine.tiles import TileLinear
from medusa_cli.engine.torch_layers import TOLERANCE, Joined, TorchEngine, TorchLayer
from medusa_cli.errors import UserError, first_line
from medusa_cli.model.backbone import Unsupported

# For the probe: the number of tokens before the tree, which reach into a second chunk; the number of nodes; and leaves
# whose paths are also decoded node by node.
BEFORE = 600
NODES = 64
LEAVES = (63, 38)


class ExactPath:
    """Runs a torch engine's layers with kernels that compute each row independently of the others.

    kernels: the module `kernels`, or its twin in plain torch, `plain_kernels`. Raises Unsupported if the kernels lack
    the activation or a kind of linear layer.
    """

    def __init__(self, engine: TorchEngine, kernels: ModuleType) -> None:
        self._kernels = kernels
        self._engine = engine
        self._activation = _activation_of(engine.layers[0].activation, engine.dtype)
        for layer in engine.layers:
            for linear in (layer.qkv, layer.out, layer.gate_up, layer.down, engine.head):
                if type(linear) not in (Joined, TileLinear, nn.Linear):
                    raise Unsupported(f"a layer is {type(linear).__name__}, which has no kernel")
        self._gains = [_gains_of(layer) for layer in engine.layers]

    def run(
        self,
        x: Tensor,
        cached: Tensor,
        cos: list[Tensor],
        sin: list[Tensor],
        reach: Reach,
        taps: tuple[int, ...],
    ) -> dict[int, Tensor]:
        """Returns the states [R, H] after each of the layers `taps` and, under -1, those after the final norm.

        x [R, H]: the embeddings. cached [2, layers, B, KV, C, D]: keys and values. cos, sin: one per rotary table.
        """
        kernels = self._kernels
        engine = self._engine
        norms = [*(layer.attention_norm for layer in engine.layers), engine.norm]
        tapped = {}
        _, read = kernels.add_norm(x, norms[0].gain, norms[0].eps)
        for index, layer in enumerate(engine.layers):
            keys, values = cached[0, index], cached[1, index]
            query = kernels.rotate_write(
                self._sums(read, layer.qkv),
                layer.qkv.bias,
                self._gains[index],
                layer.query_norm.eps if layer.query_norm is not None else 0.0,
                cos[layer.table],
                sin[layer.table],
                keys,
                values,
                reach,
            )
            kind = engine.masks.kinds[layer.kind]
            attended = kernels.attend(query, keys, values, reach, kind, layer.scale)
            x, read = self._add(x, layer.out, attended, layer.out_norm, layer.mlp_norm)
            parts = self._sums(read, layer.gate_up)
            inner = kernels.gate(parts, layer.gate_up.bias, self._activation, x.dtype)
            x, read = self._add(x, layer.down, inner, layer.down_norm, norms[index + 1])
            if index in taps:
                tapped[index] = x
        return {**tapped, -1: read}

    def _add(
        self, x: Tensor, joined: Any, y: Tensor, after: Any, norm: Any
    ) -> tuple[Tensor, Tensor]:
        """Adds a linear layer's output for y to the states x; returns the sums, and the sums normalized."""
        parts = self._sums(y, joined)
        own = () if after is None else (after.gain, after.eps)
        added: tuple[Tensor, Tensor] = self._kernels.add_norm(
            x, norm.gain, norm.eps, parts, joined.bias, *own
        )
        return added

    def _sums(self, x: Tensor, linear: Any) -> Tensor:
        """Returns a linear layer's sums over slices of K for rows [R, K], fp32 [S, R, N], without the bias."""
        if isinstance(linear, TileLinear):
            whole: Tensor = self._kernels.tile_matmul(x, linear.parts)
            return whole[None]
        sums: Tensor = self._kernels.matmul(x, linear.weight)
        return sums

    def lm_head(self, states: Tensor) -> Tensor:
        """Returns the fp32 scores [.., V] for final states [.., H]."""
        head: Any = self._engine.head
        first, *parts = self._sums(states.flatten(0, -2), head)
        for part in parts:
            first = first + part
        if head.bias is not None:
            first = first + head.bias.float()
        scores: Tensor = first.unflatten(0, states.shape[:-1])
        return scores


def _gains_of(layer: TorchLayer) -> Tensor | None:
    """Returns the gains [2, D] of a layer's norms of queries and keys; None if the layer has no such norms."""
    if layer.query_norm is None or layer.key_norm is None:
        return None
    if layer.query_norm.eps != layer.key_norm.eps:
        raise Unsupported("its norms of queries and keys differ in their epsilon")
    return torch.stack([layer.query_norm.gain, layer.key_norm.gain])


def _activation_of(activation: Any, dtype: torch.dtype) -> str:
    """Returns the kernels' name for an activation; raises Unsupported if they lack it."""
    probe = torch.linspace(-4, 4, 33)
    expected = activation(probe)
    for name, known in plain_kernels.ACTIVATIONS.items():
        if torch.allclose(known(probe), expected, atol=1e-6):
            return name
    raise Unsupported(f"its activation {type(activation).__name__} has no kernel")


def use_exact_path(engine: TorchEngine) -> None:
    """Lets an engine's steps take the exact path; raises UserError unless a probe finds the path exact on this GPU."""
    try:
        if engine.dtype == torch.float32:
            raise Unsupported("its kernels are for bf16 and fp16")
        from medusa_cli.engine import kernels

        engine.exact = ExactPath(engine, kernels)
        fault = difference(engine)
    except torch.OutOfMemoryError:
        raise
    # Triton, its compilers and its driver raise errors of many kinds.
    except Exception as reason:
        fault = first_line(reason) or type(reason).__name__
    if fault is not None:
        engine.exact = None
        raise UserError(
            f"@exact does not work for {engine.backbone.id!r} on {engine.backbone.device}: {fault}",
            "leave it out; drafts may then change an answer where two tokens are nearly tied",
        )


@torch.inference_mode()
def difference(engine: TorchEngine) -> str | None:
    """Returns the fault of an engine's exact path; None if there is none.

    Its states must be the ordinary path's, up to rounding. The bits of a row must not depend on other rows.
    """
    vocabulary = engine.backbone.vocab_size
    before = min(BEFORE, engine.backbone.max_positions - LAG)
    nodes = torch.arange(NODES)
    tree_mask = torch.eye(NODES, dtype=torch.bool)
    # Each node has two children.
    for node in range(1, NODES):
        tree_mask[node] |= tree_mask[(node - 1) // 2]
    tokens = (nodes * 37 + 5) % vocabulary
    tree = Plan(tokens[None], tree_mask.sum(1) - 1, tree_mask)
    cache = engine.new_cache()
    engine.forward(Plan.chain(nodes.repeat(before // NODES + 1)[:before] % vocabulary), cache)

    exact, engine.exact = engine.exact, None
    ordinary = engine.forward(tree, cache).hidden.float()
    engine.exact = exact
    together = engine.forward(tree, cache)
    assert together.logits is not None
    error = float((together.hidden.float() - ordinary).norm() / ordinary.norm())
    if not error <= TOLERANCE[engine.dtype]:
        return f"the states of its kernels differ from torch's by {error:.2%}"

    for leaf in LEAVES:
        path = tree_mask[leaf].nonzero()[:, 0].tolist()
        for node in path:
            root = Plan(tokens[None, node : node + 1], torch.zeros(1).long(), torch.ones(1, 1) > 0)
            alone = engine.forward(root, cache)
            assert alone.logits is not None
            cache.keep(0, [0])
            same = torch.equal(alone.logits[0, 0], together.logits[0, node])
            if not (same and torch.equal(alone.hidden[0, 0], together.hidden[0, node])):
                return f"its kernels round one row and {NODES} rows in different ways"
        cache.truncate(0, before)
    return None
