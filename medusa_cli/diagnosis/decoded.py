"""What decoding comes to: acceptance against what was foretold, sampling against greedy, steps against their worth."""

from medusa_cli import assets
from medusa_cli.benchmarks.intervals import bootstrap, rate
from medusa_cli.benchmarks.questions import spread
from medusa_cli.benchmarks.sets import read_questions
from medusa_cli.decoding import Decoder, Stats
from medusa_cli.decoding.costs import costs_for
from medusa_cli.decoding.generate import answer
from medusa_cli.decoding.sampling import sampling_of
from medusa_cli.diagnosis.case import Case, typed
from medusa_cli.diagnosis.findings import Finding, graded
from medusa_cli.errors import UserError
from medusa_cli.runs.accuracies import stamp_of
from medusa_cli.tree.budget import budgets
from medusa_cli.tree.search import expected_length

# Tokens of a prompt that is taken: long ones would take the examination's time.
PROMPT = 384
# Tokens a step that are not worth a word.
SLIGHT = 0.05
# The most by which what came is taken to exceed what was promised.
LUCKIEST = 2.0


def acceptance(case: Case) -> Finding:
    """Does decoding accept what calibration and tree promise?"""
    name = "acceptance"
    stats = decoded(case, 0.0)
    found = _rate(stats)
    low, high = bootstrap([[one.steps + one.accepted, one.steps] for one in stats], rate) or (found, found)
    shown = f"{found:.2f} ({low:.2f}-{high:.2f}) tokens a step on {len(stats)} prompts"
    figures = {"measured": found, "interval": [low, high], "nodes": case.tree.size, "prompts": len(stats)}
    if not case.run.calibration_path.is_file():
        return Finding(name, "unknown", f"{shown}; nothing foretells it", case.command("calibrate"), figures)
    expected = expected_length(case.tree, case.heads.accuracies)
    figures["expected"] = expected
    said = f"{shown}, where calibration and the tree of {case.tree.size} nodes promise {expected:.2f}"
    short = (expected - high) / max(expected - 1, 1e-9)  # of what drafts should add, beyond the interval
    verdict = graded(short, 0.1, 0.4) if expected - high > SLIGHT else "ok"
    own = case.distill(anew=True, seed="PROMPTS.json")  # prompts as they will be asked
    remedy = own if case.called is None else case.command("calibrate")
    return Finding(name, verdict, said, remedy, figures)


def temperature(case: Case) -> Finding:
    """How much less is accepted when answers are sampled at the temperature asked for?"""
    name, heat = "temperature", case.temperature
    if heat == 0:
        return Finding(name, "ok", "greedy decoding was asked for: nothing is lost by sampling")
    greedy, sampled = _rate(decoded(case, 0.0)), _rate(decoded(case, heat))
    lost = (greedy - sampled) / max(greedy - 1, 1e-9)
    said = f"{sampled:.2f} tokens a step at temperature {heat:g}, {greedy:.2f} greedily"
    verdict = graded(lost, 0.2, 0.5) if greedy - sampled > SLIGHT else "ok"
    figures = {"temperature": heat, "sampled": sampled, "greedy": greedy, "share_lost": lost}
    remedy = case.distill(anew=True, temperature=f"{heat:g}")
    return Finding(name, verdict, said, remedy, figures)


def tree_size(case: Case) -> Finding:
    """Is a step of the run's tree worth its time on this machine, or would fewer nodes, or more, be faster?"""
    name, tree = "tree size", case.tree
    costs = costs_for(case.backbone, case.drafter, stamp_of(case.run.drafter_dir))
    accuracies = case.heads.accuracies[: case.drafter.num_heads]
    promised = expected_length(tree, accuracies)
    # What came of what was promised holds for other sizes too.
    luck = min((_rate(decoded(case, 0.0)) - 1) / max(promised - 1, 1e-9), LUCKIEST)

    def worth(expected: float, seconds: float) -> float:
        return (1 + luck * (expected - 1)) / seconds

    plain, seconds = costs.step(1, 0), costs.step(tree.size, tree.max_depth)
    now = worth(promised, seconds)
    best = max(budgets(accuracies, costs), key=lambda one: worth(one.expected, one.seconds))
    gained = worth(best.expected, best.seconds)
    settled = 1 + luck * (promised - 1)
    said = (
        f"a step of {tree.size} nodes takes {seconds / plain:.2f} plain steps and settles {settled:.2f} tokens: "
        f"{now * plain:.2f} x plain; best are {best.tree.size} nodes at {gained * plain:.2f} x"
        if best.tree.size > 1
        else f"a step of {tree.size} nodes takes {seconds / plain:.2f} plain steps and settles {settled:.2f} "
        "tokens; no size of tree pays here"
    )
    figures = {"nodes": tree.size, "overhead": seconds / plain, "tokens_a_step": settled, "speedup": now * plain,
               "best_nodes": best.tree.size, "best_speedup": gained * plain}  # fmt: skip
    verdict = "bad" if now * plain < 0.98 else "warn" if gained > 1.05 * now else "ok"
    if not case.run.tree_path.is_file():  # then nothing decodes over this one: --tree auto takes the best
        verdict = "ok" if best.tree.size > 1 else "warn"
    remedy = typed("chat", tree="auto") if case.called is None else case.tree_command
    return Finding(name, verdict, said, remedy, figures)


def decoded(case: Case, heat: float) -> list[Stats]:
    """What decoding held-out prompts over the run's tree came to at a temperature, each prompt by itself; done once."""
    if heat not in case.answered:
        tree = case.tree
        decoder = Decoder(case.backbone, case.drafter, tree)
        rule = sampling_of(None, heat or None, 1.0, 0, 0)
        each = (answer(decoder, one, max_new_tokens=case.tokens, sampling=rule) for one in prompts(case))
        found = [Stats.of(steps) for steps in each]
        case.answered[heat] = [one for one in found if one.steps]
        if not case.answered[heat]:
            raise UserError("every answer ended with its first token", case.distill())
    return case.answered[heat]


def prompts(case: Case) -> list[list[int]]:
    """Held-out prompts as token ids, or MT-Bench's first questions for a drafter that came without its data."""
    said: list[list[dict[str, str]]] = []
    if case.run.data_path.is_file():
        for one in case.held_out or case.conversations:
            roles = [message["role"] for message in one.messages or []]
            if "assistant" in roles[1:]:
                said.append((one.messages or [])[: roles.index("assistant", 1)])
    else:
        questions = spread(read_questions(assets.mt_bench_path())[0], case.prompts)
        said = [[{"role": "user", "content": one.turns[0]}] for one in questions]
    most = min(PROMPT, case.backbone.max_positions - case.tokens - case.tree.max_depth - 1)
    fitting = (tokens for tokens in map(case.backbone.encode_chat, said) if len(tokens) <= most)
    found = [tokens for tokens, _ in zip(fitting, range(case.prompts), strict=False)]
    if not found:
        raise UserError("no prompt of the data is short enough to decode here", case.distill())
    return found


def _rate(stats: list[Stats]) -> float:
    return 1 + sum(one.accepted for one in stats) / sum(one.steps for one in stats)
