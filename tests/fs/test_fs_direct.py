"""Files that are written without the flusher are encoded as well, by their own tables of tensors."""

import random
import threading
from collections import Counter
from concurrent.futures import ThreadPoolExecutor

import pytest
from support.waiting import HANG_S

torch = pytest.importorskip("torch", reason="torch is not installed")

import safetensors.torch

import tierfs
from tierfs.codec import Codec, Reason
from tierfs.digest import BLOCK_BYTES
from tierfs.store.encode import encoder
from tierfs.store.read.lookup import read_envelope
from tierfs.store.read.reader import expand_rows
from tierfs.store.tree.records import observe

NAME = "step_1/model.safetensors"


def noise(seed, blocks=1):
    return torch.randn(blocks * BLOCK_BYTES // 4, generator=torch.Generator().manual_seed(seed))


def writer(place, codecs):
    options = {"ram": "0", "nvme": "0", "codecs": codecs, "skip_instance_cache": True}
    return tierfs.TierFileSystem(target_protocol=place.protocol, **options)


def written(place, codecs):
    """Write a file with these codecs. Return its stored blocks."""
    fs, data = writer(place, codecs), safetensors.torch.save({f"w{number}": noise(number, 2) for number in range(3)})
    fs.pipe_file(place / NAME, data)
    assert fs.cat(place / NAME) == data
    rows = expand_rows(place.store, observe(place.store, NAME).manifest, NAME)
    return [block for row in rows for block in read_envelope(place.store, row, NAME).blocks]


def test_tensors_are_encoded_as_what_they_are(place):
    blocks = written(place, "all")
    assert Counter(Codec(block.codec) for block in blocks)[Codec.PLANE] == 6
    assert Counter(block.reason for block in blocks)[Reason.NO_BASE] >= 6


@pytest.mark.parametrize(("codecs", "allowed"), [("off", {Codec.STORE}), ("zstd", {Codec.STORE, Codec.ZSTD})])
def test_a_codec_that_is_not_allowed_is_not_used(place, codecs, allowed):
    assert {Codec(block.codec) for block in written(place, codecs)} <= allowed


def test_bytes_without_tensors_are_tried_block_by_block(place):
    # The noise in front does not decide for the text behind it.
    text = b"".join(b"%d: nothing new\n" % number for number in range(1_000_000))
    writer(place, "auto").pipe_file(place / "log", random.Random(1).randbytes(BLOCK_BYTES) + text)
    stored = sum(place.store.objects.head(key).size for key in place.chunks())
    assert stored < BLOCK_BYTES + len(text) / 4


def test_all_who_write_to_a_store_know_the_same(place):
    store, together = place.store, threading.Barrier(4)

    def encoder_of(_):
        together.wait(HANG_S)
        return store.encoder

    with ThreadPoolExecutor(4) as threads:
        assert len(set(threads.map(encoder_of, range(4)))) == 1


def test_a_tensors_codec_is_remembered_for_later_saves(place, monkeypatch):
    # This holds for saves of many files. Every `REPROBE_SAVES` saves, the codecs are tried again.
    tried, choose = [], encoder.choose
    monkeypatch.setattr(encoder, "choose", lambda *all_, **about: tried.append(about["kind"]) or choose(*all_, **about))
    fs, files, counts = writer(place, "all"), 5, []
    for step in range(encoder.REPROBE_SAVES + 1):
        tried.clear()
        for number in range(files):
            data = safetensors.torch.save({f"w{number}": noise(step * files + number)})
            fs.pipe_file(place / f"step_{step}/model-{number:05}.safetensors", data)
        counts.append(tried.count("float"))
    assert counts == [files, *[0] * (encoder.REPROBE_SAVES - 1), files]
