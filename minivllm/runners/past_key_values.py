"""PastKeyValuesRunner: every request keeps the model's own cache object."""

import inspect
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

from minivllm.errors import ModelError
from minivllm.scheduler import ScheduledStep
from minivllm.sequence import Sequence


def cache_argument(model: PreTrainedModel) -> str:
    """The name under which the model's forward takes its cache.

    `past_key_values` until transformers 5.23, `cache` from 5.24 (the old name goes in 5.40).
    Raises ModelError for a model whose memory is not K and V per token.
    """
    parameters = inspect.signature(model.forward).parameters
    name = next((name for name in ("cache", "past_key_values") if name in parameters), None)
    if name is None or getattr(model, "_is_stateful", False):
        raise ModelError(
            f"{model.config.model_type} keeps a running state instead of K and V per token: "
            f"this engine cannot compute it in pieces"
        )
    return name


class PastKeyValuesRunner:
    """One forward pass per sequence; prefill creates its cache, decode appends to it."""

    def __init__(self, model: PreTrainedModel) -> None:
        self.model = model
        self.caches: dict[str, DynamicCache] = {}
        self.vocab_size = model.config.get_text_config().vocab_size
        self._cache_argument = cache_argument(model)

    @torch.inference_mode()
    def run(self, step: ScheduledStep) -> Tensor:
        """Logits [num_sampled, vocab_size] after the last token of each sampled sequence."""
        rows = []
        for seq in step.sequences:
            logits = self._forward(seq)
            if seq.is_sampled:
                rows.append(logits)
        return torch.cat(rows) if rows else torch.empty(0, self.vocab_size)

    def _forward(self, seq: Sequence) -> Tensor:
        if seq.request_id not in self.caches:
            self.caches[seq.request_id] = DynamicCache(config=self.model.config)
        device = self.model.device
        output = self.model(
            input_ids=torch.tensor([seq.scheduled_token_ids()], device=device),
            position_ids=torch.arange(seq.num_computed, seq.context_len, device=device)[None],
            use_cache=True,
            logits_to_keep=1,
            **{self._cache_argument: self.caches[seq.request_id]},
        )
        return output.logits[:, -1]

    def release(self, seq: Sequence) -> None:
        self.caches.pop(seq.request_id, None)

    def kv_bytes(self) -> int:
        layers: list[Any] = [layer for cache in self.caches.values() for layer in cache.layers]
        return sum(
            layer.keys.nbytes + layer.values.nbytes
            for layer in layers
            if getattr(layer, "is_initialized", False)
        )
