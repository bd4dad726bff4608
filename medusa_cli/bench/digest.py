"""The digest of a model's logits in the native engine, which is the same on all instruction sets and machines."""

from hashlib import sha256

import numpy as np
import torch

from medusa_cli.engine import Plan
from medusa_cli.errors import UsageError
from medusa_cli.files.catalogue import DEFAULT_MODEL, SMALL_MODEL
from medusa_cli.model import Backbone
from medusa_cli.native import instruction_set, instructions, library, why_unavailable
from medusa_cli.tree import Tree

# The digests of named models, loaded without options that change numbers.
PUBLISHED = {DEFAULT_MODEL: "83c1e99fad4c6d37", SMALL_MODEL: "66208f34cc6ee448"}
PROMPT = 10
TREE = Tree.dense((2, 2))
PATH = (0, 2, 5)


def logits_digest(backbone: Backbone) -> str:
    """Returns the digest of the logits for a prompt, for a tree from which a path is kept, and for one more token."""
    cache = backbone.engine.new_cache()
    digest = sha256()
    plans = (
        Plan.chain(_tokens(PROMPT, backbone), logits="all"),
        Plan(_tokens(TREE.size, backbone)[None], TREE.depth, TREE.mask),
        Plan.chain(_tokens(1, backbone)),
    )
    for plan in plans:
        logits = backbone.engine.forward(plan, cache).logits
        assert logits is not None
        digest.update(np.ascontiguousarray(logits.numpy()).tobytes())
        if not plan.is_chain:
            cache.keep(0, PATH)
    return digest.hexdigest()[:16]


def _tokens(count: int, backbone: Backbone) -> torch.Tensor:
    """Returns fixed token ids [count]."""
    return (7919 * torch.arange(1, count + 1)) % backbone.vocab_size


def digests(backbone: Backbone) -> dict[str, str]:
    """Returns the digest of a backbone's logits by instruction set; raises UsageError unless the engine is native."""
    if backbone.engine.name != "native":
        raise UsageError(
            f"@digest needs the native engine, but {backbone.id!r} runs on the {backbone.engine.title}",
            why_unavailable() or "leave @engine and @device out, or give another @model",
        )
    used = instruction_set()
    by_set = dict[str, str]()
    try:
        for name in instructions():
            library().use(name.encode())
            by_set[name] = logits_digest(backbone)
    finally:
        library().use(used.encode())
    return by_set
