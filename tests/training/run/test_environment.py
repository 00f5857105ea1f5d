import datetime
import json
import platform
import sys
from pathlib import Path

import pytest
import torch

import vitascope
from vitascope.training.run.environment import describe_environment, without_home


def test_the_environment_has_versions_and_the_command_but_no_personal_names(monkeypatch) -> None:
    monkeypatch.setattr("sys.argv", ["/home/ada/bin/vitascope", "train", "--data", "/home/ada/my photos"])
    monkeypatch.setattr("pathlib.Path.home", lambda: Path("/home/ada"))
    monkeypatch.setenv("SECRET_TOKEN", "hunter2")
    found = describe_environment("cpu", processes=3)
    assert found["command"] == "vitascope train --data '~/my photos'"
    assert found["torch"] == torch.__version__
    assert found["vitascope"] == vitascope.__version__
    assert found["python"] == ".".join(map(str, sys.version_info[:3]))
    assert (found["device"], found["processes"]) == ("cpu", 3)
    assert found["cores"] >= 1
    assert found["cpu"]
    began = datetime.datetime.fromisoformat(found["started"])
    assert began.tzinfo is not None
    assert abs(datetime.datetime.now(datetime.UTC) - began) < datetime.timedelta(hours=1)
    text = json.dumps(found)
    assert "ada" not in text
    assert "hunter2" not in text
    assert f'"{platform.node()}"' not in text


def test_home_folder_is_not_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Path, "home", lambda: Path("/home/ada"))
    assert without_home("train --data /home/ada/photos") == "train --data ~/photos"
    monkeypatch.setattr(Path, "home", lambda: Path("/"))
    assert without_home("/data/photos") == "/data/photos"
