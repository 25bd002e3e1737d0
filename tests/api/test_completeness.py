"""Every case of groups A, B and D has a test named by its id: in this tier, or, of decisions alone, among the units."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest
import yaml

#: cases that need what is not built yet; each leaves this list with the change that brings it
NOT_YET = {
    "B-09": "needs the KV connector: there is no load of KV that a cancel could meet",
    "D-03": "needs the prefix index: no router knows which replica holds a prefix",
    "D-15": "needs the prefix index: there are no entries that a restart could leave behind",
    "B-10": "needs the KV connector: there is no lookup that could pin chunks",
}


def names_by_case() -> dict[str, list[str]]:
    """Case id -> the tests named after it."""
    found: dict[str, list[str]] = {}
    here = Path(__file__).parent
    for path in [*sorted(here.glob("test_group_*.py")), here.parent / "unit" / "test_cases_routing.py"]:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                match = re.match(r"test_([abd])(\d\d)_", node.name)
                if match:
                    found.setdefault(f"{match[1].upper()}-{match[2]}", []).append(node.name)
    return found


@pytest.mark.parametrize("name", ["A_api.yaml", "B_abort.yaml", "D_routing.yaml"])
def test_every_case_is_tested_or_says_what_it_waits_for(name: str, shared_dir: Path) -> None:
    cases = yaml.safe_load((shared_dir / "cases" / name).read_text(encoding="utf-8"))["cases"]
    ids = {case["id"] for case in cases}
    group = {case_id for case_id in names_by_case() if case_id[0] == name[0]}
    waiting = {case_id for case_id in NOT_YET if case_id[0] == name[0]}
    assert len(ids) == len(cases) > 5
    assert ids - group - waiting == set(), "cases without a test"
    assert group - ids == set(), "tests of cases that do not exist"
    assert group & waiting == set(), "tested, so no longer waiting"


def test_what_waits_has_a_reason() -> None:
    assert all(reason.startswith("needs the ") for reason in NOT_YET.values())
    assert not NOT_YET.keys() & names_by_case().keys()
