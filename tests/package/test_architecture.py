"""The shape of the code: imports point down, private JAX stays private, import is light."""

import ast
import graphlib
import pathlib
import subprocess
import sys

import pytest

PACKAGE = pathlib.Path(__file__).parents[2] / "jaxmp"

# The folders of the package, from the ground up: a module imports from its own folder, and from
# those before it. The facades are above all of them, and hold nothing but imports.
FOLDERS = (
    "_numerics",
    "_hlo",
    "_jaxpr",
    "_policies",
    "_mesh",
    "_primitives",
    "_recompute",
    "_float32_reduction",
    "_autocast",
    "_training",
    "_flax",
    "_inspect",
)
FACADES = ("__init__", "linen", "nnx", "rules", "sharding")
# The adapters are the only ones that know Flax, and tables the only ones that draw.
MAY_IMPORT = {"_flax": {"flax", "rich"}, "_inspect": {"rich"}}
# A module is written "_autocast.plan", and a folder itself "_autocast.__init__".
MODULES = sorted(
    ".".join(path.relative_to(PACKAGE).with_suffix("").parts) for path in PACKAGE.rglob("*.py")
)


def source_of(module: str) -> str:
    return PACKAGE.joinpath(*module.split(".")).with_suffix(".py").read_text()


def imports_of(module: str) -> set[str]:
    tree = ast.parse(source_of(module))
    names: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{module} has a relative import"
            names.add(node.module or "")
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
    return names


def ours(imports: set[str]) -> set[str]:
    """Which modules of this package are imported, as they are written in MODULES."""
    names = {name.partition("jaxmp.")[2] for name in imports if name.startswith("jaxmp.")}
    packages = {name for name in names if f"{name}.__init__" in MODULES}
    return (names & set(MODULES)) | {f"{name}.__init__" for name in packages}


def floor_of(module: str) -> int:
    folder = module.partition(".")[0]
    return FOLDERS.index(folder) if folder in FOLDERS else len(FOLDERS)


def violations(module: str, imports: set[str]) -> list[str]:
    """The imports of a module that point up."""
    return sorted(other for other in ours(imports) if floor_of(other) > floor_of(module))


def cycle(graph: dict[str, set[str]]) -> list[str]:
    """Modules that import each other, if there are any."""
    try:
        list(graphlib.TopologicalSorter(graph).static_order())
    except graphlib.CycleError as error:
        return list(error.args[1])
    return []


def test_every_module_is_in_a_folder_or_a_facade() -> None:
    tops = {module.partition(".")[0] for module in MODULES}
    assert tops == {*FOLDERS, *FACADES}


@pytest.mark.parametrize("module", MODULES)
def test_imports_point_down(module: str) -> None:
    assert violations(module, imports_of(module)) == []


def test_the_check_sees_an_upward_import() -> None:
    upward = {"jaxmp._training.train_step", "jaxmp._numerics.tree"}
    assert violations("_numerics.dtypes", upward) == ["_training.train_step"]
    assert violations("_autocast.plan", {"jaxmp.rules"}) == ["rules"]


@pytest.mark.parametrize("module", [*FACADES, *(f"{folder}.__init__" for folder in FOLDERS)])
def test_facades_only_hand_on(module: str) -> None:
    """Who looks for code finds it where it is defined. Flax is imported when it is first used."""
    allowed = (ast.Import, ast.ImportFrom, ast.Expr)
    if module == "__init__":
        allowed += (ast.If, ast.FunctionDef, ast.Assign)  # __getattr__, __dir__, __version__
    body = ast.parse(source_of(module)).body
    assert all(isinstance(node, allowed) for node in body)


def test_no_module_imports_what_imports_it() -> None:
    # The facade of a package imports its modules, and its modules may not import the facade.
    assert cycle({module: ours(imports_of(module)) for module in MODULES}) == []
    assert cycle({"a": {"b"}, "b": {"a"}}) == ["a", "b", "a"]  # positive control


@pytest.mark.parametrize("module", MODULES)
def test_nothing_private_and_no_flax_below_the_adapters(module: str) -> None:
    for name in imports_of(module):
        assert "_src" not in name, name
        assert not name.startswith("jax.core"), name
        package = name.partition(".")[0]
        allowed = package in MAY_IMPORT.get(module.partition(".")[0], set())
        assert package not in ("flax", "matplotlib", "rich") or allowed, name


@pytest.mark.parametrize("module", MODULES)
def test_no_assert_on_user_input(module: str) -> None:
    tree = ast.parse(source_of(module))
    assert not [node.lineno for node in ast.walk(tree) if isinstance(node, ast.Assert)]


@pytest.mark.parametrize("module", MODULES)
def test_files_and_functions_stay_small(module: str) -> None:
    source = source_of(module)
    assert source.count("\n") <= 420
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef) and node.end_lineno:
            doc = ast.get_docstring(node)
            lines = node.end_lineno - node.lineno - (doc.count("\n") + 1 if doc else 0)
            assert lines <= 60, node.name


def imported_by(statement: str) -> set[str]:
    """The top-level packages that a fresh process has after a statement."""
    code = f"import sys; {statement}; print(*{{m.partition('.')[0] for m in sys.modules}})"
    command = [sys.executable, "-W", "error", "-c", code]
    return set(subprocess.run(command, check=True, capture_output=True, text=True).stdout.split())


def test_import_is_light() -> None:
    heavy = {"flax", "matplotlib", "rich", "orbax"}
    assert not heavy & imported_by("import jaxmp")
    assert heavy & imported_by("import flax")  # positive control
