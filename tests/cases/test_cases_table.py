"""Every case of the table has a test, or a reason why it has none yet."""

from __future__ import annotations

import importlib.util
from pathlib import Path

_SPEC = importlib.util.spec_from_file_location("cases_table", Path(__file__).with_name("table.py"))
assert _SPEC is not None and _SPEC.loader is not None
table = importlib.util.module_from_spec(_SPEC)
_SPEC.loader.exec_module(table)


def test_each_case_has_a_test_or_a_reason() -> None:
    found, rows = table.tests_by_case(), table.rows()
    assert len(rows) > 110
    for case, text in rows.items():
        assert case in found or text.startswith("not yet: "), f"{case} has no test; say why in tests/cases/README.md"


def test_no_test_names_a_case_that_the_table_does_not_have() -> None:
    unknown = set(table.tests_by_case()) - set(table.rows())
    assert not unknown, f"unknown cases {sorted(unknown)}: a slip in a test's name?"
