"""The package reads in the order in which data flows: a module imports only from names above its own."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import umad

PACKAGE = Path(umad.__file__).parent
ORDER = [
    *("records", "config", "recipe_io", "grading", "tasks", "engines", "uncertainty", "debate", "learning"),
    *("evaluation", "reporting", "runs", "cli"),
]
HEAVY = (
    "torch",
    "transformers",
    "accelerate",
    "math_verify",
    "sympy",
    "datasets",
    "wandb",
    "matplotlib",
    "scipy",
    "pyarrow",
)


def part_of(path: Path) -> str:
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def umad_imports(path: Path) -> Iterator[tuple[int, str]]:
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            found = [f"{node.module}.{a.name}" for a in node.names] if node.module == "umad" else [node.module]
        elif isinstance(node, ast.Import):
            found = [alias.name for alias in node.names]
        else:
            continue
        for name in found:
            if name.startswith("umad."):
                yield node.lineno, name.split(".")[1]


def test_every_part_has_a_place_in_the_order() -> None:
    parts = {part_of(path) for path in PACKAGE.rglob("*.py")} - {"__init__"}
    assert parts == set(ORDER)


@pytest.mark.parametrize("part", ORDER)
def test_imports_go_one_way(part: str) -> None:
    for path in PACKAGE.rglob("*.py"):
        if part_of(path) != part:
            continue
        for line, imported in umad_imports(path):
            if imported not in ORDER:
                continue  # umad.__version__ and the like
            allowed = ORDER.index(imported) <= ORDER.index(part)
            assert allowed, f"{path.relative_to(PACKAGE)}:{line} imports umad.{imported}, which comes after umad.{part}"


@pytest.mark.parametrize("module", ["umad.cli", "umad.records", "umad.config", "umad.recipe_io", "umad.grading"])
def test_light_modules_import_no_heavy_library(module: str) -> None:
    code = f"import sys, {module}; print([m for m in {HEAVY!r} if m in sys.modules])"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "[]"
