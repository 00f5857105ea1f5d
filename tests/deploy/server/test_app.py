"""The server's responses."""

import asyncio
import io

import numpy as np
import pytest
import torch
from PIL import Image

from tests.deploy.server.served import (
    NAMES,
    POISON,
    HeldEngine,
    grey,
    picture,
    refusal,
    serving,
    torch_engine,
)
from tests.models import labelling_model, small_model, with_trust
from vitascope.analysis.explain.methods import DEFAULT_METHOD, METHODS
from vitascope.analysis.explain.rollout import rollout
from vitascope.deploy.predict.predictor import Predictor
from vitascope.models.engines.engine import TorchEngine


async def test_raw_body_and_form_match_the_predictor(engine: TorchEngine) -> None:
    files = [picture(seed) for seed in range(3)]
    expected = Predictor(engine)(files, top_k=2)
    async with serving(engine) as client:
        raw = (await client.predict(files[0], params={"top_k": 2})).json()
        parts = [("image", (f"{number}.png", content)) for number, content in enumerate(files)]
        form = (await client.post("/v1/predict?top_k=2", files=parts)).json()
    assert set(raw["timing"]) == {"queue_ms", "model_ms", "batch_size"}
    assert [one["name"] for one in form["results"]] == ["0.png", "1.png", "2.png"]
    answers = [raw, *form["results"]]
    for answer, wanted in zip(answers, [expected[0], *expected], strict=True):
        for guess, want in zip(answer["predictions"], wanted, strict=True):
            assert (guess["label"], guess["index"]) == (want.label, want.index)
            assert guess["score"] == pytest.approx(want.score, abs=1e-6)


async def test_a_calibrated_model_says_what_it_knows_and_verdicts_are_counted() -> None:
    engine = TorchEngine(with_trust(small_model(class_names=NAMES)), precision="fp32", device="cpu")
    files = [picture(seed) for seed in range(3)]
    for rates in ({}, {"coverage": 0.5, "familiar": 0.5}):
        wanted = [answer.verdict for answer in Predictor(engine)(files, **rates)]
        async with serving(engine) as client:
            parts = [("image", (f"{number}.png", content)) for number, content in enumerate(files)]
            found = (await client.post("/v1/predict", files=parts, params=rates)).json()["results"]
            assert await client.counted("vitascope_verdicts_total") == 3
        for answer, verdict in zip(found, wanted, strict=True):
            assert (answer["unknown"], tuple(answer["set"])) == (verdict.unknown, verdict.set)
            assert answer["familiarity"] == pytest.approx(verdict.familiarity, abs=1e-4)


async def test_rates_are_rejected_where_they_mean_nothing(engine: TorchEngine) -> None:
    async with serving(engine) as client:
        assert "unknown" not in (await client.predict(picture())).json()
        assert "not calibrated" in refusal(await client.predict(picture(), params={"coverage": 0.9}), 422)
        for rate in (0, 1, "nan"):
            assert "familiar" in refusal(await client.predict(picture(), params={"familiar": rate}), 422)


async def test_labels_are_the_classes_above_their_thresholds() -> None:
    model = labelling_model(0.3, 0.9, 0.2, 0.6, 0.1, thresholds=(0.25, 0.5, 0.5, 0.7, 0.5), class_names=NAMES)
    async with serving(TorchEngine(model, device="cpu")) as client:
        for query, labels in (
            ({}, ["bee", "ant"]),
            ({"threshold": 0.55}, ["bee", "dog"]),
            ({"threshold": 1}, []),
        ):
            answer = (await client.predict(picture(), params=query | {"top_k": 3})).json()
            assert [each["label"] for each in answer["labels"]] == labels
            assert [each["label"] for each in answer["predictions"]] == ["bee", "dog", "ant"]
            assert answer["predictions"][0]["score"] == pytest.approx(0.9)
        assert "threshold" in refusal(await client.predict(picture(), params={"threshold": 2}), 422)
        about = (await client.get("/v1/model")).json()
    assert about["outputs"] == "independent"
    assert about["thresholds"] == pytest.approx([0.25, 0.5, 0.5, 0.7, 0.5])


async def test_embedding_and_explanation_match_the_library(engine: TorchEngine) -> None:
    pixels = engine.pixels(picture())
    images = engine.preprocess.normalize(torch.from_numpy(pixels)[None])
    async with serving(engine) as client:
        got = (await client.post("/v1/explain?method=rollout", content=picture())).json()
        np.testing.assert_allclose(got["heatmap"], rollout(engine.model, images)[0], atol=1e-6)
        assert got["target"] is None
        cats = (await client.post("/v1/explain?target=cat", content=picture())).json()
        assert cats["target"] == {"label": "cat", "index": 2}
        expected = METHODS[DEFAULT_METHOD](engine.model, images, 2)[0]
        assert cats["method"] == DEFAULT_METHOD
        np.testing.assert_allclose(cats["heatmap"], expected, atol=1e-6)
        assert "labels" not in (await client.predict(picture())).json()
        reason = refusal(await client.predict(picture(), params={"threshold": 0.5}), 422)
        assert "a threshold is for models that predict any number of classes" in reason
        predicted = (await client.post("/v1/explain", content=picture())).json()["target"]["index"]
        assert predicted == int(engine.probabilities(torch.from_numpy(pixels)[None]).argmax())
        png = await client.post("/v1/explain?format=png", content=picture())
        assert png.headers["content-type"] == "image/png"
        assert np.ptp(np.asarray(Image.open(io.BytesIO(png.content)))) > 50
        answer = (await client.post("/v1/embed", content=picture())).json()
        np.testing.assert_allclose(
            answer["embedding"], engine.embed(torch.from_numpy(pixels)[None])[0].numpy(), atol=1e-6
        )


async def test_impossible_explanation_is_rejected(engine: TorchEngine) -> None:
    async with serving(engine) as client:
        for query, message in (
            ("method=rolout", "unknown method 'rolout'; nearest: rollout"),
            ("target=cow", "no class 'cow'"),
            ("target=7", "no class '7'"),
            ("target=" + 5000 * "9", "no class '999"),
            ("method=rollout&target=cat", "target does not apply to rollout, only to "),
            ("format=gif", "query.format"),
        ):
            assert message in refusal(await client.post(f"/v1/explain?{query}", content=picture()), 422)


async def test_model_without_a_head_serves_everything_except_classes() -> None:
    engine = torch_engine(head="none", class_names=())
    async with serving(engine) as client:
        assert "no head" in refusal(await client.post("/v1/predict", content=picture()), 501)
        message = refusal(await client.post("/v1/explain?method=grad-cam", content=picture()), 422)
        assert message == "grad-cam needs a head, which this model lacks; methods for it: attention, rollout"
        answer = await client.post("/v1/explain?method=rollout", content=picture())
        assert np.shape(answer.json()["heatmap"]) == engine.model.config.grid
        assert (
            len((await client.post("/v1/embed", content=picture())).json()["embedding"])
            == engine.config.embed_dim
        )
        assert (await client.post("/v1/attention", content=picture())).status_code == 200
        described = (await client.get("/v1/model")).json()
        assert (described["num_classes"], described["class_names"]) == (0, [])


async def test_exported_classifier_serves_predictions_only_with_clear_errors() -> None:
    async with serving(HeldEngine()) as client:
        for path, reason in (
            ("embed", "returns probabilities and no features: give the model that it was exported from"),
            ("explain", "this needs the torch model; the served model is a held engine"),
        ):
            assert reason in refusal(await client.post(f"/v1/{path}", content=grey(1)), 501)


async def test_model_page_and_metrics_name_the_model_that_is_served() -> None:
    engine = torch_engine()
    engine.name = 'runs "a"'
    async with serving(engine, max_body_mb=3) as client:
        about = (await client.get("/v1/model")).json()
        metrics = (await client.get("/metrics")).text
    assert about["name"] == 'runs "a"'
    assert (about["class_names"], about["preprocess"]) == (list(NAMES), engine.preprocess.to_dict())
    assert (about["engine"], about["limits"]["max_body_mb"]) == (engine.description, 3)
    assert about["architecture"] == engine.model.config.summary
    assert about["digest"] == engine.digest
    assert len(about["digest"]) == 64
    (line,) = [line for line in metrics.splitlines() if line.startswith("vitascope_model_info{")]
    assert line.endswith("} 1.0")
    for name in ("architecture", "digest"):
        assert f'{name}="{about[name]}"' in line
    assert r'name="runs \"a\""' in line


async def test_metrics_count_requests_and_batches_and_errors_reveal_nothing() -> None:
    async with serving(HeldEngine()) as client:
        await asyncio.gather(*(client.predict(grey(number)) for number in range(5)))
        await client.predict(b"x")
        await client.get("/secret/path")
        assert "poison" not in refusal(await client.predict(grey(POISON)), 500)
        text = (await client.get("/metrics")).text
    assert 'vitascope_requests_total{route="/v1/predict",status="200"} 5.0' in text
    assert 'vitascope_requests_total{route="/v1/predict",status="415"} 1.0' in text
    assert 'vitascope_requests_total{route="/v1/predict",status="500"} 1.0' in text
    assert 'vitascope_requests_total{route="other",status="404"} 1.0' in text
    assert 'vitascope_computed_total{work="predict"} 5.0' in text
    assert "vitascope_requests_in_flight 0.0" in text
    assert "secret" not in text


async def test_description_and_its_page_have_every_route_and_no_script(engine: TorchEngine) -> None:
    async with serving(engine) as client:
        described = (await client.get("/openapi.json")).json()
        page = (await client.get("/docs", headers={"Host": "localhost:<script>"})).text
    for path in ("/v1/predict", "/v1/explain", "/v1/embed", "/v1/model", "/livez", "/readyz", "/metrics"):
        assert path in described["paths"]
        assert path in page
    body = described["paths"]["/v1/predict"]["post"]["requestBody"]["content"]
    assert set(body) == {"image/*", "application/octet-stream", "multipart/form-data"}
    assert "<script" not in page
    assert "style=" not in page
    assert "https://" not in page
