"""Pre-train a Vision Transformer by masked patch prediction, or on labels.

accelerate launch mpp/pretrain.py --recipe mpp_b16 data.source=folder:/data/imagenet
"""

import sys
from collections.abc import Sequence
from pathlib import Path

if not __package__:  # run as a file: the repository's root takes the place of this folder
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from mpp import command_line, config
from mpp.console import Console
from mpp.errors import UserError


def main(argv: Sequence[str] | None = None) -> None:
    flags = command_line.parse(
        argv,
        command="mpp/pretrain.py",
        purpose="Pre-train a Vision Transformer by masked patch prediction, or supervised (objective.name).",
        example="accelerate launch mpp/pretrain.py --recipe mpp_b16 data.source=folder:/data/imagenet",
    )
    command_line.exit_with(lambda: _pretrain(flags))


def _pretrain(flags: command_line.argparse.Namespace) -> None:
    if flags.recipe is None:
        raise UserError(f"--recipe is missing; there are {', '.join(config.recipe_names())}, or a path to a .yaml file")
    recipe, defaults = config.load_run(flags.recipe, flags.overrides)

    from mpp import run, wiring  # torch takes seconds to import; help and faults of a recipe do not wait for it

    console = Console()
    if defaults:
        console.say(f"not in the recipe, so by default: {', '.join(defaults)}")
    if flags.dry_run:
        console.say(wiring.dry_run(recipe))
        return
    output = flags.output or command_line.default_output(flags.recipe)
    run.pretrain(recipe, output, console, overwrite=flags.overwrite)
    console.say(f"done: {output}")


if __name__ == "__main__":
    main()
