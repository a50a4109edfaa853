"""Seconds from the end of imports to the first batch, of 10,000 photographs and of 1.3 million Parquet rows.

    python bench/start.py             # a minute or two; one JSON object as the last line

The Parquet files have the number of files, row groups and rows of ImageNet's copy on the hub (294 files of 45 row
groups of 98 rows), with small images in them: opening reads footers, whose size does not depend on the images.
"""

import argparse
import io
import itertools
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ["OMP_NUM_THREADS"] = "1"
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import numpy as np
import pyarrow
import pyarrow.parquet as parquet
import torch
from loader import write_photographs
from PIL import Image

from mpp import data, sources

BATCH = 128


def first_batch(source: str, workers: int, labels: bool) -> dict[str, float]:
    """Seconds to open a source, to read its labels where they are needed, and to the first batch after that."""
    began = time.perf_counter()
    opened = sources.open_source(source, "train")
    seconds = {"open": time.perf_counter() - began}
    if labels:
        now = time.perf_counter()
        assert opened.labels is not None
        seconds["labels"] = time.perf_counter() - now
    now = time.perf_counter()
    samples = data.TrainingSamples(opened, range(len(opened)), 0, data.View(224), lambda epoch, index: {}, window=8)
    batches = data.training_batches(
        samples,
        first_step=0,
        steps=8,
        batch_size=BATCH,
        micro_batch=BATCH,
        processes=1,
        process=0,
        workers=workers,
        device=torch.device("cpu"),
    )
    next(batches)
    seconds["first batch"] = time.perf_counter() - now
    seconds["all"] = time.perf_counter() - began
    return {name: round(value, 3) for name, value in seconds.items()}


def write_folder(root: Path, count: int) -> None:
    """Photographs, each of which stands under many names: what is measured is not the writing of files."""
    originals = write_photographs(root / "originals", min(200, count))
    for number, original in zip(range(count), itertools.cycle(originals), strict=False):
        file = root / "folder" / "train" / f"class_{number % 100:03d}" / f"{number:06d}.jpg"
        file.parent.mkdir(parents=True, exist_ok=True)
        os.link(original, file)


def write_parquet(root: Path, files: int, groups: int, rows: int) -> None:
    image = io.BytesIO()
    Image.effect_noise((32, 32), 50).convert("RGB").save(image, format="JPEG")
    cells = [{"bytes": image.getvalue(), "path": None}] * (groups * rows)
    features = {"image": {"_type": "Image"}, "label": {"names": [str(n) for n in range(1000)], "_type": "ClassLabel"}}
    note = {b"huggingface": json.dumps({"info": {"features": features}}).encode()}
    cells_array = pyarrow.array(cells)
    for number in range(files):
        labels = np.random.default_rng(number).integers(0, 1000, groups * rows)
        table = pyarrow.table({"image": cells_array, "label": labels}).replace_schema_metadata(note)
        parquet.write_table(table, root / f"train-{number:05d}-of-{files:05d}.parquet", row_group_size=rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--images", type=int, default=10_000, help="in the folder")
    parser.add_argument("--files", type=int, default=294, help="of Parquet")
    parser.add_argument("--groups", type=int, default=45, help="row groups in each")
    parser.add_argument("--rows", type=int, default=98, help="in each row group")
    flags = parser.parse_args()
    result: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as name:
        root = Path(name)
        os.environ["XDG_CACHE_HOME"] = str(root / "cache")
        write_folder(root, flags.images)
        (root / "parquet").mkdir()
        write_parquet(root / "parquet", flags.files, flags.groups, flags.rows)
        rows = flags.files * flags.groups * flags.rows
        shards = f"parquet:{root}/parquet/*.parquet"
        cases: list[tuple[str, Callable[[], dict[str, float]]]] = [
            (f"folder of {flags.images:,}", lambda: first_batch(f"folder:{root}/folder", 1, labels=True)),
            (f"Parquet of {rows:,} rows, first time", lambda: first_batch(shards, 1, labels=False)),
            ("the same again", lambda: first_batch(shards, 1, labels=False)),
            ("the same with labels, first time", lambda: first_batch(shards, 1, labels=True)),
            ("the same with labels again", lambda: first_batch(shards, 1, labels=True)),
        ]
        for title, measure in cases:
            result[title] = measure()
            print(f"{title:42}", "  ".join(f"{part} {seconds:.2f} s" for part, seconds in result[title].items()))
    print(json.dumps(result))


if __name__ == "__main__":
    main()
