"""PoolRunner: one packed forward pass for all sequences, K and V in one pool."""

import torch
from torch import Tensor
from transformers import PreTrainedModel

from minivllm.attention.batch import Batch
from minivllm.attention.hf import Attend, KVAccess, attention_through_pool, check_supported
from minivllm.attention.kv_pool import KVPool
from minivllm.errors import ModelError
from minivllm.fast_layers import FastLayers, Layers
from minivllm.scheduler import ScheduledStep
from minivllm.sequence import Sequence


class PoolRunner:
    """Prefill, decode and everything between in one pass over the scheduled tokens.

    attend: how attention reads the pool. layers: how the rest of the model is computed; default:
    FastLayers. Raises ModelError for a model that does not let its attention be replaced.
    """

    def __init__(
        self, model: PreTrainedModel, pool: KVPool, attend: Attend, layers: Layers | None = None
    ) -> None:
        check_supported(model)
        self.model = model
        self.pool = pool
        self.attend = attend
        self.layers = layers or FastLayers(model)

    @torch.inference_mode()
    def run(self, step: ScheduledStep) -> Tensor:
        """Logits [num_sampled, vocab_size] after the last token of each sampled sequence."""
        self.pool.copy(step.copies)
        batch = Batch.of(step.sequences, self.pool.block_size, self.model.device)
        access = KVAccess(self.pool, batch, self.attend)
        with attention_through_pool(self.model), self.layers():
            output = self.model(
                input_ids=batch.input_ids[None],
                position_ids=batch.positions[None],
                use_cache=False,
                logits_to_keep=batch.last_token,
                kv_access=access,
            )
        num_layers = len(self.pool.keys)
        if access.num_calls != num_layers:
            raise ModelError(
                f"{self.model.config.model_type} called the attention {access.num_calls} times "
                f"for {num_layers} layers: it does not keep K and V the way this pool does"
            )
        return output.logits[0]

    def release(self, seq: Sequence) -> None:
        """Nothing to do: the KV cache manager takes the slots back."""

    def kv_bytes(self) -> int:
        """The whole pool: it is there whether anybody uses it or not."""
        return self.pool.num_bytes
