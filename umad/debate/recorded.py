"""Rollout files: what a transcript has no room for (token ids, log-probabilities, shown prompts), as Parquet."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from umad.records import Debate, UserError

COLUMNS = (
    *("problem_id", "instance", "rollout", "turn", "agent", "weight_version", "finish_reason"),
    *("prompt_ids", "completion_ids", "logprobs", "messages", "reward", "advantage", "weight"),
)


def write_rollouts(path: Path, debates: Sequence[Debate]) -> None:
    """One row per response, in the order in which the transcript has them. Atomic."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    schema = pa.schema(
        [
            ("problem_id", pa.string()),
            ("instance", pa.int32()),
            ("rollout", pa.int32()),
            ("turn", pa.int32()),
            ("agent", pa.string()),
            ("weight_version", pa.int64()),
            ("finish_reason", pa.string()),
            ("prompt_ids", pa.list_(pa.int32())),
            ("completion_ids", pa.list_(pa.int32())),
            ("logprobs", pa.list_(pa.float32())),
            ("messages", pa.string()),
            ("reward", pa.float64()),
            ("advantage", pa.float64()),
            ("weight", pa.float64()),
        ]
    )
    rows = [
        {
            "problem_id": debate.problem.id,
            "instance": debate.instance,
            "rollout": debate.rollout,
            "turn": r.turn,
            "agent": r.agent,
            "weight_version": r.weight_version,
            "finish_reason": r.finish_reason,
            "prompt_ids": r.prompt_ids,
            "completion_ids": r.token_ids,
            "logprobs": r.logprobs,
            "messages": json.dumps([dict(m) for m in r.messages], ensure_ascii=True),
            "reward": r.reward,
            "advantage": r.advantage,
            "weight": r.weight,
        }
        for debate in debates
        for r in debate.responses()
    ]
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        pq.write_table(pa.Table.from_pylist(rows, schema=schema), part, compression="zstd")
        os.replace(part, path)
    finally:
        part.unlink(missing_ok=True)


def read_rollouts(path: Path) -> list[dict[str, Any]]:
    """The rows of a rollout file, `messages` parsed, ids and log-probabilities as lists.

    Raises:
        UserError: the file is missing or is no rollout file.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        table = pq.read_table(path)
    except (OSError, pa.ArrowInvalid) as error:
        raise UserError(f"{path}: not a readable rollout file ({error})") from None
    if missing := [name for name in COLUMNS if name not in table.column_names]:
        raise UserError(f"{path}: not a rollout file, it has no column {missing[0]!r}")
    rows: list[dict[str, Any]] = table.to_pylist()
    for row in rows:
        row["messages"] = json.loads(row["messages"])
    return rows
