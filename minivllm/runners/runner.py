"""Runner: what the engine needs from whatever computes a step."""

from typing import Any, Protocol

from minivllm.scheduler import ScheduledStep
from minivllm.sequence import Sequence


class Runner(Protocol):
    """Computes the scheduled tokens and keeps their K and V."""

    def run(self, step: ScheduledStep) -> Any:
        """Returns what the engine's sampler takes: logits [num_sampled, vocab_size].

        One row for each sequence of the step with is_sampled, in the step's order.
        """
        ...

    def release(self, seq: Sequence) -> None:
        """Drops what is kept for seq, if anything: it finished, was aborted or was preempted."""
        ...

    def kv_bytes(self) -> int:
        """Bytes of K and V held now."""
        ...
