"""From what is computed to what is executed: sends, receives, gathers, reshards and reductions."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from dtensor_5d.errors import PlanError, Violation
from dtensor_5d.schedule.actions import Action, leaves
from dtensor_5d.schedule.costs import Costs, StageCosts
from dtensor_5d.schedule.data import Schedule
from dtensor_5d.schedule.simulate import TimedAction, run

__all__ = ["lower"]


def lower(
    schedule: Schedule,
    regather: str | None = "visit",
    reduce: str | None = "window",
    *,
    split_backward: bool = True,
    costs: Costs | None = None,
) -> Schedule:
    """The schedule with communication and parameter actions, in the order in which a rank issues them.

    Example:
        >>> print(lower(build("1f1b", ranks=2, microbatches=1), "window"))
        rank 0: 0UNSHARD 0F0      0SEND_F0 0RECV_B0 0I0      0RESHARD 0W0 0REDUCE_GRAD
        rank 1: 1UNSHARD 1RECV_F0 1F0      1I0      1SEND_B0 1RESHARD 1W0 1REDUCE_GRAD

    `regather`: "visit" gathers a stage's parameters for every F and I (or B), "window" once, None never; W reads no
    parameters. `reduce`: "window" reduces a stage's gradients once, after its last W, "microbatch" after each W (the
    action then names the micro-batch), None never. `split_backward` turns every B into I, SEND_B, W, so that the
    stage before need not wait for the weights, and runs the two parts of an overlapped pair one after the other.

    A send and its receive stand where they would in one list of all ranks, ordered by the times under `costs`
    (default: all 1). Executed in order, with sends that wait for their receives, nothing can therefore deadlock: each
    pair meets at the same place of that list. A runtime may post a receive earlier; the order between two ranks in
    one direction stays.
    Errors: `PlanError` for an unknown value, and for a schedule that cannot run.
    """
    bad = [
        Violation(f"{name}={value!r}", f"must be one of {', '.join(map(repr, choices))}", "choose one of these")
        for name, value, choices in (
            ("regather", regather, ("visit", "window", None)),
            ("reduce", reduce, ("window", "microbatch", None)),
        )
        if value not in choices
    ]
    if bad:
        raise PlanError(bad)
    plain = schedule.compute_only() if schedule.lowered else schedule
    cost = (costs or Costs(1, 1, 1)).for_stages(schedule.stages)
    rows, stuck = run(plain, cost)
    if stuck:
        from dtensor_5d.schedule.check import check

        check(schedule)
        raise AssertionError("a schedule that cannot run passed its check")
    table = with_communication(plain, rows, cost, split_backward)
    return plain.with_table(_with_parameters(row, regather, reduce) for row in table)


def with_communication(
    schedule: Schedule, rows: Sequence[Sequence[TimedAction]], cost: StageCosts, split_backward: bool
) -> list[list[Action]]:
    """The lists of `rows` with a send and a receive for each result that another rank reads."""
    rank_of = schedule.rank_of
    after = [schedule.after(s) for s in range(schedule.stages)]
    before = [schedule.before(s) for s in range(schedule.stages)]
    # (time, 0 for an end or 1 for a start, rank, number within the rank, action). At one instant ends come before
    # starts: a result is sent and received before anything starts that might need it.
    events: list[tuple[float, int, int, int, Action]] = []
    for rank, row in enumerate(rows):
        i = 0
        for _, action, start, end in row:
            if split_backward and action.kind in ("B", "OVERLAP_F_B"):
                for part, begin, finish in _split(action, start, end, cost):
                    events.append((begin, 1, rank, i, part))
                    events.append((finish, 0, rank, i, part))
                    i += 1
            else:
                events.append((start, 1, rank, i, action))
                if action.kind != "W":
                    events.append((end, 0, rank, i, action))
                i += 1
    events.sort()
    table: list[list[Action]] = [[] for _ in rows]
    for _, begins, rank, _, action in events:
        if begins:
            table[rank].append(action)
            continue
        for stage, kind, mb, _ in action.parts or (action,):
            if kind == "F":
                peer = after[stage]
                if peer is not None and rank_of[peer] != rank:
                    table[rank].append(Action(stage, "SEND_F", mb))
                    table[rank_of[peer]].append(Action(peer, "RECV_F", mb))
            elif kind != "W":
                peer = before[stage]
                if peer is not None and rank_of[peer] != rank:
                    table[rank].append(Action(stage, "SEND_B", mb))
                    table[rank_of[peer]].append(Action(peer, "RECV_B", mb))
    return table


def _split(action: Action, start: float, end: float, cost: StageCosts) -> Iterator[tuple[Action, float, float]]:
    """The F, I and W within a B or an overlapped pair, each with its share of the time."""
    parts: list[tuple[Action, float]] = []
    for stage, kind, mb, _ in leaves(action):
        if kind == "B":
            parts.append((Action(stage, "I", mb), cost.backward_input[stage]))
            parts.append((Action(stage, "W", mb), cost.backward_weight[stage]))
        else:
            parts.append((Action(stage, kind, mb), cost.forward[stage]))
    scale = (end - start) / sum(time for _, time in parts)
    for part, time in parts:
        yield part, start, start + time * scale
        start += time * scale


def _with_parameters(row: list[Action], regather: str | None, reduce: str | None) -> list[Action]:
    first: dict[int, int] = {}
    last: dict[int, int] = {}
    whole: dict[int, int] = {}
    for i, action in enumerate(row):
        for leaf in leaves(action):
            if leaf.kind in ("F", "I", "B"):
                first.setdefault(leaf.stage, i)
                last[leaf.stage] = i
            if leaf.kind in ("W", "B"):
                whole[leaf.stage] = i
    out: list[Action] = []
    kept: list[Action] = []
    for i, action in enumerate(row):
        parts = leaves(action)
        readers = [leaf.stage for leaf in parts if leaf.kind in ("F", "I", "B")]
        if kept and action.kind not in ("SEND_F", "SEND_B"):
            out += kept
            kept = []
        if regather is not None:
            # A gather goes out before the rank waits for the input.
            at = len(out)
            while at and out[at - 1].kind in ("RECV_F", "RECV_B"):
                at -= 1
            out[at:at] = [Action(s, "UNSHARD") for s in readers if regather == "visit" or first[s] == i]
        out.append(action)
        if regather is not None:
            # The result leaves before the parameters do: somebody waits for it.
            kept += [Action(s, "RESHARD") for s in readers if regather == "visit" or last[s] == i]
        for leaf in parts:
            if leaf.kind in ("W", "B") and reduce == "microbatch":
                kept.append(Action(leaf.stage, "REDUCE_GRAD", leaf.microbatch))
            elif leaf.kind in ("W", "B") and reduce == "window" and whole[leaf.stage] == i:
                kept.append(Action(leaf.stage, "REDUCE_GRAD"))
    return out + kept
