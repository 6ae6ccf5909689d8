"""``python -m tierfs.cli``: the same as ``tierfs``."""

import sys

from tierfs.cli.app import main

if __name__ == "__main__":
    sys.exit(main())
