"""The trace of engine.py, which starts this: the process's peak beside what it holds, as JSON."""

import json
import resource
import sys

from cases import OURS, TRACE, make_cases, make_llm, text_ids

from minivllm.models import load_model
from minivllm.sampling_params import SamplingParams


def main() -> None:
    model, tokenizer = load_model()
    jobs = make_cases(text_ids(tokenizer))[TRACE]
    llm = make_llm(model, tokenizer, OURS)
    largest = [0]
    sample = llm.engine.sampler.sample

    def noted(logits, sequences):
        largest[0] = max(largest[0], logits.shape[0] / len(sequences))
        return sample(logits, sequences)

    llm.engine.sampler.sample = noted  # type: ignore[method-assign]
    for job in jobs:
        llm.engine.add_request(
            job.prompt_token_ids, SamplingParams(max_tokens=job.max_tokens, ignore_eos=True)
        )
    manager, most_slots = llm.engine.scheduler.kv_cache, 0
    while llm.engine.has_unfinished:
        llm.engine.step()
        most_slots = max(most_slots, manager.usage().allocated)
    unit = 1 if sys.platform == "darwin" else 1024
    weights = sum({p.data_ptr(): p.nbytes for p in model.parameters()}.values())
    payload = {
        "peak_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit,
        "weight_bytes": weights,
        "pool_bytes": llm.engine.runner.kv_bytes(),
        "used_pool_bytes": llm.engine.runner.kv_bytes() * most_slots // manager.usage().total,
        "logit_rows_per_sequence": largest[0],
    }
    print(json.dumps(payload))


if __name__ == "__main__":
    main()
