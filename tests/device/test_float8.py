"""Float8 products that run, against NumPy: in emulation, and as calls of cuBLAS where it has them.

Which kernel multiplies is for the compiler to choose. `WITHOUT_TRITON` it is cuBLAS, whose calls
say in which dtype. Compute capability 8.9 is the first with float8.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxmp
from jaxmp._policies.recipe import get_recipe
from tests.support.compiled import WITHOUT_TRITON, float8_calls
from tests.support.devices import needs_gpu
from tests.support.float8_references import Product, error

pytestmark = [pytest.mark.device, pytest.mark.jax]

RECIPES = ["tensorwise", "rowwise_hp"]
# Of the three products of a layer; the gradient of a weight is a product in bfloat16 in one recipe.
CALLS = {"tensorwise": 3, "rowwise_hp": 2}
# The result and the gradient of x are rounded to bfloat16. Sums of float8 products have 14 bits in
# the tensor cores of an H100, cut off at each step; rounding to float8 is 20 times as much.
BOUNDS = (2.0**-8, 2.0**-8, 2e-3)


def case_of(recipe: str) -> Product:
    read = get_recipe(f"{recipe}:minimum=none")
    return Product("mk,kn->mn", read)


def arrays() -> Any:
    random = np.random.default_rng(0)
    x, w, ct = (random.normal(size=size) for size in ((256, 512), (512, 384), (256, 384)))
    return jnp.asarray(x, jnp.bfloat16), jnp.asarray(w, jnp.float32), jnp.asarray(ct, jnp.bfloat16)


def layer(case: Product) -> Any:
    """The product of a case and both of its gradients."""

    def run(x: Any, w: Any, ct: Any) -> Any:
        def product(x: Any, w: Any) -> Any:
            return jaxmp.float8.dot_general(x, w, case.numbers(), recipe=case.recipe)

        y, pull = jax.vjp(product, x, w)
        return y, *pull(ct)

    return run


def check(case: Product, got: Any) -> None:
    """That result and gradients are those of the codes, and not those of the numbers."""
    wide = [np.asarray(a, np.float64) for a in arrays()]
    want = case.result(*wide[:2]), *case.gradients(*wide)
    exact = wide[0] @ wide[1], wide[2] @ wide[1].T, wide[0].T @ wide[2]
    for a, b, bound in zip(got, want, BOUNDS, strict=True):
        assert error(a, b) < bound
    # Positive control: what is not rounded to float8 is further away than any bound.
    rounded = case.recipe.weight_gradient != "bfloat16"
    for b, c in list(zip(want, exact, strict=True))[: 2 + rounded]:
        assert error(c, b) > 1e-2


@pytest.mark.parametrize("recipe", RECIPES)
def test_values_and_gradients(recipe: str) -> None:
    """With the kernels that the compiler chooses by itself."""
    case = case_of(recipe)
    check(case, jax.jit(layer(case))(*arrays()))


@pytest.mark.parametrize("recipe", RECIPES)
def test_calls_of_cublas(recipe: str) -> None:
    """The program has a float8 call for each product, and it is this program that is right."""
    needs_gpu("CPUs and older GPUs have no float8 products", capability=8.9)
    case = case_of(recipe)
    program = jax.jit(layer(case)).lower(*arrays()).compile(WITHOUT_TRITON)
    assert len(float8_calls(program.as_text())) == CALLS[recipe]
    check(case, program(*arrays()))


def test_autocast_puts_a_layer_in_float8() -> None:
    """Under the policy, with the values that the product itself has."""
    case = case_of("tensorwise")
    x, w, _ = arrays()
    policy = "mixed_float8,products=tensorwise:minimum=none"
    y = jax.jit(jaxmp.autocast(lambda x, w: x @ w, policy))(x.astype(jnp.float32), w)
    want = case.result(np.asarray(x, np.float64), np.asarray(w, np.float64))
    assert error(y, want) < BOUNDS[0]
