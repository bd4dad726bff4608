"""Prints the least times of a 7B Llama's steps by rows on GPUs, from bytes and FLOPs: the table of docs/gpu.md."""

ROWS, CONTEXT = (1, 8, 16, 32, 64, 128), 1024
COLUMNS = (4096, 512, 364)  # a whole cache, a bucket of it, and a short text with its tree
BYTES = 2  # bf16
HIDDEN, INNER, LAYERS, VOCABULARY = 4096, 11_008, 32, 32_000
HEADS, DRAFT_VOCABULARY = 4, 12_288  # of Medusa heads with one residual block
# Bandwidth in bytes a second and dense bf16 FLOPs a second, as the vendors state them.
GPUS = {
    "A100 80 GB": (2.039e12, 312e12),
    "H100 SXM": (3.35e12, 989e12),
    "H200": (4.8e12, 989e12),
    "RTX 4090": (1.008e12, 165e12),
}
# A step reads few rows of the embedding.
WEIGHTS = LAYERS * (4 * HIDDEN**2 + 3 * HIDDEN * INNER) + HIDDEN * VOCABULARY
DRAFTER_WEIGHTS = HEADS * (HIDDEN**2 + HIDDEN * DRAFT_VOCABULARY)
ROW_BYTES = 2 * LAYERS * HIDDEN * BYTES  # keys and values of one token


def main() -> None:
    """Prints the table in Markdown, where reading and computing overlap, and what drafting and columns cost."""
    print(f"| rows | GB read | TFLOPs | {' | '.join(GPUS)} |\n|" + "---|" * (3 + len(GPUS)))
    for rows in ROWS:
        read = BYTES * WEIGHTS + (CONTEXT + rows) * ROW_BYTES
        flops = 2 * rows * WEIGHTS + 4 * rows * (CONTEXT + rows) * HIDDEN * LAYERS
        times = [
            f"{1e3 * max(read / bandwidth, flops / speed):.2f}"
            for bandwidth, speed in GPUS.values()
        ]
        print(f"| {rows} | {read / 1e9:.2f} | {flops / 1e12:.3f} | {' | '.join(times)} |")
    drafting = BYTES * DRAFTER_WEIGHTS
    print(f"drafting reads {drafting / 1e9:.2f} GB, a token's cache is {ROW_BYTES / 1e6:.2f} MB")
    for name, (bandwidth, speed) in GPUS.items():
        print(
            f"{name}: drafting {1e3 * drafting / bandwidth:.2f} ms; "
            f"{', '.join(f'{n:,} columns {1e3 * n * ROW_BYTES / bandwidth:.2f} ms' for n in COLUMNS)}; "
            f"rows until computing takes as long as reading: {speed / bandwidth * BYTES / 2:.0f}"
        )


if __name__ == "__main__":
    main()
