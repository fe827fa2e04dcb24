"""The cache budget, on small cases: admission, growth, preemption, refusal. Blocks of 4 slots."""

import pytest
from support import (
    check_books,
    ends,
    generated_alone,
    run_step,
    run_to_end,
    scheduler_with,
    sequence,
    slot_engine,
    tokens_of,
)

from minivllm.errors import RequestError
from minivllm.memory.block_manager import BlockManager
from minivllm.memory.contiguous import GrowingCache
from minivllm.memory.regions import FitRegions
from minivllm.sampling_params import SamplingParams
from minivllm.scheduler import Scheduler
from minivllm.sequence import SequenceStatus


def blocks(num_blocks, *sequences, watermark=0.0, **budgets):
    return scheduler_with(*sequences, kv_cache=BlockManager(num_blocks, 4, watermark), **budgets)


def names(queue):
    return [seq.request_id for seq in queue]


# Admission.


def test_a_long_prompt_waits_for_blocks_not_for_the_token_budget():
    """4,096 tokens fit the token budget of 8,192 and still not the 100 free blocks of 16."""
    manager = BlockManager(300, 16)
    scheduler = Scheduler(manager, max_tokens_per_step=8192)
    scheduler.add(sequence("first", 3200, 10))
    assert run_step(scheduler)[0] == {"first": 3200}
    scheduler.add(sequence("long", 4096, 10))
    assert manager.num_free_blocks < 256
    assert run_step(scheduler)[0] == {"first": 1}
    assert names(scheduler.waiting) == ["long"]
    assert scheduler.waiting[0].block_table == []
    scheduler.remove(scheduler.running[0])
    assert run_step(scheduler)[0] == {"long": 4096}


def test_nobody_overtakes_a_request_that_waits_for_memory():
    scheduler = blocks(5, sequence("a", 12, 4), sequence("b", 9, 4), sequence("c", 1, 4))
    assert run_step(scheduler)[0] == {"a": 12}
    assert names(scheduler.waiting) == ["b", "c"]


def test_a_prompt_in_chunks_holds_its_blocks_from_the_start():
    """Two half-admitted prompts that cannot both be finished would block each other."""
    scheduler = blocks(4, sequence("a", 12, 2), sequence("b", 8, 2), max_tokens_per_step=5)
    assert run_step(scheduler)[0] == {"a": 5}
    assert scheduler.kv_cache.num_free_blocks == 1
    assert run_step(scheduler)[0] == {"a": 5}
    assert names(scheduler.waiting) == ["b"]


def test_those_who_run_take_their_blocks_before_newcomers_are_asked():
    """One block is free and `a` is about to need it: `b` does not get it."""
    a = sequence("a", 4, 5)
    scheduler = blocks(2, a)
    run_step(scheduler)
    assert scheduler.kv_cache.num_free_blocks == 1
    scheduler.add(sequence("b", 4, 2))
    assert run_step(scheduler) == ({"a": 1}, [])
    assert len(a.block_table) == 2


# Growth.


def test_many_cross_into_a_new_block_in_the_same_step():
    """Four requests with a full block each and two free blocks: two go on, two are preempted.

    All of it is settled before anything is computed.
    """
    seqs = [sequence(name, 4, 9) for name in "abcd"]
    scheduler = blocks(6, *seqs)
    assert run_step(scheduler)[0] == dict.fromkeys("abcd", 4)
    lacking = [scheduler.kv_cache.num_missing_blocks(s, s.num_tokens) for s in scheduler.running]
    assert lacking == [1, 1, 1, 1]
    assert scheduler.kv_cache.num_free_blocks == 2
    scheduled, preempted = run_step(scheduler)
    # c needs a block, d is newer and goes; d's one block is enough for c.
    assert scheduled == {"a": 1, "b": 1, "c": 1}
    assert preempted == ["d"]
    assert scheduler.kv_cache.num_free_blocks == 0


def test_nobody_needs_a_block_in_the_middle_of_one():
    scheduler = blocks(2, sequence("a", 1, 4), sequence("b", 1, 4))
    for _ in range(4):
        assert run_step(scheduler)[1] == []


def test_the_copies_of_regions_that_move_are_handed_on():
    """`a` cannot grow in place, for `b` is behind it: it moves, and the runner must be told."""
    a = sequence("a", 4, 9)
    scheduler = scheduler_with(a, kv_cache=GrowingCache(FitRegions(40), grow_by=4))
    scheduler.add(sequence("b", 4, 9))
    run_step(scheduler)
    step = scheduler.schedule()
    assert [(copy.source_slot, copy.num_slots) for copy in step.copies] == [(0, 4), (4, 4)]


# Preemption.


def test_the_newest_goes_and_comes_back_first():
    scheduler = blocks(3, sequence("a", 4, 9), sequence("b", 4, 9), max_running=2)
    run_step(scheduler)
    scheduler.add(sequence("c", 4, 9))
    assert run_step(scheduler) == ({"a": 1}, ["b"])
    assert names(scheduler.running) == ["a"]
    assert names(scheduler.waiting) == ["b", "c"], "in front of those who came later"


def test_a_preempted_sequence_keeps_its_tokens_and_no_memory():
    a, b = sequence("a", 3, 9), sequence("b", 3, 9)
    scheduler = blocks(3, a, b)
    for _ in range(3):
        scheduled, preempted = run_step(scheduler)
    assert preempted == ["b"]
    assert b.status is SequenceStatus.WAITING
    assert (b.num_computed, b.num_scheduled, b.block_table) == (0, 0, [])
    assert len(b.generated_token_ids) == 2
    assert b.num_remaining == 5, "prompt 3 + generated 2, all to be computed again"
    while "b" not in scheduled:
        if len(a.generated_token_ids) == 9:
            scheduler.remove(a)
        scheduled, _ = run_step(scheduler)
    assert scheduled["b"] == 5


def test_a_sequence_may_preempt_itself_and_no_other():
    """The newest one needs the block: taking it from an older one would turn the order round."""
    a, b = sequence("a", 5, 8), sequence("b", 4, 9)
    scheduler = blocks(3, a, b)
    run_step(scheduler)
    assert run_step(scheduler) == ({"a": 1}, ["b"])
    assert names(scheduler.running) == ["a"]


def test_nobody_is_admitted_in_a_step_that_preempted():
    """`b` frees three blocks, `a` takes one, and `c` would fit into the rest. It would be the next
    to be preempted, while `b` waits behind it."""
    a, b, c = sequence("a", 4, 9), sequence("b", 12, 5), sequence("c", 1, 9)
    scheduler = blocks(4, a, b)
    run_step(scheduler)
    scheduler.add(c)
    assert run_step(scheduler) == ({"a": 1}, ["b"])
    assert names(scheduler.waiting) == ["b", "c"]
    assert scheduler.kv_cache.num_free_blocks == 2


def test_not_even_the_preempted_one_when_it_would_fit():
    """With regions it can: `a` could not grow for want of a hole, and `b` leaves one for both.

    On blocks it never fits, since `a` has taken at least one of those that `b` needs again.
    """
    cache = GrowingCache(FitRegions(12), grow_by=1)
    scheduler = scheduler_with(sequence("a", 4, 9), sequence("b", 4, 9), kv_cache=cache)
    run_step(scheduler)
    assert run_step(scheduler) == ({"a": 1}, ["b"])
    assert cache.regions.largest_hole() == 7
    assert run_step(scheduler)[0] == {"a": 1, "b": 5}


def test_a_preempted_request_longer_than_the_token_budget_comes_back():
    engine = slot_engine(BlockManager(5, 4), 4, max_tokens_per_step=6)
    prompts = {engine.add_request([n] * 5, SamplingParams(max_tokens=9)): [n] * 5 for n in (1, 2)}
    increments = run_to_end(engine, max_steps=100)
    for request_id, prompt in prompts.items():
        assert tokens_of(increments[request_id]) == generated_alone(prompt, 9)


@pytest.mark.parametrize("num_blocks", [4, 5, 6, 40])
def test_preemption_changes_no_token_and_no_count(num_blocks):
    """max_tokens does not start over, and the recomputation covers prompt and output."""
    engine = slot_engine(BlockManager(num_blocks, 4), 4)
    seen = []
    engine.on_step = lambda step: seen.extend(step.preempted)
    prompts = {}
    for n in range(5):
        prompt = [n] * (2 + n)
        prompts[engine.add_request(prompt, SamplingParams(max_tokens=8))] = prompt
    increments = run_to_end(engine, max_steps=200)
    for request_id, prompt in prompts.items():
        assert tokens_of(increments[request_id]) == generated_alone(prompt, 8)
        assert ends(increments[request_id]) == ["max_tokens"]
    assert bool(seen) == (num_blocks < 40)


# What can never fit.


@pytest.mark.parametrize(("prompt_len", "max_tokens"), [(17, 1), (16, 2), (10, 8), (1, 17)])
def test_what_can_never_fit_is_refused_at_once_and_the_others_finish(prompt_len, max_tokens):
    """Four blocks of 4: prompt + max_tokens - 1 may be 16. Never a hang, never a loop."""
    engine = slot_engine(BlockManager(4, 4), 4)
    engine.add_request([1] * 3, SamplingParams(max_tokens=3))
    with pytest.raises(RequestError, match=r"17\b.*\b16\b"):  # both numbers
        engine.add_request([1] * prompt_len, SamplingParams(max_tokens=max_tokens))
    engine.add_request([2] * 3, SamplingParams(max_tokens=3))
    increments = run_to_end(engine, max_steps=20)
    assert [ends(i) for i in increments.values()] == [["max_tokens"], ["max_tokens"]]


@pytest.mark.parametrize(("prompt_len", "max_tokens"), [(16, 1), (15, 2), (1, 16)])
def test_what_just_fits_ends_alone_in_the_pool(prompt_len, max_tokens):
    engine = slot_engine(BlockManager(4, 4), 4)
    request_id = engine.add_request([1] * prompt_len, SamplingParams(max_tokens=max_tokens))
    increments = run_to_end(engine, max_steps=max_tokens + 1)
    assert tokens_of(increments[request_id]) == generated_alone([1] * prompt_len, max_tokens)


# The watermark.


def test_newcomers_leave_the_watermark_free_and_those_who_run_use_it():
    a, b = sequence("a", 4, 9), sequence("b", 8, 9)
    scheduler = blocks(4, a, b, watermark=0.5)
    assert scheduler.kv_cache.watermark_blocks == 2
    assert run_step(scheduler)[0] == {"a": 4}
    assert names(scheduler.waiting) == ["b"], "it fits, and would leave one block for growth"
    assert run_step(scheduler)[0] == {"a": 1}
    assert len(a.block_table) == 2, "a grows into the blocks that were kept"


def test_the_watermark_never_keeps_the_only_request_out():
    engine = slot_engine(BlockManager(4, 4, watermark=0.9), 4)
    request_id = engine.add_request([1] * 16, SamplingParams(max_tokens=1))
    assert ends(run_to_end(engine, max_steps=5)[request_id]) == ["max_tokens"]


def test_a_watermark_saves_preemptions():
    from minivllm.simulation.policies import make_cache
    from minivllm.simulation.replay import Replay
    from minivllm.simulation.workloads import load

    preempted = []
    for watermark in (0.0, 0.1):
        requests = load("sharegpt", 200, max_model_len=1024)
        cache = make_cache("paged", 4096, 1024, watermark=watermark)
        preempted.append(Replay(requests, cache).run().preemptions_per_1000_steps)
    assert preempted[1] < preempted[0] / 2


# Idle, aborted, used again.


def test_an_idle_engine_steps_to_nothing_and_so_does_an_emptied_one():
    engine = slot_engine(BlockManager(4, 4), 4)
    assert engine.step() == []
    running, waiting = (engine.add_request([1] * 16, SamplingParams(max_tokens=1)) for _ in "ab")
    engine.scheduler.max_tokens_per_step = 3
    assert engine.step() == []
    engine.abort(waiting)
    engine.abort(running)
    assert engine.step() == []
    assert engine.scheduler.kv_cache.num_free_blocks == 4


def test_aborts_give_every_block_back():
    engine = slot_engine(BlockManager(6, 4), 4)
    ids = [engine.add_request([n] * 6, SamplingParams(max_tokens=9)) for n in range(4)]
    engine.step()
    assert engine.scheduler.kv_cache.num_free_blocks == 0
    engine.abort(ids[1])  # runs
    assert engine.scheduler.kv_cache.num_free_blocks == 2
    engine.abort(ids[3])  # waits
    with pytest.raises(RequestError, match="no live request"):
        engine.abort(ids[3])
    with pytest.raises(RequestError, match="no live request"):
        engine.abort("nobody")
    check_books(engine)
    left = run_to_end(engine, max_steps=100)
    assert sorted(left) == [ids[0], ids[2]]
    assert engine.scheduler.kv_cache.num_free_blocks == 6


def test_an_engine_that_has_served_serves_again():
    engine = slot_engine(BlockManager(5, 4), 4)
    answers = []
    for _ in range(2):
        ids = [engine.add_request([n] * 5, SamplingParams(max_tokens=7)) for n in range(4)]
        increments = run_to_end(engine, max_steps=200)
        answers.append([tokens_of(increments[request_id]) for request_id in ids])
    assert answers[0] == answers[1] == [generated_alone([n] * 5, 7) for n in range(4)]


def test_the_oldest_always_gets_on():
    """However small the pool, somebody gains a token in every step: no livelock."""
    engine = slot_engine(BlockManager(4, 4), 4)
    for n in range(8):
        engine.add_request([n] * 4, SamplingParams(max_tokens=13))
    while engine.has_unfinished:
        oldest = (engine.scheduler.running or engine.scheduler.waiting)[0]
        before = len(oldest.generated_token_ids)
        engine.step()
        assert len(oldest.generated_token_ids) == before + 1
