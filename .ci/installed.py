"""Checks an installed tierfs, in an environment outside of the clone: its place, its entry points, its page."""

import importlib.metadata
import re
import subprocess
import sys
import tempfile
import urllib.request
from pathlib import Path

import tierfs

environment = Path(sys.argv[1])
package = Path(tierfs.__file__).parent
assert package.is_relative_to(environment), f"{package} is not in {environment}"
assert importlib.metadata.version("tierfs") == tierfs.__version__

# Each file that the page or its scripts load.
static = sorted(path.name for path in (package / "ui" / "static").iterdir())
with tempfile.TemporaryDirectory() as directory:
    tierfs.init(directory)
    command = [environment / "bin" / "tierfs", "ui", "--port", "0", directory]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as server:
        try:
            said = ""
            while not (found := re.search(r"http://[\w.:]+", said)):
                line = server.stdout.readline()
                assert line, f"tierfs ui ended: {said}"
                said += line
            page = urllib.request.urlopen(f"{found[0]}/").read().decode()
            assert "<script" in page, page
            prefix = re.search(r'src="(.*?)app.js"', page)[1].strip("/")
            for name in static:
                address = f"{found[0]}/{prefix}/{name}" if name != "index.html" else found[0]
                assert urllib.request.urlopen(address).status == 200, name
        finally:
            server.terminate()
print(f"tierfs {tierfs.__version__} from {package.relative_to(environment)}: the page, and its {len(static)} files")
