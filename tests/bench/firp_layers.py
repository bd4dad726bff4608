"""`make bench-firp`: held-out accuracy of FIRP's heads by entry layer and mask (the paper's Figures 5 to 7)."""

import argparse
import json
from pathlib import Path

from tests.bench import medusa

Choice = tuple[tuple[int, ...], bool]


def figures(depth: int) -> dict[str, list[Choice]]:
    """Returns the (entry layers, masked) that each figure of the paper compares, for a model of `depth` layers."""
    half = max(1, depth // 2)
    first = sorted({min(max(1, round(sixths / 6 * depth)), depth - 1) for sixths in range(1, 6)} | {depth - 1})
    two = (half, min(max(1, round(2 / 3 * depth)), depth - 1))
    return {
        "5": [((layer,), False) for layer in first],
        "6": [((half, layer), False) for layer in first if layer > half],
        "7": [(two, False), (two, True)],
    }


def train(run: Path, data: Path, model: str, tokens: int, choice: Choice) -> dict[str, object]:
    """Trains heads on one choice, unless its run is there, and returns its last validation."""
    layers, masked = choice
    target = run / "firp" / ("-".join(map(str, layers)) + ("-masked" if masked else ""))
    if not (target / "drafter" / "config.json").is_file():
        settings = {
            "drafter": "firp",
            "drafter.num_heads": len(layers),
            "drafter.layers": list(layers),
            "drafter.masked": masked,
            "train.max_tokens": tokens,
        }
        words = [f"{key}={json.dumps(value)}" for key, value in settings.items()]
        medusa("train", *words, "--run", target, "--data", data, "--model", model)
    events = [json.loads(line) for line in (target / "train.jsonl").read_text().splitlines()]
    last = [event for event in events if event["event"] == "validated"][-1]
    return {"layers": layers, "masked": masked, "losses": last["head_losses"], "accuracies": last["accuracies"]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--run", type=Path, default=Path("runs/smollm2"), help="holds distill.jsonl")
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--depth", type=int, default=30, help="layers of the model")
    parser.add_argument("--tokens", type=int, default=20_000, help="answer tokens each choice is trained on")
    asked = parser.parse_args()
    results = {}
    for figure, choices in figures(asked.depth).items():
        print(f"Figure {figure}: layers, held-out loss and top-1 of the last head")
        data = asked.run / "distill.jsonl"
        results[figure] = [train(asked.run, data, asked.model, asked.tokens, choice) for choice in choices]
        for row in results[figure]:
            mask = " masked" if row["masked"] else ""
            print(f"  {row['layers']}{mask}: {row['losses'][-1]:.3f}, {100 * row['accuracies'][-1]:.1f} %")
    path = asked.run / "firp-layers.json"
    path.write_text(json.dumps({"tokens": asked.tokens, "figures": results}, indent=1) + "\n")
    print(path)


if __name__ == "__main__":
    main()
