from pathlib import Path
from typing import Any, cast

import pytest
import torch

from tests.models import small_model, with_trust
from vitascope.analysis.explain.methods import heatmap, methods_for
from vitascope.analysis.explain.targets import FeatureCosine
from vitascope.errors import UserError
from vitascope.models.ensemble import Ensemble
from vitascope.models.heads import scores
from vitascope.models.options import Outputs
from vitascope.models.trust import CrossFamiliarity, Familiarity
from vitascope.models.vision_model import VisionModel, build
from vitascope.models.weights.loading import from_pretrained, save_pretrained
from vitascope.models.weights.transfer import adapted

IMAGES = torch.randn(3, 3, 32, 32, generator=torch.Generator().manual_seed(0))


def members(count: int = 3, **options: Any) -> list[VisionModel]:
    """Models of one configuration with other weights."""
    models = []
    for seed in range(count):
        torch.manual_seed(seed)
        models.append(small_model(**options))
    return models


def ensemble(count: int = 3, **options: Any) -> Ensemble:
    return Ensemble.of(cast("Any", members(count, **options))).eval()


@pytest.mark.parametrize("outputs", ["exclusive", "independent"])
@torch.no_grad()
def test_its_probabilities_are_the_mean_of_the_members(outputs: Outputs) -> None:
    models = members(outputs=outputs)
    found = scores(Ensemble.of(cast("Any", models)).eval()(IMAGES), outputs)
    wanted = torch.stack([scores(model(IMAGES), outputs) for model in models]).mean(dim=0)
    torch.testing.assert_close(found, wanted)


def test_its_cost_is_that_of_all_members() -> None:
    model = ensemble()
    assert model.config.num_parameters == sum(parameter.numel() for parameter in model.parameters())
    assert model.config.flops == 3 * model.members[0].config.flops
    assert model.embed(IMAGES).shape == (3, model.config.feature_dim)
    assert model.config.summary.startswith("3 models of ")


@torch.no_grad()
def test_it_is_the_same_from_its_folder(tmp_path: Path) -> None:
    model = ensemble()
    parts = [with_trust(member) for member in model.members]
    trust = parts[0].trust
    assert trust is not None
    familiarities = [cast("Familiarity", part.trust.familiarity) for part in parts if part.trust is not None]
    model.trust = type(trust)(temperature=1.0, sets=trust.sets, familiarity=CrossFamiliarity(familiarities))
    model.sharpness.fill_(1.5)
    restored = from_pretrained(save_pretrained(model, tmp_path / "model"))
    assert isinstance(restored, Ensemble)
    assert torch.equal(restored(IMAGES), model(IMAGES))
    assert restored.trust is not None
    assert restored.trust.familiarity is not None
    features = model.embed(IMAGES)
    assert torch.equal(restored.trust.familiarity(features), model.trust.familiarity(features))
    with pytest.raises(UserError, match=r"^it is an ensemble of 3 models: name one of them"):
        adapted(restored.config, None, "it", {})
    with pytest.raises(UserError, match=r"^timm has no model like this one, an ensemble of 3 models"):
        save_pretrained(model, tmp_path / "timm", format="timm")


def test_models_that_differ_are_rejected() -> None:
    with pytest.raises(UserError, match="one architecture"):
        Ensemble.of(cast("Any", [small_model(), small_model(depth=1)]))
    with pytest.raises(UserError, match="this model has none"):
        build(small_model(head="none").config.replace(members=2))


@pytest.mark.parametrize("name", methods_for(ensemble()))
def test_its_heatmaps_are_the_mean_of_those_of_its_members_for_one_class(name: str) -> None:
    model = ensemble()
    target = int(model(IMAGES[:1]).argmax())
    kind = methods_for(model)[name]
    maps = [kind(member, IMAGES[:1], target) for member in model.members]
    mean = torch.stack(maps).mean(dim=0)
    torch.testing.assert_close(heatmap(model, IMAGES[:1], name), mean / mean.max())


def test_the_likeness_to_a_picture_is_that_of_each_member() -> None:
    model = ensemble()
    other = FeatureCosine(model.embed(IMAGES[1:2]).detach())
    maps = [
        heatmap(member, IMAGES[:1], "grad-cam", FeatureCosine(member.embed(IMAGES[1:2]).detach()))
        for member in model.members
    ]
    mean = torch.stack(maps).mean(dim=0)
    torch.testing.assert_close(heatmap(model, IMAGES[:1], "grad-cam", other), mean / mean.max())


def test_familiarity_counts_the_images_of_all_members() -> None:
    torch.manual_seed(0)
    parts = [cast("Familiarity", with_trust(member).trust.familiarity) for member in ensemble().members]
    features = torch.randn(5, sum(len(part.center) for part in parts))
    less = sum(part.less_familiar(f) for part, f in zip(parts, features.chunk(3, dim=1), strict=True))
    images = sum(float(part.images) for part in parts)
    torch.testing.assert_close(CrossFamiliarity(parts)(features), (1 + less) / (1 + images))
