"""Proves that a schedule is complete, in order and free of deadlock, or shows the cell that is wrong."""

from __future__ import annotations

from collections import defaultdict
from typing import NoReturn

from dtensor_5d.errors import PlanError, Violation
from dtensor_5d.schedule.actions import COMMUNICATION, Action, format_table, leaves
from dtensor_5d.schedule.costs import Costs
from dtensor_5d.schedule.data import Schedule
from dtensor_5d.schedule.lower import in_order
from dtensor_5d.schedule.simulate import run

__all__ = ["check"]


def check(schedule: Schedule) -> None:
    """Prove a schedule, lowered or not.

    - every micro-batch passes every stage once: one F, and either one B or one I and one W;
    - F before I before W, and nothing before what it reads;
    - in a lowered one: a send behind what it sends, one receive for each, before what reads it; if any parameters are
      gathered, those of every stage wherever they are read; if any gradients are reduced, those of every stage, when
      they are whole: once in all, or once for each micro-batch;
    - no deadlock when every action runs in order and a send does not return before its receive has been reached
      (unbuffered rendezvous). A schedule that is not lowered is lowered for this.

    Errors: `PlanError` with the rule, and the table with the bad cell in >< marks.
    """
    if not isinstance(schedule, Schedule):
        raise PlanError(
            Violation(f"check of {type(schedule).__name__}", "must be a Schedule", "see build and Schedule.from_csv")
        )
    _copies(schedule)
    for rank, row in enumerate(schedule.table):
        _complete(schedule, rank, row)
    plain = schedule.compute_only() if schedule.lowered else schedule
    cost = Costs(1, 1, 1).for_stages(schedule.stages)
    starts, ends, stuck = run(plain, cost)
    if stuck:
        _explain(plain, stuck)
    if schedule.lowered:
        kinds = {action.kind for row in schedule.table for action in row}
        for rank, row in enumerate(schedule.table):
            _local_order(schedule, rank, row)
            _parameters(schedule, rank, row, gathers="UNSHARD" in kinds, reduces="REDUCE_GRAD" in kinds)
        _rendezvous(schedule)
    else:
        meetings: list[list[int]] = [[] for _ in range(schedule.ranks)]
        for rank, action, peer, peer_rank in in_order(schedule, starts, ends, cost, True):
            if peer is not None and action.microbatch is not None:
                message = _message(schedule, action.kind == "F", peer, action.microbatch)
                meetings[rank].append(message * schedule.ranks + peer_rank)
                meetings[peer_rank].append(message * schedule.ranks + rank)
        assert not _unmet(meetings), "an order by time cannot deadlock"


def _fail(schedule: Schedule, rank: int, cell: int, required: str, change: str) -> NoReturn:
    row = schedule.table[rank]
    what = str(row[cell]) if cell < len(row) else "end of the list"
    asked = f"schedule {schedule.name}, rank {rank}, cell {cell} ({what})"
    raise PlanError(Violation(asked, required, f"{change}\n{format_table(schedule.table, (rank, cell))}"))


def _copies(schedule: Schedule) -> None:
    """The copies of the model are alike, and share the micro-batches evenly."""
    copies, stages, count = schedule.copies, schedule.stages, schedule.microbatches
    if isinstance(copies, bool) or not isinstance(copies, int) or copies < 1 or stages % copies or count % copies:
        legal = [n for n in range(1, min(stages, count, 16) + 1) if stages % n == 0 and count % n == 0]
        required = f"must be an integer that divides the {stages} stages and the {count} micro-batches"
        raise PlanError(
            Violation(f"copies={copies!r}", required, f"use {', '.join(map(str, legal))}: 1, or 2 for DualPipe")
        )


def _complete(schedule: Schedule, rank: int, row: tuple[Action, ...]) -> None:
    """Each (stage, micro-batch) of this rank has its F and its B, or F, I and W, once each and in this order."""
    count, rank_of, stages = schedule.microbatches, schedule.rank_of, schedule.stages
    # What has been done to a (stage, micro-batch): nothing, F, I, all.
    step = {"F": (0, 1), "I": (1, 2), "W": (2, 3), "B": (1, 3)}
    state: dict[int, int] = {}
    seen_by = [schedule.microbatches_of(s) for s in range(stages)]
    for cell, action in enumerate(row):
        if len({(stage, mb) for stage, _, mb, _ in action.parts}) < len(action.parts):
            required = "the parts of an overlapped action run at once, but this backward needs this forward"
            _fail(schedule, rank, cell, required, "pair two different micro-batches, or write F and B one by one")
        for stage, kind, mb, _ in action.parts or (action,):
            if stage >= stages or rank_of[stage] != rank:
                home = f"rank {rank_of[stage]}" if stage < stages else f"no rank: there are {stages} stages"
                _fail(schedule, rank, cell, f"stage {stage} lives on {home}", "move or remove the action")
            if kind not in step:
                continue
            have = seen_by[stage]
            if mb is None or mb not in have:
                required = f"stage {stage} sees micro-batches {have.start} to {have.stop - 1}"
                _fail(schedule, rank, cell, required, "correct the number")
            key = stage * count + mb
            needed, made = step[kind]
            if state.get(key, 0) != needed:
                done = ("nothing", "F", "F and I", "all")[state.get(key, 0)]
                after = ("nothing", "F", "F and I")[needed]
                required = f"{kind} of stage {stage}, micro-batch {mb} comes once, after {after}; done so far: {done}"
                _fail(schedule, rank, cell, required, "remove or move one of the actions")
            state[key] = made
    missing = []
    for stage in schedule.stages_of(rank):
        for mb in schedule.microbatches_of(stage):
            at = state.get(stage * count + mb, 0)
            if at < 3:
                missing.append(f"{stage}{('F', 'B', 'W')[at]}{mb}")
    if missing:
        names = ", ".join(missing[:8]) + (f" and {len(missing) - 8} more" if len(missing) > 8 else "")
        _fail(schedule, rank, len(row), f"every micro-batch passes every stage once; missing: {names}", f"add {names}")


def _explain(schedule: Schedule, stuck: dict[int, int]) -> NoReturn:
    """Follow who waits for whom until a rank comes up twice."""
    where = {
        ("F" if leaf.kind == "F" else "I", leaf.stage, leaf.microbatch): (rank, cell, leaf)
        for rank, row in enumerate(schedule.table)
        for cell, action in enumerate(row)
        for leaf in leaves(action)
        if leaf.kind != "W"
    }
    rank, chain, seen = next(iter(stuck)), [], set()
    while rank not in seen:
        seen.add(rank)
        for leaf in leaves(schedule.table[rank][stuck[rank]]):
            source = schedule.before(leaf.stage) if leaf.kind == "F" else schedule.after(leaf.stage)
            if leaf.kind == "W" or source is None:
                continue
            other, cell, cause = where["F" if leaf.kind == "F" else "I", source, leaf.microbatch]
            if other in stuck and cell >= stuck[other]:
                chain.append(f"{leaf} on rank {rank} waits for {cause} (rank {other}, cell {cell})")
                rank = other
                break
    required = "nothing may wait in a circle: " + ", ".join(chain)
    _fail(schedule, rank, stuck[rank], required, "put one of these actions earlier")


def _local_order(schedule: Schedule, rank: int, row: tuple[Action, ...]) -> None:
    """What a rank can prove about the messages in its own list of a lowered schedule."""
    seen: set[tuple[str, int, int | None]] = set()
    for cell, action in enumerate(row):
        for stage, kind, mb, _ in action.parts or (action,):
            if kind in COMMUNICATION:
                problem = _communication(schedule, rank, stage, kind, mb, seen)
                if problem:
                    _fail(schedule, rank, cell, problem, "move, add or remove a send or receive")
            elif kind in ("F", "I", "B"):
                letter = "F" if kind == "F" else "B"
                source = schedule.before(stage) if kind == "F" else schedule.after(stage)
                far = source is not None and schedule.rank_of[source] != rank
                if far and ("RECV_" + letter, stage, mb) not in seen:
                    _fail(schedule, rank, cell, f"its input arrives by {stage}RECV_{letter}{mb}", "receive it before")
            seen.add(("I" if kind == "B" else kind, stage, mb))
    for stage in schedule.stages_of(rank):
        _all_sent(schedule, rank, stage, seen)


def _parameters(schedule: Schedule, rank: int, row: tuple[Action, ...], *, gathers: bool, reduces: bool) -> None:
    """What a rank can prove about its gathers and reductions. `gathers`, `reduces`: whether any rank has some.

    All ranks must treat their parameters alike: those that are gathered somewhere are shards everywhere.
    """
    gathered: set[int] = set()
    whole: defaultdict[int, set[int | None]] = defaultdict(set)
    """Stage -> the micro-batches whose W is done, and those that are reduced (None: all at once)."""
    reduced: defaultdict[int, set[int | None]] = defaultdict(set)
    for cell, action in enumerate(row):
        for stage, kind, mb, _ in action.parts or (action,):
            if kind in ("F", "I", "B") and gathers and stage not in gathered:
                _fail(schedule, rank, cell, f"the parameters of stage {stage} are not gathered here", "UNSHARD")
            if kind in ("W", "B"):
                whole[stage].add(mb)
            elif kind in ("UNSHARD", "RESHARD"):
                if mb is not None:
                    _fail(schedule, rank, cell, "parameters belong to no micro-batch", f"write {stage}{kind}")
                if (stage in gathered) == (kind == "UNSHARD"):
                    _fail(schedule, rank, cell, f"stage {stage} is so already", "UNSHARD and RESHARD take turns")
                gathered ^= {stage}
            elif kind == "REDUCE_GRAD":
                if len(whole[stage]) < len(schedule.microbatches_of(stage)) if mb is None else mb not in whole[stage]:
                    _fail(schedule, rank, cell, "a gradient is reduced when it is whole", "move it behind the last W")
                if mb in reduced[stage]:
                    _fail(schedule, rank, cell, "a gradient is reduced once", "remove one of the two")
                if reduced[stage] and None in (mb, *reduced[stage]):
                    required = f"stage {stage} is reduced for all micro-batches at once or for each, not both"
                    _fail(schedule, rank, cell, required, f"keep {stage}REDUCE_GRAD or those with numbers")
                reduced[stage].add(mb)
    if gathered:
        _fail(schedule, rank, len(row), f"stages {sorted(gathered)} stay gathered", "RESHARD them")
    for stage in schedule.stages_of(rank) if reduces else ():
        if None in reduced[stage] or (missing := sorted(set(schedule.microbatches_of(stage)) - reduced[stage])) == []:
            continue
        lost = f"{stage}REDUCE_GRAD" + (f"{missing[0]}" if reduced[stage] else "")
        _fail(schedule, rank, len(row), f"every gradient is reduced if any is; missing: {lost}", f"add {lost}")


def _communication(
    schedule: Schedule, rank: int, stage: int, kind: str, mb: int | None, seen: set[tuple[str, int, int | None]]
) -> str | None:
    if (kind, stage, mb) in seen:
        return f"{stage}{kind}{mb} comes once"
    forward = kind.endswith("F")
    peer = schedule.after(stage) if forward == kind.startswith("SEND") else schedule.before(stage)
    if peer is None or schedule.rank_of[peer] == rank:
        return f"stage {stage} has no other rank to {kind.split('_')[0].lower()} this"
    if kind.startswith("SEND") and ("F" if forward else "I", stage, mb) not in seen:
        return f"what {stage}{kind}{mb} sends is not computed yet"
    return None


def _all_sent(schedule: Schedule, rank: int, stage: int, seen: set[tuple[str, int, int | None]]) -> None:
    for kind, peer in (("SEND_F", schedule.after(stage)), ("SEND_B", schedule.before(stage))):
        if peer is None or schedule.rank_of[peer] == rank:
            continue
        for mb in schedule.microbatches_of(stage):
            if (kind, stage, mb) not in seen:
                cell = len(schedule.table[rank])
                change = "send every result that another rank reads"
                _fail(schedule, rank, cell, f"{stage}{kind}{mb} is missing", change)


def _message(schedule: Schedule, forward: bool, receiver: int, microbatch: int) -> int:
    """A number for each message; both sides name it by its receiving stage."""
    return (receiver * schedule.microbatches + microbatch) * 2 + forward


def _unmet(meetings: list[list[int]]) -> dict[int, int]:
    """Let ranks send and receive in order, where both sides of a message must arrive; {rank: where it is stuck}.

    An entry is message * ranks + the other rank.
    """
    ranks = len(meetings)
    position = [0] * ranks
    ready = list(range(ranks))
    while ready:
        rank = ready.pop()
        own, at = meetings[rank], position[rank]
        while at < len(own):
            peer = own[at] % ranks
            other = meetings[peer]
            if position[peer] >= len(other) or other[position[peer]] != own[at] - peer + rank:
                break
            at += 1
            position[peer] += 1
            ready.append(peer)
        position[rank] = at
    return {rank: at for rank, at in enumerate(position) if at < len(meetings[rank])}


def _rendezvous(schedule: Schedule) -> None:
    """Execute only the communication of a lowered schedule: a send and its receive meet, and both ranks move on."""
    meetings: list[list[int]] = []
    cells: list[list[int]] = []
    for row in schedule.table:
        own, at = [], []
        for cell, (stage, kind, mb, _) in enumerate(row):
            if kind not in COMMUNICATION:
                continue
            peer = schedule.after(stage) if kind in ("SEND_F", "RECV_B") else schedule.before(stage)
            assert peer is not None and mb is not None
            message = _message(schedule, kind[-1] == "F", stage if kind[0] == "R" else peer, mb)
            own.append(message * schedule.ranks + schedule.rank_of[peer])
            at.append(cell)
        meetings.append(own)
        cells.append(at)
    stuck = _unmet(meetings)
    for rank, at_rank in stuck.items():
        peer = meetings[rank][at_rank] % schedule.ranks
        what = "is at its end"
        if peer in stuck:
            what = f"waits at {schedule.table[peer][cells[peer][stuck[peer]]]}"
        required = f"a send and its receive must be reached together, but rank {peer} {what}"
        _fail(schedule, rank, cells[rank][at_rank], required, "put the two in the same order on both ranks")
