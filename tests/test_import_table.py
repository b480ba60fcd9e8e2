"""Which package may import what, read from the source: the table of docs/architecture.md, enforced."""

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
TABLE: dict[str, set[str]] = {
    "core": set(),
    "kernels": set(),
    "loadtest": set(),
    "cluster": {"core"},
    "engine": {"core", "kernels"},
    "kvtransfer": {"core", "cluster", "engine"},
    "prefill_node": {"core", "cluster", "engine", "kvtransfer"},
    "decode_node": {"core", "cluster", "engine", "kvtransfer"},
    "router": {"core", "cluster"},
    "launch": {"core", "cluster", "router", "prefill_node", "decode_node", "loadtest"},
}
# These start quickly and run where no model does; launch may convert the demo model inside a function.
WITHOUT_TORCH = {"core", "cluster", "router", "loadtest"}
TORCH = {"torch", "transformers", "triton", "accelerate"}
# The model's side of a node: the event loop owns the sockets.
WITHOUT_SOCKETS = {"core", "engine", "kernels"}
SOCKETS = {"zmq", "aiohttp", "socket", "asyncio"}
# Bytes from a peer or a file must never become code.
UNSAFE_MODULES = {"pickle", "cPickle", "dill", "cloudpickle", "marshal", "shelve"}
UNSAFE_CALLS = {"eval", "exec", "compile", "__import__", "torch.load", "np.load", "numpy.load"}
# Under whatever name the socket, the module or the array goes.
UNSAFE_METHODS = {"recv_pyobj", "send_pyobj", "recv_serialized", "send_serialized", "runcode", "runpy"}
UNSAFE_KEYWORDS = {"allow_pickle", "weights_only", "trust_remote_code"}


@dataclass(frozen=True)
class Import:
    """One imported module, where it stands, and whether a function must run before it happens."""

    module: str
    where: str
    is_lazy: bool


def sources(package: str) -> list[Path]:
    return sorted((ROOT / package).rglob("*.py"))


def imports_of(path: Path) -> Iterator[Import]:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    functions = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
    lazy = {id(inner) for function in functions for inner in ast.walk(function)}
    for node in ast.walk(tree):
        where = f"{path.relative_to(ROOT)}:{getattr(node, 'lineno', 0)}"
        if isinstance(node, ast.Import):
            modules = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{where}: a relative import hides what is imported"
            modules = [f"{node.module}.{alias.name}" for alias in node.names]
        else:
            continue
        yield from (Import(module, where, id(node) in lazy) for module in modules)


def imports_of_package(package: str) -> list[Import]:
    return [found for path in sources(package) for found in imports_of(path)]


def own_package(module: str) -> str | None:
    parts = module.split(".")
    return parts[1] if parts[0] == "pdserve" and len(parts) > 1 else None


@pytest.mark.parametrize("package", TABLE)
def test_a_package_imports_only_what_the_table_allows(package):
    allowed = TABLE[package] | {package}
    wrong = [f for f in imports_of_package(package) if (own_package(f.module) or package) not in allowed]
    assert wrong == []


@pytest.mark.parametrize("package", sorted(WITHOUT_TORCH))
def test_a_package_that_must_start_quickly_never_imports_torch(package):
    assert [f for f in imports_of_package(package) if f.module.split(".")[0] in TORCH] == []


def test_launch_imports_roles_and_torch_only_inside_functions():
    heavy = {"router", "prefill_node", "decode_node", "loadtest"}
    eager = [f for f in imports_of_package("launch") if not f.is_lazy]
    assert [f for f in eager if own_package(f.module) in heavy or f.module.split(".")[0] in TORCH] == []


@pytest.mark.parametrize("package", sorted(WITHOUT_SOCKETS))
def test_a_package_of_the_model_side_never_imports_sockets(package):
    assert [f for f in imports_of_package(package) if f.module.split(".")[0] in SOCKETS] == []


@pytest.mark.parametrize("package", TABLE)
def test_nothing_turns_bytes_into_code(package):
    unsafe = [f for f in imports_of_package(package) if f.module.split(".")[0] in UNSAFE_MODULES]
    calls = [found for path in sources(package) for found in unsafe_calls(path.read_text(encoding="utf-8"), path.name)]
    assert (unsafe, calls) == ([], [])


@pytest.mark.parametrize(
    "line",
    [
        "eval(text)",
        "torch.load(path)",
        "socket.recv_pyobj()",
        "read = self.socket.recv_pyobj",
        "numpy.lib.format.read_array(file, allow_pickle=True)",
        "AutoModel.from_pretrained(name, trust_remote_code=True)",
    ],
)
def test_what_would_turn_bytes_into_code_is_seen(line: str):
    assert unsafe_calls(line, "line") != []


def unsafe_calls(source: str, name: str) -> list[str]:
    found = []
    for node in ast.walk(ast.parse(source)):
        is_call = isinstance(node, ast.Call) and ast.unparse(node.func) in UNSAFE_CALLS
        is_method = isinstance(node, ast.Attribute) and node.attr in UNSAFE_METHODS
        is_keyword = isinstance(node, ast.keyword) and node.arg in UNSAFE_KEYWORDS
        if is_call or is_method or is_keyword:
            found.append(f"{name}:{node.lineno}: {ast.unparse(node)}")
    return found


def test_every_package_is_in_the_table_and_installed():
    folders = {path.parent.name for path in ROOT.glob("*/*.py")} - {"tests", "benchmarks", "docs"}
    assert folders == set(TABLE)
    declared = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    packages = {path.parent.relative_to(ROOT) for package in TABLE for path in sources(package)}
    assert [str(p) for p in packages if f'"pdserve.{".".join(p.parts)}"' not in declared] == []


def test_kernels_is_no_regular_package_so_that_the_name_stays_free_for_others():
    assert not (ROOT / "kernels" / "__init__.py").exists()
