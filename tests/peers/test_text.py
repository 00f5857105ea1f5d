"""The text models of CLIP, SigLIP and SigLIP 2, and their tokenizers, are those of transformers."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from PIL import Image

import vitascope as vs
from tests.text import clip_words, write_words
from vitascope.text.tokenizer import canonical_text, read_tokenizer
from vitascope.text.tower import read_tower
from vitascope.weights.identification import open_source

transformers = pytest.importorskip("transformers", reason="transformers is not installed (vitascope[peers])")

TEXTS = (
    "a photo of a cat.",
    "  A  Red\tPhoto, isn't it?  ",
    "12 dogs & 3 Cats!",
    "Ünïcode — naïve 犬",
    "",
    "cat dog " * 40,
)
TEXT = {"hidden_size": 24, "intermediate_size": 40, "num_hidden_layers": 2, "num_attention_heads": 3}
VISION = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
VISION |= {"image_size": 32, "patch_size": 8}
CONTEXT = 12


def perturbed(model: Any, seed: int = 0) -> Any:
    """A model in float64 with random numbers added to every weight, also those that start at zero."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.05 * torch.randn(parameter.shape, generator=generator)
    return model.double().eval()


def clip_model(eos: int, vocabulary: int, **options: Any) -> Any:
    text = {**TEXT, "vocab_size": vocabulary, "max_position_embeddings": CONTEXT, "eos_token_id": eos}
    config = transformers.CLIPConfig(
        text_config=text | options, vision_config=VISION | options, projection_dim=20
    )
    return perturbed(transformers.CLIPModel(config))


def siglip_model(vocabulary: int, **options: Any) -> Any:
    text = {**TEXT, "vocab_size": vocabulary, "max_position_embeddings": CONTEXT, "projection_size": 32}
    config = transformers.SiglipConfig(text_config=text | options, vision_config=VISION)
    return perturbed(transformers.SiglipModel(config))


def siglip2_model(vocabulary: int) -> Any:
    text = {**TEXT, "vocab_size": vocabulary, "max_position_embeddings": CONTEXT, "projection_size": 32}
    vision = {**{key: VISION[key] for key in VISION if key != "image_size"}, "num_patches": 16}
    config = transformers.Siglip2Config(text_config=text, vision_config=vision)
    return perturbed(transformers.Siglip2Model(config))


MODELS = {
    "clip": lambda: clip_model(89, 90),
    "clip with the largest id": lambda: clip_model(2, 90),
    "clip with gelu": lambda: clip_model(89, 90, hidden_act="gelu"),
    "siglip": lambda: siglip_model(90),
    "siglip with gelu": lambda: siglip_model(90, hidden_act="gelu"),
    "siglip2": lambda: siglip2_model(90),
}


@pytest.mark.parametrize("name", MODELS)
@torch.no_grad()
def test_vectors_of_texts_are_those_of_transformers(tmp_path: Path, name: str) -> None:
    theirs = MODELS[name]()
    theirs.save_pretrained(tmp_path)
    tokens = torch.randint(3, 89, (5, CONTEXT), generator=torch.Generator().manual_seed(1))
    tokens[torch.arange(5), torch.tensor([2, 5, 7, 11, 3])] = 89
    ours = read_tower(open_source(tmp_path)).double()
    # The file is read in float32: the same numbers in theirs.
    again = type(theirs).from_pretrained(tmp_path, dtype=torch.float32).double().eval()
    expected = again.get_text_features(input_ids=tokens).pooler_output
    torch.testing.assert_close(ours(tokens), expected, rtol=0, atol=1e-10)


@pytest.mark.parametrize("name", MODELS)
@torch.no_grad()
def test_logits_of_images_and_texts_are_those_of_transformers(tmp_path: Path, name: str) -> None:
    MODELS[name]().save_pretrained(tmp_path)
    theirs = transformers.AutoModel.from_pretrained(tmp_path, dtype=torch.float32).double().eval()
    tokens = torch.randint(3, 90, (5, CONTEXT), generator=torch.Generator().manual_seed(1))
    images = torch.randn(3, 3, 32, 32, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    tower, model = read_tower(open_source(tmp_path)).double(), vs.from_pretrained(tmp_path).double()
    cosines = F.normalize(model(images), dim=1) @ F.normalize(tower(tokens), dim=1).T
    logits = tower.scale.exp() * cosines + (0 if tower.bias is None else tower.bias)
    seen: dict[str, Any] = {"pixel_values": images}
    if name == "siglip2":  # whose processor cuts images into patches, with their channels last
        patches = images.unflatten(3, (-1, 8)).unflatten(2, (-1, 8)).permute(0, 2, 4, 3, 5, 1)
        seen = {"pixel_values": patches.flatten(3).flatten(1, 2)}
        seen |= {"pixel_attention_mask": torch.ones(3, 16), "spatial_shapes": torch.full((3, 2), 4)}
    expected = theirs(input_ids=tokens, **seen).logits_per_image
    torch.testing.assert_close(logits, expected, rtol=0, atol=1e-10)


def clip_with_tokenizer(folder: Path, whole: bool) -> Any:
    """A CLIP of transformers with a tokenizer that their class writes, or with CLIP's two files."""
    vocabulary, merges = clip_words()
    pairs = [tuple(line.split()) for line in merges.splitlines()[1:]]
    tokenizer = transformers.CLIPTokenizer(vocab=vocabulary, merges=pairs, model_max_length=CONTEXT)
    clip_model(len(vocabulary) - 1, len(vocabulary)).float().save_pretrained(folder)
    if whole:
        tokenizer.save_pretrained(folder)
    else:
        write_words(folder)
    return tokenizer


@pytest.mark.parametrize("whole", [True, False], ids=["tokenizer.json", "vocab.json and merges.txt"])
def test_tokens_of_clip_are_those_of_transformers(tmp_path: Path, whole: bool) -> None:
    theirs = clip_with_tokenizer(tmp_path, whole)
    source = open_source(tmp_path)
    ours = read_tokenizer(source, read_tower(source).config)(TEXTS)
    options = {"padding": "max_length", "truncation": True, "max_length": CONTEXT}
    assert ours.tolist() == theirs(list(TEXTS), **options).input_ids


@torch.no_grad()
def test_zero_shot_clip_has_the_logits_of_transformers(tmp_path: Path) -> None:
    tokenizer = clip_with_tokenizer(tmp_path, whole=True)
    processor = transformers.CLIPImageProcessorPil(size={"shortest_edge": 32}, crop_size=32)
    processor.save_pretrained(tmp_path)
    theirs = transformers.CLIPModel.from_pretrained(tmp_path).eval()
    names = ["cat", "Dog", "red photo"]
    prompts = ["a photo of a {}.", "the {}"]
    ours = vs.zero_shot(tmp_path, names, prompts=prompts)
    texts = [prompt.format(name) for name in names for prompt in prompts]
    rng = np.random.default_rng(0)
    picture = Image.fromarray(rng.integers(0, 256, (41, 60, 3), dtype=np.uint8))
    pixels = processor(picture, return_tensors="pt").pixel_values
    out = theirs(**tokenizer(texts, padding=True, return_tensors="pt"), pixel_values=pixels)
    rows = F.normalize(out.text_embeds.unflatten(0, (3, 2)).mean(dim=1), dim=1)
    expected = theirs.logit_scale.exp() * out.image_embeds @ rows.T
    torch.testing.assert_close(
        ours(ours.preprocess.normalize(torch.from_numpy(ours.preprocess.pixels(picture)))[None]),
        expected,
        rtol=0,
        atol=1e-5,
    )


def gemma(folder: Path, **settings: Any) -> Any:
    """A small tokenizer of SigLIP 2, trained on a few words."""
    from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE(unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    tokenizer.normalizer = normalizers.Replace(" ", "▁")
    tokenizer.pre_tokenizer = pre_tokenizers.Split("▁", "merged_with_previous")
    special = ["<pad>", "<eos>", "<bos>", "<unk>", "<mask>"]
    trainer = trainers.BpeTrainer(vocab_size=80, special_tokens=special, show_progress=False)
    tokenizer.train_from_iterator(["a photo of a cat", "two dogs running, a red car"] * 5, trainer)
    model = json.loads(tokenizer.to_str())["model"]
    merges = [tuple(pair) for pair in model["merges"]]
    made = transformers.Siglip2Tokenizer(vocab=model["vocab"], merges=merges, **settings)
    made.save_pretrained(folder)
    return transformers.AutoTokenizer.from_pretrained(folder)


@pytest.mark.parametrize("settings", [{}, {"padding_side": "right"}, {"add_eos_token": True}])
def test_tokens_of_siglip2_are_those_of_transformers(tmp_path: Path, settings: dict[str, Any]) -> None:
    theirs = gemma(tmp_path, **settings)
    siglip2_model(len(theirs)).float().save_pretrained(tmp_path)
    source = open_source(tmp_path)
    ours = read_tokenizer(source, read_tower(source).config)(TEXTS)
    options = {"padding": "max_length", "truncation": True, "max_length": CONTEXT}
    assert ours.tolist() == theirs(list(TEXTS), **options).input_ids


def unigram(folder: Path, *, adds_end: bool) -> Any:
    """A small tokenizer of SigLIP, as its `tokenizer.json` has it: sentencepiece's unigrams."""
    from tokenizers import Tokenizer, models, pre_tokenizers, processors

    words = [
        "▁a",
        "▁photo",
        "▁of",
        "▁cat",
        "▁red",
        "▁it",
        "isnt",
        "s",
        "▁",
        *"abcdefghijklmnopqrstuvwxyz0123",
    ]
    pieces = [("</s>", 0.0), ("<unk>", 0.0), *((word, -float(index + 1)) for index, word in enumerate(words))]
    tokenizer = Tokenizer(models.Unigram(pieces, unk_id=1))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.add_special_tokens(["</s>", "<unk>"])
    if adds_end:
        tokenizer.post_processor = processors.TemplateProcessing(
            single="$A </s>", pair="$A </s> $B </s>", special_tokens=[("</s>", 0)]
        )
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    return tokenizer


@pytest.mark.parametrize("adds_end", [True, False])
def test_tokens_of_siglip_are_canonical_ended_and_padded(tmp_path: Path, adds_end: bool) -> None:
    plain = unigram(tmp_path, adds_end=adds_end)
    siglip_model(plain.get_vocab_size()).float().save_pretrained(tmp_path)
    source = open_source(tmp_path)
    ours = read_tokenizer(source, read_tower(source).config)(TEXTS).tolist()
    assert len({len(row) for row in ours}) == 1
    for text, row in zip(TEXTS, ours, strict=True):
        ids = plain.encode(canonical_text(text), add_special_tokens=False).ids[: CONTEXT - 1]
        assert row == [*ids, *[0] * (CONTEXT - len(ids))], text


def test_canonical_texts_are_those_of_siglip() -> None:
    module = pytest.importorskip("transformers.models.siglip.tokenization_siglip")
    kind = module.SiglipTokenizer
    stub = SimpleNamespace(
        do_lower_case=True, remove_punctuation=lambda text: kind.remove_punctuation(None, text)
    )
    for text in (*TEXTS, "under_score", "“Quotes” – ¿dash?"):
        assert canonical_text(text) == kind.canonicalize_text(stub, text)


def test_zero_shot_siglip_has_a_sigmoid_for_each_class(tmp_path: Path) -> None:
    plain = unigram(tmp_path, adds_end=True)
    siglip_model(plain.get_vocab_size()).float().save_pretrained(tmp_path)
    theirs = transformers.SiglipModel.from_pretrained(tmp_path).eval()
    model = vs.zero_shot(tmp_path, ["cat", "red photo"], prompts="{}")
    images = torch.randn(2, 3, 32, 32)
    ids = torch.tensor(
        [row + [0] * (CONTEXT - len(row)) for row in (plain.encode(t).ids for t in ("cat", "red photo"))]
    )
    with torch.no_grad():
        expected = theirs(input_ids=ids, pixel_values=images).logits_per_image
        torch.testing.assert_close(model(images), expected, rtol=0, atol=1e-5)
    assert model.config.outputs == "independent"
    assert vs.zero_shot(tmp_path, ["cat", "red"], outputs="exclusive").config.outputs == "exclusive"
