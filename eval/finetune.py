"""Fine-tune one initialisation: choose the learning rate on held-out training images, then read the test split once.

python eval/finetune.py --recipe finetune_b16 init=runs/mpp_b16
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

if not __package__:  # run as a file: the repository's root takes the place of this folder
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from mpp import command_line, config, tasks
from mpp.console import Console


def main(argv: Sequence[str] | None = None) -> None:
    def more(parser: argparse.ArgumentParser) -> None:
        parser.add_argument(
            "--task", metavar="NAME", help=f"splits and preprocessing of a published data set: {', '.join(tasks.TASKS)}"
        )

    flags = command_line.parse(
        argv,
        command="eval/finetune.py",
        purpose="Fine-tune an encoder and measure it on the test split. With no flags: the newest finished "
        "pre-training below runs/, with the recipe that it names.",
        example="python eval/finetune.py --recipe finetune_b16 init=runs/mpp_b16",
        more=more,
    )
    command_line.exit_with(lambda: _finetune(flags))


def _finetune(flags: argparse.Namespace) -> None:
    console = Console()
    overrides = list(flags.overrides)
    name = flags.recipe
    if name is None:
        from mpp import run_folder

        pretrained, name, model = run_folder.newest_pretraining(Path("runs"), overrides)
        if pretrained is not None:
            overrides.append(f"init={pretrained}")
            console.say(f"fine-tunes {pretrained} with the recipe {name}")
        if model:
            console.say(f"with the model of the run: {' '.join(model)}")
            overrides += model
    if flags.task:
        given = [value.partition("=")[2] for value in overrides if value.startswith("data.source=")]
        size = config.load_run(name, overrides)[0].data.image_size
        own = tasks.overrides(flags.task, given[-1] if given else None, size)
        console.say(f"task {flags.task}: {' '.join(own)}")
        overrides = [*own, *overrides]
    recipe, defaults = config.load_run(name, overrides)

    from mpp import run, wiring  # torch takes seconds to import; help and faults of a recipe do not wait for it

    if defaults:
        console.say(f"not in the recipe, so by default: {', '.join(defaults)}")
    if flags.dry_run:
        console.say(wiring.dry_run(recipe))
        return
    output = flags.output or command_line.default_output(name)
    run.finetune(recipe, output, console, overwrite=flags.overwrite)
    console.say(f"done: {output}")


if __name__ == "__main__":
    main()
