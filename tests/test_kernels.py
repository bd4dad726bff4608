"""The exact path's Triton kernels under Triton's interpreter against their twins in doubles, and as binaries."""

import importlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from random import Random
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from medusa_cli.decode import graph_step
from medusa_cli.decode.accept import longest_path
from medusa_cli.engine import exact, plain_kernels
from medusa_cli.engine.reach import CHUNK, LAG, NEAR, Reach
from medusa_cli.engine.torch_layers import TorchEngine
from medusa_cli.files.layer_kinds import FULL, SLIDING
from medusa_cli.train.fused_linear import PlainLoss, Targets, kernel_of
from medusa_cli.tree import DynamicTree
from medusa_cli.tree.tensors import GrowingTrees
from tests.helpers import tiny_backbone
from tests.test_tree import outlined

if find_spec("triton") is None:
    pytest.skip("needs triton", allow_module_level=True)
if torch.cuda.is_available():
    # Then the kernels themselves are to run in this process.
    pytest.skip("stands for a GPU where there is none", allow_module_level=True)
from medusa_cli.engine import kernels as interpreted  # under the interpreter: see conftest.py
from medusa_cli.train import loss_kernel
from medusa_cli.tree import kernels as tree_kernels

TARGETS = (80, 90, 120)
COUNTS = (1, 2, 7, 8, 16, 33, 64)
HEADS, KV, DIM = 4, 2, 16


class Masks:
    """The kinds of layers: full attention, and a window shorter and one longer than the lag."""

    def __init__(self, window: int = 20) -> None:
        self.kinds, self.window, self.chunk = [FULL, SLIDING], window, 0


class ByRow:
    """Stands for numpy, whose matmuls give a row other bits at other places of a tile, which tensor cores do not."""

    def __getattr__(self, name: str) -> Any:
        return getattr(np, name)

    @staticmethod
    def matmul(a: Any, b: Any, dtype: Any = None) -> Any:
        a, b = a.astype(np.float32), b.astype(np.float32)
        return np.stack([row @ b for row in a])


@pytest.fixture(scope="module")
def kernels() -> Iterator[Any]:
    interpreter = importlib.import_module("triton.runtime.interpreter")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(interpreter, "np", ByRow())
        yield interpreted


def halves(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).half()


def close(ours: Tensor, expected: Tensor, error: float = 2e-3) -> bool:
    return bool((ours.double() - expected).norm() <= error * expected.norm())


def chain_reach(rows: int, length: int = 40, slots: int = 1) -> Reach:
    mask = torch.ones(1, rows, rows, dtype=torch.bool).tril()
    return Reach.of(torch.full((slots,), length), torch.arange(rows)[None], mask, Masks())  # type: ignore[arg-type]


@pytest.mark.quick("160-200")
@pytest.mark.parametrize(("count", "depth"), [(40, 1024), (160, 200)])
def test_matmul_gives_a_row_the_same_bits_everywhere(count: int, depth: int, kernels: Any) -> None:
    x, weight = halves(70, depth), halves(count, depth, seed=1)
    parts = kernels.matmul(x, weight)
    assert len(parts) == (2 if depth == 1024 else 1)
    assert close(parts.sum(0), x.double() @ weight.double().T, 1e-5)
    for rows in COUNTS:
        assert torch.equal(kernels.matmul(x[:rows], weight), parts[:, :rows])
    # At every place of a tile, and others move by one.
    assert (kernels.matmul(x[:1].repeat(64, 1), weight) == parts[:, :1]).all()
    assert torch.equal(kernels.matmul(x.roll(1, 0), weight), parts.roll(1, 1))


@pytest.mark.parametrize("after", [False, True])
def test_add_norm(after: bool, kernels: Any) -> None:
    x, gain, bias, own = halves(9, 48), halves(48, seed=1), halves(48, seed=2), halves(48, seed=3)
    parts = torch.stack([halves(9, 48, seed=seed).float() for seed in (4, 5)])
    more = (own, 1e-5) if after else ()
    doubled = [value.double() if isinstance(value, Tensor) else value for value in more]
    expected = plain_kernels.add_norm(
        x.double(), gain.double(), 1e-6, parts.double(), bias.double(), *doubled
    )
    ours = kernels.add_norm(x, gain, 1e-6, parts, bias, *more)
    for own_state, state in zip(ours, expected, strict=True):
        assert close(own_state, state)
    for rows in (1, 7):
        some = parts[:, 2 : 2 + rows].contiguous()
        fewer = kernels.add_norm(x[2 : 2 + rows], gain, 1e-6, some, bias, *more)
        assert all(torch.equal(a, b[2 : 2 + rows]) for a, b in zip(fewer, ours, strict=True))
    state, read = kernels.add_norm(x, gain, 1e-6)
    assert torch.equal(state, x)
    assert close(read, plain_kernels.add_norm(x.double(), gain.double(), 1e-6)[1])


@pytest.mark.quick("True")
@pytest.mark.parametrize("with_norm", [False, True])
def test_rotate_write(with_norm: bool, kernels: Any) -> None:
    width = (HEADS + 2 * KV) * DIM
    parts = torch.stack([halves(10, width, seed=seed).float() for seed in (1, 2)])
    bias, gains = halves(width, seed=3), halves(2, DIM, seed=4) if with_norm else None
    cos, sin = halves(2, 10, 1, DIM, seed=5).unbind()
    reach = chain_reach(5, length=3, slots=2)

    def run(twin: Any, change: Any) -> tuple[Tensor, ...]:
        keys, values = change(torch.zeros(2, 2, KV, 12, DIM).half()).unbind()
        own = None if gains is None else change(gains)
        query = twin.rotate_write(
            change(parts), change(bias), own, 1e-6, change(cos), change(sin), keys, values, reach
        )
        return query, keys, values

    for ours, expected in zip(
        run(kernels, lambda x: x), run(plain_kernels, lambda x: x.double()), strict=True
    ):
        assert close(ours, expected)
        assert (ours != 0).any()


@pytest.mark.parametrize("activation", plain_kernels.ACTIVATIONS)
def test_gate(activation: str, kernels: Any) -> None:
    parts = torch.stack([halves(5, 2 * 40, seed=seed).float() for seed in (1, 2)])
    bias = halves(80, seed=3)
    ours = kernels.gate(parts, bias, activation, torch.half)
    expected = plain_kernels.gate(parts.double(), bias.double(), activation, torch.double)
    assert close(ours, expected)
    assert torch.equal(
        kernels.gate(parts[:, 3:4].contiguous(), bias, activation, torch.half), ours[3:4]
    )


class Case:
    """A text of `length` tokens in a cache and a random tree after it."""

    def __init__(self, length: int, nodes: int, seed: int, masks: Masks, kv: int = KV) -> None:
        self.length, self.masks = length, masks
        generator = Random(seed)
        self.mask = torch.eye(nodes, dtype=torch.bool)
        for node in range(1, nodes):
            # Some trees are bushes, and some nearly chains.
            self.mask[node] |= self.mask[generator.randrange(max(0, node - 1 - seed % 9), node)]
        self.depth = self.mask.sum(1) - 1
        capacity = length + nodes + 3
        # A cache's free rows hold any numbers.
        self.text = halves(2, 1, kv, capacity, DIM, seed=seed)
        self.nodes = halves(2, 1, kv, nodes, DIM, seed=seed + 1)
        self.query = halves(nodes, HEADS, DIM, seed=seed + 2)
        self.cached = self.text.clone()
        self.cached[:, :, :, length : length + nodes] = self.nodes

    def reach(self, length: int, depth: Tensor, mask: Tensor) -> Reach:
        return Reach.of(torch.tensor([length]), depth[None], mask[None], self.masks)  # type: ignore[arg-type]

    def together(self, attend: Any, kind: str, cap: float = 0.0) -> Tensor:
        reach = self.reach(self.length, self.depth, self.mask)
        return attend(self.query, *self.cached, reach, kind, DIM**-0.5, cap)

    def alone(self, attend: Any, kind: str, node: int) -> Tensor:
        """Returns the attention of a node whose ancestors came step by step, as in plain decoding."""
        path = self.mask[node].nonzero()[:, 0]
        cached = self.text.clone()
        cached[:, :, :, self.length : self.length + len(path)] = self.nodes[:, :, :, path]
        end = self.length + len(path) - 1
        reach = self.reach(end, torch.zeros(1).long(), torch.ones(1, 1) > 0)
        return attend(self.query[node : node + 1], *cached, reach, kind, DIM**-0.5)

    def expected(self, node: int, kind: str, cap: float) -> Tensor:
        """Returns the attention of a node in doubles, [heads * D]."""
        path = self.mask[node].nonzero()[:, 0]
        columns = torch.cat([torch.arange(self.length), self.length + path])
        if kind == SLIDING:
            columns = columns[-self.masks.window :]
        keys, values = self.cached[:, 0, :, columns].double()
        groups = HEADS // keys.shape[0]
        keys, values = (x.repeat_interleave(groups, 0) for x in (keys, values))
        scores = (keys @ self.query[node].double()[..., None])[..., 0] * DIM**-0.5
        scores = (scores / cap).tanh() * cap if cap else scores
        return (scores.softmax(-1)[:, None] @ values).flatten()


@pytest.mark.quick("1-sliding_attention-90-2.0")
@pytest.mark.parametrize(
    ("kv", "kind", "window", "cap"),
    [(2, FULL, 20, 0.0), (4, SLIDING, 20, 0.0), (1, SLIDING, 90, 2.0)],
)
def test_attention_is_that_of_doubles(
    kv: int, kind: str, window: int, cap: float, kernels: Any
) -> None:
    case = Case(CHUNK + 70, 6, 3, Masks(window), kv)
    ours = case.together(kernels.attend, kind, cap)
    twin = case.together(plain_kernels.attend, kind, cap)
    for node in range(6):
        expected = case.expected(node, kind, cap)
        assert close(ours[node], expected)
        assert close(twin[node], expected)


@pytest.mark.slow
@pytest.mark.parametrize("kind", [FULL, SLIDING])
@pytest.mark.parametrize(("length", "nodes"), [(0, 5), (40, 40), (127, 17), (CHUNK + 33, 4)])
def test_nodes_of_a_tree_attend_with_the_bits_of_plain_decoding(
    length: int, nodes: int, kind: str, kernels: Any
) -> None:
    case = Case(length, nodes, 5 + nodes, Masks())
    together = case.together(kernels.attend, kind)
    for node in {0, nodes // 2, nodes - 2, nodes - 1}:
        assert torch.equal(case.alone(kernels.attend, kind, node)[0], together[node])


def same_bits(trees: int, seed: int) -> None:
    """Asserts for random trees that the twin gives all nodes the bits of plain decoding."""
    for number in range(trees):
        generator = Random(seed + number)
        length, nodes = generator.randrange(150), 2 + number % 23
        case = Case(length, nodes, seed + number, Masks(5 + number % 70))
        kind = (FULL, SLIDING)[number % 2]
        together = case.together(plain_kernels.attend, kind)
        for node in range(0, nodes, 3):
            assert torch.equal(case.alone(plain_kernels.attend, kind, node)[0], together[node])


@pytest.mark.slow
def test_many_small_trees() -> None:
    same_bits(60, 100)


@pytest.mark.slow
def test_two_thousand_trees() -> None:
    same_bits(2000, 1000)


def test_step_by_the_kernels_has_the_bits_of_plain_decoding(
    kernels: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A whole step of a tiny model in fp32; the probe at loading runs it as here."""
    monkeypatch.setattr(exact, "BEFORE", 70)
    monkeypatch.setattr(exact, "NODES", 16)
    monkeypatch.setattr(exact, "LEAVES", (12,))
    engine = tiny_backbone("qwen3", engine="torch", layers=1).engine
    assert isinstance(engine, TorchEngine)
    engine.exact = exact.ExactPath(engine, kernels)
    assert exact.difference(engine) is None


def test_places_are_in_the_order_of_the_text() -> None:
    for seed, length in ((1, 0), (2, 31), (3, 64), (4, 200)):
        case = Case(length, 40, seed, Masks())
        reach = case.reach(length, case.depth, case.mask)
        assert (reach.limit % LAG == 0).all()
        assert (reach.limit <= max(length - 1, 0)).all()
        for node, (position, limit) in enumerate(
            zip(reach.position.tolist(), reach.limit.tolist(), strict=True)
        ):
            path = (length + case.mask[node].nonzero()[:, 0]).tolist()
            columns = [*range(length), *path][limit:]
            assert position - limit < NEAR
            assert reach.places[node, : len(columns)].tolist() == columns


@pytest.mark.quick("70-0.4-dtype1")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("soft", [None, 0.4, 1.0])
@pytest.mark.parametrize("width", [70, 2 * loss_kernel.BLOCK + 3])
def test_loss_is_that_of_plain_torch(width: int, soft: float | None, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    logits = (4 * torch.randn(9, width)).to(dtype)
    targets = logits.argmax(-1)
    targets[::2] = torch.randint(width, (5,))
    weights = torch.tensor([1.0, 0.8, 0, 1, 0.5, 0, 1, 1, 1])
    p = None if soft is None else (3 * torch.randn(12, width)).softmax(-1)
    results = []
    for compute in (loss_kernel.cross_entropy, PlainLoss()):
        own, right = logits.clone(), torch.empty(9, dtype=torch.uint8)
        given = Targets(targets, weights, right, p, torch.arange(3, 12), soft or 0.0)
        results.append((compute(own, given), right.float(), own.float()))
    near = 1e-5 if dtype == torch.float32 else 1e-3
    for ours, plain in zip(*results, strict=True):
        assert torch.allclose(ours, plain, rtol=near, atol=near)


def test_loss_without_a_gpu_for_its_kernel_is_plain() -> None:
    assert kernel_of.__wrapped__(torch.device("cuda")) is None


def grow_by_both(pairs: int, seed: int) -> None:
    """Asserts for pairs of random trees that kernels grow them, and find their longest paths, as plain torch does."""
    for number in range(pairs):
        generator, numbers = Random(seed + number), torch.Generator().manual_seed(seed + number)
        limits = DynamicTree(generator.randrange(1, 14), 3, width=generator.randrange(1, 5))
        rows = limits.budget + generator.randrange(4, 9)
        known = [[5, 7, 3], [5, 9]][: number % 3]
        alone, beside = outlined(limits, [], rows), outlined(limits, known, rows)
        # As in a graph, other fields follow those of each tree.
        nodes = torch.zeros(2, 6, rows, dtype=torch.long)
        nodes[:, :4] = torch.cat([alone.nodes, beside.nodes])
        mask = torch.cat([alone.mask, beside.mask])
        ours, plain = (
            kind(limits, nodes[:, :4], mask) for kind in (tree_kernels.KernelTrees, GrowingTrees)
        )
        for head in range(3):
            shape = 2, rows if head else 1, limits.width
            log_p = -torch.rand(shape, generator=numbers).sort().values
            if number % 2:
                # Many are equal, and some are certain.
                log_p = (3 * log_p).round() / 3
            ids = torch.randint(9, shape, generator=numbers)
            assert torch.equal(ours.extend(head, log_p, ids), plain.extend(head, log_p, ids))
            assert torch.equal(ours.nodes, plain.nodes)
            assert torch.equal(ours.mask, plain.mask)
        for chosen in (
            plain.tokens.scatter(1, plain.parents.clamp(min=0), plain.tokens),
            torch.randint(9, (2, rows), generator=numbers),
        ):
            given = chosen, plain.tokens, plain.depth, plain.parents, plain.mask, min(rows, 5)
            results = zip(tree_kernels.longest_path(*given), longest_path(*given), strict=True)
            assert all(torch.equal(*pair) for pair in results)


def test_trees_grow_as_in_plain_torch() -> None:
    grow_by_both(6, 100)


@pytest.mark.slow
def test_two_hundred_trees_grow_as_in_plain_torch() -> None:
    grow_by_both(100, 1000)


def test_kernels_of_trees_are_compared_before_their_use() -> None:
    plain, ours = (
        (GrowingTrees, longest_path),
        (tree_kernels.KernelTrees, tree_kernels.longest_path),
    )
    trees = graph_step.sample_trees(torch.device("cpu"))
    pairs = zip(graph_step.grown(*trees, *plain), graph_step.grown(*trees, *ours), strict=True)
    assert all(torch.equal(*pair) for pair in pairs)
    # There is no such device.
    assert graph_step.tree_operations.__wrapped__(torch.device("cuda")) == plain


@pytest.mark.slow
def test_binaries_have_no_atomics_and_no_spills_and_serve_all_numbers_of_rows() -> None:
    """Triton compiles a kernel anew for integers of 1 or multiples of 16, unless told not to."""
    command = [sys.executable, "-m", "tests.kernel_binaries", *map(str, TARGETS)]
    environment = {**os.environ, "TRITON_INTERPRET": "0"}
    run = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    binaries = json.loads(run.stdout)
    assert len(binaries) == 14 * len(TARGETS)
    for binary in binaries:
        assert not binary["atomics"], binary
        assert binary["stack"] == 0, binary
        assert not binary["specialized"], binary
