"""Bad options are refused at once, with the value and the limit in the message."""

import math

import pytest

from minivllm.sampling_params import SamplingParams


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"max_tokens": 0}, "max_tokens is 0"),
        ({"max_tokens": -3}, "max_tokens is -3"),
        ({"max_tokens": 1.5}, "max_tokens is 1.5"),
        ({"max_tokens": True}, "max_tokens is True"),
        ({"temperature": -0.1}, "temperature is -0.1"),
        ({"temperature": math.nan}, "temperature is nan"),
        ({"temperature": math.inf}, "temperature is inf"),
        ({"temperature": "hot"}, "temperature is 'hot'"),
        ({"top_p": 0}, "top_p is 0"),
        ({"top_p": -1.0}, "top_p is -1.0"),
        ({"top_p": 1.0001}, "top_p is 1.0001"),
        ({"top_p": math.nan}, "top_p is nan"),
        ({"top_k": -1}, "top_k is -1"),
        ({"top_k": 2.0}, "top_k is 2.0"),
        ({"seed": "abc"}, "seed is 'abc'"),
        ({"stop": ""}, "stop has ''"),
        ({"stop": ["end", ""]}, "stop has ''"),
        ({"stop": [3]}, "stop has 3"),
    ],
)
def test_refused(options, words):
    with pytest.raises(ValueError, match="must be") as error:
        SamplingParams(**options)
    assert words in str(error.value)


def test_one_stop_string_or_several():
    assert SamplingParams(stop="end").stop == ("end",)
    assert SamplingParams(stop=["a", "b"]).stop == ("a", "b")
    assert SamplingParams(stop=None).stop == ()
