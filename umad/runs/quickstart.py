"""`umad quickstart`: the whole loop on the CPU with nothing downloaded."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path

from umad.recipe_io import parse_recipe
from umad.reporting.progress import say
from umad.runs.tables import print_run
from umad.runs.training import train

RECIPE = Path(__file__).with_name("quickstart.yaml")


def quickstart(out: Path, seed: int, overrides: Sequence[str]) -> Path:
    """Warm-starts two tiny agents (or takes cached ones), trains them with UMAD, evaluates before and after, reports."""
    start = time.perf_counter()
    text = RECIPE.read_text(encoding="utf-8")
    recipe = parse_recipe(text, "quickstart", [f"output={out}", f"seed={seed}", *overrides])
    folder = train(recipe)
    print_run(folder.path)
    say(f"quickstart took {(time.perf_counter() - start) / 60:.1f} minutes; everything is in {folder.path}")
    return folder.path
