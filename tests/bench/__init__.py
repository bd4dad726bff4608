"""Measurements that make figures of the docs; targets of the Makefile run them."""

import json
import subprocess
import sys
from typing import Any


def medusa(*words: object) -> str:
    """Runs a medusa command in a process of its own and returns its stdout; exits with its code where it fails."""
    command = [sys.executable, "-m", "medusa_cli", *map(str, words)]
    print("medusa", *words, file=sys.stderr)
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True)
    if done.returncode:
        sys.exit(done.returncode)
    return done.stdout


def medusa_json(*words: object) -> Any:
    """Returns the document that a command prints with --json."""
    return json.loads(medusa(*words, "--json"))
