"""What a run tells the person in front of it: progress bars in a terminal, plain lines in a file."""

import os
import sys
import time
from collections.abc import Iterable, Iterator

from tqdm import tqdm

from mpp.credentials import hide

_LINE_EVERY_SECONDS = 30.0


class Console:
    """Speaks for the first process only.

    Args:
        total_images: images that a series of runs will train on in all; 0 where there is just one run.
            The bar then shows the whole series and its time left.
        quiet: say and show nothing.
    """

    def __init__(self, total_images: int = 0, quiet: bool = False) -> None:
        self.speaks = int(os.environ.get("RANK", "0")) == 0 and not quiet
        self.terminal = sys.stderr.isatty()
        self.total, self.done = total_images, 0
        self.said: set[str] = set()
        self.began = self.last_line = time.monotonic()
        self.whole = (
            tqdm(total=total_images, desc="all runs", unit="img", unit_scale=True, position=0, smoothing=0.02)
            if total_images and self.speaks and self.terminal
            else None
        )

    def say(self, text: str) -> None:
        if self.speaks:
            tqdm.write(hide(text), file=sys.stdout)
            sys.stdout.flush()

    def say_once(self, text: str) -> None:
        """What is the same for many runs of a series."""
        if text not in self.said:
            self.said.add(text)
            self.say(text)

    def track(self, steps: Iterable[int], title: str, images_a_step: int) -> Iterator[int]:
        """The steps, behind a progress bar where there is a terminal."""
        bar = tqdm(
            steps,
            desc=title,
            unit="step",
            position=1 if self.whole is not None else 0,
            leave=False,
            disable=not (self.speaks and self.terminal),
        )
        for step in bar:
            yield step
            self._advance(images_a_step)

    def skip(self, images: int) -> None:
        """Takes out of a series what an earlier call had already done."""
        self.total = max(self.total - images, 0)
        if self.whole is not None:
            self.whole.total = self.total
            self.whole.refresh()

    def close(self) -> None:
        if self.whole is not None:
            self.whole.close()

    def _advance(self, images: int) -> None:
        self.done += images
        if self.whole is not None:
            self.whole.update(images)
        elif self.total and time.monotonic() - self.last_line > _LINE_EVERY_SECONDS:
            self.last_line = time.monotonic()
            left = (self.last_line - self.began) / self.done * max(self.total - self.done, 0)
            self.say(f"-- {self.done / self.total:.0%} of all images, about {left / 60:.0f} min left")
