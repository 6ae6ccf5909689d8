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
# Pages that nobody has rewritten yet. The list only gets shorter.
TO_REWRITE = {
    "docs/decisions/0001-record-keys-end-in-a-mark.md",
    "docs/decisions/0002-write-id-in-the-record-alone.md",
    "docs/decisions/0003-tombstones-have-one-size.md",
    "docs/decisions/0004-removal-of-a-failing-handle.md",
    "docs/decisions/0005-rollback-journal-for-nvme-db.md",
    "docs/decisions/0006-the-flusher-is-a-command.md",
    "docs/decisions/0007-writes-that-pass-the-flusher-by.md",
    "docs/decisions/0008-closing-order-covers-what-lies-below.md",
    "docs/decisions/0009-changes-of-pending-files-are-drafts.md",
    "docs/decisions/0010-looks-while-the-object-tier-is-away.md",
    "docs/decisions/0011-the-flusher-works-on-threads.md",
    "docs/decisions/0012-pending-saves-are-files.md",
    "docs/decisions/0013-replicas-from-the-last-plan.md",
    "docs/decisions/0014-the-command-line-uses-dcp.md",
    "docs/decisions/0015-torch-calls-tierfs-at-its-import.md",
    "docs/decisions/0016-staged-slots-are-lent.md",
    "docs/decisions/0017-endpoints-are-tried.md",
    "docs/decisions/0018-s3-by-botocore.md",
    "docs/decisions/0019-a-delta-is-worth-0.85.md",
    "docs/decisions/0020-encoding-by-thread-time.md",
    "docs/decisions/0021-chunks-go-ahead-of-the-nvme-tier.md",
    "docs/decisions/0022-threads-that-fetch-take-turns.md",
    "docs/decisions/0023-a-chunk-is-read-once-for-all-its-tensors.md",
    "docs/decisions/0024-pending-pins-only-its-own-memory.md",
    "docs/decisions/0025-a-save-is-its-threads.md",
    "docs/decisions/0026-uploads-by-processors.md",
    "docs/decisions/0027-local-tiers-belong-to-a-place.md",
    "docs/decisions/0028-one-folder-of-segments.md",
    "docs/decisions/0029-runs-of-several-chunks.md",
    "docs/decisions/0030-planes-are-packed-before-they-are-coded.md",
    "docs/decisions/0031-a-chunk-is-decoded-while-it-comes.md",
    "docs/decisions/0032-a-save-asks-once-what-is-there.md",
    "docs/decisions/0033-puts-of-what-is-encoded-are-timed-apart.md",
    "docs/decisions/0034-nothing-is-collected-while-dcp-plans.md",
    "docs/decisions/0035-segments-of-huge-pages.md",
    "docs/decisions/0036-room-is-made-before-it-is-needed.md",
    "docs/decisions/0037-the-flusher-gives-way.md",
    "docs/decisions/0038-lanes-of-two-bytes.md",
    "docs/decisions/0039-writing-ahead-of-the-draft.md",
    "docs/decisions/0040-processes-that-encode.md",
    "docs/decisions/0041-what-most-chunks-are.md",
    "docs/decisions/0042-what-is-not-done-is-tried-again.md",
    "docs/decisions/0043-desks.md",
    "docs/decisions/0044-large-tensors-by-memcpy.md",
    "docs/decisions/0045-torchs-planner-runs-nothing.md",
    "docs/decisions/0046-a-mib-at-a-time.md",
    "docs/decisions/0047-the-device-tier-copies-what-is-unchanged-from-ram.md",
    "docs/decisions/0048-the-layout-follows-the-bytes.md",
    "docs/decisions/0049-reused-chunks-are-read-back.md",
    "docs/decisions/0050-every-segment-has-a-file.md",
    "docs/decisions/0051-a-link-leads-to-the-segments.md",
    "docs/decisions/0055-raw-under-pressure.md",
    "docs/decisions/0056-two-marks-without-a-lock.md",
    "docs/decisions/0058-the-mount-speaks-fuse.md",
    "docs/decisions/README.md",
    "docs/explanation/architecture.md",
    "docs/explanation/codecs.md",
    "docs/explanation/device.md",
    "docs/explanation/performance.md",
    "docs/how-to/checkpoints.md",
    "docs/how-to/damage.md",
    "docs/how-to/flusher-sidecar.md",
    "docs/how-to/frameworks.md",
    "docs/how-to/gpu.md",
    "docs/how-to/integration-tests.md",
    "docs/how-to/mount.md",
    "docs/how-to/test-servers.md",
    "docs/how-to/upkeep.md",
    "docs/how-to/write-behind.md",
    "docs/reference/FORMAT.md",
    "docs/reference/checkpoint-format.md",
    "docs/reference/cli.md",
    "docs/reference/configuration.md",
    "docs/reference/dcp.md",
    "docs/reference/errors.md",
    "docs/reference/levels.md",
    "docs/reference/local-tiers.md",
    "docs/reference/object-tiers.md",
    "docs/reference/versions.md",
}

PAGES = sorted([ROOT / "README.md", *(ROOT / "docs").rglob("*.md"), *(ROOT / ".github").glob("[CS]*.md")])
NAMES = [str(page.relative_to(ROOT)) for page in PAGES]
CODE = re.compile(r"^\s*```.*?^\s*```", re.DOTALL | re.MULTILINE)
ITEM = re.compile(r"^\s*(?:[-*]|\d+\.)\s+")


def page_text(name):
    """A page, but for the changes that everybody adds to the change log."""
    return (ROOT / name).read_text().partition("\n## Under way")[0]


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
        part.strip() for part in re.split(r"(?<=[.!?])\s+(?=[A-Z\"(])", block.replace("e.g.", "eg")) if part.strip()
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
            if len(sentence.split()) > WORDS_MAX:
                found.append(f"{len(sentence.split())} words: {sentence[:80]}")
        found += [
            f"write {PLAIN[word]!r} for {word!r}: {block[:80]}"
            for word in PLAIN
            if re.search(rf"\b{word}\b", block.lower())
        ]
    return found


@pytest.mark.parametrize("name", sorted(set(NAMES) - TO_REWRITE))
def test_a_page_is_plain_english(name):
    assert not problems(page_text(name))


@pytest.mark.parametrize("name", sorted(TO_REWRITE))
def test_a_page_that_is_plain_leaves_the_list(name):
    assert name in NAMES, "the page is gone: take it off the list"
    assert problems(page_text(name)), "the page is plain: take it off the list"


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
