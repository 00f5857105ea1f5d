"""From texts to tokens, as transformers' and OpenCLIP's tokenizers of these models prepare them.

Facts: transformers 5.23.0, `models/{clip,siglip,siglip2}/tokenization_*.py`; open_clip 3, `tokenizer.py`.
"""

from __future__ import annotations

import dataclasses
import html
import json
import logging
import re
import string
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from vitascope.errors import UserError, printable
from vitascope.formatting import listed
from vitascope.text.tower import TextConfig
from vitascope.weights.families.openclip import section
from vitascope.weights.files import CheckpointError, read_json
from vitascope.weights.mapping import Source

if TYPE_CHECKING:
    from tokenizers import Tokenizer

MAX_BYTES = 1 << 27
"""Of a tokenizer's file; that of SigLIP 2 has 34 MB."""
MAX_CHARACTERS = 10_000
"""Of a text; a context has 64 or 77 tokens."""

START, END = "<|startoftext|>", "<|endoftext|>"
_PUNCTUATION = str.maketrans("", "", string.punctuation)
# CLIP's words: its marks, English contractions, letters, single digits, anything else that is no space.
_WORDS = r"<\|startoftext\|>|<\|endoftext\|>|'s|'t|'re|'ve|'m|'ll|'d|[\p{L}]+|[\p{N}]|[^\s\p{L}\p{N}]+"

log = logging.getLogger(__name__)


def _unspaced(text: str) -> str:
    return re.sub(r"\s+", " ", text).strip()


def canonical_text(text: str) -> str:
    """SigLIP's rule: lower case, no ASCII punctuation, single spaces."""
    return _unspaced(text.lower().translate(_PUNCTUATION))


def _open_clip(text: str) -> str:
    """OpenCLIP's first step, without ftfy's repair of wrongly decoded characters."""
    return html.unescape(html.unescape(text)).strip()


# What OpenCLIP's option `clean` does.
_CLEANING: dict[str, Callable[[str], str]] = {
    "lower": lambda text: _unspaced(_open_clip(text)).lower(),
    "whitespace": lambda text: _unspaced(_open_clip(text)),
    "canonicalize": lambda text: canonical_text(_open_clip(text).replace("_", " ")),
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class TextTokenizer:
    """Texts to tokens, int64 (B, T), all of the same length."""

    pipeline: Tokenizer
    clean: Callable[[str], str]
    """From a text to the one whose tokens are looked up."""
    context: int
    """T."""
    end: int | None
    """The id to add to each text, where `pipeline` does not."""
    padding: int
    """The id that fills the rest."""
    vocabulary: int
    """The number of tokens that the text model knows."""
    pads_left: bool

    def __call__(self, texts: Sequence[str]) -> Tensor:
        """The tokens of texts; longer ones are cut, with one warning.

        Raises:
            UserError: a text of more than `MAX_CHARACTERS`.
        """
        rows, cut = [], []
        for text in texts:
            if len(text) > MAX_CHARACTERS:
                raise UserError(f"a text of {len(text)} characters; the limit is {MAX_CHARACTERS}")
            tokens, whole = self._tokens(text)
            wrong = [token for token in tokens if type(token) is not int or not 0 <= token < self.vocabulary]
            if wrong:
                raise CheckpointError(
                    f"a tokenizer that gives the token {wrong[0]!r} for a text model of {self.vocabulary}"
                )
            rows.append(tokens)
            cut += [] if whole else [f"'{printable(text, 60)}'"]
        if cut:
            log.warning("longer than %d tokens, and cut: %s", self.context, listed(cut))
        return torch.tensor(rows)

    def _tokens(self, text: str) -> tuple[list[int], bool]:
        """The T tokens of a text, and whether they are all."""
        encoding = self.pipeline.encode(self.clean(text))
        tokens, whole = list(encoding.ids), not encoding.overflowing
        if self.end is not None and tokens[-1:] != [self.end]:
            whole = whole and len(tokens) < self.context
            tokens = [*tokens[: self.context - 1], self.end]
        rest = [self.padding] * (self.context - len(tokens))
        return (rest + tokens if self.pads_left else tokens + rest), whole


def read_tokenizer(source: Source, config: TextConfig) -> TextTokenizer:
    """The tokenizer beside a checkpoint.

    Raises:
        UserError: the library `tokenizers` is missing.
        CheckpointError: no tokenizer, or one of a kind that is not known, or of another vocabulary.
    """
    settings = _settings(source)
    pipeline = _pipeline(source)
    size = pipeline.get_vocab_size()
    if size != config.vocabulary:
        raise CheckpointError(
            f"{source.name}: a tokenizer of {size} tokens for a text model of {config.vocabulary}: it "
            "belongs to another model"
        )
    made = (_of_open_clip if "model_cfg" in source.config else _of_transformers)(source, settings, pipeline)
    pipeline.no_padding()
    pipeline.enable_truncation(config.context)
    tokenizer = TextTokenizer(pipeline=pipeline, context=config.context, vocabulary=config.vocabulary, **made)
    if config.readout == "eos" and config.eos_id not in tokenizer(["a"])[0]:
        raise CheckpointError(
            f"{source.name}: its tokenizer ends no text with eos_token_id {config.eos_id}, where the text "
            "model reads"
        )
    return tokenizer


def _settings(source: Source) -> Mapping[str, Any]:
    path = source.folder / "tokenizer_config.json"
    return read_json(path) if path.is_file() else {}


def _of_transformers(source: Source, settings: Mapping[str, Any], pipeline: Tokenizer) -> dict[str, Any]:
    kind = source.config["model_type"]
    usual = {"clip": "CLIPTokenizer", "siglip": "SiglipTokenizer", "siglip2": "Siglip2Tokenizer"}[str(kind)]
    name = re.sub("Fast$", "", str(settings.get("tokenizer_class") or usual))
    name = usual if name in ("PreTrainedTokenizer", "TokenizersBackend") else name
    # Cleaning, whether the class itself adds the end, its padding and the side of it.
    classes: dict[str, tuple[Callable[[str], str], bool, str, str]] = {
        "CLIPTokenizer": (str, False, END, "right"),
        "SiglipTokenizer": (canonical_text, True, "</s>", "right"),
        # Gemma's tokenizer, in lower case, as SigLIP 2 was trained.
        "Siglip2Tokenizer": (str.lower, False, "<pad>", "left"),
        "GemmaTokenizer": (str.lower, False, "<pad>", "left"),
    }
    if name not in classes:
        raise CheckpointError(f"{source.name}: tokenizer_class {name} is none of {', '.join(classes)}")
    clean, adds_end, pad, side = classes[name]
    if name == "SiglipTokenizer" and settings.get("do_lower_case") is False:
        raise CheckpointError(f"{source.name}: do_lower_case false; SigLIP's texts are in lower case")
    side = settings.get("padding_side") or side
    if side not in ("left", "right"):
        raise CheckpointError(f"{source.name}: padding_side {side!r} is none of left, right")
    end = _named(settings, "eos_token", "<eos>" if "<eos>" in pipeline.get_vocab() else "</s>")
    adds_end = adds_end or settings.get("add_eos_token") is True
    return {
        "clean": clean,
        "end": _id(source, pipeline, end) if adds_end else None,
        "padding": _id(source, pipeline, _named(settings, "pad_token", pad)),
        "pads_left": side == "left",
    }


def _of_open_clip(source: Source, settings: Mapping[str, Any], pipeline: Tokenizer) -> dict[str, Any]:
    text = section(source, "model_cfg", "text_cfg")
    other = text.get("hf_tokenizer_name")
    options = text.get("tokenizer_kwargs") or {}
    clean = options.get("clean", "whitespace" if other else "lower")
    if options.keys() - {"clean"} or clean not in _CLEANING:
        raise CheckpointError(
            f"{source.name}: tokenizer_kwargs {options!r}; only clean is read: {', '.join(_CLEANING)}"
        )
    made = {"clean": _CLEANING[clean], "end": None, "padding": text.get("pad_id", 0), "pads_left": False}
    if other:  # then transformers' tokenizer pads
        theirs = "</s>" if "</s>" in pipeline.get_vocab() else "<pad>"
        made["padding"] = _id(source, pipeline, _named(settings, "pad_token", theirs))
        end = "<eos>" if "<eos>" in pipeline.get_vocab() else "</s>"
        made["end"] = _id(source, pipeline, _named(settings, "eos_token", end))
    return made


def _named(settings: Mapping[str, Any], name: str, default: str) -> str:
    """A special token of tokenizer_config.json, which may be an object."""
    found = settings.get(name)
    found = found.get("content") if isinstance(found, Mapping) else found
    return found if isinstance(found, str) else default


def _id(source: Source, pipeline: Tokenizer, token: str) -> int:
    found = pipeline.token_to_id(token)
    if found is None:
        raise CheckpointError(f"{source.name}: its tokenizer has no token {printable(token, 60)}")
    return found


def _pipeline(source: Source) -> Tokenizer:
    """The tokenizer of `tokenizer.json`, or CLIP's of `vocab.json` and `merges.txt`."""
    try:
        from tokenizers import Tokenizer
    except ImportError as error:
        raise UserError(
            "words need the library tokenizers: pip install 'vitascope[text]' (or tokenizers)"
        ) from error
    whole = source.folder / "tokenizer.json"
    vocabulary, merges = source.folder / "vocab.json", source.folder / "merges.txt"
    files = [whole] if whole.is_file() else [vocabulary, merges]
    if not all(file.is_file() for file in files):
        also = " (spiece.model is not read)" if (source.folder / "spiece.model").is_file() else ""
        raise CheckpointError(
            f"{source.name}: no tokenizer.json, or vocab.json and merges.txt, beside the weights{also}; "
            "download those of the model's repository into the folder"
        )
    for file in files:
        if file.stat().st_size > MAX_BYTES:
            raise CheckpointError(f"{file}: {file.stat().st_size} bytes; a tokenizer has {MAX_BYTES} at most")
    try:
        return Tokenizer.from_file(str(whole)) if files == [whole] else _clip_pipeline(vocabulary, merges)
    except Exception as error:  # the library raises no narrower class
        raise CheckpointError(f"{files[0]}: not a tokenizer: {printable(str(error), 200)}") from error


def _clip_pipeline(vocabulary: Path, merges: Path) -> Tokenizer:
    """CLIP's byte-pair encoding, of lower-case words that end in `</w>`."""
    from tokenizers import Regex, Tokenizer, models, normalizers, pre_tokenizers, processors

    lines = merges.read_text(encoding="utf-8").splitlines()
    halves = [line.partition(" ") for line in lines if line and not line.startswith("#version")]
    pairs = [(left, right) for left, _, right in halves]
    ids = json.loads(vocabulary.read_text(encoding="utf-8"))
    model = models.BPE(ids, pairs, end_of_word_suffix="</w>", unk_token=END)
    pipeline = Tokenizer(model)
    pipeline.normalizer = normalizers.Sequence(
        [normalizers.NFC(), normalizers.Replace(Regex(r"\s+"), " "), normalizers.Lowercase()]
    )
    words = pre_tokenizers.Split(Regex(_WORDS), behavior="removed", invert=True)
    pipeline.pre_tokenizer = pre_tokenizers.Sequence(
        [words, pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    pipeline.add_special_tokens([START, END])
    end, start = ((token, pipeline.token_to_id(token) or 0) for token in (END, START))
    pipeline.post_processor = processors.RobertaProcessing(
        end, start, trim_offsets=False, add_prefix_space=False
    )
    return pipeline
