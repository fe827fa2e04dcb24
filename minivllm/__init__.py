"""minivllm: how an LLM server manages its KV cache, built step by step."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from minivllm.threads import share_a_team

if TYPE_CHECKING:
    from minivllm.engine import Engine, Increment
    from minivllm.llm import LLM, Completion
    from minivllm.models import load_model
    from minivllm.sampling_params import SamplingParams

share_a_team()

__version__ = "0.1.0"
__all__ = ["LLM", "Completion", "Engine", "Increment", "SamplingParams", "load_model"]

_HOMES = {
    "LLM": "minivllm.llm",
    "Completion": "minivllm.llm",
    "Engine": "minivllm.engine",
    "Increment": "minivllm.engine",
    "SamplingParams": "minivllm.sampling_params",
    "load_model": "minivllm.models",
}


def __getattr__(name: str) -> Any:
    # Imported on first use: `minivllm.memory` and the command line's help work without torch.
    if name in _HOMES:
        return getattr(import_module(_HOMES[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
