"""A MODEL in a store: what belongs to it, copied to the local disk."""

import functools
import os
import re
from collections.abc import Sequence
from pathlib import Path

from vitascope import layout
from vitascope.models.weights.files import shard_files
from vitascope.models.weights.hub import FILE_ENDINGS, INDEX, OPEN_CLIP_CONFIG, SETTINGS, weights_name
from vitascope.remote import on_disk
from vitascope.remote.cache import copied
from vitascope.remote.stores import RemoteObject, find_object, list_folder, walk

_HUB_MODEL = re.compile(r"hf://([^/@]+/[^/@]+)(?:@([^/]+))?/?")


def local_model(ref: str | os.PathLike[str]) -> str | os.PathLike[str]:
    """The local copy of a model in a store, or the hub id of `hf://OWNER/NAME`; another MODEL as it is.

    Of a run, the copy has its files and `model/`; of a model folder, one form of the weights; of a file, its
    settings beside it.

    Raises:
        StoreError: no such model, or the store does not answer.
        UserError: the cache has no room for it.
        CheckpointError: several forms of weights, none of which is preferred.
    """
    if isinstance(ref, str) and (hub := _HUB_MODEL.fullmatch(ref)) is not None:
        return f"hf-hub:{hub[1]}" + (f"@{hub[2]}" if hub[2] else "")
    return on_disk(ref, _copied)


@functools.cache  # one version in a process, and one look at the store
def _copied(url: str) -> Path:
    found = find_object(url)
    folder, _, name = url.rpartition("/")
    if found is not None:
        return copied([found, *_settings_of(found, list_folder(folder)[0])], folder) / name
    objects, folders = list_folder(url)
    model = f"{url}/{layout.MODEL}"
    if any(object.name == layout.CONFIG for object in objects):
        objects += walk(model) if model in folders else []
    else:
        objects = _one_form(objects, url)
    return copied(objects, url)


def _settings_of(file: RemoteObject, beside: Sequence[RemoteObject]) -> list[RemoteObject]:
    """What belongs to a file of weights or an exported model: settings, and the other file of OpenVINO."""
    other = Path(file.name).with_suffix(".bin").name if file.url.endswith(".xml") else ""
    return [each for each in beside if each.name in (*SETTINGS, OPEN_CLIP_CONFIG, other) and each != file]


def _one_form(objects: Sequence[RemoteObject], url: str) -> list[RemoteObject]:
    """The objects of a model folder without other forms of its weights."""
    weights = weights_name(url, [object.name for object in objects])
    if weights is None:
        return list(objects)
    wanted = {weights}
    if weights.endswith(INDEX):
        index = next(object for object in objects if object.name == weights)
        wanted |= set(shard_files(copied([index], url) / weights).values())
    return [
        object
        for object in objects
        if object.name in wanted or not object.url.endswith(FILE_ENDINGS) or object.url.endswith(".json")
    ]
