"""Is it running in float8? What an audit says of the traced and of the compiled program."""

import pathlib
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import jaxmp
from jaxmp._tools.inspect.api import AuditError, AuditReport, audit
from jaxmp._tools.inspect.collectives import collectives
from tests.support.audit_lines import array, line_of

pytestmark = pytest.mark.annotations

BF16, F32 = jnp.bfloat16, jnp.float32
E4M3, E5M2 = "float8_e4m3fn", "float8_e5m2"
HLO = pathlib.Path(__file__).parents[1] / "hlo" / "programs"
# Two square layers, 40 columns that no tensor core takes, and a product of activations.
M, N, ODD = 32, 64, 40
LAYER, LAST, SCORES = 2 * M * N * N, 2 * M * N * ODD, 2 * M * M * N


PARAMS = {"first": array(N, N), "second": array(N, N), "last": array(N, ODD)}
X = array(M, N)


def loss(params: Any, x: Any) -> Any:
    x = jnp.tanh(x @ params["first"])
    x = jnp.tanh(x @ params["second"])
    scores = x @ x.T
    with jax.named_scope("tail"):
        y = x @ params["last"]  # odd
    return jnp.mean(y**2) + jnp.mean(scores**2)


def policy(recipe: str) -> str:
    return f"params=float32,compute=bfloat16,output=float32,products={recipe}"


def of(recipe: str, grad: bool = True) -> AuditReport:
    fun = jaxmp.autocast(loss, policy(recipe))
    return audit(jax.value_and_grad(fun) if grad else fun, PARAMS, X)


@pytest.fixture(scope="module")
def tensorwise() -> AuditReport:
    return of("tensorwise")


def flops_in_float8(report: AuditReport) -> dict[Any, int]:
    found: dict[Any, int] = {}
    for row in report.product_lines:
        if "float8" in "".join(row.operands):
            key = (*sorted(row.operands), row.result, row.direction)
            found[key] = found.get(key, 0) + row.flops
    return found


def test_rows_of_both_passes(tensorwise: AuditReport) -> None:
    """The gradient of `first` by its input does not exist: x is no param."""
    assert flops_in_float8(tensorwise) == {
        (E4M3, E4M3, "bfloat16", "forward"): 2 * LAYER,
        (E4M3, E5M2, "float32", "backward"): 2 * LAYER,
        (E4M3, E5M2, "bfloat16", "backward"): LAYER,
    }


def test_products_of_blocks() -> None:
    """All three of a product have codes with scales; each rounds its operands along its own sum."""
    fun = jax.value_and_grad(jaxmp.autocast(loss, policy("mxfp8")))
    rows = 2 * M  # sums of less than 64 numbers are padded
    report = audit(fun, PARAMS, array(rows, N))
    assert flops_in_float8(report) == {
        (E4M3, E4M3, "bfloat16", "forward"): 4 * LAYER,
        (E4M3, E4M3, "float32", "backward"): 4 * LAYER,
        (E4M3, E4M3, "bfloat16", "backward"): 2 * LAYER,
    }
    assert [row.reason for row in report.left_out] == [f"N = {ODD} is no multiple of 32"]
    codes = sum(row.bytes for row in report.converts if row.target == E4M3)
    # The operands of all products; the first layer has no gradient of its input.
    assert codes == (3 + 4) * rows * N + (1 + 2) * N * N


def test_what_is_left_out(tensorwise: AuditReport) -> None:
    (row,) = tensorwise.left_out
    assert (row.reason, row.path) == (f"N = {ODD} is no multiple of 16", "tail")
    assert row.line == line_of("odd", "loss")
    assert (row.count, row.runs, row.flops) == (3, 3, 3 * LAST)
    assert "Left out of 8 bits" in str(tensorwise)


def test_the_reason_is_no_module(tensorwise: AuditReport) -> None:
    rows = (
        *(tensorwise.product_lines + tensorwise.upcasts + tensorwise.collectives),
        *(of("tensorwise", grad=False).residuals or ()),
    )
    assert {row.path for row in rows} == {"", "tail"}


def test_the_reason_is_no_module_of_a_compiled_program() -> None:
    name = "jit(f)/transpose(jvp(LM))/head/jaxmp.not_float8:heads/psum"
    report = collectives(
        "HloModule test, num_partitions=2\n\n%add (x: f32[], y: f32[]) -> f32[] {\n"
        "  %x = f32[] parameter(0)\n  %y = f32[] parameter(1)\n"
        "  ROOT %sum = f32[] add(%x, %y)\n}\n\nENTRY %main (p: f32[8]) -> f32[8] {\n"
        "  %p = f32[8] parameter(0)\n  ROOT %s = f32[8] all-reduce(%p), "
        f'replica_groups={{{{0,1}}}}, to_apply=%add, metadata={{op_name="{name}"}}\n}}\n'
    )
    assert [row.path for row in report] == ["LM/head"]


def test_gradients_that_a_recipe_leaves_in_bfloat16() -> None:
    report = of("rowwise_hp")
    reason = "rowwise_hp has gradients of weights in bfloat16"
    assert [row.flops for row in report.left_out if row.reason == reason] == [LAYER, LAYER]
    assert sum(row.flops for row in report.left_out) == 2 * LAYER + 3 * LAST


def test_rows_of_int8() -> None:
    """Sums are int32, weights are kept as codes, and why the rest is in 16 bits is said."""
    report = of("int8")
    rows = [row for row in report.product_lines if "int8" in row.operands]
    assert {(row.operands, row.result) for row in rows} == {(("int8", "int8"), "int32")}
    assert sorted(row.direction for row in rows) == ["backward", "forward", "forward"]
    reason = "int8 has gradients of weights in bfloat16"
    assert [row.flops for row in report.left_out if row.reason == reason] == [LAYER, LAYER]
    kept = of("int8", grad=False).residuals or ()
    assert ("int8", "params", N * N) in {(row.dtype, row.kind, row.bytes) for row in kept}
    assert report.check(products=("int8", "bfloat16")) is report
    assert f"(N = {ODD} is no multiple of 16)" in "".join(message(report, products="int8"))
    # Float8 in place of it is seen.
    assert of("tensorwise").share("int8") == 0
    assert report.share("float8") == 0 < report.share("int8")


def test_long_sums_of_int8_show_what_they_were_rounded_to() -> None:
    """32 bits do not hold 2**18 products of 127 by 127: they are decoded before."""
    x, w = array(16, 2**18), array(2**18, 16)
    row = audit(jaxmp.autocast(lambda x, w: x @ w, policy("int8")), x, w).product_lines[0]
    assert (row.operands, row.rounded_to) == (("float32", "float32"), ("int8", "int8"))


@pytest.mark.parametrize(
    ("fun", "want"),
    [
        (lambda x, w: (x.astype(E4M3).astype(BF16) / 3) @ w, (E4M3, "bfloat16")),
        (
            lambda x, w: jax.jit(lambda y: y.T)(x.astype(E5M2)).T.astype(BF16) @ w,
            (E5M2, "bfloat16"),
        ),
        (lambda x, w: (x.astype(E4M3).astype(BF16) * x) @ w, ()),
        (lambda x, w: jnp.tanh(x.astype(E4M3).astype(BF16)) @ w, ()),
        (lambda x, w: x.astype(E4M3) @ w.astype(E4M3), ()),
        # In the second turn of the loop it is another value.
        (
            lambda x, w: jax.lax.scan(
                lambda c, _: (jnp.tanh(c @ w), None), x.astype(E4M3).astype(BF16), length=2
            )[0],
            (),
        ),
    ],
)
def test_code_that_rounds_by_itself(fun: Any, want: tuple[str, ...]) -> None:
    report = audit(fun, array(M, N, dtype=BF16), array(N, N, dtype=BF16))
    assert [row.rounded_to for row in report.products] == [want]


def test_casts_and_what_they_read_before(tensorwise: AuditReport) -> None:
    """Codes have a byte for each number; amax reads the array in the dtype that it has."""
    found = {(row.source, row.target): row for row in tensorwise.converts}
    given, size = found["float32", E4M3], 2 * N * N + M * N  # two weights, and x
    assert (given.count, given.bytes, given.amax_bytes) == (3, size, 4 * size)
    made, size = found["bfloat16", E4M3], M * N
    assert (made.count, made.bytes, made.amax_bytes) == (1, size, 2 * size)
    assert found["float32", "bfloat16"].amax_bytes == 0
    assert found["bfloat16", E5M2].bytes == found["bfloat16", E5M2].amax_bytes // 2 > 0


def message(report: AuditReport, **expected: Any) -> list[str]:
    with pytest.raises(AuditError) as caught:
        report.check(**expected)
    return str(caught.value).splitlines()


def test_the_check_is_a_share_of_flops(tensorwise: AuditReport) -> None:
    share = 5 * LAYER / (5 * LAYER + 3 * LAST + 3 * SCORES)
    assert tensorwise.share("float8") == pytest.approx(share)
    assert tensorwise.check(products="float8", share=share) is tensorwise
    assert tensorwise.check(products=("float8", "bfloat16")) is tensorwise
    lines = message(tensorwise, products="float8")
    assert "have operands in float8, wanted at least 100.0 %" in lines[1]
    odd = [line for line in lines if line_of("odd", "loss") in line]
    assert odd
    assert all(f"(N = {ODD} is no multiple of 16)" in line for line in odd)
    others = [line for line in lines[2:] if line not in odd]
    assert others
    assert all("(no operand is a param under a policy in 8 bits, or" in line for line in others)


def test_the_check_says_what_is_emulated() -> None:
    def emulated(x: Any, w: Any) -> Any:
        x, w = (each.astype(E4M3).astype(BF16) for each in (x, w))
        return x @ w

    report = audit(emulated, array(M, N, dtype=BF16), array(N, N, dtype=BF16))
    assert report.share("float8") == 0
    assert "rounded to" in str(report)
    lines = message(report, products="float8", share=0.1)
    assert "products: 0.0 % of their FLOPs" in lines[1]
    want = f"(rounded to {E4M3} x {E4M3}, and widened before the product)"
    assert any(want in line for line in lines)


def test_other_checks_give_no_reasons(tensorwise: AuditReport) -> None:
    assert not any("(N = " in line for line in message(tensorwise, products="float32"))


def compiled(name: str) -> AuditReport:
    fun = jaxmp.autocast(loss, "mixed_float8")
    text = (HLO / f"{name}.txt").read_text()
    return audit(jax.grad(fun), PARAMS, X, compiled=text)


def test_the_compiled_program_has_the_last_word() -> None:
    """The traced program is in float8 each time."""
    given: dict[str, Any] = {"products": "float8", "share": 0.5}
    assert compiled("float8/cublas").check(**given)
    assert compiled("float8/tpu").check(**given)
    wide = message(compiled("float8/widened"), **given)
    assert wide[1] == "products: the compiler widened 8-bit operands of these:"
    assert len([line for line in wide if "widened to " in line]) == 3
    fused = compiled("float8/fusions")
    assert message(fused, **given)[1].startswith("unseen: whether the kernels of these fusions")
    assert fused.check(**given, allow_unseen="fusion") is fused
    none = message(compiled("gpu_every_kind"), **given)
    assert none[1] == "products: the given program has none with 8-bit operands."


def test_the_compiled_program_prints() -> None:
    assert "│ float8  │" in str(compiled("float8/cublas"))
    assert "│ widened to float16  │" in str(compiled("float8/widened"))
    assert "fusions with products of 8-bit operands (3): whether" in str(compiled("float8/fusions"))
    assert "TPUs before 7x widen" in str(compiled("float8/tpu"))
    gone = " ".join(str(compiled("gpu_every_kind")).split())
    assert "Where the 8-bit operands are: no product of the given program has one." in gone
    assert "Where the 8-bit operands are" not in str(compiled("float8/cublas"))


@pytest.mark.usefixtures("unchecked")
def test_a_program_for_a_cpu_has_float8_operands() -> None:
    fun = jaxmp.autocast(loss, "mixed_float8")
    report = audit(jax.grad(fun), PARAMS, X, compiled=True)
    rows = report.compiled.float8_products
    assert sum(row.runs for row in rows) == 5
    assert {row.ran for row in rows} == {"float8 operands"}
    assert {row.path for row in rows} == {""}


def kept(fun: Any, *args: Any) -> dict[str, int]:
    return {dtype: size for dtype, size in audit(fun, *args).kept.items() if size > 4 * N}


def layers(products: str) -> Any:
    """Layers without anything between them, so that only products ask for activations."""

    def chain(params: Any, x: Any) -> Any:
        x = jnp.tanh(x)
        for w in params:
            x = x @ w
        return jnp.sum(x)

    return jaxmp.autocast(chain, products)


def scanned(products: str) -> Any:
    def chain(params: Any, x: Any) -> Any:
        return jnp.sum(jax.lax.scan(lambda x, w: (x @ w, None), jnp.tanh(x), params)[0])

    return jaxmp.autocast(chain, products)


@pytest.mark.parametrize(
    ("make", "params"), [(layers, [array(N, N)] * 3), (scanned, array(3, N, N))]
)
def test_float8_keeps_one_byte_for_each_activation(make: Any, params: Any) -> None:
    """The wide activations are operands, too, but for second derivatives: no pass reads them."""
    assert kept(make("mixed_bfloat16"), params, X) == {"bfloat16": 3 * M * N * 2}
    assert kept(make("mixed_float8"), params, X) == {E4M3: 3 * M * N}


def test_codes_of_params_are_copies_of_params() -> None:
    report = audit(layers("mixed_float8"), [array(N, N)] * 3, X)
    # The first weight is not read: no gradient of x is asked for. Scales are 4 bytes.
    assert report.param_copy_bytes == 2 * (N * N + 4)
