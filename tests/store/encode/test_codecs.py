"""The option ``codecs``."""

from __future__ import annotations

import pytest

from tierfs.codec import Codec
from tierfs.errors import InvalidInputError
from tierfs.store.encode.pipeline import AUTO, Codecs


@pytest.mark.parametrize(
    ("text", "allowed", "always"),
    [
        ("auto", set(Codec), False),
        ("all", set(Codec), True),
        ("off", {Codec.STORE}, False),
        ("zstd, Plane", {Codec.STORE, Codec.CONST, Codec.ZSTD, Codec.PLANE}, True),
        ("store", {Codec.STORE}, True),
    ],
)
def test_allowed_codecs_are_parsed(text, allowed, always):
    codecs = Codecs.parse(text)
    assert (set(codecs.allowed), codecs.always) == (allowed, always)


@pytest.mark.parametrize("text", ["auto", "all", "off", "zstd,plane", "dplane"])
def test_allowed_codecs_survive_a_round_trip_as_text(text):
    codecs = Codecs.parse(text)
    assert Codecs.parse(str(codecs)).allowed == codecs.allowed
    assert Codecs.parse("auto") == AUTO == Codecs.parse(str(AUTO))


@pytest.mark.parametrize("text", ["", "gzip", "zstd,", "auto,zstd", "ALL", "3"])
def test_an_unknown_codec_is_refused_by_name(text):
    with pytest.raises(InvalidInputError, match="choose auto, all, off, or names among store, zstd"):
        Codecs.parse(text)
