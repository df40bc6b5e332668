"""One turn: every agent answers by itself. With one agent and training this is plain GRPO."""

from __future__ import annotations

from umad.config import Section
from umad.debate.table import Outcome, Seat, Table, gather
from umad.records import Problem


class Settings(Section):
    """No settings."""


async def debate(problem: Problem, seats: list[Seat], table: Table, settings: Settings) -> list[Outcome]:
    responses = await gather(*(seat.respond(0) for seat in seats))
    return [Outcome((tuple(responses),), await table.vote(responses))]
