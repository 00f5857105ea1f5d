"""The text models of CLIP and SigLIP with their tokenizers, as transformers and OpenCLIP compute them."""

import dataclasses
import logging
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from vitascope.errors import printable
from vitascope.formatting import listed
from vitascope.models.weights.families.openclip import section
from vitascope.models.weights.files import CheckpointError
from vitascope.models.weights.foreign import explaining
from vitascope.models.weights.mapping import Source

log = logging.getLogger(__name__)
BATCH = 64
KINDS = ("clip", "siglip", "siglip2")
"""The `model_type` in transformers' files of models of images and texts."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class TextModel:
    """From texts to vectors, whose cosine with the vectors of images means similarity."""

    module: nn.Module
    """The library's model, without its image model."""
    features: Callable[[Tensor], Tensor]
    """Tokens (B, T) to vectors (B, P), by `module`."""
    tokenize: Callable[[list[str]], Tensor]
    """Texts to tokens (B, T), cut to the context and padded."""
    length: Callable[[str], int]
    """The number of tokens of a text that is not cut."""
    context: int
    """T."""

    @property
    def scale(self) -> Tensor:
        """Of a pair's logit, exp(scale) cos + bias: (1,)."""
        return self.module.get_parameter("logit_scale").detach().cpu().reshape(1)

    @property
    def bias(self) -> Tensor | None:
        """Of a pair's logit, (1,); None for a model that was trained with a softmax."""
        bias = getattr(self.module, "logit_bias", None)
        return None if bias is None else bias.detach().cpu().reshape(1)

    def tokens(self, texts: Sequence[str]) -> Tensor:
        """The tokens of texts, int64 (B, T); one warning lists the texts that are cut."""
        if cut := [f"'{printable(text, 60)}'" for text in texts if self.length(text) > self.context]:
            log.warning("longer than %d tokens, and cut: %s", self.context, listed(cut))
        return self.tokenize(list(texts))

    @torch.inference_mode()
    def vectors(self, tokens: Tensor, device: torch.device) -> Tensor:
        """Unit vectors of texts, computed on a device: int64 (B, T) -> float32 (B, P), on the CPU."""
        self.module.to(device)
        parts = [self.features(part.to(device)).cpu() for part in tokens.split(BATCH)]
        return nn.functional.normalize(torch.cat(parts), dim=1)


def read_text_model(source: Source) -> TextModel:
    """The text model of a checkpoint with the tokenizer beside it, in float32.

    Raises:
        CheckpointError: a checkpoint without a text model, or a tokenizer that belongs to another model.
        UserError: the library is missing, or cannot read the files.
    """
    if "model_cfg" in source.config:
        return _of_open_clip(source)
    if source.config.get("model_type") in KINDS:
        return _of_transformers(source)
    raise CheckpointError(
        f"{source.name}: no text model, which words need; give a CLIP or a SigLIP, as transformers "
        "(CLIPModel, SiglipModel) or OpenCLIP writes it"
    )


def _of_transformers(source: Source) -> TextModel:
    with explaining("transformers", source.name, "text"):
        import transformers

        config = transformers.AutoConfig.from_pretrained(source.folder)
        options = config.text_config
        depth = source.count("text_model.encoder.layers.{i}.*")
        if options.num_hidden_layers != depth:  # before a billion layers are built
            raise CheckpointError(
                f"{source.name}: num_hidden_layers {options.num_hidden_layers} in text_config, and {depth} "
                "layers in the file"
            )
        with torch.device("meta"):
            model = transformers.AutoModel.from_config(config).eval()
        tensors = {name: x for name, x in source.tensors.items() if not name.endswith(".position_ids")}
        model.load_state_dict(tensors, strict=True, assign=True)
        del model.vision_model
        context = options.max_position_embeddings
        model.text_model.embeddings.position_ids = torch.arange(context)[None]  # which no file has
        tokenizer = transformers.AutoTokenizer.from_pretrained(source.folder)
    # SigLIP 2 was trained on lower case, which Gemma's tokenizer leaves to the caller.
    prepare = str if source.config["model_type"] == "clip" else str.lower

    def tokenize(texts: list[str]) -> Tensor:
        limits = {"padding": "max_length", "truncation": True, "max_length": context}
        return tokenizer([*map(prepare, texts)], **limits, return_tensors="pt").input_ids

    _check_vocabulary(source, len(tokenizer), options.vocab_size)
    end = options.eos_token_id  # 2 in old files, where transformers reads the token with the largest id
    if source.config["model_type"] == "clip" and end != 2 and end not in tokenize(["a"])[0].tolist():
        raise CheckpointError(
            f"{source.name}: its tokenizer ends no text with eos_token_id {end}, where the text model reads"
        )
    return TextModel(
        module=model.float(),
        features=lambda tokens: model.get_text_features(input_ids=tokens).pooler_output,
        tokenize=tokenize,
        length=lambda text: len(tokenizer(prepare(text), verbose=False).input_ids),
        context=context,
    )


def _of_open_clip(source: Source) -> TextModel:
    options = section(source, "model_cfg", "text_cfg")
    with explaining("open_clip", source.name, "text"):
        import open_clip

        place, handlers = f"local-dir:{source.folder}", logging.root.handlers[:]
        model = open_clip.create_model(place).eval().float()
        del model.visual
        tokenizer = open_clip.get_tokenizer(place)
        logging.root.handlers[:] = handlers  # `logging.info`, as OpenCLIP calls it, adds one
    other = getattr(tokenizer, "tokenizer", None)  # transformers', where the file names one
    _check_vocabulary(
        source, tokenizer.vocab_size if other is None else len(other), options.get("vocab_size", 49408)
    )

    def length(text: str) -> int:
        return (
            len(tokenizer.encode(text)) + 2
            if other is None
            else len(other(tokenizer.clean_fn(text)).input_ids)
        )

    return TextModel(
        module=model,
        features=model.encode_text,
        tokenize=tokenizer,
        length=length,
        context=tokenizer.context_length,
    )


def _check_vocabulary(source: Source, tokens: int, vocabulary: int) -> None:
    if tokens != vocabulary:
        raise CheckpointError(
            f"{source.name}: a tokenizer of {tokens} tokens for a text model of {vocabulary}: the "
            "tokenizer's files are missing beside the weights, or belong to another model"
        )
