"""Recorders: what to note in every step of a replay, for charts."""

from dataclasses import dataclass, field

from minivllm.memory.usage import Shares
from minivllm.scheduler import ScheduledStep, Scheduler


@dataclass
class Timeline:
    """Give `note` to a Replay as on_step. One number per step in each list.

    free: slots held by nobody; preempted: requests preempted so far.
    """

    free: list[int] = field(default_factory=list)
    running: list[int] = field(default_factory=list)
    waiting: list[int] = field(default_factory=list)
    preempted: list[int] = field(default_factory=list)

    def note(self, scheduler: Scheduler, step: ScheduledStep, found: Shares) -> None:
        self.free.append(scheduler.kv_cache.usage().free)
        self.running.append(len(scheduler.running))
        self.waiting.append(len(scheduler.waiting))
        before = self.preempted[-1] if self.preempted else 0
        self.preempted.append(before + len(step.preempted))


@dataclass
class TableWork:
    """Give `note` to a Replay as on_step: how long block tables are, and how much they change."""

    entries: int = 0  # of all tables, summed over steps
    tables: int = 0  # summed over steps
    blocks_given: int = 0
    tokens: int = 0  # generated
    _held: dict[str, int] = field(default_factory=dict)

    def note(self, scheduler: Scheduler, step: ScheduledStep, found: Shares) -> None:
        held = {seq.request_id: len(seq.block_table) for seq in scheduler.running}
        self.entries += sum(held.values())
        self.tables += len(held)
        self.blocks_given += sum(count - self._held.get(name, 0) for name, count in held.items())
        self.tokens += sum(seq.is_sampled for seq in step.sequences)
        self._held = held

    @property
    def mean_entries(self) -> float:
        return self.entries / max(self.tables, 1)

    @property
    def blocks_given_per_1000_tokens(self) -> float:
        return 1000 * self.blocks_given / max(self.tokens, 1)
