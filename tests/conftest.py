from __future__ import annotations

import os
import sys

import pytest

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")


@pytest.fixture(scope="session", autouse=True)
def _workers():
    yield
    harness = sys.modules.get("tests.harness")  # not loaded: no test needed ranks
    if harness is not None and harness.pool.cache_info().currsize:
        harness.pool().close()
