"""What the fork server imports once for all workers."""

import contextlib
import importlib
import os

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")

for name in ("torch", "torch.distributed.fsdp", "torch.distributed.tensor.parallel"):
    importlib.import_module(name)

with contextlib.suppress(ImportError):
    import transformers
    from transformers import AutoModelForCausalLM

    # transformers resolves names lazily: ask for what every trial needs, so that it is imported before the fork.
    # Its loading code asks for torchao where that is installed.
    WARM = (transformers.AutoConfig, AutoModelForCausalLM.from_config, importlib.import_module("torchao"))
