"""The command line: one line for every error, numbers that are exact, JSON that is only JSON."""

import json
import sys

import pytest

from minivllm.cli.main import main


@pytest.fixture
def run(monkeypatch, capsys):
    """run(*arguments) -> (exit status, stdout, stderr), in this process."""

    def run(*arguments):
        monkeypatch.setattr(sys, "argv", ["minivllm", *arguments])
        with pytest.raises(SystemExit) as end:
            main()
        captured = capsys.readouterr()
        return end.value.code or 0, captured.out, captured.err

    return run


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["generate", ""], "prompt 1 is empty"),
        (["generate", "fine", ""], "prompt 2 is empty"),
        (["generate", "x", "--max-tokens", "0"], "max_tokens is 0"),
        (["generate", "x", "--max-tokens", "-1"], "max_tokens is -1"),
        (["generate", "x", "--max-tokens", "many"], "--max-tokens"),
        (["generate", "x", "--temperature", "-1"], "temperature is -1.0"),
        (["generate", "x", "--temperature", "nan"], "temperature is nan"),
        (["generate", "x", "--top-p", "0"], "top_p is 0.0"),
        (["generate", "x", "--top-p", "1.5"], "top_p is 1.5"),
        (["generate", "x", "--top-k", "-1"], "top_k is -1"),
        (["generate", "x", "--stop", ""], "stop has ''"),
        (["generate", "x", "--model", "unknown"], "unknown model 'unknown'"),
        (["generate", "x", "--model", "tiny-random", "--max-tokens", "2048"], "handles 2048"),
        (["generate", "x", "--model", "tiny-random", "--max-running", "0"], "max_running is 0"),
        (["generate", "x", "--stream", "--json"], "exclude each other"),
        (["generate"], "Missing argument"),
        (["no-such-command"], "No such command"),
        (["generate", "x", "--no-such-option"], "No such option"),
        (["kv-size", "unknown"], "unknown model 'unknown'"),
        (["kv-size", "./no/folder"], "there is no folder ./no/folder"),
        (["kv-size", "gpt2", "--tokens", "0"], "--tokens is 0"),
        (["kv-size", "gpt2", "--sequences", "-2"], "--sequences is -2"),
        (["kv-size", "gpt2", "--dtype", "float99"], "--dtype is 'float99'"),
        (["kv-size", "gpt2", "--memory", "lots"], "--memory is 'lots'"),
        (["kv-size", "gpt2", "--memory", "3 parsecs"], "--memory is '3 parsecs'"),
    ],
)
def test_bad_input_is_one_line_and_a_status(run, arguments, words):
    status, out, err = run(*arguments)
    assert status != 0
    assert out == ""
    assert words in err
    assert err.startswith("error: ")
    assert err.count("\n") == 1


def test_generate_json(run, tiny):
    arguments = ["generate", "--json", "--model", "tiny-random", "--max-tokens", "6"]
    status, out, _ = run(*arguments, "Hi 🙂", "there")
    answers = json.loads(out)
    assert status == 0
    assert [len(answer["token_ids"]) for answer in answers] == [6, 6]
    for answer in answers:
        assert answer["text"] == tiny[1].decode(answer["token_ids"], skip_special_tokens=True)
        assert answer["stop_reason"] == "max_tokens"
    assert run(*arguments, "Hi 🙂", "there")[1] == out


def test_generate_options_reach_the_sampler(run):
    base = ["generate", "--json", "--model", "tiny-random", "--max-tokens", "8", "--raw", "Hi"]

    def tokens(*options):
        return json.loads(run(*base, *options)[1])[0]["token_ids"]

    greedy = tokens()
    sampled = tokens("--temperature", "2", "--seed", "1")
    assert sampled != greedy
    assert tokens("--temperature", "2", "--seed", "1") == sampled
    assert tokens("--temperature", "2", "--seed", "1", "--top-k", "1") == greedy
    assert tokens("--temperature", "2", "--seed", "1", "--top-p", "0.0001") == greedy
    assert tokens("--max-tokens-per-step", "1") == greedy
    assert tokens("--max-tokens", "3") == greedy[:3]


def test_generate_stop(run):
    base = ["generate", "--json", "--model", "tiny-random", "--max-tokens", "40", "--raw", "Hello"]
    text = json.loads(run(*base)[1])[0]["text"]
    stop = next(text[i : i + 2] for i in range(5, len(text)) if "\ufffd" not in text[i : i + 2])
    answer = json.loads(run(*base, "--stop", "never comes", "--stop", stop)[1])[0]
    assert answer["text"] == text[: text.index(stop)]
    assert answer["stop_reason"] == "stop_string"


@pytest.mark.parametrize("prompts", [["Hi"], ["Hi", "[bold]there[/bold]"]])
def test_stream_prints_the_same_text(run, prompts):
    base = ["generate", "--model", "tiny-random", "--max-tokens", "12", *prompts]
    texts = [answer["text"] for answer in json.loads(run(*base, "--json")[1])]
    out = run(*base, "--stream")[1]
    for text in texts:
        assert "".join(text.split()) in "".join(out.split())


def test_kv_size_json_is_exact(run):
    status, out, _ = run(
        "kv-size", "smollm2-135m", "--tokens", "2560", "--sequences", "3", "--memory", "1GiB",
        "--json",
    )  # fmt: skip
    row = json.loads(out)
    assert status == 0
    assert row["bytes_per_token"] == 46_080
    assert row["bytes_per_request"] == 117_964_800
    assert row["bytes"] == 353_894_400
    assert row["memory_bytes"] == 2**30
    assert row["requests_that_fit"] == 9


def test_kv_size_prints_exact_integers(run):
    out = run("kv-size", "opt-13b", "--tokens", "2048")[1]
    assert "819,200 B" in out
    assert "1,677,721,600 B = 1.562 GiB" in out


def test_kv_size_of_all_known_models_names_each(run):
    from minivllm.memory.known_models import KNOWN_MODELS

    out = run("kv-size", "--memory", "24GiB")[1]
    for known in KNOWN_MODELS:
        (line,) = [line for line in out.splitlines() if line.split()[:1] == [known.name]]
        assert "…" not in line
    rows = json.loads(run("kv-size", "--json")[1])
    assert len(rows) == len(KNOWN_MODELS)


def test_kv_size_of_a_local_config(run, tmp_path):
    config = {
        "model_type": "llama",
        "num_hidden_layers": 5,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "hidden_size": 64,
        "dtype": "bfloat16",
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    row = json.loads(run("kv-size", str(tmp_path), "--json")[1])
    assert row["bytes_per_token"] == 5 * 2 * 16 * 2 * 2
    row = json.loads(run("kv-size", str(tmp_path), "--json", "--dtype", "float32")[1])
    assert row["bytes_per_token"] == 5 * 2 * 16 * 2 * 4


@pytest.mark.parametrize(
    ("memory", "expected"),
    [("24GiB", 24 * 2**30), ("80 GB", 80 * 10**9), ("0.5gib", 2**29), ("1000", 1000),
     ("1.1MB", 1_100_000)],
)  # fmt: skip
def test_memory_is_parsed_exactly(memory, expected):
    from minivllm.cli.kv_size import parse_bytes

    assert parse_bytes(memory) == expected


def test_check_names_everything(run):
    status, out, _ = run("check")
    assert status == 0
    for name in ("python", "torch", "transformers", "triton", "device", "smollm2-135m"):
        assert name in out


def test_check_fails_on_a_damaged_cache(run, tmp_path, monkeypatch):
    from minivllm.packaged_model import SMOLLM2

    monkeypatch.setenv("MINIVLLM_CACHE", str(tmp_path))
    SMOLLM2.folder.mkdir()
    status, out, err = run("check")
    assert status == 1
    assert "damaged" in out
    assert err.count("\n") == 1


def test_help_and_version(run):
    status, out, _ = run("--help")
    assert status == 0
    assert "generate" in out
    assert run("--version")[1].strip() == "0.1.0"


def test_the_demo_with_a_tiny_model(run):
    status, out, _ = run("demo", "--model", "tiny-random", "--max-tokens", "4")
    assert status == 0
    assert "tokens generated" in out
    assert "KV bytes at the peak" in out
