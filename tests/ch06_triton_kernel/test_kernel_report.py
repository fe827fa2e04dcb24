"""kernel-report in a process of its own, since interpreting and compiling do not mix."""

import json
import os
import subprocess
import sys

import pytest

from minivllm.cli.app import run as run_cli

pytest.importorskip("triton", reason="there is no triton for this system")
pytestmark = pytest.mark.own_process


def kernel_report(*arguments):
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    return subprocess.run(
        [sys.executable, "-m", "minivllm", "kernel-report", *arguments],
        env=environment, capture_output=True, text=True, check=False,
    )  # fmt: skip


@pytest.fixture(scope="module")
def reports(tmp_path_factory):
    path = tmp_path_factory.mktemp("report") / "report.json"
    result = kernel_report("--head-dim", "128", "--json", str(path))
    assert result.returncode == 0, result.stderr
    assert "us by bandwidth" in result.stdout
    return json.loads(path.read_text())


def test_every_kernel_compiles_for_every_target_without_spills(reports):
    found = {(r["kernel"], r["target"]) for r in reports["kernels"]}
    kernels = ("decode", "prefill", "split", "join", "write")
    targets = ("sm_80", "sm_90", "sm_100", "gfx942")
    assert found == {(kernel, target) for kernel in kernels for target in targets}
    assert all(r["spills"] == 0 and r["fits"] for r in reports["kernels"])


def test_k_and_v_are_loaded_128_bits_at_a_time(reports):
    for r in reports["kernels"]:
        assert r["narrow_loads"] == 0, r
        assert r["wide_loads"] > 0, r


def test_tensor_cores_and_asynchronous_copies_are_used(reports):
    for r in reports["kernels"]:
        attends = r["kernel"] in ("decode", "prefill", "split")
        assert (r["tensor_core_instructions"] > 0) == attends, r
        if r["target"].startswith("sm_"):
            assert (r["async_copies"] > 0) == attends, r


def test_a_decode_step_is_bound_by_memory(reports):
    for moved, operations, by_bandwidth, by_arithmetic in reports["roofline"].values():
        assert moved > 2 * 64 * 4096 * 2 * 8 * 128, "K and V of every token"
        assert operations / moved < 5
        assert by_bandwidth > 20 * by_arithmetic


@pytest.mark.full
def test_every_shape():
    result = kernel_report(
        *("--dtype", "bfloat16", "--dtype", "float16"),
        *("--head-dim", "64", "--head-dim", "80", "--head-dim", "128"),
    )
    assert result.returncode == 0, result.stderr


def test_several_targets_after_one_option():
    result = kernel_report("--target", "sm_80", "sm_90", "--head-dim", "64")
    assert result.returncode == 0, result.stderr
    first = [line.split()[0] for line in result.stdout.splitlines() if line.strip()]
    assert {"sm_80", "sm_90"} <= set(first)
    assert not {"sm_100", "gfx942"} & set(first)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--target", "sm_1"), "unknown target 'sm_1': use sm_80"),
        (("--target", "sm_80", "sm_2"), "unknown target 'sm_2': use sm_80"),
        (("--dtype", "int8"), "unknown dtype 'int8': use bfloat16"),
        (("--json", "nowhere/x.json"), "there is no folder nowhere"),
    ],
)
def test_bad_options_are_refused_in_one_line(arguments, words, monkeypatch, capsys):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)  # put back after the test
    assert run_cli(["kernel-report", *arguments]) == 1
    assert words in " ".join(capsys.readouterr().err.split())
