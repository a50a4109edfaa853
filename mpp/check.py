"""What is in a source: reads every image once, and reports what a training run would meet."""

import argparse
import io
import json
import warnings
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image
from torch.utils.data import Dataset
from tqdm import tqdm

from mpp import command_line, contents, decoding, shards, sources
from mpp.data import cores
from mpp.errors import ImageError, UserError
from mpp.files import write_text
from mpp.shards import Columns
from mpp.sources import Source

_SHOWN = 10


@dataclass(frozen=True)
class Report:
    """What was found in one split.

    Attributes:
        widths, heights: int32 [rows], in pixels; 0 where an image is broken.
        sizes: int64 [rows], bytes as they are stored.
        digests: uint64 [rows], of these bytes.
        formats, modes: how often each occurs.
        turned: images with an EXIF orientation.
        broken: rows that can't be read, each with what is wrong.
        classes: how many images each has; None where the source has no labels.
        no_classes: why there are none.
        label_counts: int64 [rows], of each image where it can have several; None where it can't.
    """

    source: Source
    split: str
    widths: np.ndarray
    heights: np.ndarray
    sizes: np.ndarray
    digests: np.ndarray
    formats: Counter[str]
    modes: Counter[str]
    turned: int
    broken: dict[int, str]
    classes: dict[str, int] | None
    no_classes: str
    label_counts: np.ndarray | None

    def duplicates(self) -> list[list[int]]:
        """Groups of rows that hold the same bytes, each rising."""
        order = np.argsort(self.digests, kind="stable")
        groups = np.split(order, np.flatnonzero(np.diff(self.digests[order])) + 1) if len(order) else []
        return sorted(group.tolist() for group in groups if len(group) > 1)


def check_split(source: Source, split: str, workers: int) -> Report:
    """Reads every row of a source once, behind a progress bar."""
    count = len(source)
    widths, heights = np.zeros(count, dtype=np.int32), np.zeros(count, dtype=np.int32)
    sizes, digests = np.zeros(count, dtype=np.int64), np.zeros(count, dtype=np.uint64)
    formats: Counter[str] = Counter()
    modes: Counter[str] = Counter()
    broken: dict[int, str] = {}
    turned = 0
    classes, trouble, label_counts = _classes(source)
    with (
        closing(contents.in_batches(_Facts(source), range(count), workers)) as facts,
        tqdm(total=count, desc=f"reading {split}", unit="img", unit_scale=True, disable=None) as bar,
    ):
        for batch in facts:
            for fact in batch:
                row = fact["row"]
                widths[row], heights[row] = fact["width"], fact["height"]
                sizes[row], digests[row] = fact["bytes"], fact["digest"]
                formats[fact["format"]] += 1
                modes[fact["mode"]] += 1
                turned += fact["turned"]
                if fact["error"]:
                    broken[row] = fact["error"]
            bar.update(len(batch))
    return Report(
        source, split, widths, heights, sizes, digests, formats, modes, turned, broken, classes, trouble, label_counts
    )


def _classes(source: Source) -> tuple[dict[str, int] | None, str, np.ndarray | None]:
    """How many images each class has, or why that can't be said; and how many labels an image that can have several."""
    try:
        classes, labels = source.classes, source.labels
    except UserError as error:
        return None, f"none that can be used: {error}", None
    if classes is None or labels is None:
        return None, "none", None
    counts = np.bincount(labels[labels >= 0], minlength=len(classes))
    several = (labels >= 0).sum(1) if labels.ndim == 2 else None
    return dict(zip(classes, counts.tolist(), strict=True)), "", several


@dataclass(frozen=True)
class _Facts(Dataset):
    source: Source

    def __getitem__(self, row: int) -> dict[str, Any] | UserError:
        fact = {"row": row, "width": 0, "height": 0, "bytes": 0, "digest": row, "format": "broken", "mode": "broken"}
        fact |= {"turned": False, "error": ""}
        try:
            encoded = self._encoded(row)
            fact |= {"bytes": len(encoded), "digest": contents.hash_of(encoded)}
            seen = decoding.decode_whole(encoded, self.source.name(row))
            fact |= {"width": seen.width, "height": seen.height, **_described(encoded)}
            if isinstance(self.source, sources.Pictures):
                fact["format"] = "pixels"
        except ImageError as error:
            fact["error"] = str(error)
        except UserError as error:
            return error
        return fact

    def _encoded(self, row: int) -> bytes:
        if isinstance(self.source, sources.Pictures):
            file = io.BytesIO()
            Image.fromarray(self.source.pixels[row]).save(file, format="BMP")
            return file.getvalue()
        return self.source.encoded(row)  # type: ignore[attr-defined]


def _described(encoded: bytes) -> dict[str, Any]:
    """Format and mode of an image whose pixels can be read, and whether EXIF turns it."""
    found: dict[str, Any] = {"format": "unknown", "mode": "unknown", "turned": False}
    try:
        with warnings.catch_warnings(), Image.open(io.BytesIO(encoded)) as image:
            warnings.simplefilter("ignore")
            mode = f"{image.mode} with transparency" if image.has_transparency_data else image.mode
            found |= {"format": image.format or "unknown", "mode": mode}
            found["turned"] = image.getexif().get(decoding.ORIENTATION, 1) != 1
            if getattr(image, "n_frames", 1) > 1:
                found["mode"] += ", several frames"
    except Exception:  # of malformed metadata, which a training run does not need either
        pass
    return found


def _text(report: Report) -> Iterator[str]:
    """The report as lines for a person."""
    source, whole = report.source, report.widths > 0
    yield f"{report.split}: {len(source):,} images, {int(whole.sum()):,} of them usable"
    if report.classes:
        largest, smallest = (pick(report.classes, key=lambda name: report.classes[name]) for pick in (max, min))  # type: ignore[index]
        yield (
            f"  classes    {len(report.classes):,}; the largest is {largest} with {report.classes[largest]:,}, the "
            f"smallest {smallest} with {report.classes[smallest]:,}"
        )
    else:
        yield f"  classes    {report.no_classes}"
    if report.label_counts is not None:
        labelled = report.label_counts[report.label_counts > 0]
        yield (
            f"  labels     {labelled.mean():.3g} an image in the mean, {labelled.max()} at most; "
            f"{len(source) - len(labelled):,} images have none"
        )
    if whole.any():
        widths, heights, sizes = report.widths[whole], report.heights[whole], report.sizes[whole]
        yield (
            f"  pixels     {int(np.median(widths))} x {int(np.median(heights))} in the middle; width {widths.min()} "
            f"to {widths.max()}, height {heights.min()} to {heights.max()}"
        )
        yield f"  bytes      {_bytes(float(np.median(sizes)))} in the middle, {_bytes(float(sizes.sum()))} in all"
    yield f"  formats    {_counts(report.formats)}"
    yield f"  modes      {_counts(report.modes)}"
    if report.turned:
        yield f"  turned     {report.turned:,} by their EXIF orientation, which is applied"
    duplicates = report.duplicates()
    yield f"  duplicates {sum(len(group) - 1 for group in duplicates):,}"
    for group in duplicates[:_SHOWN]:
        yield f"    {' = '.join(source.name(row) for row in group[:3])}{' = ...' if len(group) > 3 else ''}"
    yield f"  broken     {len(report.broken):,}"
    for row in sorted(report.broken)[:_SHOWN]:
        yield f"    {report.broken[row]}"
    if len(report.broken) > _SHOWN or len(duplicates) > _SHOWN:
        yield "    ... all of them with --output FILE"


def _shared(first: Report, second: Report) -> list[tuple[int, int]]:
    """Rows of two splits that hold the same bytes."""
    _, here, there = np.intersect1d(first.digests, second.digests, return_indices=True)
    return [(int(a), int(b)) for a, b in zip(here, there, strict=True) if first.widths[a]]


def _counts(counter: Counter[str]) -> str:
    return ", ".join(f"{name} {count:,}" for name, count in counter.most_common())


def _bytes(count: float) -> str:
    for unit in ("B", "kB", "MB", "GB"):
        if count < 1000:
            return f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:.3g} TB"


def _plain(report: Report) -> dict[str, Any]:
    name = report.source.name
    return {
        "split": report.split,
        "images": len(report.source),
        "usable": int((report.widths > 0).sum()),
        "bytes": int(report.sizes.sum()),
        "classes": report.classes,
        "unlabelled": None if report.label_counts is None else int((report.label_counts == 0).sum()),
        "formats": dict(report.formats),
        "modes": dict(report.modes),
        "turned": report.turned,
        "duplicates": [[name(row) for row in group] for group in report.duplicates()],
        "broken": [{"row": row, "name": name(row), "error": error} for row, error in sorted(report.broken.items())],
    }


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="mpp/data.py",
        description="Read a source once and report counts, sizes, classes, odd modes, duplicates and broken files. "
        "Exit status 2 where an image can't be read.",
        epilog=f"sources: {', '.join(sources.SOURCE_FORMS)}\n\n"
        "example:\n  python mpp/data.py check folder:/data/imagenet",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("action", choices=["check"], help="what to do")
    parser.add_argument("source", metavar="SOURCE", help="as data.source in a recipe")
    parser.add_argument("--split", action="append", metavar="NAME", help="a split to read; default: all there are")
    parser.add_argument("--image-column", metavar="NAME", help="as data.image_column in a recipe")
    parser.add_argument("--label-column", metavar="NAME", help="as data.label_column in a recipe")
    parser.add_argument("--workers", type=int, default=cores(), metavar="N", help="loader processes")
    parser.add_argument("--output", type=Path, metavar="FILE", help="a JSON file for the whole report")
    flags = parser.parse_args(argv)
    command_line.exit_with(lambda: _check(flags))


def _check(flags: argparse.Namespace) -> None:
    columns = Columns(flags.image_column, flags.label_column)
    if flags.output and not flags.output.absolute().parent.is_dir():
        raise UserError(f"--output {flags.output}: there is no folder {flags.output.absolute().parent}; make it first")
    opened = _splits(flags.source, flags.split, columns)
    reports: list[Report] = []
    for split, source in opened:
        report = check_split(source, split, max(flags.workers, 0))
        print("\n".join(_text(report)), flush=True)
        for before in reports:
            both = _shared(before, report)
            if both:
                print(f"  of these {len(both):,} stand in {before.split} as well, such as {source.name(both[0][1])}")
        reports.append(report)
    if flags.output:
        write_text(flags.output, json.dumps([_plain(report) for report in reports], indent=1))
    broken = sum(len(report.broken) for report in reports)
    if broken:
        raise UserError(
            f"{broken:,} of {sum(len(report.source) for report in reports):,} images can't be read; repair or remove "
            "them, or train with data.on_error=replace"
        )


def _splits(source: str, asked: Sequence[str] | None, columns: Columns) -> list[tuple[str, Source]]:
    """The splits that were asked for, or all of the usual names that the source has."""
    if asked:
        return [(split, sources.open_source(source, split, columns)) for split in asked]
    sources.require_form(source)
    if source.startswith("synthetic:"):
        return [("train", sources.open_source(source, "train"))]
    names = [name for name in sources.split_names(source) if name in shards.SPLITS] or ["train"]
    return [(split, sources.open_source(source, split, columns)) for split in names]
