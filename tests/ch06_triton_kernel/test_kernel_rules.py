"""What an interpreter does not notice, and a GPU does: read from the kernels' own text."""

import ast
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="there is no triton for this system")

import minivllm.attention.triton_attention as triton_attention
from minivllm.attention.batch import slots_of
from minivllm.course.chapters import ROOT

FILES = sorted(Path(triton_attention.__file__).parent.glob("triton_*.py"))
KERNELS = [path for path in FILES if "@triton.jit" in path.read_text()]


def calls(path, name):
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Call) and ast.unparse(node.func) == name:
            yield node, {keyword.arg for keyword in node.keywords}


def test_the_kernels_are_found():
    assert {path.stem for path in KERNELS} == {
        "triton_decode", "triton_join", "triton_prefill", "triton_split", "triton_write",
    }  # fmt: skip


@pytest.mark.parametrize("path", KERNELS, ids=lambda path: path.stem)
def test_every_masked_load_says_what_stands_for_the_rest(path):
    """Without `other` it is undefined; an interpreter gives zeros."""
    for call, names in calls(path, "tl.load"):
        assert ("mask" in names) == ("other" in names), ast.unparse(call)


@pytest.mark.parametrize("path", KERNELS, ids=lambda path: path.stem)
def test_every_product_states_its_precision(path):
    """float32 would run in TF32."""
    for call, names in calls(path, "tl.dot"):
        assert "input_precision" in names, ast.unparse(call)


@pytest.mark.parametrize("head_dim", [1, 8, 64, 80, 96, 128, 256])
@pytest.mark.parametrize("group_size", [1, 3, 16, 20])
def test_no_product_is_smaller_than_16(head_dim, group_size, monkeypatch):
    """tl.dot of fewer rows, columns or terms fails to compile; an interpreter multiplies them."""
    import torch
    from support import scene

    launched = []

    class Recorded:
        def __init__(self, kernel):
            self.kernel = kernel

        def __getitem__(self, grid):
            return lambda *args, **options: launched.append(options)

    for name in ("decode_kernel", "prefill_kernel", "split_kernel", "join_kernel"):
        monkeypatch.setattr(triton_attention, name, Recorded(name))
    for num_splits in (1, 2):
        for new in ([1, 1], [1, 3]):
            query, pool, batch = scene(
                [5, 9], new, 4, group_size=group_size, head_dim=head_dim, num_kv_heads=1
            )
            for dtype in (torch.float32, torch.bfloat16):
                keys, values = (tensor.to(dtype) for tensor in pool.layer(0))
                triton_attention.TritonAttention(num_splits)(
                    query.to(dtype), keys, values, batch, scaling=1.0
                )
    sizes = [options[name] for options in launched for name in ("ROWS", "DIMS", "TILE")
             if name in options]  # fmt: skip
    assert len(sizes) > 12
    assert min(sizes) >= 16
    assert max(o["ROWS"] for o in launched if "ROWS" in o) >= group_size
    assert all(o["DIMS"] >= head_dim for o in launched if "DIMS" in o)


BEYOND_INT32 = """
import torch
from minivllm.attention.batch import Batch
from minivllm.attention.gather import GatherAttention
from minivllm.attention.triton_attention import TritonAttention
from minivllm.attention.triton_write import write_kernel

slots = 2**31 // 256 + 64  # of 2 KV heads and 128 dimensions: beyond 2^31 elements
keys, values = (torch.empty(slots, 2, 128, dtype=torch.float16) for _ in "kv")
assert keys.numel() > 2**31
last = slots // 16 - 1
tables, none = [[last, last - 2], [last - 1]], torch.empty(0)
for table in tables:
    for block in table:
        for tensor in (keys, values):
            tensor[16 * block : 16 * block + 16] = torch.randn(16, 2, 128)
for new in ([1, 1], [3, 1]):
    loc = [0, new[0], sum(new)]
    batch = Batch(none, none, none, loc, [29, 11], tables, 16, none)
    query = torch.randn(sum(new), 6, 128, dtype=torch.float16)
    expected = GatherAttention()(query, keys, values, batch, scaling=0.1)
    for num_splits in (1, 2):
        found = TritonAttention(num_splits)(query, keys, values, batch, scaling=0.1)
        torch.testing.assert_close(found, expected, atol=2e-3, rtol=2e-3)
key, slot = torch.randn(1, 2, 128, dtype=torch.float16), torch.tensor([16 * last + 15])
write_kernel[(1,)](keys, values, key, -key, slot, 256, 256, 256, width=256, WIDTH=256)
assert torch.equal(keys[slot], key) and torch.equal(values[slot], -key)
print("equal")
"""


@pytest.mark.own_process
@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere empty memory is not free of charge")
def test_a_pool_of_more_elements_than_int32_can_count():
    """In a process of its own: a wrong address ends it. The pool is never touched but at its end,
    so its 8 GiB are a promise of the system and hardly a megabyte of memory."""
    environment = os.environ | {"TRITON_INTERPRET": "1"}
    result = subprocess.run(
        [sys.executable, "-c", BEYOND_INT32],
        env=environment, cwd=ROOT, capture_output=True, text=True, check=False,
    )  # fmt: skip
    if "not enough memory" in result.stderr:
        pytest.skip("the system does not promise 8 GiB")
    assert result.stdout == "equal\n", result.stderr


def test_a_slot_beyond_int32():
    """Block 40,000 of 65,536 slots begins at slot 2,621,440,000."""
    assert slots_of([40_000], 65_536, 0, 2).tolist() == [2_621_440_000, 2_621_440_001]


@pytest.mark.own_process
def test_the_gpu_benchmark_can_be_rehearsed():
    """Every path of it that needs no GPU: equal to the gather, and each peer gives a time."""
    result = subprocess.run(
        [sys.executable, "benchmarks/gpu_attention.py", "--rehearse"],
        cwd=ROOT, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert result.returncode == 0, result.stderr
    assert "9 of 9 within tolerance" in result.stdout
    assert result.stdout.count("flex") == 2
