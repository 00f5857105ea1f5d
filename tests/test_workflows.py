"""The workflows, forms and citation of a hosted repository, as far as they can be checked without a host."""

import re
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.deploy.test_manifests import StrictLoader
from vitascope import __version__
from vitascope.cli import main

ROOT = Path(__file__).parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
FILES = sorted((ROOT / ".github").rglob("*.yml"))
WORKFLOWS = [path for path in FILES if path.parent.name == "workflows"]


def read(name: str) -> Any:
    """A file without its comments. YAML 1.1 reads the key `on` as True."""
    return yaml.load((ROOT / name).read_text("utf-8"), StrictLoader)


def jobs(path: Path) -> dict[str, Any]:
    return read(str(path))["jobs"]


def test_every_file_is_yaml_and_workflows_are_there() -> None:
    assert [path.stem for path in WORKFLOWS] == ["ci", "docs", "release"]
    assert all(isinstance(read(str(path)), dict) for path in FILES)


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)
def test_commands_are_targets_of_the_makefile(path: Path) -> None:
    text = (ROOT / "Makefile").read_text("utf-8")
    targets = "|".join(re.findall(r"^([a-z]+):", text, re.MULTILINE))
    commands = [step["run"] for job in jobs(path).values() for step in job["steps"] if "run" in step]
    assert commands
    for command in commands:  # .ci/run installs no packages of the system, and neither does a workflow
        assert re.fullmatch(rf"make ({targets})( (PYTHON|TORCH)=(\w+|\$\{{\{{ [\w.]+ \}}\}}))*", command), (
            command
        )


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)
def test_workflows_have_least_rights_and_an_end(path: Path) -> None:
    workflow = read(str(path))
    assert workflow["permissions"] == {"contents": "read"}
    assert workflow["concurrency"].keys() == {"group", "cancel-in-progress"}
    for name, job in workflow["jobs"].items():
        assert job["timeout-minutes"] <= 90
        assert ("permissions" in job) == (name == "publish")
        actions = [step["uses"] for step in job["steps"] if "uses" in step]
        assert all(re.search(r"@(release/)?v\d+$", action) for action in actions)
        # A job that may publish runs no code of the repository.
        assert name != "publish" or not any("run" in step or "checkout" in str(step) for step in job["steps"])


def test_versions_are_those_of_the_project() -> None:
    python = PROJECT["requires-python"].removeprefix(">=")
    (torch,) = [need.removeprefix("torch>=") for need in PROJECT["dependencies"] if need.startswith("torch")]
    for job in (job for path in WORKFLOWS for job in jobs(path).values()):
        for step in job["steps"]:
            version = step.get("with", {}).get("python-version", python)
            assert version in (python, "${{ matrix.python }}")
        if "strategy" in job:
            matrix = job["strategy"]["matrix"]
            assert matrix["python"] == [python, "3.14"]
            assert matrix.get("torch", [f"{torch}.0", "newest"]) == [f"{torch}.0", "newest"]
            assert matrix["os"] == ["ubuntu-latest", "windows-latest", "macos-latest"]


def test_form_for_bugs_asks_for_what_the_command_prints(capsys: pytest.CaptureFixture[str]) -> None:
    form = read(".github/ISSUE_TEMPLATE/bug.yml")
    ((command,),) = [
        found for field in form["body"] if (found := re.findall(r"`vitascope (.*?)`", str(field)))
    ]
    assert main(command.split()) == 0
    assert f"vitascope {__version__}\ntorch: " in capsys.readouterr().out


def test_dependabot_watches_packages_and_actions() -> None:
    updates = read(".github/dependabot.yml")["updates"]
    assert [update["package-ecosystem"] for update in updates] == ["pip", "github-actions"]


def test_citation_is_of_this_version() -> None:
    citation = read("CITATION.cff")
    assert citation["cff-version"] == "1.2.0"
    assert (citation["title"], citation["version"]) == (PROJECT["name"], __version__)
    assert (citation["license"], citation["abstract"]) == (PROJECT["license"], PROJECT["description"])
    assert citation["keywords"] == PROJECT["keywords"]
