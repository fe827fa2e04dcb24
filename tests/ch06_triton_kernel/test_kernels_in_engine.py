"""The engine with the kernels, interpreted: the tokens of gather and of chapter 1."""

import os
import subprocess
import sys

import pytest
import torch
from support import check_tokens_in_a_small_pool

pytest.importorskip("triton", reason="there is no triton for this system")

from minivllm.attention.gather import GatherAttention
from minivllm.attention.triton_attention import TritonAttention
from minivllm.errors import ModelError
from minivllm.stages import paged_reader


@pytest.mark.parametrize("max_tokens_per_step", [2048, 6])
def test_tokens_are_those_of_chapter_1(tiny, solo_run, max_tokens_per_step):
    """6: the prompts come in pieces."""
    budget = {"max_tokens_per_step": max_tokens_per_step}
    llm = check_tokens_in_a_small_pool(tiny, solo_run, "triton", **budget)
    assert isinstance(llm.engine.runner.attend, TritonAttention)


def test_auto_is_gather_without_cuda():
    assert isinstance(paged_reader("auto", "cpu", torch.float32), GatherAttention)
    assert isinstance(paged_reader("auto", "mps", torch.float32), GatherAttention)


@pytest.mark.own_process
def test_without_interpreter_or_gpu_the_way_out_is_named():
    code = (
        "import torch, triton\nfrom minivllm.stages import paged_reader\n"
        "paged_reader('triton', 'cpu', torch.float32)"
    )
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    result = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False
    )
    if torch.cuda.is_available():
        assert result.returncode == 0
    else:
        assert "set the environment variable TRITON_INTERPRET to 1" in result.stderr
        assert ModelError.__name__ in result.stderr
