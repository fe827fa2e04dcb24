"""LLM: prompts in, answers out, on top of the engine."""

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import jinja2
from tqdm import tqdm
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from minivllm import models
from minivllm.detokenizer import Detokenizer
from minivllm.engine import Engine, Increment
from minivllm.errors import RequestError
from minivllm.sampler import Sampler
from minivllm.sampling_params import SamplingParams
from minivllm.scheduler import Scheduler
from minivllm.sequence import StopReason
from minivllm.stages import KVOptions, build_stage, longest_request

Chat = list[dict[str, str]]
Prompt = str | Chat | list[int]
Prompts = Prompt | Sequence[Prompt]
Params = SamplingParams | list[SamplingParams] | None


@dataclass(frozen=True, slots=True)
class Completion:
    """The answer to one prompt. text leaves out special tokens and the stop string."""

    prompt_token_ids: list[int]
    token_ids: list[int]
    text: str
    stop_reason: StopReason


class LLM:
    """A model, its tokenizer and an engine.

    model: a name as in models.load_model, or a loaded model together with its tokenizer.
    max_tokens_per_step, max_running: the scheduler's budgets.
    kv: how K and V are kept; default: in a cache object of the model's own per request.
    layers: by what all but attention is computed: torch, or onednn (see stages.build_stage).
    """

    def __init__(
        self,
        model: str | PreTrainedModel = models.DEFAULT_MODEL,
        tokenizer: PreTrainedTokenizerBase | None = None,
        *,
        max_tokens_per_step: int = 2048,
        max_running: int = 256,
        kv: KVOptions | None = None,
        layers: str = "torch",
    ) -> None:
        if isinstance(model, str):
            model, tokenizer = models.load_model(model)
        elif tokenizer is None:
            raise RequestError("a loaded model needs its tokenizer: pass LLM(model, tokenizer)")
        self.model = model.eval()  # with dropout no answer would be the same twice
        self.tokenizer: PreTrainedTokenizerBase = tokenizer
        kv = kv or KVOptions()
        runner, kv_cache = build_stage(model, kv, layers)
        self.engine = Engine(
            runner,
            Scheduler(kv_cache, max_tokens_per_step, max_running),
            Sampler(),
            make_detokenizer=lambda stop: Detokenizer(self.tokenizer, stop),
            eos_token_ids=models.eos_token_ids(model, self.tokenizer),
            max_model_len=longest_request(model, kv),
            vocab_size=models.vocab_size(model),
        )
        # A step serves every live request, also those of a stream that is being read elsewhere.
        self._inboxes: dict[str, deque[Increment]] = {}

    def generate(
        self,
        prompts: Prompts,
        params: Params = None,
        *,
        progress: bool = True,
    ) -> list[Completion]:
        """Answers all prompts together; results in the order of the prompts.

        prompts: one or a list of: text (taken as it is), a chat (a list of messages with role
            and content, put through the chat template), or token ids.
        params: one for all, or one per prompt.
        """
        prompt_token_ids = self._encode_all(prompts)
        outputs: list[list[Increment]] = [[] for _ in prompt_token_ids]
        with tqdm(total=len(outputs), desc="requests", disable=not progress) as bar:
            for position, increment in self._stream(prompt_token_ids, params):
                outputs[position].append(increment)
                if increment.stop_reason is not None:
                    bar.update()
        return [
            Completion(
                prompt_token_ids=prompt,
                token_ids=[increment.token_id for increment in output],
                text="".join(increment.text for increment in output),
                stop_reason=(output[-1].stop_reason if output else None) or StopReason.ABORTED,
            )
            for prompt, output in zip(prompt_token_ids, outputs, strict=True)
        ]

    def stream(self, prompts: Prompts, params: Params = None) -> Iterator[tuple[int, Increment]]:
        """Yields (position of the prompt, increment) as soon as each increment exists.

        Takes what generate takes; the requests are queued when the first item is asked for.
        Closing the iterator, or an exception in its loop, aborts what is unfinished.
        """
        yield from self._stream(self._encode_all(prompts), params)

    def _stream(
        self, prompt_token_ids: list[list[int]], params: Params
    ) -> Iterator[tuple[int, Increment]]:
        all_params = params if isinstance(params, list) else [params] * len(prompt_token_ids)
        if len(all_params) != len(prompt_token_ids):
            raise RequestError(
                f"{len(all_params)} params for {len(prompt_token_ids)} prompts: "
                f"give one for all, or one for each"
            )
        inbox: deque[Increment] = deque()
        positions: dict[str, int] = {}
        try:
            for prompt, prompt_params in zip(prompt_token_ids, all_params, strict=True):
                request_id = self.engine.add_request(prompt, prompt_params or SamplingParams())
                positions[request_id] = len(positions)
                self._inboxes[request_id] = inbox
            while True:
                while inbox:
                    increment = inbox.popleft()
                    yield positions[increment.request_id], increment
                if not any(map(self.engine.is_live, positions)):
                    break
                for increment in self.engine.step():
                    if increment.request_id in self._inboxes:
                        self._inboxes[increment.request_id].append(increment)
        finally:
            for request_id in positions:
                del self._inboxes[request_id]
                if self.engine.is_live(request_id):
                    self.engine.abort(request_id)

    def _encode_all(self, prompts: Prompts) -> list[list[int]]:
        is_one = isinstance(prompts, str) or (prompts and isinstance(prompts[0], int | dict))
        return [self._encode(prompt) for prompt in ([prompts] if is_one else prompts)]

    def _encode(self, prompt: Any) -> list[int]:
        if isinstance(prompt, str):
            return self.tokenizer(prompt).input_ids
        if not prompt or not isinstance(prompt[0], dict):
            return prompt  # token ids; the engine checks them
        if self.tokenizer.chat_template is None:
            raise RequestError("this model has no chat template: give the prompt as text")
        try:
            encoded: Any = self.tokenizer.apply_chat_template(
                prompt, add_generation_prompt=True, tokenize=True, return_dict=True
            )
        except (jinja2.TemplateError, KeyError, TypeError) as error:
            raise RequestError(f"the chat template refuses this chat: {error}") from error
        return list(encoded["input_ids"])
