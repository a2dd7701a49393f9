"""Products in float8 give what torchao's linear layers give: scales, codes, results, gradients."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxmp
from jaxmp._numerics.float8_codes import encode_blocks
from jaxmp._policies.recipe import get_recipe
from jaxmp._primitives.bilinear import RESULT
from jaxmp._primitives.float8_product import float8_map
from tests.support.float8_references import error
from tests.support.recorded import load_arrays, load_json

pytestmark = [pytest.mark.annotations, pytest.mark.jax]

CASES = load_json("float8/cases.json")["cases"]
RECIPES = {"tensorwise": "tensorwise", "rowwise": "rowwise", "rowwise_with_gw_hp": "rowwise_hp"}
X, W = 0, 1
NUMBERS = (((1,), (1,)), ((), ()))  # torch's weights are [N, K]
# The role, and what the product returns: their names for the casts of a layer.
CASTS = {
    "x": (X, RESULT), "w": (W, RESULT), "g": (RESULT, X),
    "x_dw": (X, W), "w_dx": (W, X), "g_dw": (RESULT, W),
}  # fmt: skip
# With scales that are powers of two: float32 division on GPUs may be two units off.
ON_DEVICES = ("c08", "c15")


def cases(on_devices: tuple[str, ...] = ()) -> list[Any]:
    """All cases by name and kind; some of them are for devices too."""
    marks = dict.fromkeys(on_devices, pytest.mark.device)
    return [
        pytest.param(case, id=f"{case['name']}-{case['kind']}", marks=marks.get(case["name"], ()))
        for case in CASES
    ]


@functools.cache
def recorded() -> dict[str, Any]:
    return load_arrays("float8/arrays.npz")


def arrays_of(case: Any, *names: str) -> list[Any]:
    """Arrays of a case, in its dtype: the recorded float32 numbers are of that dtype."""
    arrays = [recorded()[f"{case['name']}/{name}"] for name in names]
    cast = [jnp.asarray(x, case["dtype"]) for x in arrays]
    for x, y in zip(arrays, cast, strict=True):
        # Subnormal numbers are zero on CPUs, and in all codes.
        normal = np.abs(x) >= np.finfo(np.float32).tiny
        np.testing.assert_array_equal(x[normal], np.asarray(y, np.float32)[normal])
    return cast


def recipe_of(case: Any) -> jaxmp.float8.Recipe:
    powers = str(case["pow2"]).lower()
    text = f"{RECIPES[case['recipe']]}:minimum=none:power_of_two={powers}"
    recipe = get_recipe(text.replace(":power_of_two=true", ""))
    assert recipe.power_of_two == case["pow2"]
    return recipe


@pytest.mark.parametrize("case", cases(ON_DEVICES))
def test_scales_and_codes_are_equal(case: Any) -> None:
    """To the bit, for all casts of the forward and the backward pass."""
    x, w, g = arrays_of(case, "x", "w", "g")
    params = {"dimension_numbers": NUMBERS, "preferred_element_type": x.dtype}
    form = float8_map(
        tuple(sorted({**params, "precision": None, "out_sharding": None}.items())),
        ((x.shape, x.dtype), (w.shape, w.dtype)),
        x.dtype,
        recipe_of(case),
        W,
    )
    compared = 0
    for name, (role, returned) in CASTS.items():
        if case["casts"][name] is None:  # in 16 bits there
            assert recipe_of(case).weight_gradient == "bfloat16"
            assert returned == W
            continue
        codes, scale = form.encode(role, (x, w, g)[role], returned, derivative=role == RESULT)
        want = recorded()[f"{case['name']}/scale_{name}"]
        assert codes.dtype == case["casts"][name]["dtype"]
        np.testing.assert_array_equal(np.asarray(scale).reshape(want.shape), want)
        bits = np.asarray(codes).view(np.uint8)
        np.testing.assert_array_equal(bits, recorded()[f"{case['name']}/bits_{name}"])
        compared += bits.size
    assert compared >= 3 * min(x.size, w.size, g.size)


@pytest.mark.parametrize("case", cases())
def test_results_and_gradients_agree(case: Any) -> None:
    """The norm of the difference is within 2e-4 of the norm: sums in another order, bfloat16."""
    x, w, g = arrays_of(case, "x", "w", "g")
    product = functools.partial(
        jaxmp.float8.dot_general, dimension_numbers=NUMBERS, recipe=recipe_of(case)
    )
    y, pull = jax.vjp(product, x, w)
    for got, name in zip((y, *pull(g)), ("y", "dx", "dw"), strict=True):
        want = recorded()[f"{case['name']}/{name}"]
        assert got.dtype == case["dtype"]
        if not want.any():
            assert not np.asarray(got, np.float32).any()
        else:
            assert error(got, want) < 2e-4, name


def test_the_tolerance_sees_the_rounding_to_float8() -> None:
    """Positive control: the product in the recorded dtype is off by far more."""
    case = CASES[0]
    x, w = arrays_of(case, "x", "w")
    want = recorded()[f"{case['name']}/y"]
    assert error(x @ w.T, want) > 1e-2


def test_every_recipe_and_kind_is_recorded() -> None:
    assert len(CASES) == 25
    assert {case["recipe"] for case in CASES} == set(RECIPES)
    assert {(case["recipe"], case["pow2"]) for case in CASES} >= {
        ("tensorwise", True), ("tensorwise", False), ("rowwise", True), ("rowwise", False),
        ("rowwise_with_gw_hp", True),
    }  # fmt: skip
    assert len({case["kind"] for case in CASES}) == 10


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("form", ["float8_e4m3fn", "float8_e5m2"])
def test_blocks_are_those_of_torchao(dtype: str, form: str) -> None:
    """Largest magnitudes of all exponents, next to powers of two, out of range; ties; zeros.

    A block with an infinity is not compared: there torchao has the largest code, we have NaN.
    """
    arrays, short = load_arrays("mx_blocks.npz"), form[len("float8_") :].removesuffix("fn")
    x = jnp.asarray(arrays[f"{dtype}/x"], dtype)
    for encode in (encode_blocks, jax.jit(encode_blocks, static_argnums=1)):
        codes, scales = (np.asarray(x) for x in encode(x, jnp.dtype(form)))
        assert scales.view(np.uint8).ravel().tolist() == arrays[f"{dtype}/{short}/scales"].tolist()
        wanted = arrays[f"{dtype}/{short}/codes"].view(codes.dtype)
        # CPUs flush subnormal numbers. For the least scale, 2**-127, torchao divides by 2**-126.
        numbers = np.abs(arrays[f"{dtype}/x"])
        normal = (numbers >= np.finfo(np.float32).tiny) & (scales.view(np.uint8) > 0)
        assert normal.mean() > 0.9
        pairs = (np.where(normal, x.astype(np.float32), 0) for x in (codes, wanted))
        np.testing.assert_array_equal(*pairs)
