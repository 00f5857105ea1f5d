"""The promises of an exported file, checked on one: alone, it answers as the model, also when served."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from tests.data import encoded
from tests.deploy.server.served import play, serving
from vitascope.deploy.export import export as exporting
from vitascope.deploy.predict.predictor import Predictor
from vitascope.errors import UserError
from vitascope.models.engines.engine import Answers, TorchEngine
from vitascope.models.engines.features import FeatureSpec
from vitascope.models.engines.runtimes import ExportedModelError, ProgramEngine, metadata_of, open_engine
from vitascope.models.engines.selection import ClassSelection

Pictures = Sequence[np.ndarray]


def check_engine(made: SimpleNamespace, sent: Pictures, folder: Path) -> None:
    """Check every promise of a file: its kind and path, what `export` returned, its model and its engine."""
    own = TorchEngine(made.model, precision="fp32", device="cpu")
    config, fit, trust = made.model.config, made.model.preprocess, made.model.trust
    features = not own.num_classes
    assert made.engine.preprocess == fit
    assert made.engine.class_names == config.class_names
    assert made.engine.num_classes == own.num_classes
    assert made.engine.metadata == metadata_of(
        config, fit, "pictures", trust=trust, body_digest=own.body_digest if features else ""
    )
    check_report(made)
    check_truncated(made, folder)
    if features:
        check_features(made, own, sent)
        return
    wanted = own.predict([own.pixels(picture) for picture in sent])
    ready = [made.engine.pixels(picture) for picture in sent]
    together = made.engine.predict(ready)
    alone = torch.cat([made.engine.predict([picture]).probabilities for picture in ready])
    torch.testing.assert_close(together.probabilities, alone, atol=1e-5, rtol=1e-4)
    torch.testing.assert_close(together.probabilities, wanted.probabilities, atol=2e-3, rtol=0)
    assert torch.equal(together.probabilities.argmax(dim=1), wanted.probabilities.argmax(dim=1))
    assert np.ptp(together.probabilities.numpy(), axis=0).max() > 1e-2  # the pictures do differ
    assert bool(made.engine.thresholds) == (config.option("outputs") == "independent")
    if made.engine.thresholds:
        assert made.engine.thresholds == pytest.approx(own.thresholds)
    labels, others = (
        [[guess.label for guess in row] for row in Predictor(engine)(sent)] for engine in (own, made.engine)
    )
    assert labels == others
    if trust:
        check_trust(made, own, together, wanted)
    play(check_served(made, sent))


def check_report(made: SimpleNamespace) -> None:
    """The result names its files, which name no local path and are not overwritten."""
    folder, done = made.path.parent, made.done
    assert done.path == made.path
    assert {file.name for file in folder.iterdir()} == {file.name for file in done.files}
    assert done.agreement.images == 4
    assert done.agreement.same == (4 if made.engine.num_classes else None)
    assert done.size == sum(file.stat().st_size for file in folder.iterdir())
    assert repr(done).startswith(f"ExportResult({made.path}, ")
    local = [Path(exporting.__file__).parents[2], Path(torch.__file__).parents[1], folder]
    for file in done.files:
        content = file.read_bytes()
        assert not [place for place in local if str(place).encode() in content]
    before = made.path.read_bytes()
    with pytest.raises(UserError, match="exists and is not overwritten"):
        exporting.export(made.model, made.path, format=made.kind, features=not made.engine.num_classes)
    assert made.path.read_bytes() == before


def check_truncated(made: SimpleNamespace, folder: Path) -> None:
    """A part of the file is rejected in one line."""
    for file in made.done.files:
        (folder / file.name).write_bytes(file.read_bytes())
    broken = folder / made.path.name
    for share in (0.0, 0.3, 0.95):
        broken.write_bytes(made.path.read_bytes()[: int(share * made.path.stat().st_size)])
        with pytest.raises(ExportedModelError, match=broken.name) as rejected:
            ProgramEngine(broken) if made.kind == "torch" else open_engine(broken)
        assert "\n" not in str(rejected.value)


def check_features(made: SimpleNamespace, own: TorchEngine, sent: Pictures) -> None:
    """A file of features returns those of the model, has the digest of its body, and predicts no class."""
    (wanted,) = own.features_of_pictures([own.pixels(picture) for picture in sent])
    (found,) = made.engine.features_of_pictures([made.engine.pixels(picture) for picture in sent])
    torch.testing.assert_close(found, wanted, atol=5e-3, rtol=0)
    assert np.ptp(wanted.numpy(), axis=0).max() > 0.1  # the pictures do differ
    assert made.done.returns == f"features, float32 (batch, {found.shape[1]})"
    assert made.done.agreement.summary.startswith("features differ by at most")
    assert json.loads(made.engine.metadata["outputs"]) == made.engine.meaning == "embedding"
    assert made.engine.body_digest == own.body_digest != made.engine.digest
    with pytest.raises(UserError, match="no head for classes: it returns features"):
        Predictor(made.engine)
    with pytest.raises(UserError, match="an exported model has one representation"):
        made.engine.resolved(FeatureSpec(0))


def check_trust(made: SimpleNamespace, own: TorchEngine, answers: Answers, wanted: Answers) -> None:
    """The file knows as much as the model: familiarity, sets of classes and verdicts."""
    assert wanted.familiarity is not None
    torch.testing.assert_close(answers.familiarity, wanted.familiarity, atol=0.03, rtol=0)  # a resize rounds
    assert np.ptp(wanted.familiarity.numpy()) > 0.02  # the pictures do differ
    sets = made.engine.sets
    for coverage in (0.5, 0.95):
        torch.testing.assert_close(sets.limits(coverage), own.sets.limits(coverage), rtol=0, atol=0)
    (verdict, *_), (other, *_) = (
        ClassSelection(coverage=0.8).judged(engine, found.probabilities, found.familiarity)
        for engine, found in ((own, wanted), (made.engine, answers))
    )
    assert (verdict.set, verdict.unknown) == (other.set, other.unknown)
    assert json.loads(made.engine.metadata["sets"])["limit"] == sets.limits(0.95).tolist()


async def check_served(made: SimpleNamespace, sent: Pictures) -> None:
    """A server of the file predicts what the command does, and says that it explains nothing."""
    most = {"threshold": 0.0} if made.engine.thresholds else {"top_k": 1}
    best = [row[0] for row in Predictor(made.engine)(sent, **most)]
    async with serving(made.engine) as client:
        for picture, wanted in zip(sent, best, strict=True):
            response = await client.predict(encoded(picture))
            assert response.status_code == 200, response.text
            answer = response.json()["predictions"][0]
            assert (answer["label"], answer["index"]) == (wanted.label, wanted.index)
            assert answer["score"] == pytest.approx(wanted.score, abs=1e-5)
        assert (await client.post("/v1/explain", content=encoded(sent[0]))).status_code == 501
