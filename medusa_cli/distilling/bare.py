"""What servers give at most: the questions of a distillation asked without any book-keeping."""

import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

from medusa_cli.distilling.distilled import Settings
from medusa_cli.distilling.endpoint import Endpoint
from medusa_cli.distilling.seeds import Seed


def bare_load(endpoint: Endpoint, seeds: Sequence[Seed], settings: Settings, concurrency: int) -> float:
    """Seconds for the first answer to every seed, `concurrency` at a time, each thrown away; UserError if one fails."""

    def ask(seed: Seed) -> None:
        system = [] if seed.system is None else [{"role": "system", "content": seed.system}]
        endpoint.answer([*system, {"role": "user", "content": seed.turns[0]}], settings)

    start = time.perf_counter()
    with ThreadPoolExecutor(max_workers=concurrency) as pool:
        for future in [pool.submit(ask, seed) for seed in seeds]:
            future.result()
    return time.perf_counter() - start
