"""Workloads: the lengths they promise, and one clear sentence for every bad trace."""

import random
import statistics
from itertools import islice

import pytest

from minivllm.simulation.workloads import WORKLOADS, load, quantile

HEAD = "TIMESTAMP,ContextTokens,GeneratedTokens\r\n"


def lengths(name, count=20_000):
    rows = list(islice(WORKLOADS[name](random.Random(0)), count))
    return [p for p, _ in rows], [g for _, g in rows]


@pytest.mark.parametrize(
    ("name", "prompt", "output"),
    [
        ("azure-conv", 1154.7, 211.1),  # the traces' own means
        ("azure-code", 2047.8, 27.9),
        ("sharegpt", 161.31, 337.99),  # the paper's
        ("alpaca", 19.31, 58.45),
    ],
)
def test_means_are_those_of_the_source(name, prompt, output):
    prompts, outputs = lengths(name)
    assert statistics.mean(prompts) == pytest.approx(prompt, rel=0.05)
    assert statistics.mean(outputs) == pytest.approx(output, rel=0.06)
    assert min(prompts) >= 1
    assert min(outputs) >= 1


def test_quantiles_are_met():
    assert [quantile([0, 10, 100], share) for share in (0, 0.25, 0.5, 0.75, 1)] == [
        0, 5, 10, 55, 100,
    ]  # fmt: skip
    prompts, _ = lengths("azure-conv")
    assert statistics.median(prompts) == pytest.approx(1020, rel=0.03)


def test_the_same_seed_gives_the_same_requests():
    def five(seed):
        return list(load("azure-conv", 5, max_model_len=8192, seed=seed))

    assert five(1) == five(1)
    assert five(1) != five(2)


def test_long_requests_are_cut_to_the_model():
    requests = list(load("azure-conv", 3000, max_model_len=500))
    assert max(r.prompt_len for r in requests) == 499
    assert max(r.prompt_len + r.output_len for r in requests) == 500
    assert min(r.output_len for r in requests) >= 1


def test_poisson_arrivals_have_the_rate():
    requests = list(
        load("alpaca", 2000, max_model_len=2048, arrivals="poisson", rate=4, steps_per_second=50)
    )
    arrivals = [r.arrival for r in requests]
    assert arrivals == sorted(arrivals)
    assert arrivals[-1] == pytest.approx(2000 / 4 * 50, rel=0.1)


@pytest.fixture
def trace(tmp_path):
    def write(text):
        path = tmp_path / "trace.csv"
        path.write_bytes(text.encode())
        return str(path)

    return write


ROWS = (
    "2023-11-16 18:17:03.9799600,374,44\r\n"
    "2023-11-16 18:17:04.4799600,396,109\r\n"
    "2023-11-16 18:17:06.0000000,879,55\r\n"
)


def test_a_trace_as_azure_publishes_it(trace):
    path = trace(HEAD + ROWS)
    queued = list(load(path, 10, max_model_len=8192))
    assert [(r.prompt_len, r.output_len, r.arrival) for r in queued] == [
        (374, 44, 0), (396, 109, 0), (879, 55, 0),
    ]  # fmt: skip
    timed = list(load(path, 2, max_model_len=8192, arrivals="trace", steps_per_second=10))
    assert [r.arrival for r in timed] == [0, 5]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("TIMESTAMP,ContextTokens\r\n1,2\r\n", "has no column GeneratedTokens"),
        ("", "has no column TIMESTAMP, ContextTokens, GeneratedTokens"),
        (HEAD, "has no requests"),
        (HEAD + ROWS + "2023-11-16 18:17:07,-3,5\r\n", "line 5: ContextTokens is -3"),
        (HEAD + ROWS + "2023-11-16 18:17:07,3,0\r\n", "line 5: GeneratedTokens is 0"),
        (HEAD + "2023-11-16 18:17:07,many,5\r\n", "line 2: ContextTokens is 'many', not a number"),
        (HEAD + "2023-11-16 18:17:07,3\r\n", "line 2: GeneratedTokens is None, not a number"),
        (HEAD + "yesterday,3,5\r\n", "line 2: TIMESTAMP is 'yesterday', not a time"),
        (HEAD + "2023-11-16 18:17:07,3,5\r\n2023-11-16 18:17:06,3,5\r\n", "request 2 is earlier"),
    ],
)
def test_a_bad_trace_is_one_sentence_with_its_line(trace, text, words):
    with pytest.raises(ValueError, match=r"trace\.csv") as error:
        list(load(trace(text), 10, max_model_len=8192))
    assert words in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"workload": "azure"}, "unknown workload 'azure'"),
        ({"workload": "missing.csv"}, "cannot read missing.csv"),
        ({"count": 0}, "requests is 0"),
        ({"max_model_len": 1}, "max_model_len is 1"),
        ({"arrivals": "later"}, "arrivals is 'later'"),
        ({"arrivals": "trace"}, "has no times of its own"),
        ({"arrivals": "poisson", "rate": 0.0}, "rate is 0.0"),
        ({"arrivals": "poisson", "rate": float("nan")}, "rate is nan"),
        ({"steps_per_second": -1.0}, "steps_per_second is -1.0"),
    ],
)
def test_bad_options_are_refused(options, words):
    arguments = {"workload": "azure-conv", "count": 5, "max_model_len": 100} | options
    with pytest.raises(ValueError, match=words):
        list(load(arguments.pop("workload"), arguments.pop("count"), **arguments))
