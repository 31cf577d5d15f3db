"""`python tests/cases/table.py` brings README.md up to date: which tests each case has. Reasons are kept."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path

HERE = Path(__file__).resolve().parent
TESTS = HERE.parent
TABLE = HERE / "README.md"

_FUNCTION = re.compile(r"def test_([a-z0-9_]+)")
_ID = re.compile(r"(?:^|_)([a-z]\d\d)(?=_)")
_ROW = re.compile(r"\| ([A-Z]\d\d) \| (.*) \|$")


def tests_by_case() -> dict[str, Counter[str]]:
    """Case id to files with the number of tests in them."""
    found: dict[str, Counter[str]] = {}
    for path in sorted(TESTS.rglob("*.py")):
        for name in _FUNCTION.findall(path.read_text(encoding="utf-8")):
            for case in dict.fromkeys(_ID.findall(name)):
                found.setdefault(case.upper(), Counter())[str(path.relative_to(TESTS))] += 1
    return found


def rows() -> dict[str, str]:
    """Case id to what the table says."""
    matches = (_ROW.match(line) for line in TABLE.read_text(encoding="utf-8").splitlines())
    return {match[1]: match[2] for match in matches if match is not None}


def cell(found: Counter[str]) -> str:
    return ", ".join(f"`{path}`" + (f" ({count})" if count > 1 else "") for path, count in sorted(found.items()))


def main() -> None:
    found = tests_by_case()
    lines = []
    for line in TABLE.read_text(encoding="utf-8").splitlines():
        match = _ROW.match(line)
        if match is not None and match[1] in found:
            line = f"| {match[1]} | {cell(found[match[1]])} |"
        lines.append(line)
    TABLE.write_text("\n".join(lines) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
