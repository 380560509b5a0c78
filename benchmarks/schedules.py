"""How good our schedules are, and how quickly they are made.

    python benchmarks/schedules.py [--json PATH]

Quality: the bubble rate beside the published one and, where torch has a schedule for the place, torch's own order under
the same costs; the limit is 0. Speed: medians of interleaved runs; the limits are those of the project's issue 3.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import time
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")

from torch.distributed.pipelining import schedules as torch_schedules

from dtensor_5d.schedule import Costs, Schedule, build, check, lower, simulate

DATA = json.loads((Path(__file__).parent.parent / "tests" / "data" / "published_schedules.json").read_text())


def torch_order(kind: str, ranks: int, microbatches: int) -> Schedule:
    """The order of torch's InterleavedZeroBubble or ZBVZeroBubble, two chunks a rank, without its bubbles."""
    theirs = object.__new__(getattr(torch_schedules, f"Schedule{kind}"))
    theirs.pp_group_size, theirs._n_microbatches = ranks, microbatches
    theirs.n_local_stages, theirs.num_stages = 2, 2 * ranks
    theirs.microbatches_per_round = microbatches // max(1, microbatches // ranks)
    rows = [theirs._calculate_single_rank_operations(rank) for rank in range(ranks)]
    return Schedule.from_csv("\n".join(",".join(str(a) for a in row if a is not None) for row in rows), name=kind)


def quality() -> list[dict]:
    """Bubble rates under the published costs."""
    rows = []

    def add(case, ours, published, peak, seconds, torchs=math.nan):
        row = {"case": case, "ours": ours, "published": published, "torch": torchs, "peak": peak, "seconds": seconds}
        rows.append(row)
        print(f"{case:34} {ours:8.4f} {published:10.4f} {torchs:8.4f} {peak:6.1f} {seconds:8.2f}")

    print(f"{'bubble rate':34} {'ours':>8} {'published':>10} {'torch':>8} {'peak':>6} {'CPU s':>8}")
    for row in DATA["zb_table5"]:
        p, m = row["p"], row["m"]
        costs = Costs(row["T_F"], row["T_B"], row["T_W"], row["T_comm"])
        for name, limit in (("ZB-1p", p), ("ZB-2p", 2 * p)):
            schedule, seconds = timed(build, "zb-auto", ranks=p, microbatches=m, costs=costs, memory_limit=limit)
            timeline = simulate(schedule, costs)
            peak = max(timeline.peak_activations)
            add(f"zb-auto p{p} m{m} {name}", timeline.bubble_rate, row["expect"][name], peak, seconds)
    for row in DATA["zb_table8"]:
        p, m = row["p"], row["m"]
        costs = Costs(row["T_F_chunk"], row["T_B_chunk"], row["T_W_chunk"], row["T_comm"])
        schedule, seconds = timed(build, "zbv", ranks=p, microbatches=m, costs=costs)
        timeline = simulate(schedule, costs)
        theirs = simulate(torch_order("ZBVZeroBubble", p, m), costs).bubble_rate
        peak = max(timeline.peak_activations)
        add(f"zbv p{p} m{m}", timeline.bubble_rate, row["expect"]["ZB-V"], peak, seconds, theirs)
    row = DATA["v_uneven"]
    costs = Costs(row["F"], row["I"], row["W"], row["c"])
    for name, published in row["bubble_rate"].items():
        schedule, seconds = timed(build, name, ranks=row["p"], microbatches=row["m"], costs=costs)
        timeline = simulate(schedule, costs)
        add(f"{name} p8 m24 uneven", timeline.bubble_rate, published, max(timeline.peak_activations), seconds)
    return rows


def timed(function, *arguments, **options):
    """(result, CPU seconds)."""
    start = time.process_time()
    result = function(*arguments, **options)
    return result, time.process_time() - start


def ours_1f1b():
    schedule = build("1f1b", ranks=16, microbatches=128)
    check(schedule)
    simulate(schedule, Costs(1, 1, 1))


def torch_1f1b():
    """What torch offers for the same: order, sends and receives, validation, its untimed simulation."""
    table = torch_table(build("1f1b", ranks=16, microbatches=128))
    torch_schedules._validate_schedule(table, 16, 16, 128)
    table = torch_schedules._add_send_recv({r: list(row) for r, row in table.items()}, lambda s: s, 16)
    torch_schedules._simulate_comms_compute(table, lambda s: s, 16)


def zb_auto(limit):
    build("zb-auto", ranks=8, microbatches=32, costs=Costs(29802, 29428, 19530, 577), memory_limit=limit)


def torch_table(schedule):
    make, kind = torch_schedules._Action, torch_schedules._ComputationType
    return {r: [make(a.stage, kind(a.kind), a.microbatch) for a in row] for r, row in enumerate(schedule.table)}


SPEED = {
    # name: (function, limit in seconds, repeats)
    "build + check + simulate 1f1b p16 m128": (ours_1f1b, 0.05, 9),
    "torch's validate + simulate of the same": (torch_1f1b, math.nan, 3),
    "lower 1f1b p16 m128": (lambda: lower(build("1f1b", ranks=16, microbatches=128)), math.nan, 5),
    "zb-auto p8 m32, 2p": (lambda: zb_auto(16), 2, 3),
    "zb-auto p8 m32, 1p": (lambda: zb_auto(8), 2, 3),
}


def speed() -> list[dict]:
    """CPU seconds, medians of interleaved runs."""
    times: dict[str, list[float]] = {name: [] for name in SPEED}
    for turn in range(max(repeats for _, _, repeats in SPEED.values())):
        for name, (function, _, repeats) in SPEED.items():
            if turn < repeats:
                times[name].append(timed(function)[1])
    rows = []
    print(f"\n{'CPU seconds':44} {'median':>8} {'best':>8} {'limit':>8}")
    for name, (_, limit, _) in SPEED.items():
        median, best = statistics.median(times[name]), min(times[name])
        rows.append({"case": name, "median": median, "best": best, "limit": limit})
        print(f"{name:44} {median:8.4f} {best:8.4f} {limit:8.2f}")
    return rows


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, help="also write the rows here")
    arguments = parser.parse_args()
    result = {"quality": quality(), "speed": speed()}
    if arguments.json:
        arguments.json.write_text(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
