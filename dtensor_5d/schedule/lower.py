"""From what is computed to what is executed: sends, receives, gathers, reshards and reductions."""

from __future__ import annotations

from collections.abc import Iterator

from dtensor_5d.errors import PlanError, Violation
from dtensor_5d.schedule.actions import Action, leaves
from dtensor_5d.schedule.costs import Costs, StageCosts, costs_violation
from dtensor_5d.schedule.data import Schedule
from dtensor_5d.schedule.simulate import run

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
    if costs is not None and (problem := costs_violation(costs)):
        bad.append(problem)
    if bad:
        raise PlanError(bad)
    plain = schedule.compute_only() if schedule.lowered else schedule
    cost = (costs or Costs(1, 1, 1)).for_stages(schedule.stages)
    starts, ends, stuck = run(plain, cost)
    if stuck:
        from dtensor_5d.schedule.check import check

        check(schedule)
        raise AssertionError("a schedule that cannot run passed its check")
    table: list[list[Action]] = [[] for _ in range(plain.ranks)]
    for rank, action, peer, peer_rank in in_order(plain, starts, ends, cost, split_backward):
        if peer is None:
            table[rank].append(action)
        else:
            letter = "F" if action.kind == "F" else "B"
            table[rank].append(Action(action.stage, "SEND_" + letter, action.microbatch))
            table[peer_rank].append(Action(peer, "RECV_" + letter, action.microbatch))
    return plain.with_table(_with_parameters(row, regather, reduce) for row in table)


def in_order(
    schedule: Schedule, starts: list[list[float]], ends: list[list[float]], cost: StageCosts, split_backward: bool
) -> Iterator[tuple[int, Action, int | None, int]]:
    """One list of all that happens on all ranks, by time: (rank, action, None, -1) when it starts, and
    (rank, action, reading stage, rank of that) when its result leaves for another rank.
    """
    rank_of, table = schedule.rank_of, schedule.table
    after = [schedule.after(s) for s in range(schedule.stages)]
    before = [schedule.before(s) for s in range(schedule.stages)]
    # Results first: the sort is stable, so at one instant a result is sent and received before anything starts that
    # might need it.
    times: list[float] = []
    ranks: list[int] = []
    actions: list[Action] = []
    peers: list[int | None] = []
    for send in (True, False):
        for rank, row in enumerate(table):
            for action, start, end in zip(row, starts[rank], ends[rank]):
                whole = action.kind in ("F", "I", "W") or not split_backward
                for part, begin, finish in ((action, start, end),) if whole else _split(action, start, end, cost):
                    if not send:
                        times.append(begin)
                        ranks.append(rank)
                        actions.append(part)
                        peers.append(None)
                        continue
                    for leaf in part.parts or (part,):
                        if leaf.kind == "W":
                            continue
                        peer = after[leaf.stage] if leaf.kind == "F" else before[leaf.stage]
                        if peer is not None and rank_of[peer] != rank:
                            times.append(finish)
                            ranks.append(rank)
                            actions.append(leaf)
                            peers.append(peer)
    for i in sorted(range(len(times)), key=times.__getitem__):
        peer = peers[i]
        yield ranks[i], actions[i], peer, -1 if peer is None else rank_of[peer]


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
