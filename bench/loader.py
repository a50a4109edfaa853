"""Images a second and core: this package's loader, timm's, Hugging Face datasets with torchvision, and a bare decoder.

    python bench/loader.py                  # a few minutes; a table, and one JSON object as the last line
    python bench/loader.py --rounds 3 --images 100

All read the same JPEG files, crop them at random (area 5 % to 100 %, aspect 3/4 to 4/3, bilinear), flip half of them
and collate batches of uint8 at 224 pixels. On one core each contestant has a process of its own, and they take turns
within a round, so that what slows the machine slows them all; ratios are medians over the rounds. The sizes of the
files are made, their contents are photographs. `pip install simplejpeg` adds the fastest plain decoder.
"""

import argparse
import importlib.util
import io
import json
import multiprocessing
import os
import platform
import shutil
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

os.environ["OMP_NUM_THREADS"] = "1"  # before torch: a core is a core
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import numpy as np
import torch
from PIL import Image

from mpp import data, decoding, sources

PHOTOGRAPHS = (
    "skimage/data/rocket.jpg",
    "skimage/data/hubble_deep_field.jpg",
    "skimage/data/retina.jpg",
    "sklearn/datasets/images/china.jpg",
    "sklearn/datasets/images/flower.jpg",
)
WIDTH, HEIGHT, SIDE, AREA = 500, 375, 224, (0.05, 1.0)


def write_photographs(folder: Path, count: int) -> list[Path]:
    """Distinct crops of about ImageNet's size, in JPEGs of quality 75 to 95."""
    draw, files = np.random.default_rng(0), []
    for number in range(count):
        package, _, inside = PHOTOGRAPHS[number % len(PHOTOGRAPHS)].partition("/")
        spec = importlib.util.find_spec(package)
        picture = Image.open(Path(spec.submodule_search_locations[0], inside)).convert("RGB")
        left = int(draw.integers(picture.width - WIDTH + 1))
        top = int(draw.integers(picture.height - HEIGHT + 1))
        file = folder / "train" / f"class_{number % 2}" / f"{number:05d}.jpg"
        file.parent.mkdir(parents=True, exist_ok=True)
        crop = picture.crop((left, top, left + WIDTH, top + HEIGHT))
        crop.save(file, quality=int(draw.integers(75, 96)))
        files.append(file)
    return files


# ---------------------------------------------------------------- contestants: batches of one epoch


def ours(folder: Path, batch: int, workers: int) -> Iterator[Any]:
    return _ours(f"folder:{folder}", batch, workers)


def _ours(name: str, batch: int, workers: int) -> Iterator[Any]:
    source = sources.open_source(name, "train")
    samples = data.TrainingSamples(source, range(len(source)), 0, data.View(SIDE, area=AREA), lambda epoch, index: {})
    return data.training_batches(
        samples,
        first_step=0,
        steps=len(source) // batch,
        batch_size=batch,
        micro_batch=batch,
        processes=1,
        process=0,
        workers=workers,
        device=torch.device("cpu"),
    )


def ours_from_parquet(folder: Path, batch: int, workers: int) -> Iterator[Any]:
    """The same files in row groups of 100, none of them unpacked yet."""
    import pyarrow
    import pyarrow.parquet as parquet

    shard = folder / "shards" / "train-0.parquet"
    if not shard.exists():
        shard.parent.mkdir()
        files = sorted((folder / "train").rglob("*.jpg"))
        table = pyarrow.table({"image": [{"bytes": file.read_bytes(), "path": None} for file in files]})
        parquet.write_table(table, shard, row_group_size=100)
    shutil.rmtree(os.environ["XDG_CACHE_HOME"], ignore_errors=True)
    return _ours(f"parquet:{shard}", batch, workers)


def timm_loader(folder: Path, batch: int, workers: int) -> Iterator[Any]:
    from timm.data import ImageDataset, create_loader

    loader = create_loader(
        ImageDataset(str(folder / "train")),
        (3, SIDE, SIDE),
        batch,
        is_training=True,
        use_prefetcher=True,  # its fastest way: uint8 out of the workers
        device=torch.device("cpu"),
        scale=AREA,
        color_jitter=None,
        interpolation="bilinear",
        num_workers=workers,
        persistent_workers=False,
        pin_memory=False,
    )
    return iter(loader.loader)  # without the normalisation that follows on the device


def datasets_torchvision(folder: Path, batch: int, workers: int) -> Iterator[Any]:
    import datasets
    from torchvision.transforms import v2

    crop = v2.Compose(
        [v2.RandomResizedCrop(SIDE, scale=AREA, antialias=True), v2.RandomHorizontalFlip(), v2.PILToTensor()]
    )
    rows = datasets.load_dataset(
        "imagefolder", data_dir=str(folder / "train"), split="train", cache_dir=str(folder / "arrow")
    )
    rows = rows.with_transform(
        lambda cells: {"image": [crop(image.convert("RGB")) for image in cells["image"]], "label": cells["label"]}
    )
    return iter(torch.utils.data.DataLoader(rows, batch, shuffle=True, num_workers=workers, drop_last=True))


CONTESTANTS: dict[str, Callable[[Path, int, int], Iterator[Any]]] = {
    "ours": ours,
    "ours from Parquet": ours_from_parquet,
    "timm create_loader": timm_loader,
    "datasets + torchvision v2": datasets_torchvision,
}


def raw_decoders() -> dict[str, Callable[[bytes], Any]]:
    """Plain full decodes of an encoded JPEG to RGB."""
    found: dict[str, Callable[[bytes], Any]] = {
        "Pillow": lambda encoded: np.asarray(Image.open(io.BytesIO(encoded)).convert("RGB"))
    }
    if decoding.decodes_jpeg_in_part():
        library, decoder, parameters = decoding._jpeg_decoder(os.getpid())
        found["nvImageCodec"] = lambda encoded: np.asarray(
            decoder.decode(library.CodeStream(encoded), params=parameters)
        )
    if importlib.util.find_spec("simplejpeg"):
        import simplejpeg

        found["simplejpeg"] = simplejpeg.decode_jpeg
    return found


# ---------------------------------------------------------------- measuring


def run(batches: Iterator[Any], skip: int) -> tuple[float, list[float]]:
    """Batches a second after the first `skip` (one or more), and the seconds that each took to come."""
    came = []
    for _ in batches:
        came.append(time.perf_counter())
    waits = np.diff(came[skip - 1 :])
    return len(waits) / float(waits.sum()), waits.tolist()


def serve(name: str, folder: Path, batch: int, line: Connection) -> None:
    """The process of one contestant: measures an epoch without workers whenever it is asked."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    os.environ["XDG_CACHE_HOME"] = str(folder / f"cache of {name}")
    if name in CONTESTANTS:
        import datasets

        datasets.disable_progress_bars()
    else:
        encoded = [file.read_bytes() for file in sorted((folder / "train").rglob("*.jpg"))]
        decode = raw_decoders()[name]
    while line.recv() is not None:
        if name not in CONTESTANTS:
            began = time.perf_counter()
            for one in encoded:
                decode(one)
            line.send(len(encoded) / (time.perf_counter() - began))
        else:
            rate, waits = run(CONTESTANTS[name](folder, batch, 0), skip=1)
            line.send((rate * batch, waits))


class Child:
    """A contestant's process, to be asked."""

    def __init__(self, name: str, folder: Path, batch: int) -> None:
        context = multiprocessing.get_context("spawn")
        self.line, theirs = context.Pipe()
        self.process = context.Process(target=serve, args=(name, folder, batch, theirs))
        self.process.start()

    def ask(self) -> Any:
        self.line.send("an epoch")
        return self.line.recv()

    def close(self) -> None:
        self.line.send(None)
        self.process.join()


def private_megabytes(process: int) -> float:
    lines = Path(f"/proc/{process}/smaps_rollup").read_text().splitlines()
    return sum(int(line.split()[1]) for line in lines if line.startswith("Private_")) / 1000


def worker_megabytes(make: Callable[[Path, int, int], Iterator[Any]], folder: Path, batch: int) -> float:
    """What one loader process weighs that it shares with no other, after half of an epoch."""
    batches = make(folder, batch, 1)
    total = len(list((folder / "train").rglob("*.jpg"))) // batch
    for _ in range(max(total // 2, 1)):
        next(batches)
    weight = max(private_megabytes(child.pid) for child in multiprocessing.active_children())
    for _ in batches:
        pass
    return weight


def parts_of_ours(files: list[Path]) -> dict[str, float]:
    """Where the microseconds of one image go, each part timed apart on the same crops."""
    from mpp import draws

    encoded = [file.read_bytes() for file in files]
    names = [str(file) for file in files]
    raws = [draws.words(0, "augment", 0, number, data.crop_words()) for number in range(len(files))]
    pictures = [decoding.open_picture(one, name) for one, name in zip(encoded, names, strict=True)]
    boxes = [
        data._crop_box(picture.width, picture.height, AREA, draws.uniforms(raw)[1:].tolist())
        for picture, raw in zip(pictures, raws, strict=True)
    ]
    regions = [picture.region(box) for picture, box in zip(pictures, boxes, strict=True)]
    squares = [decoding.resize(region, SIDE, SIDE) for region in regions]
    samples = [{"index": 0, "images": square, "labels": 0} for square in squares[:32]]
    parts: dict[str, Callable[[int], Any]] = {
        "read the file": lambda i: files[i].read_bytes(),
        "draw the crop": lambda i: data._crop_box(
            WIDTH, HEIGHT, AREA, draws.uniforms(draws.words(0, "augment", 0, i, data.crop_words()))[1:].tolist()
        ),
        "look at the header": lambda i: decoding.open_picture(encoded[i], names[i]),
        "decode the crop": lambda i: pictures[i].region(boxes[i]),
        "resize": lambda i: decoding.resize(regions[i], SIDE, SIDE),
        "mirror half": lambda i: decoding.mirror(squares[i]) if i % 2 else None,
    }
    spent = {name: round(_microseconds(part, len(files)), 1) for name, part in parts.items()}
    batch = _microseconds(lambda _: data._collate([dict(sample) for sample in samples]), 20)
    spent["collate"] = round(batch / len(samples), 1)
    return spent


def _microseconds(action: Callable[[int], Any], count: int) -> float:
    best = float("inf")
    for _ in range(5):
        began = time.perf_counter()
        for number in range(count):
            action(number)
        best = min(best, (time.perf_counter() - began) / count)
    return best * 1e6


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--images", type=int, default=320, help="JPEG files to make")
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--workers", type=int, nargs="*", default=None, help="also measured; default 1 to the cores")
    flags = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        files = write_photographs(folder, flags.images)
        cores = len(os.sched_getaffinity(0))
        children = {name: Child(name, folder, flags.batch) for name in (*CONTESTANTS, *raw_decoders())}
        try:
            rates, waits = take_turns(children, flags.rounds)
        finally:
            for child in children.values():
                child.close()
        torch.set_num_threads(1)
        warnings.simplefilter("ignore")
        os.environ["XDG_CACHE_HOME"] = str(folder / "cache")
        workers = flags.workers or list(range(1, cores + 1))
        result = compare(folder, files, flags.batch, flags.rounds, workers, rates, waits)
        result["microseconds"] = parts_of_ours(files)
    print("\n| where ours spends it | us an image |\n| --- | --- |")
    for part, microseconds in {**result["microseconds"], "all of these": sum(result["microseconds"].values())}.items():
        print(f"| {part} | {microseconds:.0f} |")
    print("\n" + json.dumps(result | {"machine": describe(cores)}))


def take_turns(children: dict[str, Child], rounds: int) -> tuple[dict[str, list[float]], dict[str, list[float]]]:
    """Images a second of each contestant in each round, and the seconds that its batches took to come."""
    rates: dict[str, list[float]] = {name: [] for name in children}
    waits: dict[str, list[float]] = {name: [] for name in CONTESTANTS}
    for turn in range(rounds + 1):
        for name, child in children.items():
            answer = child.ask()
            if turn == 0:  # imports, and files that are read for the first time
                continue
            if name in CONTESTANTS:
                rates[name].append(answer[0])
                waits[name] += answer[1]
            else:
                rates[name].append(answer)
    return rates, waits


def compare(
    folder: Path,
    files: list[Path],
    batch: int,
    rounds: int,
    workers: list[int],
    rates: dict[str, list[float]],
    waits: dict[str, list[float]],
) -> dict[str, Any]:
    import datasets

    datasets.disable_progress_bars()
    sizes = sorted(file.stat().st_size for file in files)
    print(f"{len(files)} JPEGs of {WIDTH} x {HEIGHT} pixels, {sizes[len(sizes) // 2] / 1000:.0f} kB in the middle;")
    print(f"crops of {SIDE} pixels; {rounds} rounds; {describe(len(os.sched_getaffinity(0)))}\n", flush=True)
    decoders = [name for name in rates if name not in CONTESTANTS]
    raw = max(decoders, key=lambda name: float(np.median(rates[name])))

    def ratio(other: str) -> float:
        return float(np.median(np.array(rates["ours"]) / np.array(rates[other])))

    print("| one core, no worker | images/s | ours / it | batch p50 ms | batch p99 ms | worker MB |")
    print("| --- | --- | --- | --- | --- | --- |")
    for name in CONTESTANTS:
        p50, p99 = np.percentile(waits[name], [50, 99]) * 1000
        weight = (
            worker_megabytes(CONTESTANTS[name], folder, batch)
            if Path("/proc/self/smaps_rollup").exists()
            else float("nan")
        )
        shown = f"{np.median(rates[name]):.0f} | {ratio(name):.2f} | {p50:.0f} | {p99:.0f} | {weight:.0f}"
        print(f"| {name} | {shown} |")
    for name in decoders:
        print(f"| {name}, decode alone | {np.median(rates[name]):.0f} | {ratio(name):.2f} | | | |")

    print("\n| workers | " + " | ".join(CONTESTANTS) + " | (images/s)")
    print("| --- |" + " --- |" * len(CONTESTANTS), flush=True)
    growth: dict[int, dict[str, float]] = {}
    for count in workers:
        by_name: dict[str, list[float]] = {name: [] for name in CONTESTANTS}
        for _ in range(max(rounds // 2, 1)):
            for name in CONTESTANTS:
                rate, _ = run(CONTESTANTS[name](folder, batch, count), skip=2 * count)
                by_name[name].append(rate * batch)
        growth[count] = {name: round(float(np.median(found)), 1) for name, found in by_name.items()}
        print(f"| {count} | " + " | ".join(f"{growth[count][name]:.0f}" for name in CONTESTANTS) + " |", flush=True)
    return {
        "ratio_timm": round(ratio("timm create_loader"), 3),
        "ratio_raw_decoder": round(ratio(raw), 3),
        "ratio_datasets_torchvision": round(ratio("datasets + torchvision v2"), 3),
        "raw_decoder": raw,
        "images_per_second": {name: round(float(np.median(found)), 1) for name, found in rates.items()},
        "by_workers": growth,
        "files": len(files),
        "median_bytes": sizes[len(sizes) // 2],
    }


def describe(cores: int) -> str:
    info = Path("/proc/cpuinfo")
    model = (
        next((line.split(":")[1].strip() for line in info.read_text().splitlines() if "model name" in line), "")
        if (info.is_file())
        else platform.processor()
    )
    return f"{model}, {cores} cores, {platform.system()}, Python {platform.python_version()}, torch {torch.__version__}"


if __name__ == "__main__":
    main()
