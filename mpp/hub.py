"""Share a checkpoint on the Hugging Face Hub, fetch one, or convert one for another library.

python mpp/hub.py push runs/mpp_b16 ORG/NAME --license apache-2.0
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

if not __package__:  # run as a file: the repository's root takes the place of this folder
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from mpp import command_line
from mpp.console import Console

LAYOUTS = ("timm", "transformers", "onnx")


def main(argv: Sequence[str] | None = None) -> None:
    flags = _parser().parse_args(argv)
    command_line.exit_with(lambda: flags.action(flags, Console()))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="mpp/hub.py",
        description="Share a checkpoint on the Hugging Face Hub, fetch one, or convert one for another library. The "
        "access token is that of `hf auth login`, or of HF_TOKEN in the environment.",
        epilog="example:\n  python mpp/hub.py push runs/mpp_b16 ORG/NAME --license apache-2.0",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    actions = parser.add_subparsers(required=True, metavar="push | pull | convert")

    push = actions.add_parser("push", help="publish a run's newest checkpoint with a model card")
    push.add_argument("run", type=Path, metavar="RUN", help="a run folder, or a checkpoint folder within one")
    push.add_argument("repository", metavar="ORG/NAME", help="made where there is none")
    push.add_argument("--private", action="store_true", help="make a new repository private")
    push.add_argument("--revision", metavar="BRANCH", help="made where there is none; default main")
    push.add_argument("--license", metavar="ID", help="of the weights, such as apache-2.0; default runtime.license")
    push.set_defaults(action=_push)

    pull = actions.add_parser("pull", help="fetch a repository into a checkpoint folder")
    pull.add_argument("repository", metavar="ORG/NAME[@REVISION]")
    pull.add_argument("output", type=Path, nargs="?", metavar="DIR", help="a new folder; default hub/ORG/NAME")
    pull.add_argument("--revision", help="a branch, a tag or a commit; default main")
    pull.add_argument("--overwrite", action="store_true", help="replace what an earlier pull left there")
    pull.set_defaults(action=_pull)

    convert = actions.add_parser("convert", help="write an encoder in another library's layout")
    convert.add_argument("ref", metavar="REF", help="run, checkpoint, .safetensors, .npz, hf-hub:ORG/NAME, timm:NAME")
    convert.add_argument("output", type=Path, metavar="DIR", help="a new folder")
    convert.add_argument("--to", choices=LAYOUTS, default=LAYOUTS[0], help="default %(default)s")
    convert.add_argument("--model", metavar="NAME", help="as model.name, for weights that do not say what they are of")
    convert.add_argument("--image-size", type=int, metavar="PIXELS", help="side; default that of the weights")
    convert.set_defaults(action=_convert)
    return parser


def _push(flags: argparse.Namespace, console: Console) -> None:
    from mpp import publishing, sharing  # torch takes seconds to import; help and faults of a flag do not wait for it

    repository = sharing.parse(flags.repository, flags.revision)
    where = publishing.push(flags.run, repository, private=flags.private, license_name=flags.license, console=console)
    console.say(f"done: {where}")


def _pull(flags: argparse.Namespace, console: Console) -> None:
    from mpp import publishing, sharing

    repository = sharing.parse(flags.repository, flags.revision)
    output = flags.output or Path("hub") / repository.name
    publishing.pull(repository, output, flags.overwrite, console)
    console.say(f"done: {output}")


def _convert(flags: argparse.Namespace, console: Console) -> None:
    from mpp import conversion

    conversion.convert(
        flags.ref, flags.output, to=flags.to, model=flags.model, image_size=flags.image_size, console=console
    )


if __name__ == "__main__":
    main()
