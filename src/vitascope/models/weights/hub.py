"""Checkpoints from the Hugging Face hub and torchvision's server, in the caches of these libraries.

The requested revision is returned, or an error; never another revision.
"""

import contextlib
import difflib
import errno
import http.client
import logging
import re
import socket
import sys
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

from vitascope.errors import suggestion
from vitascope.models.weights.files import CheckpointError, other_form, rejection, shard_files
from vitascope.network import ask, client_errors, misunderstood, status_of, unreachable
from vitascope.storage import free_mb

log = logging.getLogger(__name__)

HUB_URL = "https://huggingface.co"
MAX_ID = 96  # characters: a rule of the hub that not every version of its client checks
SETTINGS = CONFIG, PREPROCESSOR = "config.json", "preprocessor_config.json"
INDEX = ".index.json"  # of a checkpoint in several files
OPEN_CLIP = (
    "open_clip_model.safetensors",
    "open_clip_pytorch_model.safetensors",
    "open_clip_pytorch_model.bin",
)
OPEN_CLIP_CONFIG = "open_clip_config.json"
_HUGGING_FACE = (
    "model.safetensors",
    f"model.safetensors{INDEX}",
    "pytorch_model.bin",
    f"pytorch_model.bin{INDEX}",
)
WEIGHTS = (*_HUGGING_FACE, *OPEN_CLIP)
TOKENIZER_FILES = (  # of a text model
    *("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "vocab.json", "merges.txt"),
    "spiece.model",
)
# transformers' `save_pretrained(..., variant="fp16")`, in one file
VARIANT = re.compile(r"(pytorch_)?model\.(?!.*-of-)[\w-]+\.(safetensors|bin)")
_OF_TIMM = re.compile("^hf[-_]hub:")  # how timm marks a name of the hub
_RNG_STATE = re.compile(r"rng_state\w*\.pth")  # of transformers' Trainer: no weights
FILE_ENDINGS = (".safetensors", ".pth", ".pth.tar", ".pt", ".bin", ".ckpt", ".npz", ".json")
TIMEOUT = 30.0  # seconds without a byte after which torchvision's server counts as unreachable
TORCHVISION_URL = "https://download.pytorch.org/models/"
TORCHVISION_FILES = {  # the first of a model is its default; eight digits of each name begin its SHA-256
    "vit_b_16.IMAGENET1K_V1": "vit_b_16-c867db91.pth",
    "vit_b_16.IMAGENET1K_SWAG_E2E_V1": "vit_b_16_swag-9ac1b537.pth",
    "vit_b_16.IMAGENET1K_SWAG_LINEAR_V1": "vit_b_16_lc_swag-4e70ced5.pth",
    "vit_b_32.IMAGENET1K_V1": "vit_b_32-d86f8d99.pth",
    "vit_l_16.IMAGENET1K_V1": "vit_l_16-852ce7e3.pth",
    "vit_l_16.IMAGENET1K_SWAG_E2E_V1": "vit_l_16_swag-4f3808c9.pth",
    "vit_l_16.IMAGENET1K_SWAG_LINEAR_V1": "vit_l_16_lc_swag-4d563306.pth",
    "vit_l_32.IMAGENET1K_V1": "vit_l_32-c7638314.pth",
    "vit_h_14.IMAGENET1K_SWAG_E2E_V1": "vit_h_14_swag-80465313.pth",
    "vit_h_14.IMAGENET1K_SWAG_LINEAR_V1": "vit_h_14_lc_swag-c1eb923e.pth",
}


def is_hub_id(ref: str) -> bool:
    """Whether a MODEL argument is `owner/name` by the hub's rule, or `hf-hub:name`, and no local path."""
    from huggingface_hub.errors import HFValidationError
    from huggingface_hub.utils import validate_repo_id  # type: ignore[attr-defined]

    name = _OF_TIMM.sub("", ref)
    owned = name.count("/") == 1 or name != ref
    if not owned or len(name) > MAX_ID or name.endswith(FILE_ENDINGS) or name.startswith("torchvision/"):
        return False
    with contextlib.suppress(HFValidationError):
        validate_repo_id(name)
        return not Path(ref).exists()
    return False


def fetch_hub(repo_id: str, revision: str | None = None) -> Path:
    """Fetch a model's settings and one form of its weights into the hub's cache; returns the folder. If the
    hub cannot be reached, that revision is used as it was last fetched completely, with a warning."""
    from huggingface_hub import constants

    repo_id, revision = _OF_TIMM.sub("", repo_id), revision or constants.DEFAULT_REVISION
    with _explaining(repo_id, revision):
        try:
            commit, sizes = ask(lambda: _described(repo_id, revision))
        except client_errors() as error:
            if not unreachable(error) or (folder := _cached(repo_id, revision)) is None:
                raise
            if not constants.HF_HUB_OFFLINE:
                log.warning("%s: no hub (%s); using %s", repo_id, type(error).__name__, folder)
            return folder
    with _explaining(repo_id, commit[:7]):
        return _download(repo_id, revision, commit, sizes)


def _described(repo_id: str, revision: str) -> tuple[str, dict[str, int | None]]:
    """The commit of a revision, and its files with their sizes in bytes, where the hub knows them."""
    from huggingface_hub import HfApi, constants

    limit = constants.HF_HUB_ETAG_TIMEOUT
    info = HfApi().model_info(repo_id, revision=revision, timeout=limit, files_metadata=True)
    if not re.fullmatch("[0-9a-f]{40}", str(info.sha)):
        raise misunderstood(f"the commit {info.sha!r}")
    sizes = {str(file.rfilename): file.size for file in info.siblings or []}
    known = {name for name, size in sizes.items() if type(size) is int and 0 <= size < 2**50}
    return str(info.sha), {name: size if name in known else None for name, size in sizes.items()}


def weights_name(place: object, names: Iterable[str]) -> str | None:
    """The name of the weights file in a folder: of `WEIGHTS`, or the one `VARIANT`, `.pth` or `.npz`."""
    names = sorted(name for name in names if "/" not in name and name[:1] != ".")  # hidden: not finished
    for found in (
        *([name] for name in WEIGHTS if name in names),
        [name for name in names if VARIANT.fullmatch(name)],
        [name for name in names if name.endswith(".pth") and not _RNG_STATE.fullmatch(name)],
        [name for name in names if name.endswith(".npz")],
    ):
        if len(found) > 1:
            raise rejection(
                place, f"several weights: {', '.join(found)}; give the path of one, downloaded if need be"
            )
        if found:
            return found[0]
    return None


def _download(repo_id: str, revision: str, commit: str, sizes: Mapping[str, int | None]) -> Path:
    """Fetch the snapshot of a commit, in an order that leaves it without weights until it is complete."""
    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import RemoteEntryNotFoundError

    def fetch(name: str, size: int | None = 0, *, of: str = commit) -> Path:
        return Path(ask(lambda: hf_hub_download(repo_id, name, revision=of), size=size))

    weights = weights_name(repo_id, sizes)
    if weights is None:
        if reason := other_form(list(sizes)):
            raise rejection(repo_id, reason)
        has = f"it has {', '.join(sorted(sizes)[:8])}" if sizes else "it is empty"
        raise rejection(repo_id, f"no weights in a readable form ({', '.join(WEIGHTS)}, .pth, .npz); {has}")
    for name in SETTINGS:
        with contextlib.suppress(RemoteEntryNotFoundError):  # the cache notes that there is none
            fetch(name)
    for name in (OPEN_CLIP_CONFIG, *TOKENIZER_FILES):
        if name in sizes:
            fetch(name, sizes[name])
    path = fetch(weights, sizes[weights])
    if weights.endswith(INDEX):
        for shard in sorted(set(shard_files(path).values())):
            fetch(shard, sizes.get(shard))
    with contextlib.suppress(RemoteEntryNotFoundError):  # only now does the cache's branch name this commit
        fetch(SETTINGS[0], of=revision)
    return path.parent


def _cached(repo_id: str, revision: str) -> Path | None:
    """The complete snapshot of a branch, a tag or a commit in the cache."""
    from huggingface_hub import try_to_load_from_cache

    reference = _cache_folder(repo_id) / "refs" / revision
    commit = reference.read_text().strip() if reference.is_file() else revision
    found = [folder for folder in _snapshots(repo_id) if folder.name.startswith(commit)]
    if len(found) != 1 or len(commit) < 7:
        return None
    for name in SETTINGS:
        if try_to_load_from_cache(repo_id, name, revision=found[0].name) is None:
            log.warning("%s: continuing without %s, which was never requested from the hub", repo_id, name)
    return found[0]


def _cache_folder(repo_id: str) -> Path:
    from huggingface_hub import constants

    return Path(constants.HF_HUB_CACHE) / f"models--{repo_id.replace('/', '--')}"


def _snapshots(repo_id: str) -> list[Path]:
    """The cached commits of a model whose weights are complete."""
    whole = []
    for folder in sorted((_cache_folder(repo_id) / "snapshots").glob("*")):
        with contextlib.suppress(OSError, CheckpointError):
            weights = weights_name(folder, (path.name for path in folder.iterdir() if path.is_file()))
            shards = shard_files(folder / weights) if weights and weights.endswith(INDEX) else {}
            if weights is not None and all((folder / shard).is_file() for shard in shards.values()):
                whole.append(folder)
    return whole


def cached_models() -> list[str]:
    """The ids of the models in the hub's cache whose weights are complete."""
    from huggingface_hub import constants

    folders = sorted(Path(constants.HF_HUB_CACHE).glob("models--*"))
    return [name for name in (path.name[8:].replace("--", "/") for path in folders) if _snapshots(name)]


def _instead(repo_id: str) -> str:
    """Similar models or other revisions in the cache, as the end of a message."""
    refs = [path for path in (_cache_folder(repo_id) / "refs").rglob("*") if path.is_file()]
    names = {path.read_text().strip(): f" ({path.name})" for path in refs}
    if commits := [folder.name for folder in _snapshots(repo_id)]:
        return "; in the cache: revision " + ", ".join(c[:7] + names.get(c, "") for c in commits)
    similar = difflib.get_close_matches(repo_id, cached_models(), cutoff=0.6)
    return f"; cached models: {', '.join(similar)}" if similar else ""


@contextlib.contextmanager
def _explaining(repo_id: str, revision: str) -> Iterator[None]:
    """Turn the exceptions of the hub's client into one line with the way out."""
    from huggingface_hub import constants

    try:
        yield
    except client_errors() as error:
        reason = _disk_reason(error, Path(constants.HF_HUB_CACHE), "HF_HOME")
        raise rejection(repo_id, reason or _hub_reason(error, repo_id, revision)) from error


def _hub_reason(error: Exception, repo_id: str, revision: str) -> str:
    from huggingface_hub import constants, errors

    if isinstance(error, errors.GatedRepoError):
        reason = f"gated; accept its licence at {HUB_URL}/{repo_id}, then log in with `hf auth login`"
    elif isinstance(error, errors.RepositoryNotFoundError):
        reason = "no such model on the hub, nor a local path; a private one looks the same: `hf auth login`"
    elif isinstance(error, errors.RevisionNotFoundError):
        reason = f"no revision {revision!r}; its branches and tags are at {HUB_URL}/{repo_id}/tree/main"
    elif status_of(error) == 401:
        reason = "the hub does not accept your token (401); log in with `hf auth login`, or unset HF_TOKEN"
    elif constants.HF_HUB_OFFLINE:
        reason = f"revision {revision!r} is not complete in the cache, and HF_HUB_OFFLINE is set"
    elif answer := unreachable(error):
        reason = f"{answer}, and revision {revision!r} is not complete in the cache; try again"
    else:
        reason = f"cannot be fetched: {error}"
    return reason + _instead(repo_id)


def _disk_reason(error: Exception, folder: Path, variable: str) -> str | None:
    """The reason that a cache cannot be written; None for another error."""
    code = error.errno if isinstance(error, OSError) else None
    if code in (errno.ENOSPC, errno.EDQUOT) or "No space left" in str(error):
        return f"the disk is full: {free_mb(folder):.0f} MB free at {folder}; free some, or set {variable}"
    if code in (errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR, errno.EEXIST):
        return f"cannot write to {folder} ({errno.errorcode[code]}); set {variable} to a folder of yours"
    return None


def torchvision_file(ref: str) -> str | None:
    """The value of `TORCHVISION_FILES` for a name of torchvision; None for a local path and other names."""
    # torchvision/vit_b_16 (its default weights), torchvision/vit_b_16.IMAGENET1K_V1, and torchvision's own
    # ViT_B_16_Weights.IMAGENET1K_V1
    asked = re.fullmatch(r"(?:torchvision/(\w+)|(ViT_\w+)_Weights)(?:\.(\w+))?", ref)
    if asked is None or Path(ref).exists():
        return None
    model, weights = (asked[1] or asked[2]).lower(), asked[3]
    default = next((name for name in TORCHVISION_FILES if name.startswith(f"{model}.")), f"{model}.")
    name = default if weights in (None, "DEFAULT") else f"{model}.{weights}"
    if name not in TORCHVISION_FILES:
        raise rejection(ref, f"torchvision has no such ViT{suggestion(name, TORCHVISION_FILES)}")
    return TORCHVISION_FILES[name]


def fetch_torchvision(name: str) -> Path:
    """A file of `TORCHVISION_FILES` in torch hub's cache, fetched and checked if absent."""
    import torch

    folder = Path(torch.hub.get_dir()) / "checkpoints"
    path, url = folder / name, TORCHVISION_URL + name
    if path.is_file():
        return path
    limit = socket.getdefaulttimeout()
    socket.setdefaulttimeout(TIMEOUT)  # torch's download has none
    try:
        folder.mkdir(parents=True, exist_ok=True)
        prefix = name.rsplit("-")[-1].split(".")[0]
        torch.hub.download_url_to_file(url, str(path), prefix, progress=sys.stderr.isatty())
    except (OSError, RuntimeError, http.client.HTTPException) as error:  # the second: another digest
        reason = f"cannot be fetched: {error}; it is not in {folder} either"
        raise rejection(url, _disk_reason(error, folder, "TORCH_HOME") or reason) from error
    finally:
        socket.setdefaulttimeout(limit)
    return path
