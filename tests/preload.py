"""What the fork server imports once for all workers."""

import contextlib
import os

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")

import importlib

for name in ("torch", "torch.distributed.fsdp", "torch.distributed.tensor.parallel"):
    importlib.import_module(name)

with contextlib.suppress(ImportError):
    import transformers
    from transformers import AutoModelForCausalLM

    # transformers resolves names lazily: ask for what every trial needs, so that it is imported before the fork.
    WARM = (transformers.AutoConfig, AutoModelForCausalLM.from_config)
