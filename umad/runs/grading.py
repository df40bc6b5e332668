"""`umad grade`: rows in, graded rows out."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path


def grade_command(file: Path, out: Path | None, kind: str, *, require_box: bool, as_json: bool) -> None:
    """Grades a file, writes the rows with `equal`, `extracted` and `status`, prints the summary."""
    from umad.grading.file import grade_file
    from umad.reporting.progress import progress, say

    target = out or file.with_name(f"{file.name.removesuffix('.jsonl')}.graded.jsonl")
    with progress("grading", unit="rows") as bar:
        seen = 0

        def advance(done: int, total: int) -> None:
            nonlocal seen
            bar.total = total
            bar.advance(done - seen)
            seen = done

        summary = grade_file(file, target, kind, require_box=require_box, progress=advance)
    if as_json:
        say(json.dumps({**asdict(summary), "out": str(target)}, indent=2))
        return
    for line in summary.lines():
        say(line)
    say(f"written: {target}")
