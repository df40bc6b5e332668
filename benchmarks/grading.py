"""The grader beside plain math-verify, in one run, on one core.

    python benchmarks/grading.py [--data DIR] [--json FILE]

With `--data` (a folder that holds `graded_outputs.jsonl` and `equivalence_pairs.jsonl`) it reads real rows; without it,
rows are generated. Plain math-verify means `verify(parse(gold), parse(text))` with its defaults, in its favour with the
gold in dollar signs. Both start with cold caches; imports are not counted.
"""

from __future__ import annotations

import argparse
import json
import logging
import random
import resource
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from umad.grading import GradeItem, Grader

Row = dict[str, Any]


def generated_rows(n: int, seed: int) -> list[Row]:
    """Responses with right and wrong answers of many kinds, every one of them different."""
    draw = random.Random(seed)
    rows = []
    for k in range(n):
        a, b = draw.randint(2, 999), draw.randint(2, 99)
        right = draw.random() < 0.5
        c = a if right else a + 1
        gold, answer = draw.choice(
            [
                (f"{a * b}", f"\\boxed{{{c * b}}}"),
                (f"\\frac{{{a}}}{{{b}}}", f"\\boxed{{\\dfrac{{{c}}}{{{b}}}}}"),
                (f"{a}\\sqrt{{{b}}}", f"The answer is ${c}\\sqrt{{{b}}}$."),
                (f"({a}, {b})", f"\\boxed{{\\left({c},\\,{b}\\right)}}"),
                (f"{a}x + {b}", f"\\boxed{{{b} + {c}x}}"),
                (f"{a},{b},7", f"\\boxed{{7, {b}, {c}}}"),
                (f"x \\le {a}", f"\\boxed{{(-\\infty, {c}]}}"),
                (f"{a} \\text{{ miles}}", f"She drove {b} hours.\n#### {c}"),
            ]
        )
        rows.append({"gold": gold, "text": f"Step {k}: some work with {b} and {a}.\n{answer}", "right": right})
    return rows


def read_rows(path: Path, text: str, label: str) -> list[Row]:
    with path.open(encoding="utf-8") as file:
        rows = [json.loads(line) for line in file if line.strip()]
    kinds = {"equivalence", "extraction"}
    return [
        {"gold": row["gold"], "text": row[text], "right": row[label]}
        for row in rows
        if row.get("kind", "equivalence") in kinds
    ]


def with_math_verify(rows: list[Row]) -> list[bool]:
    import math_verify

    results = []
    for row in rows:
        gold = row["gold"] if "$" in row["gold"] or "\\boxed" in row["gold"] else f"${row['gold']}$"
        results.append(bool(math_verify.verify(math_verify.parse(gold), math_verify.parse(row["text"]))))
    return results


def with_umad(rows: list[Row], grader: Grader) -> list[bool]:
    return [bool(grade.equal) for grade in grader.grade([GradeItem(row["gold"], row["text"]) for row in rows])]


def timed(function: Callable[[], list[bool]]) -> tuple[list[bool], float]:
    start = time.perf_counter()
    result = function()
    return result, time.perf_counter() - start


def compare(name: str, rows: list[Row]) -> dict[str, Any]:
    with Grader(workers=1) as grader:
        ours, our_time = timed(lambda: with_umad(rows, grader))
        repeats = max(1, 20_000 // len(rows))
        cached_time = min(
            timed(lambda: [grade for _ in range(repeats) for grade in with_umad(rows, grader)])[1] for _ in range(3)
        )
        workers = grader.workers_started
    theirs, their_time = timed(lambda: with_math_verify(rows))
    labels = [row["right"] for row in rows]
    result = {
        "rows": len(rows),
        "umad_right": sum(a == b for a, b in zip(ours, labels, strict=True)) / len(rows),
        "umad_false_positives": sum(a and not b for a, b in zip(ours, labels, strict=True)),
        "umad_rows_per_s": len(rows) / our_time,
        "umad_cached_rows_per_s": repeats * len(rows) / cached_time,
        "umad_workers_started": workers,
        "math_verify_right": sum(a == b for a, b in zip(theirs, labels, strict=True)) / len(rows),
        "math_verify_false_positives": sum(a and not b for a, b in zip(theirs, labels, strict=True)),
        "math_verify_rows_per_s": len(rows) / their_time,
        "speedup": their_time / our_time,
    }
    print(f"{name}: {len(rows)} rows")
    print(f"  {'':12} {'right':>8} {'false +':>8} {'rows/s':>10} {'cached rows/s':>14}")
    for who in ("umad", "math_verify"):
        cached = f"{result['umad_cached_rows_per_s']:14,.0f}" if who == "umad" else ""
        print(
            f"  {who:12} {result[f'{who}_right']:8.2%} {result[f'{who}_false_positives']:8} "
            f"{result[f'{who}_rows_per_s']:10,.0f} {cached}"
        )
    print(f"  {result['speedup']:.1f} times the throughput of math-verify; {workers} workers started")
    return result


def memory(n: int) -> dict[str, float]:
    """Peak memory growth over `n` different answers of all kinds, 1 in 50 a bomb."""
    draw = random.Random(1)
    bombs = ["9^{9^{9^9}}", "(10^9)!", "(" * 50_000, "\\sqrt{" * 300 + "2" + "}" * 300, "{" * 100_000, "1+" * 900 + "1"]
    rows = generated_rows(n, seed=2)
    for row in draw.sample(rows, n // 50):
        row["text"] = f"\\boxed{{{draw.choice(bombs)}}}"
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    with Grader(workers=1) as grader:
        _, seconds = timed(lambda: with_umad(rows, grader))
    after = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    print(f"{n} mixed answers: {seconds:.1f} s, peak memory {before:.0f} -> {after:.0f} MB")
    return {"rows": n, "seconds": seconds, "mb_before": before, "mb_after": after}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path, help="folder with graded_outputs.jsonl and equivalence_pairs.jsonl")
    parser.add_argument("--json", type=Path, help="write the figures here")
    arguments = parser.parse_args()
    import math_verify  # noqa: F401  (its import is not part of the race)

    logging.disable(logging.WARNING)
    figures: dict[str, Any] = {}
    figures["memory"] = memory(20_000)
    if arguments.data:
        outputs = arguments.data / "graded_outputs.jsonl"
        pairs = arguments.data / "equivalence_pairs.jsonl"
        figures["graded_outputs"] = compare("graded outputs", read_rows(outputs, "completion", "correct"))
        figures["equivalence_pairs"] = compare("equivalence pairs", read_rows(pairs, "candidate", "equivalent"))
    else:
        figures["generated"] = compare("generated rows", generated_rows(1_000, seed=0))
    if arguments.json:
        arguments.json.write_text(json.dumps(figures, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
