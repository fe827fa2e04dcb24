"""MemoryMap: which request held which slots in which steps of a replay."""

from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, field

from minivllm.memory.usage import Shares
from minivllm.scheduler import ScheduledStep, Scheduler


@dataclass(frozen=True, slots=True)
class Held:
    """Slots first_slot to first_slot + num_slots - 1 belonged to a request from step to step."""

    request: int
    first_slot: int
    num_slots: int
    first_step: int
    last_step: int


@dataclass(frozen=True, slots=True)
class Blocked:
    """The head of the queue fits into all free slots together, and into no single hole."""

    step: int
    needs: int
    free: int
    largest_hole: int


@dataclass
class MemoryMap:
    """Give `note` to a Replay as on_step, and call finish() after its end.

    pieces: everything that was held, in the order in which it ended.
    blocked: the first step in which the head of the queue fitted nowhere though in total it did.
    """

    pieces: list[Held] = field(default_factory=list)
    blocked: Blocked | None = None
    _open: dict[tuple[str, int, int], int] = field(default_factory=dict)
    _step: int = 0

    def note(self, scheduler: Scheduler, step: ScheduledStep, found: Shares) -> None:
        # A dict, not a set: its order is the same in every process, and so are the figure's bytes.
        block_size = getattr(scheduler.kv_cache, "block_size", 1)
        now = dict.fromkeys(
            (seq.request_id, first, count)
            for seq in scheduler.running
            for first, count in pieces_of(seq.block_table, block_size)
        )
        for key in [key for key in self._open if key not in now]:
            self._close(key)
        for key in now:
            self._open.setdefault(key, self._step)
        if found.external and self.blocked is None and not step.preempted:
            usage = scheduler.kv_cache.usage()
            head = scheduler.waiting[0]
            self.blocked = Blocked(
                self._step,
                scheduler.kv_cache.slots_needed(head, head.num_tokens),
                usage.free,
                usage.largest_hole,
            )
        self._step += 1

    def finish(self) -> list[Held]:
        for key in list(self._open):
            self._close(key)
        return self.pieces

    def _close(self, key: tuple[str, int, int]) -> None:
        request_id, first_slot, num_slots = key
        first_step = self._open.pop(key)
        self.pieces.append(Held(int(request_id), first_slot, num_slots, first_step, self._step))


def pieces_of(block_table: SequenceOf[int], block_size: int) -> list[tuple[int, int]]:
    """(first slot, slots) of every piece: a region is one, and so is each block."""
    if isinstance(block_table, range):
        return [(block_table.start, len(block_table))]
    return [(block * block_size, block_size) for block in block_table]
