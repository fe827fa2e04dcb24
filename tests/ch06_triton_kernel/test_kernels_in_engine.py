"""The engine with the kernels, interpreted: the tokens of gather and of chapter 1."""

import os
import subprocess
import sys

import pytest
import torch

pytest.importorskip("triton", reason="there is no triton for this system")

from minivllm.attention.gather import GatherAttention
from minivllm.attention.triton_attention import TritonAttention
from minivllm.errors import ModelError
from minivllm.llm import LLM
from minivllm.sampling_params import SamplingParams
from minivllm.stages import KVOptions, paged_reader


@pytest.mark.parametrize("max_tokens_per_step", [2048, 6])
def test_tokens_are_those_of_chapter_1(tiny, solo_run, max_tokens_per_step):
    """With preemptions, prompts in pieces, and a pool full of NaN."""
    kv = KVOptions("paged", 40, 30, block_size=4, attention="triton")
    llm = LLM(*tiny, kv=kv, max_tokens_per_step=max_tokens_per_step)
    assert isinstance(llm.engine.runner.attend, TritonAttention)
    llm.engine.runner.pool.keys.fill_(float("nan"))
    llm.engine.runner.pool.values.fill_(float("nan"))
    preempted = []
    llm.engine.on_step = lambda step: preempted.extend(step.preempted)
    prompts = [[7], list(range(9)), [3, 1, 4, 1, 5]]
    params = SamplingParams(max_tokens=9)
    answers = llm.generate(prompts * 2, params, progress=False)
    assert [a.token_ids for a in answers] == [solo_run(p, params)[0] for p in prompts] * 2
    assert preempted


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
