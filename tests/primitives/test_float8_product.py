"""Products in float8: values and gradients against NumPy float64, and what programs hold."""

import collections
import functools
import itertools
import warnings
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxmp
from jaxmp._policies.recipe import get_recipe
from jaxmp._primitives.float8_product import float8_map, without_scale
from tests.support.dots import equations
from tests.support.float8_references import Product, error

pytestmark = [pytest.mark.annotations, pytest.mark.usefixtures("blocks_on_a_cpu")]

RECIPES = [
    "tensorwise", "rowwise", "rowwise_hp", "tensorwise:power_of_two=false",
    "rowwise:power_of_two=false", "tensorwise:gradient=float8_e4m3fn",
    "tensorwise:weight_gradient=bfloat16", "int8", "int8:weight_gradient=int8",
    "int8:power_of_two=true:weight_gradient=int8", "int8:granularity=row:weight_gradient=int8",
    "mxfp8",
]  # fmt: skip
each_recipe = pytest.mark.parametrize("recipe", RECIPES)
MAIN = ["tensorwise", "rowwise", "rowwise_hp", "int8", "mxfp8"]
main_recipes = pytest.mark.parametrize("recipe", MAIN)
# Einsum's letters, the size of each letter, and which operand is the weight.
SPECS: dict[str, tuple[str, dict[str, int], int]] = {
    "matrix": ("mk,kn->mn", {"m": 40, "k": 64, "n": 96}, 1),
    "transposed weight": ("mk,nk->mn", {"m": 24, "k": 64, "n": 96}, 1),
    "weight on the left": ("kn,mk->nm", {"m": 24, "k": 64, "n": 96}, 0),
    "transposed weight on the left": ("nk,km->nm", {"m": 24, "k": 64, "n": 96}, 0),
    "tokens": ("btk,kn->btn", {"b": 3, "t": 8, "k": 64, "n": 32}, 1),
    "heads": ("btk,khd->bthd", {"b": 3, "t": 8, "k": 32, "h": 2, "d": 16}, 1),
    "out of heads": ("bthd,hdn->btn", {"b": 3, "t": 8, "h": 2, "d": 16, "n": 32}, 1),
    "summed in another order": ("bhtd,dnh->btn", {"b": 3, "t": 8, "h": 2, "d": 16, "n": 32}, 1),
    "experts": ("emk,ekn->emn", {"e": 4, "m": 8, "k": 32, "n": 64}, 1),
    "experts on the left": ("ekn,emk->enm", {"e": 4, "m": 8, "k": 32, "n": 64}, 0),
    "two shared": ("afmk,fakn->afmn", {"a": 2, "f": 3, "m": 8, "k": 32, "n": 64}, 1),
}
each_spec = pytest.mark.parametrize("name", SPECS)


def case_of(name: str, recipe: str) -> tuple[Product, dict[str, int]]:
    spec, sizes, parameter = SPECS[name]
    found = get_recipe(f"{recipe}:minimum=none")
    assert found is not None
    return Product(spec, found, parameter), sizes


def operands(
    case: Product, sizes: dict[str, int], dtype: Any = "bfloat16", spread: int = 6
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Both operands and a cotangent: a float32 weight, activations in 16 bits.

    Where one operand is large along an axis that two have, the other is small. So what a scale
    costs the small numbers shows in results, and recipes differ.
    """
    random = np.random.default_rng(0)
    exponents = {c: random.integers(-spread, spread + 1, n) for c, n in sizes.items()}
    made = []
    seen: set[str] = set()
    for role, letters in enumerate(case.letters()):
        x = random.normal(size=[sizes[c] for c in letters])
        for i, c in enumerate(letters):
            signed = -exponents[c] if c in seen else exponents[c]
            x *= np.exp2(signed).reshape([-1 if j == i else 1 for j in range(x.ndim)])
        seen |= set(letters)
        made.append(jax.device_put(x.astype("float32" if role == case.parameter else dtype)))
    return made[0], made[1], made[2]


def multiply(case: Product) -> Callable[[Any, Any], Any]:
    return functools.partial(
        jaxmp.float8.dot_general,
        dimension_numbers=case.numbers(), recipe=case.recipe, parameter=case.parameter,
    )  # fmt: skip


def matrices(recipe: str = "tensorwise", spread: int = 6) -> tuple[Any, ...]:
    """A product of matrices, its operands and a cotangent."""
    case, sizes = case_of("matrix", recipe)
    return (multiply(case), *operands(case, sizes, spread=spread))


# One rounding of the result, of which the norm is a third; products of CPUs round no sum before.
UNIT = {"bfloat16": 2.0**-8, "float16": 2.0**-11, "float32": 2e-6}


def check(case: Product, lhs: Any, rhs: Any, ct: Any, **options: Any) -> None:
    y, pull = jax.vjp(functools.partial(multiply(case), **options), lhs, rhs)
    assert y.dtype == ct.dtype
    exact = [np.asarray(x, np.float64) for x in (lhs, rhs, ct)]
    assert error(y, case.result(*exact[:2])) < UNIT[str(y.dtype)]
    for x, got, want in zip((lhs, rhs), pull(ct), case.gradients(*exact), strict=True):
        assert got.dtype == x.dtype
        assert error(got, want) < UNIT[str(got.dtype)]


@each_recipe
@each_spec
def test_values_and_gradients(name: str, recipe: str) -> None:
    """The gradient of a float32 weight is float32, to float32's digits."""
    case, sizes = case_of(name, recipe)
    check(case, *operands(case, sizes))


@main_recipes
@pytest.mark.parametrize("name", ["matrix", "weight on the left", "experts"])
@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_other_dtypes_of_activations(name: str, recipe: str, dtype: str) -> None:
    """In float16 sums of codes would overflow: a product of two codes may be 200,704."""
    case, sizes = case_of(name, recipe)
    check(case, *operands(case, sizes, dtype, spread=2 if dtype == "float16" else 6))


def test_the_check_sees_a_wrong_recipe() -> None:
    """Positive control: each recipe differs from each other one by more than the check allows."""
    cases = [case_of("matrix", recipe)[0] for recipe in MAIN]
    lhs, rhs, ct = (np.asarray(x, np.float64) for x in operands(cases[0], SPECS["matrix"][1]))
    results = [(case.result(lhs, rhs), *case.gradients(lhs, rhs, ct)) for case in cases]
    for one, other in itertools.combinations(results, 2):
        assert max(map(error, one, other)) > 5e-3


@pytest.mark.parametrize("recipe", ["int8", "int8:granularity=row"])
def test_long_sums_of_int8_do_not_wrap_around(recipe: str) -> None:
    """2**18 times 127 * 127 is more than an int32 holds; 2**17 times is less: a sum of codes."""
    for summed in (2**17, 2**18):
        x, w = jax.device_put(
            (np.ones((16, summed), jnp.bfloat16), np.ones((summed, 16), np.float32))
        )
        dot = functools.partial(
            jaxmp.float8.dot_general, dimension_numbers=(((1,), (0,)), ((), ())), recipe=recipe
        )
        np.testing.assert_allclose(np.asarray(dot(x, w), np.float32), summed, rtol=2.0**-8)
        (product,) = [
            e for e in equations(jax.make_jaxpr(dot)(x, w)) if e.primitive.name == "dot_general"
        ]
        assert str(product.outvars[0].aval.dtype) == ("int32" if summed == 2**17 else "float32")


@main_recipes
def test_weights_in_16_bits_have_gradients_in_16_bits(recipe: str) -> None:
    case, sizes = case_of("matrix", recipe)
    lhs, rhs, ct = operands(case, sizes)
    check(case, lhs, rhs.astype(jnp.bfloat16), ct)


def test_preferred_element_type() -> None:
    """Float32 sums may leave the product, as their cotangents come in."""
    case, sizes = case_of("matrix", "tensorwise")
    x, w, ct = operands(case, sizes)
    check(case, x, w, ct.astype(jnp.float32), preferred_element_type=jnp.float32)


@main_recipes
def test_an_overflow_is_seen(recipe: str) -> None:
    """Infinities and NaN reach the result and the gradients; clipping does not hide them.

    With one scale for all, all is NaN. With a scale for each row, the row is.
    """
    product, x, w, ct = matrices(recipe)
    for bad in (jnp.inf, -jnp.inf, jnp.nan):
        y, pull = jax.vjp(product, x.at[3, 5].set(bad), w)
        dx, dw = (np.asarray(g, np.float32) for g in pull(ct))
        y = np.asarray(y, np.float32)
        assert np.isnan(y[3]).all()
        assert not np.isfinite(dw).all()
        assert np.isfinite(dx).all()  # which does not depend on x
        if recipe == "tensorwise":
            assert np.isnan(y).all()
            assert np.isnan(dw).all()
        y, pull = jax.vjp(product, x, w)
        assert np.isfinite(np.asarray(y, np.float32)).all()
        dx, dw = (np.asarray(g, np.float32) for g in pull(ct.at[2, 1].set(bad)))
        assert np.isnan(dx[2]).all() or not np.isfinite(dx[2]).any()
        assert not np.isfinite(dw).all()
        if recipe == "tensorwise":
            assert np.isnan(dx).all()
            assert np.isnan(dw).all()


@each_recipe
def test_zeros_stay_zeros(recipe: str) -> None:
    product, x, w, ct = matrices(recipe)
    for i in range(3):
        args = [np.zeros_like(a) if i == j else a for j, a in enumerate((x, w, ct))]
        y, pull = jax.vjp(product, *args[:2])
        found = [np.asarray(a, np.float32) for a in (y, *pull(args[2]))]
        assert all(np.isfinite(a).all() for a in found)
        dependent = {0: (0, 2), 1: (0, 1), 2: (1, 2)}[i]
        assert [not a.any() for a in found] == [j in dependent for j in range(3)]


def test_gradients_below_the_range_of_float8_survive() -> None:
    """1e-10 is zero in float8; its scale brings it into range. A loss scale changes nothing."""
    product, x, w, ct = matrices(spread=1)
    _, pull = jax.vjp(product, x, w)
    large, small = pull(ct), pull(ct * jnp.bfloat16(2.0**-36))
    for a, b in zip(large, small, strict=True):
        np.testing.assert_array_equal(np.asarray(a) * 2.0**-36, np.asarray(b))
        assert np.asarray(b).any()
    assert not np.asarray((ct * 2.0**-36).astype(jnp.float8_e5m2)).astype(np.float32).any()


@pytest.mark.parametrize("dtype", ["int32", "complex64", "float64"])
def test_foreign_dtypes_are_left_alone(dtype: str) -> None:
    numbers = (((1,), (0,)), ((), ()))
    with jax.enable_x64(True):
        x, w = jnp.ones((16, 16), dtype), jnp.full((16, 16), 3, dtype)
        got = jaxmp.float8.dot_general(x, w, numbers)
        assert got.dtype == dtype
        np.testing.assert_array_equal(got, np.full((16, 16), 48))
        text = str(jax.make_jaxpr(lambda x, w: jaxmp.float8.dot_general(x, w, numbers))(x, w))
    assert "f8_" not in text


LEFT_OUT: dict[str, tuple[Any, Any, Any, dict[str, Any], str]] = {
    "K": ((32, 24), (24, 16), "mk,kn->mn", {}, "K = 24 is no multiple of 16"),
    "N": ((32, 16), (16, 24), "mk,kn->mn", {}, "N = 24 is no multiple of 16"),
    "one row": ((1, 16), (16, 32), "mk,kn->mn", {}, "M = 1: one row is read, not multiplied"),
    "vector": ((16, 16), (16,), "mk,k->m", {}, "it is no product of matrices"),
    "outer": ((16,), (16,), "m,n->mn", {}, "it is no product of matrices"),
    "precision": (
        (32, 16), (16, 16), "mk,kn->mn", {"precision": "highest"}, "it asks for a precision",
    ),
    "no recipe": ((32, 16), (16, 16), "mk,kn->mn", {"recipe": None}, "no recipe"),
}  # fmt: skip


@pytest.mark.parametrize("reason", LEFT_OUT)
def test_what_is_left_out_runs_in_16_bits_and_says_why(reason: str) -> None:
    """The gradient of its float32 weight is float32 all the same."""
    left, right, spec, options, text = LEFT_OUT[reason]
    x = jax.device_put(np.random.default_rng(0).normal(size=left).astype(jnp.bfloat16))
    w = jax.device_put(np.ones(right) / 3)
    tensorwise = get_recipe("tensorwise")
    assert tensorwise is not None
    numbers = Product(spec, tensorwise).numbers()
    options = {"recipe": "tensorwise", **options}
    run = functools.partial(jaxmp.float8.dot_general, dimension_numbers=numbers, **options)
    found = equations(jax.make_jaxpr(run)(x, w))
    (product,) = (e for e in found if e.primitive.name == "dot_general")
    assert {str(v.aval.dtype) for v in product.invars} == {"bfloat16"}
    assert str(product.source_info.name_stack) == f"jaxmp.not_float8:{text}"
    y, pull = jax.vjp(run, x, w)
    assert (y.dtype, pull(y)[1].dtype) == (jnp.bfloat16, jnp.float32)
    want = np.einsum(spec, np.asarray(x, np.float64), np.asarray(w.astype(x.dtype), np.float64))
    assert error(y, want) < UNIT["bfloat16"]


LEFT_OUT_OF_BLOCKS = {
    "K": ((32, 48), (48, 32), "K = 48 is no multiple of 32"),
    "N": ((32, 32), (32, 48), "N = 48 is no multiple of 32"),
    "no sum": ((32, 0), (0, 32), "K = 0, and blocks need a known size above 0"),
    "no rows": ((0, 32), (32, 32), "M = 0, and blocks need a known size above 0"),
    "no columns": ((32, 32), (32, 0), "N = 0, and blocks need a known size above 0"),
}


@pytest.mark.parametrize("reason", LEFT_OUT_OF_BLOCKS)
def test_what_is_left_out_of_blocks(reason: str) -> None:
    left, right, text = LEFT_OUT_OF_BLOCKS[reason]
    x, w = np.ones(left, jnp.bfloat16), np.ones(right, np.float32)
    numbers = (((1,), (0,)), ((), ()))
    run = functools.partial(
        jaxmp.float8.dot_general, dimension_numbers=numbers, recipe="mxfp8:minimum=none"
    )
    (product,) = (
        e for e in equations(jax.make_jaxpr(run)(x, w)) if e.primitive.name == "dot_general"
    )
    assert str(product.source_info.name_stack) == f"jaxmp.not_float8:{text}"
    y, pull = jax.vjp(run, x, w)
    np.testing.assert_array_equal(np.asarray(y, np.float32), np.asarray(x, np.float32) @ w)
    assert [g.shape for g in pull(y)] == [left, right]


@main_recipes
def test_no_experts_and_no_elements(recipe: str) -> None:
    """Nothing shared, or a `vmap` over nothing: empty results, and no error."""
    x, w = np.ones((0, 32, 64), jnp.bfloat16), np.ones((0, 64, 32), np.float32)
    shared = functools.partial(
        jaxmp.float8.dot_general, dimension_numbers=(((2,), (1,)), ((0,), (0,))), recipe=recipe
    )
    mapped = jax.vmap(matrices(recipe)[0])
    for product in (shared, mapped):
        y, pull = jax.vjp(product, x, w)
        assert [a.shape for a in (y, *pull(y))] == [(0, 32, 32), x.shape, w.shape]


def products_of(function: Callable[..., Any], *args: Any) -> list[tuple[str, ...]]:
    """Operands, result and precision of every product in a program, those of derivatives too."""
    found = []
    for equation in equations(jax.make_jaxpr(function)(*args)):
        if equation.primitive.name == "dot_general":
            dtypes = [str(v.aval.dtype) for v in (*equation.invars, *equation.outvars)]
            precision = equation.params["precision"]
            asked = {each.name for each in precision or [jax.lax.Precision.DEFAULT]}
            found.append((*dtypes, *asked))
    return found


E4, E5, B16, F32 = "float8_e4m3fn", "float8_e5m2", "bfloat16", "float32"


def test_which_format_and_precision_each_product_has() -> None:
    """Only derivatives are e5m2, backward products add up in float32: HIGHEST asks for that."""
    product, x, w, ct = matrices()
    assert products_of(product, x, w) == [(E4, E4, B16, "DEFAULT")]
    found = products_of(lambda x, w, ct: jax.vjp(product, x, w)[1](ct), x, w, ct)
    assert sorted(found) == sorted(
        [(E4, E4, B16, "DEFAULT"), (E5, E4, B16, "HIGHEST"), (E4, E5, F32, "HIGHEST")]
    ) or sorted(found) == sorted(
        [(E4, E4, B16, "DEFAULT"), (E5, E4, B16, "HIGHEST"), (E5, E4, F32, "HIGHEST")]
    )
    tangents = products_of(lambda x, w: jax.jvp(product, (x, w), (x, w)), x, w)
    assert collections.Counter(tangents) == {
        (E4, E4, B16, "DEFAULT"): 1, (E5, E4, B16, "HIGHEST"): 1, (E4, E5, B16, "HIGHEST"): 1,
    }  # fmt: skip


@pytest.mark.parametrize("recipe", ["rowwise", "rowwise_hp"])
def test_products_of_other_recipes(recipe: str) -> None:
    product, x, w, ct = matrices(recipe)
    found = products_of(lambda x, w, ct: jax.vjp(product, x, w)[1](ct), x, w, ct)
    pairs = collections.Counter(tuple(sorted(each[:2])) for each in found)
    narrow, eight = (B16, B16), (E4, E4)
    want = {"rowwise": {eight: 3}, "rowwise_hp": {eight: 2, narrow: 1}}
    assert pairs == want[recipe]
    assert [each[2] for each in found].count(F32) == 1


def multiplications(jaxpr: Any, shape: tuple[int, ...]) -> list[tuple[Any, str]]:
    """What arrays of a shape, or its transpose, are multiplied by: shapes and dtypes."""
    found = []
    for equation in equations(jaxpr):
        made = equation.outvars[0].aval.shape
        if equation.primitive.name == "float8_scale_back":  # the forward pass, without a derivative
            product, scale = (v.aval for v in equation.invars)
            found += multiplications(
                jax.make_jaxpr(lambda x, s: without_scale(x, s, x.dtype))(product, scale), shape
            )
        if equation.primitive.name == "mul" and made in (shape, shape[::-1]):
            (other,) = (v.aval for v in equation.invars if v.aval.shape != made)
            found.append((other.shape, str(other.dtype)))
    return found


def test_a_result_is_scaled_by_one_number_in_its_own_dtype() -> None:
    """Of two numbers compilers fold one into the product; in float32 they add a pass."""
    product, x, w, ct = matrices()
    jaxpr = jax.make_jaxpr(lambda x, w, ct: jax.vjp(product, x, w)[1](ct))(x, w, ct)
    shapes = {"y": ct.shape, "dx": x.shape, "dw": w.shape}
    found = {name: multiplications(jaxpr, shape) for name, shape in shapes.items()}
    assert found == {"y": [((), B16)], "dx": [((), B16)], "dw": [((), F32)]}
    any_scale, *_ = matrices("tensorwise:power_of_two=false")
    jaxpr = jax.make_jaxpr(any_scale)(x, w)  # control: not exact in bfloat16
    assert multiplications(jaxpr, ct.shape) == [((), F32)]


@pytest.mark.parametrize(("recipe", "kept"), [("tensorwise", E4), ("rowwise", None)])
def test_the_backward_pass_reads_codes(recipe: str, kept: str | None) -> None:
    """One byte for each number: both operands of both backward products come as codes."""
    product, x, w, ct = matrices(recipe)
    jaxpr = jax.make_jaxpr(lambda x, w, ct: jax.vjp(product, x, w)[1](ct))(x, w, ct)
    backward = [e for e in equations(jaxpr) if e.primitive.name == "low_precision_product"]
    assert len(backward) == 2
    read = [{str(v.aval.dtype) for v in each.invars[:2]} - {str(ct.dtype)} for each in backward]
    assert read == ([{kept}] * 2 if kept else [{F32}, set()]) or read == [set(), {F32}]
    encoded = [e for e in equations(jaxpr) if e.primitive.name == "float8_encode"]
    outer = [e for e in jaxpr.jaxpr.eqns if e.primitive.name == "float8_encode"]
    assert len(outer) == 2
    # Of the backward pass of a tensor, only the cotangent is rounded, once for each product.
    inside = collections.Counter(str(e.outvars[0].aval.dtype) for e in encoded)
    assert inside == ({E4: 2, E5: 2} if kept else {E4: 6})


def test_one_trace() -> None:
    """Equal products share their maps, so that jit caches find them, and compile once."""
    float8_map.cache_clear()
    product, x, w, ct = matrices()
    traces = []

    @jax.jit
    def step(x: Any, w: Any, ct: Any) -> Any:
        traces.append(1)
        return jax.vjp(product, x, w)[1](ct)

    for scale in (1.0, 2.0, 3.0):
        step(x * scale, w, ct)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            step(x, w * scale, ct)
    assert len(traces) == 1
    assert float8_map.cache_info().misses == 1
    jax.make_jaxpr(lambda x, w: product(x, w))(x, w)
    assert float8_map.cache_info().misses == 1
    jax.make_jaxpr(matrices("rowwise")[0])(x, w)
    assert float8_map.cache_info().misses == 2
