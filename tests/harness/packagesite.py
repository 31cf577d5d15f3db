"""A site folder for the packages without pip's work: this tree, and what it needs from where the tests run."""

from __future__ import annotations

import importlib.metadata as metadata
import re
import shutil
from pathlib import Path

import tsnative
from harness.nodes import ROOT

OWN = {"tsd": "tsd", "tsctl": "tsctl", "tsplatform": "platform/tsplatform", "tsnative": "native/tsnative"}
_NAME = re.compile(r"[A-Za-z0-9._-]+")


def copy_site(site: Path) -> None:
    site.mkdir(parents=True)
    for name, source in OWN.items():
        shutil.copytree(ROOT / source, site / name, ignore=shutil.ignore_patterns("__pycache__"))
    _copy_native(site)
    for name in needed("tsd-net"):
        _copy_distribution(name, site)


def _copy_native(site: Path) -> None:
    """The C core is not in the tree but where the editable install put it."""
    for folder in tsnative.__path__:
        for path in Path(folder).glob("*.so"):
            shutil.copy2(path, site / "tsnative" / path.name)
    for path in metadata.distribution("tsd-net").files or ():
        if path.suffix == ".so":
            shutil.copy2(str(path.locate()), site / "tsnative" / path.name)


def needed(root: str) -> set[str]:
    """Distributions that `root` needs, without extras; `root` itself for its metadata."""
    found, open_names = set[str](), [root]
    while open_names:
        name = open_names.pop().lower()
        if name in found:
            continue
        try:
            requires = metadata.requires(name) or []
        except metadata.PackageNotFoundError:
            continue
        found.add(name)
        for text in requires:
            matched = _NAME.match(text)
            if matched and "extra ==" not in text:
                open_names.append(matched.group(0))
    return found


def _copy_distribution(name: str, site: Path) -> None:
    for path in metadata.distribution(name).files or ():
        source = Path(str(path.locate()))
        is_ours = name == "tsd-net" and ".dist-info" not in str(path)
        if ".." in path.parts or path.suffix in (".pyc", ".pth") or is_ours or not source.is_file():
            continue
        target = site / path
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(source, target)
