"""`vitascope mcp`: a model's tools, asked by a client of the Model Context Protocol over stdio."""

import asyncio
import base64
import io
import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from tests.models import small_model, with_trust
from vitascope.cli import main
from vitascope.cli.mcp import Mcp
from vitascope.data.samples import __file__ as samples
from vitascope.deploy.predict.predictor import Predictor
from vitascope.models.weights.loading import save_pretrained

URL = "http://127.0.0.1:9/cat.jpg"
PAGE = Path(__file__).parent.parent / "docs" / "deploy.md"


def test_tools_answer_the_program_that_starts_them_as_documented() -> None:
    client_of = pytest.importorskip("mcp.client.client").Client
    stdio = pytest.importorskip("mcp.client.stdio")
    (settings,) = re.findall(r"```json\n(.*mcpServers.*)\n```", PAGE.read_text(encoding="utf-8"))
    server = json.loads(settings)["mcpServers"]["vitascope"]
    assert server["command"] == "vitascope"
    folder = Path(samples).parent
    image = str(folder / "cat.jpg")

    async def answers() -> dict[str, Any]:
        environment = {"PYTHONPATH": ":".join(sys.path)}
        arguments = ["-m", "vitascope.cli", *server["args"]]
        started = stdio.StdioServerParameters(command=sys.executable, args=arguments, env=environment)
        async with client_of(stdio.stdio_client(started)) as client:
            asked = {
                "predict": {"image": image, "top_k": 2},
                "explain": {"image": image, "target": "dog"},
                "similar": {"image": image, "data": str(folder), "k": 2},
            }
            answers = {name: await client.call_tool(name, values) for name, values in asked.items()}
            answers["unknown"] = await client.call_tool("explain", {"image": image, "target": "unicorn"})
            answers["missing"] = await client.call_tool("predict", {"image": "none.jpg"})
            answers["URL"] = await client.call_tool("predict", {"image": URL})
            answers["URL of data"] = await client.call_tool("similar", {"image": image, "data": URL})
            return answers

    found = asyncio.run(answers())
    expected = Predictor(server["args"][1])(image, top_k=2)
    guesses = found["predict"].structured_content["predictions"]
    assert [guess["label"] for guess in guesses] == [guess.label for guess in expected]
    picture = Image.open(io.BytesIO(base64.b64decode(found["explain"].content[0].data)))
    assert picture.format == "PNG"
    rows = found["similar"].structured_content["result"]
    assert [row["rank"] for row in rows] == [1, 2]
    assert rows[0]["image"] == image
    for name, reason in (
        ("unknown", "unicorn"),
        ("missing", "none.jpg: no image file on this machine"),
        ("URL", f"{URL}: no image file on this machine"),
        ("URL of data", f"{URL}: no folder on this machine"),
    ):
        assert found[name].is_error
        assert reason in found[name].content[0].text


def test_prediction_of_a_calibrated_model_has_its_verdict(tmp_path) -> None:
    pytest.importorskip("mcp.server.mcpserver")
    image = str(Path(samples).parent / "cat.jpg")
    for model in (small_model(), with_trust(small_model())):
        folder = str(save_pretrained(model, tmp_path / type(model.trust).__name__))
        tools = Mcp(model=folder, precision="fp32", device="cpu").server()
        answer = asyncio.run(tools.call_tool("predict", {"image": image})).structured_content
        expected = Predictor(folder, precision="fp32", device="cpu")(image).verdict
        verdict = json.loads(json.dumps(vars(expected))) if model.trust else {}
        assert answer == {"predictions": answer["predictions"], **verdict}
        assert ("familiarity" in answer) == (model.trust is not None)


def test_missing_library_names_the_extra(monkeypatch, capsys) -> None:
    monkeypatch.setitem(sys.modules, "mcp.server.mcpserver", None)
    assert main(["mcp"]) == 2
    needed = "pip install 'vitascope[mcp]'"
    assert capsys.readouterr().err == f"vitascope: error: this needs mcp: {needed}\nnext   {needed}\n"
