"""BlockView: a small run on blocks, told step by step: the pool, the tables, and the reasons."""

from collections.abc import Iterable
from dataclasses import dataclass, field
from string import ascii_letters

from minivllm.memory.block_manager import BlockManager
from minivllm.memory.usage import Shares
from minivllm.scheduler import ScheduledStep, Scheduler
from minivllm.sequence import Sequence, SequenceStatus
from minivllm.simulation.replay import Replay
from minivllm.simulation.workloads import Request

BLOCKS_PER_LINE = 8


def name_of(seq: Sequence) -> str:
    """A, B, C ... in the order in which the requests came; after z their numbers."""
    number = int(seq.request_id)
    return ascii_letters[(number + 25) % 52] if number <= 52 else f"#{number}"


@dataclass
class BlockView:
    """Give `note` to a Replay as on_step; frames has one text for every step that runs anything.

    A frame shows the moment after the forward pass and before finished requests give their
    blocks back.
    """

    manager: BlockManager
    frames: list[str] = field(default_factory=list)
    _held: dict[Sequence, list[int]] = field(default_factory=dict)  # after the last step

    def note(self, scheduler: Scheduler, step: ScheduledStep, found: Shares) -> None:
        lines = [f"step {len(self.frames) + 1}", *self._pool(scheduler.running), ""]
        lines += [
            f"table {name_of(seq)}  {seq.block_table}  for {seq.context_len} tokens"
            for seq in scheduler.running
        ]
        free = self.manager.free_block_ids()
        lines += [f"free     {free if free else 'none'}"]
        lines += [f"waiting  {' '.join(map(name_of, scheduler.waiting)) or 'nobody'}", ""]
        lines += self._decisions(scheduler, step)
        self.frames.append("\n".join(lines))
        self._held = {seq: list(seq.block_table) for seq in scheduler.running}

    def _pool(self, running: list[Sequence]) -> list[str]:
        """A letter for a token, a dot for an empty slot that is held, a dash for a free one."""
        block_size = self.manager.block_size
        blocks = ["-" * block_size] * self.manager.num_blocks
        for seq in running:
            for logical, physical in enumerate(seq.block_table):
                used = min(max(seq.context_len - logical * block_size, 0), block_size)
                blocks[physical] = (name_of(seq)[0] * used).ljust(block_size, ".")
        cells = [f"{number:>2} {block}" for number, block in enumerate(blocks)]
        starts = range(0, len(cells), BLOCKS_PER_LINE)
        return [
            ("pool  " if start == 0 else "      ") + "  ".join(cells[start : start + 8])
            for start in starts
        ]

    def _decisions(self, scheduler: Scheduler, step: ScheduledStep) -> list[str]:
        lines = [
            f"{name_of(seq)} has ended: {blocks(table)} free"
            for seq, table in self._held.items()
            if seq.status is SequenceStatus.FINISHED
        ]
        lines += [
            f"{name_of(seq)} is preempted, the newest, for want of blocks: "
            f"{blocks(self._held[seq])} free, {seq.num_tokens} tokens to compute again"
            for seq in step.preempted
        ]
        lines += [self._about_running(seq) for seq in step.sequences]
        if scheduler.waiting and not step.preempted:
            lines.append(self._about_head(scheduler))
        return lines

    def _about_running(self, seq: Sequence) -> str:
        held = len(self._held.get(seq, ()))
        new = list(seq.block_table[held:])
        tokens = f"{seq.num_scheduled} token{'s' if seq.num_scheduled > 1 else ''}"
        if not held:
            return f"{name_of(seq)} is admitted and computes {tokens}: takes {blocks(new)}"
        if new:
            return f"{name_of(seq)} computes {tokens}: its blocks are full, takes {blocks(new)}"
        return f"{name_of(seq)} computes {tokens}: its last block has room"

    def _about_head(self, scheduler: Scheduler) -> str:
        head, manager = scheduler.waiting[0], self.manager
        needs = manager.num_missing_blocks(head, head.num_tokens)
        if manager.can_allocate(head, head.num_tokens):
            return f"{name_of(head)} waits: a budget other than the cache is used up"
        kept = manager.watermark_blocks
        free = f"{manager.num_free_blocks} free" + (f" ({kept} kept back)" if kept else "")
        return f"{name_of(head)} waits: it needs {needs} block{'s' * (needs > 1)} of {free}"


def blocks(ids: list[int]) -> str:
    return f"block{'s' if len(ids) > 1 else ''} {', '.join(map(str, ids))}"


def watch(requests: Iterable[Request], manager: BlockManager, **budgets: int) -> list[str]:
    """Runs requests to their end on the real scheduler; one text per step.

    budgets: max_running and max_tokens_per_step, as in Replay.
    """
    view = BlockView(manager)
    Replay(requests, manager, on_step=view.note, **budgets).run()
    return view.frames
