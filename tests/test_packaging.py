"""pyproject.toml and the two files of constraints agree."""

import re
import tomllib

from conftest import ROOT
from packaging.requirements import Requirement
from packaging.version import Version

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def pinned(file):
    lines = (ROOT / file).read_text().splitlines()
    pairs = [line.split("==") for line in lines if line and not line.startswith("#")]
    return {re.sub("[-_.]+", "-", name).lower(): Version(version) for name, version in pairs}


def declared():
    lines = PROJECT["dependencies"] + PROJECT["optional-dependencies"]["dev"]
    return {re.sub("[-_.]+", "-", found.name).lower(): found.specifier for found in map(Requirement, lines)}


def test_what_make_installs_is_pinned_and_allowed():
    versions = pinned("constraints.txt")
    for name, allowed in declared().items():
        assert name in versions, f"{name} has no exact version in constraints.txt"
        assert versions[name] in allowed


def test_every_lower_bound_is_the_one_that_is_tested():
    lowest = pinned("constraints-lowest.txt")
    dependencies = {Requirement(line).name.lower(): Requirement(line).specifier for line in PROJECT["dependencies"]}
    for name, allowed in dependencies.items():
        name = re.sub("[-_.]+", "-", name)
        bounds = [Version(part.version) for part in allowed if part.operator == ">="]
        assert bounds == [lowest[name]], f"{name}: {allowed} is declared, {lowest[name]} is tested"


def test_torch_and_torchvision_are_pairs():
    # torchvision 0.N belongs to torch 2.(N - 15).
    for file in ("constraints.txt", "constraints-lowest.txt"):
        versions = pinned(file)
        assert versions["torchvision"].minor - versions["torch"].minor == 15
