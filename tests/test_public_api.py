"""The names users see: this list, each documented with an example that runs."""

import dataclasses
import inspect

import jax
import pytest

import jaxmp

NAMES = [
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
    "cast_floating",
    "check_progress",
    "get_policy",
    "grad",
    "make_train_step",
    "mixed_precision",
    "select",
    "value_and_grad",
]


def public() -> list[str]:
    return sorted(
        name
        for name, value in vars(jaxmp).items()
        if not name.startswith("_") and not inspect.ismodule(value)
    )


def test_names() -> None:
    assert public() == sorted(NAMES)


def own_functions() -> list[tuple[str, object]]:
    """Public functions, and public methods of public classes."""
    found = []
    for name in NAMES:
        value = getattr(jaxmp, name)
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


@pytest.mark.parametrize("name", [n for n in NAMES if inspect.isfunction(getattr(jaxmp, n))])
def test_functions_have_args_returns_and_an_example(name: str) -> None:
    doc = inspect.getdoc(getattr(jaxmp, name)) or ""
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
