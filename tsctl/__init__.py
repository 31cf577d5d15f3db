"""tsctl: the command-line client of tsd; also speaks to tailscaled's socket.

Starts fast: standard library only, every command in a module of its own that is imported when it is used. It has its
own small flag parser because the field's flag rules (one or two dashes, `-x=false`, a repeated flag is an error,
nothing abbreviated) are not those of argparse or click, and because importing either costs more than the whole of
`tsctl status`.
"""


def main() -> None:
    """Entry point of the `tsctl` script."""
    from tsctl.root import run_and_exit

    run_and_exit()
