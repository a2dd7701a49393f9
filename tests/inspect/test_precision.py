"""An audit says what float32 products are on a TPU and on a GPU, and a check can ask for it."""

from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax import lax

import jaxmp

pytestmark = [pytest.mark.annotations, pytest.mark.jax]
X = jax.ShapeDtypeStruct((8, 8), jnp.float32)
LOW = jax.ShapeDtypeStruct((8, 8), jnp.bfloat16)
# As compiled programs have it: tests/aot/test_precision.py.
DEVICES = {
    None: ("default", "bf16 x 1", "TF32"),
    "default": ("default", "bf16 x 1", "TF32"),
    "high": ("high", "bf16 x 3", "TF32 or float32"),
    "tensorfloat32": ("high", "bf16 x 3", "TF32 or float32"),
    "highest": ("highest", "bf16 x 6", "float32"),
    (lax.Precision.HIGHEST, lax.Precision.HIGH): ("high", "bf16 x 3", "TF32 or float32"),
    "BF16_BF16_F32_X3": ("BF16_BF16_F32_X3", "bf16 x 3", "bf16 x 3"),
    "TF32_TF32_F32": ("TF32_TF32_F32", "refused", "TF32"),
    "F32_F32_F32": ("F32_F32_F32", "refused", "float32"),
}


@pytest.mark.parametrize(("precision", "shown"), DEVICES.items(), ids=map(str, DEVICES))
def test_what_a_product_is(precision: Any, shown: tuple[str, str, str]) -> None:
    report = jaxmp.audit(lambda x, w: jnp.matmul(x, w, precision=precision), X, X)
    for row in (*report.products, *report.product_lines):
        assert (row.precision, row.tpu, row.gpu) == shown
    assert f"{shown[1]} / {shown[2]}" in str(report)
    # Products of 16 bits have none of it.
    (low,) = jaxmp.audit(lambda x, w: jnp.matmul(x, w, precision=precision), LOW, LOW).products
    assert (low.precision, low.tpu, low.gpu) == ("", "", "")


def test_the_option_of_the_trace_is_seen() -> None:
    for level in ("default", "high", "highest"):
        with jax.default_matmul_precision(level):
            (row,) = jaxmp.audit(lambda x, w: x @ w, X, X).products
        assert row.precision == level


def loss(w: Any, x: Any) -> Any:
    return jnp.sum(jnp.tanh(x @ w))


def exact_head(w: Any, x: Any) -> Any:
    return jnp.sum(jaxmp.full_precision(lambda x: x @ w)(jnp.tanh(x @ w)))


def test_rows_of_one_dtype_and_two_precisions() -> None:
    report = jaxmp.audit(exact_head, X, X)
    assert {(row.precision, row.count) for row in report.products} == {
        ("default", 1),
        ("highest", 1),
    }
    assert sum(row.share for row in report.products) == 1


def test_a_check_that_float32_is_float32() -> None:
    """Passes for exact parts in 16 bits; fails with the line, what it is there and what to do."""
    mixed = jax.grad(jaxmp.autocast(exact_head, "mixed_bfloat16"))
    report = jaxmp.audit(mixed, X, X)
    assert report.check(precision="highest") is report
    assert report.check(precision=lax.Precision.HIGH, products=("float32", "bfloat16")) is report
    with pytest.raises(jaxmp.AuditError) as error:  # positive control: plain JAX
        jaxmp.audit(jax.grad(loss), X, X).check(precision="highest")
    lines = str(error.value).splitlines()
    assert lines[1] == (
        "precision: float32 products should ask for highest, these ask for less. A float32 policy "
        "or rule, jaxmp.full_precision around them, or precision='highest' in them does it:"
    )
    assert lines[2].startswith(
        "  50.0 %  float32 x float32, default: bf16 x 1 on a TPU, TF32 on a GPU  at test_precision"
    )
    assert [line.rpartition(", ")[2] for line in lines[2:]] == ["forward", "backward"]


@pytest.mark.parametrize(
    ("asked", "least", "passes"),
    [
        ("high", "high", True),
        ("high", "highest", False),
        ("BF16_BF16_F32_X3", "high", True),
        ("BF16_BF16_F32", "high", False),
        ("BF16_BF16_F32_X3", "highest", False),
        ("BF16_BF16_F32_X6", "highest", True),
        ("TF32_TF32_F32", "highest", False),
    ],
)
def test_what_is_enough(asked: str, least: str, passes: bool) -> None:
    report = jaxmp.audit(lambda x, w: jnp.matmul(x, w, precision=asked), X, X)
    if passes:
        assert report.check(precision=least) is report
    else:
        with pytest.raises(jaxmp.AuditError, match=f"should ask for {least}"):
            report.check(precision=least)


def test_a_check_does_not_pass_in_silence() -> None:
    with pytest.raises(jaxmp.AuditError, match="the program has no float32 product"):
        jaxmp.audit(lambda x, w: x @ w, LOW, LOW).check(precision="highest")
    with pytest.raises(jaxmp.AuditError, match=r"unseen: .*cholesky"):
        jaxmp.audit(lambda x: jnp.linalg.cholesky(x @ x), X).check(precision="high")
    report = jaxmp.audit(lambda x, w: x @ w, X, X)
    for wrong in ("default", "TF32_TF32_F32"):
        with pytest.raises(ValueError, match=f"'high' or 'highest', got '{wrong}'"):
            report.check(precision=wrong)
    with pytest.raises(ValueError, match="Did you mean 'highest'"):
        report.check(precision="higest")


def test_a_custom_vjp_shows() -> None:
    """JAX traces its backward pass outside of the exact part, and the audit has its lines."""

    @jax.custom_vjp
    def product(x: Any, w: Any) -> Any:
        return x @ w

    def backward(kept: Any, g: Any) -> Any:
        x, w = kept
        return g @ w.T, x.T @ g

    product.defvjp(lambda x, w: (product(x, w), (x, w)), backward)
    exact = jaxmp.full_precision(lambda w, x: jnp.sum(product(x, w)))
    report = jaxmp.audit(jax.grad(exact, (0, 1)), X, X)
    with pytest.raises(jaxmp.AuditError) as error:
        report.check(precision="highest")
    (line,) = str(error.value).splitlines()[2:]
    assert line.startswith("  66.7 %  float32 x float32, default")
    assert line.endswith(", backward")
