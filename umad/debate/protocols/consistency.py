"""Self-consistency (Wang et al. 2022, arXiv 2203.11171): several samples of each agent, majority vote."""

from __future__ import annotations

from pydantic import Field

from umad.config import Section
from umad.debate.table import Outcome, Seat, Table, gather
from umad.records import Problem


class Settings(Section):
    samples: int = Field(5, ge=1)
    """Samples of each agent; all of them vote, each with one voice."""


async def debate(problem: Problem, seats: list[Seat], table: Table, settings: Settings) -> list[Outcome]:
    responses = await gather(*(seat.respond(0) for _ in range(settings.samples) for seat in seats))
    return [Outcome((tuple(responses),), await table.vote(responses))]
