"""``python -m tierfs.mount URL DIRECTORY``: the process that serves a mount. ``tierfs mount`` starts it."""

import logging
import sys

from tierfs.mount.process import serve_from_stdin

if __name__ == "__main__":
    logging.basicConfig(format="%(asctime)s %(levelname)s %(name)s: %(message)s", level=logging.INFO)
    sys.exit(serve_from_stdin(sys.argv[1], sys.argv[2]))
