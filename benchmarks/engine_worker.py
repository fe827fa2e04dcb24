"""This engine in a process of its own: jobs come as JSON lines on stdin, results go out on stdout.

Started by benchmarks/systems.py with `engine`, `bare` or `own_share`. minivllm is imported before
torch here, as on the command line: see minivllm/threads.py.
"""

import json
import sys

results, sys.stdout = sys.stdout, sys.stderr  # whatever is printed must not mix with the results


def main() -> None:
    from bare import bare_model
    from cases import OURS
    from systems import own_share, stage

    from minivllm.compare import Job
    from minivllm.models import load_model
    from minivllm.onednn_layers import OneDnnLayers

    model, tokenizer = load_model()
    what = sys.argv[1]
    if what == "bare":
        run = bare_model(model, OneDnnLayers(model))
    elif what == "engine":
        run = stage(model, tokenizer, OURS)
    print(json.dumps({"ready": True}), file=results, flush=True)
    for line in sys.stdin:
        jobs = [Job(**job) for job in json.loads(line)]
        if what == "own_share":
            answer = {"own_share": own_share(model, tokenizer, jobs)}
        else:
            found = run(jobs)
            answer = {"counts": found.counts, "tokens": found.tokens}
        print(json.dumps(answer), file=results, flush=True)


if __name__ == "__main__":
    main()
