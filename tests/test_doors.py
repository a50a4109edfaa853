"""The entry points as a person runs them: help, faults, other folders, launchers, and an installed wheel."""

import importlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys

import pytest
from conftest import ROOT, command

DOORS = ["mpp/pretrain.py", "eval/finetune.py", "eval/compare.py", "eval/few_shot.py", "eval/linear_probe.py"]
ACCELERATE = shutil.which("accelerate", path=os.path.dirname(sys.executable)) or "accelerate"


@pytest.mark.parametrize("door", DOORS)
def test_help_from_a_folder_full_of_traps(tmp_path, door):
    for trap in ("datasets", "timm", "eval", "mpp", "config"):
        (tmp_path / trap).mkdir()
        (tmp_path / trap / "__init__.py").write_text("raise RuntimeError('not this one')")
    done = command(ROOT / door, "--help", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    for word in ("--recipe", "--output", "--overwrite", "--dry-run", "key=value", "mpp_demo", "example:"):
        assert word in done.stdout


def test_help_of_the_hub(tmp_path):
    done = command(ROOT / "mpp/hub.py", "--help", cwd=tmp_path)
    assert done.returncode == 0 and all(
        word in done.stdout for word in ("push", "pull", "convert", "HF_TOKEN", "example:")
    )
    door = importlib.import_module("mpp.hub")
    from mpp import conversion

    assert tuple(conversion.LAYOUTS) == door.LAYOUTS


@pytest.mark.parametrize("door", DOORS[:2])
@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--recipe", "mpp_b61"], "--recipe mpp_b61: no such recipe; did you mean mpp_b16? There are augreg_i1k_b16"),
        (
            ["--recipe", "mpp_demo", "learning_rte=1"],
            "learning_rte=1: unknown key learning_rte; did you mean optim.learning_rate?",
        ),
        (
            ["--recipe", "mpp_demo", "optim.steps=many"],
            "optim.steps=many: optim.steps must be a whole number, not 'many'",
        ),
        (
            ["--recipe", "mpp_demo", "data.image_size=30", "objective.name=supervised"],
            "data.image_size=30 is not a multiple",
        ),
        (
            ["--recipe", "mpp_demo", "data.source=folder:nowhere", "objective.name=supervised"],
            "data.source=folder:nowhere: no such folder",
        ),
    ],
)
def test_faults_are_one_message_and_status_2(tmp_path, door, arguments, words):
    done = command(ROOT / door, *arguments, cwd=tmp_path)
    assert done.returncode == 2
    assert done.stderr.startswith("error: ") and words in done.stderr
    assert "Traceback" not in done.stderr and len(done.stderr.strip().splitlines()) == 1
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("number", "words"),
    [(signal.SIGTERM, "stopped by SIGTERM; the same command continues"), (signal.SIGUSR1, "stopped by SIGUSR1;")],
)
def test_signals_outside_the_loop_end_in_one_message(number, words):
    code = (
        "import os, signal; from mpp.command_line import exit_with\n"
        f"exit_with(lambda: (os.kill(os.getpid(), {int(number)}), signal.pause()))"
    )
    done = command("-c", code)
    assert done.returncode == 130 and words in done.stderr and "Traceback" not in done.stderr


def test_a_full_disk_is_one_message():
    code = "from mpp.command_line import exit_with\nexit_with(lambda: open('/dev/full', 'wb', 0).write(b'x'))"
    done = command("-c", code)
    assert done.returncode == 2 and done.stderr.startswith("error: [Errno 28] No space left on device")
    assert "Make room, then the same command continues" in done.stderr and "Traceback" not in done.stderr


def test_no_message_shows_a_token(tmp_path):
    token = "hf_AbCdEfGhIjKlMnOpQrStUv"
    done = command(ROOT / "mpp/pretrain.py", "--recipe", f"recipes_of_{token}", cwd=tmp_path, env={"HF_TOKEN": token})
    assert done.returncode == 2 and "no such recipe" in done.stderr and token not in done.stderr + done.stdout


def test_doors_without_a_recipe_say_what_there_is(tmp_path):
    done = command(ROOT / "mpp/pretrain.py", cwd=tmp_path)
    assert done.returncode == 2 and "--recipe is missing; there are augreg_i1k_b16" in done.stderr
    done = command(ROOT / "eval/finetune.py", cwd=tmp_path)
    assert (
        done.returncode == 2 and "no finished pre-training below" in done.stderr and "--recipe mpp_demo" in done.stderr
    )


def test_dry_run_of_the_papers_recipe_under_accelerate_launch(tmp_path):
    done = subprocess.run(
        [ACCELERATE, "launch", "--cpu", "--num_processes", "1", str(ROOT / "mpp/pretrain.py"), "--recipe", "mpp_b16", "--dry-run"],
        cwd=tmp_path, capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    for words in (
        "86,193,152 in all",
        "35.20 GFLOPs an image",
        "1,000,000 of 4,096 images",
        "learning_rate: 0.0002",
        "device-hours",
    ):
        assert words in done.stdout
    assert list(tmp_path.iterdir()) == []


def test_pretrain_then_finetune_with_nothing_else(tiny, tmp_path):
    tune = tiny("tune", objective__name="supervised", optim__learning_rate=0.01)
    pre = tiny("pre", finetune=tune)
    done = command(ROOT / "mpp/pretrain.py", "--recipe", pre, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "not in the recipe, so by default: " in done.stdout and "optim.beta2=0.999" in done.stdout
    done = command(ROOT / "eval/finetune.py", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    results = json.loads((tmp_path / "runs" / "tune" / "results.json").read_text())
    assert {"arm", "data_set", "metric", "value", "seed", "learning_rate", "init", "recipe_hash"} <= set(results[0])
    assert results[0]["init"] == "runs/pre"
    again = command(ROOT / "mpp/pretrain.py", "--recipe", tmp_path / "runs" / "pre" / "config.yaml", cwd=tmp_path)
    assert again.returncode == 0 and "this run is finished" in again.stdout  # runs/pre/config.yaml repeats runs/pre


def test_a_broken_image_ends_the_run_by_name(tiny, tmp_path):
    from PIL import Image

    (tmp_path / "photos").mkdir()
    for number in range(5):
        Image.effect_noise((50, 50), 80).convert("RGB").save(tmp_path / "photos" / f"{number}.jpg")
    whole = (tmp_path / "photos" / "3.jpg").read_bytes()
    (tmp_path / "photos" / "3.jpg").write_bytes(whole[: len(whole) // 2])
    done = command(
        ROOT / "mpp/pretrain.py", "--recipe", tiny(), "--output", tmp_path / "run", f"data.source=folder:{tmp_path}/photos",
        "runtime.workers=2",
    )  # fmt: skip
    assert done.returncode == 2
    assert f"{tmp_path}/photos/3.jpg can't be read as an image" in done.stderr and "Traceback" not in done.stderr


@pytest.mark.parametrize(("told", "recipe"), [("bf16", "fp32"), ("no", "bf16")])
def test_the_recipe_decides_the_precision(tiny, tmp_path, told, recipe):
    done = subprocess.run(
        [ACCELERATE, "launch", "--cpu", "--num_processes", "1", "--mixed_precision", told, str(ROOT / "mpp/pretrain.py"),
         "--recipe", tiny(), "--output", str(tmp_path / "run"), f"runtime.precision={recipe}"],
        capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert f"precision {recipe} (runtime.precision decides" in done.stdout
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["precision"] == recipe


def test_the_readme_ends_with_a_tree_of_every_module():
    text = (ROOT / "README.md").read_text()
    tree = re.findall(r"^(?:\w+/)? +(\w+\.py) +\S", text, re.MULTILINE)
    modules = [file.name for folder in ("mpp", "eval", "bench") for file in (ROOT / folder).glob("*.py")]
    assert sorted(tree) == sorted(name for name in modules if name != "__init__.py")


def test_a_wheel_holds_the_packages_and_the_recipes(tmp_path):
    """Built, unpacked, and run from another folder as a module."""
    source = tmp_path / "source"
    for part in ("mpp", "eval", "recipes"):
        shutil.copytree(ROOT / part, source / part, ignore=shutil.ignore_patterns("__pycache__"))
    for file in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / file, source)
    built = subprocess.run(
        [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(tmp_path), str(source)],
        capture_output=True, text=True, timeout=180,
    )  # fmt: skip
    assert built.returncode == 0, built.stdout + built.stderr
    installed = tmp_path / "installed"
    shutil.unpack_archive(next(tmp_path.glob("*.whl")), installed, "zip")
    for module in ("mpp.pretrain", "eval.finetune"):
        done = command(
            "-m", module, "--recipe", "mpp_b16", "--dry-run", cwd=tmp_path, env={"PYTHONPATH": str(installed)}
        )
        assert done.returncode == 0, done.stderr
        assert "vit_base_patch16_224" in done.stdout
    where = command(
        "-c",
        "import mpp, recipes; print(mpp.__file__, recipes.__file__)",
        cwd=tmp_path,
        env={"PYTHONPATH": str(installed)},
    )
    assert where.stdout.count(str(installed)) == 2
