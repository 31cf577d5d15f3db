"""`make packages`: the .deb and the .rpm of the recipe, into dist/. dpkg-deb and rpmbuild do the packing.

A tool that is missing skips its package with a line that says what to install. `--site` takes a folder that is filled
already in place of what pip makes of this tree.
"""

from __future__ import annotations

import argparse
import compileall
import os
import platform
import py_compile
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import recipe
from recipe import Target

_DEB_MACHINES = {"x86_64": "amd64", "aarch64": "arm64", "armv7l": "armhf", "riscv64": "riscv64"}
_UNITS = {"deb": "lib/systemd/system", "rpm": "usr/lib/systemd/system"}
_NOT_RUN = ("*.pyx", "*.pxd", "*.pxi", "*.pyi", "*.c", "*.h", "*.cpp", "__pycache__")


def main() -> int:
    parser = argparse.ArgumentParser(description="build the packages of tsd")
    parser.add_argument("--out", type=Path, default=recipe.ROOT / "dist")
    parser.add_argument("--site", type=Path, help="a folder with tsd and all it imports, instead of pip's work")
    parser.add_argument("--only", choices=("deb", "rpm"), help="one of them")
    parser.add_argument("--version", default=recipe.version(), help="another version, for tests of upgrades")
    parser.add_argument("--fast", action="store_true", help="hardly any compression, for tests")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="tsd-package-") as work:
        site = Path(work) / "site"
        if options.site:
            shutil.copytree(options.site, site)
        else:
            install_site(site)
        tidy(site)
        for kind, tool, build in (("deb", "dpkg-deb", build_deb), ("rpm", "rpmbuild", build_rpm)):
            if options.only not in (None, kind):
                continue
            if shutil.which(tool) is None:
                print(f"make packages: no .{kind}: {tool} is missing (apt-get install {_PACKAGE_OF[tool]})")
                continue
            tree = Path(work) / kind
            fill(tree, site, kind)
            print(build(tree, Path(work), options))
    return 0


_PACKAGE_OF = {"dpkg-deb": "dpkg", "rpmbuild": "rpm"}


# --- the tree


def install_site(site: Path) -> None:
    """What pip makes of this tree and of what it needs, for the Python that runs this."""
    words = [sys.executable, "-m", "pip", "install", "-q", "--no-compile", f"--target={site}", str(recipe.ROOT)]
    subprocess.run(words, check=True, stdin=subprocess.DEVNULL)


def tidy(site: Path) -> None:
    """Leave out what is never run, and compile the rest: the service may not write there."""
    shutil.rmtree(site / "bin", ignore_errors=True)
    for pattern in _NOT_RUN:
        for path in list(site.rglob(pattern)):
            shutil.rmtree(path) if path.is_dir() else path.unlink()
    if shutil.which("strip"):
        libraries = [str(path) for path in site.rglob("*.so")]
        subprocess.run(["strip", "--strip-unneeded", *libraries], check=False, capture_output=True)
    mode = py_compile.PycInvalidationMode.UNCHECKED_HASH
    compileall.compile_dir(
        site, quiet=2, workers=0, stripdir=str(site), prependdir=f"/{recipe.SITE}", invalidation_mode=mode
    )


def fill(tree: Path, site: Path, kind: str) -> None:
    """All files of the package, below `tree`."""
    shutil.copytree(site, tree / recipe.SITE)
    for command in recipe.COMMANDS:
        _write(tree / "usr/bin" / command, recipe.launcher(command, Target()), 0o755)
    for source, place, mode in recipe.FILES:
        target = tree / place.format(units=_UNITS[kind])
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(recipe.ROOT / source, target)
        target.chmod(mode)
    for folder, _, files in os.walk(tree):
        os.chmod(folder, 0o755)
        for name in files:
            path = Path(folder) / name
            path.chmod(0o755 if path.stat().st_mode & 0o100 else 0o644)


def _write(path: Path, text: str, mode: int) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    path.chmod(mode)


# --- .deb


def build_deb(tree: Path, work: Path, options: argparse.Namespace) -> Path:
    machine = _DEB_MACHINES.get(platform.machine(), platform.machine())
    size_kib = sum(path.lstat().st_size for path in tree.rglob("*") if path.is_file()) // 1024
    fields = {
        "Package": recipe.NAME,
        "Version": options.version,
        "Architecture": machine,
        "Maintainer": recipe.MAINTAINER,
        "Installed-Size": str(size_kib),
        "Depends": f"python{Target().python}, libc6 (>= {recipe.needed_libc(tree)})",
        "Recommends": ", ".join(recipe.WANTED_TOO),
        "Section": "net",
        "Priority": "optional",
        "Description": "\n ".join((recipe.SUMMARY, *recipe.DESCRIPTION)),
    }
    control = tree / "DEBIAN"
    _write(control / "control", "".join(f"{name}: {value}\n" for name, value in fields.items()), 0o644)
    _write(control / "conffiles", "".join(f"/{path}\n" for path in recipe.CONFIG_FILES), 0o644)
    for name, mapped in _DEB_SCRIPTS.items():
        _write(control / name, f"#!/bin/sh\nset -e\n{mapped[1]}\n{recipe.script(mapped[0])}", 0o755)
    place: Path = options.out / f"{recipe.NAME}_{options.version}_{machine}.deb"
    how = ["-Zgzip", "-z1"] if options.fast else ["-Zxz"]
    words = ["dpkg-deb", "--root-owner-group", *how, "--build", str(tree), str(place)]
    subprocess.run(words, check=True, stdout=subprocess.DEVNULL)
    return place


_DEB_SCRIPTS = {
    # Debian policy, chapter 6: the words that each script is called with
    "postinst": (
        "after-install",
        'case "$1" in\n    configure) if [ -n "$2" ]; then action=upgrade; else action=install; fi ;;\n'
        "    abort-*) action=upgrade ;;\n    *) exit 0 ;;\nesac",
    ),
    "prerm": ("before-remove", 'case "$1" in\n    remove) action=remove ;;\n    *) action=upgrade ;;\nesac'),
    "postrm": (
        "after-remove",
        'case "$1" in\n    remove|purge) action=$1 ;;\n    upgrade) action=upgrade ;;\n    *) exit 0 ;;\nesac',
    ),
}


# --- .rpm


def build_rpm(tree: Path, work: Path, options: argparse.Namespace) -> Path:
    spec, out = work / "tsd.spec", options.out.absolute()
    spec.write_text(_spec(tree, options))
    words = ["rpmbuild", "-bb", "--quiet", f"--define=_topdir {work}/rpmbuild", f"--define=_rpmdir {out}", str(spec)]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise SystemExit(f"make packages: rpmbuild failed: {done.stderr}")
    return Path(out) / f"{recipe.NAME}-{options.version}-1.{platform.machine()}.rpm"


def _spec(tree: Path, options: argparse.Namespace) -> str:
    folders = [f"%dir /{recipe.SITE}", f"/{recipe.SITE}/*", "%dir /usr/share/doc/tsd", "/usr/share/doc/tsd/*"]
    rest = [f"/usr/bin/{name}" for name in recipe.COMMANDS] + [f"/{_UNITS['rpm']}/tsd.service"]
    config = [f"%config(noreplace) /{path}" for path in recipe.CONFIG_FILES]
    scripts = "".join(
        f"%{section}\n{mapping}\n{recipe.script(name)}\n" for section, (name, mapping) in _RPM_SCRIPTS.items()
    )
    wanted = "".join(f"Recommends: {name}\n" for name in ("nftables", "iproute", "ca-certificates"))
    return f"""%global debug_package %{{nil}}
%global __os_install_post %{{nil}}
%global _build_id_links none
%global _binary_payload {"w1.gzdio" if options.fast else "w6.xzdio"}
%global _build_name_fmt %%{{NAME}}-%%{{VERSION}}-%%{{RELEASE}}.%%{{ARCH}}.rpm
Name: {recipe.NAME}
Version: {options.version}
Release: 1
Summary: {recipe.SUMMARY}
License: {recipe.LICENSE}
AutoReqProv: no
Requires: {Target().interpreter}
Requires: libc.so.6(GLIBC_{recipe.needed_libc(tree)})(64bit)
{wanted}
%description
{chr(10).join(recipe.DESCRIPTION)}

%install
cp -a {tree}/. %{{buildroot}}/

{scripts}
%files
%defattr(-,root,root)
{chr(10).join(folders + rest + config)}
"""


_RPM_SCRIPTS = {
    # $1: how many versions of the package will be there afterwards
    "post": ("after-install", 'if [ "$1" -gt 1 ]; then action=upgrade; else action=install; fi'),
    "preun": ("before-remove", 'if [ "$1" -gt 0 ]; then action=upgrade; else action=remove; fi'),
    "postun": ("after-remove", 'if [ "$1" -gt 0 ]; then action=upgrade; else action=remove; fi'),
}


if __name__ == "__main__":
    sys.exit(main())
