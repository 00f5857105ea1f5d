"""Who may import whom, read from the source: layers stay layers only where something checks."""

import ast
import sys
from collections import Counter
from pathlib import Path

import pytest

import vitascope

ROOT = Path(vitascope.__file__).parent
FILES = sorted(ROOT.rglob("*.py"))

# What each layer may import of this package, beside itself and `errors`.
ALLOWED = {
    "model": set(),
    "data": set(),
    "weights": {"model", "data.decoding", "data.preprocess", "run.layout"},
    "run": {"data", "weights", "model"},
    "explain": {"model"},
    "report": {"explain", "data", "weights", "model", "run"},
    "training": {"model", "weights", "data", "report", "run"},
    "deploy": set(),
    "deploy.model_card": {"model", "weights", "data", "run"},
    "deploy.predict": {"model", "weights", "data", "explain"},
    "deploy.export": {"model", "weights", "data", "run", "deploy.predict"},
    "deploy.server": {"model", "weights", "data", "explain", "deploy.predict"},
    "errors": set(),
    "storage": set(),
    "pickles": set(),
    "_version": set(),
    "formatting": set(),
}
FOR_ALL = {"errors", "formatting", "storage", "pickles", "_version"}


def module_of(path: Path) -> str:
    """`vitascope.data.loading` for its file."""
    parts = path.relative_to(ROOT.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def layer_of(path: Path) -> str:
    """`data` for data/loading.py, `errors` for errors.py, `deploy.export` for deploy/export/formats.py."""
    parts = path.relative_to(ROOT).with_suffix("").parts
    if parts[0] == "deploy" and parts[1] != "__init__":
        return ".".join(parts[:2])
    return parts[0]


def imports(path: Path) -> set[str]:
    """Every module that a file imports, in functions and under TYPE_CHECKING too."""
    package = module_of(path) if path.name == "__init__.py" else module_of(path).rpartition(".")[0]
    found = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                above = package.split(".")[: len(package.split(".")) - node.level + 1]
                base = ".".join([*above, *filter(None, [base])])
            # `from vitascope import explain` names a module, `from vitascope.errors import UserError` a name.
            found |= {
                f"{base}.{alias.name}" if is_module(f"{base}.{alias.name}") else base for alias in node.names
            }
    return found


def is_module(name: str) -> bool:
    """Whether a dotted name is a module or package of ours."""
    path = ROOT.parent.joinpath(*name.split("."))
    return name.startswith("vitascope") and (path.is_dir() or path.with_suffix(".py").is_file())


def of_ours(path: Path) -> set[str]:
    """What a file imports of this package: `data.preprocess`, `errors`."""
    return {name.removeprefix("vitascope.") for name in imports(path) if name.startswith("vitascope.")}


def name_of(path: Path) -> str:
    return str(path.relative_to(ROOT))


@pytest.mark.parametrize("path", FILES, ids=name_of)
def test_layers_import_only_what_lies_below_them(path: Path) -> None:
    layer = layer_of(path)
    if layer in ("cli", "__init__"):
        return  # the top: everything lies below
    assert layer in ALLOWED, f"a new layer: say in this test what {layer} may import"
    for name in of_ours(path):
        known = {layer, *FOR_ALL, *ALLOWED[layer]}
        assert any(name == other or name.startswith(f"{other}.") for other in known), (
            f"{layer} must not import {name}"
        )


def test_no_module_imports_itself_through_others() -> None:
    """Imports inside functions and for types count too."""
    below = {module_of(path): {f"vitascope.{name}" for name in of_ours(path)} for path in FILES}
    for _ in range(len(below)):  # leave out what imports none of the others, or is imported by none
        imported = set().union(*below.values())
        below = {name: names & set(below) - {name} for name, names in below.items() if name in imported}
        below = {name: names for name, names in below.items() if names}
    assert not below, f"circles of imports: {below}"


def test_a_class_has_its_name_alone() -> None:
    names = Counter(
        node.name
        for path in FILES
        if path.name != "schemas.py"  # names that clients of the server see
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.ClassDef) and not node.name.startswith("_")
    )
    assert not [name for name, count in names.items() if count > 1]


@pytest.mark.parametrize("path", FILES, ids=name_of)
def test_nothing_else_imports_the_command_line(path: Path) -> None:
    if layer_of(path) == "cli":
        return
    assert not any(name == "cli" or name.startswith("cli.") for name in of_ours(path))


@pytest.mark.parametrize("path", sorted((ROOT / "model").rglob("*.py")), ids=name_of)
def test_model_needs_nothing_but_torch(path: Path) -> None:
    outside = {name.split(".")[0] for name in imports(path)} - {"vitascope", "torch"}
    assert outside <= set(sys.stdlib_module_names)


@pytest.mark.parametrize("path", FILES, ids=name_of)
def test_nothing_imports_the_libraries_we_are_compared_with(path: Path) -> None:
    allowed = {"timm", "transformers"} if module_of(path) == "vitascope.training.tasks.teachers" else set()
    peers = {"timm", "transformers", "torchvision"} - allowed
    assert not {name.split(".")[0] for name in imports(path)} & peers


@pytest.mark.parametrize("path", FILES, ids=name_of)
def test_only_the_package_itself_imports_by_text(path: Path) -> None:
    if path == ROOT / "__init__.py":
        return
    called = {node.func for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Call)}
    functions = {func.id for func in called if isinstance(func, ast.Name)}
    methods = {func.attr for func in called if isinstance(func, ast.Attribute)}
    assert not functions & {"import_module", "__import__", "exec", "eval"}
    assert "import_module" not in methods


@pytest.mark.parametrize("path", FILES, ids=name_of)
def test_every_file_has_a_name_that_says_what_is_in_it(path: Path) -> None:
    for part in path.relative_to(ROOT).with_suffix("").parts:
        assert part.strip("_") not in {"utils", "util", "common", "misc", "helpers", "helper"}


def test_only_run_knows_the_names_of_the_files_in_a_run_folder() -> None:
    names = {"config.yaml", "metrics.jsonl", "environment.json", "predictions.npz", "split.jsonl.gz"}
    for path in FILES:
        if layer_of(path) != "run":
            nodes = ast.walk(ast.parse(path.read_text(encoding="utf-8")))
            texts = {node.value for node in nodes if isinstance(node, ast.Constant)}
            assert not texts & names, name_of(path)


@pytest.mark.parametrize("path", FILES, ids=name_of)
def test_private_names_stay_in_their_module(path: Path) -> None:
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("vitascope"):
            assert not [
                alias.name for alias in node.names if alias.name.startswith("_") and alias.name[1] != "_"
            ]


def test_reading_of_imports_sees_every_kind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = "import torch.nn as nn\nfrom . import loading\nfrom ..errors import UserError\n"
    source += "def f():\n    from vitascope import explain\n    import vitascope.model.vit\n"
    root = tmp_path / "vitascope"
    for name in ("data/loading.py", "data/new.py", "errors.py", "explain/__init__.py", "model/vit.py"):
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(source)
    monkeypatch.setattr(sys.modules[__name__], "ROOT", root)
    found = imports(root / "data" / "new.py")
    assert found == {
        "torch.nn",
        "vitascope.data.loading",
        "vitascope.errors",
        "vitascope.explain",
        "vitascope.model.vit",
    }
