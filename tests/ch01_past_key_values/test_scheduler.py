"""The scheduler's three budgets: tokens, sequences, cache. No model runs here."""

import pytest
from support import LimitedCache, run_step, scheduler_with, sequence

from minivllm.memory.kv_cache_manager import SlotCopy, UnboundedCache
from minivllm.scheduler import Scheduler
from minivllm.sequence import SequenceStatus


def test_prefill_then_decode():
    scheduler = scheduler_with(sequence("a", 5), sequence("b", 3))
    assert run_step(scheduler) == ({"a": 5, "b": 3}, [])
    assert run_step(scheduler) == ({"a": 1, "b": 1}, [])


def test_requests_join_between_steps():
    scheduler = scheduler_with(sequence("a", 5))
    run_step(scheduler)
    scheduler.add(sequence("b", 3))
    assert run_step(scheduler)[0] == {"a": 1, "b": 3}


def test_a_removed_sequence_leaves_its_place_at_once():
    a, b, c = sequence("a", 5), sequence("b", 3), sequence("c", 2)
    scheduler = scheduler_with(a, b, c, max_running=2)
    assert run_step(scheduler)[0] == {"a": 5, "b": 3}
    assert [seq.status for seq in (a, b, c)] == ["running", "running", "waiting"]
    scheduler.remove(a)
    assert a.status is SequenceStatus.FINISHED
    assert run_step(scheduler)[0] == {"b": 1, "c": 2}


def test_the_token_budget_cuts_a_prompt_into_chunks():
    a = sequence("a", 10)
    scheduler = scheduler_with(a, max_tokens_per_step=4)
    assert run_step(scheduler)[0] == {"a": 4}
    assert run_step(scheduler)[0] == {"a": 4}
    assert a.generated_token_ids == []
    assert run_step(scheduler)[0] == {"a": 2}
    assert a.generated_token_ids == [0]
    assert run_step(scheduler)[0] == {"a": 1}


def test_the_token_budget_is_shared_and_never_exceeded():
    scheduler = scheduler_with(
        sequence("a", 3), sequence("b", 4), sequence("c", 2), max_tokens_per_step=5
    )
    assert run_step(scheduler)[0] == {"a": 3, "b": 2}
    assert run_step(scheduler)[0] == {"a": 1, "b": 2, "c": 2}
    assert run_step(scheduler)[0] == {"a": 1, "b": 1, "c": 1}


def test_running_sequences_come_before_waiting_ones():
    """A long prompt does not stop those that decode: it gets what they leave."""
    scheduler = scheduler_with(sequence("a", 2), sequence("b", 2), max_tokens_per_step=4)
    run_step(scheduler)
    scheduler.add(sequence("long", 100))
    assert run_step(scheduler)[0] == {"a": 1, "b": 1, "long": 2}


def test_when_the_budget_is_too_small_for_all_the_oldest_run():
    scheduler = scheduler_with(
        sequence("a", 1), sequence("b", 1), sequence("c", 1), max_tokens_per_step=3
    )
    run_step(scheduler)
    scheduler.max_tokens_per_step = 2
    assert run_step(scheduler)[0] == {"a": 1, "b": 1}


def test_the_sequence_budget():
    scheduler = scheduler_with(*(sequence(name, 2) for name in "abcde"), max_running=3)
    assert list(run_step(scheduler)[0]) == ["a", "b", "c"]
    assert list(run_step(scheduler)[0]) == ["a", "b", "c"]
    assert [seq.request_id for seq in scheduler.waiting] == ["d", "e"]


def test_first_come_first_served_without_skipping():
    """b does not fit; c would, and still waits behind it."""
    scheduler = scheduler_with(
        sequence("a", 4, 3), sequence("b", 7, 2), sequence("c", 1, 2), kv_cache=LimitedCache(10)
    )
    assert run_step(scheduler)[0] == {"a": 4}


class MovesThings(LimitedCache):
    """Every allocation wants something copied, as contiguous memory may."""

    def allocate(self, seq, num_tokens):
        super().allocate(seq, num_tokens)
        return [SlotCopy(0, len(seq.generated_token_ids), num_tokens)]


def test_the_copies_of_a_step_are_collected_in_order():
    scheduler = scheduler_with(sequence("a", 3), sequence("b", 4), kv_cache=MovesThings(500))
    assert scheduler.schedule().copies == [(0, 0, 3), (0, 0, 4)]
    scheduler = scheduler_with(sequence("a", 3), kv_cache=MovesThings(500))
    run_step(scheduler)
    scheduler.add(sequence("b", 4))
    assert scheduler.schedule().copies == [(0, 1, 4), (0, 0, 4)]


def test_an_admitted_sequence_has_room_for_its_whole_prompt():
    """Also when the token budget lets it compute only a part of it."""
    cache = LimitedCache(10)
    scheduler = scheduler_with(
        sequence("a", 8, 2), sequence("b", 8, 2), kv_cache=cache, max_tokens_per_step=4
    )
    assert run_step(scheduler)[0] == {"a": 4}
    assert cache.held == {"a": 8}


def test_the_newest_is_preempted_and_keeps_its_tokens():
    a, b = sequence("a", 4, 5), sequence("b", 4, 5)
    scheduler = scheduler_with(a, b, kv_cache=LimitedCache(10))
    run_step(scheduler)  # 4 + 4
    run_step(scheduler)  # 5 + 5
    assert run_step(scheduler) == ({"a": 1}, ["b"])
    assert (b.status, b.num_computed, len(b.generated_token_ids)) == (
        SequenceStatus.WAITING,
        0,
        2,
    )
    assert list(b.block_table) == []
    assert scheduler.waiting[0] is b


def test_a_preempted_sequence_recomputes_prompt_and_output():
    a, b = sequence("a", 4, 5), sequence("b", 4, 5)
    cache = LimitedCache(10)
    scheduler = scheduler_with(a, b, kv_cache=cache)
    for _ in range(3):
        run_step(scheduler)
    scheduler.remove(a)
    assert run_step(scheduler)[0] == {"b": 6}  # prompt 4 + 2 generated
    assert cache.held == {"b": 6}, "room for all its tokens"
    assert len(b.generated_token_ids) == 3


def test_preempted_sequences_return_in_their_old_order():
    scheduler = scheduler_with(*(sequence(n, 4, 9) for n in "abc"), kv_cache=LimitedCache(12))
    run_step(scheduler)  # 4 + 4 + 4: full
    assert run_step(scheduler) == ({"a": 1, "b": 1}, ["c"])
    scheduler.add(sequence("late", 1, 2))
    assert run_step(scheduler) == ({"a": 1, "b": 1}, [])  # 6 + 6: full again
    assert run_step(scheduler) == ({"a": 1}, ["b"])
    assert [seq.request_id for seq in scheduler.waiting] == ["b", "c", "late"]


class CannotGrowInPlace(LimitedCache):
    """Enough free slots in all, none behind the one that asks: as with contiguous memory."""

    def can_allocate(self, seq, num_tokens):
        grows = num_tokens > self.held.get(seq.request_id, num_tokens)
        return not grows and super().can_allocate(seq, num_tokens)


def test_nobody_is_admitted_in_a_step_that_preempted():
    """What was given back would do for the same sequence again, and the next step would preempt
    it again: much work, no progress for anybody else."""
    a, b = sequence("a", 4, 5), sequence("b", 2, 5)
    scheduler = scheduler_with(a, kv_cache=CannotGrowInPlace(10))
    run_step(scheduler)
    scheduler.add(b)
    assert run_step(scheduler) == ({}, ["a"])
    assert [seq.request_id for seq in scheduler.waiting] == ["a", "b"]
    assert run_step(scheduler) == ({"a": 5, "b": 2}, [])


def test_a_preempted_sequence_longer_than_the_token_budget_comes_back():
    a, b = sequence("a", 5, 12), sequence("b", 3, 12)
    scheduler = scheduler_with(a, b, kv_cache=LimitedCache(16), max_tokens_per_step=6)
    steps = (run_step(scheduler)[1] for _ in range(20))
    assert next(preempted for preempted in steps if preempted) == ["b"]
    assert b.num_tokens > 6
    scheduler.remove(a)
    known = b.num_tokens
    assert run_step(scheduler)[0] == {"b": 6}
    assert run_step(scheduler)[0] == {"b": known - 6}
    assert b.num_tokens == known + 1


@pytest.mark.parametrize(("prompt_len", "max_tokens"), [(11, 1), (1, 11), (6, 6), (10, 2)])
def test_what_can_never_fit_is_refused_with_both_numbers(prompt_len, max_tokens):
    scheduler = Scheduler(LimitedCache(10))
    with pytest.raises(ValueError, match=r"11 token slots .* has 10"):
        scheduler.add(sequence("a", prompt_len, max_tokens))
    assert not scheduler.waiting


@pytest.mark.parametrize(("prompt_len", "max_tokens"), [(10, 1), (1, 10), (5, 6)])
def test_what_just_fits_is_taken_and_ends(prompt_len, max_tokens):
    """The last token's K and V are never stored, so prompt + max_tokens - 1 slots are enough."""
    seq = sequence("a", prompt_len, max_tokens)
    scheduler = scheduler_with(seq, kv_cache=LimitedCache(10))
    for _ in range(max_tokens):
        assert "a" in run_step(scheduler)[0]
    assert len(seq.generated_token_ids) == max_tokens


def test_freeing_twice_is_an_error():
    cache, seq = UnboundedCache(), sequence("a", 3)
    cache.allocate(seq, 3)
    cache.free(seq)
    with pytest.raises(KeyError):
        cache.free(seq)


@pytest.mark.parametrize(
    "budgets",
    [{"max_tokens_per_step": 0}, {"max_running": -1}, {"max_running": float("nan")},
     {"max_tokens_per_step": 2.5}],
)  # fmt: skip
def test_budgets_must_be_positive(budgets):
    with pytest.raises(ValueError, match="must be 1 or more"):
        Scheduler(UnboundedCache(), **budgets)
