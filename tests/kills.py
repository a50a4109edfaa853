"""Runs a recipe and kills it again and again, as real processes: python kills.py RECIPE FOLDER KILLS SEED.

A child is forked for every attempt, for torch has to be imported only once then. Every other kill waits until a
checkpoint is being written. Prints how many there were, and where.
"""

import json
import os
import random
import signal
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from mpp import config, run
from mpp.console import Console

_PATIENCE = 60.0


def start(recipe, folder):
    child = os.fork()
    if child:
        return child
    status = 1
    try:
        run.pretrain(recipe, folder, Console(quiet=True))
        status = 0
    finally:
        os._exit(status)


def writing(folder):
    """Names of checkpoints that are being written or removed."""
    try:
        return [name for name in os.listdir(folder / "checkpoints") if name.startswith(".")]
    except FileNotFoundError:
        return []


def main(recipe, folder, kills, seed):
    recipe, folder, draw = config.load_run(recipe)[0], Path(folder), random.Random(seed)
    done = {"random": 0, "saving": 0, "left_a_draft": 0}
    while done["random"] + done["saving"] < kills:
        kind = "saving" if done["saving"] < done["random"] else "random"
        child, began = start(recipe, folder), time.monotonic()
        before = writing(folder)
        if kind == "random":
            time.sleep(draw.uniform(0.0, 1.0))
        else:
            while writing(folder) in ([], before) and time.monotonic() < began + _PATIENCE:
                pass
            time.sleep(draw.uniform(0.0, 0.01))
        os.kill(child, signal.SIGKILL)
        _, status = os.waitpid(child, 0)
        assert os.WIFSIGNALED(status), f"the run was over, with status {status}, before the kill {done}"
        done[kind] += 1
        done["left_a_draft"] += bool(writing(folder))
    _, status = os.waitpid(start(recipe, folder), 0)
    print(json.dumps(done))
    return os.waitstatus_to_exitcode(status)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4])))
