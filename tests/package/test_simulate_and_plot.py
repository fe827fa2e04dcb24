"""`simulate` and `plot` from the command line."""

import json
import os
import subprocess
import sys

import pytest

from minivllm.cli.app import run as run_cli


@pytest.fixture
def simulated(tmp_path):
    """simulated(*options) -> the JSON that `simulate --json` wrote."""

    def simulate(*options):
        path = tmp_path / "result.json"
        arguments = ["simulate", "--requests", "60", "--json", str(path), *map(str, options)]
        assert run_cli(arguments) == 0
        return json.loads(path.read_text())

    return simulate


def test_simulate_writes_what_it_measured(simulated, capsys):
    result = simulated("--policy", "grow", "--fit", "best", "--kv-slots", 20_000)
    assert set(result) >= {
        "share", "mean_running", "finished_per_1000_steps", "preemptions_per_1000_steps",
        "tokens_copied_per_generated_token", "settings",
    }  # fmt: skip
    assert list(result["share"]) == [
        "token", "reserved", "internal", "rounding", "external", "free",
    ]  # fmt: skip
    assert sum(result["share"].values()) == pytest.approx(100)
    assert result["settings"]["fit"] == "best"
    assert result["settings"]["kv_slots"] == 20_000
    assert "preempted per 1,000 steps" in capsys.readouterr().out


@pytest.mark.parametrize("workload", ["azure-conv", "azure-code", "sharegpt", "alpaca"])
def test_every_workload_runs(simulated, workload):
    assert simulated("--workload", workload)["mean_running"] > 1


def test_arrivals(simulated):
    pool = ("--workload", "alpaca", "--policy", "grow", "--kv-slots", 2048)
    busy = simulated(*pool)
    slow = simulated(*pool, "--arrivals", "poisson", "--rate", 0.2)
    assert slow["share"]["token"] < busy["share"]["token"] / 2


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["simulate", "--policy", "hope"], "unknown policy 'hope'"),
        (["simulate", "--kv-slots", "0"], "kv_slots is 0"),
        (["simulate", "--kv-slots", "100"], "max_model_len is 8192 and the KV pool has 100 slots"),
        (["simulate", "--policy", "grow", "--kv-slots", "900"], "KV pool has 900"),
        (["simulate", "--max-model-len", "0"], "max_model_len is 0"),
        (["simulate", "--fit", "worst"], "fit is 'worst'"),
        (["simulate", "--requests", "0"], "requests is 0"),
        (["simulate", "--max-running", "0"], "max_running is 0"),
        (["simulate", "--policy", "grow", "--grow-by", "0"], "grow_by is 0"),
        (["simulate", "--workload", "nowhere.csv"], "cannot read nowhere.csv"),
        (["simulate", "--json", "/no/such/folder/x.json"], "there is no folder"),
        (["plot", "waste", "--out", "x.pdf"], "must end in .png or .svg"),
        (["plot", "waste", "--out", "/no/such/folder/x.png"], "there is no folder"),
        (["plot", "waste", "missing.json", "--out", "x.png"], "is no result of"),
    ],
)
def test_bad_input_is_one_line(arguments, words, capsys):
    assert run_cli(arguments) != 0
    error = capsys.readouterr().err
    assert words in error
    assert error.count("\n") == 1


def is_picture(path):
    return path.read_bytes()[:8] in (b"\x89PNG\r\n\x1a\n", b"<?xml ve")


def test_plots_from_files_and_from_nothing(simulated, tmp_path):
    files = []
    for policy in ("reserve-max", "grow"):
        path = tmp_path / f"{policy}.json"
        path.write_text(json.dumps(simulated("--policy", policy)))
        files.append(str(path))
    assert run_cli(["plot", "waste", *files, "--out", str(tmp_path / "a.svg")]) == 0
    assert run_cli(["plot", "waste", "--requests", "40", "--out", str(tmp_path / "b.png")]) == 0
    assert run_cli(["plot", "memory-map", "--out", str(tmp_path / "c.png")]) == 0
    arguments = ["plot", "concurrency", "--requests", "40", "--out", str(tmp_path / "d.png")]
    assert run_cli(arguments) == 0
    for name in ("a.svg", "b.png", "c.png", "d.png"):
        assert is_picture(tmp_path / name)


def test_the_same_figure_has_the_same_bytes(tmp_path):
    """In another process, too, where sets of strings have another order."""
    for seed in "12":
        command = [sys.executable, "-m", "minivllm", "plot", "memory-map", "--out"]
        subprocess.run(
            [*command, str(tmp_path / f"{seed}.svg")],
            env=os.environ | {"PYTHONHASHSEED": seed},
            check=True,
        )
    assert (tmp_path / "1.svg").read_bytes() == (tmp_path / "2.svg").read_bytes()


def test_simulate_paged(simulated):
    result = simulated("--policy", "paged", "--block-size", 32, "--watermark", 0.05)
    assert result["settings"]["block_size"] == 32
    assert result["share"]["token"] > 80
    assert result["share"]["external"] == result["share"]["rounding"] == 0


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--block-size", "0"], "block_size is 0"),
        (["--block-size", "70000"], "block_size is 70000"),
        (["--watermark", "1"], "watermark is 1.0"),
        (["--watermark", "-0.5"], "watermark is -0.5"),
    ],
)
def test_bad_blocks_are_refused_in_one_line(options, words, capsys):
    assert run_cli(["simulate", "--policy", "paged", *options]) == 1
    assert words in capsys.readouterr().err


@pytest.mark.parametrize(
    "command",
    [
        ["block-size", "--requests", "60", "--kv-slots", "16384"],
        ["timeline", "--requests", "60", "--watermark", "0.01"],
        ["memory-map", "--policy", "paged", "--block-size", "32"],
    ],
)
def test_plots_of_blocks(command, tmp_path):
    out = tmp_path / "figure.png"
    assert run_cli(["plot", *command, "--out", str(out)]) == 0
    assert out.stat().st_size > 5000


def test_blocks_tells_every_step(capsys):
    assert run_cli(["blocks", "--auto"]) == 0
    out = capsys.readouterr().out
    assert "step 1\n" in out
    assert "is preempted, the newest" in out
    assert "D waits: it needs 2 blocks" in out
    assert "A has ended" in out


def test_blocks_with_own_requests(capsys):
    command = ["blocks", "17+20", "40+3@2", "--block-size", "16", "--num-blocks", "5"]
    assert run_cli([*command, "--auto"]) == 0
    out = capsys.readouterr().out
    assert out.count("A has ended") == 0  # it is the last one
    assert "B is admitted and computes 40 tokens: takes blocks 2, 3, 4" in out


def test_blocks_tells_of_the_watermark_and_the_other_budgets():
    from minivllm.memory.block_manager import BlockManager
    from minivllm.simulation.block_view import watch
    from minivllm.simulation.workloads import Request

    two = [Request(4, 3), Request(8, 2)]
    assert (
        "B waits: it needs 2 blocks of 3 free (2 kept back)"
        in watch(two, BlockManager(4, 4, watermark=0.5))[0]
    )
    assert (
        "B waits: a budget other than the cache is used up"
        in watch(two, BlockManager(4, 4), max_running=1)[0]
    )


@pytest.mark.parametrize("request_", ["6+x", "6", "0+3", "3+0", "3+3@0", "-1+2", "9+9@"])
def test_a_request_that_is_none_is_refused(request_, capsys):
    assert run_cli(["blocks", "--", request_]) == 1
    assert "write PROMPT+OUTPUT" in capsys.readouterr().err
