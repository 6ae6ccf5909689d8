"""What is missing or damaged in the nvme tier, or of an earlier version, is reported. The rest goes on."""

import os

import pytest
from support.nvme_tools import (
    batches,
    chunk_file,
    content_of,
    meta_of,
    open_tier,
    paths,
    save,
    write,
)

from tierfs.errors import CorruptionError, FormatError
from tierfs.host.events import Counters
from tierfs.host.nvme.reader import NvmeReader
from tierfs.host.nvme.tier import has_tier, is_needed
from tierfs.host.pending.scan import DecodedDrafts


@pytest.fixture
def directory(tmp_path):
    return tmp_path / "store"


@pytest.fixture
def stored(directory):
    """A tier with three drafts, the second of them published, and a clean chunk."""
    tier = open_tier(directory)
    save(tier, "a", 1, 2)
    gone = save(tier, "gone", 2, 3)
    save(tier, "b", 4)
    tier.forget_drafts(gone)
    write(tier, 5, keep=False)
    return directory


@pytest.mark.parametrize("size", [None, 0, 100, 4096])
def test_a_draft_whose_chunk_is_missing_is_reported_not_dropped(stored, caplog, size):
    if size is None:
        os.remove(chunk_file(stored, 2))
    else:
        os.truncate(chunk_file(stored, 2), size)
    tier = open_tier(stored)
    first, second = tier.drafts()
    assert (first.path, first.state, first.note) == ("a", "damaged", "1 of 2 chunks are not in the nvme tier")
    assert (second.path, second.state) == ("b", "pending")
    assert "a was saved on this host and is no longer complete" in caplog.text
    usage = tier.usage()
    assert usage.damaged == usage.fallbacks["drafts_damaged"] == 1
    assert usage.fallbacks.get("chunk_cut", 0) == (size is not None)
    (name, data) = content_of(2)
    tier.write(name, meta_of(data), memoryview(data))
    assert [item.state for item in tier.drafts()] == ["pending", "pending"]


@pytest.mark.parametrize("bit", range(8))
def test_a_flipped_bit_in_a_state_loses_no_draft(stored, bit):
    batch = batches(stored)[0]
    content = bytearray(batch.read_bytes())
    content[32] ^= 1 << bit
    batch.write_bytes(content)
    assert paths(open_tier(stored)) == ["a", "b"]


@pytest.mark.parametrize("at", [0, 9, 10, 15, 20, 60])
def test_a_flipped_bit_in_a_table_loses_no_draft(stored, at):
    batch = batches(stored)[0]
    sound = batch.read_bytes()
    for place in (at, len(sound) - 1 - at):
        content = bytearray(sound)
        content[place] ^= 1
        batch.write_bytes(content)
        tier = open_tier(stored)
        assert paths(tier) == ["a", "b"]
        assert [draft.data for draft in tier.drafts()] == [b"manifest of a", b"manifest of b"]
        assert tier.usage().fallbacks.get("tables_damaged", 0) == (place == at)
        assert NvmeReader(stored).draft("a").data == b"manifest of a"


@pytest.mark.parametrize("content", [b"", b"garbage" * 100, None])
def test_a_damaged_batch_is_one_lost_draft_and_can_be_discarded(stored, caplog, content):
    batch = batches(stored)[0]
    if content is None:
        content = bytearray(batch.read_bytes())
        content[60] ^= 1
        content[-60] ^= 1
    batch.write_bytes(content)
    tier = open_tier(stored)
    first, second = tier.drafts()
    assert (first.path, first.state, first.data) == ("", "damaged", b"")
    assert (second.path, second.state) == ("b", "pending")
    assert "no longer complete: its file is damaged" in caplog.text
    reader = NvmeReader(stored)
    assert reader.draft("a").state == "damaged"
    with pytest.raises(CorruptionError, match="discard it with `tierfs flusher discard` for the store's root"):
        DecodedDrafts(Counters()).stored(reader.draft("a"))
    tier.forget_drafts(first.seq)
    assert paths(tier) == ["b"]
    assert reader.draft("a") is None


def test_a_batch_that_was_cut_short_keeps_the_path(stored):
    os.truncate(batches(stored)[0], batches(stored)[0].read_bytes().rindex(b"manifest of a") + len("manifest o"))
    tier = open_tier(stored)
    assert [(item.path, item.data) for item in tier.drafts()] == [("a", b"manifest o"), ("b", b"manifest of b")]


@pytest.mark.parametrize("at", [None, 0, 8, 15])
def test_a_head_that_is_gone_or_damaged_is_made_again(stored, at):
    reader, head = NvmeReader(stored), stored / "nvme" / "head"
    content = bytearray(head.read_bytes())
    os.remove(head)
    if at is not None:
        content[at] ^= 2
        head.write_bytes(content)
    assert reader.draft("a").data == b"manifest of a"
    tier = open_tier(stored)
    save(tier, "c", 9)
    assert reader.draft("c")


def test_files_that_are_no_chunks_are_left_alone(stored):
    chunks = stored / "nvme" / "chunks"
    (chunks / "notes.txt").write_text("mine")
    (chunks / "ab").mkdir()
    (chunks / "new-0").symlink_to(chunks / "notes.txt")
    tier = open_tier(stored)
    write(tier, 8, keep=False)
    tier.evict()
    assert (chunks / "notes.txt").read_text() == "mine"
    assert (chunks / "ab").is_dir()


def test_a_tier_is_needed_while_it_has_a_draft(directory):
    assert not is_needed(directory)
    tier = open_tier(directory)
    write(tier, 1, keep=False)
    assert not is_needed(directory)
    seq = save(tier, "a", 2)
    assert is_needed(directory)
    tier.forget_drafts(seq)
    assert not is_needed(directory)


def test_an_nvme_tier_of_an_earlier_version_is_refused(directory):
    directory.mkdir(mode=0o700)
    (directory / "nvme.arena").write_bytes(bytes(1 << 20))
    for ask in (
        lambda: open_tier(directory),
        lambda: has_tier(directory),
        lambda: NvmeReader(directory).draft("a"),
        lambda: NvmeReader(directory).drafts_below(""),
    ):
        with pytest.raises(FormatError, match="run `tierfs wait URL` with that version"):
            ask()
    assert not NvmeReader(directory).holds(b"n")
    assert os.listdir(directory) == ["nvme.arena"]
