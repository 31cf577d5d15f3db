"""`python -m tsd.coord`."""

from tsd.coord.cli import coord

if __name__ == "__main__":
    coord(prog_name="tsd coord")
