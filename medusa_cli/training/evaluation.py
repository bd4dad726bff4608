"""What a finished training came to, measured on conversations of one's choice."""

from dataclasses import replace
from pathlib import Path

from medusa_cli.backbone.network import NetworkOptions
from medusa_cli.engines import load_backbone
from medusa_cli.errors import UserError
from medusa_cli.runs.reading import read_json
from medusa_cli.runs.recipe import load_recipe
from medusa_cli.runs.run import Run, rounding_in
from medusa_cli.training.build import build_drafter, drafter_class
from medusa_cli.training.events import Validated
from medusa_cli.training.loop import Trainer
from medusa_cli.training.setup import joint_backbone, trained_heads, whole_conversations

# All runs are measured alike, however their own trainings cut and gathered conversations.
MAX_LENGTH, BATCH_TOKENS = 1024, 2048


def evaluate(run: Run, data: Path, place: NetworkOptions, max_samples: int | None = None) -> Validated:
    """A run's heads, and its adapter where it has one, on the first conversations of a file.

    A run of stage 1 is one whose adapter does nothing: its KL is measured like that of the others, but for heads whose
    rows ride in a frozen model, which have none. UserError where the heads cannot be read, and for a model trained in
    full, which keeps no original to be held against.
    """
    recipe = load_recipe(run.recipe_path)
    train = recipe.train
    joint = train.stage == 2
    if joint and train.tuning == "full":
        raise UserError(f"{run.path} was trained in full, and keeps no original to compare with", "leave it out")
    tuning = train.tuning if joint else "lora"
    train = replace(train, max_length=MAX_LENGTH, batch_tokens=BATCH_TOKENS, accumulation=1, shard=False)
    dtype = train.dtype if place["dtype"] == "auto" else place["dtype"]
    riding = drafter_class(recipe.drafter.name).whole_sequences
    train = replace(train, stage=1 if riding else 2, tuning=tuning, objective="kl", dtype=dtype)
    recipe = replace(recipe, train=train)
    if "context" in drafter_class(recipe.drafter.name).settings:
        # Recipes of earlier versions do not say what a drafter's layers see.
        seen = read_json(run.drafter_dir / "config.json", "the drafter's config").get("context", "answer")
        recipe = replace(recipe, drafter=replace(recipe.drafter, context=seen))
    rounding = rounding_in(run.drafter_dir)
    place = {**place, "dtype": dtype, "load_in_4bit": rounding == "4bit", "load_in_8bit": rounding == "8bit"}
    if riding:
        template = recipe.chat_template
        backbone = load_backbone(recipe.model, **place, engine="eager", gradients=True, chat_template=template)
    else:
        backbone = joint_backbone(recipe, place)
    found = whole_conversations(run, backbone, recipe, data, 0.0)
    kept = found.train[:max_samples]
    # Nothing is trained, but a trainer asks for something to train on.
    dataset = replace(found, train=kept, held_out=kept)
    drafter = build_drafter(backbone, recipe.drafter, dataset)
    if not trained_heads(run, backbone, drafter, adapted=joint):
        raise UserError(f"{run.drafter_dir} holds no heads as {run.recipe_path} describes them", "train them again")
    trainer = Trainer(backbone, drafter, dataset, recipe, run)
    trainer.validation = trainer.task.held_out()
    return trainer.validate(0)
