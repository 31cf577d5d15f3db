"""`python -m tsd`."""

import sys

from tsd.daemon.cli import main

if __name__ == "__main__":
    sys.exit(main(["tsd", *sys.argv[1:]]))
