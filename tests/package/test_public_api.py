"""The names users see: this list, each documented with an example that runs."""

import dataclasses
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

NAMES = [
    "AuditError",
    "DynamicLossScale",
    "LossScale",
    "LossScaleState",
    "MixedPrecision",
    "MixedPrecisionState",
    "NoLossScale",
    "Policy",
    "PolicyRules",
    "StaticLossScale",
    "TrainState",
    "TrainingStalled",
    "all_finite",
    "assert_reduced_in",
    "audit",
    "autocast",
    "check_progress",
    "collectives",
    "compact_state",
    "convert_state",
    "expanded_state",
    "full_precision",
    "get_policy",
    "grad",
    "make_train_step",
    "merge_float32",
    "mixed_precision",
    "recompute",
    "release_gradients",
    "select",
    "split_float32",
    "stochastic_round",
    "value_and_grad",
]
NAMES_IN = {
    jaxmp.diagnostics: [
        "Device",
        "Peaks",
        "ScalarLog",
        "absent_devices",
        "activation_histograms",
        "benchmark",
        "compare",
        "find_device",
        "find_overflow",
        "histograms",
        "log_prob_gap",
        "memory_plan",
        "overflow_report",
        "plot_histograms",
        "scalars",
        "sensitivity",
        "underflow_report",
    ],
    jaxmp.float8: [
        "Float8State",
        "Recipe",
        "dot_general",
        "init_state",
        "probes_of",
        "update",
        "with_state",
    ],
    jaxmp.rules: [
        "Family",
        "keep_float32",
        "keep_norms_float32",
    ],
    jaxmp.sharding: [
        "FSDP",
        "fully_sharded",
        "gather_params",
        "per_shard",
        "reduce_gradients",
        "state_shardings",
    ],
    jaxmp.equinox: [
        "apply_policy",
        "filter_grad",
        "filter_value_and_grad",
        "remove_policy",
        "summary",
        "with_scopes",
    ],
    jaxmp.linen: ["apply_policy", "remove_policy", "summary", "with_policy"],
    jaxmp.nnx: [
        "Optimizer",
        "apply_policy",
        "autocast",
        "grad",
        "remove_policy",
        "summary",
        "value_and_grad",
        "with_scopes",
    ],
}


def public() -> list[str]:
    return sorted(
        name
        for name, value in vars(jaxmp).items()
        if not name.startswith("_") and not inspect.ismodule(value)
    )


def test_a_star_import_takes_what_loads_later() -> None:
    """But no adapter: who has no flax can write it too."""
    names: dict[str, typing.Any] = {}
    exec("from jaxmp import *", names)
    assert names.keys() >= {*NAMES, "diagnostics", "float8", "rules", "sharding"}
    assert not {"equinox", "importlib", "linen", "nnx", "typing"} & names.keys()


def test_names() -> None:
    assert public() == sorted(NAMES)


@pytest.mark.parametrize("module", NAMES_IN, ids=lambda module: module.__name__)
def test_names_of_modules(module: types.ModuleType) -> None:
    own = [
        name
        for name, value in vars(module).items()
        if not name.startswith("_") and str(getattr(value, "__module__", "")).startswith("jaxmp._")
    ]
    families = (
        ["EMBEDDINGS", "HEADS", "NORMS", "ROTARY", "ROUTERS"] if module is jaxmp.rules else []
    )
    assert sorted(own) == sorted([*NAMES_IN[module], *families])


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


EVERYTHING: list[tuple[str, object]] = [(name, getattr(jaxmp, name)) for name in NAMES] + [
    (f"{module.__name__}.{name}", getattr(module, name))
    for module, names in NAMES_IN.items()
    for name in names
]
# What functions return has a place in the reference, but no public name.
REFERENCE = pathlib.Path(__file__).parents[2] / "docs/reference"
RESULTS: list[tuple[str, object]] = [
    (name, getattr(importlib.import_module(module), name))
    for page in sorted(REFERENCE.glob("*.rst"))
    for module, name in re.findall(r"autoclass:: (jaxmp\._[\w.]+)\.(\w+)", page.read_text())
]


def classes_in(annotation: object) -> set[object]:
    """The classes of this library in an annotation, such as `Overflow | None`."""
    inside = set().union(*map(classes_in, typing.get_args(annotation)))
    own = str(getattr(annotation, "__module__", "")).startswith("jaxmp")
    return inside | ({annotation} if own and inspect.isclass(annotation) else set())


@pytest.mark.parametrize(("name", "function"), [x for x in EVERYTHING if inspect.isfunction(x[1])])
def test_what_functions_return_is_in_the_reference(name: str, function: object) -> None:
    returned = classes_in(typing.get_type_hints(function).get("return"))
    placed = [value for _, value in (*EVERYTHING, *RESULTS)]
    assert [x for x in returned if x not in placed] == [], name


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


FUNCTIONS = [(name, value) for name, value in EVERYTHING if inspect.isfunction(value)]


@pytest.mark.parametrize(("name", "value"), FUNCTIONS, ids=[n for n, _ in FUNCTIONS])
def test_functions_have_args_returns_and_an_example(name: str, value: object) -> None:
    doc = inspect.getdoc(value) or ""
    assert "Args:" in doc, name
    assert "Returns:" in doc or "Raises:" in doc, name
    assert ">>>" in doc or name == "check_progress", name


@pytest.mark.parametrize(
    "config",
    [
        jaxmp.NoLossScale(),
        jaxmp.StaticLossScale(2.0),
        jaxmp.DynamicLossScale(),
        jaxmp.get_policy("float32"),
    ],
)
def test_configs_are_frozen_and_hashable(config: object) -> None:
    assert hash(config) == hash(config)
    assert isinstance(config, jaxmp.LossScale | jaxmp.Policy)
    for field in dataclasses.fields(config):  # type: ignore[arg-type]
        with pytest.raises(dataclasses.FrozenInstanceError):
            setattr(config, field.name, 1)


@pytest.mark.parametrize(
    "config", [jaxmp.NoLossScale(), jaxmp.StaticLossScale(2.0), jaxmp.DynamicLossScale()]
)
def test_states_are_strong_arrays(config: jaxmp.LossScale) -> None:
    for leaf in jax.tree.leaves(config.init()):
        assert isinstance(leaf, jax.Array)
        assert not leaf.weak_type


def test_dir_shows_what_is_public() -> None:
    """Completion in a notebook: the adapters too, and no name that Python brought in."""
    shown = dir(jaxmp)
    assert {"equinox", "linen", "nnx", "get_policy", "make_train_step"} <= set(shown)
    assert not {"importlib", "typing"} & set(shown)
    for name in shown:
        getattr(jaxmp, name)
