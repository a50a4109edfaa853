"""Linear classifier and nearest neighbours on the features of a frozen encoder.

python eval/linear_probe.py init=runs/mpp_b16
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
    flags = command_line.parse(
        argv,
        command="eval/linear_probe.py",
        purpose="Logistic regression, its strength chosen on held-out training images, and weighted k nearest "
        "neighbours, both on frozen features. With no --recipe: the fine-tuning recipe that the run in init names (or "
        "the newest below runs/), with the run's model and image size. Left in runs/linear_probe/RUN where no --output "
        "is given.",
        example="python eval/linear_probe.py init=runs/mpp_b16 probe.features=patches probe.block=8",
    )
    command_line.exit_with(lambda: _linear_probe(flags))


def _linear_probe(flags: argparse.Namespace) -> None:
    from mpp import evaluation  # torch takes seconds to import; help does not wait for it

    console = Console()
    evaluation.run_linear_probe(
        *evaluation.resolve(flags.recipe, flags.overrides, console),
        flags.output,
        console,
        overwrite=flags.overwrite,
        dry_run=flags.dry_run,
    )


if __name__ == "__main__":
    main()
