"""Triton kernels of draft trees, one program per tree. In torch, `tree.tensors` and `decode.accept` do the same."""

# mypy: disable-error-code="misc, no-untyped-def, no-untyped-call"

import torch
import triton
import triton.language as tl
from torch import Tensor

from medusa_cli.tree import tree
from medusa_cli.tree.tensors import GrowingTrees

UNREAD = tl.constexpr(tree.UNREAD)
ROOT_PARENT = tl.constexpr(tree.ROOT_PARENT)
PADDING = tl.constexpr(tree.PADDING)
NOWHERE = tl.constexpr(float("-inf"))
KNOWN = tl.constexpr(float("inf"))


@triton.jit
def value_of(c, inside, nodes, scores, log_p, grows, N: tl.constexpr, W: tl.constexpr):
    """Returns the values at places c of a list: N nodes, then W children of each; only depth `grows` has children."""
    is_child = c >= N
    node = tl.where(is_child, (c - N) // W, c)
    if scores is None:
        parent = tl.load(nodes + N + node, mask=inside, other=PADDING)
        unread = tl.load(nodes + 3 * N + node, mask=inside, other=UNREAD) == UNREAD
        value = tl.where((parent == PADDING) | unread, NOWHERE, KNOWN)
        value = tl.where(parent == ROOT_PARENT, 0.0, value)
    else:
        value = tl.load(scores + node, mask=inside, other=NOWHERE)
    depth = tl.load(nodes + node, mask=inside, other=0)
    exists = is_child & inside & (depth == grows) & (value < KNOWN)
    more = tl.load(log_p + (c - N), mask=exists, other=0.0)
    return tl.where(is_child, tl.where(exists, value + more, NOWHERE), value)


@triton.jit(do_not_specialize=["head", "of_outline", "of_nodes", "of_children"])
def grow_kernel(
    outline,
    nodes,
    mask,
    scores,
    log_p,
    ids,
    order,
    new_nodes,
    new_mask,
    new_scores,
    above,
    head,
    of_outline,
    of_nodes,
    of_children,
    N: tl.constexpr,
    W: tl.constexpr,
    BN: tl.constexpr,
    BC: tl.constexpr,
):
    """Keeps as many of a tree's best nodes and children as the outline has nodes; see `GrowingTrees.extend`."""
    b = tl.program_id(0).to(tl.int64)
    outline += b * of_outline
    nodes += b * of_nodes
    log_p += b * of_children
    ids += b * of_children
    mask += b * N * N
    if scores is not None:
        scores += b * N
    n = tl.arange(0, BN)
    inside = n < N
    present = tl.load(outline + N + n, mask=inside, other=PADDING) != PADDING
    unread = tl.load(outline + 3 * N + n, mask=inside, other=0) == UNREAD
    size = tl.sum(present.to(tl.int32), 0)
    levels = tl.max(tl.where(unread, tl.load(outline + n, mask=inside, other=0), 0), 0)
    grows = tl.where(head < levels, head, -1)
    c = tl.arange(0, BC)
    value = value_of(c, c < N + N * W, nodes, scores, log_p, grows, N, W)
    # Keys are integers in the order of the values. The bound is the largest number that `size` keys reach.
    bits = value.to(tl.int32, bitcast=True)
    key = tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits).to(tl.int64) + 2147483648
    bound = tl.full((), 0, tl.int64)
    step = tl.full((), 2147483648, tl.int64)
    for _ in range(32):
        reached = tl.sum((key >= bound + step).to(tl.int32), 0)
        bound = tl.where(reached >= size, bound + step, bound)
        step = step // 2
    # Of two nodes with equal values, the earlier, which is never deeper, comes first.
    tied = (key == bound).to(tl.int32)
    left = size - tl.sum((key > bound).to(tl.int32), 0)
    kept = (key > bound) | ((tied > 0) & (tl.cumsum(tied, 0) <= left))
    kept = (kept & (value > NOWHERE)).to(tl.int32)
    tl.store(order + b * N + tl.cumsum(kept, 0) - 1, c, mask=kept > 0)
    tl.debug_barrier()
    stays = n < tl.sum(kept, 0)
    c = tl.load(order + b * N + n, mask=stays, other=BC)
    is_old = c < N
    is_new = stays & (c >= N)
    parent = tl.load(nodes + N + c, mask=is_old, other=PADDING).to(tl.int32)
    parent = tl.where(is_new, (c - N) // W, parent)
    # Parents come before their children.
    place = tl.sum((c[None, :] < parent[:, None]).to(tl.int32), 1)
    depth = tl.load(nodes + c, mask=is_old, other=0)
    rank = tl.load(nodes + 2 * N + c, mask=is_old, other=0)
    token = tl.load(nodes + 3 * N + c, mask=is_old, other=0)
    token = tl.where(is_new, tl.load(ids + (c - N), mask=is_new, other=0), token)
    new_nodes += b * 4 * N + n
    tl.store(new_nodes, tl.where(is_new, head + 1, depth), mask=inside)
    tl.store(new_nodes + N, tl.where(parent < 0, parent, place), mask=inside)
    tl.store(new_nodes + 2 * N, tl.where(is_new, (c - N) % W, rank), mask=inside)
    tl.store(new_nodes + 3 * N, token, mask=inside)
    value = value_of(c, stays, nodes, scores, log_p, grows, N, W)
    tl.store(new_scores + b * N + n, value, mask=inside)
    parent = tl.maximum(parent, 0)
    tl.store(above + b * N + n, b * N + parent, mask=inside)
    # An old node keeps its row of the mask; a new node takes its parent's row.
    source = tl.where(is_old, c, parent)
    seen = mask + source[:, None] * N + source[None, :]
    sees = tl.load(seen, mask=inside[:, None] & is_old[None, :], other=0) > 0
    sees = sees | (n[:, None] == n[None, :])
    place = new_mask + b * N * N + n[:, None] * N + n[None, :]
    tl.store(place, sees.to(tl.uint8), mask=inside[:, None] & inside[None, :])


class KernelTrees(GrowingTrees):
    """Grows dynamic trees with one kernel per level."""

    def extend(self, head: int, log_p: Tensor, ids: Tensor) -> Tensor:
        size, _, count = self.nodes.shape
        width = ids.shape[-1]
        nodes = torch.empty_like(self.nodes, memory_format=torch.contiguous_format)
        mask = torch.empty_like(self.mask)
        values = log_p.new_empty(size, count)
        above = nodes.new_empty(size, count)
        grow_kernel[(size,)](
            self._outline,
            self.nodes,
            self.mask.view(torch.uint8),
            self._values,
            log_p.contiguous(),
            ids.contiguous(),
            nodes.new_empty(size, count, dtype=torch.int32),
            nodes,
            mask.view(torch.uint8),
            values,
            above,
            head,
            self._outline.stride(0),
            self.nodes.stride(0),
            ids[0].numel(),
            count,
            width,
            triton.next_power_of_2(count),
            triton.next_power_of_2(count + count * width),
        )
        self._values = values
        self.take(nodes, mask)
        return above.flatten()


@triton.jit(do_not_specialize=["of_tokens", "of_nodes"])
def longest_path_kernel(
    chosen,
    tokens,
    depth,
    parents,
    mask,
    results,
    on_path,
    of_tokens,
    of_nodes,
    N: tl.constexpr,
    P: tl.constexpr,
    BN: tl.constexpr,
    BP: tl.constexpr,
):
    """Finds the accepted path of one tree; see `accept.longest_path`."""
    b = tl.program_id(0).to(tl.int64)
    chosen += b * N
    tokens += b * of_tokens
    mask += b * N * N
    results += b * (2 + 2 * P)
    n = tl.arange(0, BN)
    inside = n < N
    parent = tl.load(parents + b * of_nodes + n, mask=inside, other=PADDING)
    token = tl.load(tokens + n, mask=inside, other=0)
    expected = tl.load(chosen + tl.maximum(parent, 0), mask=inside, other=0)
    misses = (token != expected) & (parent != ROOT_PARENT)
    square = inside[:, None] & inside[None, :]
    sees = tl.load(mask + n[:, None] * N + n[None, :], mask=square, other=0) > 0
    missed = tl.max((sees & misses[None, :]).to(tl.int32), 1)
    # The path ends at the deepest accepted node, or at the first of several equally deep nodes. The
    # root is always accepted.
    worth = tl.load(depth + b * of_nodes + n, mask=inside, other=0) * BN + (BN - 1 - n)
    best = tl.max(tl.where((missed == 0) & (parent != PADDING), worth, 0), 0)
    count = best // BN + 1
    last = BN - 1 - best % BN
    here = tl.load(mask + last * N + n, mask=inside, other=0)
    tl.store(on_path + b * N + n, here, mask=inside)
    tl.store(results, count)
    tl.store(results + 1, tl.load(chosen + last))
    path = results + 2
    place = tl.cumsum(here.to(tl.int32), 0) - 1
    tl.store(path + place, n, mask=here > 0)
    tl.store(path + P + place, token, mask=here > 0)
    # Beyond the end of a path, entry p is p, so that the cache's row p stays in place.
    p = tl.arange(0, BP)
    rest = (p >= count) & (p < P)
    tl.store(path + p, p, mask=rest)
    tl.store(path + P + p, tl.load(tokens + p, mask=rest, other=0), mask=rest)


def longest_path(
    chosen: Tensor, tokens: Tensor, depth: Tensor, parents: Tensor, tree_mask: Tensor, length: int
) -> tuple[Tensor, Tensor]:
    """Returns the results of `accept.longest_path`, computed by one kernel."""
    size, count = tokens.shape
    results = tokens.new_empty(size, 2 + 2 * length)
    on_path = torch.empty(size, count, dtype=torch.bool, device=tokens.device)
    longest_path_kernel[(size,)](
        chosen.contiguous(),
        tokens,
        depth,
        parents,
        tree_mask.contiguous().view(torch.uint8),
        results,
        on_path.view(torch.uint8),
        tokens.stride(0),
        depth.stride(0),
        count,
        length,
        triton.next_power_of_2(count),
        triton.next_power_of_2(length),
    )
    return results, on_path
