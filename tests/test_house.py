"""What holds for the package as a whole: the torch line, one direction of dependencies, and contracts C2 and C10."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import dtensor_5d

ROOT = Path(dtensor_5d.__file__).parent
FILES = sorted(ROOT.rglob("*.py"))

WITHOUT_TORCH = (
    "errors", "options", "degrees", "layout", "order", "plan", "schedule", "families", "planner", "report", "cli",
)  # fmt: skip
AXES = ("tensor", "context", "expert", "pipeline", "dp")
ONLY_ASSEMBLY = ("assemble", "run")


def _imports(path: Path) -> set[str]:
    """Modules that a file imports, also inside functions, but not only for type checkers."""
    found = set()
    tree = ast.parse(path.read_text())
    typing_only = {
        id(inner)
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)
        for inner in ast.walk(node)
    }
    for node in ast.walk(tree):
        if id(node) in typing_only:
            continue
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found |= {node.module} | {f"{node.module}.{alias.name}" for alias in node.names}
    return found


def _part(path: Path) -> str:
    return path.relative_to(ROOT).parts[0].removesuffix(".py")


def test_no_file_is_longer_than_400_lines():
    assert {str(f): n for f in FILES if (n := len(f.read_text().splitlines())) > 400} == {}


def test_nothing_above_the_torch_line_imports_torch_or_what_needs_it():
    wrong = []
    for path in FILES:
        if _part(path) not in WITHOUT_TORCH:
            continue
        for name in _imports(path):
            top, *rest = name.split(".")
            if top in ("torch", "torchao", "transformers", "numpy", "safetensors"):
                wrong.append((str(path), name))
            if top == "dtensor_5d" and rest and rest[0] not in WITHOUT_TORCH:
                wrong.append((str(path), name))
    assert wrong == []


def test_the_part_without_torch_works_where_there_is_no_torch():
    code = """
import sys
sys.modules.update({name: None for name in ("torch", "transformers", "numpy", "safetensors", "torchao")})
from dtensor_5d import Degrees, Plan
from dtensor_5d.planner import ModelShape, memory
from dtensor_5d.schedule import Costs, build, simulate
import dtensor_5d.order, dtensor_5d.cli, dtensor_5d.report
assert simulate(build("1f1b", ranks=4, microbatches=8), Costs(1, 1, 1)).makespan == 33
report = memory(ModelShape.preset("llama-3.1-8b"), Plan(Degrees(dp_shard=8)), micro_batch=1, seq_len=4096)
assert report.fullest.peak(2) > 0
assert dtensor_5d.cli.main(["memory", "llama-3.1-8b", "--dp-shard", "8", "--json"]) in (0, 1)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_no_axis_imports_another_and_nothing_below_imports_the_assembly():
    wrong = []
    for path in FILES:
        part = _part(path)
        for name in _imports(path):
            top, *rest = name.split(".")
            if top != "dtensor_5d" or not rest or rest[0] == part:
                continue
            if part in AXES and rest[0] in (*AXES, *ONLY_ASSEMBLY):
                wrong.append((str(path), name))
            if rest[0] == "assemble" or (rest[0] == "run" and part != "assemble"):
                wrong.append((str(path), name))
    allowed = {str(ROOT / "__init__.py")}  # the public names, for type checkers
    assert [w for w in wrong if w[0] not in allowed] == []


def test_no_module_keeps_state_or_reads_the_environment():
    """Contract C10. Only recipes and the command line read the environment."""
    wrong = []
    for path in FILES:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Global):
                wrong.append((str(path), node.lineno, "global"))
            if isinstance(node, ast.Attribute) and node.attr in ("environ", "getenv") and _part(path) != "cli":
                wrong.append((str(path), node.lineno, node.attr))
    assert wrong == []


def test_no_bare_to_local_in_a_forward():
    """Contract C2, field fault T8: without placements for the gradient a reduction is lost in backward.

    Only a tensor that was detached, or one in a function without gradients, may be read bare.
    """
    wrong = []
    for path in FILES:
        source = path.read_text()
        for node in ast.walk(ast.parse(source)):
            if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)):
                continue
            if node.func.attr == "to_local" and not node.keywords and not node.args:
                receiver = ast.unparse(node.func.value)
                if "detach" not in receiver:
                    wrong.append((str(path), node.lineno, receiver))
            if node.func.attr == "from_local" and not any(k.arg == "run_check" for k in node.keywords):
                wrong.append((str(path), node.lineno, "from_local without run_check and explicit placements"))
    assert wrong == []
