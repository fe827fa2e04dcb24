"""vLLM in a process of its own: jobs come as JSON lines on stdin, results go out on stdout.

Started by benchmarks/systems.py with a Python that has vLLM; needs nothing of minivllm.
"""

import json
import os
import sys
import time

os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")  # GiB
os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # step() runs here, and nothing idles beside it
os.environ["VLLM_LOGGING_LEVEL"] = "ERROR"

results, sys.stdout = sys.stdout, sys.stderr  # whatever is printed must not mix with the results


def main() -> None:
    from vllm import LLM, SamplingParams
    from vllm import __version__ as version

    folder, mode, budget, max_model_len = sys.argv[1:]
    engine = LLM(
        folder, dtype="float32", enforce_eager=mode == "eager", enable_prefix_caching=False,
        max_model_len=int(max_model_len), max_num_batched_tokens=int(budget),
    ).llm_engine  # fmt: skip
    print(json.dumps({"ready": True, "version": version}), file=results, flush=True)
    for number, line in enumerate(sys.stdin):
        jobs = json.loads(line)
        for i, job in enumerate(jobs):
            params = SamplingParams(temperature=0, max_tokens=job["max_tokens"], ignore_eos=True)
            prompt = {"prompt_token_ids": job["prompt_token_ids"]}
            engine.add_request(f"{number}-{i}", prompt, params)
        tokens: dict[str, list[int]] = {f"{number}-{i}": [] for i in range(len(jobs))}
        counts = []  # (seconds, tokens so far, requests that have any) after each step
        start = time.perf_counter()
        while engine.has_unfinished_requests():
            for output in engine.step():
                tokens[output.request_id] = list(output.outputs[0].token_ids)
            known = [len(t) for t in tokens.values()]
            counts.append((time.perf_counter() - start, sum(known), sum(map(bool, known))))
        payload = {"counts": counts, "tokens": list(tokens.values())}
        print(json.dumps(payload), file=results, flush=True)


if __name__ == "__main__":
    main()
