"""The long fuzzing, `make fuzz`: random changes of every file and flag for a time, from a seed that is printed."""

import argparse
import os
import random
import resource
import sys
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor
from contextlib import suppress
from pathlib import Path

from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st
from hypothesis.errors import FlakyStrategyDefinition

from tests.fuzzing import COMMANDS, FILES, MEMORY, Ground, cases

# Cases of one kind in a row: between kinds the files that were left are put back in any case.
BLOCK = 12


def fuzz(number: int, seconds: float) -> tuple[int, int, list[str]]:
    """Fuzz in this process: cases, the most kilobytes held, and what went wrong, each kind of fault once."""
    os.environ |= {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    chance, faults = random.Random(number), {}
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        ground = Ground(Path(folder))
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            name = chance.choice([*FILES, *COMMANDS])
            for fault in block(ground, name, chance.getrandbits(60), end):
                # The same fault again and again says no more: the words before the case tell faults apart.
                if faults.setdefault((name, fault.split("\n")[0][-60:]), fault) is fault:
                    print(f"FAULT by {name.strip()}: {fault}\n", flush=True)
    return ground.count, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, list(faults.values())


def block(ground: Ground, name: str, number: int, end: float) -> list[str]:
    """A few cases of one kind; what went wrong."""
    found: list[str] = []

    @seed(number)
    @settings(
        max_examples=BLOCK,
        deadline=None,
        database=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(st.data())
    def fuzzed(data: st.DataObject) -> None:
        case = data.draw(cases(ground, name))
        if time.monotonic() > end:
            return
        try:
            ground.check(case)
        except AssertionError as reason:
            found.append(str(reason))

    # What a case draws may hang on what an earlier one left in the run: the block then ends there.
    with suppress(FlakyStrategyDefinition):
        fuzzed()
    return found


def main() -> None:
    words = argparse.ArgumentParser(description=__doc__)
    words.add_argument("--seconds", type=float, default=600)
    words.add_argument("--processes", type=int, default=2)
    words.add_argument("--seed", type=int, default=random.SystemRandom().randrange(2**31))
    asked = words.parse_args()
    print(f"fuzzing for {asked.seconds:g} s in {asked.processes} processes, --seed {asked.seed}", flush=True)
    seeds = [asked.seed * 1000 + rank for rank in range(asked.processes)]
    with ProcessPoolExecutor(asked.processes) as pool:
        done = list(pool.map(fuzz, seeds, [asked.seconds] * asked.processes))
    cases_run, faults = sum(one[0] for one in done), [fault for one in done for fault in one[2]]
    most = max(one[1] for one in done) << 10
    print(f"{cases_run:,} cases, {len(faults)} faults, at most {most / 1e9:.2f} GB held; --seed {asked.seed}")
    sys.exit(bool(faults) or most > MEMORY)


if __name__ == "__main__":
    main()
