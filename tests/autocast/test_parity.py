"""The dtype of every operation is that of `torch.autocast` on CUDA, or stands below with a reason.

Twice: for 16-bit arguments, and for activations that autocast itself has made 16-bit. The second is
what happens in models, the first has casts in it that `jnp` makes for 16-bit operands.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import jaxmp
from tests.support.torch_operations import OPERATIONS, REFUSED, WHY, Operation, Way, row

PARITY = json.loads((Path(__file__).parents[1] / "parity/autocast_result_dtypes.json").read_text())
EXTRA = {each["name"]: each for each in PARITY["extra"]}
LOWS = ("bfloat16", "float16")
WITH_LOW = ("lp,lp", "f32,lp", "lp,f32")

pytestmark = pytest.mark.usefixtures("standard_promotion")


def run(operation: Operation, operands: str, low: str, way: Way, **options: Any) -> str:
    """The dtype that an operation gives under autocast."""
    dtypes = [{"f32": "float32", "f64": "float64", "lp": low}[each] for each in operands.split(",")]
    multiply = [way == "activations" and dtype == low for dtype in dtypes]

    def fun(*args: Any) -> Any:
        *values, weights = args
        made = zip(values, multiply, strict=True)
        return operation(*(value @ weights if low else value for value, low in made))

    with jax.enable_x64("f64" in operands):
        given = ["float32" if makes else name for makes, name in zip(multiply, dtypes, strict=True)]
        shapes = [jax.ShapeDtypeStruct((4, 4), name) for name in (*given, "float32")]
        cast = jaxmp.autocast(fun, f"mixed_{low}", output="computed", **options)
        return str(jax.eval_shape(cast, *shapes).dtype)


def differences(name: str, **options: Any) -> set[tuple[str, Way, str, str]]:
    """Where the dtype is another than PyTorch's, and which it is."""
    found = set()
    for low in LOWS:
        answers = PARITY["results"][f"cuda_{low}"][name]["result"]
        for operands, want in answers.items():
            ways: tuple[Way, ...] = ("arguments", "activations")
            for way in ways if operands in WITH_LOW else ways[:1]:
                refused = name in REFUSED and way == "arguments" and operands.startswith("lp")
                if refused or want.startswith("ERR"):
                    continue
                got = run(OPERATIONS[name], operands, low, way, **options)
                if got != want:
                    found.add((operands, way, low, got))
    return found


def listed(name: str) -> set[tuple[str, Way, str, str]]:
    """What the table says about an operation."""
    return {
        (operands, each.way, low, low if each.dtype == "lp" else each.dtype)
        for each in WHY.get(name, ([], ""))[0]
        for operands in each.operands.split()
        for low in LOWS
        if each.low in (None, low)
    }


@pytest.mark.parametrize("name", OPERATIONS)
def test_an_operation_has_the_dtype_of_torch_autocast(name: str) -> None:
    found, known = differences(name), listed(name)
    assert not found - known, "differs from PyTorch, which the table does not say"
    assert not known - found, "the table lists differences that are none any more"


def test_the_table_is_complete_and_has_reasons() -> None:
    answered = {
        name
        for low in LOWS
        for name, each in PARITY["results"][f"cuda_{low}"].items()
        if not all(want.startswith("ERR") for want in each["result"].values())
    }
    assert set(OPERATIONS) == answered
    assert set(WHY) <= set(OPERATIONS)
    assert all(where and why.endswith(".") for where, why in WHY.values())


def test_a_difference_would_be_found() -> None:
    assert differences("exp") == set()
    lost = differences("exp", promote=["exp"])
    assert ("lp,lp", "activations", "float16", "float16") in lost
    assert ("lp,f32", "arguments", "bfloat16", "bfloat16") in lost
    assert differences("tanh", float32=["tanh"])
    assert {way for _, way, _, _ in differences("matmul", promote=["dot_general"])} == {
        "arguments",
        "activations",
    }


# Of PyTorch's list for 16 bits, what FakeTensor has no kernel for: the list is the answer.
_IMAGES = ("NHWC", "HWIO", "NHWC")
LISTED: dict[str, Operation] = {
    "mv": lambda x, y: x @ row(y),
    "bmm": lambda x, y: x[None] @ y[None],
    "conv1d": lambda x, y: lax.conv(x[None], y[:, :, None], (1,), "SAME"),
    "conv2d": lambda x, y: lax.conv_general_dilated(
        x[None, None], y[None, None], (1, 1), "SAME", dimension_numbers=_IMAGES
    ),
    "conv_transpose2d": lambda x, y: lax.conv_transpose(
        x[None, None], y[None, None], (2, 2), "SAME", dimension_numbers=_IMAGES
    ),
    "scaled_dot_product_attention": lambda x, y: jax.nn.dot_product_attention(
        x[None, :, None], y[None, :, None], y[None, :, None]
    ),
}


@pytest.mark.parametrize("low", LOWS)
@pytest.mark.parametrize("name", LISTED)
def test_products_that_only_have_a_place_in_the_list(name: str, low: str) -> None:
    for operands in ("f32,f32", *WITH_LOW):
        assert run(LISTED[name], operands, low, "activations") == low
    assert run(LISTED[name], "f32,f32", low, "activations", promote=_PRODUCTS) == "float32"


_PRODUCTS = ("dot_general", "conv_general_dilated")


@pytest.mark.parametrize("low", LOWS)
def test_prelu_is_elementwise(low: str) -> None:
    """In PyTorch's list, for the sake of its kernel; here it follows what it is applied to."""

    def prelu(x: Any, y: Any) -> Any:
        return jnp.where(x >= 0, x, row(y) * x)

    assert run(prelu, "lp,f32", low, "activations") == low
    assert run(prelu, "lp,lp", low, "activations") == low
    assert run(prelu, "f32,f32", low, "activations") == "float32"


X = np.linspace(0.1, 1.0, 16, dtype=np.float32).reshape(4, 4)


def test_a_third_dtype() -> None:
    torch = EXTRA["other_low_precision_dtype"]
    half, brain = jnp.float16(X), jnp.bfloat16(X)

    def dtype(fun: Callable[..., Any], *args: Any) -> str:
        return str(jaxmp.autocast(fun, "mixed_bfloat16", output="computed")(*args).dtype)

    assert dtype(jnp.add, half, brain) == torch["add_f16_bf16"] == "float32"
    # Not cast to bfloat16, as PyTorch does: whoever multiplies float16 arrays has chosen them.
    assert torch["matmul_f16_under_bf16"] == "bfloat16"
    assert dtype(jnp.matmul, half, half) == "float16"
    # PyTorch raises; JAX has an answer.
    assert torch["cat_f16_bf16"].startswith("ERR")
    assert dtype(lambda x, y: jnp.concatenate([x, y]), half, brain) == "float32"


def test_a_block() -> None:
    """Linear, layer norm, residual; on CUDA, layer norm is in float32 for PyTorch too."""
    torch = EXTRA["linear->layernorm->residual"]

    def block(x: Any, w: Any) -> Any:
        linear = x @ w
        normal = OPERATIONS["layer_norm"](linear, None)
        return linear, normal, x + normal

    cast = jaxmp.autocast(block, "mixed_bfloat16", output="computed")
    linear, normal, out = (str(each.dtype) for each in cast(X, X))
    assert (linear, out) == (torch["linear"], torch["residual_add_f32_x"])
    assert normal == PARITY["results"]["cuda_bfloat16"]["layer_norm"]["result"]["lp,lp"]
