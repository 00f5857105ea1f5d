"""The rules for imports and names, checked in the source of the package."""

import ast
import functools
import sys
from collections import Counter
from pathlib import Path

import pytest

import vitascope

ROOT = Path(vitascope.__file__).parent
FILES = sorted(ROOT.rglob("*.py"))

# The packages that each storey may import, beside itself and the modules at the root.
ALLOWED: dict[str, set[str]] = {
    "models": set(),
    "data": {"models"},
    "training": {"data", "models"},
    "analysis": {"training", "data", "models"},
    "deploy": {"analysis", "training", "data", "models"},
    "explain": {"analysis"},
    "runs": {"analysis", "training", "data", "models"},
    "errors": set(),
    "storage": set(),
    "serialization": set(),
    "arguments": set(),
    "_version": set(),
    "formatting": {"errors"},
    "language": set(),
    "layout": set(),
    "intervals": set(),
    "network": set(),
    "cache": set(),
    "remote": set(),
}
FOR_ALL = {"errors", "arguments", "formatting", "intervals", "language", "layout", "network"}
FOR_ALL |= {"cache", "remote", "serialization", "storage", "_version"}


def module_of(path: Path) -> str:
    """The name of a file's module: `vitascope.data.loading`."""
    parts = path.relative_to(ROOT.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def layer_of(path: Path) -> str:
    """The storey of a file, or its module at the root: `data` for data/loading.py."""
    return path.relative_to(ROOT).with_suffix("").parts[0]


@functools.cache
def nodes_of(path: Path) -> tuple[ast.AST, ...]:
    """Every node of a file's syntax tree."""
    return tuple(ast.walk(ast.parse(path.read_text(encoding="utf-8"))))


@functools.cache
def imports(path: Path) -> frozenset[str]:
    """Every module that a file imports, also in functions and under TYPE_CHECKING."""
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
    """The modules of this package that a file imports: `data.preprocess`, `errors`."""
    return {name.removeprefix("vitascope.") for name in imports(path) if name.startswith("vitascope.")}


def name_of(path: Path) -> str:
    """The path of a file in the package: `data/loading.py`."""
    return str(path.relative_to(ROOT))


def test_layers_import_only_layers_below_them() -> None:
    offenders = []
    for path in FILES:
        layer = layer_of(path)
        if layer in ("cli", "__init__", "__main__"):
            continue  # the top: everything lies below
        assert layer in ALLOWED, f"a new layer: list the allowed imports of {layer} in ALLOWED"
        known = {layer, *FOR_ALL, *ALLOWED[layer]}
        offenders += [
            f"{name_of(path)} imports {name}"
            for name in of_ours(path)
            if not any(name == other or name.startswith(f"{other}.") for other in known)
        ]
    assert not offenders


def test_imports_have_no_cycles() -> None:
    """Imports inside functions and for types count too."""
    below = {module_of(path): {f"vitascope.{name}" for name in of_ours(path)} for path in FILES}
    for _ in range(len(below)):  # leave out modules that import no other or that no other imports
        imported = set().union(*below.values())
        below = {name: names & set(below) - {name} for name, names in below.items() if name in imported}
        below = {name: names for name, names in below.items() if names}
    assert not below, f"cyclic imports: {below}"


def test_class_names_are_unique() -> None:
    names = Counter(
        node.name
        for path in FILES
        if path.name != "openapi.py"  # names that clients of the server see
        for node in nodes_of(path)
        if isinstance(node, ast.ClassDef) and not node.name.startswith("_")
    )
    assert not [name for name, count in names.items() if count > 1]


def test_only_the_command_line_imports_itself() -> None:
    others = [path for path in FILES if layer_of(path) not in ("cli", "__main__")]
    assert not [
        name_of(path)
        for path in others
        if any(name == "cli" or name.startswith("cli.") for name in of_ours(path))
    ]


def test_lessons_are_imported_by_their_command_alone() -> None:
    assert [
        name_of(path)
        for path in FILES
        if any(name.split(".")[0] == "vitascope_lessons" for name in imports(path))
    ] == ["cli/learn.py"]


def test_model_imports_only_torch() -> None:
    allowed = {"vitascope", "torch", *sys.stdlib_module_names}
    outside = {
        name_of(path): {name.split(".")[0] for name in imports(path)} - allowed
        for path in FILES
        if path.parent == ROOT / "models" and path.stem not in ("preprocess", "decoding", "file_checks")
    }
    assert outside
    assert not {name: modules for name, modules in outside.items() if modules}


def test_two_modules_import_peer_libraries() -> None:
    peers = {"timm", "transformers", "torchvision", "open_clip"}
    exceptions = {
        "vitascope.models.weights.foreign": {"timm", "transformers"},
        "vitascope.models.text.text_model": {"transformers", "open_clip"},
    }
    found = {
        module_of(path): {name.split(".")[0] for name in imports(path)}
        & peers - exceptions.get(module_of(path), set())
        for path in FILES
    }
    assert not {name: modules for name, modules in found.items() if modules}


def test_only_the_inits_of_the_package_and_of_the_commands_import_dynamically() -> None:
    forbidden = {"import_module", "__import__", "exec", "eval"}
    offenders = []
    for path in FILES:
        called = [node.func for node in nodes_of(path) if isinstance(node, ast.Call)]
        functions = {func.id for func in called if isinstance(func, ast.Name)} & forbidden
        methods = {func.attr for func in called if isinstance(func, ast.Attribute)} & {"import_module"}
        if path not in (ROOT / "__init__.py", ROOT / "cli" / "__init__.py") and functions | methods:
            offenders.append(f"{name_of(path)}: {functions | methods}")
    assert not offenders


def test_no_file_has_a_vague_name() -> None:
    vague = {"utils", "util", "common", "misc", "helpers", "helper"}
    parts = {name_of(path): path.relative_to(ROOT).with_suffix("").parts for path in FILES}
    assert not [name for name, own in parts.items() if vague & {part.strip("_") for part in own}]


def test_only_run_names_the_files_of_a_run_folder() -> None:
    names = {"config.yaml", "metrics.jsonl", "environment.json", "predictions.npz", "split.jsonl.gz"}
    assert not [
        f"{name_of(path)}: {node.value}"
        for path in FILES
        if path != ROOT / "layout.py"
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


def test_every_kind_of_import_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = "import torch.nn as nn\nfrom . import loading\nfrom ..errors import UserError\n"
    source += "def f():\n    from vitascope import explain\n    import vitascope.models.vit\n"
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
        "vitascope.models.vit",
    }


SHARED_NAMES = {"main", "attention", "compare", "Prediction", "Predictions"}
"""Public names with two meanings: entry points, names of the API, of answers that the server documents."""


def test_public_functions_and_classes_have_one_name_each() -> None:
    places: dict[str, set[str]] = {}
    for path in FILES:
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.FunctionDef | ast.ClassDef) and not node.name.startswith("_"):
                places.setdefault(node.name, set()).add(name_of(path))
    assert {
        name: files for name, files in places.items() if len(files) > 1 and name not in SHARED_NAMES
    } == {}


EXTENDED = {
    "AdamW": "Muon has AdamW's update for all parameters but hidden matrices",
    "Block": "the other orders of norm and sum have the same parts, and so the same weights",
    "Classify": "distillation adds a second term to the loss",
    "Dinov2ViT": "a checkpoint of a later release differs by a few names",
    "Layout": "merging keeps a layout up to date while tokens disappear",
    "LearnedPositions": "relative and rotary positions may come beside learned ones",
    "Library": "Hugging Face's has rules for reading of its own",
    "Masked": "a masked autoencoder hides other patches",
    "MeanPool": "all pools know which tokens are patches",
    "ModelResult": "a page is the result of its first model",
    "Pace": "work is timed as a whole",
    "PixelTarget": "normalized pixels are computed of pixels",
    "Positions": "no positions at all are the default of each method",
    "PreLogits": "the pre-training head ends in classes",
    "RelativeBias": "BEiT's has one per block",
    "Resources": "features add the cache to the options of a prediction",
    "RotaryPositions": "the axial and the mixed ones differ by their angles",
    "SelfAttention": "windows and merging change one step of equation 6 each",
    "Siglip": "SigLIP 2 differs by a few names",
    "Timm": "other modules of timm have the same checks",
    "Trace": "a stream gives each layer's attention away instead of keeping it",
    "ViT": "DeiT, MAE and MSN differ by a few names",
    "Work": "long work lets other work pass between its parts",
}
"""Classes that are used themselves and have subclasses, with the reason. All others are abstract or final."""


def test_classes_are_abstract_or_final() -> None:
    nodes = [node for path in FILES for node in nodes_of(path)]
    classes = {node.name: node for node in nodes if isinstance(node, ast.ClassDef)}
    bases = {name: {ast.unparse(base) for base in node.bases} for name, node in classes.items()}
    uses = [
        use
        for node in nodes
        if isinstance(node, ast.Call | ast.keyword | ast.Dict | ast.IfExp)
        if not ast.unparse(node).startswith(("isinstance(", "issubclass("))
        for use in ast.iter_child_nodes(node)
    ]
    concrete = set(classes) & {use.id for use in uses if isinstance(use, ast.Name)}

    def is_error(name: str) -> bool:
        return name.endswith(("Error", "Exception")) or any(map(is_error, bases.get(name, ())))

    extended = {base for names in bases.values() for base in names & concrete if not is_error(base)}
    assert extended == set(EXTENDED)
