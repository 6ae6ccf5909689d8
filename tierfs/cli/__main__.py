"""``python -m tierfs.cli``: the same as ``tierfs``."""

import sys

from tierfs.cli.frame import main

if __name__ == "__main__":
    sys.exit(main())
