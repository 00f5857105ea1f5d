"""The masked autoencoder of transformers against ours: loss and gradients of the same weights and masks."""

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from tests.models import randomize, small_config
from tests.peers.comparison import relative_error
from tests.training.tasks import examples, pictures
from vitascope.models.vit import VisionTransformer
from vitascope.models.weights.preprocess import default_preprocess
from vitascope.training.options.groups import Masking
from vitascope.training.tasks.masked import MaskedAutoencoding, body_config

transformers = pytest.importorskip(
    "transformers", minversion="5", reason="transformers 5 is not installed (vitascope[peers])"
)

DIM, DECODER_DIM, PATCH = 32, 64, 8
BLOCK = {
    "norm1": "layernorm_before",
    "attention.proj": "attention.o_proj",
    "norm2": "layernorm_after",
    "mlp.fc1": "mlp.fc1",
    "mlp.fc2": "mlp.fc2",
}
# Our layers and theirs, outside of the blocks.
LAYERS = {
    "body.patch_embedding": "vit.embeddings.patch_embeddings.projection",
    "body.norm": "vit.layernorm",
    "decoder_embedding": "decoder.decoder_embed",
    "decoder_norm": "decoder.decoder_norm",
    "head": "decoder.decoder_pred",
}
BLOCKS = {"body.encoder.blocks": "vit.layers", "decoder.blocks": "decoder.decoder_layers"}


def their_tensors(theirs: dict[str, Tensor]) -> dict[str, Tensor]:
    """Their weights, or gradients, by our names."""
    layers = dict(LAYERS)
    found = {
        "body.class_token": theirs["vit.embeddings.cls_token"],
        "mask_token": theirs["decoder.mask_token"],
    }
    for our_blocks, their_blocks in BLOCKS.items():
        for index in range(2):
            ours, other = f"{our_blocks}.{index}", f"{their_blocks}.{index}"
            layers |= {f"{ours}.{name}": f"{other}.{their_name}" for name, their_name in BLOCK.items()}
            for kind in ("weight", "bias"):
                parts = [theirs[f"{other}.attention.{part}_proj.{kind}"] for part in "qkv"]
                found[f"{ours}.attention.qkv.{kind}"] = torch.cat(parts)
    for ours, other in layers.items():
        found |= {f"{ours}.{kind}": theirs[f"{other}.{kind}"] for kind in ("weight", "bias")}
    for kind in (
        "weight",
        "bias",
    ):  # their pixels are ordered by row, column and channel, ours by channel first
        pixels = found[f"head.{kind}"].unflatten(0, (PATCH, PATCH, 3))
        found[f"head.{kind}"] = pixels.movedim(2, 0).flatten(0, 2)
    return found


@pytest.fixture(scope="module")
def theirs() -> nn.Module:
    config = transformers.ViTMAEConfig(
        hidden_size=DIM,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=4 * DIM,
        decoder_hidden_size=DECODER_DIM,
        decoder_num_hidden_layers=2,
        decoder_num_attention_heads=DECODER_DIM // 32,
        decoder_intermediate_size=4 * DECODER_DIM,
        image_size=32,
        patch_size=PATCH,
        mask_ratio=0.75,
        norm_pix_loss=True,
        layer_norm_eps=1e-6,
    )
    model = randomize(transformers.ViTMAEForPreTraining(config))
    # The constructor leaves the fixed positions at zero.
    model.vit.embeddings.patch_embeddings.projection._is_hf_initialized = False
    model.vit.embeddings.initialize_weights()
    model.decoder.initialize_weights(16)
    nn.init.normal_(model.vit.embeddings.cls_token, std=0.5)
    return model


def test_loss_and_gradients_equal_those_of_transformers(theirs: nn.Module) -> None:
    sizes = {"embed_dim": DIM, "depth": 2, "num_heads": 4, "patch_size": PATCH}
    config = body_config(small_config(positions="sincos_2d", **sizes))
    masking = Masking(target="mae", decoder_dim=DECODER_DIM, decoder_depth=2)
    task = MaskedAutoencoding(masking=masking, config=config, preprocess=default_preprocess(config))
    ours = task.module(VisionTransformer(config))
    ours.load_state_dict(their_tensors(theirs.state_dict()))

    batch = examples(pictures(5, 3, 32, 32))
    loss, _ = task.loss(ours, batch)
    loss.backward()
    drawn = task.hidden(0, 0, np.arange(5))
    noise = torch.zeros(5, 16).scatter(1, drawn.places, 1.0)  # they keep the patches with the least noise
    noise += torch.arange(16) / 100
    expected = theirs(task.preprocess.normalize(batch.images), noise=noise).loss
    expected.backward()

    assert loss.item() == pytest.approx(expected.item(), rel=1e-5)
    gradients = {name: value.grad for name, value in theirs.named_parameters() if value.grad is not None}
    wanted = their_tensors(gradients)
    found = {name: value.grad for name, value in ours.named_parameters()}
    assert found.keys() == wanted.keys()
    largest = max(float(value.abs().max()) for value in wanted.values())
    for name, gradient in wanted.items():
        assert found[name] is not None
        # The gradient of the keys' bias is rounding only.
        if gradient.abs().max() > 1e-6 * largest:
            assert relative_error(found[name], gradient) < 1e-5, name
