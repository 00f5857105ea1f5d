"""Small CLIPs with random weights and a real tokenizer, written without the libraries they belong to."""

import json
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

import tests.torchvision_operators  # noqa: F401 - transformers imports torchvision where it is installed

WIDTH, TEXT_WIDTH, SHARED, DEPTH, CONTEXT, SIDE = 16, 16, 12, 2, 12, 32
MERGES = ("c a", "ca t</w>", "d o", "do g</w>", "p h", "ph o", "t o</w>", "pho to</w>", "r e", "re d</w>")


def clip_words() -> tuple[dict[str, int], str]:
    """A vocabulary as CLIP's (every byte, also as the end of a word, the merged parts, two marks), and its
    `merges.txt`."""
    from tokenizers.pre_tokenizers import ByteLevel

    letters = sorted(ByteLevel.alphabet())
    words = [*letters, *(f"{letter}</w>" for letter in letters), *(pair.replace(" ", "") for pair in MERGES)]
    words += ["<|startoftext|>", "<|endoftext|>"]
    return {word: index for index, word in enumerate(words)}, "\n".join(["#version: 0.2", *MERGES, ""])


def write_words(folder: Path) -> int:
    """Write CLIP's two files of a tokenizer; returns the number of tokens."""
    vocabulary, merges = clip_words()
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "vocab.json").write_text(json.dumps(vocabulary), encoding="utf-8")
    (folder / "merges.txt").write_text(merges, encoding="utf-8")
    return len(vocabulary)


def write_clip(folder: Path, seed: int = 0) -> Path:
    """Write a CLIPModel of transformers with its tokenizer."""
    tokens = write_words(folder)
    sizes = {"num_hidden_layers": DEPTH, "num_attention_heads": 2, "intermediate_size": 24}
    text = {**sizes, "hidden_size": TEXT_WIDTH, "vocab_size": tokens, "max_position_embeddings": CONTEXT}
    vision = {**sizes, "hidden_size": WIDTH, "image_size": SIDE, "patch_size": 8}
    config = {
        "model_type": "clip",
        "projection_dim": SHARED,
        "text_config": {**text, "bos_token_id": tokens - 2, "eos_token_id": tokens - 1},
        "vision_config": vision,
    }
    (folder / "config.json").write_text(json.dumps(config))
    save_file(clip_state(tokens, seed), folder / "model.safetensors")
    return folder


def clip_state(tokens: int, seed: int) -> dict[str, Tensor]:
    """Random weights of a CLIPModel under its names."""
    shapes: dict[str, tuple[int, ...]] = {
        "text_model.embeddings.token_embedding.weight": (tokens, TEXT_WIDTH),
        "text_model.embeddings.position_embedding.weight": (CONTEXT, TEXT_WIDTH),
        "vision_model.embeddings.class_embedding": (WIDTH,),
        "vision_model.embeddings.patch_embedding.weight": (WIDTH, 3, 8, 8),
        "vision_model.embeddings.position_embedding.weight": (1 + (SIDE // 8) ** 2, WIDTH),
        "text_projection.weight": (SHARED, TEXT_WIDTH),
        "visual_projection.weight": (SHARED, WIDTH),
    }
    norms = ["text_model.final_layer_norm", "vision_model.pre_layrnorm", "vision_model.post_layernorm"]
    for tower, width in (("text_model", TEXT_WIDTH), ("vision_model", WIDTH)):
        for layer in range(DEPTH):
            prefix = f"{tower}.encoder.layers.{layer}"
            linear = {f"self_attn.{part}_proj": (width, width) for part in ("q", "k", "v", "out")}
            linear |= {"mlp.fc1": (24, width), "mlp.fc2": (width, 24)}
            for name, shape in linear.items():
                shapes |= {f"{prefix}.{name}.weight": shape, f"{prefix}.{name}.bias": shape[:1]}
            norms += [f"{prefix}.layer_norm1", f"{prefix}.layer_norm2"]
    generator = torch.Generator().manual_seed(seed)
    state = {
        name: torch.randn(shape, generator=generator) / shape[-1] ** 0.5 for name, shape in shapes.items()
    }
    for norm in norms:
        width = WIDTH if norm.startswith("vision") else TEXT_WIDTH
        noise = torch.randn(2, width, generator=generator) / 10
        state |= {f"{norm}.weight": 1 + noise[0], f"{norm}.bias": noise[1]}
    return {**state, "logit_scale": torch.tensor(2.6592)}
