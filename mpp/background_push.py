"""Sends a run's checkpoints to the Hugging Face Hub beside the run, in a process of its own."""

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

_DOOR = Path(__file__).with_name("hub.py")
LOG = "push.log"
# What would make the child a member of the run's group of processes, or take room on its device.
_NOT_FOR_THE_CHILD = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
_POLITENESS = 10  # of its process, to leave the cores to the run


class BackgroundPush:
    """The newest checkpoint of a run goes to the Hub whenever there is a new one; the run never waits before its end.

    A push sends the newest checkpoint that there is when it starts, so at most one is under way. It retries by
    itself; whatever becomes of it, the run goes on.

    Args:
        run: its folder.
        arguments: of `mpp/hub.py push` after the run's folder: ORG/NAME and flags.
        say: takes what the user should know.
    """

    def __init__(self, run: Path, arguments: list[str], say: Callable[[str], None]) -> None:
        self.run, self.arguments, self.say = run, arguments, say
        self.child: subprocess.Popen[bytes] | None = None
        self.waiting = False  # for there is a checkpoint that is newer than the one under way

    @property
    def command(self) -> str:
        """What sends it by hand."""
        return f"python mpp/hub.py push {self.run} {' '.join(self.arguments)}"

    def offer(self) -> None:
        """Says that there is a new checkpoint."""
        if self.child is not None and self.child.poll() is None:
            self.waiting = True
            return
        if self.child is not None and self.child.returncode:
            self.say(f"the last checkpoint did not reach the Hub ({self._fault()}); a newer one is sent now")
        self._start()

    def finish(self) -> None:
        """Sends the last checkpoint, waits for it, and says what became of it."""
        try:
            if self.child is not None and self.child.poll() is None:
                self.child.wait()
            self._start()
            self.say(f"sending the finished run to {self.arguments[0]} (Ctrl-C leaves that out)")
            assert self.child is not None
            sent = self.child.wait() == 0
        except KeyboardInterrupt:
            self.stop()
            return
        if sent:
            self.say((self.run / LOG).read_text(errors="replace").strip().splitlines()[-1])
        else:
            self.say(f"not sent to the Hub: {self._fault()}. The run is whole in {self.run}; `{self.command}` sends it")

    def stop(self) -> None:
        """Ends what is under way, where the run ends early."""
        unsent = self.waiting or (self.child is not None and self.child.poll() != 0)
        if self.child is not None and self.child.poll() is None:
            self.child.terminate()
            self.child.wait()
        if unsent:
            self.say(f"the newest checkpoint is not on the Hub; the run sends it when it goes on, or `{self.command}`")

    def _start(self) -> None:
        self.waiting = False
        environment = {key: value for key, value in os.environ.items() if key not in _NOT_FOR_THE_CHILD}
        with (self.run / LOG).open("wb") as log:
            self.child = subprocess.Popen(
                [sys.executable, str(_DOOR), "push", str(self.run), *self.arguments],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env={**environment, "CUDA_VISIBLE_DEVICES": ""},
                start_new_session=True,  # Ctrl-C is for the run
            )
        try:
            os.setpriority(os.PRIO_PROCESS, self.child.pid, _POLITENESS)
        except OSError:  # it has ended already
            pass

    def _fault(self) -> str:
        lines = (self.run / LOG).read_text(errors="replace").strip().splitlines()
        told = [line.removeprefix("error: ") for line in lines if line.startswith("error: ")]
        return told[-1] if told else f"see {self.run / LOG}"
