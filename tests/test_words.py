"""One word has one meaning: no name of a type or module occurs twice, and replaced words do not come back."""

import ast
import re
from collections import defaultdict
from pathlib import Path

ROOT = Path(__file__).parents[1]
SOURCES = sorted((ROOT / "tierfs").rglob("*.py"))
REPLACED = {  # a word, and the one that is used instead
    r"\banchors?\b": "keyframe",
    r"\b(Neighbours|_neighbours)\b": "RamTier",
    r"\b(Supply|_supply)\b": "SegmentPool",
    r"\b(Shares|_shares)\b": "RamBudget",
    r"\bPlaces\b": "SlotAllocator",
    r"\bFinder\b": "PendingScan",
    r"\bKeeper\b": "Backfill",
    r"\b[Ss]ettler\b": "NvmePersister",
    r"\b[Ll]ineages?\b": "KeyframeIndex, SaveSeries",
    r"\bHint\b": "ChunkContext",
    r"\b[Pp]resence\b": "LeaseCache",
    r"distrust": "mark_damaged, report_damage",
    r"\bdoubtful\b": "unverified",
    r"\bElsewhere\(": "RemoteReplica",
    r"\bgiven up\b": "discarded",
    r"\bput away\b": "closed",
    r"\b(let|lets) go\b": "released",
    r"\blesser way\b": "fallback",
    r"\b(is|are) away\b": "unreachable",
    r"\b([Ss]omebody|[Ww]hoever)\b": "the process, thread or user that is meant",
    r"\bno good\b": "invalid",
    r"\bfrom afar\b": "remotely",
    r"\btheirs stands\b": "their version is kept",
}


def test_a_word_that_was_replaced_does_not_come_back():
    found = []
    for path in SOURCES:
        text = path.read_text()
        for word, instead in REPLACED.items():
            found += [
                f"{path.relative_to(ROOT)}:{text.count(chr(10), 0, match.start()) + 1}: write {instead}: {match[0]}"
                for match in re.finditer(word, text)
            ]
    assert not found


ROLES = set(
    "changing client copy listing protocol publish reader reading report retention scan server settings state status tier tiers "
    "transfer upkeep verify wire writer".split()
)
"""Names that say what a module does for its folder, so that several folders have one."""
SUBJECTS = {  # what both modules are about, seen from their folders: the command of a thing, the format of a thing
    "checkpoint": "a checkpoint: its commands, the parts of it that dcp reads, and its bytes",
    "choice": "the choice of a codec, and of the tensors to offload",
    "chunks": "the chunk files of the nvme tier, and chunks of the object tier",
    "descriptor": "a store's descriptor: its bytes, and how it is found",
    "files": "the open files of a mount, and the files of the web page",
    "flusher": "the flusher, and its commands",
    "local": "the local tiers' commands, and the backend for a directory",
    "memory": "the memory limit, a backend in memory, and the memory of activations",
    "metadata": "a checkpoint's metadata of tierfs and of torch",
    "objects": "a checkpoint's objects that are no tensors, and the suite for object tiers",
    "run": "a run of training, and of gc",
}
"""Modules of one name that are about one thing, or still about two. No name may join them."""


def types_of(tree):
    """Yield the name and line of each class, type alias, new type and enum; a class without its underscore."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef):
            yield node.name.strip("_"), node.lineno
        elif isinstance(node, ast.AnnAssign) and ast.unparse(node.annotation) == "TypeAlias":
            yield ast.unparse(node.target), node.lineno
        elif isinstance(node, ast.Assign) and isinstance(node.value, ast.Call):
            makers = {"NewType", "NamedTuple", "namedtuple", "Enum", "IntEnum", "Flag", "IntFlag"}
            if ast.unparse(node.value.func).rpartition(".")[2] in makers:
                yield from ((ast.unparse(target), node.lineno) for target in node.targets)


def test_no_name_of_a_type_occurs_twice():
    places = defaultdict(list)
    for path in SOURCES:
        for name, line in types_of(ast.parse(path.read_text())):
            places[name].append(f"{path.relative_to(ROOT)}:{line}")
    twice = {name: where for name, where in places.items() if len(where) > 1}
    assert not twice


def test_no_name_of_a_module_occurs_twice():
    places = defaultdict(list)
    for path in SOURCES:
        if not path.stem.startswith("__"):
            places[path.stem].append(str(path.relative_to(ROOT)))
    twice = {name for name, where in places.items() if len(where) > 1}
    assert {name: places[name] for name in twice - ROLES - SUBJECTS.keys()} == {}
    assert twice == ROLES | SUBJECTS.keys(), "a name that occurs once needs no exception"


def test_the_glossary_has_every_level_and_no_word_that_nothing_uses():
    from tierfs.host.pending.levels import Level

    glossary = ROOT / "docs" / "reference" / "glossary.md"
    rows = dict(re.findall(r"^\| ([^|]+) \| (.+) \|$", glossary.read_text(), re.MULTILINE))
    assert re.findall(r"`(\w+)`", rows["level"]) == [level.name.lower() for level in Level]
    pages = [path for path in (ROOT / "docs").rglob("*.md") if path != glossary]
    text = "\n".join(path.read_text() for path in [*SOURCES, *pages]).lower().replace("_", "-")
    words = [word for row in rows for word in row.split(", ") if word not in {"Word", "---"}]
    assert {word for word in words if not re.search(rf"\b{word.lower()}", text)} == set()
