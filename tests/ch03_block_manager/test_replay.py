"""Paging on the lengths of real requests, against numbers found independently and other stages."""

import pytest

from minivllm.cli.simulate import FIGURE_2, run
from minivllm.memory.block_manager import BlockManager
from minivllm.memory.contiguous import GrowingCache, ReservedCache
from minivllm.memory.regions import FitRegions
from minivllm.simulation.replay import Replay
from minivllm.simulation.workloads import load

# Block size -> (token, reserved, internal, free in percent, mean batch, finished per 1,000 steps):
# an independent simulator, 6,000 requests of the Azure conversation workload, 65,536 slots.
EXPECTED = {
    1: (98.2, 0.0, 0.0, 1.8, 50, 238),
    16: (97.7, 0.6, 0.0, 1.7, 49, 237),
    128: (93.7, 3.7, 0.9, 1.7, 47, 227),
}


def check_expected(block_size, requests, within):
    token, reserved, internal, free, mean_running, finished = EXPECTED[block_size]
    result = run(policy="paged", block_size=block_size, requests=requests, progress=False)
    share = result["share"]
    assert share["token"] == pytest.approx(token, abs=1.0)
    assert share["reserved"] == pytest.approx(reserved, abs=0.5)
    assert share["internal"] == pytest.approx(internal, abs=0.5)
    assert share["free"] == pytest.approx(free, abs=1.0)
    assert share["rounding"] == share["external"] == 0
    assert result["mean_running"] == pytest.approx(mean_running, rel=within)
    assert result["finished_per_1000_steps"] == pytest.approx(finished, rel=within)
    assert result["tokens_copied_per_generated_token"] == 0


@pytest.mark.parametrize("block_size", EXPECTED)
def test_the_expected_values_in_short(block_size):
    """A tenth of the requests: the shares are there, the counts are noisier."""
    check_expected(block_size, 600, within=0.1)


@pytest.mark.full
@pytest.mark.parametrize("block_size", EXPECTED)
def test_the_expected_values(block_size):
    check_expected(block_size, 6000, within=0.05)


@pytest.mark.parametrize("requests", [600, pytest.param(6000, marks=pytest.mark.full)])
def test_the_paper_s_bar(requests):
    """Figure 2: 96.3 % of vLLM's KV memory holds token state."""
    result = run(policy="paged", requests=requests, progress=False, **FIGURE_2)
    assert result["share"]["token"] == pytest.approx(96.3, abs=1.5)


def test_code_completions_run_as_well():
    result = run(policy="paged", workload="azure-code", requests=1000, progress=False)
    assert result["share"]["token"] > 95


def steps_of(kv_cache, requests, **budgets):
    """What every step did: who ran with how many tokens, and who was preempted."""
    steps = []

    def note(scheduler, step, found):
        ran = [(seq.request_id, seq.num_scheduled) for seq in step.sequences]
        steps.append((ran, [seq.request_id for seq in step.preempted], found.token))

    Replay(list(requests), kv_cache, on_step=note, **budgets).run()
    return steps


@pytest.mark.parametrize("max_tokens_per_step", [None, 300])
def test_one_huge_block_each_is_reserving_the_maximum(max_tokens_per_step):
    requests = list(load("azure-conv", 150, max_model_len=1000, arrivals="poisson", rate=3.0))
    budgets = {"max_tokens_per_step": max_tokens_per_step}
    paged = steps_of(BlockManager(8, block_size=1000), requests, **budgets)
    reserved = steps_of(ReservedCache(FitRegions(8000), 1000), requests, **budgets)
    assert paged == reserved
    assert max(len(ran) for ran, _, _ in paged) == 8, "memory must matter for this to say anything"


def test_without_memory_pressure_paging_is_growing():
    requests = list(load("azure-conv", 100, max_model_len=1000, arrivals="poisson", rate=3.0))
    paged = steps_of(BlockManager(6250, block_size=16), requests)
    assert paged == steps_of(GrowingCache(FitRegions(100_000), grow_by=16), requests)
    assert max(len(ran) for ran, _, _ in paged) > 8


def test_nothing_is_copied_and_the_tail_is_all_that_is_empty():
    """At most block_size - 1 slots per request are held and empty, in every step."""
    empty = []

    def note(scheduler, step, found):
        held = found.token + found.reserved + found.internal
        empty.append((held - found.token, 15 * len(scheduler.running)))
        assert step.copies == []

    # A prompt that comes in chunks holds all its blocks from the start, so no token budget here.
    Replay(load("sharegpt", 80, max_model_len=2048), BlockManager(500, 16), on_step=note).run()
    assert all(slots <= most for slots, most in empty)
    assert len(empty) > 1000
