"""Zero-shot classifiers of CLIP, SigLIP and SigLIP 2 have the logits of transformers."""

import io
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from PIL import Image

import vitascope as vs
from tests.models.text import clip_words, write_words

transformers = pytest.importorskip("transformers", reason="transformers is not installed (vitascope[text])")

NAMES, PROMPTS = ["cat", "Dog", "Red photo, isn't it?"], ["a photo of a {}.", "the {}"]
TEXTS = [prompt.format(name) for name in NAMES for prompt in PROMPTS]
SIZES = {"intermediate_size": 40, "num_hidden_layers": 2}
TEXT = {**SIZES, "hidden_size": 24, "num_attention_heads": 3}
VISION = {**SIZES, "hidden_size": 32, "num_attention_heads": 4, "image_size": 32, "patch_size": 8}
CONTEXT = 24


def perturbed(model: Any) -> Any:
    """A model with random numbers added to every weight, also those that start at zero."""
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.05 * torch.randn(parameter.shape, generator=generator)
    return model.eval()


def write_clip(folder: Path, largest: bool, whole: bool, act: str = "quick_gelu") -> Any:
    """Write a CLIP with its tokenizer in `tokenizer.json`, or in CLIP's two files; `largest`: with the
    `eos_token_id` 2 of old files, by which the token with the largest id is read."""
    vocabulary, merges = clip_words()
    pairs = [tuple(line.split()) for line in merges.splitlines()[1:]]
    tokenizer = transformers.CLIPTokenizer(vocab=vocabulary, merges=pairs, model_max_length=CONTEXT)
    text = {"vocab_size": len(vocabulary), "max_position_embeddings": CONTEXT, "hidden_act": act}
    text |= {"bos_token_id": len(vocabulary) - 2, "eos_token_id": 2 if largest else len(vocabulary) - 1}
    config = transformers.CLIPConfig(
        text_config=TEXT | text, vision_config=VISION | {"hidden_act": act}, projection_dim=20
    )
    perturbed(transformers.CLIPModel(config)).save_pretrained(folder)
    if whole:
        tokenizer.save_pretrained(folder)
    else:
        write_words(folder)
    return tokenizer


def write_siglip(folder: Path, tokenizer: Any) -> None:
    text = {**TEXT, "vocab_size": len(tokenizer), "max_position_embeddings": CONTEXT, "projection_size": 32}
    config = transformers.SiglipConfig(text_config=text, vision_config=VISION)
    perturbed(transformers.SiglipModel(config)).save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def picture_and_pixels(model: Any, processor: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """The pixels of a picture by our preprocessing and by a processor, (1, 3, 32, 32) each."""
    picture = Image.fromarray(np.random.default_rng(0).integers(0, 256, (41, 60, 3), dtype=np.uint8))
    ours = model.preprocess.normalize(torch.from_numpy(model.preprocess.pixels(picture))[None])
    return ours, processor(picture, return_tensors="pt").pixel_values


@pytest.mark.parametrize(
    ("largest", "whole", "act"),
    [(False, True, "quick_gelu"), (True, False, "quick_gelu"), (False, False, "gelu")],
)
@torch.no_grad()
def test_zero_shot_clip_has_the_logits_of_transformers(
    tmp_path: Path, largest: bool, whole: bool, act: str
) -> None:
    tokenizer = write_clip(tmp_path, largest, whole, act)
    processor = transformers.CLIPImageProcessorPil(size={"shortest_edge": 32}, crop_size=32)
    processor.save_pretrained(tmp_path)
    theirs = transformers.CLIPModel.from_pretrained(tmp_path).eval()
    model = vs.zero_shot(tmp_path, NAMES, prompts=PROMPTS)
    ours, pixels = picture_and_pixels(model, processor)
    out = theirs(**tokenizer(TEXTS, padding=True, return_tensors="pt"), pixel_values=pixels)
    rows = F.normalize(out.text_embeds.unflatten(0, (3, 2)).mean(dim=1), dim=1)
    expected = theirs.logit_scale.exp() * out.image_embeds @ rows.T
    torch.testing.assert_close(model(ours), expected, rtol=0, atol=1e-5)


def sentencepiece_tokenizer(folder: Path) -> Any:
    sentencepiece = pytest.importorskip("sentencepiece")
    texts = ["a photo of a cat", "two dogs running, a red car", "the quick brown fox jumps over the lazy dog"]
    content = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        **{"sentence_iterator": iter(texts * 20), "model_writer": content, "vocab_size": 34},
        **{"eos_id": 0, "unk_id": 1, "pad_id": -1, "bos_id": -1, "minloglevel": 2},
    )
    (folder / "trained.model").write_bytes(content.getvalue())
    return transformers.SiglipTokenizer(str(folder / "trained.model"), model_max_length=CONTEXT)


def gemma(**settings: Any) -> Any:
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
    return transformers.Siglip2Tokenizer(vocab=model["vocab"], merges=merges, **settings)


TOKENIZERS = {
    "sentencepiece": sentencepiece_tokenizer,
    "gemma": lambda folder: gemma(),
    "gemma, ended and padded right": lambda folder: gemma(padding_side="right", add_eos_token=True),
}


@pytest.mark.parametrize("name", TOKENIZERS)
@torch.no_grad()
def test_zero_shot_siglip_has_the_sigmoids_of_transformers(tmp_path: Path, name: str) -> None:
    write_siglip(tmp_path, TOKENIZERS[name](tmp_path))
    theirs = transformers.SiglipModel.from_pretrained(tmp_path).eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path)
    model, images = vs.zero_shot(tmp_path, NAMES, prompts="{}"), torch.randn(2, 3, 32, 32)
    ids = tokenizer(NAMES, padding="max_length", max_length=CONTEXT, truncation=True, return_tensors="pt")
    expected = theirs(input_ids=ids.input_ids, pixel_values=images).logits_per_image
    torch.testing.assert_close(model(images), expected, rtol=0, atol=1e-5)
    assert model.config.outputs == "independent"
    assert vs.zero_shot(tmp_path, ["cat", "red"], outputs="exclusive").config.outputs == "exclusive"


@torch.no_grad()
def test_text_model_of_siglip2_is_that_of_transformers(tmp_path: Path) -> None:
    tokenizer = gemma()
    text = {**TEXT, "vocab_size": len(tokenizer), "max_position_embeddings": CONTEXT, "projection_size": 32}
    vision = {**{key: VISION[key] for key in VISION if key != "image_size"}, "num_patches": 16}
    config = transformers.Siglip2Config(text_config=text, vision_config=vision)
    theirs = perturbed(transformers.Siglip2Model(config))
    theirs.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    model, images = vs.zero_shot(tmp_path, NAMES, prompts="{}"), torch.randn(2, 3, 32, 32)
    ids = tokenizer(NAMES, padding="max_length", max_length=CONTEXT, truncation=True, return_tensors="pt")
    # Its processor cuts images into patches, with their channels last.
    patches = images.unflatten(3, (-1, 8)).unflatten(2, (-1, 8)).permute(0, 2, 4, 3, 5, 1)
    seen = {"pixel_values": patches.flatten(3).flatten(1, 2)}
    seen |= {"pixel_attention_mask": torch.ones(2, 16), "spatial_shapes": torch.full((2, 2), 4)}
    expected = theirs(input_ids=ids.input_ids, **seen).logits_per_image
    torch.testing.assert_close(model(images), expected, rtol=0, atol=1e-5)
