"""Rules of the tree that no other tool checks."""

import ast
import re
import subprocess
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
MAX_LINES = 500
# One stray __init__.py in `platform` or `packaging` would shadow the standard library or PyPI's package of that name.
BARE_FOLDERS = ("platform", "native", "packaging", "tests")
MACHINE_PATHS = re.compile(r"(?<![\w./-])/(?:work|opt/peers|root|home/\w+)/")


@cache
def _tracked() -> tuple[Path, ...]:
    """Files of the product: tracked by git, or everything when this is not a clone."""
    done = subprocess.run(["git", "-C", ROOT, "ls-files", "-z"], capture_output=True, text=True)
    if done.returncode == 0 and done.stdout:
        return tuple(path for name in done.stdout.split("\0") if name and (path := ROOT / name).is_file())
    return tuple(p for p in ROOT.rglob("*") if p.is_file() and not any(part.startswith(".") for part in p.parts))


def _python() -> list[Path]:
    return [path for path in _tracked() if path.suffix == ".py"]


@pytest.mark.parametrize("folder", BARE_FOLDERS)
def test_folders_that_must_not_be_packages(folder: str) -> None:
    assert not (ROOT / folder / "__init__.py").exists()


def test_no_init_in_tests() -> None:
    assert [path for path in _python() if path.name == "__init__.py" and "tests" in path.parts] == []


def test_the_standard_library_is_not_shadowed() -> None:
    import platform

    assert platform.system()


def test_files_stay_short() -> None:
    too_long = {
        str(path.relative_to(ROOT)): length
        for path in _tracked()
        if path.suffix in (".py", ".c", ".h", ".pyx", ".sh")
        and (length := len(path.read_bytes().splitlines())) > MAX_LINES
    }
    assert too_long == {}


def test_nothing_names_somebodys_machine() -> None:
    found = []
    for path in _tracked():
        if path.suffix in (".py", ".c", ".h", ".pyx", ".sh", ".toml", ".md", ".yml", ".service", ".plist", "") and (
            path != Path(__file__)
        ):
            text = path.read_text(errors="replace")
            found += [f"{path.relative_to(ROOT)}: {match.group(0)}" for match in MACHINE_PATHS.finditer(text)]
    assert found == []


def test_package_inits_import_nothing() -> None:
    """tsctl starts fast because of this; the roots of tsctl and tsnative have code of their own."""
    allowed = {ROOT / "tsctl" / "__init__.py", ROOT / "native" / "tsnative" / "__init__.py"}
    busy = [
        str(path.relative_to(ROOT))
        for path in _python()
        if path.name == "__init__.py"
        and path not in allowed
        and any(isinstance(node, ast.Import | ast.ImportFrom) for node in ast.walk(ast.parse(path.read_text())))
    ]
    assert busy == []


def test_every_module_says_what_it_is() -> None:
    silent = [
        str(path.relative_to(ROOT))
        for path in _python()
        if path.name not in ("__init__.py",) and ast.get_docstring(ast.parse(path.read_text())) is None
    ]
    assert silent == []


def test_test_files_have_unique_names() -> None:
    names = [path.name for path in _python() if path.name.startswith("test_")]
    assert sorted({name for name in names if names.count(name) > 1}) == []


def test_wall_clock_is_not_read_where_a_clock_is_injected() -> None:
    found = [
        str(path.relative_to(ROOT))
        for path in _python()
        if path.relative_to(ROOT).parts[0] == "tsd" and re.search(r"\bdatetime\.now\(", path.read_text())
    ]
    assert found == []
