"""Replays against an independent simulator's numbers, the paper's figure and a closed form."""

import pytest

from minivllm.cli.simulate import FIGURE_2, run
from minivllm.memory.contiguous import GrowingCache, ReservedCache
from minivllm.memory.regions import FitRegions
from minivllm.simulation.replay import SHARE_NAMES, Replay
from minivllm.simulation.workloads import Request, load

# Azure conversations, pool 65,536, longest request 8,192: shares in percent, mean batch, finished
# per 1,000 steps. From a simulator written apart from this one, on 6,000 requests.
EXPECTED = {
    ("reserve-max", "first"): ((15.8, 2.0, 82.1, 0, 0, 0), 8.0, 38),
    ("reserve-pow2", "first"): ((65.9, 8.4, 5.4, 0, 20.2, 0.1), 33, 160),
    ("reserve-oracle", "first"): ((70.2, 9.0, 0, 0, 20.7, 0.1), 36, 170),
    ("reserve-oracle", "buddy"): ((47.4, 6.0, 0, 27.5, 18.8, 0.4), 24, 114),
    ("grow", "first"): ((75.8, 0.4, 0, 0, 19.1, 4.6), 39, 179),
    ("grow", "best"): ((81.7, 0.5, 0, 0, 12.2, 5.6), 42, 191),
}


def check_expected(policy, fit, requests, *, within):
    result = run(policy=policy, fit=fit, requests=requests, progress=False)
    shares, running, finished = EXPECTED[policy, fit]
    assert sum(result["share"].values()) == pytest.approx(100)
    assert list(result["share"].values()) == pytest.approx(list(shares), abs=3)
    assert result["mean_running"] == pytest.approx(running, rel=within)
    assert result["finished_per_1000_steps"] == pytest.approx(finished, rel=within)
    if policy == "grow":
        assert result["preemptions_per_1000_steps"] > 900
        assert result["tokens_copied_per_generated_token"] > 30
    else:
        assert result["preemptions_per_1000_steps"] == 0
        assert result["tokens_copied_per_generated_token"] == 0


@pytest.mark.parametrize(("policy", "fit"), EXPECTED)
def test_the_expected_values_in_short(policy, fit):
    """A tenth of the requests: the shares are there, the counts are noisier."""
    check_expected(policy, fit, 600, within=0.1)


@pytest.mark.full
@pytest.mark.parametrize(("policy", "fit"), EXPECTED)
def test_the_expected_values(policy, fit):
    check_expected(policy, fit, 6000, within=0.05)


def check_figure_2(requests):
    reported = {"reserve-max": 20.4, "reserve-pow2": 26.8, "reserve-oracle": 38.2}
    for policy, token in reported.items():
        result = run(policy=policy, requests=requests, progress=False, **FIGURE_2)
        assert result["share"]["token"] == pytest.approx(token, abs=3.0), policy
        if policy == "reserve-max":
            # The paper's 8.9 % of "external fragmentation and others" is neither: it is the end
            # of the pool, too short for an eighth reservation.
            assert result["share"]["external"] == result["share"]["rounding"] == 0
            assert result["share"]["free"] == pytest.approx(100 * (1 - 7 * 2048 / 15_728), abs=0.1)
        else:
            assert result["share"]["rounding"] > 20


def test_the_paper_s_figure_2_in_short():
    check_figure_2(600)


@pytest.mark.full
def test_the_paper_s_figure_2():
    check_figure_2(20_000)  # the mean length of 2,000 such requests is still off by 3 %


def test_reserve_max_has_a_closed_form():
    """Eight requests fit, whatever they are; a slot's chance to hold a token is E / 8,192, where E
    is the mean length weighted by the time for which a request has it."""
    requests = list(load("azure-conv", 1500, max_model_len=8192))
    weighted = sum(r.output_len * (r.prompt_len + (r.output_len - 1) / 2) for r in requests)
    expected = 100 * weighted / sum(r.output_len for r in requests) / 8192
    result = Replay(requests, ReservedCache(FitRegions(65_536), 8192)).run()
    assert result.mean_running == 8
    assert result.share["token"] == pytest.approx(expected, rel=0.02)


def test_shares_sum_to_the_pool_in_every_step():
    cache, sums = GrowingCache(FitRegions(5000)), []
    requests = load("sharegpt", 60, max_model_len=1000)
    Replay(requests, cache, on_step=lambda scheduler, step, found: sums.append(sum(found))).run()
    assert set(sums) == {5000}
    assert len(sums) > 500


def test_a_request_is_measured_with_p_to_p_plus_g_minus_1_tokens():
    tokens = []
    replay = Replay(
        [Request(10, 4)],
        ReservedCache(FitRegions(100), 20),
        on_step=lambda scheduler, step, found: tokens.append(found.token),
    )
    replay.run()
    assert tokens == [10, 11, 12, 13]


def test_later_arrivals_wait_for_their_step_and_idle_steps_count():
    steps = []
    replay = Replay(
        [Request(4, 2, 0), Request(4, 2, 10)],
        ReservedCache(FitRegions(100), 50),
        on_step=lambda scheduler, step, found: steps.append([s.request_id for s in step.sequences]),
    )
    result = replay.run()
    assert steps == [["1"], ["1"], ["2"], ["2"]]
    assert result.steps == 10, "two steps and eight idle ones, until the last request came"
    assert result.share["free"] == pytest.approx(100 - 2 * 50 * 100 / (10 * 100))


def test_budgets_are_kept():
    seen = []
    replay = Replay(
        load("sharegpt", 50, max_model_len=1000),
        GrowingCache(FitRegions(20_000)),
        max_running=5,
        max_tokens_per_step=100,
        on_step=lambda scheduler, step, _: seen.append([s.num_scheduled for s in step.sequences]),
    )
    replay.run()
    assert max(map(len, seen)) == 5
    assert max(map(sum, seen)) == 100


def test_a_replay_is_the_same_every_time():
    def once():
        return Replay(load("alpaca", 200, max_model_len=500), GrowingCache(FitRegions(3000))).run()

    assert once() == once()
    assert set(once().share) == set(SHARE_NAMES)
