"""Runs vLLM's `bench serve` against `medusa serve` over MT-Bench; exits with 1 if it reads no figures of drafts.

vllm_bench.py PYTHON [MODEL]: the interpreter of an environment with vLLM and pandas. Prints what the bench prints.
"""

import json
import subprocess
import sys
import tempfile
from pathlib import Path

from medusa_cli.bench.questions import read_questions
from medusa_cli.files.fetch import mt_bench_path
from medusa_cli.files.model_source import ModelSource
from tests.serving import start

QUESTIONS = 16
TOKENS = 64
# The build for CPUs has another name on PyPI, which vLLM's own command does not find.
BENCH = """
import argparse
from vllm.benchmarks.serve import add_cli_args, main
parser = argparse.ArgumentParser()
add_cli_args(parser)
main(parser.parse_args())
"""


def main() -> int:
    python = sys.argv[1]
    model = sys.argv[2] if len(sys.argv) > 2 else "smollm2-135m"
    folder = Path(tempfile.mkdtemp(prefix="medusa-bench-serve-"))
    prompts = [question.turns[0] for question in read_questions(mt_bench_path())[0][:QUESTIONS]]
    data = folder / "prompts.jsonl"
    data.write_text("".join(json.dumps({"prompt": prompt}) + "\n" for prompt in prompts))

    server, port = start(["--model", model], folder / "serve.log")
    words = {
        "backend": "openai-chat",
        "base-url": f"http://127.0.0.1:{port}",
        "endpoint": "/v1/chat/completions",
        "model": model,
        "tokenizer": ModelSource.of(model).folder,
        "dataset-name": "custom",
        "dataset-path": data,
        "custom-output-len": TOKENS,
        "num-prompts": len(prompts),
        "max-concurrency": 4,
    }
    flags = [str(word) for name, value in words.items() for word in (f"--{name}", value)]
    try:
        done = subprocess.run(
            [python, "-c", BENCH, *flags], stdout=subprocess.PIPE, text=True, check=True
        )
    finally:
        server.terminate()
        server.wait()
    print(done.stdout)
    return 0 if "Acceptance length:" in done.stdout else 1


if __name__ == "__main__":
    sys.exit(main())
