"""What autocast and full_precision say when they are used wrongly."""

from typing import Any

import jax
import jax.numpy as jnp
import pytest

import jaxmp
from tests.support.autocast_checks import BF16, X


def model(x: Any) -> Any:
    return x @ x.T


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize(
    ("arguments", "options", "error", "words"),
    [
        ((3, BF16), {}, TypeError, ["autocast", "function", "int"]),
        ((None, BF16), {}, TypeError, ["function", "NoneType"]),
        ((model, "bfloat61"), {}, ValueError, ["bfloat61"]),
        ((model, "mixed_bflot16"), {}, ValueError, ["mixed_bfloat16"]),
        ((model, None), {}, TypeError, ["policy"]),
        ((model, 16), {}, TypeError, ["policy"]),
        ((model, jnp.bfloat16), {}, TypeError, ["policy"]),
        ((model, "p=f32,c=float8_e4m3fn,o=f32"), {}, ValueError, ["bfloat16", "float16", "float8"]),
        ((model, BF16), {"output": "float32"}, ValueError, ["traced", "policy", "computed"]),
        ((model, BF16), {"output": None}, ValueError, ["traced"]),
        ((model, BF16), {"kernels": "high"}, ValueError, ["'traced' or 'low', got 'high'"]),
    ],
)
def test_wrong_arguments(
    arguments: Any, options: Any, error: type[Exception], words: list[str]
) -> None:
    with pytest.raises(error) as info:
        jaxmp.autocast(*arguments, **options)
    assert all(word in str(info.value) for word in words), str(info.value)


@pytest.mark.usefixtures("unchecked")
def test_rules_with_a_dtype_that_cannot_be() -> None:
    rules = jaxmp.PolicyRules([("head", "p=f32,c=float8_e5m2,o=f32")], default=BF16)
    with pytest.raises(ValueError, match="float8_e5m2"):
        jaxmp.autocast(model, rules)


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize("wrong", [None, 3, "f"])
def test_full_precision_of_no_function(wrong: Any) -> None:
    with pytest.raises(
        TypeError, match=f"full_precision takes a function, got {type(wrong).__name__}"
    ):
        jaxmp.full_precision(wrong)


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize("name", ["expp", "silou", "dot"])
def test_a_name_that_is_nothing_warns(name: str) -> None:
    """Names of jitted functions cannot be known before the function is traced."""
    fast = jaxmp.autocast(model, BF16, float32=[name])
    with pytest.warns(UserWarning, match=f"'{name}' is in a list of operations, but is neither"):
        assert fast(X).shape == (4, 4)


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize("wrap", [lambda f: f, jax.jit, jax.grad, lambda f: jax.jit(jax.grad(f))])
def test_warnings_point_to_the_line_that_calls(wrap: Any) -> None:
    rules = jaxmp.PolicyRules({"nowhere": "float32"}, "mixed_bfloat16")
    fast = wrap(jaxmp.autocast(lambda x: model(x).sum(), rules, float32=["expp"]))
    with pytest.warns(UserWarning, match="'expp'|'nowhere'") as caught:
        fast(X)
    assert {warning.filename for warning in caught} == {__file__}
    texts = " ".join(str(warning.message) for warning in caught)
    assert "'expp' is in a list" in texts
    assert "Nothing in it has a name" in texts


def test_an_iterator_of_names_is_read_once() -> None:
    fast = jaxmp.autocast(
        lambda x: jnp.exp(x @ x.T), BF16, promote=iter(["exp"]), output="computed"
    )
    assert fast(X * 0.1).dtype == jnp.bfloat16
    assert fast(X * 0.2).dtype == jnp.bfloat16


def test_no_message_shows_internals() -> None:
    """An error in the function has no frames or causes of autocast's own making."""

    def wrong(x: Any) -> Any:
        return x @ jnp.ones((3, 3))

    with pytest.raises(TypeError) as info:
        jaxmp.autocast(wrong, BF16)(X)
    with pytest.raises(TypeError) as plain:
        wrong(X)
    assert str(info.value) == str(plain.value)
    held = jnp.ones((3, 3))
    with pytest.raises(TypeError) as info:
        jaxmp.autocast(lambda x: x @ held, BF16)(X)
    assert "_Captured" not in repr(info.value.__context__)


def test_an_argument_that_cannot_be_traced_says_so() -> None:
    fast = jaxmp.autocast(lambda x, n: jnp.zeros(int(n)) + x.sum(), BF16)
    with pytest.raises(jax.errors.ConcretizationTypeError):
        fast(X, jnp.int32(3))
    assert fast(X, 3).shape == (3,)
