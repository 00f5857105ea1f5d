import json
import logging
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from PIL import Image
from safetensors.torch import load_file, save_file

import vitascope as vs
from tests.models.text import CONTEXT, SHARED, SIDE, write_clip
from vitascope.models.text.text_model import read_text_model
from vitascope.models.text.zero_shot import PROMPTS, templates
from vitascope.models.weights.files import CheckpointError
from vitascope.models.weights.identification import open_source

transformers = pytest.importorskip("transformers", reason="transformers is not installed (vitascope[text])")
ANIMALS = ("a cat", "a dog", "a red photo")


@pytest.fixture
def clip(tmp_path: Path) -> Path:
    return write_clip(tmp_path / "clip")


def change_config(folder: Path, part: str | None = None, **values: object) -> None:
    config = json.loads((folder / "config.json").read_text())
    (config if part is None else config[part]).update(values)
    (folder / "config.json").write_text(json.dumps(config))


def vectors_of(folder: Path, texts: list[str]) -> torch.Tensor:
    model = transformers.CLIPTextModelWithProjection.from_pretrained(folder, projection_dim=SHARED)
    tokens = transformers.AutoTokenizer.from_pretrained(folder)(texts, padding=True, return_tensors="pt")
    with torch.no_grad():
        return F.normalize(model(**tokens).text_embeds, dim=1)


def test_logits_are_scaled_cosines_of_images_and_texts(clip: Path) -> None:
    images, body = torch.randn(3, 3, SIDE, SIDE), vs.from_pretrained(clip)
    model = vs.zero_shot(clip, ANIMALS, prompts="a photo of {}")
    texts = vectors_of(clip, [f"a photo of {name}" for name in ANIMALS])
    scale = load_file(clip / "model.safetensors")["logit_scale"].exp()
    with torch.no_grad():
        expected = scale * F.normalize(body(images), dim=1) @ texts.T
        torch.testing.assert_close(model(images), expected, rtol=0, atol=1e-5)
    assert model.config.class_names == ANIMALS
    assert model.config.outputs == "exclusive"
    assert model.config.gives_classes
    assert model.preprocess == body.preprocess


def test_vectors_of_several_prompts_are_averaged_to_unit_length(clip: Path) -> None:
    model = vs.zero_shot(clip, ANIMALS, prompts=["{}", "a photo of {}"])
    plain, photo = vectors_of(clip, [*ANIMALS]), vectors_of(clip, [f"a photo of {it}" for it in ANIMALS])
    torch.testing.assert_close(model.head.classes, F.normalize(plain + photo, dim=1), rtol=0, atol=1e-6)
    assert model.head.classes.shape == (len(ANIMALS), SHARED)


def test_prompts_are_a_template_several_or_a_named_set() -> None:
    assert templates(None) == ("a photo of {}.",)
    assert templates("a {} here") == ("a {} here",)
    assert templates(["{}", "a {}"]) == ("{}", "a {}")
    assert templates("photos") == PROMPTS["photos"]
    assert templates(["photos", "a {}"]) == (*PROMPTS["photos"], "a {}")
    assert all(template.count("{}") == 1 for each in PROMPTS.values() for template in each)


def test_prompts_and_classes_that_do_not_fit_are_rejected(clip: Path) -> None:
    for prompts in ("a photo", "{} and {}", []):
        with pytest.raises(vs.UserError):
            templates(prompts)
    with pytest.raises(vs.UserError, match="nearest: photo"):
        templates("photoz")
    twice, same = ("a cat", "a dog", "a cat"), ("a cat", "A  Cat")
    for classes, reason in (
        (("a cat", "  "), "class 2 of 2"),
        (twice, "more than once"),
        (same, "same text"),
    ):
        with pytest.raises(vs.UserError, match=reason):
            vs.zero_shot(clip, classes)
    for classes in ((), "cat", ("a cat",)):
        with pytest.raises(vs.UserError):
            vs.zero_shot(clip, classes)


def test_names_are_read_from_a_file_and_numbered_where_they_recur(
    clip: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "names.txt"
    path.write_text("\ufeffa crane\n\na cafe\u0301\na crane\na dog\n", encoding="utf-8")
    with caplog.at_level(logging.WARNING):
        model = vs.zero_shot(clip, [str(path)], prompts="{}")
    assert model.config.class_names == ("a crane", "a caf\u00e9", "a crane (2)", "a dog")
    assert "a crane (2)" in caplog.text
    known = vs.zero_shot(clip, ["a crane", "a caf\u00e9", "a dog"], prompts="{}").state_dict()["head.classes"]
    torch.testing.assert_close(model.state_dict()["head.classes"], known[[0, 1, 0, 2]])
    for content, reason in ((b"\xff\xfe\xff", "no list of names"), (b"\n", "no classes given")):
        path.write_bytes(content)
        with pytest.raises(vs.UserError, match=reason):
            vs.zero_shot(clip, [str(path)])
    with pytest.raises(vs.UserError, match=r"gone\.txt: no list of names"):
        vs.zero_shot(clip, [str(tmp_path / "gone.txt")])


def test_one_class_may_apply_or_not(clip: Path) -> None:
    model = vs.zero_shot(clip, ["a cat"], outputs="independent")
    assert model.config.outputs == "independent"
    assert model(torch.randn(2, 3, SIDE, SIDE)).shape == (2, 1)


def test_longer_texts_are_cut_and_said_once(clip: Path, caplog: pytest.LogCaptureFixture) -> None:
    long, longer = "cat " * CONTEXT, "dog " * CONTEXT
    length = read_text_model(open_source(clip)).length
    whole = next(text for count in range(99) if length(text := "a " * count) == CONTEXT)
    with caplog.at_level(logging.WARNING):
        vs.zero_shot(clip, [long, longer, whole], prompts="{}")
    (message,) = [record.getMessage() for record in caplog.records]
    assert message.startswith(f"longer than {CONTEXT} tokens, and cut: 'cat cat")
    assert "'a a" not in message  # it just fits


def test_result_is_a_model_like_others(clip: Path, tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    picture = Image.fromarray(rng.integers(0, 256, (40, 60, 3), dtype=np.uint8))
    model = vs.zero_shot(clip, ANIMALS)
    folder = vs.save_pretrained(model, tmp_path / "zero-shot")
    loaded = vs.from_pretrained(folder)
    images = torch.randn(2, 3, SIDE, SIDE)
    assert torch.equal(loaded(images), model(images))
    scores = [guess.score for guess in vs.Predictor(folder)(picture)]
    assert sum(scores) == pytest.approx(1, abs=1e-6)
    assert vs.explain.heatmap(loaded, picture).shape == (1, 4, 4)
    with pytest.raises(vs.UserError, match="timm has no model with head 'cosine'"):
        vs.save_pretrained(model, tmp_path / "timm", format="timm")
    model.head.classes.sum().backward()  # it may be trained
    assert model.head.classes.grad is not None


def test_result_is_exported(clip: Path) -> None:
    model, images = vs.zero_shot(clip, ANIMALS), torch.randn(2, 3, SIDE, SIDE)
    program = torch.export.export(model, (images,)).module()
    torch.testing.assert_close(program(images), model(images))


def test_model_without_texts_is_rejected() -> None:
    with pytest.raises(CheckpointError, match="cifar10: no text model, which words need"):
        vs.zero_shot("cifar10", ANIMALS)


def test_missing_library_is_named(clip: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(vs.UserError, match=r'pip install "vitascope\[text\]"'):
        vs.zero_shot(clip, ANIMALS)


def test_missing_broken_and_other_tokenizers_are_rejected_in_one_line(clip: Path) -> None:
    words = json.loads((clip / "vocab.json").read_text())
    words["more"] = len(words)
    (clip / "vocab.json").write_text(json.dumps(words))
    with pytest.raises(CheckpointError, match=rf"a tokenizer of {len(words)} tokens for a text model of"):
        vs.zero_shot(clip, ANIMALS)
    for content in ("", '{"model": {"type": "Evil"}}'):
        (clip / "tokenizer.json").write_text(content)
        with pytest.raises(vs.UserError, match=r"^[^\n]*cannot be loaded by transformers: [^\n]*$"):
            vs.zero_shot(clip, ANIMALS)
    (clip / "tokenizer.json").unlink()
    (clip / "merges.txt").unlink()
    with pytest.raises(vs.UserError, match=r"cannot be loaded by transformers: .*`vocab` and `merges`"):
        vs.zero_shot(clip, ANIMALS)
    (clip / "vocab.json").unlink()
    with pytest.raises(vs.UserError, match="the tokenizer's files are missing beside the weights, or belong"):
        vs.zero_shot(clip, ANIMALS)


UNFIT: list[tuple[str | None, dict[str, object], str]] = [
    ("text_config", {"vocab_size": 10**9}, "size mismatch"),
    ("text_config", {"num_hidden_layers": 10**9}, "num_hidden_layers 1000000000 in text_config, and 2"),
    ("text_config", {"num_hidden_layers": 1}, "num_hidden_layers 1 in text_config, and 2 layers"),
    ("text_config", {"num_attention_heads": "2"}, "num_attention_heads"),
    ("text_config", {"eos_token_id": [1, 2]}, "ends no text"),
    ("text_config", {"eos_token_id": 5}, "ends no text with eos_token_id 5"),
    ("vision_config", {"hidden_size": {}}, "dict"),
    (None, {"text_config": 3}, "text_config"),
    (None, {"model_type": ["clip"]}, "model_type"),
]


def test_configurations_that_do_not_fit_are_one_line(clip: Path) -> None:
    whole = (clip / "config.json").read_text()
    for part, values, reason in UNFIT:
        (clip / "config.json").write_text(whole)
        change_config(clip, part, **values)
        with pytest.raises(vs.UserError, match=reason) as caught:
            vs.zero_shot(clip, ANIMALS)
        assert "\n" not in str(caught.value)


def test_missing_tensor_of_the_text_model_is_named(clip: Path) -> None:
    state = load_file(clip / "model.safetensors")
    for name in ("text_projection.weight", "text_model.final_layer_norm.bias"):
        save_file({key: value for key, value in state.items() if key != name}, clip / "model.safetensors")
        with pytest.raises(vs.UserError, match=rf'Missing key\(s\) in state_dict: "{name}"'):
            vs.zero_shot(clip, ANIMALS)
