"""Random arrivals, aborts, budgets, pools and block sizes on the real scheduler and manager.

After every step the books balance; in the end every request has ended once, with its own tokens.
"""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    rule,
    run_state_machine_as_test,
)
from support import check_books, ends, generated_alone, run_to_end, slot_engine, tokens_of

from minivllm.errors import RequestError
from minivllm.memory.block_manager import BlockManager
from minivllm.sampling_params import SamplingParams


class SchedulerAtRandom(RuleBasedStateMachine):
    @initialize(
        num_blocks=st.integers(1, 14),
        block_size=st.integers(1, 6),
        watermark=st.sampled_from([0.0, 0.0, 0.2, 0.9]),
        budget=st.integers(1, 30),
        max_running=st.integers(1, 6),
    )
    def start(self, num_blocks, block_size, watermark, budget, max_running):
        self.manager = BlockManager(num_blocks, block_size, watermark)
        self.engine = slot_engine(
            self.manager, block_size, max_tokens_per_step=budget, max_running=max_running
        )
        self.budget = budget
        self.engine.on_step = self.check_step
        self.requests, self.increments, self.aborted = {}, {}, set()
        self.preempted = 0

    def check_step(self, step):
        assert all(seq.num_scheduled > 0 for seq in step.sequences), "in the step for nothing"
        assert sum(seq.num_scheduled for seq in step.sequences) <= self.budget
        running, most = self.engine.scheduler.running, self.engine.scheduler.max_running
        assert len(running) <= most, f"{len(running)} run, and max_running is {most}"
        held = {id(seq) for seq in step.sequences}
        assert len(held) == len(step.sequences)
        assert not held & {id(seq) for seq in step.preempted}
        self.preempted += len(step.preempted)
        for seq in step.sequences:
            assert len(seq.block_table) * self.manager.block_size >= seq.context_len

    @rule(prompt_len=st.integers(1, 14), max_tokens=st.integers(1, 12), token=st.integers(0, 9))
    def add(self, prompt_len, max_tokens, token):
        prompt, params = [token] * prompt_len, SamplingParams(max_tokens=max_tokens)
        num_slots = self.manager.num_blocks * self.manager.block_size
        if prompt_len + max_tokens - 1 > num_slots:
            with pytest.raises(RequestError, match=rf"\b{num_slots}\b"):
                self.engine.add_request(prompt, params)
            return
        request_id = self.engine.add_request(prompt, params)
        self.requests[request_id] = (prompt, max_tokens)
        self.increments[request_id] = []

    @rule(count=st.integers(1, 5))
    def step(self, count):
        for _ in range(count):
            for increment in self.engine.step():
                self.increments[increment.request_id].append(increment)

    @rule(data=st.data())
    def abort(self, data):
        live = [r for r in self.requests if self.engine.is_live(r)]
        if live:
            request_id = data.draw(st.sampled_from(live))
            self.engine.abort(request_id)
            self.aborted.add(request_id)

    @invariant()
    def books_balance(self):
        if not hasattr(self, "engine"):
            return
        check_books(self.engine)
        scheduler = self.engine.scheduler
        tables = [seq.block_table for seq in scheduler.running]
        owned = [block for table in tables for block in table]
        assert len(owned) == len(set(owned)), "a block is in two tables"
        assert len(owned) + self.manager.num_free_blocks == self.manager.num_blocks
        assert all(len(seq.block_table) == 0 for seq in scheduler.waiting), "waits with memory"

    def teardown(self):
        if not hasattr(self, "engine"):
            return
        work = sum(len(prompt) + count for prompt, count in self.requests.values())
        for request_id, rest in run_to_end(self.engine, max_steps=200 + 20 * work).items():
            self.increments[request_id] += rest
        assert self.manager.num_free_blocks == self.manager.num_blocks
        for request_id, (prompt, max_tokens) in self.requests.items():
            tokens = tokens_of(self.increments[request_id])
            expected = generated_alone(prompt, max_tokens)
            if request_id in self.aborted:
                assert tokens == expected[: len(tokens)]
                assert ends(self.increments[request_id]) == []
            else:
                assert tokens == expected
                assert ends(self.increments[request_id]) == ["max_tokens"]


@pytest.mark.parametrize("examples", [100, pytest.param(3000, marks=pytest.mark.full)])
def test_the_scheduler_at_random(examples):
    run_state_machine_as_test(
        SchedulerAtRandom,
        settings=settings(max_examples=examples, stateful_step_count=30, deadline=None),
    )
