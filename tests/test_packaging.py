"""What is packed, what it says about itself, and what its extras ask for."""

from __future__ import annotations

import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).resolve().parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
EXTRAS = PROJECT["optional-dependencies"]

OF_0_28_1 = {
    *("all-frameworks", "tensorflow", "tensorflow-cpu", "tensorflow-gpu", "keras", "pytorch"),
    *("mxnet", "pytorch-spark", "spark", "ray", "dev", "test"),
}


def test_the_extras_of_the_last_release_exist():
    assert set(EXTRAS) >= OF_0_28_1


def test_extras_only_refer_to_extras_that_exist():
    for name, requirements in EXTRAS.items():
        for requirement in map(Requirement, requirements):
            if requirement.name == PROJECT["name"]:
                assert requirement.extras <= set(EXTRAS), name


@pytest.mark.parametrize("version", ["2.4.1", "2.7.1", "2.10.0", "2.13.0", "2.99.0"])
def test_no_extra_replaces_a_torch_that_works(version: str):
    for requirements in EXTRAS.values():
        for requirement in map(Requirement, requirements):
            if requirement.name == "torch":
                assert SpecifierSet(str(requirement.specifier)).contains(version)


def test_metadata():
    assert PROJECT["authors"]
    assert PROJECT["urls"]
    assert "Operating System :: POSIX :: Linux" in PROJECT["classifiers"]
    assert PROJECT["readme"] == "README.md"


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("hatchling", reason="hatchling, which builds packages, is not installed")
    folder = tmp_path_factory.mktemp("dist")
    command = [sys.executable, "-m", "hatchling", "build", "-d", str(folder)]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True, timeout=600)
    return folder


def test_the_source_archive_has_all_that_it_takes_to_work_on_it(built: Path):
    (archive,) = built.glob("*.tar.gz")
    with tarfile.open(archive) as packed:
        names = {name.partition("/")[2] for name in packed.getnames()}
    tracked = subprocess.run(
        ["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=False
    ).stdout.splitlines()
    wanted = {name for name in tracked if not name.startswith(".") and (ROOT / name).exists()}
    assert wanted - names == set()
    assert {name for name in names if "__pycache__" in name or ".venv" in name} == set()


def test_the_wheel_has_the_package_alone(built: Path):
    (archive,) = built.glob("*.whl")
    with zipfile.ZipFile(archive) as packed:
        names = packed.namelist()
    ours = {str(p.relative_to(ROOT)) for p in (ROOT / "horovod").rglob("*.py")}
    assert ours | {"horovod/py.typed"} <= set(names)
    others = {name.partition("/")[0] for name in names} - {"horovod"}
    assert all(name.endswith(".dist-info") for name in others)
