"""Names the kinds of layers in models' configs."""

# Attention under a mask: over all that precedes, over a window, and over a chunk of positions.
FULL, SLIDING, CHUNKED = "full_attention", "sliding_attention", "chunked_attention"
# Layers with a running state of constant size, and layers without memory, as configs call them.
STATEFUL = ("conv", "linear_attention", "mamba", "mamba2", "recurrent")
WITHOUT_MEMORY = ("mlp", "moe")
# The attention of each kind of layer in a config; None if it has none. Layers of any other kind are refused.
KINDS: dict[str, str | None] = {
    FULL: FULL,
    "attention": FULL,
    "hybrid": FULL,
    SLIDING: SLIDING,
    "hybrid_sliding": SLIDING,
    CHUNKED: CHUNKED,
    **dict.fromkeys((*STATEFUL, *WITHOUT_MEMORY)),
}
