"""Shared by all tests: no network, tiny recipes, and running entry points as real processes."""

import atexit
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
import yaml
from PIL import Image

ROOT = Path(__file__).resolve().parents[1]
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ.setdefault("OMP_NUM_THREADS", "1")
# What a test leaves in the cache must not be found by another, nor by the person who runs them.
os.environ["XDG_CACHE_HOME"] = tempfile.mkdtemp(prefix="mpp_tests_")
atexit.register(shutil.rmtree, os.environ["XDG_CACHE_HOME"], ignore_errors=True)

TINY = {
    "seed": 0,
    "init": "scratch",
    "data": {"source": "synthetic:24", "image_size": 32, "crop_area": [0.5, 1.0], "holdout": 0.25},
    "model": {"name": "vit_tiny_patch16_224", "patch_size": 8, "embed_dim": 32, "depth": 2, "num_heads": 2},
    "objective": {"name": "mpp"},
    "optim": {"steps": 4, "batch_size": 8, "learning_rate": 1e-3, "warmup_steps": 1},
    "runtime": {"micro_batch": 8, "workers": 0, "log_every": 1},
}


@pytest.fixture
def tiny(tmp_path):
    """Writes a small recipe, changed by dotted keys, and returns its path."""

    def write(name="tiny", **changes):
        recipe = yaml.safe_load(yaml.safe_dump(TINY))
        for key, value in changes.items():
            section, _, last = key.rpartition("__")
            (recipe[section] if section else recipe)[last] = value
        path = tmp_path / f"{name}.yaml"
        path.write_text(yaml.safe_dump(recipe))
        return str(path)

    return write


def picture(color=(200, 100, 50), size=(40, 30)):
    return Image.new("RGB", size, color)


@pytest.fixture
def folder(tmp_path):
    """Writes files below a folder: {"train/cat/a.png": picture, ...}."""

    def write(files):
        for name, content in files.items():
            path = tmp_path / name
            path.parent.mkdir(parents=True, exist_ok=True)
            if isinstance(content, bytes):
                path.write_bytes(content)
            else:
                content.save(path, format="JPEG" if name.lower().endswith(("jpg", "jpeg")) else "PNG")
        return f"folder:{tmp_path}"

    return write


def noise_photos(root, count, broken=()):
    """Images of noise, named by their number, of which some can't be read."""
    root.mkdir()
    for row in range(count):
        file = root / f"{row:02d}.png"
        if row in broken:
            file.write_bytes(b"half an image")
        else:
            Image.effect_noise((40, 40), 60 + row).convert("RGB").save(file)
    return root


def batches_of(samples, steps, batch_size, workers):
    """What one process reads of some training samples."""
    import torch

    from mpp import data

    return data.training_batches(
        samples,
        first_step=0,
        steps=steps,
        batch_size=batch_size,
        micro_batch=batch_size,
        processes=1,
        process=0,
        workers=workers,
        device=torch.device("cpu"),
    )


def command(*arguments, processes=1, cwd=None, env=None):
    """Runs an entry point as a person would; with more processes under torchrun on the CPU."""
    launcher = [sys.executable]
    if processes > 1:
        launcher += ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(processes)]
    return subprocess.run(
        [*launcher, *map(str, arguments)],
        cwd=cwd or ROOT,
        env={**os.environ, **(env or {})},
        capture_output=True,
        text=True,
        timeout=240,
    )


@pytest.fixture
def made(tmp_path):
    """A model after one step, its optimiser, and a function that writes a checkpoint of it."""
    import torch

    from mpp import checkpoint
    from mpp.encoders import build_encoder
    from mpp.model import MaskedPatchModel
    from mpp.optim import build_optimizer

    torch.manual_seed(0)
    encoder = build_encoder("vit_tiny_patch16_224", image_size=16, patch_size=8, embed_dim=16, depth=1, num_heads=2)
    model = MaskedPatchModel(encoder, 8)
    optimizer = build_optimizer(model.named_parameters(), name="adamw", weight_decay=0.1, betas=(0.9, 0.9), momentum=0)
    for parameter in model.parameters():
        parameter.grad = torch.randn_like(parameter)
    optimizer.param_groups[0]["lr"] = optimizer.param_groups[1]["lr"] = 0.01
    optimizer.step()

    def write(step, keep=2, folder=tmp_path / "checkpoints", measured=None, every=0, best=None):
        return checkpoint.write(
            folder,
            step,
            model=model,
            encoder=encoder,
            trained=None,
            objective_note={"target": "mean_color"},
            optimizer=optimizer,
            names={value: name for name, value in model.named_parameters()},
            meta={"note": 1.5},
            measured=measured or {},
            classes=None,
            description={"model": {"name": "vit_tiny_patch16_224"}},
            retention=checkpoint.Retention(keep, every, best),
        )

    return model, optimizer, write


def flip(file):
    """Another value of the last byte, as a bad disk makes it."""
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
