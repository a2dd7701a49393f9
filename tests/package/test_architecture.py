"""The shape of the code: imports point down, private JAX stays private, import is light."""

import ast
import collections
import graphlib
import pathlib
import subprocess
import sys

import pytest

from jaxmp._program.op_classes import COSTS

PACKAGE = pathlib.Path(__file__).parents[2] / "jaxmp"

# The folders of the package, from the ground up: a module imports from its own folder, and from
# those before it. The facades are above all of them, and hold nothing but imports.
FOLDERS = (
    "_numerics",
    "_program",
    "_policies",
    "_mesh",
    "_primitives",
    "_recompute",
    "_gradient_release",
    "_float32_reduction",
    "_autocast",
    "_training",
    "_modules",
    "_flax",
    "_equinox",
    "_tools.hlo",
    "_tools.inspect",
    "_tools.diagnostics",
    "_tools.planning",
    "_tools.command",
)
FACADES = (
    "__init__",
    "__main__",
    "diagnostics",
    "equinox",
    "float8",
    "linen",
    "nnx",
    "numbers",
    "rules",
    "sharding",
    "storage",
)
# The adapters are the only ones that know Flax and Equinox, and reports the only ones that draw.
MAY_IMPORT = {
    "_modules": {"rich"},
    "_flax": {"flax"},
    "_equinox": {"equinox"},
    "_tools.inspect": {"rich"},
    "_tools.diagnostics": {"matplotlib", "rich"},
    "_tools.planning": {"rich"},
    "_tools.command": {"rich"},
}
# The only file that lists primitives. Rules, which a dict holds by name, stand where they are.
TABLE_OF_PRIMITIVES = "_program.op_classes"
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


def folder_of(module: str) -> str:
    """Its folder as FOLDERS has it; the module itself if it is in none."""
    return next((folder for folder in FOLDERS if module.startswith(f"{folder}.")), module)


def floor_of(module: str) -> int:
    folder = folder_of(module)
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
    assert {folder_of(module) for module in MODULES} == {*FOLDERS, *FACADES, "_tools.__init__"}


@pytest.mark.parametrize("module", MODULES)
def test_imports_point_down(module: str) -> None:
    assert violations(module, imports_of(module)) == []


def test_the_check_sees_an_upward_import() -> None:
    upward = {"jaxmp._training.train_step", "jaxmp._numerics.tree"}
    assert violations("_numerics.dtypes", upward) == ["_training.train_step"]
    assert violations("_autocast.plan", {"jaxmp.rules"}) == ["rules"]
    core_to_tools = {"jaxmp._tools.hlo.parser"}
    assert violations("_training.train_step", core_to_tools) == ["_tools.hlo.parser"]


@pytest.mark.parametrize(
    "module", [*FACADES, "_tools.__init__", *(f"{folder}.__init__" for folder in FOLDERS)]
)
def test_facades_only_hand_on(module: str) -> None:
    """Who looks for code finds it where it is defined. Flax is imported when it is first used."""
    allowed = (ast.Import, ast.ImportFrom, ast.Expr)
    if module == "__init__":
        allowed += (ast.If, ast.FunctionDef, ast.Assign)  # __getattr__, __dir__, __version__
    if module == "__main__":
        allowed += (ast.If,)  # it runs as a script, and not as it is imported
    body = [node for node in ast.parse(source_of(module)).body if not names_the_removed(node)]
    assert all(isinstance(node, allowed) for node in body)


def names_the_removed(node: ast.stmt) -> bool:
    """Whether a statement says what to write in place of removed names."""
    text = ast.unparse(node)
    return text.startswith("if not _typing.TYPE_CHECKING:\n    __getattr__ = _without(")


def test_no_module_imports_what_imports_it() -> None:
    # The facade of a package imports its modules, and its modules may not import the facade.
    assert cycle({module: ours(imports_of(module)) for module in MODULES}) == []
    assert cycle({"a": {"b"}, "b": {"a"}}) == ["a", "b", "a"]  # positive control


@pytest.mark.parametrize("module", MODULES)
def test_nothing_private_and_no_library_of_models_below_the_adapters(module: str) -> None:
    for name in imports_of(module):
        assert "_src" not in name, name
        assert not name.startswith("jax.core"), name
        package = name.partition(".")[0]
        allowed = package in MAY_IMPORT.get(folder_of(module), set())
        assert package not in ("equinox", "flax", "matplotlib", "rich") or allowed, name


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


# Public twins: what linen, nnx and Equinox have of their own.
TWINS = {
    "apply_policy",
    "autocast",
    "grad",
    "make_train_step",
    "remove_policy",
    "summary",
    "value_and_grad",
    "with_scopes",
}


def definitions(source: str) -> set[str]:
    nodes = ast.parse(source).body
    return {node.name for node in nodes if isinstance(node, ast.FunctionDef | ast.ClassDef)}


def test_no_name_stands_in_two_files() -> None:
    """Who searches for a name finds one definition."""
    found = [definitions(source_of(module)) for module in MODULES]
    counts = collections.Counter(name for names in found for name in names)
    assert {name for name, count in counts.items() if count > 1} == TWINS


# A body of fewer nodes is a single call, which two callers may need by chance.
_SMALLEST_BODY = 15


class _ByPosition(ast.NodeTransformer):
    """Names the arguments and locals of a function by the order in which they come."""

    def __init__(self, names: list[str]) -> None:
        self.names = {name: f"local{i}" for i, name in enumerate(dict.fromkeys(names))}

    def visit_Name(self, node: ast.Name) -> ast.Name:
        return ast.Name(self.names.get(node.id, node.id), node.ctx)

    def visit_arg(self, node: ast.arg) -> ast.arg:
        return ast.arg(self.names.get(node.arg, node.arg))


def body_of(function: ast.FunctionDef) -> str:
    """What a function computes: its body without docstring and names; empty if it is small."""
    statements = function.body[1:] if ast.get_docstring(function) else function.body
    nodes = [node for statement in statements for node in ast.walk(statement)]
    if len(nodes) < _SMALLEST_BODY:
        return ""
    args = [node.arg for node in ast.walk(function) if isinstance(node, ast.arg)]
    local = [
        node.id for node in nodes if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)
    ]
    renamed = _ByPosition([*args, *local])
    # Parsed again, so that the tree of the caller stays as it is.
    copies = [ast.parse(ast.unparse(statement)) for statement in statements]
    return "\n".join(ast.unparse(renamed.visit(copy)) for copy in copies)


def equal_functions(sources: dict[str, str]) -> list[list[str]]:
    """Functions of modules whose bodies are equal up to names, in groups."""
    groups = collections.defaultdict(list)
    for module, source in sources.items():
        for node in ast.parse(source).body:
            if isinstance(node, ast.FunctionDef) and (body := body_of(node)):
                groups[body].append(f"{module}.{node.name}")
    return [group for group in groups.values() if len(group) > 1]


def test_no_function_stands_twice_under_two_names() -> None:
    """Who mends one of two would leave the other."""
    groups = equal_functions({module: source_of(module) for module in MODULES})
    assert [group for group in groups if {name.split(".")[-1] for name in group} - TWINS] == []


def test_the_check_sees_equal_bodies() -> None:
    first = "def is_float(x):\n    'Whether.'\n    return is_inexact(x.dtype) and x.size > 0"
    second = "def has_tangent(value):\n    return is_inexact(value.dtype) and value.size > 0"
    other = "def is_large(x):\n    return is_inexact(x.dtype) and x.size > 1"
    assert equal_functions({"a": first, "b": second, "c": other}) == [
        ["a.is_float", "b.has_tangent"]
    ]


def lists_of_primitives(source: str) -> list[list[str]]:
    """The lists in a source that hold nothing but names of primitives, two or more.

    Single names may be English words: "name", "copy", "not".
    """
    found = []
    for node in ast.walk(ast.parse(source)):
        values = []
        if isinstance(node, ast.Set | ast.Tuple | ast.List):
            values = [each.value for each in node.elts if isinstance(each, ast.Constant)]
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            values = node.value.split()
        elif isinstance(node, ast.BinOp) and isinstance(node.op, ast.BitOr):
            sets = [each for each in ast.walk(node) if isinstance(each, ast.Set)]
            single = [each.elts[0] for each in sets if len(each.elts) == 1]
            values = sorted(each.value for each in single if isinstance(each, ast.Constant))
        if len(values) > 1 and COSTS.keys() >= set(values):
            found.append(values)
    return found


@pytest.mark.parametrize("module", MODULES)
def test_only_the_table_lists_primitives(module: str) -> None:
    if module != TABLE_OF_PRIMITIVES:
        found = lists_of_primitives(source_of(module))
        assert found == [], f"give {found} a name in jaxmp/_program/op_classes.py, and import it"


@pytest.mark.parametrize(
    "source",
    [
        "ADDS = {'add', 'sub'}",
        "ADDS = frozenset(('add', 'sub'))",
        "ADDS = frozenset('add sub'.split())",
        "ADDS = {*OTHERS, 'add', 'sub'}",
        "adds = name in ('add', 'sub')",
        "RULES = dict.fromkeys(['add', 'sub'], rule)",
        "ADDS = OTHERS | {'add'} | {'sub'}",
    ],
)
def test_the_check_sees_a_list_of_primitives(source: str) -> None:
    assert lists_of_primitives(source) == [["add", "sub"]]


@pytest.mark.parametrize(
    "source",
    [
        "adds = name == 'add'",
        "ADD = frozenset({'add'})",
        "RULES = {'add': add, 'sub': sub}",
        "KINDS = ('add', 'maximum')",
        "SIZES = (1, 2)",
        "def add(x):\n    'add one'",
    ],
)
def test_the_check_lets_other_things_pass(source: str) -> None:
    assert lists_of_primitives(source) == []


def imported_by(statement: str) -> set[str]:
    """The top-level packages that a fresh process has after a statement."""
    code = f"import sys; {statement}; print(*{{m.partition('.')[0] for m in sys.modules}})"
    command = [sys.executable, "-W", "error", "-c", code]
    return set(subprocess.run(command, check=True, capture_output=True, text=True).stdout.split())


def test_import_is_light() -> None:
    heavy = {"equinox", "flax", "matplotlib", "rich", "orbax", "tomllib"}
    assert not heavy & imported_by("import jaxmp")
    assert heavy & imported_by("import flax")  # positive control


def test_tools_load_when_they_are_first_used() -> None:
    """Who trains pays for the core alone: each module is some milliseconds of an import."""
    code = "import sys; {}; print(*(name for name in sys.modules if name.startswith('jaxmp.')))"

    def modules_after(statement: str) -> list[str]:
        command = [sys.executable, "-c", code.format(statement)]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout.split()

    core = modules_after("import jaxmp")
    assert len(core) <= 124
    assert not [name for name in core if name.startswith("jaxmp._tools")]
    # Positive controls: each of the two ways to load.
    assert "jaxmp._tools.inspect.api" in modules_after("import jaxmp; jaxmp.audit")
    assert "jaxmp._tools.planning.devices" in modules_after("from jaxmp import diagnostics")
