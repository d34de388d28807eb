"""The law of the house: floors, circles, lengths. Read with `ast`; nothing is imported."""

import ast
import statistics
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SOURCES = [*sorted((ROOT / "vit_keras").rglob("*.py")), ROOT / "vit_keras_cli.py"]
HOUSES = [
    path for name in ("zoo", "conversion", "benchmarks", "examples") for path in sorted((ROOT / name).rglob("*.py"))
]

# A room imports only from lower floors or its own folder; files directly in vit_keras/ are rooms of their own.
FLOORS = {
    "checks": 0,
    "progress": 0,
    "records": 1,
    "labels": 1,
    "spec": 1,
    "layers": 2,
    "checkpoints": 3,
    "preprocessing": 3,
    "catalog": 3,
    "augreg": 4,
    "variants": 4,
    "vit": 5,
    "hybrid": 6,
    "data": 6,
    "registry": 7,
    "predictor": 8,
    "analysis": 8,
    "training": 8,
    "pretraining": 8,
    "evaluation": 8,
    "publishing": 8,
    "converter": 9,
    "cli": 10,
    "utils": 10,
    "visualize": 10,
    "__init__": 11,
}
LIBRARY_ONLY = ("zoo", "conversion", "tests", "benchmarks", "examples")


def room(module):
    """`vit_keras.layers.patches` → `layers`; anything else → None."""
    parts = module.split(".")
    return (parts[1] if len(parts) > 1 else "__init__") if parts[0] == "vit_keras" else None


def module_of(path):
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(part for part in parts if part != "__init__")


def imports(path):
    """Full names of what a file imports, inside functions too; `from vit_keras import vit` imports vit_keras.vit."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            folder = ROOT / node.module.replace(".", "/")
            names = {alias.name for alias in node.names}
            modules = {name for name in names if (folder / f"{name}.py").exists() or (folder / name).is_dir()}
            yield from (f"{node.module}.{name}" for name in modules)
            if names - modules:
                yield node.module


def functions(path):
    """(name, lines without the docstring) of every function of a file."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            first = node.body[0]
            documented = ast.get_docstring(node) is not None
            length = node.end_lineno - node.lineno + 1
            yield f"{path.name}:{node.name}", length - (first.end_lineno - first.lineno + 1 if documented else 0)


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(ROOT)))
def test_imports_go_down(path):
    own = room(module_of(path)) or "cli"
    for name in imports(path):
        assert name.split(".")[0] not in LIBRARY_ONLY, f"the library imports {name}"
        assert not name.startswith("keras.src"), f"{name} is private to Keras"
        other = room(name)
        if other is not None and other != own:
            assert other in FLOORS, f"{name}: a room without a floor"
            assert FLOORS[other] < FLOORS[own], f"{own} (floor {FLOORS[own]}) imports {name} (floor {FLOORS[other]})"


def test_no_circles_inside_folders():
    graph = {module_of(path): set(imports(path)) for path in SOURCES}
    done, active = set(), []

    def visit(module):
        assert module not in active, f"circle: {' → '.join([*active[active.index(module) :], module])}"
        if module in done:
            return
        active.append(module)
        for name in graph.get(module, ()):
            if name in graph and name != "vit_keras":
                visit(name)
        done.add(active.pop())

    for module in graph:
        visit(module)


def test_function_lengths():
    lengths = dict(pair for path in SOURCES + HOUSES for pair in functions(path))
    longest = {name: length for name, length in lengths.items() if length > 60}
    assert not longest, f"over 60 lines: {longest}"
    assert statistics.median(lengths.values()) <= 10
    assert sum(length <= 35 for length in lengths.values()) >= 0.9 * len(lengths)


def table_lines(text):
    """Lines of a file's literal tables: tuples and dicts of more than twenty lines at the top."""
    spans = [
        node.end_lineno - node.lineno + 1
        for node in ast.parse(text).body
        if isinstance(node, (ast.Assign, ast.AnnAssign)) and isinstance(node.value, (ast.Tuple, ast.Dict))
    ]
    return sum(span for span in spans if span > 20)


def test_file_lengths_and_leftovers():
    for path in SOURCES + HOUSES:
        text = path.read_text(encoding="utf-8")
        lines = text.splitlines()
        assert len(lines) - table_lines(text) <= 300, f"{path.name} has {len(lines)} lines"
        leftovers = [i for i, line in enumerate(lines, 1) if "TODO" in line or "FIXME" in line]
        assert not leftovers, f"{path.name}: {leftovers}"


def test_enough_tests():
    def lines(paths):
        return sum(len(path.read_text(encoding="utf-8").splitlines()) for path in paths)

    tests = list((ROOT / "tests").rglob("*.py"))
    assert lines(tests) >= lines(SOURCES + HOUSES) / 2


def test_heavy_packages_are_imported_where_they_are_used():
    heavy = {
        "matplotlib",
        "tensorflow_datasets",
        "tensorflow_hub",
        "huggingface_hub",
        "kagglehub",
        "safetensors",
        "onnx",
    }
    for path in SOURCES:
        tree = ast.parse(path.read_text(encoding="utf-8"))
        for node in tree.body:
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [node.module] if isinstance(node, ast.ImportFrom) else []
            assert not heavy & {name.split(".")[0] for name in names}, f"{path.name} imports {names} at the top"
