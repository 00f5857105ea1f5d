"""Who may import whom, read from the source: layers stay layers only where something checks."""

import ast
import functools
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


@functools.cache
def nodes_of(path: Path) -> tuple[ast.AST, ...]:
    """Every node of a file's syntax tree."""
    return tuple(ast.walk(ast.parse(path.read_text(encoding="utf-8"))))


@functools.cache
def imports(path: Path) -> frozenset[str]:
    """Every module that a file imports, in functions and under TYPE_CHECKING too."""
    package = module_of(path) if path.name == "__init__.py" else module_of(path).rpartition(".")[0]
    found: set[str] = set()
    for node in nodes_of(path):
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
    return frozenset(found)


@functools.cache
def is_module(name: str) -> bool:
    """Whether a dotted name is a module or package of ours."""
    path = ROOT.parent.joinpath(*name.split("."))
    return name.startswith("vitascope") and (path.is_dir() or path.with_suffix(".py").is_file())


def of_ours(path: Path) -> set[str]:
    """What a file imports of this package: `data.preprocess`, `errors`."""
    return {name.removeprefix("vitascope.") for name in imports(path) if name.startswith("vitascope.")}


def name_of(path: Path) -> str:
    """`data/loading.py` for its file."""
    return str(path.relative_to(ROOT))


def test_layers_import_only_what_lies_below_them() -> None:
    offenders = []
    for path in FILES:
        layer = layer_of(path)
        if layer in ("cli", "__init__"):
            continue  # the top: everything lies below
        assert layer in ALLOWED, f"a new layer: list in ALLOWED what {layer} may import"
        known = {layer, *FOR_ALL, *ALLOWED[layer]}
        offenders += [
            f"{name_of(path)} imports {name}"
            for name in of_ours(path)
            if not any(name == other or name.startswith(f"{other}.") for other in known)
        ]
    assert not offenders


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
        if path.name != "openapi.py"  # names that clients of the server see
        for node in nodes_of(path)
        if isinstance(node, ast.ClassDef) and not node.name.startswith("_")
    )
    assert not [name for name, count in names.items() if count > 1]


def test_nothing_else_imports_the_command_line() -> None:
    others = [path for path in FILES if layer_of(path) != "cli"]
    assert not [
        name_of(path)
        for path in others
        if any(name == "cli" or name.startswith("cli.") for name in of_ours(path))
    ]


def test_model_needs_nothing_but_torch() -> None:
    allowed = {"vitascope", "torch", *sys.stdlib_module_names}
    outside = {
        name_of(path): {name.split(".")[0] for name in imports(path)} - allowed
        for path in FILES
        if layer_of(path) == "model"
    }
    assert outside
    assert not {name: modules for name, modules in outside.items() if modules}


def test_nothing_imports_the_libraries_we_are_compared_with() -> None:
    peers = {"timm", "transformers", "torchvision"}
    exceptions = {"vitascope.training.tasks.teachers": {"timm", "transformers"}}
    found = {
        module_of(path): {name.split(".")[0] for name in imports(path)}
        & peers - exceptions.get(module_of(path), set())
        for path in FILES
    }
    assert not {name: modules for name, modules in found.items() if modules}


def test_only_the_package_itself_imports_by_text() -> None:
    forbidden = {"import_module", "__import__", "exec", "eval"}
    offenders = []
    for path in FILES:
        called = [node.func for node in nodes_of(path) if isinstance(node, ast.Call)]
        functions = {func.id for func in called if isinstance(func, ast.Name)} & forbidden
        methods = {func.attr for func in called if isinstance(func, ast.Attribute)} & {"import_module"}
        if path != ROOT / "__init__.py" and functions | methods:
            offenders.append(f"{name_of(path)}: {functions | methods}")
    assert not offenders


def test_every_file_has_a_name_that_says_what_is_in_it() -> None:
    vague = {"utils", "util", "common", "misc", "helpers", "helper"}
    parts = {name_of(path): path.relative_to(ROOT).with_suffix("").parts for path in FILES}
    assert not [name for name, own in parts.items() if vague & {part.strip("_") for part in own}]


def test_only_run_knows_the_names_of_the_files_in_a_run_folder() -> None:
    names = {"config.yaml", "metrics.jsonl", "environment.json", "predictions.npz", "split.jsonl.gz"}
    assert not [
        f"{name_of(path)}: {node.value}"
        for path in FILES
        if layer_of(path) != "run"
        for node in nodes_of(path)
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value in names
    ]


def test_private_names_stay_in_their_module() -> None:
    assert not [
        f"{name_of(path)}: {alias.name}"
        for path in FILES
        for node in nodes_of(path)
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("vitascope")
        for alias in node.names
        if alias.name.startswith("_") and alias.name[1] != "_"
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
