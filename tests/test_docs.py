"""Every command and snippet of the README and the docs is run, in the order in which a reader meets them."""

import asyncio
import dataclasses
import functools
import itertools
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.run import get_args_parser
from torch.utils.flop_counter import FlopCounterMode

import vitascope as vs
from tests import forked
from tests.browser import HAS_BROWSER
from tests.deploy.server.served import listening
from tests.exported import copied_exports
from tests.local_hub import local_hub
from tests.models.text import write_clip
from tests.stores import Store
from tests.test_walkthrough import take_photos
from tests.trackers import install
from tests.training import undrawn
from vitascope.analysis.explain.methods import Method, methods_for
from vitascope.cache import cache_folder
from vitascope.cli import main
from vitascope.cli.parsing import documentation, parse
from vitascope.cli.ship import Export, Serve
from vitascope.data import datasets, listing, loading, pack, reading, splits, table_options
from vitascope.data.formats import archive, folder, hub, published, shards
from vitascope.data.rows import on_ray
from vitascope.deploy.labelling.server import LabelServer
from vitascope.deploy.server.server import by_name
from vitascope.models import hardware
from vitascope.models.engines.runtimes import open_engine
from vitascope.models.sizes import NAMED_SIZES, named_config
from vitascope.models.vision_model import VisionModel
from vitascope.models.weights import builtin
from vitascope.training import plan, start
from vitascope.training.options.groups import AugmentationOptions
from vitascope.training.options.recipes import RECIPES
from vitascope.training.run.trackers import TRACKERS
from vitascope.training.schedule import TimeBudget

ROOT = Path(__file__).parent.parent
DOCS = sorted((ROOT / "docs").rglob("*.md"))
READMES = (ROOT / "README.md", ROOT / "README.zh.md")
PAGES = [*READMES, ROOT / "CONTRIBUTING.md", *DOCS]
RUN_HERE = [
    page
    for page in (ROOT / "README.md", ROOT / "SKILL.md", *DOCS)
    if page.suffixes == [".md"] and page.stem != "walkthrough" and page.parent.name != "learn"
]
"""Pages whose steps this file runs. test_walkthrough.py and test_learn.py run the others, and the Chinese
pages have the steps of the English ones (test_docs_chinese.py)."""
DATA_PAGE = ROOT / "docs" / "data.md"
PERFORMANCE_PAGE = ROOT / "docs" / "performance.md"
BLOCK = re.compile(r"^```(\w*)\n(.*?)^```", re.MULTILINE | re.DOTALL)
NUMBER = re.compile(r"[-+−±]?\d+(?:[.,]\d+)*%?")
SHORT_DIGITS = {"epochs": 4, "depth": 2}
"""Of the recipe's 60 epochs and 3 blocks: enough to see that it learns."""
SHALLOW = 3
"""Blocks of the models that the pages name: their commands do the same with each further block."""
SMALLER = {"--depth": 2, "--epochs": 2}
"""The most of an option in a command of a page, which does the same with more."""
NOT_RUN = {"tensorboard", "pip", "aws", "make"}
"""Programs that a page may name: a server that never ends, an installation, copies to a bucket, which
`fill` makes."""
COPIED_EXPORTS = {"data.md", "scale.md", "python.md", "questions.md", "SKILL.md"}
"""Pages whose exported files nothing reads; an export takes longer than all else on a page."""
PLAIN = [page for page in {*PAGES, *RUN_HERE} if page.suffixes == [".md"]]
STORED = ("photos", "shards")
"""Folders of the reader that a page has copied to the bucket."""


def blocks(page: Path, language: str) -> list[str]:
    return [text for kind, text in BLOCK.findall(page.read_text(encoding="utf-8")) if kind == language]


@pytest.fixture(scope="module")
def shallow_built_in(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the first blocks of the built-in model."""
    folder = tmp_path_factory.mktemp("builtin")
    whole = vs.from_pretrained(builtin.DEFAULT)
    assert isinstance(whole, vs.VisionTransformer)
    model = vs.VisionTransformer(whole.config.replace(depth=SHALLOW))
    model.load_state_dict({name: whole.state_dict()[name] for name in model.state_dict()})
    model.preprocess, model.trust = whole.preprocess, whole.trust
    vs.save_pretrained(model, folder / builtin.DEFAULT)
    return folder


@pytest.fixture
def readers_folder(tmp_path: Path, shallow_built_in: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where a reader of a page stands: photos of two classes in folders, the same with their classes in the
    names, and a cache."""
    folder = tmp_path / "reader"
    monkeypatch.setattr(builtin, "__file__", str(shallow_built_in / "__init__.py"))
    for name, size in NAMED_SIZES.items():
        if size.options.get("depth", 0) > SHALLOW:
            monkeypatch.setitem(NAMED_SIZES, name, size._replace(options={**size.options, "depth": SHALLOW}))
    monkeypatch.setenv("VITASCOPE_CACHE", str(tmp_path / "cache"))
    take_photos(folder / "photos")
    (folder / "pets").mkdir()
    for photo in (folder / "photos").rglob("*.jpg"):
        shutil.copy(photo, folder / "pets" / f"{photo.parent.name}_{photo.name}")
    if find_spec("transformers") is not None:
        write_clip(folder / "clip")
    (folder / "decisions.csv").write_text("image,content,decision,label\n")  # that the page of an audit saves
    monkeypatch.chdir(folder)
    monkeypatch.setitem(RECIPES, "digits", RECIPES["digits"].replace(**SHORT_DIGITS))
    monkeypatch.setattr(start, "PUBLIC", {})
    monkeypatch.setattr("vitascope.training.loop.TimeBudget", short_budget)
    fewer_points = functools.partial(vs.explain.compare, steps=2, shares=(0.5,))
    monkeypatch.setattr(vs.explain, "compare", fewer_points)
    faithfulness = "vitascope.analysis.explain.faithfulness"
    # tests/explain/faithfulness compares all methods
    monkeypatch.setattr(f"{faithfulness}.compare.methods_for", fast_methods)
    fewer_maps = functools.partial(vs.explain.evidence, maps=19, steps=2)
    monkeypatch.setattr(import_module(f"{faithfulness}.evidence"), "evidence", fewer_maps)
    return folder


def fast_methods(model: VisionModel) -> dict[str, Method]:
    """The heatmap methods of one pass."""
    return {name: method for name, method in methods_for(model).items() if name in ("rollout", "libra")}


def short_budget(seconds: float, validation: float, **options: Any) -> TimeBudget:
    """The budget of a run with `--minutes`, shortened to seconds."""
    return TimeBudget(min(seconds, 2.0), validation, **options)


def test_demo_learns_the_digits(readers_folder, capsys) -> None:
    assert "vitascope train\n" in (ROOT / "Makefile").read_text(encoding="utf-8")
    assert main(["train"]) == 0
    out = capsys.readouterr().out
    ours, svc = (
        float(share) for share in re.findall(r"^(?:test)? +([\d.]+)% (?:right|scikit)", out, re.MULTILINE)
    )
    assert ours >= 70  # `make demo` trains all epochs of the recipe
    assert svc == 98.33
    paths = re.findall(r"^figure (.*)$", out, re.MULTILINE)
    assert paths
    assert all(Path(path).is_file() for path in paths)


def test_mirror_of_the_hub_that_the_chinese_readme_names_is_used() -> None:
    (mirror,) = re.findall(r"export HF_ENDPOINT=(\S+?)`", words_of(READMES[1]))
    code = (
        "import vitascope; from huggingface_hub import HfApi, constants; "
        "print(HfApi().endpoint, constants.HF_HUB_DISABLE_XET)"
    )
    env = {**os.environ, "HF_ENDPOINT": mirror, "HF_HUB_DISABLE_XET": "true"}
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=True)
    assert done.stdout.split() == [mirror, "True"]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_make_target_and_file_that_is_named_exists(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    targets = set(re.findall(r"^(\w+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    commands = " ".join([*blocks(page, "sh"), *re.findall(r"`([^`\n]+)`", text)])
    assert set(re.findall(r"\bmake (\w+)", commands)) <= targets
    for target in re.findall(r"\]\((?!https?:)([^)#]+)\)", text):
        assert (page.parent / target).exists(), target


def long_sentences(page: Path) -> list[str]:
    """Sentences of more than 35 words outside code and tables; a list item is one, and a link its text."""
    text = re.sub(r"(?m)^(?:[|#]|!\[|<!--).*$", "", BLOCK.sub("", page.read_text(encoding="utf-8")))
    text = re.sub(r"(?m)^ *(?:[-*]|\d+\.) ", "\n\n", re.sub(r"\]\([^)]*\)", "]", text))
    sentences = re.split(r"\n\s*\n|(?<=[.!?])[)\"*]*\s+(?=[A-Z`\"*(\[])", text)
    return [f"{page.name}: {' '.join(words)}" for words in map(str.split, sentences) if len(words) > 35]


def test_sentences_are_short() -> None:
    assert [sentence for page in PLAIN for sentence in long_sentences(page)] == []


def steps(page: Path) -> Iterator[tuple[str, str]]:
    """What a page tells its reader to do, in order: ("python", code), or a program and the whole line; and
    ("text", lines) that the commands right before it print."""
    whole, end = page.read_text(encoding="utf-8"), -1
    for block in BLOCK.finditer(whole):
        kind, text = block.groups()
        if kind == "python" or (kind == "text" and end >= 0 and not whole[end : block.start()].strip()):
            yield kind, text
        end = block.end() if kind == "sh" else -1
        for line in text.replace("\\\n", " ").splitlines() if kind == "sh" else []:
            if words := shlex.split(line, comments=True):
                is_code = words[:2] == ["python", "-c"]
                yield words[0], words[2] if is_code else line


def assert_printed(lines: str, printed: str) -> None:
    """Each line of a page was printed, in this order. A number stands for any number, `...` for any text."""
    rest = iter(printed.splitlines())
    for line in filter(lambda line: line.strip() != "...", lines.splitlines()):
        parts = re.split(rf"({NUMBER.pattern}|\.\.\.|\s+|█+)", line.strip())
        patterns = [re.escape(part) if place % 2 == 0 else any_of(part) for place, part in enumerate(parts)]
        assert any(re.fullmatch("".join(patterns), other.strip()) for other in rest), f"{line}\n{printed}"


def any_of(part: str) -> str:
    """The pattern of a part of a printed line that varies."""
    if part == "...":
        return ".*"
    return f"(?:{NUMBER.pattern})" if NUMBER.fullmatch(part) else r"\s+" if part.isspace() else "█*"


def torchrun(line: str, output: Path) -> None:
    """A line as torchrun reads it, in processes that are forked from this one instead of started anew."""
    asked = get_args_parser().parse_args(shlex.split(line)[1:])
    assert (asked.standalone, asked.module, asked.training_script) == (True, True, "vitascope.cli")

    def run(*arguments: str) -> None:
        assert main(arguments) == 0

    count, restarts = int(asked.nproc_per_node), asked.max_restarts
    status = forked.torchrun(count, output, run, *asked.training_script_args, restarts=restarts)
    assert status == 0, f"{line}\n{output.read_text()[-3000:]}"


def label_by_name(server: LabelServer, *_: object, **__: object) -> None:
    """Label all pictures as a reader would, by the beginning of their names."""
    names = enumerate(server.session.names)
    server.session.decide({number: (Path(name).name.partition("_")[0],) for number, name in names})


def curl(line: str, served: Serve) -> str:
    """The answer to a line as it is, but for the port, by the page's server; empty without curl."""
    documented = f"127.0.0.1:{served.settings.port}/"
    assert documented in line
    if shutil.which("curl") is None:
        return ""

    async def story() -> bytes:
        engines = {name: open_engine(ref, device="cpu") for name, ref in by_name(served.models).items()}
        protocols = served.settings.protocols
        async with listening(engines.get("", engines), protocols=protocols) as (_, (host, port)):
            words = shlex.split(line.replace(documented, f"{host}:{port}/"), comments=True)
            command = [*words, "--silent", "--show-error", "--fail-with-body"]
            done = await asyncio.to_thread(subprocess.run, command, capture_output=True, timeout=280)
            assert done.returncode == 0, f"{line}\n{done.stdout!r}\n{done.stderr!r}"
            return done.stdout

    return asyncio.run(story()).decode()


@pytest.mark.parametrize("page", RUN_HERE, ids=lambda page: page.name)
def test_page_runs_from_top_to_bottom(
    page: Path, readers_folder, monkeypatch, capsys, request, tmp_path
) -> None:
    text = page.read_text(encoding="utf-8")
    has_bucket = "s3://" in text and all(map(find_spec, ("s3fs", "moto")))
    bucket = request.getfixturevalue("s3_store") if has_bucket else None
    if "from datasets import" in text:
        pytest.importorskip("datasets", reason="datasets is not installed (vitascope[datasets])")
    if "vs.zero_shot" in text:
        pytest.importorskip("transformers", reason="transformers is not installed (vitascope[text])")
    monkeypatch.setattr(on_ray, "connected", lambda address: nullcontext())
    here = lambda loop, parts, task, wanted: parts.compute(task, loop.engine, wanted)  # noqa: E731
    monkeypatch.setattr(on_ray.RayLoop, "__call__", here)  # tests/data/rows/test_on_ray.py starts a Ray
    if "import pyarrow" in text:
        pytest.importorskip("pyarrow", reason="pyarrow is not installed (vitascope[parquet])")
    tracked = [install(monkeypatch, name) for name in TRACKERS if f"--tracker {name}" in text]
    hub = local_hub(monkeypatch, tmp_path / "hub") if "push_to_hub" in text else nullcontext()
    names: dict[str, object] = {}
    said = {}
    served = None
    printed, unseen = "", False
    monkeypatch.setattr("vitascope.deploy.labelling.label.serve_session", label_by_name)  # it never ends
    if page == READMES[0]:
        Path("photos/cat").rename("photos/bird")
    with hub as pushed:
        for program, step in steps(page):
            printed += "".join(capsys.readouterr())
            if program == "text":
                if not unseen:
                    assert_printed(step, printed)
                printed, unseen = "", False
                continue
            exports: AbstractContextManager[None] = nullcontext()
            if page.name in COPIED_EXPORTS and re.search(r"\bexport ", step.replace("vs.export(", "export ")):
                exports = copied_exports(request.getfixturevalue("exported_file")(".onnx"))
            if program == "python":
                with exports:
                    exec(compile(step, page.name, "exec"), names)  # noqa: S102 - our own page
            elif step.startswith("vitascope serve"):  # it never ends; test_server.py runs it
                served = parse(Serve, "serve", shlex.split(step, comments=True)[2:])
            elif program == "curl":
                assert served is not None, f"{step!r} stands before the server is started"
                print(curl(step, served))
            elif (program == "vitascope" and "s3://" in step and bucket is None) or (
                step.startswith("vitascope page") and not HAS_BROWSER
            ):
                unseen = True  # s3fs, moto or a browser is not installed
            elif program == "vitascope":
                if bucket is not None:
                    fill(bucket, readers_folder)
                words = shlex.split(step, comments=True)[1:]
                for option, word in itertools.pairwise(words):
                    if option in SMALLER:
                        words[words.index(option) + 1] = str(min(int(word), SMALLER[option]))
                with exports, undrawn():
                    assert main(words) == 0, f"{step}\n{capsys.readouterr().err}"
                said[step], err = capsys.readouterr()
                printed += said[step] + err
            elif program == "torchrun":
                torchrun(step, tmp_path / "torchrun.txt")
            else:
                assert program in NOT_RUN, f"no way to run {step!r}"
    if page == READMES[0]:
        assert "README.md" in pushed.repositories["me/photos"]
    assert all(service.runs for service in tracked)
    if page == DATA_PAGE:
        assert_broken_files_are_counted(said)
    if page.name == "deploy.md":
        files = {path.name for path in Path("runs/small/export").iterdir()}
        assert set(re.findall(r"`(model\.\w+)`", text)) == files == {"model.xml", "model.bin"}


def test_examples_of_the_pages_pass_a_type_checker(tmp_path: Path) -> None:
    pytest.importorskip("mypy", reason="mypy is not installed")
    for page in RUN_HERE:
        if texts := blocks(page, "python"):
            (tmp_path / f"{re.sub(r'[^a-z]', '_', page.stem.lower())}.py").write_text("\n".join(texts))
    command = [sys.executable, "-m", "mypy", "--config-file", str(ROOT / "pyproject.toml")]
    command += ["--cache-dir", str(ROOT / ".mypy_cache"), *map(str, sorted(tmp_path.glob("*.py")))]
    done = subprocess.run(
        command, capture_output=True, text=True, env={**os.environ, "MYPYPATH": str(ROOT / "src")}
    )
    assert done.returncode == 0, done.stdout + done.stderr


def fill(bucket: Store, folder: Path) -> None:
    """Copy what a page has copied to the bucket so far."""
    bucket.folder = folder
    for name in STORED:
        bucket.add(name)


def assert_broken_files_are_counted(said: dict[str, str]) -> None:
    """The page has put one beside the 24 photos, 20 of them trained on, and then measured and packed them."""
    measured = json.loads(said["vitascope evaluate runs/photos --data photos/ --json"])
    assert (measured["images"], measured["unreadable"], measured["trained_on"]) == (4, 1, 20)
    assert "of 4 images" in said["vitascope evaluate runs/photos --data photos.zip"]
    assert "left out" not in said["vitascope pack photos/ shards"]
    assert "left out: photos/dog/broken.jpg" in said["vitascope pack photos/ small --image-size 16"]


def test_contributing_has_make_alone() -> None:
    assert {program for program, _ in steps(ROOT / "CONTRIBUTING.md")} == {"make"}


def marked(page: Path, marker: str) -> str:
    """What stands between a page's markers."""
    found = re.search(
        rf"<!-- {marker} -->\n(.*?)<!-- /{marker} -->", page.read_text(encoding="utf-8"), re.DOTALL
    )
    assert found is not None, marker
    return found[1]


def table(page: Path, header: str) -> list[list[str]]:
    """The cells of the table whose first column is called so."""
    lines = page.read_text(encoding="utf-8").splitlines()
    start = next(number for number, line in enumerate(lines) if line.startswith(f"| {header} |"))
    rows = []
    for line in lines[start + 2 :]:
        if not line.startswith("|"):
            break
        rows.append([cell.strip() for cell in line.strip("|").split("|")])
    return rows


def test_every_kind_of_data_has_its_line() -> None:
    named = [set(re.findall(r"`([^`]+)`", cell)) for cell, _ in table(DATA_PAGE, "DATA")]
    assert set.union(*named) >= set(datasets.NAMES)
    assert {*archive.TAR_SUFFIXES, "photos.zip"} in named
    used = {
        word for program, step in steps(DATA_PAGE) if program == "vitascope" for word in shlex.split(step)
    }
    # Of the rest, these are in the commands of the page; downloads, CIFAR and IDX are in tests/data.
    assert {"photos/", "photos.zip", "photos-hf/", "shards"} <= used
    files = {file.name for parts in published.KNOWN_SETS.values() for file in parts}
    assert "cifar-10-python.tar.gz" in files


def test_numbers_and_names_of_the_data_page_are_those_of_the_code(monkeypatch) -> None:
    text = " ".join(DATA_PAGE.read_text(encoding="utf-8").split())
    assert splits.VAL_SHARE == splits.TEST_SHARE == reading.MAX_UNREADABLE == 0.1  # "a tenth"
    assert set(re.findall(r"`([^`]+)`", marked(DATA_PAGE, "suffixes"))) == listing.IMAGE_SUFFIXES
    assert {"valid", "validation"} < set(folder.SPLIT_FOLDERS["val"])
    for phrase in (
        f"fit into {loading.MEMORY_BUDGET // 2**30} GiB",
        f"fit into 1/{hardware.FREE_GPU_MEMORY_OVER_IMAGES} of the free memory of a GPU",
        f"or 1/{hardware.MEMORY_OVER_IMAGES} of a CPU's",
        f"{reading.READ_AHEAD} batches ahead",
        f"Shards are read {shards.GROUP} at a time",
        f"of quality {pack.JPEG_QUALITY}",
        f"at most {plan.SMALL_IMAGE} pixels",
        f"all others at {plan.LARGE_IMAGE}",
        "called `{}`, `{}`, `{}` or `{}`".format(*hub.LABEL_COLUMNS),
    ):
        assert phrase in text, phrase
    monkeypatch.setenv("VITASCOPE_CACHE", "/own")
    monkeypatch.setenv("XDG_CACHE_HOME", "/general")
    assert cache_folder() == Path("/own")
    monkeypatch.delenv("VITASCOPE_CACHE")
    assert cache_folder() == Path("/general/vitascope")
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert cache_folder() == Path("~/.cache/vitascope").expanduser()


def words_of(page: Path) -> str:
    return " ".join(page.read_text(encoding="utf-8").split())


def test_share_of_the_work_that_the_last_block_saves_is_as_stated() -> None:
    assert "saves a sixteenth of ViT-B/16's operations" in words_of(ROOT / "docs" / "architecture.md")
    with torch.device("meta"):
        model, image = vs.VisionTransformer(named_config("vit_b16")).eval(), torch.empty(1, 3, 224, 224)
    operations = []
    for tokens_read in (model, model.forward_features):  # the class token alone, every token
        with torch.no_grad(), FlopCounterMode(display=False) as counter:
            tokens_read(image)
        operations.append(counter.get_total_flops())
    assert round(1 / (1 - operations[0] / operations[1])) == 16


def test_outputs_of_the_last_block_change_by_rounding_as_stated() -> None:
    assert "outputs change by rounding, here by less than 1e-6" in words_of(ROOT / "docs" / "architecture.md")
    torch.manual_seed(0)
    model = vs.VisionTransformer(
        vs.ViTConfig(image_size=32, patch_size=8, embed_dim=32, depth=3, num_heads=2)
    )
    images = torch.randn(4, 3, 32, 32)
    with torch.no_grad():
        alone, among_all = model.eval().embed(images), model.forward_features(images)[:, 0]
    assert (alone - among_all).abs().max() < 1e-6


def test_memory_of_explanations_is_that_of_the_results() -> None:
    measured = (ROOT / "benchmarks" / "results" / "2026-11-22-explanations.md").read_text(encoding="utf-8")
    at_batch_8 = measured.split("## 224 pixels, batch 8")[1].split("## ")[0]
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in at_batch_8.splitlines()]
    found = {(row[0], row[1]): row for row in rows if len(row) == 8}
    stated = NUMBER.findall(PERFORMANCE_PAGE.read_text(encoding="utf-8").split("\n## ")[-1])
    for method, peer in (("rollout", "vit-explain's algorithm"), ("grad_cam", "pytorch-grad-cam")):
        ours, theirs = found[method, "vitascope"], found[method, peer]
        in_total, theirs_in_total = (float(row[7].replace(",", "")) for row in (ours, theirs))
        for share in (f"{in_total / theirs_in_total:.2f}", ours[6]):
            assert share in stated, (method, share)


def test_drop_of_accuracy_that_int8_allows_is_as_stated() -> None:
    assert Export(model="m").max_drop == 0.01
    assert "at most 1% of the test images (`--max-drop`)" in words_of(ROOT / "README.md")


def test_modules_of_timm_in_the_readme_are_those_of_the_page_of_checkpoints() -> None:
    (families,) = (row[1] for row in table(ROOT / "docs" / "checkpoints.md", "name") if row[0] == "`timm`")
    stated = re.findall(r"`(\w+\.py)`", families)
    assert stated
    for page in READMES:
        (said,) = re.findall(r"timm ?[(（](.*?)[)）]", words_of(page))
        assert re.findall(r"`(\w+\.py)`", said) == stated


def augmentation_table() -> str:
    """Every option of augmentation with its own words, and its value in three recipes."""
    said = {name: text.splitlines()[0].removesuffix(".") for name, text in documentation(AugmentationOptions)}
    assert list(said) == [field.name for field in dataclasses.fields(AugmentationOptions)]
    recipes = ("base", "small-data", "digits")
    lines = [f"| option | what | {' | '.join(f'`{name}`' for name in recipes)} |", "|---|---|--:|--:|--:|"]
    for name, words in said.items():
        values = [
            "by data" if (value := RECIPES[recipe].option(name)) is None else f"{value:g}"
            for recipe in recipes
        ]
        lines.append(f"| `--{name.replace('_', '-')}` | {words} | {' | '.join(values)} |")
    return "\n".join(lines) + "\n"


def test_table_of_augmentation_is_that_of_the_options() -> None:
    assert marked(DATA_PAGE, "augmentation") == augmentation_table()


def test_usual_names_of_columns_are_those_of_the_code() -> None:
    named = [re.findall(r"`([^`]+)`", line) for line in marked(DATA_PAGE, "columns").splitlines()[2:]]
    usual = {role: list(names) for role, names in table_options.USUAL.items()}
    usual["image"] += table_options.LESS_USUAL
    assert named == [[role, *names] for role, names in usual.items()]


def test_every_recipe_has_its_line() -> None:
    named = [cell.strip("`") for cell, *_ in table(ROOT / "docs" / "recipes.md", "`--recipe`")]
    assert sorted(named) == sorted(RECIPES)


def test_every_place_in_the_guide_of_the_architecture_exists() -> None:
    page = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    places = re.findall(r"`([a-z_]+/[a-z_/.]*)`", page)
    assert len(places) > 40
    package = ROOT / "src" / "vitascope"
    roots = (package, package / "weights", ROOT)
    missing = [
        place
        for place in places
        if not any((root / f"{place}{end}").exists() for root in roots for end in ("", ".py"))
    ]
    assert missing == []
