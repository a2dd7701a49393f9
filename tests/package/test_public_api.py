"""The names users see: this list, each documented with an example that runs."""

import importlib
import inspect
import pathlib
import re
import types
import typing

import jax
import jaxtyping
import pytest

import jaxmp
import jaxmp.equinox
import jaxmp.linen
import jaxmp.nnx

pytestmark = pytest.mark.annotations

# The reference has every public name, and also what functions return, which has none.
REFERENCE = pathlib.Path(__file__).parents[2] / "docs/reference"
PLACED = re.findall(
    r"auto(?:function|class|exception):: (jaxmp[\w.]*)\.(\w+)",
    "".join(page.read_text() for page in sorted(REFERENCE.glob("*.rst"))),
)
MODULES = [
    *(jaxmp.diagnostics, jaxmp.float8, jaxmp.numbers, jaxmp.rules),
    *(jaxmp.sharding, jaxmp.storage),
    *(jaxmp.equinox, jaxmp.linen, jaxmp.nnx),
]


def names_of(module: types.ModuleType) -> list[str]:
    """The public names of a module in the reference."""
    return sorted(name for place, name in PLACED if place == module.__name__)


def test_a_star_import_takes_what_loads_later() -> None:
    """But no modules: `numbers` is one of Python's too, and who has no flax can write it."""
    names: dict[str, typing.Any] = {}
    exec("from jaxmp import *", names)
    assert sorted(names.keys() - {"__builtins__"}) == names_of(jaxmp)
    assert len(names_of(jaxmp)) <= 24  # what a reader takes in at one look


@pytest.mark.parametrize("name", sorted(jaxmp._MOVED))
def test_names_that_have_moved_are_found_once_more(name: str) -> None:
    with pytest.warns(DeprecationWarning, match=rf"jaxmp\.{name} is jaxmp\.\w+\.{name} now"):
        found = getattr(jaxmp, name)
    assert found is getattr(getattr(jaxmp, jaxmp._MOVED[name]), name)
    assert name not in dir(jaxmp)


@pytest.mark.parametrize(
    ("module", "name", "instead"),
    [
        (jaxmp.float8, "with_state", 'jaxmp.get_policy("mixed_float8")'),
        (jaxmp.diagnostics, "Device", 'jaxmp.diagnostics.find_device("h100")'),
        (jaxmp.diagnostics, "Peaks", 'jaxmp.diagnostics.find_device("h100").peaks'),
        (jaxmp.diagnostics, "ScalarLog", "with jaxmp.diagnostics.scalar_log(write) as log:"),
        (jaxmp.diagnostics, "benchmark", "time.perf_counter()"),
        (jaxmp.diagnostics, "overflow_report", "jaxmp.diagnostics.underflow_report(grads"),
    ],
)
def test_removed_names_say_what_to_write(module: types.ModuleType, name: str, instead: str) -> None:
    assert name not in dir(module)
    text = f"{module.__name__}.{name} was removed in version 0.2. Instead: {instead}"
    with pytest.raises(AttributeError, match=re.escape(text)):
        getattr(module, name)
    with pytest.raises(AttributeError, match="has no attribute 'nothing'"):
        module.nothing  # noqa: B018


def test_names() -> None:
    public = [
        name
        for name, value in vars(jaxmp).items()
        if not name.startswith("_") and not inspect.ismodule(value)
    ]
    assert sorted(public) == names_of(jaxmp)


@pytest.mark.every_case
@pytest.mark.parametrize("module", MODULES, ids=lambda module: module.__name__)
def test_names_of_modules(module: types.ModuleType) -> None:
    own = [
        name
        for name, value in vars(module).items()
        if not name.startswith("_") and str(getattr(value, "__module__", "")).startswith("jaxmp._")
    ]
    families = (
        ["EMBEDDINGS", "HEADS", "NORMS", "ROTARY", "ROUTERS"] if module is jaxmp.rules else []
    )
    assert sorted(own) == sorted([*names_of(module), *families])


def test_annotations_are_checked_here(request: pytest.FixtureRequest) -> None:
    """The mark at the top of this file does that; without it, tests see what users see."""
    if not request.config.getoption("jaxtyping_packages"):
        pytest.skip("without --jaxtyping-packages no annotations are checked")
    with pytest.raises(jaxtyping.TypeCheckError):
        jaxmp.get_policy(3)  # type: ignore[arg-type]
    request.getfixturevalue("unchecked")
    with pytest.raises(TypeError, match="policy must be a string or a Policy, got int"):
        jaxmp.get_policy(3)  # type: ignore[arg-type]


def test_submodules_are_loaded_on_demand() -> None:
    assert jaxmp.linen.apply_policy is not jaxmp.nnx.apply_policy
    with pytest.raises(AttributeError, match="module 'jaxmp' has no attribute 'haiku'"):
        jaxmp.haiku  # type: ignore[attr-defined]  # noqa: B018


def placed(is_public: bool) -> list[tuple[str, object]]:
    """What the reference has, by name; with the module in front if that is public."""
    return [
        (f"{module}.{name}", getattr(importlib.import_module(module), name))
        for module, name in PLACED
        if is_public != module.startswith("jaxmp._")
    ]


EVERYTHING, RESULTS = placed(is_public=True), placed(is_public=False)
FUNCTIONS = [(name, value) for name, value in EVERYTHING if inspect.isfunction(value)]


def classes_in(annotation: object) -> set[object]:
    """The classes of this library in an annotation, such as `Overflow | None`."""
    inside = set().union(*map(classes_in, typing.get_args(annotation)))
    own = str(getattr(annotation, "__module__", "")).startswith("jaxmp")
    return inside | ({annotation} if own and inspect.isclass(annotation) else set())


@pytest.mark.parametrize(("name", "function"), FUNCTIONS)
def test_what_functions_return_is_in_the_reference(name: str, function: object) -> None:
    returned = classes_in(typing.get_type_hints(function).get("return"))
    known = [value for _, value in (*EVERYTHING, *RESULTS)]
    assert [x for x in returned if x not in known] == [], name


def own_functions() -> list[tuple[str, object]]:
    """Public functions, and public methods of public classes."""
    found = []
    for name, value in (*EVERYTHING, *RESULTS):
        found.append((name, value))
        if inspect.isclass(value):
            found += [
                (f"{name}.{attribute}", member)
                for attribute, member in vars(value).items()
                if inspect.isfunction(member) and not attribute.startswith("_")
            ]
    return found


@pytest.mark.parametrize(("name", "value"), own_functions(), ids=[n for n, _ in own_functions()])
def test_documented(name: str, value: object) -> None:
    assert len(inspect.getdoc(value) or "") > 15, name
    if inspect.isfunction(value):
        assert all(p.annotation is not p.empty for p in signature_without_self(value)), name


def signature_without_self(function: object) -> list[inspect.Parameter]:
    assert callable(function)
    return [p for p in inspect.signature(function).parameters.values() if p.name != "self"]


@pytest.mark.parametrize(("name", "value"), FUNCTIONS, ids=[n for n, _ in FUNCTIONS])
def test_functions_have_args_returns_and_an_example(name: str, value: object) -> None:
    doc = inspect.getdoc(value) or ""
    assert "Args:" in doc, name
    assert "Returns:" in doc or "Raises:" in doc, name
    assert ">>>" in doc or name == "jaxmp.check_progress", name


@pytest.mark.parametrize(
    "config",
    [
        jaxmp.NoLossScale(),
        jaxmp.StaticLossScale(2.0),
        jaxmp.DynamicLossScale(),
        jaxmp.get_policy("float32"),
    ],
)
def test_configs_are_hashable_and_states_strong_arrays(config: typing.Any) -> None:
    assert hash(config) == hash(config)
    for leaf in jax.tree.leaves(config.init() if isinstance(config, jaxmp.LossScale) else ()):
        assert isinstance(leaf, jax.Array)
        assert not leaf.weak_type


def test_dir_shows_what_is_public() -> None:
    """Completion in a notebook: the adapters too, and no name that Python brought in."""
    shown = dir(jaxmp)
    assert {"equinox", "linen", "nnx", "get_policy", "make_train_step"} <= set(shown)
    assert not {"importlib", "typing"} & set(shown)
    for name in shown:
        getattr(jaxmp, name)
