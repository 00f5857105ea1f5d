"""`vitascope serve`: its options and its errors."""

import dataclasses
import importlib
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from vitascope.cli import main
from vitascope.cli.parsing import parse
from vitascope.cli.ship import Serve
from vitascope.deploy.server.server import announce, by_name, serve
from vitascope.deploy.server.settings import Settings
from vitascope.errors import UserError
from vitascope.models.weights.builtin import DEFAULT


def test_help_lists_every_option_and_imports_no_torch() -> None:
    code = (
        "import sys; from vitascope.cli import main\n"
        "try: main(['serve', '--help-all'])\n"
        "except SystemExit: print('torch' in sys.modules, 'fastapi' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    for field in dataclasses.fields(Settings):
        assert f"--{field.name.replace('_', '-')}" in done.stdout
    assert done.stdout.endswith("False False\n")


def test_options_reach_the_settings() -> None:
    args = ["m", "--port", "0", "--max-batch", "7", "--no-access-log", "--allowed-hosts", "a", "b"]
    given = parse(Serve, "serve", args)
    expected = Settings(port=0, max_batch=7, access_log=False, allowed_hosts=("a", "b"))
    assert (given.models, given.settings) == (("m",), expected)


def test_without_a_model_the_built_in_one_is_served_and_named(capsys) -> None:
    given = parse(Serve, "serve", ["--port", "0"])
    assert given.models == (DEFAULT,)
    with socket.create_server(("127.0.0.1", 0)) as port:
        announce(given.models, given.settings, port, None)
    assert capsys.readouterr().out.startswith("cifar10 (built in) at http://127.0.0.1:")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--max-batch", "0"], "--max-batch must be at least 1, not 0"),
        (["--port", "70000"], "--port must be in [0, 65535], not 70000"),
        (["--deadline-ms", "0"], "--deadline-ms must be positive, not 0.0"),
        (["--grace-s", "nan"], "--grace-s must be at least 0, not nan"),
        (["--queue", "-1"], "--queue must be at least 1, not -1"),
        (["--max-bach", "3"], "nearest: --max-batch"),
        (["other"], "each of several models needs a name: NAME=model"),
    ],
)
def test_invalid_option_is_rejected_in_one_line(options: list[str], message: str, capsys) -> None:
    assert main(["serve", "model", *options]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert message in err
    assert err.count("\n") == 1


def test_missing_library_names_the_extra(monkeypatch, capsys) -> None:
    monkeypatch.setitem(sys.modules, "fastapi", None)
    assert main(["serve", "model"]) == 2
    needed = "pip install 'vitascope[server]'"
    expected = f"vitascope: error: the server needs fastapi: {needed}\nnext   {needed}\n"
    assert capsys.readouterr().err == expected
    monkeypatch.delitem(sys.modules, "vitascope.deploy.server.app", raising=False)
    with pytest.raises(UserError, match="the server needs fastapi"):
        importlib.import_module("vitascope.deploy.server.app")


def test_models_with_names_are_parsed_and_a_path_is_no_name(tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("lr=3").mkdir()
    assert by_name(["a=runs/a", "b-2=org/b"]) == {"a": "runs/a", "b-2": "org/b"}
    for alone in ("lr=3", "s3://bucket/a=b", "org/name"):
        assert by_name([alone]) == {"": alone}
    with pytest.raises(UserError, match="two models have the name a: x and y"):
        by_name(["a=x", "a=y"])
    with pytest.raises(UserError, match="--beside is for one MODEL without a name"):
        serve(["a=x", "b=y"], Settings(), beside="z")


def test_port_in_use_is_reported_in_one_line(tmp_path, capsys) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        assert main(["serve", str(tmp_path), "--port", port]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    expected = f"cannot listen on 127.0.0.1:{port}: Address already in use; try another --port or --host"
    assert err == f"vitascope: error: {expected}\n"
