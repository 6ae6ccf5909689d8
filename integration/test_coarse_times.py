"""A directory on a real filesystem with times in whole seconds, which reuses inode numbers at once."""

from __future__ import annotations

import subprocess

import pytest

from tierfs.objects import LocalObjects
from tierfs.testing import ObjectTierTests


@pytest.fixture(scope="module", params=["ext3", "ext4"])
def mount(request, tmp_path_factory):
    directory = tmp_path_factory.mktemp(request.param)
    image = directory.with_name(f"{directory.name}.img")
    with image.open("wb") as file:
        file.truncate(64 << 20)
    for argv in (
        [f"mkfs.{request.param}", "-q", "-F", "-I", "128", str(image)],
        ["mount", "-o", "loop", str(image), str(directory)],
    ):
        try:
            subprocess.run(argv, check=True, capture_output=True, text=True)
        except FileNotFoundError as error:
            pytest.skip(f"cannot mount a small filesystem here: {error}")
        except subprocess.CalledProcessError as error:
            pytest.skip(f"cannot mount a small filesystem here: {error.stderr.strip()}")
    yield directory
    subprocess.run(["umount", "-l", str(directory)], check=True)


class TestObjects(ObjectTierTests):
    @pytest.fixture
    def objects(self, mount, request):
        return LocalObjects(mount / request.node.name)
