"""SamplingParams: how a request wants its tokens chosen, and when it wants to stop."""

import math
from collections.abc import Iterable
from dataclasses import dataclass

from minivllm.errors import RequestError


def is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def is_number(value: object) -> bool:
    return is_int(value) or isinstance(value, float)


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """Options of one request; checked when made.

    max_tokens: how many tokens to generate at most, 1 or more.
    temperature: 0 takes the most likely token (so does anything under 1e-5).
    top_k: draw from the k most likely tokens; 0 means all.
    top_p: draw from the smallest set of tokens with this much probability, in (0, 1].
    seed: the same seed gives the same tokens, whatever else runs beside the request.
    stop: text at which the output ends; it is not part of the output.
    ignore_eos: go on after an end-of-sequence token (benchmarks need it).

    Raises RequestError, naming the value and the limit.
    """

    max_tokens: int = 64
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int | None = None
    stop: tuple[str, ...] = ()
    ignore_eos: bool = False

    def __post_init__(self) -> None:
        if not is_int(self.max_tokens) or self.max_tokens < 1:
            raise RequestError(
                f"max_tokens is {self.max_tokens!r}: it must be a whole number from 1 up"
            )
        if (
            not is_number(self.temperature)
            or not math.isfinite(self.temperature)
            or self.temperature < 0
        ):
            raise RequestError(
                f"temperature is {self.temperature!r}: it must be a finite number from 0 up"
            )
        if not is_int(self.top_k) or self.top_k < 0:
            raise RequestError(
                f"top_k is {self.top_k!r}: it must be a whole number from 0 up (0 means all)"
            )
        if not is_number(self.top_p) or not 0 < self.top_p <= 1:
            raise RequestError(f"top_p is {self.top_p!r}: it must be above 0 and at most 1")
        if self.seed is not None and not is_int(self.seed):
            raise RequestError(f"seed is {self.seed!r}: it must be a whole number or None")
        object.__setattr__(self, "stop", _stop_strings(self.stop))


def _stop_strings(stop: str | Iterable[str] | None) -> tuple[str, ...]:
    strings = (stop,) if isinstance(stop, str) else tuple(stop or ())
    for string in strings:
        if not isinstance(string, str) or not string:
            raise RequestError(f"stop has {string!r}: each stop string must be text, not empty")
    return strings
