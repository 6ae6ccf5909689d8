"""``python -m tierfs.mount URL DIRECTORY``: the process that serves a mount. ``tierfs mount`` starts it."""

import logging
import sys

from tierfs.mount.process import serve_from_stdin

if __name__ == "__main__":
    # All mounts of a state directory share one log.
    directory = sys.argv[2].replace("%", "%%")
    logging.basicConfig(format=f"%(asctime)s %(levelname)s {directory}: %(name)s: %(message)s", level=logging.INFO)
    sys.exit(serve_from_stdin(sys.argv[1], sys.argv[2]))
