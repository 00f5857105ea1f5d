"""The command that usually comes next: after each command, and after errors whose way out is a command."""

import re
import shlex
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from vitascope.layout import EXPORTED_SUFFIXES, is_finished

NEXT: dict[str, tuple[str, ...]] = {
    "train": ("vitascope serve {run}",),
    "pretrain": ("vitascope train --weights {run} --data FOLDER",),
    "probe": ("vitascope serve {run}",),
    "zero-shot": ("vitascope serve {out}",),
    "evaluate": ("vitascope export {model}", "vitascope serve {exported}"),
    "calibrate": ("vitascope evaluate {out} --data {data}",),
    "explain": (
        "vitascope explain {tested} --method {best}",
        "vitascope explain {model} PICTURE --method {best}",
        "vitascope explain {tested} --compare",
        "vitascope explain {model} {data} --compare",
        "vitascope serve {model}",
    ),
    "report": ("vitascope serve {run}",),
    "compare": ("vitascope serve {runs0} --beside {runs1}",),
    "similar": ("vitascope audit {folder} --out audit",),
    "predict": (
        "vitascope zero-shot {model} runs/zero-shot --classes {classes}",
        "vitascope explain {model} {picture}",
        "vitascope explain {model} {images} --compare",
        "vitascope serve {exported}",
    ),
    "label": ("vitascope train --data {labels_file}",),
    "next": ("vitascope probe {model} --data FOLDER",),
    "embed": ("vitascope similar {model} PICTURE {data}", "vitascope similar {exported} PICTURE {data}"),
    "export": ("vitascope embed {feature_file} FOLDER --out features.npz", "vitascope serve {file}"),
    "page": ("python -m webbrowser {page}",),
    "convert": ("vitascope serve {out}",),
    "compress": (
        "vitascope train --data {data} --weights {pruned}",
        "vitascope serve {model} --beside {out}",
    ),
    "audit": ("python -m webbrowser {page}",),
    "pack": ("vitascope train --data {out}",),
    "models": ("vitascope train --data FOLDER --model NAME",),
}
"""By command. The first line is taken whose names are all known: fields of the command that are not empty,
and what its `call` returns; `runs0` is the first of `runs`. `exported` is `model` where that is a file of
`vitascope export`, and `tested` where it is a run. Words in capitals are for the reader to fill in. `serve`
and `mcp` never end, and `learn` prints the next exercise."""

WAY_OUT = re.compile(
    r"(?:\brun|\bwith|\bby|;) `(vitascope \w[^`]* [^`]+)`"
    r"|(pip install (?:(['\"])vitascope\[\w+\]\3|\./lessons))"
)
"""How a message names the command that leads out of an error; other packages may be names from a file."""


def next_command(name: str, fields: Mapping[str, object]) -> str:
    """The command after one that ended well, by the fields of that and of its results; empty without one."""
    words: dict[str, str] = {}
    for field, value in fields.items():
        if isinstance(value, str | Path) or (isinstance(value, tuple) and value):
            quoted = [shlex.quote(str(word)) for word in (value if isinstance(value, tuple) else (value,))]
            words |= {f"{field}{place}": word for place, word in enumerate(quoted)}
            words[field] = " ".join(quoted)
    model = Path(str(fields.get("model")))
    if model.suffix in EXPORTED_SUFFIXES:
        words["exported"] = words.pop("model")
    elif is_finished(model):
        words["tested"] = words["model"]
    for line in NEXT.get(name, ()):
        with suppress(KeyError):
            command = line.format_map(words)
            # Not with a name that a terminal would obey, nor with all pictures of a long command.
            return command if command.isprintable() and len(command) < 500 else ""
    return ""


def way_out(error: str) -> str:
    """The command that an error's message names as the way out; empty if it names none."""
    if (match := WAY_OUT.search(error)) is None:
        return ""
    try:
        return shlex.join(shlex.split(match[1] or match[2]))  # names from files become words, not commands
    except ValueError:  # no closing quotation
        return ""
