"""RandAugment and random erasing, by timm's own code, as pure functions of a random word.

timm draws from the global states of `random`, NumPy and torch. Each call here runs under a seed of its
own, made from the word, and leaves those states as they were.
"""

import random
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from PIL import Image, ImageOps

from mpp.errors import UserError

FILL = (128, 128, 128)  # what a shifted picture leaves bare: the mean of our pixels, 0.5
EXAMPLE = "rand-m9-n2-mstd0.5-inc1"

# Parts of timm's string, and what may follow each. timm leaves out, or takes for something else, much that is not in
# this form.
_PARTS = {
    "m": r"[0-9]+",
    "n": r"[1-9][0-9]*",
    "p": r"1(\.0+)?|0\.[0-9]*[1-9][0-9]*",
    "mstd": r"[0-9]+(\.[0-9]+)?",
    "mmax": r"[1-9][0-9]*",
    "inc": r"[01]",
    "t": r"weights|3a|3aw",
}
_FORM = (
    "the form is rand-m9-n2-p0.5-mstd0.5-mmax10-inc1-tweights, of which every part after rand may be left out: "
    "m, n and mmax are whole numbers, p lies in (0, 1], inc is 0 or 1, and t is weights, 3a or 3aw; "
    f"such as {EXAMPLE}, or null for none"
)
_MAGNITUDE = 10  # of timm, where the string gives none; and its upper bound, where it gives no other


@lru_cache
def rand_augment_transform(text: str) -> Callable[[Image.Image], Image.Image]:
    """timm's RandAugment of a string, which draws from global random states.

    timm applies each operation with probability 0.5, unless the string says another (`p1.0`).

    Raises:
        UserError: timm would refuse the string, leave a part of it out, or cut its magnitude.

    Source: Cubuk et al. 2020 (arXiv 1909.13719); `rand_augment_transform` in timm/data/auto_augment.py.
    """
    given = f"data.rand_augment={text}"
    first, *parts = text.split("-")
    if first != "rand":
        raise UserError(f"{given} must begin with rand; {_FORM}")
    found: dict[str, str] = {}
    for part in parts:
        name = next((name for name, value in _PARTS.items() if re.fullmatch(f"{name}({value})", part)), None)
        if name is None:
            raise UserError(f"{given}: there is no part {part}; {_FORM}")
        if name in found:
            raise UserError(f"{given}: {name} stands twice; {_FORM}")
        found[name] = part.removeprefix(name)
    magnitude, highest = int(found.get("m", _MAGNITUDE)), int(found.get("mmax", _MAGNITUDE))
    if magnitude > highest:
        raise UserError(
            f"{given}: timm would cut the magnitude of {magnitude} to {highest}; add -mmax{magnitude}, such as "
            f"{'-'.join(['rand', *(part for part in parts if not part.startswith('mmax'))])}-mmax{magnitude}"
        )
    from timm.data import auto_augment  # not above: it takes seconds, and who only reads images needs no timm

    # timm draws between bilinear and bicubic where no filter is named. It writes into the dict, so that each needs one.
    chosen = {"img_mean": FILL, "interpolation": Image.Resampling.BILINEAR}
    transform = auto_augment.rand_augment_transform(text, chosen)
    if transform.choice_weights is not None and transform.num_layers > len(transform.ops):
        raise UserError(
            f"{given}: there are {len(transform.ops)} operations, none of which is drawn twice with t{found['t']}; "
            f"use at most -n{len(transform.ops)}"
        )
    for operation in transform.ops:
        if operation.aug_fn is auto_augment.posterize:
            operation.aug_fn = _posterize
    return transform


def _posterize(picture: Image.Image, bits: int, **_: Any) -> Image.Image:
    """timm's posterize, which keeps 8 bits or fewer of each channel; without any left, all is black.

    timm asks Pillow to keep none, or fewer, at its strongest. Pillow 13 refuses, and before gave black.
    """
    if bits < 1:
        return Image.new(picture.mode, picture.size)
    return picture if bits >= 8 else ImageOps.posterize(picture, bits)


def rand_augment(pixels: np.ndarray, text: str, word: np.uint64) -> np.ndarray:
    """Pixels after a RandAugment, which one random word decides.

    What is moved or turned is interpolated bilinearly, and what it leaves bare is mid-grey.

    Args:
        pixels: uint8 [height, width, 3].
        text: of timm, such as rand-m9-n2-mstd0.5-inc1.

    Returns:
        uint8 [height, width, 3], an array of its own.

    Raises:
        UserError: as `rand_augment_transform`.
    """
    transform = rand_augment_transform(text)
    with _seeded(word):
        return np.array(transform(Image.fromarray(pixels)))


def erase(pixels: np.ndarray, probability: float, word: np.uint64) -> np.ndarray:
    """Pixels of which, with some probability, a rectangle is noise; one random word decides it all.

    The rectangle covers 2 % to a third of the area. timm's noise is standard normal, for pixels that are
    normalised, in our case with mean and deviation 0.5. It becomes pixels as round(127.5 + 127.5 * noise), cut to
    what a pixel can hold, 0 .. 255: the third of it that lies beyond one deviation is black or full.

    Args:
        pixels: uint8 [height, width, 3].

    Returns:
        uint8 [height, width, 3], an array of its own.

    Source: Zhong et al. 2020 (arXiv 1708.04896); `RandomErasing` in timm/data/random_erasing.py.
    """
    from timm.data.random_erasing import RandomErasing  # not above, as in `rand_augment_transform`

    erasing = RandomErasing(probability, min_area=0.02, max_area=1 / 3, mode="pixel", max_count=1, device="cpu")
    canvas = torch.full((3, *pixels.shape[:2]), torch.nan)
    with _seeded(word):
        erasing(canvas)
    noise = canvas.numpy()
    erased = ~np.isnan(noise[0])
    result = pixels.copy()
    result[erased] = np.clip(np.rint(127.5 + 127.5 * noise[:, erased].T), 0, 255)
    return result


@contextmanager
def _seeded(word: np.uint64) -> Iterator[None]:
    """Has all global random states on the CPU follow from a word, and puts them back afterwards."""
    before = random.getstate(), np.random.get_state(), torch.get_rng_state()
    random.seed(int(word))
    np.random.seed(int(word >> np.uint64(32)))  # takes no more than 32 bits
    torch.default_generator.manual_seed(int(word))  # `torch.manual_seed` would seed GPUs, too
    try:
        yield
    finally:
        random.setstate(before[0])
        np.random.set_state(before[1])
        torch.set_rng_state(before[2])
