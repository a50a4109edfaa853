"""What all entry points share: flags, help, and one message with status 2 for what a user can mend."""

import argparse
import errno
import io
import os
import signal
import sys
import textwrap
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NoReturn

from mpp.config import recipe_names
from mpp.credentials import hide
from mpp.errors import ImageError, Stopped, UserError

_NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def parse(
    argv: Sequence[str] | None,
    *,
    command: str,
    purpose: str,
    example: str,
    recipe: str | None = None,
    more: Callable[[argparse.ArgumentParser], None] = lambda parser: None,
) -> argparse.Namespace:
    """Flags of interface: recipe, overrides, output, overwrite, dry_run.

    Args:
        recipe: taken where none is named; None where the entry point finds one itself.
        more: adds the entry point's own flags.
    """
    parser = argparse.ArgumentParser(
        prog=command,
        description=purpose,
        epilog=textwrap.fill(f"recipes: {', '.join(recipe_names())}", 110) + f"\n\nexample:\n  {example}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--recipe", default=recipe, metavar="NAME", help="a recipe's name, or a path to a YAML file")
    parser.add_argument("--output", type=Path, metavar="DIR", help="the run's folder; default runs/RECIPE")
    parser.add_argument("--overwrite", action="store_true", help="start again where the folder already holds a run")
    parser.add_argument("--dry-run", action="store_true", help="print the resolved recipe and its cost; train nothing")
    more(parser)
    parser.add_argument(
        "overrides", nargs="*", metavar="key=value", help="a recipe's key, such as optim.learning_rate=3e-4"
    )
    return parser.parse_intermixed_args(argv)


def default_output(recipe: str) -> Path:
    """runs/RECIPE, under the working directory."""
    path = Path(recipe)
    name = path.parent.name if path.name == "config.yaml" else path.stem if path.suffix else recipe
    return Path("runs") / name


def exit_with(action: Callable[[], None]) -> NoReturn:
    """Runs an entry point and leaves with its status: 0 done, 2 for the user to mend, 130 stopped."""
    for stream in (sys.stdout, sys.stderr):  # file names need not be text
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
    for number in (signal.SIGTERM, signal.SIGUSR1):  # the loop has its own way with them
        signal.signal(number, _stop)
    status = 0
    try:
        action()
        _leave_processes()
    except ImageError as error:
        status = 2
        print(hide(f"error: {error}"), file=sys.stderr)
    except UserError as error:
        status = 2
        _tell(f"error: {error}")
    except OSError as error:
        if error.errno not in _NO_ROOM:
            raise
        status = 2
        print(
            hide(f"error: {error}; what was saved before stays. Make room, then the same command continues"),
            file=sys.stderr,
        )
    except Stopped as stopped:
        status = 130
        _tell(str(stopped))
    except KeyboardInterrupt:
        status = 130
        _tell("interrupted")
    if status:
        sys.stdout.flush()
    sys.exit(status)


def _stop(number: int, _: Any) -> None:
    raise Stopped(f"stopped by {signal.Signals(number).name}; the same command continues")


def _leave_processes() -> None:
    torch = sys.modules.get("torch")  # a fault in a flag is told without waiting for its import
    if torch is not None and torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


def _tell(text: str) -> None:
    if int(os.environ.get("LOCAL_RANK", "0")) == 0:  # once on every machine
        print(hide(text), file=sys.stderr)
