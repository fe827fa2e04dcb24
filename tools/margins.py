"""Print how clear the model's choices are: the smallest top-two margin along a greedy answer.

A committed prompt should have a margin above 1e-2: then no change in the order of floating-point
sums (about 1e-4 here) can change its tokens, and a test that compares tokens means something.

    python tools/margins.py --max-tokens 24 "What is the capital of France?" ...
"""

import argparse

import torch

from minivllm.models import load_model


def smallest_margin(model, prompt_token_ids: list[int], max_tokens: int) -> float:
    """Smallest difference between the two largest logits over the generated tokens."""
    output = model.generate(
        torch.tensor([prompt_token_ids]),
        max_new_tokens=max_tokens,
        do_sample=False,
        output_logits=True,
        return_dict_in_generate=True,
    )
    logits = torch.cat(output.logits)  # [generated, vocab_size]
    first, second = logits.topk(2).values.unbind(dim=-1)
    return float((first - second).min())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("prompts", nargs="+")
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--max-tokens", type=int, default=24)
    parser.add_argument("--raw", action="store_true", help="do not apply the chat template")
    arguments = parser.parse_args()
    model, tokenizer = load_model(arguments.model)
    for prompt in arguments.prompts:
        if arguments.raw:
            token_ids = tokenizer(prompt).input_ids
        else:
            chat = [{"role": "user", "content": prompt}]
            token_ids = tokenizer.apply_chat_template(
                chat, add_generation_prompt=True, return_dict=True
            )["input_ids"]
        margin = smallest_margin(model, token_ids, arguments.max_tokens)
        print(f"{margin:9.4f}  {len(token_ids):5d} tokens  {prompt[:70]!r}")


if __name__ == "__main__":
    main()
