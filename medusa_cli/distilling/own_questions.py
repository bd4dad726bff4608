"""Questions that the model asks itself: what it writes after the header of a user's first turn (arXiv:2406.08464).

A model that was taught to answer was shown questions, too. Its own need no data and are of the kind that it knows.
"""

import json
import re
from collections.abc import Callable, Iterator
from collections.abc import Sequence as Several

from medusa_cli.backbone import Backbone
from medusa_cli.decoding import Decoder, Sampling
from medusa_cli.decoding.sequence import Sequence
from medusa_cli.distilling.filters import plain
from medusa_cli.distilling.seeds import Seed, read_seeds
from medusa_cli.distilling.selftalk import QUESTION_TOKENS, user_turn
from medusa_cli.errors import UserError
from medusa_cli.runs.files import write_atomic
from medusa_cli.runs.run import Run

# Drawn at 1 a small model's questions are often no sense; at 0 they are all the same one.
TEMPERATURE = 0.8
# Of so many draws for each question that is wanted the model must have ended enough.
PATIENCE = 4
# Questions between two writes of the file: so many at most are lost.
KEPT_EVERY = 256


def questions(
    backbone: Backbone,
    run: Run,
    count: int,
    *,
    slots: int,
    random_seed: int = 0,
    on_question: Callable[[int], None] = lambda count: None,
) -> list[Seed]:
    """So many questions of a run's file, those that lack asked now and kept there; fewer where the model ends too few.

    UserError where it ends none. on_question is told how many have come.
    """
    path = run.questions_path
    made = read_seeds(str(path))[0] if path.is_file() else []
    on_question(min(count, len(made)))
    kept = len(made)
    try:
        for one in ask(backbone, count - len(made), made, slots=slots, random_seed=random_seed):
            made.append(one)
            on_question(1)
            if len(made) >= kept + KEPT_EVERY:
                kept = _keep(run, made)
    finally:
        if len(made) > kept:
            _keep(run, made)
    if not made:
        raise UserError(
            f"@seed self: {backbone.id!r} ended none of {_draws(count)} questions it began",
            "give @seed a file of prompts, or sharegpt",
        )
    return made[:count]


def ask(
    backbone: Backbone, count: int, known: Several[Seed] = (), *, slots: int = 64, random_seed: int = 0
) -> Iterator[Seed]:
    """So many questions that the model asks, none of the `known` again, as they end; fewer if it ends too few.

    Each is a draw of its own, by the random seed and a number that its id tells: draws go on after those known.
    """
    header = user_turn(backbone, [])
    assert header is not None  # `check_opening` was asked
    seen = {plain(one.turns[0]) for one in known}
    first = 1 + max((int(said[1]) for one in known if (said := re.fullmatch(r"self-(\d+)", one.id))), default=-1)
    numbers = iter(range(first, first + _draws(count)))
    slots = max(1, min(slots, count))  # no more are begun than are wanted
    decoder, live = Decoder(backbone, slots=slots), dict[Sequence, tuple[str, list[int]]]()
    while count > 0:
        while len(live) < slots and (number := next(numbers, None)) is not None:
            sampling = Sampling.by_name(TEMPERATURE, f"{random_seed}:question:{number}")
            turn, step = decoder.admit(header, max_new_tokens=QUESTION_TOKENS, sampling=sampling, number=0)
            live[turn] = (f"self-{number}", list(step.tokens))
        for turn, step in decoder.step():
            live[turn][1].extend(step.tokens)
        if not live:
            return
        for turn in [one for one in live if one.done]:
            name, tokens = live.pop(turn)
            text = backbone.decode(tokens).strip() if tokens[-1] in backbone.eos_ids else ""
            if text and plain(text) not in seen and count:
                seen.add(plain(text))
                count -= 1
                yield Seed(name, (text,))


def _draws(count: int) -> int:
    return PATIENCE * count + 64


def _keep(run: Run, made: list[Seed]) -> int:
    """Write the file, in the form that any seed file has; how many it holds."""
    lines = [{"id": one.id, "messages": [{"role": "user", "content": one.turns[0]}]} for one in made]
    write_atomic(run.questions_path, "".join(json.dumps(one, ensure_ascii=False) + "\n" for one in lines))
    return len(made)
