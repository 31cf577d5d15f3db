"""`python -m tsd.coord`."""

import sys

from tsd.coord.cli import run_command_line

if __name__ == "__main__":
    sys.exit(run_command_line(sys.argv[1:]))
