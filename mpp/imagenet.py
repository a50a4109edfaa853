"""Labels of the test sets that a classifier of ImageNet is also measured on: ReaL, ImageNet-V2, ObjectNet.

The numbers of ImageNet's classes are places in `synsets`. A model may number its classes otherwise:

    numbers = map_classes(synsets(), classes)            # classes: of the model, in the order of its labels
    renumbered(real_labels(names), numbers)              # ReaL
    renumbered(objectnet_labels(mappings, test.classes)[test.labels], numbers)
    renumbered(test.labels, map_classes(test.classes, classes))  # ImageNet-V2

Each gives the labels of every image, of which any counts as right; images without one are left out.
"""

import json
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from importlib import resources
from pathlib import Path
from typing import Any

import numpy as np
from timm.data import ImageNetInfo

from mpp.errors import UserError

BORDER = 1  # pixels of red on each side of ObjectNet's images, to be cut off before anything else
OBJECTNET_FILES = (
    "folder_to_objectnet_label.json",
    "objectnet_to_imagenet_1k.json",
    "pytorch_to_imagenet_2012_id.json",
    "imagenet_to_label_2012_v2",
)
_VALIDATION_NAME = re.compile(r"ILSVRC2012_val_(\d{8})")
_SHOWN = 5  # names in a message


def synsets() -> list[str]:
    """The WordNet synsets of ImageNet's 1000 classes, in the order of their numbers, which is also the sorted one."""
    return list(ImageNetInfo("imagenet-1k").label_names())


def real_labels(names: Sequence[str]) -> np.ndarray:
    """ReaL labels of ImageNet's validation images; about 6 % of them have none.

    Args:
        names: file names that hold ILSVRC2012_val_ and the number of the image, in any folder.

    Returns:
        int32 [image, most], numbers of ImageNet's classes, each row rising and then -1.

    Raises:
        UserError: a name without the number of a validation image.

    Source: Beyer et al. 2020, "Are we done with ImageNet?" (arXiv 2006.07159), as timm carries them.
    """
    file = resources.files("timm.data") / "_info" / "imagenet_real_labels.json"
    all_labels: list[list[int]] = json.loads(file.read_text(encoding="utf-8"))
    return _padded([all_labels[_validation_number(name, len(all_labels)) - 1] for name in names])


def _validation_number(name: str, count: int) -> int:
    found = _VALIDATION_NAME.findall(name)
    if not found or not 1 <= int(found[-1]) <= count:
        raise UserError(
            f"{name}: ReaL labels belong to ImageNet's validation images by their numbers, so file names must hold "
            f"ILSVRC2012_val_00000001 to ILSVRC2012_val_{count:08d}; keep the names of the original archive"
        )
    return int(found[-1])


def map_classes(there: Sequence[str], here: Sequence[str]) -> np.ndarray:
    """A model's label for each class of a test set.

    Classes are the same where they have the same name. Where a test set has any other name, all names on both sides
    are read as classes of ImageNet: a synset (n01440764), a name of the hub's ILSVRC/imagenet-1k (tench, Tinca
    tinca), or a number (0 to 999, as in ImageNet-V2, whose folders don't sort in the order of their numbers).

    Args:
        there: class names of the test set, in the order of its labels.
        here: class names of the model, in the order of its labels.

    Returns:
        int32 [class of the test set].

    Raises:
        UserError: a class that the model does not have, or that it has twice.
    """
    place = {name: label for label, name in enumerate(here)}
    if set(there) <= set(place):
        return np.array([place[name] for name in there], dtype=np.int32)
    numbers = _class_numbers()
    mine = [numbers.get(_key(name)) for name in here]
    twice = {number for number, count in Counter(mine).items() if count > 1 and number is not None}
    if twice:
        names = [name for name, number in zip(here, mine, strict=True) if number in twice]
        raise UserError(f"the model has a class of ImageNet under two names: {_some(names)}; give each its synset")
    place_of = {number: label for label, number in enumerate(mine) if number is not None}
    labels = [place_of.get(numbers.get(_key(name), -1), -1) for name in there]
    unknown = [name for name, label in zip(there, labels, strict=True) if label < 0]
    if unknown:
        raise UserError(
            f"{len(unknown)} of the {len(there)} classes of the test set are not among the {len(here)} of the model: "
            f"{_some(unknown)}, where the model has {_some(here)}. Both must have the same names, or ImageNet's: "
            "synsets such as n01440764, the names in hub:ILSVRC/imagenet-1k, or the numbers 0 to 999"
        )
    return np.array(labels, dtype=np.int32)


def _class_numbers() -> dict[str, int]:
    """Number of each class by its synset, its name on the hub, and its number."""
    info = ImageNetInfo("imagenet-1k")
    numbers: dict[str, int] = {}
    for number, (synset, name) in enumerate(zip(info.label_names(), info.label_descriptions(), strict=True)):
        # Two classes are called crane. The hub, which has the same names otherwise, calls the second crane2.
        numbers |= {synset: number, str(number): number, f"{name}2" if name in numbers else name: number}
    return numbers


def _key(name: str) -> str:
    return str(int(name)) if name.isascii() and name.isdigit() else name


def objectnet_labels(mappings: Path, folders: Sequence[str]) -> np.ndarray:
    """ImageNet's classes of each of ObjectNet's; 200 of the 313 have none.

    Args:
        mappings: the folder `mappings` that comes with ObjectNet.
        folders: of its images, one a class.

    Returns:
        int32 [folder, most], numbers of ImageNet's classes, each row rising and then -1.

    Raises:
        UserError: a file is missing or damaged, or a folder is not one of ObjectNet's.

    Source: Barbu et al. 2019, "ObjectNet" (NeurIPS), whose files these are: a class has the texts of its ImageNet
        classes, separated by semicolons; a text is a line of a list of all, and PyTorch's numbers name lines from 0.
    """
    to_class, to_texts, to_line, lines = (_read_mapping(mappings, name) for name in OBJECTNET_FILES)
    number_of_line = {int(line): int(number) for number, line in to_line.items()}
    numbers_of_text: dict[str, list[int]] = {}
    for line, text in enumerate(lines):
        if line in number_of_line:
            numbers_of_text.setdefault(text.strip(), []).append(number_of_line[line])
    unknown = [folder for folder in folders if folder not in to_class]
    if unknown:
        raise UserError(
            f"{_some(unknown)}: no folders of ObjectNet's classes by {mappings / OBJECTNET_FILES[0]}; name the folder "
            "objectnet-1.0/images as the source"
        )
    labels = []
    for folder in folders:
        texts = [text.strip() for text in to_texts.get(to_class[folder], "").split(";") if text.strip()]
        for text in texts:
            if len(numbers_of_text.get(text, [])) != 1:
                raise UserError(
                    f"{mappings / OBJECTNET_FILES[1]}: {text!r} of {to_class[folder]!r} is not one of the lines of "
                    f"{OBJECTNET_FILES[3]} that {OBJECTNET_FILES[2]} names; unpack the mappings anew"
                )
        labels.append([numbers_of_text[text][0] for text in texts])
    return _padded(labels)


def _read_mapping(folder: Path, name: str) -> Any:
    """A dictionary, or a list of lines."""
    try:
        text = (folder / name).read_text(encoding="utf-8")
        return json.loads(text) if name.endswith(".json") else text.splitlines()
    except (OSError, ValueError) as error:
        raise UserError(
            f"{folder / name} can't be read ({getattr(error, 'strerror', None) or error}); ObjectNet's folder mappings "
            f"holds {', '.join(OBJECTNET_FILES)}"
        ) from None


def renumbered(labels: np.ndarray, numbers: np.ndarray) -> np.ndarray:
    """Labels of images under other numbers.

    Args:
        labels: int [image], or [image, most] padded with -1.
        numbers: int [number], the new one of each.

    Returns:
        int32 [image, most], in the same places, padded with -1.
    """
    sets = labels.reshape(len(labels), -1)
    return np.where(sets < 0, -1, numbers[sets]).astype(np.int32)


def _padded(rows: Sequence[Iterable[int]]) -> np.ndarray:
    """Sets of numbers as int32 [row, most], each rising and then -1; `most` is at least 1."""
    rising = [sorted(set(row)) for row in rows]
    table = np.full((len(rising), max([1, *map(len, rising)])), -1, dtype=np.int32)
    for row, found in enumerate(rising):
        table[row, : len(found)] = found
    return table


def _some(names: Sequence[str]) -> str:
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(map(repr, names[:_SHOWN])) + more
