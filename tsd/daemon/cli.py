"""The `tsd` command: flags, early process name, loop, log upload for drop-in runs; then `lifecycle.run`.

`tsd coord …` is the embedded coordination server, `tsd container` the first process of a container. Everything heavy
is imported late, so that `--version`, mistakes in the flags and the process name cost milliseconds.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from tsd.daemon import compat

if TYPE_CHECKING:
    import asyncio

    from tsd.daemon.flags import Settings
    from tsd.daemon.logsetup import LogTap
    from tsd.daemon.statefiles import OpenedState

EXIT_OK, EXIT_FAILED, EXIT_USAGE = 0, 1, 2


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point of the console script; returns the exit code."""
    arguments = list(sys.argv if argv is None else argv)
    is_compat = compat.early(arguments)
    if arguments[1:2] == ["coord"]:
        from tsd.coord.cli import run_command_line

        return run_command_line(arguments[2:])
    if arguments[1:2] == ["container"]:
        import os

        from tsd.daemon import container

        return container.main(os.environ, arguments[2:])
    from tsd.base.errors import TsdError
    from tsd.daemon import flags

    try:
        settings = flags.parse(arguments[1:], compat=is_compat)
        return _run(settings)
    except flags.VersionWanted:
        print(version_text())
        return EXIT_OK
    except flags.HelpWanted as wanted:
        print(wanted)
        return EXIT_OK
    except TsdError as err:
        return _fail(err, is_compat)
    except KeyboardInterrupt:
        return EXIT_OK


def _fail(err: Exception, is_compat: bool) -> int:
    from tsd.base.errors import ConfigError

    print(f"{compat.names(is_compat).program}: {err}", file=sys.stderr)
    return EXIT_USAGE if isinstance(err, ConfigError) else EXIT_FAILED


def version_text() -> str:
    """`tsd --version`: the version, the data path, the interpreter."""
    import platform

    import tsnative
    from tsd.base.version import LONG_VERSION

    return f"{LONG_VERSION}\n  data path: {tsnative.describe()}\n  python: {platform.python_version()}"


def _run(settings: Settings) -> int:
    from tsd.daemon import logsetup

    tap = logsetup.setup(settings.verbose)
    logsetup.tell_where_when_aborted()
    if settings.is_cleanup:
        return _logged(settings, lambda: _cleanup(settings))
    from tsd.daemon.statefiles import open_state

    # Before anything heavy: from here on the LocalAPI's socket accepts.
    state = open_state(settings)
    try:
        return _logged(settings, lambda: _serve(settings, state, tap))
    finally:
        state.close()


def _logged(settings: Settings, work: Callable[[], int]) -> int:
    """Run `work` with the upload of logs and of crash texts that a drop-in run may ask for."""
    import logging

    from tsd.base.version import LONG_VERSION

    uploader = None
    if settings.uploads_logs:
        from tsd.daemon import logupload

        if settings.logs_dir:
            logupload.keep_crashes(settings.logs_dir)
        uploader = logupload.start(settings.log_target, settings.logs_dir)
    try:
        logging.getLogger("tsd.daemon").info("Program starting: %s, %s", LONG_VERSION, settings.names.program)
        if settings.is_compat and settings.knob_on("TS_PLEASE_PANIC"):
            raise RuntimeError("TS_PLEASE_PANIC asked for a panic")
        return work()
    finally:
        if uploader is not None:
            uploader.close()


def _cleanup(settings: Settings) -> int:
    from tsd.daemon.cleanup import cleanup

    return cleanup(settings)


def _serve(settings: Settings, state: OpenedState, tap: LogTap) -> int:
    import asyncio

    from tsd.daemon import lifecycle
    from tsd.transport.descriptors import lift_descriptor_limit

    lift_descriptor_limit()
    with asyncio.Runner(loop_factory=loop_factory(settings.loop)) as runner:
        return runner.run(lifecycle.run(settings, state, tap))


def loop_factory(wanted: str) -> Callable[[], asyncio.AbstractEventLoop]:
    """uvloop where it exists, unless TSD_LOOP says `asyncio`. Raises `ConfigError` for anything else."""
    import asyncio

    from tsd.base.errors import ConfigError

    if wanted not in ("", "uvloop", "asyncio"):
        raise ConfigError(f"TSD_LOOP={wanted}: want uvloop or asyncio")
    if wanted != "asyncio":
        try:
            import uvloop

            factory: Callable[[], asyncio.AbstractEventLoop] = uvloop.new_event_loop
            return factory
        except ImportError:
            if wanted == "uvloop":
                raise ConfigError("TSD_LOOP=uvloop: uvloop is not installed; pip install uvloop") from None
    return asyncio.new_event_loop


if __name__ == "__main__":
    sys.exit(main())
