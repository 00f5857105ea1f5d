"""`vitascope mcp`: a model as tools for assistants and coding agents."""

import contextlib
import dataclasses
import os
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from vitascope._version import __version__
from vitascope.cli.parsing import Device, MaybeModel, Precision
from vitascope.errors import UserError
from vitascope.models.weights.builtin import DEFAULT

if TYPE_CHECKING:
    from mcp.server.mcpserver import MCPServer


@dataclasses.dataclass(frozen=True, kw_only=True)
class Mcp:
    """Offer a model to assistants and coding agents, over stdio.

    It speaks the Model Context Protocol, and reads this machine's image files.

    Its tools are predict, explain, which returns a picture, and similar.

    Needs an extra: pip install 'vitascope[mcp]'.
    """

    model: MaybeModel = DEFAULT
    """A run folder, a model folder or file, a hub id, or an exported file. Default: the built-in cifar10."""
    precision: Precision = "auto"
    device: Device = "auto"

    def call(self) -> None:
        """Answer the program that started this one, until it closes standard input."""
        self.server().run()

    def server(self) -> "MCPServer":
        """The tools, with the model in them."""
        from vitascope.analysis.explain.methods import DEFAULT_METHOD
        from vitascope.analysis.similar import similar as similar_pictures
        from vitascope.deploy.predict.predictor import Predictor
        from vitascope.models.engines.runtimes import importing

        with importing("mcp", "mcp"):
            from mcp.server.mcpserver import Image, MCPServer
            from mcp.server.mcpserver.exceptions import ToolError
        predictor = Predictor(self.model, precision=self.precision, device=self.device)
        server: MCPServer = MCPServer("vitascope", version=__version__, log_level="ERROR")

        @contextlib.contextmanager
        def answering() -> Iterator[None]:
            """Return the reason of an error that the caller can avoid; others are logged with a traceback."""
            try:
                yield
            except UserError as error:
                raise ToolError(str(error)) from error

        @server.tool()
        @answering()
        def predict(image: str, top_k: int = 5) -> dict[str, Any]:
            """The most probable classes of an image file, with their probabilities.

            `unknown` is why a calibrated model does not know the class, null if it does, and `unchecked` if
            its validation images were too few; `set` has the classes that hold the right one in 95% of cases;
            `familiarity` is the share of validation images that are less like the training images.
            """
            guesses = predictor(local_file(image), top_k)
            verdict = {} if predictor.engine.sets is None else vars(guesses.verdict)
            return {"predictions": [dataclasses.asdict(guess) for guess in guesses], **verdict}

        @server.tool(structured_output=False)
        @answering()
        def explain(image: str, target: str | None = None, method: str = DEFAULT_METHOD) -> Any:
            """An image file under a heatmap of where the model looks for a class, or the predicted one."""
            explanation = predictor.explain(local_file(image), method=method, target=target)
            return Image(data=explanation.png(), format="png")

        @server.tool()
        @answering()
        def similar(image: str, data: str, k: int = 12) -> list[dict[str, Any]]:
            """The images of a folder that are most similar to an image file, by the cosine of features."""
            if not os.path.exists(data):
                raise UserError(f"{data}: no folder on this machine")
            return similar_pictures(predictor.engine, local_file(image), data, k=k).rows()

        return server


def local_file(path: str) -> str:
    """The path of a file. An assistant writes what others tell it: no URL is fetched, and no pipe is read."""
    if not os.path.isfile(path):
        raise UserError(f"{path}: no image file on this machine")
    return path
