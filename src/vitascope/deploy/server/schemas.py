"""The JSON schemas of the server's responses, for the OpenAPI document.

Routes write JSON themselves, which is faster; tests validate their responses by these schemas.
"""

from __future__ import annotations

from typing import Any, Generic, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field

R = TypeVar("R")


class Schema(BaseModel):
    """A JSON object without further fields."""

    model_config = ConfigDict(extra="forbid")


class Problem(Schema):
    """An error."""

    error: str = Field(description="what is wrong, and what to do")


class Health(Schema):
    """The server's state."""

    status: Literal["live", "ready"]


class Timing(Schema):
    """The time that a result took."""

    queue_ms: float = Field(ge=0, description="milliseconds in the queue")
    model_ms: float = Field(ge=0, description="milliseconds of its batch in the model")
    batch_size: int = Field(ge=1, description="pictures in its batch")


class ClassName(Schema):
    """A class."""

    label: str
    index: int = Field(ge=0)


class Prediction(ClassName):
    """A class and its probability."""

    score: float = Field(ge=0)


class Predictions(Schema):
    """The most probable classes of a picture, most probable first."""

    predictions: list[Prediction]
    timing: Timing


class Embedding(Schema):
    """The pooled representation of a picture."""

    embedding: list[float]
    timing: Timing


class NamedPredictions(Predictions):
    """The predictions for a file of a form."""

    name: str


class NamedEmbedding(Embedding):
    """The embedding of a file of a form."""

    name: str


class NamedProblem(Problem):
    """The error of a file of a form."""

    name: str


class Form(Schema, Generic[R]):
    """A result or error per file, in the order of the form; status 200 if at least one has a result."""

    results: list[R | NamedProblem]


class Heatmap(Schema):
    """An explanation of a picture."""

    method: str
    target: ClassName | None = Field(description="the explained class; null if the method has none")
    heatmap: list[list[float]] = Field(description="rows of the patch grid; the largest value is 1")


class Sample(Schema):
    """A picture to try."""

    name: str
    title: str


class Limits(Schema):
    """The limits of a request."""

    max_body_mb: float
    max_megapixels: float
    max_files: int
    deadline_ms: float
    explain_deadline_ms: float


class ModelDescription(Schema):
    """The served model."""

    name: str
    architecture: str
    digest: str
    engine: str
    num_classes: int
    class_names: list[str]
    preprocess: dict[str, Any]
    limits: Limits
    version: str
