"""The shapes of the server's JSON answers, for its OpenAPI description.

Handlers write JSON themselves, which is faster; tests hold their answers against these.
"""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field


class Answer(BaseModel):
    """A JSON object without other fields."""

    model_config = ConfigDict(extra="forbid")


class Problem(Answer):
    """An error."""

    error: str = Field(description="what is wrong, and what to do")


class Live(Answer):
    """The process answers."""

    status: Literal["live"]


class Ready(Answer):
    """Requests may be sent here."""

    status: Literal["ready"]


class Timing(Answer):
    """How an answer came about."""

    queue_ms: float = Field(ge=0, description="milliseconds in the queue")
    model_ms: float = Field(ge=0, description="milliseconds of its batch in the model")
    batch_size: int = Field(ge=1, description="pictures of its batch")


class ClassName(Answer):
    """A class."""

    label: str
    index: int = Field(ge=0)


class Prediction(ClassName):
    """A class and its probability."""

    score: float = Field(ge=0)


class Predictions(Answer):
    """The most probable classes of a picture, most probable first."""

    predictions: list[Prediction]
    timing: Timing


class Embedding(Answer):
    """A picture's representation before the head."""

    embedding: list[float]
    timing: Timing


class NamedPredictions(Predictions):
    """The same of a file of a form."""

    name: str


class NamedEmbedding(Embedding):
    """The same of a file of a form."""

    name: str


class NamedProblem(Problem):
    """A file of a form that could not be answered."""

    name: str


class FormPredictions(Answer):
    """Each file's answer or error, in the order of the form; status 200 if at least one has an answer."""

    results: list[NamedPredictions | NamedProblem]


class FormEmbeddings(Answer):
    """Each file's answer or error, in the order of the form; status 200 if at least one has an answer."""

    results: list[NamedEmbedding | NamedProblem]


class Heatmap(Answer):
    """Where the model looks in a picture."""

    method: str
    target: ClassName | None = Field(description="the explained class; null where the method has none")
    heatmap: list[list[float]] = Field(description="rows of the patch grid; the largest value is 1")


class Sample(Answer):
    """A picture to try."""

    name: str
    title: str


class Limits(Answer):
    """What a request may bring and take."""

    max_body_mb: float
    max_megapixels: float
    max_files: int
    deadline_ms: float
    explain_deadline_ms: float


class ModelDescription(BaseModel):
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
