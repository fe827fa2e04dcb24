"""`compare`: every stage on the tiny model, the table, the JSON and the figures."""

import json

import pytest

from minivllm.cli.app import run as run_cli
from minivllm.compare import MarginSampler, Meter, StageResult, count_equal, make_jobs

SMALL = ["compare", "--model", "tiny-random", "--requests", "9", "--kv-slots", "512"]


def test_compare_writes_what_it_measured(tmp_path, capsys):
    out, path = tmp_path / "figures", tmp_path / "compare.json"
    assert run_cli([*SMALL, "--out", str(out), "--json", str(path)]) == 0
    stages = json.loads(path.read_text())["stages"]
    assert [s["name"] for s in stages] == [
        "past_key_values", "reserve-max", "grow", "paged-gather",
    ]  # fmt: skip
    for stage in stages:
        assert stage["requests"] == 9
        assert stage["tokens_equal"] + stage["ties"] == 9
        assert stage["decode_tokens_per_s"] > 0
        assert stage["total_tokens_per_s"] > 0
    first, reserved, _, paged = stages
    assert first["token_share"] is None
    assert reserved["peak_running"] == 2, "512 slots hold two requests of 256"
    assert paged["peak_running"] > 2 * reserved["peak_running"]
    assert paged["token_share"] > 1.5 * reserved["token_share"]
    assert sum(paged["share"].values()) == pytest.approx(100)
    assert (out / "shares.png").stat().st_size > 5000
    assert (out / "running.png").stat().st_size > 5000
    printed = capsys.readouterr().out
    assert max(map(len, printed.splitlines())) <= 200
    assert "9/9" in printed


def test_the_jobs_have_sharegpt_like_lengths_and_fit():
    token_ids = list(range(90))
    jobs = make_jobs(token_ids, 300, 256, 8, seed=0)
    assert all(len(job.prompt_token_ids) + job.max_tokens <= 256 for job in jobs)
    assert all(job.prompt_token_ids and job.max_tokens >= 1 for job in jobs)
    assert 25 < sum(job.max_tokens for job in jobs) / 300 < 60
    assert jobs == make_jobs(token_ids, 300, 256, 8, seed=0)
    assert jobs != make_jobs(token_ids, 300, 256, 8, seed=1)


def test_only_a_narrow_first_difference_is_a_tie():
    result = StageResult("x", requests=3)
    expected = [[1, 2, 3]] * 3
    margins = [[1.0, 1e-4, 1.0]] * 3
    count_equal(result, [[1, 2, 3], [1, 9, 9], [9, 2, 3]], expected, margins)
    assert (result.tokens_equal, result.ties) == (1, 1)


def test_margins_are_those_of_the_two_likeliest():
    import torch

    from minivllm.sampling_params import SamplingParams
    from minivllm.sequence import Sequence

    sampler = MarginSampler()
    seq = Sequence("a", [0], SamplingParams())
    assert sampler.sample(torch.tensor([[1.0, 4.5, 3.0]]), [seq]) == [1]
    assert sampler.margins == {"a": [1.5]}


def test_shares_are_taken_while_somebody_waits():
    from minivllm.memory.block_manager import BlockManager
    from minivllm.scheduler import Scheduler

    meter = Meter(Scheduler(BlockManager(10, 4)))
    meter.sums, meter.all_sums = [1, 1, 0, 0, 0, 2], [9, 0, 0, 0, 0, 0]
    assert meter.percent()["token"] == 100
    meter.waited = 3
    assert meter.percent()["token"] == 25


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--stages", "magic"], "unknown stage 'magic': use past_key_values"),
        (["--requests", "0"], "requests is 0"),
        (["--shrink", "0"], "shrink is 0"),
        (["--max-model-len", "1"], "max_model_len is 1"),
        (["--kv-slots", "100"], "kv_slots is 100: it must hold one request of max_model_len 256"),
        (["--block-size", "0"], "block_size is 0"),
        (["--json", "nowhere/x.json"], "there is no folder nowhere"),
    ],
)
def test_bad_options_are_refused_in_one_line(options, words, capsys):
    assert run_cli([*SMALL[:3], *options]) == 1
    assert words in " ".join(capsys.readouterr().err.split())
