"""What engine.py and peak_memory.py run: six shapes, a trace, and the stages of this engine."""

from minivllm.compare import Job
from minivllm.course.chapters import ROOT
from minivllm.llm import LLM
from minivllm.simulation.workloads import load
from minivllm.stages import KVOptions

BUDGET = 2048  # tokens of a step, where a system has such a limit
MAX_MODEL_LEN = 2304
SHAPES = [(1, 16), (16, 16), (32, 16), (1, 512), (16, 512), (4, 2048)]
OUTPUT = 33
TRACE = "trace"
KV_SLOTS = 32_768
OURS = "paged-numba-onednn"
STAGES = {
    "past_key_values": KVOptions("past_key_values"),
    "reserve-max": KVOptions("reserved", 32 * MAX_MODEL_LEN, MAX_MODEL_LEN),
    "paged-gather": KVOptions("paged", KV_SLOTS, MAX_MODEL_LEN, attention="gather"),
    "paged-numba": KVOptions("paged", KV_SLOTS, MAX_MODEL_LEN, attention="numba"),
    OURS: KVOptions("paged", KV_SLOTS, MAX_MODEL_LEN, attention="numba"),
}
LAYERS = {OURS: "onednn"}  # of the others: torch


def make_llm(model, tokenizer, name: str) -> LLM:
    kv, layers = STAGES[name], LAYERS.get(name, "torch")
    return LLM(model, tokenizer, kv=kv, layers=layers, max_tokens_per_step=BUDGET)


def make_cases(text_ids: list[int]) -> dict[str, list[Job]]:
    """The jobs by case; each prompt is a piece of the text, at another place."""

    def piece(number: int, length: int) -> list[int]:
        start = 997 * number % (len(text_ids) - length)
        return text_ids[start : start + length]

    cases = {
        f"{count} x {length}": [Job(piece(i, length), OUTPUT) for i in range(count)]
        for count, length in SHAPES
    }
    longest = 14_336  # about what the trace's longest requests have; scaled to 2,048
    cases[TRACE] = [
        Job(piece(i, max(1, r.prompt_len // 7)), max(2, r.output_len // 7))
        for i, r in enumerate(load("azure-conv", 48, max_model_len=longest, seed=0))
    ]
    return cases


def text_ids(tokenizer) -> list[int]:
    texts = [path.read_text() for path in sorted(ROOT.glob("chapters/ch0[0-3]*/README.md"))]
    return tokenizer("\n".join(texts), verbose=False).input_ids
