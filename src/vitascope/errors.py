"""The exception for errors that a user can cause and fix; the nearest valid name, for its message."""

import difflib
import os
import shlex
import signal
import unicodedata
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

_JOINERS = "\u200c\u200d"  # needed in Persian, Indic scripts and emoji


class UserError(ValueError):
    """A request that cannot be met: the message states what is wrong, with the numbers, and the way out.

    The command line prints it in one line and exits with status 2; anything else is a fault of ours and
    keeps its traceback. Names from files and paths may be anything, so the message is made `printable`.
    """

    def __init__(self, message: object) -> None:
        super().__init__(printable(str(message)))

    printed_elsewhere = False
    """Whether another process of the same run, which raises it too, prints it."""


def printable(text: str, limit: int = 1500) -> str:
    """Text from a file in one line that a terminal only displays, without the middle of more than `limit`
    characters. Line breaks and tabs become spaces; ESC, U+202E (right to left) and so on become escapes."""
    if len(text) > limit:
        kept = limit // 3
        text = f"{text[: limit - kept - 5]} ... {text[-kept:]}"
    if text.isprintable():
        return text
    shown = "".join(_shown(character) for character in text)
    return printable(shown, limit) if len(shown) > limit else shown


def _shown(character: str) -> str:
    if character.isprintable() or character in _JOINERS or unicodedata.category(character) == "Zs":
        return character
    return " " if character.isspace() else character.encode("unicode_escape").decode("ascii")


@contextmanager
def naming(path: object, name: str) -> Iterator[None]:
    """Put a name in place of a path that the user does not know into the errors of the work on it."""
    try:
        yield
    except UserError as error:
        error.args = (str(error).replace(str(path), name),)
        raise


class SourceError(UserError):
    """A fault of what many images come from: none of them is left out for it, as for a fault of its own."""


class DivergenceError(UserError):
    """A loss or a weight that is not finite."""


class Interrupted(Exception):  # noqa: N818 - a stop, not an error
    """Training was stopped by a signal, after saving a checkpoint or the finished model.

    Args:
        run: the run folder, or its URL.
        signum: the signal.
        finished: the model is saved, and only figures or the report are missing.

    Attributes:
        command: the command that continues the run.
    """

    def __init__(self, run: Path | str, signum: int, *, finished: bool = False) -> None:
        saved = f"the model is saved in {run}/model" if finished else "everything is saved"
        super().__init__(f"stopped by {signal.Signals(signum).name}; {saved}")
        self.run = run
        self.signum = signum
        self.finished = finished
        folder = shlex.quote(str(run))
        self.command = f"vitascope report {folder}" if finished else f"vitascope train --resume {folder}"


_SYNONYMS = {
    "accumulate": "accum_iter accumulate_grad_batches grad_accum gradient_accumulation_steps",
    "batch_size": "batch bs per_device_train_batch_size train_batch_size",
    "clip_grad": "clip_grad_norm grad_clip gradient_clip_val max_grad_norm",
    "corrupt": "mask_ratio masking_ratio",
    "data": "data_dir data_path dataset dataset_dir train_dir",
    "depth": "layers n_layers num_hidden_layers num_layers",
    "device": "cuda gpu gpus",
    "drop_path": "drop_path_rate stochastic_depth",
    "dropout": "drop drop_rate hidden_dropout_prob",
    "embed_dim": "d_model dim hidden_dim hidden_size width",
    "ema": "ema_decay model_ema model_ema_decay",
    "epochs": "max_epochs n_epochs num_epochs num_train_epochs",
    "gradient_checkpointing": "activation_checkpointing grad_checkpointing recompute",
    "image_size": "image_res img img_size imgsz input_size resolution size",
    "label_smoothing": "label_smoothing_factor smoothing",
    "lr": "base_lr learning_rate max_lr",
    "model": "arch architecture backbone model_name",
    "num_classes": "classes n_classes nb_classes num_labels",
    "num_heads": "heads n_heads num_attention_heads",
    "optimizer": "opt optim",
    "out": "output output_dir output_file",
    "patch_size": "patch",
    "patience": "early_stopping early_stopping_patience",
    "precision": "amp bf16 dtype fp16 half mixed_precision",
    "run": "log_dir logdir out out_dir output output_dir run_dir save_dir work_dir",
    "schedule": "lr_schedule lr_scheduler lr_scheduler_type sched scheduler",
    "seed": "random_seed random_state",
    "steps": "iterations iters max_iters max_steps num_steps",
    "top_k": "k topk",
    "tracker": "logger report_to",
    "weight_decay": "decay wd",
    "weights": "checkpoint ckpt finetune init_from pretrained",
    "workers": "j jobs n_jobs num_workers",
}
"""Our names of options, and what other libraries and programs call them."""


def suggestion(name: str, known: Iterable[str]) -> str:
    """`; nearest: vit_b16` for a name that means or resembles a known one, else the empty string."""
    if len(name) > 200 or name.isdecimal():  # no name that anybody typed; numbers do not resemble each other
        return ""
    plain = {each.lstrip("-").replace("-", "_"): each for each in known}
    synonyms = {
        word: plain[ours] for ours, words in _SYNONYMS.items() if ours in plain for word in words.split()
    }
    asked = name.lstrip("-").replace("-", "_")
    if asked.lower() in synonyms:
        return f"; nearest: {synonyms[asked.lower()]}"
    match = difflib.get_close_matches(asked, [*plain, *synonyms], n=1, cutoff=0.5)
    return f"; nearest: {(plain | synonyms)[match[0]]}" if match else ""


def nearest_path(ref: str) -> str:
    """`; nearest: runs/photos` for `run/photo`, where that exists and this does not; else an empty string."""
    found = Path()
    for part in Path(ref).parts:
        name = part
        if not (found / part).exists():  # take the closest name there
            try:
                names = {unicodedata.normalize("NFC", name): name for name in os.listdir(found)}
            except OSError:  # not a folder, or not readable
                return ""
            match = difflib.get_close_matches(unicodedata.normalize("NFC", part), names, n=1, cutoff=0.6)
            if not match:
                return ""
            name = names[match[0]]
        found /= name
    forms = {unicodedata.normalize("NFC", str(path)) for path in (found, Path(ref))}
    return f"; nearest: {found}{', in another Unicode form' if len(forms) == 1 else ''}"


class UnknownNameError(UserError):
    """A name that this version does not know: of an option, or of one of its choices."""


def check_choice(name: str, value: object, choices: Iterable[str]) -> None:
    """Reject a value that is not one of the choices, naming them."""
    choices = list(choices)
    if value not in choices:
        raise UnknownNameError(
            f"unknown {name} {value!r}{suggestion(str(value), choices)}; it is one of {', '.join(choices)}"
        )
