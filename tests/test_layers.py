"""The direction of the layers: a lower one never imports a higher one, not even inside a function."""

import ast
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1] / "tierfs"

ABOVE_NOTHING = {"errors"}
GROUND = ABOVE_NOTHING | {
    "digest",
    "buffers",
    "processors",
    "clock",
    "units",
    "forks",
    "daemons",
    "garbage",
    "localfile",
    "misplaced",
    "repeats",
    "sharedmemory",
}
PURE = {"format", "codec"}
BACKENDS = {"objects", "local", "device"}
FACES = {"fs", "dcp", "mount", "cli"}

# What each room may import, besides itself.
ALLOWED = {
    "errors": set(),
    "digest": {"errors"},
    "buffers": {"errors", "digest", "forks", "sharedmemory"},
    "sharedmemory": {"forks"},
    "processors": {"forks"},
    "clock": {"errors"},
    "units": {"errors"},
    "forks": set(),
    "daemons": set(),
    "garbage": {"daemons", "forks"},
    "localfile": set(),
    "misplaced": set(),
    "repeats": set(),
    "format": GROUND,
    "codec": GROUND,
    "objects": GROUND | PURE,
    "local": GROUND | PURE,
    "device": GROUND | PURE,
    "flush": GROUND | PURE | BACKENDS,
    "store": GROUND | PURE | BACKENDS | {"flush"},
    "fs": GROUND | PURE | BACKENDS | {"flush", "store"},
    "dcp": GROUND | PURE | BACKENDS | {"flush", "store"},
    "mount": GROUND | PURE | BACKENDS | {"flush", "store"},
    "cli": GROUND | PURE | BACKENDS | {"flush", "store", "dcp"},
    "train": GROUND | PURE | BACKENDS | {"flush", "store", "dcp"},
    "testing": None,  # anything; nothing imports it
    "__init__": {"errors", "misplaced", "store", "fs", "dcp"},  # lazily, but for the first two and the guard of torch
}
TORCH_ALLOWED = {"device", "dcp", "train"}


def modules():
    return sorted(PACKAGE.rglob("*.py"))


def room_of(path):
    relative = path.relative_to(PACKAGE)
    return relative.parts[0] if len(relative.parts) > 1 else relative.stem


def imported(path):
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, f"{path}: relative import"
            if node.module == "tierfs":
                yield from (f"tierfs.{alias.name}" for alias in node.names)
            else:
                yield node.module


@pytest.mark.parametrize("path", modules(), ids=lambda path: str(path.relative_to(PACKAGE)))
def test_a_module_imports_only_from_layers_below(path):
    room = room_of(path)
    assert room in ALLOWED, f"{room} is in no layer: add it to DESIGN and here"
    allowed = ALLOWED[room]
    for name in imported(path):
        parts = name.split(".")
        if parts[0] == "tierfs" and len(parts) > 1 and allowed is not None and parts[1] != room:
            assert parts[1] in allowed or parts[1] == "__version__", f"{path} imports {name}, which lies above it"
        if parts[0] == "torch":
            assert room in TORCH_ALLOWED, f"{path} imports torch"
        assert not (parts[:2] == ["tierfs", "testing"] and room != "testing"), f"{path} imports {name}"


@pytest.mark.parametrize(
    "path", [path for path in modules() if path.name == "__init__.py"], ids=lambda path: path.parent.name
)
def test_what_a_package_exports_is_sorted_and_there(path):
    import importlib

    name = ".".join(path.parent.relative_to(PACKAGE.parent).parts)
    module = importlib.import_module(name)
    exported = getattr(module, "__all__", None)
    if exported is None:
        assert ast.get_docstring(ast.parse(path.read_text())), f"{name} says nothing of itself"
        return
    assert list(exported) == sorted(exported, key=lambda item: (not item.isupper(), not item[0].isupper(), item))
    for item in exported:
        assert getattr(module, item) is not None
