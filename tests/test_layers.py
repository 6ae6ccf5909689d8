"""Layers import in one direction: no module imports a higher layer, not even inside a function, or in a circle."""

import ast
import re
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1] / "tierfs"

GROUND = {
    "errors",
    "digest",
    "clock",
    "units",
    "threads",
    "buffers",
    "localfile",
    "gc_pause",
    "urls_as_paths",
    "repeated_warnings",
    "kernels",
    "_kernels",
    "_fork",
    "checked_json",
}
FORMATS = GROUND | {"format", "codec"}
BELOW_STORE = FORMATS | {"objects", "host"}
BELOW_SESSION = BELOW_STORE | {"store", "flusher", "satellites"}
BELOW_FACES = BELOW_SESSION | {"session"}
CORE = BELOW_FACES | {"fs", "dcp", "device", "_building"}
SATELLITES = {"cli", "train", "mount", "checkpoint", "peers", "plugs", "ui", "demo", "testing", "experimental"}
# The registry, the package's own face, and advice for users of other frameworks.
NAME_SATELLITES = {"satellites", "__init__", "urls_as_paths"}

# The layers that each layer may import besides itself. Layers joined by `|` do not know each other:
#     ground <- format | codec <- objects | host | device <- store <- flusher <- session <- fs | dcp | peers
#     <- checkpoint <- train <- demo | plugs <- cli <- ui; experimental stands on device and dcp
ALLOWED = {
    "errors": set(),
    "_fork": set(),
    "_building": set(),  # setuptools imports it alone
    "satellites": set(),
    "threads": {"_fork"},
    "localfile": set(),
    "urls_as_paths": {"errors"},
    "repeated_warnings": {"errors"},
    "kernels": {"_kernels"},
    "digest": {"errors"},
    "clock": {"errors"},
    "units": {"errors"},
    "checked_json": {"errors", "digest"},
    "gc_pause": {"threads", "_fork"},
    "buffers": {"errors", "digest", "_fork"},
    "format": GROUND,
    "codec": GROUND,
    "objects": FORMATS,
    "host": FORMATS,
    "device": FORMATS,
    "store": BELOW_STORE,
    "flusher": BELOW_STORE | {"store"},
    "session": BELOW_SESSION,
    "fs": BELOW_FACES,
    "dcp": BELOW_FACES | {"device"},
    "mount": BELOW_FACES,
    "peers": BELOW_FACES,
    "train": BELOW_FACES | {"device", "dcp", "checkpoint"},
    "checkpoint": BELOW_FACES | {"dcp"},
    "demo": BELOW_FACES | {"dcp", "checkpoint", "train"},
    "plugs": BELOW_FACES | {"dcp", "checkpoint", "train"},
    "experimental": BELOW_FACES | {"device", "dcp"},
    "cli": BELOW_FACES | {"dcp", "checkpoint", "demo", "mount", "peers"},
    "ui": BELOW_FACES | {"dcp", "checkpoint", "train", "cli"},
    "testing": None,  # may import anything; no other layer imports it
    "__init__": {
        "errors",
        "urls_as_paths",
        "satellites",
        "session",
        "fs",
        "dcp",
        "mount",
    },  # lazily, except errors and urls_as_paths
}
TORCH_ALLOWED = {"device", "dcp", "train", "checkpoint", "demo", "plugs", "experimental"}


def modules():
    return sorted(PACKAGE.rglob("*.py"))


def name_of(path):
    parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def room_of(path):
    relative = path.relative_to(PACKAGE)
    return relative.parts[0] if len(relative.parts) > 1 else relative.stem


def imported(nodes, path):
    for node in nodes:
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, f"{path}: relative import"
            # Each imported name may be a module of the package.
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def test_a_module_imports_only_from_layers_below():
    for path in modules():
        room = room_of(path)
        assert room in ALLOWED, f"{room} is in no layer: add it here"
        allowed = ALLOWED[room]
        for name in imported(ast.walk(ast.parse(path.read_text())), path):
            parts = name.split(".")
            if parts[0] == "tierfs" and len(parts) > 1 and allowed is not None and parts[1] != room:
                assert parts[1] in allowed or parts[1] == "__version__", f"{path} imports {name}, which lies above it"
            assert parts[0] != "torch" or room in TORCH_ALLOWED, f"{path} imports torch"
            assert room == "testing" or parts[:2] != ["tierfs", "testing"], f"{path} imports {name}"


def test_no_file_of_the_core_imports_or_names_a_satellite():
    named = re.compile(rf"tierfs\.({'|'.join(SATELLITES)})\b")
    assert not CORE & SATELLITES
    for path in modules():
        room = room_of(path)
        assert room in CORE | SATELLITES | NAME_SATELLITES, f"{room} is neither core nor satellite: add it here"
        if room in CORE - NAME_SATELLITES:
            assert not named.search(path.read_text()), f"{path} names {named.search(path.read_text())[0]}"


def at_import(body):
    """Yield the imports of a module outside of its functions, those under TYPE_CHECKING too."""
    for node in body:
        if isinstance(node, ast.If):
            yield from at_import([*node.body, *node.orelse])
        elif isinstance(node, ast.Try):
            yield from at_import(
                [*node.body, *(step for handler in node.handlers for step in handler.body), *node.orelse]
            )
        elif isinstance(node, (ast.Import, ast.ImportFrom)):
            yield node


def test_no_two_modules_import_each_other_in_a_circle():
    found = {name_of(path): path for path in modules() if room_of(path) != "testing"}
    edges = {}
    for name, path in found.items():
        wanted = imported(at_import(ast.parse(path.read_text()).body), path)
        edges[name] = sorted(
            ({full if full in found else full.rpartition(".")[0] for full in wanted} & found.keys()) - {name}
        )
    finished, on_the_way = set(), []

    def visit(name):
        if name in finished:
            return
        assert name not in on_the_way, (
            f"a circle of imports: {' -> '.join([*on_the_way[on_the_way.index(name) :], name])}"
        )
        on_the_way.append(name)
        for other in edges[name]:
            visit(other)
        finished.add(on_the_way.pop())

    for name in edges:
        visit(name)


@pytest.mark.parametrize(
    "path", [path for path in modules() if path.name == "__init__.py"], ids=lambda path: path.parent.name
)
def test_a_packages_exports_are_sorted_and_exist(path):
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
