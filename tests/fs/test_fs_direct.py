"""What is written without the flusher is encoded as well, by what its file's own table says."""

from collections import Counter

import pytest
import safetensors.torch
import torch

import tierfs
from tierfs.codec import Codec, Reason
from tierfs.digest import BLOCK_BYTES
from tierfs.store.fetching import read_envelope
from tierfs.store.load import expand_rows
from tierfs.store.records import observe

ROWS = 2 * BLOCK_BYTES // 4
DATA = safetensors.torch.save(
    {f"w{number}": torch.randn(ROWS, generator=torch.Generator().manual_seed(number)) for number in range(3)}
)


def written(place, codecs, name="step_1/model.safetensors"):
    """The blocks of a file, written with these codecs, that the store has then."""
    fs = tierfs.TierFileSystem(
        target_protocol=place.protocol, ram="0", nvme="0", codecs=codecs, skip_instance_cache=True
    )
    with fs.open(place / name, "wb") as file:
        file.write(DATA)
    assert fs.cat(place / name) == DATA
    rows = expand_rows(place.store, observe(place.store, name).manifest, name)
    return [block for row in rows for block in read_envelope(place.store, row, name).blocks]


def test_tensors_are_encoded_as_what_they_are(place):
    blocks = written(place, "all")
    assert Counter(Codec(block.codec) for block in blocks)[Codec.PLANE] == 6
    assert Counter(block.reason for block in blocks)[Reason.NO_BASE] >= 6


@pytest.mark.parametrize(("codecs", "allowed"), [("off", {Codec.STORE}), ("zstd", {Codec.STORE, Codec.ZSTD})])
def test_a_codec_that_is_not_allowed_is_not_used(place, codecs, allowed):
    assert {Codec(block.codec) for block in written(place, codecs)} <= allowed


def test_what_is_known_of_a_tensor_is_kept_for_the_next_save(place, monkeypatch):
    tried = []
    choose = tierfs.store.encoder.choose
    monkeypatch.setattr(
        "tierfs.store.encoder.choose", lambda *arguments, **about: tried.append(about) or choose(*arguments, **about)
    )
    fs = tierfs.TierFileSystem(
        target_protocol=place.protocol, ram="0", nvme="0", codecs="all", skip_instance_cache=True
    )
    for step in range(3):
        state = {"w": torch.randn(ROWS, generator=torch.Generator().manual_seed(step))}
        with fs.open(place / f"step_{step}/model.safetensors", "wb") as file:
            file.write(safetensors.torch.save(state))
    assert [about["kind"] for about in tried].count("float") == 1
