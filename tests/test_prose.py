"""The documents are written in plain English: short sentences, an actor at their head, no private words."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
WORDS_MAX = 35  # in a sentence; 20 on average
COLUMNS_MAX = 100  # of a line that can be wrapped: not of a table, not of code
PLAIN = {  # a private word, and the one that readers know
    "afar": "remotely",
    "anchor": "keyframe",
    "anchors": "keyframes",
    "desk": "worker",
    "desks": "workers",
    "heed": "keep, support",
    "heeds": "keeps, supports",
    "is away": "is unreachable",
    "let go of": "released",
    "lets go of": "releases",
    "given up": "released",
    "put away": "closed",
    "lesser way": "fallback",
    "lineage": "keyframe index",
}
PAGES = sorted([ROOT / "README.md", *(ROOT / "docs").rglob("*.md"), *(ROOT / ".github").glob("[CS]*.md")])
CODE = re.compile(r"^\s*```.*?^\s*```", re.DOTALL | re.MULTILINE)
ITEM = re.compile(r"^\s*(?:[-*]|\d+\.)\s+")


def blocks(text):
    """Paragraphs, list items and the cells of tables, each on one line, without markup."""
    text = CODE.sub("\n\n", text)
    text = re.sub(r"`[^`]+`", "Code", text)
    text = re.sub(r"!?\[([^\]]*)\]\([^)]*\)", r"\1", text)
    text = re.sub(r"<!--.*?-->|</?\w[^>]*>|\*\*", "", text, flags=re.DOTALL)
    found = [""]
    for line in text.splitlines():
        if line.lstrip().startswith("|"):
            found += [cell.strip() for cell in line.strip().strip("|").split("|")] + [""]
        elif line.startswith("#"):  # a heading may be "What it cannot do"
            found.append("")
        elif not line.strip() or ITEM.match(line):
            found.append(ITEM.sub("", line).strip())
        else:
            found[-1] += " " + line.strip()
    return [block.strip() for block in found if block.strip()]


def sentences(block):
    return [
        part.strip()
        for part in re.split(r"(?<=[.!?])\s+(?=[A-Z\"(])", block.replace("*", "").replace("e.g.", "eg"))
        if part.strip()
    ]


def problems(text):
    """All that is wrong with a page, as a person would note it."""
    found = []
    for number, line in enumerate(CODE.sub(lambda code: "\n" * code[0].count("\n"), text).splitlines(), 1):
        if len(line) > COLUMNS_MAX and not line.lstrip().startswith(("|", "<")) and " " in line.strip()[:COLUMNS_MAX]:
            found.append(f"line {number} has {len(line)} columns")
    for block in blocks(text):
        for sentence in sentences(block):
            if re.match(r"(What|Who|Whoever|Of|That)\b", sentence) and not sentence.endswith("?"):
                found.append(f"name the subject first: {sentence[:80]}")
            words = [word for word in sentence.split() if not word.strip("(,;.:)").startswith("Code")]
            if len(words) > WORDS_MAX:
                found.append(f"{len(words)} words: {sentence[:80]}")
        found += [
            f"write {PLAIN[word]!r} for {word!r}: {block[:80]}"
            for word in PLAIN
            if re.search(rf"\b{word}\b", block.lower())
        ]
    return found


def test_a_docstring_names_its_subject_first():
    opening = re.compile(r"^\s*\"\"\"(?:What|Who|Whoever|Of|That)\b.*", re.MULTILINE)
    for path in sorted((ROOT / "tierfs").rglob("*.py")):
        assert not opening.findall(path.read_text()), path.relative_to(ROOT)


def test_a_page_is_plain_english():
    found = {str(page.relative_to(ROOT)): problems(page.read_text()) for page in PAGES}
    assert {name: wrong for name, wrong in found.items() if wrong} == {}


@pytest.mark.parametrize(
    "text",
    [
        "What is pending stays.",
        "Of two writers one wins.",
        "It heeds the checksum.",
        "a " * 36 + ".",
        "long " * 21,
        "| a | Who reads it waits. |",
        "- That it waits is right.",
    ],
)
def test_the_check_refuses(text):
    assert problems(text)


@pytest.mark.parametrize(
    "text", ["## What is in it", "What is it?", "```\nOf\n" + "x " * 90 + "\n```", "It waits. `heed` is a name."]
)
def test_the_check_accepts(text):
    assert not problems(text)
