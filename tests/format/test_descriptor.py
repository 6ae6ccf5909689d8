"""A hostile store descriptor raises an error of tierfs, whatever it contains."""

import pytest

from tierfs.errors import CorruptionError, FormatError
from tierfs.format.descriptor import Descriptor


@pytest.mark.parametrize("name", ["x", "format"])
def test_a_deeply_nested_descriptor_is_refused(name):
    for depth in range(800, 1000):
        deep = b"[" * depth + b"]" * depth
        members = {b"magic": b'"tierfs-store"', b"format": b"1", name.encode(): deep}
        with pytest.raises((CorruptionError, FormatError), match="WHERE"):
            Descriptor.decode(
                b"{" + b",".join(b'"' + key + b'":' + value for key, value in members.items()) + b"}", "WHERE"
            )
