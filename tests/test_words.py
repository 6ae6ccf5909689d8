"""One word has one meaning: no class name occurs twice, and words that were replaced do not come back."""

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


def test_no_class_name_occurs_twice():
    places = defaultdict(list)
    for path in SOURCES:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ClassDef):
                places[node.name].append(f"{path.relative_to(ROOT)}:{node.lineno}")
    assert not {name: where for name, where in places.items() if len(where) > 1}
