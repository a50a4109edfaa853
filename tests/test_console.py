"""mpp/console.py in a file and in a terminal."""

import contextlib
import os
import pty
import subprocess
import sys
import termios

from mpp import console
from mpp.console import Console


def test_a_series_tells_share_and_time_left_in_a_file(capsys, monkeypatch):
    seconds = iter(range(0, 10_000, 60))
    monkeypatch.setattr(console.time, "monotonic", lambda: float(next(seconds)))
    screen = Console(total_images=100)
    for step in screen.track(range(4), "training", 10):
        assert step in range(4)
    out = capsys.readouterr().out
    assert "-- 10% of all images, about" in out and "-- 40% of all images, about" in out


def test_a_single_run_tells_no_share_also_when_it_continues(capsys, monkeypatch):
    seconds = iter(range(0, 10_000, 60))
    monkeypatch.setattr(console.time, "monotonic", lambda: float(next(seconds)))
    screen = Console()
    screen.skip(1000)
    assert list(screen.track(range(3), "training", 10)) == [0, 1, 2]
    assert capsys.readouterr().out == ""


def test_what_was_done_before_is_no_part_of_what_is_left(capsys, monkeypatch):
    seconds = iter(range(0, 10_000, 60))
    monkeypatch.setattr(console.time, "monotonic", lambda: float(next(seconds)))
    screen = Console(total_images=100)
    screen.skip(60)
    list(screen.track(range(1), "training", 10))
    assert "-- 25% of all images" in capsys.readouterr().out


def test_only_the_first_process_speaks_and_a_quiet_one_never(capsys, monkeypatch):
    Console(quiet=True).say("no")
    monkeypatch.setenv("RANK", "1")
    Console().say("nor this")
    monkeypatch.setenv("RANK", "0")
    speaker = Console()
    speaker.say("this")
    speaker.say_once("once")
    speaker.say_once("once")
    assert capsys.readouterr().out == "this\nonce\n"


def test_a_terminal_shows_bars():
    program = (
        "import time; from mpp.console import Console; screen = Console(total_images=30)\n"
        "for step in screen.track(range(3), 'training', 10): time.sleep(0.15)\n"
        "screen.close()"
    )
    parent, child = pty.openpty()
    termios.tcsetwinsize(child, (24, 100))
    done = subprocess.run([sys.executable, "-c", program], stderr=child, stdout=subprocess.PIPE, timeout=60)
    os.close(child)
    seen = ""
    with contextlib.suppress(OSError):  # the end of a terminal whose other side is closed
        while part := os.read(parent, 65536):
            seen += part.decode()
    os.close(parent)
    assert done.returncode == 0
    assert "all runs:  33%" in seen and "training:  33%" in seen and "step/s" in seen
