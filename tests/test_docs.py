"""The documentation names things that exist."""

from __future__ import annotations

import importlib
import re
from pathlib import Path

import pytest

from umad.config import Recipe
from umad.recipe_io import _all_keys

ROOT = Path(__file__).parent.parent
ROWS = [
    [cell.strip() for cell in line.strip("|\n").split("|")]
    for line in (ROOT / "docs/equations.md").read_text(encoding="utf-8").splitlines()
    if line.startswith("|") and "`tests/" in line
]


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row[1].strip("`").rsplit(".", 1)[-1])
def test_each_equation_has_its_function_setting_and_test(row: list[str]) -> None:
    _, function, setting, test = row
    module, name = function.strip("`").rsplit(".", 1)
    assert callable(getattr(importlib.import_module(module), name))
    if setting != "–":
        assert setting.strip("`") in _all_keys(Recipe, "")
    file, _, test_name = test.strip("`").partition("::")
    assert f"def {test_name}(" in (ROOT / file).read_text(encoding="utf-8")


def test_the_table_of_equations_is_read() -> None:
    assert len(ROWS) >= 13


@pytest.mark.parametrize("page", [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))])
def test_links_between_pages_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#]+?)(?:#[^)]*)?\)", page.read_text(encoding="utf-8")):
        if not target.startswith("http"):
            assert (page.parent / target).exists(), f"{page.name} links to {target}"
