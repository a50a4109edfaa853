"""Runs a recipe and kills it again and again, as real processes.

python kills.py kills RECIPE FOLDER COUNT SEED   one process; every other kill waits until a checkpoint is being written
python kills.py pairs RECIPE FOLDER              two processes, killed once and stopped once, continued by two and by one

Children are forked, for torch has to be imported only once then.
"""

import json
import os
import random
import shutil
import signal
import socket
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from mpp import config, run
from mpp.console import Console
from mpp.errors import Stopped

_PATIENCE = 60.0


def start(recipe, folder, processes=1):
    """Process numbers of a run's children."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    children = []
    for rank in range(processes):
        child = os.fork()
        if child:
            children.append(child)
            continue
        if processes > 1:
            os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(processes)}
            os.environ |= {"LOCAL_WORLD_SIZE": str(processes), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        status = 1
        try:
            summary = run.pretrain(recipe, folder, Console(quiet=True))
            assert summary["processes"] == processes
            status = 0
        except Stopped:
            status = 130
        finally:
            os._exit(status)
    return children


def end(children, number=None):
    """Sends a signal, if any, and waits; the exit statuses, negative where a signal ended a process."""
    for child in children:
        if number is not None:
            os.kill(child, number)
    return [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]


def writing(folder):
    """Names of checkpoints that are being written or removed."""
    try:
        return [name for name in os.listdir(folder / "checkpoints") if name.startswith(".")]
    except FileNotFoundError:
        return []


def logged(folder):
    file = folder / "metrics.jsonl"
    return file.read_text().count("\n") if file.is_file() else 0


def kills(recipe, folder, count, seed):
    draw = random.Random(seed)
    done = {"random": 0, "saving": 0, "left_a_draft": 0}
    while done["random"] + done["saving"] < count:
        kind = "saving" if done["saving"] < done["random"] else "random"
        before, began = writing(folder), time.monotonic()
        children = start(recipe, folder)
        if kind == "random":  # but not so late that a fast machine is through before the last kill
            until, lines = began + draw.uniform(0.0, 1.0), logged(folder)
            while time.monotonic() < until and logged(folder) < lines + 3:
                time.sleep(0.001)
        else:
            while writing(folder) in ([], before) and time.monotonic() < began + _PATIENCE:
                pass
            time.sleep(draw.uniform(0.0, 0.01))
        assert end(children, signal.SIGKILL) == [-signal.SIGKILL], f"the run was over before the kill: {done}"
        done[kind] += 1
        done["left_a_draft"] += bool(writing(folder))
    assert end(start(recipe, folder)) == [0]
    return done


def wait_for_lines(file, count):
    until = time.monotonic() + _PATIENCE
    while not file.is_file() or file.read_text().count("\n") < count:
        assert time.monotonic() < until
        time.sleep(0.005)


def pairs(recipe, folder):
    assert end(start(recipe, folder / "straight", 2)) == [0, 0]
    children = start(recipe, folder / "two", 2)
    wait_for_lines(folder / "two" / "metrics.jsonl", 6)
    assert end(children, signal.SIGKILL) == [-signal.SIGKILL] * 2
    children = start(recipe, folder / "two", 2)
    wait_for_lines(folder / "two" / "metrics.jsonl", 20)
    statuses = end(children, signal.SIGTERM)
    shutil.copytree(folder / "two", folder / "one")
    assert end(start(recipe, folder / "two", 2)) == [0, 0]
    assert end(start(recipe, folder / "one", 1)) == [0]
    return {"stopped": statuses}


if __name__ == "__main__":
    kind, chosen, where, *more = sys.argv[1:]
    act = {"kills": kills, "pairs": pairs}[kind]
    print(json.dumps(act(config.load_run(chosen)[0], Path(where), *map(int, more))))
