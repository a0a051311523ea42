"""The house as the design draws it: imports go down only, and light rooms stay light."""

import ast
import importlib
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from graphlib import CycleError, TopologicalSorter
from importlib.util import find_spec
from pathlib import Path

import pytest

import coserve
from coserve.serve.settings import REPORTERS

SOURCE = Path(coserve.__file__).parent
BENCHMARKS = Path(__file__).parents[2] / "benchmarks" / "coserve_benchmarks"
FILES = [*sorted(SOURCE.rglob("*.py")), *sorted(BENCHMARKS.rglob("*.py"))]
TESTS = sorted(Path(__file__).parents[1].rglob("*.py"))
DOCUMENTED = ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef
QUESTIONS = {"What", "Who", "Whose", "Whom", "How", "Whether", "Where", "When", "Why", "Which"}
SANDBOXED = "coserve.adapters.pickled"  # reads pickles, in a process of its own
PICKLES = {"pickle", "marshal", "shelve", "dill", "cloudpickle"}
RUNS = {"eval", "exec", "torch.load", "compile", "__import__"}
# Rooms from the foundation up; those of one floor do not know each other, but for what `ALSO` allows.
FLOORS: tuple[frozenset[str], ...] = (
    frozenset({"core", "config", "errors", "metrics"}),
    frozenset({"sandbox"}),
    frozenset({"schedule", "memory.pages", "memory.ledger", "memory.budget", "jobs", "wire", "workload"}),
    frozenset({"text"}),
    frozenset({"kernels", "parallel", "memory.compiled", "memory.malloc", "memory.fake_tensors"}),
    frozenset({"attention", "memory.arena", "memory.measured", "memory.exhausted"}),
    frozenset({"adapters"}),
    frozenset({"model"}),
    frozenset({"streamed", "split"}),  # bases from elsewhere
    frozenset({"train"}),
    frozenset({"zoo"}),
    frozenset({"executors"}),
    frozenset({"worker"}),
    frozenset({"cluster"}),
    frozenset({"engine"}),
    frozenset({"plan", "simulate"}),
    frozenset({"tiny", "demo", "serve"}),
    frozenset({"cli"}),
    frozenset({"benchmarks"}),  # beside the package
)
# The nouns and settings are one foundation; scheduling counts pages; the demo shows the embedded model.
ALSO = {
    ("core", "errors"),
    ("config", "errors"),
    ("config", "core"),
    ("schedule", "memory.pages"),
    ("demo", "tiny"),
}


# The one module that knows of the benchmarks: it gives their commands to the command line.
MOUNT = ("coserve.cli.bench", "benchmarks")


# Reporters to experiment trackers, each of which is an extra; the rest of the room is ours alone.
TRACKERS = {f"coserve.serve.reporting.{name}" for name in REPORTERS}


# Routes translate bodies into calls and answers out of them; nothing behind them knows a dialect.
DIALECTS = tuple(f"coserve.serve.{room}" for room in ("routes", "schema", "tinker", "anthropic", "responses"))
BEHIND = tuple(
    f"coserve.serve.{room}" for room in ("answering", "engine", "training", "adapter_registry", "store")
)


def room_of(module: str) -> str:
    """The room a dotted module of coserve is in; empty for the package itself."""
    package, *parts = module.split(".")
    if package == BENCHMARKS.name:
        return "benchmarks"
    return ".".join(parts[:2]) if parts[:1] == ["memory"] and len(parts) > 1 else ".".join(parts[:1])


def module_of(file: Path) -> str:
    beside = BENCHMARKS if file.is_relative_to(BENCHMARKS) else SOURCE
    parts = file.relative_to(beside.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imports_of(tree: ast.AST) -> Iterator[str]:
    """Modules imported anywhere but under TYPE_CHECKING."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            for other in node.orelse:
                yield from imports_of(other)
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute"
            module = node.module or ""
            yield module
            yield from (
                f"{module}.{alias.name}" for alias in node.names if is_module(f"{module}.{alias.name}")
            )
        else:
            yield from imports_of(node)


def is_module(name: str) -> bool:
    beside = {"coserve": SOURCE, BENCHMARKS.name: BENCHMARKS}.get(name.split(".")[0])
    path = Path() if beside is None else beside.parent.joinpath(*name.split("."))
    return beside is not None and (path.with_suffix(".py").exists() or (path / "__init__.py").exists())


def floor_of(room: str) -> int:
    found = [i for i, rooms in enumerate(FLOORS) if room in rooms]
    assert found, f"{room} has no place in the house"
    return found[0]


def forbidden_in(module: str, imports: Iterator[str]) -> Iterator[str]:
    """Imports of a module from rooms that are not below its own."""
    room = room_of(module)
    if not room or module == "coserve.memory":  # the front door, and a room with two floors
        return
    for imported in imports:
        if module.startswith(BEHIND) and imported.startswith(DIALECTS):
            yield f"{module} imports {imported}, a dialect"
        other = room_of(imported) if imported.split(".")[0] in ("coserve", BENCHMARKS.name) else ""
        if not other or other == room or other == "memory" or (module, other) == MOUNT:
            continue
        if not (floor_of(other) < floor_of(room) or (room, other) in ALSO):
            yield f"{module} imports {imported}: {other} is not below {room}"


def all_imports_of(nodes: list[ast.AST]) -> Iterator[str]:
    """Modules of the project imported anywhere: in functions and under TYPE_CHECKING, too."""
    for node in nodes:
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if is_module(alias.name))
        elif isinstance(node, ast.ImportFrom) and is_module(module := node.module or ""):
            names = [f"{module}.{alias.name}" for alias in node.names]
            yield from (name if is_module(name) else module for name in names)


def questions_in(nodes: list[ast.AST]) -> Iterator[str]:
    """Docstrings that begin with a question word, in place of their subject."""
    for node in nodes:
        text = ast.get_docstring(node) if isinstance(node, DOCUMENTED) else None
        if text and text.split(maxsplit=1)[0] in QUESTIONS:
            yield text


def foreign_code_in(module: str, nodes: list[ast.AST]) -> Iterator[str]:
    """Imports and calls that run code which a file or a text brings."""
    for node in nodes:
        if isinstance(node, ast.Import | ast.ImportFrom):
            names = [a.name for a in node.names] + [getattr(node, "module", None) or ""]
            yield from {n.split(".")[0] for n in names} & PICKLES
            joined = [f"{getattr(node, 'module', None) or ''}.{a.name}".strip(".") for a in node.names]
            yield from (name for name in joined if f"{name}.".startswith(f"{SANDBOXED}."))
        if isinstance(node, ast.Call):
            called = ast.unparse(node.func)
            allowed = {"torch.load"} if module == SANDBOXED else set()
            if called in RUNS - allowed or (
                called == "torch.load" and "weights_only=True" not in ast.unparse(node)
            ):
                yield called
        if isinstance(node, ast.keyword) and node.arg == "trust_remote_code":
            yield from {ast.unparse(node.value)} - {"False"}


@dataclass(frozen=True)
class Module:
    """A file of the project as the tests below ask about it. Each is read once, for all of them."""

    has_docstring: bool
    questions: tuple[str, ...]
    forbidden: tuple[str, ...]  # imports
    imports: frozenset[str]  # of modules of the project, anywhere
    foreign: tuple[str, ...]
    classes: tuple[str, ...]


@cache
def modules() -> dict[str, Module]:
    """All modules of the package and the benchmarks, by name."""
    found = {}
    for file in FILES:
        name, tree = module_of(file), ast.parse(file.read_text())
        nodes = list(ast.walk(tree))
        found[name] = Module(
            has_docstring=bool(ast.get_docstring(tree)),
            questions=tuple(questions_in(nodes)),
            forbidden=tuple(forbidden_in(name, imports_of(tree))),
            imports=frozenset(all_imports_of(nodes)),
            foreign=tuple(foreign_code_in(name, nodes)),
            classes=tuple(node.name for node in nodes if isinstance(node, ast.ClassDef)),
        )
    assert len(found) == len(FILES) > 800
    return found


def test_imports_go_down_only() -> None:
    assert not [said for module in modules().values() for said in module.forbidden]


def test_no_modules_import_each_other() -> None:
    """Not even for types: two that need each other's are one, or lack a third below them."""
    known = {name: module.imports for name, module in modules().items()}
    del known["coserve"]  # the front door, which names what lies behind it
    try:
        TopologicalSorter({module: found - {module} for module, found in known.items()}).prepare()
    except CycleError as error:
        pytest.fail(" <- ".join(error.args[1]))


def loaded_by(statement: str) -> set[str]:
    code = f"import sys; {statement}; print(*sys.modules)"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return set(out.stdout.split())


def test_light_rooms_never_load_torch() -> None:
    """One process imports them room by room, and tells the first one that has brought a heavy library."""
    rooms = {
        room: sorted(name for name in modules() if room_of(name) == room)
        for room in (
            "core", "errors", "config", "wire", "schedule", "jobs", "memory.pages", "workload", "simulate",
        )
    }  # fmt: skip
    assert all(rooms.values())
    asked = {"coserve": ["coserve"], "cli": ["coserve.cli"], **rooms}
    code = f"""
import sys
from importlib import import_module
for room, modules in {asked}.items():
    for module in modules:
        import_module(module)
    for heavy in {{"torch", "transformers", "numpy"}} & set(sys.modules):
        sys.exit(f"{{room}} loads {{heavy}}")
"""
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert out.returncode == 0, out.stderr[-2000:]


def test_text_never_loads_torch() -> None:
    modules = [module_of(f) for f in FILES if room_of(module_of(f)) == "text"]
    loaded = loaded_by("import " + ", ".join(modules))
    assert set(modules) <= loaded
    assert "torch" not in loaded


def test_the_nouns_need_msgspec_alone_beside_the_standard_library() -> None:
    modules = [module_of(f) for f in FILES if room_of(module_of(f)) == "core"]
    added = loaded_by("import " + ", ".join(modules)) - loaded_by("import msgspec")
    foreign = {m.split(".")[0] for m in added} - set(sys.stdlib_module_names) - {"coserve"}
    assert not foreign


def test_public_names_resolve() -> None:
    assert len(coserve.__all__) == len(set(coserve.__all__)) >= 8
    for name in coserve.__all__:
        assert getattr(coserve, name).__name__ == name
    with pytest.raises(AttributeError, match="Nothing"):
        _ = coserve.Nothing


def test_docstrings_name_their_subject() -> None:
    found = {file: list(questions_in(list(ast.walk(ast.parse(file.read_text()))))) for file in TESTS}
    assert not {file: texts for file, texts in found.items() if texts}
    assert not {name: module.questions for name, module in modules().items() if module.questions}


def is_there(module: str, file: Path) -> bool:
    """Tells whether the packages are installed that a module cannot be imported without."""
    needed = []
    if module.startswith("coserve.kernels.triton."):
        needed = ["triton"]  # an extra; what asks for it asks whether it is there
    if module in TRACKERS:
        needed = [file.stem]
    if file.name == "llama_cpp_worker.py":
        needed = ["llama_cpp", "gguf"]  # of another environment
    return all(find_spec(package) for package in needed)


def test_every_module_imports_and_says_what_it_is() -> None:
    assert not [name for name, module in modules().items() if not module.has_docstring]
    for file in FILES:
        if file.name != "__main__.py" and is_there(module_of(file), file):
            importlib.import_module(module_of(file))


def test_files_run_no_foreign_code() -> None:
    """The reader of pickles reads them in a process of its own, and nobody imports it."""
    assert not {name: module.foreign for name, module in modules().items() if module.foreign}


def test_no_two_classes_share_a_name() -> None:
    """Private ones neither: a name says which it is."""
    places: dict[str, list[str]] = {}
    for name, module in modules().items():
        for made in module.classes if name.startswith("coserve.") else ():
            places.setdefault(made, []).append(name)
    assert not {name: modules for name, modules in places.items() if len(modules) > 1}


def test_no_two_test_files_share_a_name() -> None:
    """Test folders are no packages: pytest imports files by name alone, and refuses the second of a name."""
    names = [file.name for file in TESTS if file.name.startswith("test_")]
    assert sorted(names) == sorted(set(names))


def test_every_error_is_in_the_tree_and_drawn() -> None:
    from coserve import errors

    drawn = errors.__doc__ or ""
    for name, kind in vars(errors).items():
        if isinstance(kind, type):
            assert issubclass(kind, errors.CoserveError) and name in drawn and kind.__doc__
