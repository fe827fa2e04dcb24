"""ScriptedRunner: a runner without a model, for replays of memory and scheduling."""

from minivllm.scheduler import ScheduledStep
from minivllm.sequence import Sequence


class ScriptedRunner:
    """'Generates' token 0 for everybody: a request runs until its max_tokens."""

    def run(self, step: ScheduledStep) -> list[int]:
        return [0 for seq in step.sequences if seq.is_sampled]

    def release(self, seq: Sequence) -> None:
        pass

    def kv_bytes(self) -> int:
        return 0


class ScriptedSampler:
    """What the ScriptedRunner returns are tokens already."""

    def sample(self, tokens: list[int], sequences: list[Sequence]) -> list[int]:
        return tokens
