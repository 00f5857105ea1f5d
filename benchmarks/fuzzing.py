"""Fuzz `vitascope serve` with schemathesis, which makes valid and invalid requests from its OpenAPI document.

    pip install schemathesis
    python benchmarks/fuzzing.py                          # 90 s each: plain, with a token, and under a prefix
    python benchmarks/fuzzing.py --variants token --seconds 300

The script serves a tiny model with random weights on loopback. The fuzzer reports 5xx responses, responses
that differ from the document (status, media type, headers, JSON) and invalid requests that are accepted. It
prints a curl command that repeats each of them, and the script then exits with status 1.

The check `positive_data_acceptance` is left out: the document declares the body as an image, but it can
specify neither the bytes of valid images nor the classes of a model, so the server rightly rejects many
generated requests.
"""

from __future__ import annotations

import argparse
import dataclasses
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from contest import positive
from reports import note
from serving import serving
from vitascope.models.config import ViTConfig
from vitascope.models.vision_model import build
from vitascope.models.weights.loading import save_pretrained

TOKEN = "a token for the time of this benchmark"
PREFIX = "/vitascope"
LEFT_OUT = "positive_data_acceptance"


@dataclasses.dataclass(frozen=True)
class Variant:
    """Options of the server, and the matching requests of its clients."""

    options: tuple[str, ...] = ()
    """Options of `vitascope serve`; TOKEN_FILE stands for a file with the token."""
    prefix: str = ""
    headers: tuple[str, ...] = ()


VARIANTS = {
    "plain": Variant(),
    "token": Variant(("--token-file", "TOKEN_FILE"), headers=(f"Authorization: Bearer {TOKEN}",)),
    "prefix": Variant(("--root-path", PREFIX), prefix=PREFIX),
}


def schemathesis() -> str:
    """The path of the program, beside this Python or on PATH."""
    beside = Path(sys.executable).with_name("schemathesis")
    found = str(beside) if beside.is_file() else shutil.which("schemathesis")
    if found is None:
        raise SystemExit(
            "fuzzing.py needs schemathesis, which is no dependency of vitascope: pip install schemathesis"
        )
    return found


def command(url: str, variant: Variant, seconds: int) -> list[str]:
    """The command that fuzzes a server."""
    headers = [word for header in variant.headers for word in ("--header", header)]
    return [
        *(schemathesis(), "run", f"{url}{variant.prefix}/openapi.json", *headers),
        *("--max-time", str(seconds), "--exclude-checks", LEFT_OUT),
    ]


def fuzz(name: str, folder: Path, seconds: int) -> int:
    """Serve and fuzz; returns schemathesis's exit status."""
    variant = VARIANTS[name]
    file = folder / "token"
    file.write_text(TOKEN, encoding="utf-8")
    options = [str(file) if option == "TOKEN_FILE" else option for option in variant.options]
    with serving(str(folder / "model"), *options) as server:
        note(f"{name}: {seconds} s at {server.url}{variant.prefix}")
        return subprocess.run(command(server.url, variant, seconds), cwd=folder).returncode


def main(argv: Sequence[str] | None = None) -> None:
    """Fuzz every variant."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seconds", type=positive, default=90, help="per variant (default 90)")
    parser.add_argument("--variants", nargs="+", choices=VARIANTS, default=list(VARIANTS))
    given = parser.parse_args(argv)
    schemathesis()
    sizes = {"image_size": 16, "patch_size": 8, "embed_dim": 16, "depth": 2, "num_heads": 2, "num_classes": 3}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        save_pretrained(build(ViTConfig.from_dict(sizes)), folder / "model")
        statuses = {variant: fuzz(variant, folder, given.seconds) for variant in given.variants}
    for variant, status in statuses.items():
        print(f"{variant}: {'nothing found' if status == 0 else 'see above'}")
    sys.exit(max(statuses.values()))


if __name__ == "__main__":
    main()
