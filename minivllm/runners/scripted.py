"""ScriptedRunner: a runner without a model, for replays of memory and scheduling."""

from minivllm.scheduler import ScheduledStep
from minivllm.sequence import Sequence


class ScriptedRunner:
    """Computes nothing."""

    def run(self, step: ScheduledStep) -> None:
        return None

    def release(self, seq: Sequence) -> None:
        pass

    def kv_bytes(self) -> int:
        return 0


class ScriptedSampler:
    """'Samples' token 0 for everybody: a request runs until its max_tokens."""

    def sample(self, logits: None, sequences: list[Sequence]) -> list[int]:
        return [0] * len(sequences)
