"""``import tierfs`` is cheap: it loads neither torch nor cloud clients nor any other heavy package."""

import json
import subprocess
import sys

import tierfs

HEAVY = {
    "torch",
    "numpy",
    "s3fs",
    "gcsfs",
    "adlfs",
    "obstore",
    "boto3",
    "botocore",
    "aiobotocore",
    "aiohttp",
    "cupy",
    "rich",
}


def loaded_by(code):
    script = (
        f"import sys, json; before = set(sys.modules); {code}; print(json.dumps(sorted(set(sys.modules) - before)))"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    return {name.partition(".")[0] for name in json.loads(done.stdout)}


def test_importing_tierfs_loads_only_its_errors():
    loaded = loaded_by("import tierfs")
    assert not loaded & (HEAVY | {"fsspec", "xxhash", "zstandard", "asyncio"})


def test_importing_the_filesystem_and_the_store_loads_nothing_heavy():
    assert not loaded_by("import tierfs.fs, tierfs.session, tierfs.objects") & HEAVY


def test_a_flusher_of_a_local_directory_goes_without_fsspec_and_asyncio(tmp_path):
    tierfs.init(f"file://{tmp_path}/store")
    code = (
        "import tierfs.flusher.engine, tierfs.flusher.publish, tierfs.cli.commands.flusher; "
        f"from tierfs.session import open_store, parse_url; open_store(parse_url('tierfs::file://{tmp_path}/store/run'))"
    )
    assert not loaded_by(code) & {"fsspec", "asyncio"}


def test_fsspec_finds_the_filesystem_by_its_entry_point():
    code = "import fsspec; cls = fsspec.get_filesystem_class('tierfs'); assert cls.protocol == 'tierfs', cls"
    assert not loaded_by(code) & HEAVY


def test_starting_the_command_line_loads_nothing_heavy():
    code = "import contextlib, io, tierfs.cli\nwith contextlib.redirect_stdout(io.StringIO()): tierfs.cli.main(['version'])"
    script = f"import sys, json\n{code}\nprint(json.dumps(sorted(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert not {name.partition(".")[0] for name in json.loads(done.stdout)} & HEAVY
