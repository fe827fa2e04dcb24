"""The house: small files, imports that run one way, a memory/ without torch, no triton needed."""

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

import minivllm
from minivllm.course.chapters import ROOT
from minivllm.threads import OPENMP

PACKAGE = Path(minivllm.__file__).parent
FILES = sorted(PACKAGE.rglob("*.py"))

# Who may import whom: each name only those that stand before it.
LAYERS = [
    {"errors", "heap", "threads"},
    {"sampling_params", "sequence"},
    {"memory"},
    {"sampler", "detokenizer", "packaged_model", "models", "scheduler"},
    {"attention", "fast_math"},
    {"fast_layers"},
    {"onednn_layers"},
    {"runners"},
    {"engine"},
    {"stages", "simulation", "charts", "course"},
    {"llm"},
    {"compare", "kernel_report"},
    {"cli"},
]
RANK = {name: rank for rank, names in enumerate(LAYERS) for name in names}


def imports_of(path, *, for_types=True):
    """Modules that a file imports; for_types=False leaves out what only a type checker reads."""
    nodes = [ast.parse(path.read_text())]
    while nodes:
        node = nodes.pop()
        if not for_types and isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test):
            continue
        nodes += ast.iter_child_nodes(node)
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            if node.module == "minivllm":
                yield from (f"minivllm.{alias.name}" for alias in node.names)
            else:
                yield node.module


def part_of(module):
    """`engine` for minivllm.engine, `memory` for minivllm.memory.usage."""
    names = module.split(".")
    return names[1] if len(names) > 1 and names[0] == "minivllm" else None


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_no_file_over_300_lines(path):
    assert len(path.read_text().splitlines()) <= 300


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_imports_run_one_way(path):
    own = path.relative_to(PACKAGE).with_suffix("").parts[0]
    if own in ("__init__", "__main__"):
        return
    for module in imports_of(path, for_types=False):
        part = part_of(module)
        if part is not None and part != own and part != "__version__":
            assert RANK[part] <= RANK[own], f"{own} imports {part}"


# Parts that the map of the code shows as one.
GROUPS = {
    "runners": {"runners", "fast_layers", "fast_math", "onednn_layers"},
    "models": {"models", "packaged_model"},
    "text": {"sampler", "detokenizer"},
    "assembly": {"stages", "llm"},
    "ground": {"sequence", "sampling_params", "errors", "heap", "threads"},
}
GROUP = {part: group for group, parts in GROUPS.items() for part in parts}


def test_the_picture_shows_the_imports():
    found = set()
    for path in FILES:
        own = path.relative_to(PACKAGE).with_suffix("").parts[0]
        if own.startswith("__"):
            continue
        for module in imports_of(path, for_types=False):
            part = part_of(module)
            if part and not part.startswith("__"):
                found.add((GROUP.get(own, own), GROUP.get(part, part)))
    found = {(a, b) for a, b in found if a != b and b != "ground"}
    picture = (ROOT / "docs" / "architecture.md").read_text().split("```mermaid")[1].split("```")[0]
    assert set(re.findall(r"(\w+) --> (\w+)", picture)) == found


def test_the_core_stays_small():
    """What a reader reads, from sequence to attention: at most 1,800 lines that are not blank.

    Not counted: what the engine does not run (the calculator of chapter 0, the NumPy version of
    chapter 6), and the kernels beside the one that is taught.
    """
    others = ["kv_size", "known_models", "online_softmax"]
    others += ["triton_prefill", "triton_split", "triton_join", "triton_write"]
    others += ["numba_attention", "numba_decode", "numba_prefill"]
    others += ["numba_products", "numba_tiles"]
    core = ["sequence", "sampling_params", "sampler", "detokenizer", "scheduler", "engine"]
    paths = [PACKAGE / f"{name}.py" for name in core]
    for folder in ("memory", "runners", "attention"):
        paths += (PACKAGE / folder).glob("*.py")
    paths = [path for path in paths if path.stem not in others]
    assert sum(bool(line.strip()) for path in paths for line in path.open()) <= 1800


def run_python(code):
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)


def test_memory_scheduler_and_sequence_import_no_torch():
    code = (
        "import sys, pkgutil, importlib, minivllm.memory as memory\n"
        "for module in pkgutil.iter_modules(memory.__path__, 'minivllm.memory.'):\n"
        "    importlib.import_module(module.name)\n"
        "import minivllm.scheduler, minivllm.engine, minivllm.cli.app\n"
        "assert 'torch' not in sys.modules, 'torch was imported'\n"
        "assert 'transformers' not in sys.modules, 'transformers was imported'\n"
    )
    result = run_python(code)
    assert result.returncode == 0, result.stderr


def test_everything_but_the_kernel_works_without_triton():
    code = (
        "import sys\n"
        "class NoTriton:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        "        if name.split('.')[0] == 'triton':\n"
        "            raise ModuleNotFoundError('no triton here', name=name)\n"
        "sys.meta_path.insert(0, NoTriton())\n"
        "from minivllm import LLM, SamplingParams\n"
        "answer = LLM('tiny-random').generate('Hi', SamplingParams(max_tokens=3), progress=False)\n"
        "assert len(answer[0].token_ids) == 3\n"
    )
    result = run_python(code)
    assert result.returncode == 0, result.stderr


def test_without_numba_the_gather_reads_and_numba_is_refused():
    code = (
        "import importlib.util, sys\n"
        "find = importlib.util.find_spec\n"
        "importlib.util.find_spec = lambda name, *a: None if name == 'numba' else find(name, *a)\n"
        "sys.modules['numba'] = None\n"
        "from minivllm import LLM, SamplingParams\n"
        "from minivllm.errors import ModelError\n"
        "from minivllm.stages import KVOptions\n"
        "llm = LLM('tiny-random', kv=KVOptions('paged', 64))\n"
        "answer = llm.generate('Hi', SamplingParams(max_tokens=3), progress=False)\n"
        "assert len(answer[0].token_ids) == 3\n"
        "try:\n"
        "    LLM('tiny-random', kv=KVOptions('paged', 64, attention='numba'))\n"
        "except ModelError as error:\n"
        "    assert 'pip install numba, or use --attention gather' in str(error)\n"
        "else:\n"
        "    raise SystemExit('numba was not missed')\n"
    )
    result = run_python(code)
    assert result.returncode == 0, result.stderr


def test_torch_and_numba_have_one_team_of_threads():
    """With two, threads of one that wait for work would keep the cores from the other's."""
    import torch

    pytest.importorskip("numba.np.ufunc.omppool", reason="numba has no OpenMP here")
    if not (Path(torch.__file__).parent / "lib" / OPENMP).exists():
        pytest.skip("this torch asks for its OpenMP library by another name")
    code = (
        "import minivllm.llm\n"
        "import torch\n"
        "import numba.np.ufunc.omppool\n"
        "torch.ones(1000, 1000) @ torch.ones(1000, 1000)\n"
        "print(len({line.split()[-1] for line in open('/proc/self/maps') if 'libgomp' in line}))\n"
    )
    assert run_python(code).stdout.splitlines()[-1] == "1"


def test_no_bare_assert_for_user_input():
    """Asserts vanish under python -O; only check_invariants, which is a test's helper, has them."""
    for path in FILES:
        for function in ast.walk(ast.parse(path.read_text())):
            if isinstance(function, ast.FunctionDef) and function.name != "check_invariants":
                asserts = [n for n in ast.walk(function) if isinstance(n, ast.Assert)]
                assert not asserts, f"{path.name}: {function.name}"
