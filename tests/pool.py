"""A pool of worker processes that is started once per test run and reused by every multi-rank test.

A fork server imports torch and transformers once; workers are forked from it, so that a new one costs milliseconds.
Each trial gets its own gloo process group of n ranks. A rank that fails or hangs costs the workers of that trial,
never the test run.
"""

from __future__ import annotations

import gc
import itertools
import multiprocessing as mp
import os
import pickle
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from typing import Any

GRACE_S = 4.0  # what the other ranks get once one has failed


@dataclass(frozen=True)
class Outcome:
    """What one rank did: a value, an exception, or neither (it hung or died)."""

    rank: int
    value: Any = None
    error: BaseException | None = None
    trace: str = ""
    lost: str = ""

    @property
    def ok(self) -> bool:
        return self.error is None and not self.lost


class Pool:
    """Workers by rank; `run` gives trial (fn, args) to ranks 0..n-1."""

    def __init__(self) -> None:
        self._context = mp.get_context("forkserver")
        self._context.set_forkserver_preload(["tests.preload"])
        self._workers: dict[int, tuple[Any, Connection]] = {}
        self._trials = itertools.count()
        self._store: Any = None

    def run(self, n: int, fn: Callable[..., Any], args: tuple[Any, ...], timeout: float) -> list[Outcome]:
        """Outcomes by rank; never raises for what a rank did."""
        if self._store is None:
            from torch.distributed import TCPStore

            self._store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        job = pickle.dumps((fn, args))
        trial = next(self._trials)
        pending: dict[Connection, int] = {}
        for rank in range(n):
            connection = self._worker(rank)
            connection.send((trial, self._store.port, n, job))
            pending[connection] = rank
        outcomes: dict[int, Outcome] = {}
        deadline = time.monotonic() + timeout
        while pending and (left := deadline - time.monotonic()) > 0:
            for connection in wait(list(pending), timeout=left):
                assert isinstance(connection, Connection)
                rank = pending.pop(connection)
                try:
                    outcomes[rank] = _received(rank, pickle.loads(connection.recv_bytes()))
                except (EOFError, ConnectionError):
                    self._workers[rank][0].join(1)
                    code = self._workers[rank][0].exitcode
                    outcomes[rank] = Outcome(rank, lost=f"the process ended with code {code}")
                if not outcomes[rank].ok:
                    deadline = min(deadline, time.monotonic() + GRACE_S)
        failed = any(not o.ok for o in outcomes.values())
        for rank in pending.values():
            why = f"still running {GRACE_S} s after another rank had failed" if failed else f"hung for {timeout} s"
            outcomes[rank] = Outcome(rank, lost=why)
        if any(o.lost for o in outcomes.values()):
            for rank in range(n):
                self._drop(rank)
        return [outcomes[rank] for rank in range(n)]

    def close(self) -> None:
        for rank in list(self._workers):
            self._drop(rank)

    def _worker(self, rank: int) -> Connection:
        if rank in self._workers and self._workers[rank][0].is_alive():
            return self._workers[rank][1]
        ours, theirs = self._context.Pipe()
        process = self._context.Process(target=_serve, args=(theirs, rank), daemon=True)
        process.start()
        theirs.close()
        self._workers[rank] = (process, ours)
        return ours

    def _drop(self, rank: int) -> None:
        process, connection = self._workers.pop(rank)
        process.kill()
        process.join(5)
        connection.close()


def _received(rank: int, message: tuple[str, Any, str]) -> Outcome:
    kind, payload, trace = message
    if kind == "lost":
        return Outcome(rank, lost=trace)
    return Outcome(rank, value=payload) if kind == "value" else Outcome(rank, error=payload, trace=trace)


def _serve(connection: Connection, rank: int) -> None:
    import torch
    import torch.distributed as dist
    from torch.distributed.tensor.debug import _clear_sharding_prop_cache

    torch.set_num_threads(1)
    while True:
        try:
            trial, port, n, job = connection.recv()
        except EOFError:
            return
        message: tuple[str, Any, str]
        try:
            store = dist.PrefixStore(f"trial{trial}", dist.TCPStore("127.0.0.1", port, is_master=False))
            dist.init_process_group("gloo", store=store, rank=rank, world_size=n)
            # A rank that fails at once must not leave while others are still connecting to it.
            dist.barrier()
        except BaseException:
            connection.send_bytes(pickle.dumps(("lost", None, traceback.format_exc())))
            continue
        try:
            fn, args = pickle.loads(job)
            torch.manual_seed(0)
            message = ("value", fn(rank, *args), "")
        except BaseException as error:  # also SystemExit: the pool must hear of it
            message = ("error", _portable(error), traceback.format_exc())
        try:
            if dist.is_initialized():
                dist.destroy_process_group()
            # DTensor remembers meshes and hands out an old, equal one, whose groups are gone by now.
            _clear_sharding_prop_cache()
            data = pickle.dumps(message)
            # A model and its hooks refer to one another; until they are collected their groups keep their threads.
            # What is left then are modules, which need not be looked through again.
            gc.collect()
            gc.freeze()
        except BaseException as error:
            data = pickle.dumps(("error", RuntimeError(f"after the trial: {error!r}"), traceback.format_exc()))
        connection.send_bytes(data)


def _portable(error: BaseException) -> BaseException:
    try:
        same = pickle.loads(pickle.dumps(error))
        return same if isinstance(same, type(error)) else RuntimeError(repr(error))
    except Exception:
        return RuntimeError(repr(error))


os.environ.setdefault("OMP_NUM_THREADS", "1")
