"""The command line: its output, its files and its errors."""

import ast
import builtins
import contextlib
import importlib.metadata
import importlib.util
import io
import itertools
import json
import math
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

import vitascope
from tests.cli import SHAPE, SHORT, colours, error_line, place_at, write_place
from tests.forked import ending, fork
from tests.models import count_parameters, named_on_meta, on_meta, small_model
from tests.test_architecture import imports
from tests.training import undrawn
from vitascope import __version__, runs
from vitascope.__main__ import main as installed
from vitascope.analysis.report import write
from vitascope.cli import COMMANDS, main
from vitascope.cli.parsing import fields_of, options_by_name, parse
from vitascope.cli.train import Train
from vitascope.data.samples import PHOTOS
from vitascope.models.sizes import NAMED_SIZES, list_models, named_config
from vitascope.models.weights.loading import save_pretrained
from vitascope.training.options.recipes import RECIPES, TrainConfig

ROOT = Path(vitascope.__file__).parent
MASKING = {"masking", "target", "corrupt", "decoder_dim", "decoder_depth"}
DISTILLATION = {"teacher", "distill", "distill_weight", "temperature"}
BALANCE = {"balance", "class_weights", "sampling"}
HELP_SOURCES = [
    *(ROOT / "training" / "options" / f"{name}.py" for name in ("groups", "recipes")),
    ROOT / "data" / "table_options.py",
    ROOT / "models" / "engines" / "compute.py",
    *sorted((ROOT / "cli").glob("*.py")),
    ROOT / "deploy" / "server" / "settings.py",
]


def content(folder: Path) -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> SimpleNamespace:
    """A folder with data and a finished run of a tiny model, with figures and a report."""
    return place_at(write_place(tmp_path_factory.mktemp("cli")))


# --- help


@pytest.mark.parametrize("argv", [[], ["--help"], ["-h"], ["help"], ["help", "--help"]])
def test_help_lists_every_command(argv: list[str], capsys) -> None:
    assert main(argv) == 0
    out = capsys.readouterr().out
    assert out.startswith("usage: vitascope COMMAND")
    for command in COMMANDS:
        assert f"\n  {command}" in out


@pytest.mark.parametrize("command", COMMANDS)
def test_help_of_a_command_lists_its_options(command: str, capsys) -> None:
    fields = fields_of(COMMANDS[command])
    names = {"--help": "", "--to": "--format"}  # the first name of one option
    listed = {names.get(name, name) for name in listed_options([command, "--help-all"], capsys)} - {""}
    assert listed == options_by_name(fields).keys()
    short = {names.get(name, name) for name in listed_options([command, "--help"], capsys)} - {""}
    assert short < listed if any(field.is_group for field in fields) else short == listed


def listed_options(argv: list[str], capsys: pytest.CaptureFixture[str]) -> set[str]:
    """The options in a printed help."""
    with pytest.raises(SystemExit) as stop:
        main(argv)
    assert stop.value.code == 0
    out = capsys.readouterr().out
    assert f"vitascope {argv[0]}" in out
    return set(re.findall(r"^[^\w\n-]{0,3}(?:-h, |-k INT, )?(--[a-z][\w-]*)", out, re.MULTILINE))


@pytest.mark.parametrize("command", ["train", "pretrain"])
def test_help_of_a_training_fits_a_terminal_of_100_by_40(command: str, capsys, monkeypatch) -> None:
    monkeypatch.setenv("COLUMNS", "100")
    assert len(listed_options([command, "--help"], capsys)) <= 16
    with contextlib.suppress(SystemExit):
        main([command, "--help"])
    assert len(capsys.readouterr().out.rstrip().splitlines()) < 40


def test_help_has_the_defaults_of_a_recipe(capsys) -> None:
    for argv, rate in (([], "0.006"), (["--recipe", "finetune"], "0.0001")):
        with contextlib.suppress(SystemExit):
            main(["train", *argv, "--help"])
        assert f"Peak learning rate. (default: {rate})" in capsys.readouterr().out


def test_ctrl_c_during_the_import_of_the_commands_ends_in_one_line(monkeypatch, capsys) -> None:
    load = builtins.__import__

    def interrupted(name: str, *given: object) -> object:
        if name == "vitascope.cli":
            raise KeyboardInterrupt
        return load(name, *given)

    monkeypatch.setattr("vitascope.__main__._leave_threads", lambda _: None)  # those of other tests
    with monkeypatch.context() as patch:
        patch.setattr(builtins, "__import__", interrupted)
        assert installed() == 130
    assert capsys.readouterr() == ("", "vitascope: interrupted\n")


def test_thread_of_a_library_that_hangs_does_not_keep_a_stopped_program(monkeypatch) -> None:
    def stopped(_: object) -> None:
        threading.Thread(target=threading.Event().wait).start()
        raise KeyboardInterrupt

    def run() -> int:
        signal.alarm(20)
        monkeypatch.setattr("vitascope.__main__.PATIENCE", 0.0)
        monkeypatch.setattr(COMMANDS["models"], "call", stopped)
        monkeypatch.setattr(sys, "argv", ["vitascope", "models"])
        status = installed()
        threading._shutdown()  # as the interpreter's end
        return status

    assert ending(fork(run)) == 130


@pytest.mark.parametrize("command", ["train", "pretrain"])
def test_help_names_every_recipe(command: str, capsys) -> None:
    with pytest.raises(SystemExit):
        main([command, "--help-all"])
    (listed,) = re.findall(r"--recipe (.*?)--config", capsys.readouterr().out, re.DOTALL)
    assert set(RECIPES) <= set(re.findall(r"[a-z][a-z0-9-]*", listed))


def documented_fields(source: Path) -> Iterator[tuple[str, str]]:
    """The documented fields of the classes in a file: name and text."""
    for kind in ast.walk(ast.parse(source.read_text(encoding="utf-8"))):
        for field, text in itertools.pairwise(kind.body if isinstance(kind, ast.ClassDef) else []):
            if isinstance(field, ast.AnnAssign) and isinstance(text, ast.Expr):
                assert isinstance(field.target, ast.Name)
                yield field.target.id, ast.literal_eval(text.value)


@pytest.mark.parametrize("source", HELP_SOURCES, ids=lambda source: source.name)
def test_help_breaks_lines_only_after_sentences(source: Path) -> None:
    """The help keeps the line breaks of a text at any width."""
    texts = dict(documented_fields(source))
    lines = [(name, line.strip()) for name, text in texts.items() for line in text.splitlines()]
    assert [(name, line) for name, line in lines if not line.endswith(".")] == []


@pytest.mark.parametrize(
    "argv", [["--help"], *([command, word] for command in COMMANDS for word in ("--help", "--help-all"))]
)
def test_help_fits_80_columns(argv: list[str], capsys, monkeypatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    with contextlib.suppress(SystemExit):
        main(argv)
    usage, *lines = capsys.readouterr().out.splitlines()  # tyro does not wrap the usage
    assert usage.startswith("usage:")
    assert [line for line in lines if len(line) > 80] == []


@pytest.mark.parametrize("module", sorted((ROOT / "cli").glob("*.py")), ids=lambda module: module.name)
def test_commands_only_parse_call_and_print(module: Path) -> None:
    """Commands import no library of tensors, arrays or images, and their functions are short."""
    tree = ast.parse(module.read_text(encoding="utf-8"))
    imported = {name.split(".")[0] for name in imports(module)}
    assert not imported & {"torch", "numpy", "PIL", "matplotlib", "scipy", "safetensors"}
    functions = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]
    assert {each.name: count for each in functions if (count := statements(each)) > 30} == {}


def statements(function: ast.FunctionDef) -> int:
    return sum(isinstance(node, ast.stmt) for node in ast.walk(function)) - 1


def test_version(capsys) -> None:
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"vitascope {__version__}\n"
    assert main(["--version", "--verbose"]) == 0
    first, *lines = capsys.readouterr().out.splitlines()
    values = dict(line.split(": ", 1) for line in lines)
    assert (first, values["pillow"]) == (f"vitascope {__version__}", importlib.metadata.version("pillow"))
    assert {"python", "platform", "torch", "cpu", "cpu_capability", "cores", "device"} <= values.keys()
    assert ("ray" in values) == (importlib.util.find_spec("ray") is not None)


@pytest.mark.parametrize(
    ("code", "absent"),
    [
        ("from vitascope.cli import main; main(['--help'])", ["torch", "matplotlib", "sklearn"]),
        ("from vitascope.cli import main; main(['--version'])", ["torch", "matplotlib", "sklearn"]),
        ("import vitascope; vitascope.__all__; dir(vitascope)", ["torch", "numpy", "PIL"]),
    ],
)
def test_help_and_public_names_import_no_torch(code: str, absent: list[str]) -> None:
    code = f"import sys; {code}; print('\\n', [name for name in {absent} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1].strip() == "[]"


def test_commands_import_only_what_they_need(tmp_path) -> None:
    """Most of these libraries take longer to import than a small model takes to predict or to start."""
    code = f"""
import sys
from pathlib import Path
from vitascope.cli import main

def imported(*names):
    return [name for name in names if name in sys.modules]

main(["models"])
assert not imported("torch", "numpy", "PIL")
main(["predict", "cifar10", {str(PHOTOS["horse"])!r}])
heavy = ["matplotlib", "sklearn", "pandas", "huggingface_hub.errors", "torch._dynamo", "sympy"]
assert imported("torch") and not imported(*heavy, "scipy"), imported(*heavy, "scipy")
from vitascope import runs
runs._Report.draw = lambda *_: {{}}  # imports matplotlib
runs._Report.write = lambda *_: Path("report.html")
main(["train", "--data", "digits", "--steps", "1", "--run", "run", *{SHAPE}])
heavy += ["torch.distributed.fsdp", "torch.distributed.checkpoint"]
assert not imported(*heavy), imported(*heavy)
"""
    subprocess.run([sys.executable, "-c", code], check=True, cwd=tmp_path)


def test_module_runs_the_command_line() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "vitascope.cli", "modles"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1
    assert "nearest: models" in done.stderr


# --- models


def test_models_lists_every_name_and_its_source(capsys) -> None:
    assert main(["models"]) == 0
    vits, resnets, _ = capsys.readouterr().out.split("\n\n")
    assert "heads" in vits.splitlines()[0]
    assert "root" in resnets.splitlines()[0]
    lines = vits.splitlines()[1:] + resnets.splitlines()[1:]
    assert [line.split()[0] for line in lines] == list_models()
    for line, size in zip(lines, NAMED_SIZES.values(), strict=True):
        assert line.endswith(size.source)
    assert all(line.startswith("resnet") for line in resnets.splitlines()[1:])
    assert resnets.splitlines()[2].split()[:6] == ["resnet50", "224", "3,4,6,3", "64", "imagenet", "25.56"]


@pytest.mark.parametrize(
    ("options", "most"), [([], math.inf), (["--image-size", "448", "--num-classes", "7"], 40_000_000)]
)
def test_models_counts_the_parameters_of_the_built_model(options: list[str], most: float, capsys) -> None:
    """The options change all models alike, so only those of at most 40 million parameters are built again."""
    assert main(["models", "--json", *options]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert list(rows) == list_models()
    for name, row in rows.items():
        counted = row.pop("parameters")
        assert row.pop("flops") > 0
        assert row.pop("source") == NAMED_SIZES[name].source
        assert row.pop("architecture") == ("resnet" if name.startswith("resnet") else "vit")
        config = NAMED_SIZES[name].kind.from_dict(row)
        if not options:
            assert config == named_config(name)  # each with its own image size
        if counted <= most:
            assert counted == count_parameters(on_meta(config) if options else named_on_meta(name))


def test_models_that_an_image_size_does_not_fit_are_named_with_the_reason(capsys) -> None:
    argv = ["models", "--image-size", "240"]  # 15 patches of 16, but no whole number of 14 or 32
    assert main([*argv, "--json"]) == 0
    fits = set(json.loads(capsys.readouterr().out))
    assert {"vit_b16", "dinov3_s16", "resnet26"} <= fits
    assert not fits & {"vit_b32", "vit_h14", "dinov2_s14"}
    assert main(argv) == 0
    lines = {line.split()[0]: line for line in capsys.readouterr().out.splitlines() if line.strip()}
    for name in list_models():
        assert ("left out" in lines[name]) == (name not in fits)
    assert "nearest: 238x238" in lines["vit_h14"]
    assert "image_size must be at least 1, not 0" in error_line(["models", "--image-size", "0"], capsys)


# --- a run, from training to explanation


def test_train_prints_the_result_and_its_files(here) -> None:
    summary = json.loads((here.run / "metrics.jsonl").read_text().splitlines()[-1])
    assert f"{summary['correct']} of {summary['images']} images" in here.printed
    for path in [Path("runs/tiny/model"), *Path("runs/tiny/figures").iterdir()]:
        assert str(path) in here.printed
    assert "report runs/tiny/report.html" in here.printed


def test_train_prints_a_summary_of_the_data(here, capsys) -> None:
    colours(here.root / "mixed" / "Training_Set", {"red": (200, 40, 40), "blue": (40, 40, 200)})
    colours(here.root / "mixed" / "TEST", {"red": (210, 40, 40), "blue": (40, 40, 210)})
    (here.root / "mixed" / "TEST" / "red" / "clip.mov").write_bytes(b"x")
    with undrawn():
        assert main(["train", "--data", "mixed", "--run", "runs/mixed", *SHAPE, *SHORT]) == 0
    assert capsys.readouterr().out.splitlines()[:3] == [
        "data   mixed: 18 train, 2 val, 20 test images of 2 classes",
        "       blue: 20, red: 20",
        "       unused: 1 .mov",
    ]


def test_report_is_reproduced(here, capsys) -> None:
    page = here.run / "report.html"
    first = page.read_bytes()
    page.unlink()
    capsys.readouterr()
    assert main(["report", "runs/tiny", "--device", "cpu"]) == 0
    assert capsys.readouterr().out == "runs/tiny/report.html\n"
    assert page.read_bytes() == first


def test_compare_prints_a_table_or_json_and_writes_a_page(here, tmp_path, capsys) -> None:
    for seed in ("1", "2"):
        argv = ["train", "--config", "runs/tiny/config.yaml", "--run", f"runs/compared-{seed}"]
        with undrawn():
            assert main([*argv, "--seed", seed]) == 0
    capsys.readouterr()
    runs = ["runs/tiny", "runs/compared-1", "runs/compared-2"]
    assert main(["compare", *runs, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert [run["run"] for run in found["runs"]] == ["tiny", "compared-1", "compared-2"]
    assert found["options"] == {"seed": [0, 1, 2]}
    assert found["groups"][0]["seeds"] == [0, 1, 2]
    assert len(found["paired"]) == 2
    assert main(["compare", *runs, "--out", str(tmp_path)]) == 0
    out = capsys.readouterr().out.splitlines()
    for line, run in zip(out[1:], found["runs"], strict=False):
        assert line.split()[:3] == [run["run"], f"{run['epochs']:g}", f"{run['accuracy']:.2%}"]
    assert out[-2:] == [str(tmp_path / "comparison.txt"), str(tmp_path / "comparison.png")]
    assert all(Path(line).is_file() for line in out[-2:])


def test_names_that_are_not_utf8_are_trained_printed_and_reported(tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    data = colours(Path("p\udce9"), {"r\udce9d": (200, 40, 40), "blue": (40, 40, 200)}, 10)
    with monkeypatch.context() as patch:
        out = io.TextIOWrapper(io.BytesIO(), encoding="utf-8", errors="strict")
        patch.setattr("sys.stdout", out)
        assert main(["train", "--data", str(data), *SHAPE, *SHORT]) == 0
        assert main(["report", "runs/p\ufffd"]) == 0
        assert main(["predict", "runs/p\ufffd", str(data), "--json"]) == 0
    page = Path("runs", "p\ufffd", "report.html").read_text(encoding="utf-8")
    assert r"r\udce9d" in page
    out.seek(0)
    printed = out.read().splitlines()
    assert printed[0].startswith("data   p\udce9: 16 train, 2 val, 2 test images")
    assert json.loads(printed[-1])["image"].startswith("p\udce9/r\udce9d/")


def test_default_run_folders_are_numbered(here) -> None:
    for name in ("data", "data-2"):
        with undrawn():
            assert main(["train", "--data", "data", *SHAPE, *SHORT]) == 0
        assert (here.root / "runs" / name / "model").is_dir()


def test_evaluate_uses_the_test_images_of_the_run(here, capsys) -> None:
    assert main(["evaluate", "runs/tiny", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    recorded = json.loads((here.run / "metrics.jsonl").read_text().splitlines()[-1])
    for name in ("split", "images", "correct", "accuracy"):
        assert found[name] == recorded[name]
    assert found["loss"] == pytest.approx(recorded["loss"], rel=1e-4)
    assert found["classes"] == ["blue", "red"]
    confusion = np.array(found["confusion"])
    assert confusion.sum() == found["images"]
    assert np.trace(confusion) == found["correct"]
    assert found["accuracy"] == found["correct"] / found["images"]


def test_evaluate_prints_the_numbers_of_its_json(here, capsys) -> None:
    main(["evaluate", "runs/tiny", "--data", "data", "--json"])
    found = json.loads(capsys.readouterr().out)
    assert (found["images"], found["trained_on"]) == (4, 16)
    assert main(["evaluate", "runs/tiny", "--data", "data"]) == 0
    out = capsys.readouterr().out
    assert f"{found['accuracy']:.2%} right, {found['correct']} of 4 images" in out
    interval = f"95% interval {found['accuracy_low']:.1%} to {found['accuracy_high']:.1%}"
    balanced = f"balanced accuracy {found['balanced_accuracy']:.2%}, macro F1 {found['macro_f1']:.2%}"
    assert f"{interval}; {balanced}" in out
    assert "top5_accuracy" not in found  # of two classes
    assert "always guessing the most frequent class: 50.00%" in out
    assert found["majority"] == 0.5
    for row, name in enumerate(("blue", "red")):
        share = found["confusion"][row][row] / 2
        assert any(line.split()[:2] == [name, f"{share:.2%}"] for line in out.splitlines())


def test_predict_prints_every_class_with_its_score(here, capsys) -> None:
    pictures = ["data/red/0.png", "data/blue/3.png"]
    assert main(["predict", "runs/tiny", *pictures, "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert [row["image"] for row in rows] == pictures
    for row in rows:
        assert {guess["label"] for guess in row["predictions"]} == {"red", "blue"}
        assert sum(guess["score"] for guess in row["predictions"]) == pytest.approx(1, abs=1e-5)
    assert main(["predict", "runs/tiny", *pictures]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line for line in lines if not line.startswith(" ")] == pictures
    for row in rows:
        after = lines[lines.index(row["image"]) + 1 :]
        for line, guess in zip(after, row["predictions"], strict=False):
            assert line.split()[:2] == [guess["label"], f"{guess['score']:.2%}"]


def test_convert_prints_the_effect_of_another_preprocessing(tmp_path, capsys) -> None:
    for name, channels in (("colours", 3), ("satellite", 4)):
        save_pretrained(small_model(in_channels=channels), tmp_path / name)
        assert main(["convert", str(tmp_path / name), str(tmp_path / f"{name}-timm"), "--to", "timm"]) == 0
    colours, satellite = capsys.readouterr().out.split("parity: bitwise the same in every layer, on ")[1:]
    assert colours.startswith("2 pictures\neach with its own preprocessing: outputs differ by at most")
    assert satellite == "2 random tensors\n"


@pytest.mark.parametrize("to", ["vitascope", "timm"])
def test_convert_writes_a_model_with_the_same_predictions(here, tmp_path, to: str, capsys) -> None:
    out, pictures = tmp_path / "converted", ["data/red/0.png", "data/blue/3.png"]
    assert main(["convert", "runs/tiny", str(out), "--to", to, "--images", *pictures]) == 0
    printed = capsys.readouterr().out
    assert f"from vitascope to {to}" in printed
    assert "parity: bitwise the same in every layer, on 2 pictures" in printed
    for path in out.iterdir():
        assert str(path) in printed
    answers = []
    for model in ("runs/tiny", str(out)):
        assert main(["predict", model, *pictures, "--json"]) == 0
        rows = json.loads(capsys.readouterr().out)
        answers.append([{guess["label"]: guess["score"] for guess in row["predictions"]} for row in rows])
    assert answers[1] == [pytest.approx(answer, abs=1e-6) for answer in answers[0]]


def test_model_options_are_trained_saved_and_reproduced(here, capsys, monkeypatch) -> None:
    monkeypatch.setattr(write, "write_report", lambda run, **_: run.report)  # figures are looked at
    options = ["positions=rotary", "attention=axial", "num_registers=2", "mlp=swiglu", "head_init=zero"]
    argv = ["train", "--data", "data", "--run", "runs/other", *SHAPE, *SHORT, "--num-heads", "4"]
    assert main([*argv, "--model-options", *options]) == 0
    saved = json.loads((here.root / "runs/other/model/config.json").read_text())
    assert {f"{name}={saved[name]}" for name in (option.partition("=")[0] for option in options)} == {
        *options
    }
    assert not (here.root / "runs/other/figures/positions.png").exists()  # rotary positions have no vectors
    with undrawn():
        assert main(["train", "--config", "runs/other/config.yaml", "--run", "runs/other-again"]) == 0
    first, again = (
        here.root / "runs" / name / "model/model.safetensors" for name in ("other", "other-again")
    )
    assert first.read_bytes() == again.read_bytes()
    capsys.readouterr()
    assert main(["evaluate", "runs/other", "--json"]) == 0
    assert main(["explain", "runs/other", "data/red/0.png", "--out", "runs/other/seen.png"]) == 0


def test_named_set_of_model_options_is_given_with_others() -> None:
    words = ["--recipe", "deit3", "--model-options", "num_registers=1", "modern", "window=[2, 3]"]
    options = {"positions": "rotary", "num_registers": 1, "layer_scale": 0.1, "window": [2, 3]}
    assert TrainConfig(**parse(Train, "train", words).training).option("model_options") == options


def test_trained_weights_are_fine_tuned_on_other_classes(here, capsys) -> None:
    argv = ["train", "--data", "other", "--weights", "runs/tiny", "--run", "runs/tuned", "--lr", "1e-30"]
    with undrawn():
        assert main([*argv, *SHORT, "--ema", "0"]) == 0
    assert "left out the head for 2 classes; initialized one for 3" in capsys.readouterr().out
    from vitascope.models.weights.loading import from_pretrained

    tuned, start = from_pretrained("runs/tuned"), from_pretrained("runs/tiny")
    assert tuned.config.class_names == ("green", "grey", "white")
    for name, value in tuned.state_dict().items():  # the learning rate is too small to change the body
        if not name.startswith("head."):
            assert (value - start.state_dict()[name]).abs().max() < 1e-25, name
    assert main(["predict", "runs/tuned", "data/red/0.png"]) == 0


def test_trained_model_is_not_advised_to_start_from_itself(tmp_path, capsys) -> None:
    colours(tmp_path / "grey", {"cat": (128, 128, 128), "dog": (128, 128, 128)}, 4)
    assert main(["evaluate", "cifar10", "--data", str(tmp_path / "grey")]) == 0
    out = capsys.readouterr().out
    assert "no better than always guessing the most frequent class" in out
    assert "--weights" not in out


# --- errors


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["trian"], "unknown command 'trian'; nearest: train"),
        (["--version", "--verbos"], "unknown command '--verbos'"),
        (["--data", "x"], "unknown command '--data'"),
        (["train", "--epoch", "3"], "unknown option '--epoch'; nearest: --epochs"),
        (["train", "--embed_dims=3"], "nearest: --embed-dim"),
        (["train", "--learning-rate", "1e-3"], "unknown option '--learning-rate'; nearest: --lr;"),
        (["train", "--learning_rate=1e-3"], "nearest: --lr;"),
        (["train", "--batch", "8"], "unknown option '--batch'; nearest: --batch-size;"),
        (["train", "--dataset", "data"], "unknown option '--dataset'; nearest: --data;"),
        (["evaluate", "runs/tiny", "--bs", "8"], "unknown option '--bs'; nearest: --batch-size;"),
        (["pretrain", "--target", "mae", "--patch-size", "1"], "set patch_size to 2 or more"),
        (["train", "stray"], "unexpected argument 'stray'; did you mean --data stray?"),
        (["train", "runs/tiny"], "did you mean --resume runs/tiny?"),
        (["evaluate", "runs/tiny", "data"], "unexpected argument 'data'; did you mean --data data?"),
        (["mcp", "runs/tiny", "stray"], "unexpected argument 'stray'. See"),
        (["help", "trian"], "unknown command 'trian'; nearest: train"),
        (["models", "--jsn"], "nearest: --json"),
        (["evaluate", "runs/tiny", "--batchsize", "3"], "nearest: --batch-size"),
        (["train", "--recipe", "digts"], "unknown recipe 'digts'; nearest: digits"),
        (
            ["train", "--data", "data", "--recipe", "cnn"],
            "for a CNN, not for a Vision Transformer: choose model=",
        ),
        (["train", "--data", "data", "--recipe", "cnn", "--model", "vit_s16"], "for a CNN, not for vit_s16"),
        (["train", "--data", "data", "--model", "vit_b61"], "'vit_b61'; nearest: vit_b16"),
        (["train", "--data", "nowhere"], "nowhere: no such folder"),
        (["train", "--data", "digit"], "nearest: digits"),
        (["train", "--data", "broken.jpg"], "broken.jpg: not a folder"),
        (["train", "--data", "empty"], "empty: no images"),
        (["train", "--data", "single"], "only one class, 'red'"),
        (["train", "--data", "data", "--image-size", "30", "--patch-size", "8"], "nearest: 32x32"),
        (["train", "--data", "data", "--num-heads", "5", "--embed-dim", "64"], "nearest: 4"),
        (["train", "--data", "data", "--epochs", "0"], "epochs must be at least 1, not 0"),
        (["train", "--data", "data", "--device", "nonsense"], "'nonsense'"),
        (["train", "--data", "data", "--weights", "runs/tinny"], "nearest: runs/tiny"),
        (["train", "--data", "data", "--weights", "runs/tiny", "--model", "vit_s16"], "does not fit vit_s16"),
        (["train", "--config", "nowhere.yaml"], "nowhere.yaml: no such file"),
        (["train", "--config", "runs/tiny/config.yaml", "--recipe", "digits"], "leave out recipe"),
        (
            ["train", "--resume", "runs/tiny", "--epochs", "1"],
            "1 of its epochs are done, so epochs=1 adds none",
        ),
        (["train", "--resume", "runs/tiny", "--lr", "7"], "lr cannot change when a run is resumed"),
        (["train", "--resume", "data"], "data: not a run folder"),
        (["train", "--data", "data", "--missing", "skip"], "add --resume RUN"),
        (["train", "--data", "data", "--run", "runs/\udce9", *SHAPE], "a run folder needs a name in UTF-8"),
        (["train", "--resume", "nowhere"], "nowhere: not a run folder"),
        (["train", "--resume", "runs/tiny"], "has finished"),
        (["train", "--resume", "runs/tiny", "--data", "data"], "has finished"),  # as typed, not as stored
        (["compare"], "a comparison takes 2 to 24 different runs, not none"),
        (["compare", "runs/tiny", "runs/tiny/"], "2 to 24 different runs, not runs/tiny, runs/tiny/"),
        (["compare", "runs/tiny", "data"], "data: not a run folder"),
        (["evaluate", "runs/tinny"], "nearest: runs/tiny"),
        (["evaluate", "runs/tiny/model"], "not a run folder with test images of its own: set data"),
        (["evaluate", "runs/tiny", "--data", "other"], "green"),
        (["predict", "runs/tiny"], "no images given"),
        (["predict", "runs/tiny", "nowhere.jpg"], "nowhere.jpg: no such file"),
        (["predict", "runs/tiny", "data/red/0.png", "--top-k", "0"], "at least 1"),
        (["predict", "data", "data/red/0.png"], "data: not a model"),
        (["evaluate", "runs/tiny", "--batch-size", "0"], "batch_size must be in [1, 100000], not 0"),
        (["evaluate", "runs/tiny", "--data", ""], "'': no such folder"),
        (["train", "--mixup", "-1"], "error: mixup must be at least 0, not -1.0"),
        (["train", "--data", "data", "--levels", "9", "5"], "levels must increase, not (9.0, 5.0)"),
        (["train", "--data", "data", "--seed", "-1"], "seed must be at least 0, not -1"),
        (["train", "--data", "data", "--lr", "nan"], "lr must be a number, not nan"),
        (
            ["train", "--model-options", "mlp=swiglu", "--model-options", "norm=post"],
            "--model-options is given more than once",
        ),
        (["train", "--options", "mlp=swiglu"], "nearest: --model-options"),
        (["train", "--out", "x"], "nearest: --run; see"),  # of many commands, but not under this name
        (
            ["learn", "broken.jpg/learn"],
            "error: broken.jpg/learn: cannot write there: Not a directory; name a new folder\n",
        ),
        (["train", "--lengths", "3"], "unknown option '--lengths'"),
        (
            ["train", "--optimizer", "adam"],
            "invalid choice 'adam' for argument '--optimizer'. Expected one of ('adamw'",
        ),
        (["explain", "--method", "gradcam"], "unknown method 'gradcam'; nearest: grad-cam; it is one of"),
        (["train", "--lr", "x"], "--lr: could not convert string to float: 'x'; see"),
        (
            ["train", "--workers", "x"],
            "--workers: no type matching INT could be instantiated from ['x']; see",
        ),
        (["train", "--batch-size"], "Missing value for argument '--batch-size'. Expected 1 values; see"),
        (
            ["embed"],
            "Missing from vitascope embed: MODEL (required) DATA (required) --out FILE (required); see",
        ),
        (["zero-shot", "x", "y"], "Missing from vitascope zero-shot: --classes NAME ... (required); see"),
    ],
    ids=lambda value: " ".join(value)[:60] if isinstance(value, list) else "",
)
def test_invalid_request_is_rejected_in_one_line_and_leaves_nothing(
    here, argv: list[str], message: str, capsys
) -> None:
    (here.root / "empty").mkdir(exist_ok=True)
    if not (here.root / "single").exists():
        colours(here.root / "single", {"red": (200, 40, 40)}, 3)
    before = sorted(here.root.rglob("*"))
    assert message in error_line(argv, capsys)
    assert sorted(here.root.rglob("*")) == before


def test_existing_run_folder_is_rejected_and_not_touched(here, capsys) -> None:
    before = content(here.run)
    message = error_line(["train", "--data", "data", "--run", "runs/tiny", *SHAPE, *SHORT], capsys)
    assert "runs/tiny exists" in message
    assert "--resume runs/tiny" in message
    assert content(here.run) == before


@pytest.mark.parametrize(
    ("argv", "reason"),
    [
        (["train", "--epochs", "many"], "--epochs: no type matching INT could be instantiated from ['many']"),
        (["train", "--image-size", "1", "2", "3"], "--image-size: no type matching INT|{INT INT}"),
        (["train", "--image-size"], "--image-size"),
        (["train", "--levels", "4095"], "--levels"),
        (["train", "--keep", "worst"], "invalid choice 'worst' for argument '--keep'"),
        (["train", "--lr"], "--lr"),
        (["evaluate"], "MODEL"),
    ],
)
def test_missing_or_malformed_value_is_rejected_in_one_line(argv: list[str], reason: str, capsys) -> None:
    message = error_line(argv, capsys)
    assert reason in message
    assert f"vitascope {argv[0]} --help" in message


def test_internal_error_keeps_its_traceback(monkeypatch) -> None:
    def fail(*_: object, **options: object) -> None:
        raise RuntimeError("a bug")

    monkeypatch.setattr("vitascope.cli.models.named_config", fail)
    with pytest.raises(RuntimeError, match="a bug"):
        main(["models"])


def test_interrupts_have_their_own_exit_status(monkeypatch, tmp_path, capsys) -> None:
    from vitascope.errors import Interrupted

    for error, status in (
        (KeyboardInterrupt(), 130),
        (Interrupted(tmp_path, 2), 130),
        (Interrupted(tmp_path, 15), 143),
    ):

        def stopped(*_: object, error: BaseException = error, **options: object) -> None:
            raise error

        monkeypatch.setattr(runs, "train", stopped)
        assert main(["train"]) == status
        following = capsys.readouterr().err.splitlines()[1:]
        assert following == [f"next   vitascope train --resume {tmp_path}"] * isinstance(error, Interrupted)


def test_missing_memory_is_one_line(monkeypatch, capsys) -> None:
    def fail(self: object) -> None:
        raise MemoryError

    monkeypatch.setattr(COMMANDS["models"], "call", fail)
    assert main(["models"]) == 2
    assert capsys.readouterr().err.startswith("vitascope: error: out of memory; ")
