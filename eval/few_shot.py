"""Few-shot accuracy of a frozen encoder: regularised least squares on a few labelled images of each class.

python eval/few_shot.py init=runs/mpp_b16
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

if not __package__:  # run as a file: the repository's root takes the place of this folder
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from mpp import command_line
from mpp.console import Console


def main(argv: Sequence[str] | None = None) -> None:
    def more(parser: argparse.ArgumentParser) -> None:
        parser.add_argument(
            "--allow-fewer", action="store_true", help="take what there is of classes with fewer images than shots"
        )

    flags = command_line.parse(
        argv,
        command="eval/few_shot.py",
        purpose="Ridge regression in closed form on frozen features (ViT paper, 4.1), for each of probe.shots and "
        "probe.seeds. With no --recipe: the fine-tuning recipe that the run in init names (or the newest below runs/), "
        "with the run's model and image size. Left in runs/few_shot/RUN where no --output is given.",
        example="python eval/few_shot.py init=runs/mpp_b16 probe.shots=[5,10] probe.form=plain",
        more=more,
    )
    command_line.exit_with(lambda: _few_shot(flags))


def _few_shot(flags: argparse.Namespace) -> None:
    from mpp import evaluation  # torch takes seconds to import; help does not wait for it

    console = Console()
    evaluation.run_few_shot(
        *evaluation.resolve(flags.recipe, flags.overrides, console),
        flags.output,
        console,
        overwrite=flags.overwrite,
        dry_run=flags.dry_run,
        allow_fewer=flags.allow_fewer,
    )


if __name__ == "__main__":
    main()
