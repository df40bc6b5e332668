"""UMAD's debate (arXiv 2603.01221): all agents answer; at each later turn all read all last responses and answer again.

The prompt shows the previous turn only, so its length does not grow with the number of turns. The final answer is the
vote over the last turn's responses.
"""

from __future__ import annotations

from pydantic import Field

from umad.config import Section
from umad.debate.table import Outcome, Seat, Table, gather
from umad.records import Problem, Response


class Settings(Section):
    turns: int = Field(2, ge=1)


async def debate(problem: Problem, seats: list[Seat], table: Table, settings: Settings) -> list[Outcome]:
    """A table of several rollouts shares its context: each agent answers once per rollout, all from what the first said."""
    last: list[Response] = []
    turns: dict[int, list[tuple[Response, ...]]] = {rollout: [] for rollout in table.rollouts}
    for turn in range(settings.turns):
        said = await gather(
            *(seat.respond(turn, last, rollout=rollout) for rollout in table.rollouts for seat in seats)
        )
        for i, rollout in enumerate(table.rollouts):
            turns[rollout].append(tuple(said[i * len(seats) : (i + 1) * len(seats)]))
        last = list(turns[table.rollouts[0]][-1])
    return [Outcome(tuple(turns[r]), await table.vote(turns[r][-1], r)) for r in table.rollouts]
