"""The house: who may import whom, and what nothing may be called."""

import ast
import re
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]

# A module imports only from floors strictly below its own. Doors are imported by nothing.
FLOORS = [
    {"mpp.errors", "mpp.credentials"},
    {"mpp.files"},
    {
        *("mpp.config", "mpp.draws", "mpp.patches", "mpp.metrics", "mpp.console", "mpp.decoding", "mpp.disk_cache"),
        *("mpp.positions", "mpp.official", "mpp.probe", "mpp.report", "mpp.tasks", "mpp.imagenet", "mpp.tracking"),
        *("mpp.sharing", "mpp.background_push"),
    },
    {
        *("mpp.corruption", "mpp.targets", "mpp.order", "mpp.shards", "mpp.optim", "mpp.checkpoint"),
        *("mpp.augmentation", "mpp.mixing", "mpp.encoders", "mpp.intervals"),
    },
    {"mpp.sources", "mpp.model", "mpp.pictures", "mpp.comparison", "mpp.references", "mpp.export"},
    {"mpp.data"},
    {"mpp.objectives", "mpp.features", "mpp.contents"},
    {"mpp.train", "mpp.cost", "mpp.frozen"},
    {"mpp.wiring", "mpp.run_folder", "mpp.model_card"},
    {"mpp.job", "mpp.evaluation", "mpp.comparison_folder", "mpp.publishing", "mpp.conversion"},
    {"mpp.run", "mpp.command_line", "mpp.comparison_report"},
]
DOORS = {
    *("mpp.pretrain", "mpp.check", "eval.finetune", "eval.compare", "eval.scaling", "eval.few_shot"),
    *("eval.linear_probe", "mpp.hub"),
}
KNOW_THE_CONFIG = {*FLOORS[-1], *FLOORS[-2], *FLOORS[-3], *DOORS}  # the wiring and the entry points
FLOOR = {module: number for number, floor in enumerate(FLOORS) for module in floor}
OURS = ("mpp", "eval", "recipes")


def module_files():
    for package in ("mpp", "eval"):
        for file in sorted((ROOT / package).rglob("*.py")):
            if file.stem != "__init__":
                yield ".".join(file.relative_to(ROOT).with_suffix("").parts), file


def imports(file):
    """Every module that a file imports, wherever in it but in what it does when it is run as a program."""
    tree = ast.parse(file.read_text())
    main = [
        node for node in tree.body if isinstance(node, ast.If) and ast.unparse(node.test) == "__name__ == '__main__'"
    ]
    for node in ast.walk(ast.Module([node for node in tree.body if node not in main], [])):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{file}: relative import"
            assert node.module
            for alias in node.names:
                inside = f"{node.module}.{alias.name}"
                yield inside if inside in FLOOR or inside in DOORS else node.module


FILES = dict(module_files())


def test_every_module_has_a_floor():
    assert set(FILES) == set(FLOOR) | DOORS


@pytest.mark.parametrize("module", FILES)
def test_imports_go_down(module):
    for name in imports(FILES[module]):
        if name.split(".")[0] not in OURS or name in OURS:
            continue
        assert name not in DOORS, f"{module} imports the entry point {name}"
        if module not in DOORS:
            assert FLOOR[name] < FLOOR[module], f"{module} imports {name}, which is not below it"
        if name == "mpp.config":
            assert module in KNOW_THE_CONFIG, f"{module} knows the config"


def dependencies():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    declared = [*project["dependencies"], *project["optional-dependencies"]["export"]]
    names = {re.match(r"[A-Za-z0-9_-]+", line).group().lower() for line in declared}
    renamed = {
        "pyyaml": "yaml",
        "markdown-it-py": "markdown_it",
        "pillow": "pil",
        "scikit-learn": "sklearn",
        "scikit-image": "skimage",
        "nvidia-nvimgcodec-cu13": "nvidia",
    }
    return {renamed.get(name, name) for name in names}


@pytest.mark.parametrize("module", FILES)
def test_third_party_imports_are_declared(module):
    allowed = dependencies() | set(OURS)
    for name in imports(FILES[module]):
        top = name.split(".")[0]
        assert top in sys.stdlib_module_names or top.lower() in allowed, (
            f"{module} imports {top}, which is not declared"
        )


def test_no_module_is_named_like_a_standard_module_or_a_dependency():
    taken = set(sys.stdlib_module_names) | dependencies()
    for module in FILES:
        assert module.split(".")[-1] not in taken, f"{module} would replace another module for scripts beside it"
