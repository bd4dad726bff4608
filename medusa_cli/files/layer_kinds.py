"""The kinds of layers in models' configs."""

# Attention with a mask: over all earlier positions, over a window, and over a chunk of positions.
FULL, SLIDING, CHUNKED = "full_attention", "sliding_attention", "chunked_attention"
# Names, in configs, of layers with a running state of constant size, and of layers without memory.
STATEFUL = ("conv", "linear_attention", "mamba", "mamba2", "recurrent")
WITHOUT_MEMORY = ("mlp", "moe")
# The attention of each kind of layer in a config, None for layers without attention. Models with layers
# of any other kind are refused.
KINDS: dict[str, str | None] = {
    FULL: FULL,
    "attention": FULL,
    "hybrid": FULL,
    SLIDING: SLIDING,
    "hybrid_sliding": SLIDING,
    CHUNKED: CHUNKED,
    **dict.fromkeys((*STATEFUL, *WITHOUT_MEMORY)),
}
