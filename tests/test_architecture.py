"""The shape of the code: imports point down, private JAX stays private, import is light."""

import ast
import graphlib
import pathlib
import subprocess
import sys

import pytest

PACKAGE = pathlib.Path(__file__).parents[1] / "jaxmp"

# A module may import from floors below its own, and within a floor only as listed.
FLOORS = {
    "_block_codes": 0,
    "_compat": 0,
    "_cpu_compiler": 0,
    "_dtypes": 0,
    "_flops": 0,
    "_hlo": 0,
    "_name_stacks": 0,
    "_patterns": 0,
    "_placement": 0,
    "_summary": 0,
    "_rounding": 0,
    "_specs": 0,
    "_split": 0,
    "_stochastic": 0,
    "_tree": 0,
    "_warnings": 0,
    "_loss_scale": 1,
    "_calls": 1,
    "_compact_state": 1,
    "_device_sums": 1,
    "_master_storages": 1,
    "_op_lists": 1,
    "_policy": 1,
    "_program": 1,
    "_rules": 1,
    "rules": 1,
    "_autocast": 2,
    "_batch_parts": 2,
    "_float32_gradients": 2,
    "_frozen": 2,
    "_float32_sums": 2,
    "_fsdp": 2,
    "_grad": 2,
    "_gradient_reduction": 2,
    "_masters": 2,
    "_microbatch": 2,
    "_optimizer": 2,
    "_optimizer_step": 2,
    "_outermost": 2,
    "_per_shard": 2,
    "_recompute": 2,
    "_reduction": 2,
    "_regions": 2,
    "_skipping": 2,
    "_shard_map": 2,
    "_state_shardings": 2,
    "_trilinear": 2,
    "_progress": 3,
    "_convert_state": 3,
    "_train_state": 3,
    "_train_step": 3,
    "sharding": 3,
    "_linen_session": 4,
    "_nnx_autocast": 4,
    "_nnx_calls": 4,
    "_nnx_modules": 4,
    "_nnx_plans": 4,
    "_nnx_policy": 4,
    "_nnx_reduction": 4,
    "_nnx_scopes": 4,
    "_nnx_training": 4,
    "linen": 4,
    "nnx": 4,
    "_audit": 5,
    "__init__": 6,
}
WITHIN_A_FLOOR = {
    ("_tree", "_dtypes"),
    ("_train_step", "_progress"),
    ("_train_step", "_train_state"),
    ("_rounding", "_dtypes"),
    ("_stochastic", "_dtypes"),
    ("_flops", "_compat"),
    ("_cpu_compiler", "_compat"),
    ("_cpu_compiler", "_dtypes"),
    ("_cpu_compiler", "_warnings"),
    ("_placement", "_compat"),
    ("_autocast", "_float32_gradients"),
    ("_autocast", "_float32_sums"),
    ("_autocast", "_recompute"),
    ("_autocast", "_reduction"),
    ("_float32_gradients", "_trilinear"),
    ("_fsdp", "_reduction"),
    ("_grad", "_fsdp"),
    ("_grad", "_gradient_reduction"),
    ("_grad", "_microbatch"),
    ("_grad", "_recompute"),
    ("_gradient_reduction", "_device_sums"),
    ("_gradient_reduction", "_fsdp"),
    ("_gradient_reduction", "_reduction"),
    ("_reduction", "_float32_gradients"),
    ("_reduction", "_float32_sums"),
    ("_reduction", "_trilinear"),
    ("_optimizer", "_masters"),
    ("_optimizer", "_optimizer_step"),
    ("_optimizer_step", "_frozen"),
    ("_optimizer_step", "_masters"),
    ("_optimizer_step", "_skipping"),
    ("_optimizer", "_outermost"),
    ("_optimizer", "_skipping"),
    ("_per_shard", "_batch_parts"),
    ("_per_shard", "_grad"),
    ("_per_shard", "_microbatch"),
    ("_program", "_op_lists"),
    ("_rules", "_policy"),
    ("linen", "_linen_session"),
    ("_nnx_autocast", "_nnx_calls"),
    ("_nnx_autocast", "_nnx_scopes"),
    ("_nnx_plans", "_nnx_modules"),
    ("_nnx_policy", "_nnx_modules"),
    ("_nnx_policy", "_nnx_plans"),
    ("_nnx_reduction", "_nnx_calls"),
    ("_nnx_scopes", "_nnx_modules"),
    ("_nnx_training", "_nnx_calls"),
    ("_nnx_training", "_nnx_modules"),
    ("_nnx_training", "_nnx_reduction"),
    ("nnx", "_nnx_autocast"),
    ("nnx", "_nnx_policy"),
    ("nnx", "_nnx_training"),
    ("rules", "_policy"),
    ("rules", "_rules"),
}
# The adapters are the only ones that know Flax, and a table the only one that draws.
MAY_IMPORT = {
    "_linen_session": {"flax"},
    "_nnx_autocast": {"flax"},
    "_nnx_calls": {"flax"},
    "_nnx_modules": {"flax"},
    "_nnx_plans": {"flax"},
    "_nnx_policy": {"flax"},
    "_nnx_reduction": {"flax"},
    "_nnx_scopes": {"flax"},
    "_nnx_training": {"flax"},
    "linen": {"flax"},
    "_audit": {"rich"},
    "_summary": {"rich"},
}
# A module of a package is written "_autocast._flow"; a package stands on one floor.
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


def violations(module: str, imports: set[str]) -> list[str]:
    """The imports of a module that point up or sideways, or into another package."""
    home, _, _ = module.partition(".")
    found = []
    for other in ours(imports):
        package, _, inner = other.partition(".")
        if package == home:
            continue  # held by the test of cycles
        points_down = FLOORS[package] < FLOORS[home] or (home, package) in WITHIN_A_FLOOR
        if not points_down or inner not in ("", "__init__"):
            found.append(other)
    return found


def cycle(graph: dict[str, set[str]]) -> list[str]:
    """Modules that import each other, if there are any."""
    try:
        list(graphlib.TopologicalSorter(graph).static_order())
    except graphlib.CycleError as error:
        return list(error.args[1])
    return []


def test_every_module_has_a_floor() -> None:
    assert {module.partition(".")[0] for module in MODULES} == set(FLOORS)


@pytest.mark.parametrize("module", MODULES)
def test_imports_point_down(module: str) -> None:
    assert violations(module, imports_of(module)) == []


def test_the_check_sees_an_upward_import() -> None:
    assert violations("_tree", {"jaxmp._train_step"}) == ["_train_step"]
    assert violations("_train_step", {"jaxmp._autocast._flow"}) == ["_autocast._flow"]


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
