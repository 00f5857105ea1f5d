"""The lock file: tested versions with hashes, for the dependencies and the extras."""

import re
import tomllib
from pathlib import Path

ROOT = Path(__file__).parent.parent


def pins(name: str) -> dict[str, str]:
    """The version of each package in a file of pinned versions, without the `+cpu` of torch's CPU build."""
    found = re.findall(r"^([\w.-]+)==([^\s+]+)", (ROOT / name).read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[-_.]+", "-", package).lower(): version for package, version in found}


def test_lock_file_has_the_tested_versions_with_their_hashes() -> None:
    locked = pins("requirements.lock")
    assert locked.items() <= pins("constraints.txt").items()
    lines = (ROOT / "requirements.lock").read_text(encoding="utf-8").splitlines()
    assert all(re.fullmatch(r"\S+ --hash=sha256:[0-9a-f]{64}", line) for line in lines)


def test_lock_file_has_every_dependency_and_those_of_the_extras() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    extras = project["optional-dependencies"]
    for name in ("server", "tensorboard", "onnx", "openvino", "parquet", "heif"):
        project["dependencies"] += extras[name]
    names = {re.match(r"[\w.-]+", need)[0].replace("_", "-").lower() for need in project["dependencies"]}
    assert names <= set(pins("requirements.lock"))
