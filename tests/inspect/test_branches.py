"""Every branch of a conditional counts: a branch in float32 is not hidden by a larger one."""

import itertools
import random
from collections.abc import Callable
from fractions import Fraction
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.extend.core import Primitive
from jax.sharding import Mesh, PartitionSpec

import jaxmp
from jaxmp._tools.inspect.api import AuditError, audit
from jaxmp._tools.inspect.branches import BranchPart, Choice, least_share, most
from tests.support.audit_lines import line_of

BF16, F32 = jnp.bfloat16, jnp.float32
ONE = 2 * 8**3  # the FLOPs of a product of two squares
SQUARE = jax.ShapeDtypeStruct((8, 8), BF16)


def costly(a: Any) -> Any:
    return a @ a @ a


def wide(a: Any) -> Any:
    return (a.astype(F32) @ a.astype(F32)).astype(a.dtype)  # forgotten


def choose(a: Any, first: Any = costly, second: Any = wide) -> Any:
    """The first branch where the predicate holds; so it has index 1."""
    return lax.cond(a[0, 0] > 0, first, second, a)


def by_switch(a: Any, last: Any) -> Any:
    return lax.switch(jnp.int32(a[0, 0]), [costly, jnp.sin, costly, last], a)


def by_platform(a: Any, last: Any) -> Any:
    return lax.platform_dependent(a, cpu=costly, tpu=last, default=costly)


def nested(a: Any, last: Any) -> Any:
    return choose(a, costly, lambda a: choose(a, last, jnp.sin))


def in_scan(a: Any, last: Any) -> Any:
    return lax.scan(lambda c, _: (choose(c, costly, last), None), a, None, length=3)[0]


def in_while(a: Any, last: Any) -> Any:
    return lax.while_loop(lambda c: jnp.sum(costly(c)) < 9, lambda c: choose(c, costly, last), a)


def in_a_condition(a: Any, last: Any) -> Any:
    return lax.while_loop(lambda c: jnp.sum(choose(c, costly, last)) < 9, costly, a)


def in_remat(a: Any, last: Any) -> Any:
    f = jax.checkpoint(lambda a: choose(a, costly, last))
    return jax.grad(lambda a: jnp.sum(f(a).astype(F32)))(a)


def in_custom_vjp(a: Any, last: Any) -> Any:
    called = jax.custom_vjp(lambda a: choose(a, costly, last))
    called.defvjp(lambda a: (called(a), a), lambda a, g: (g,))
    return called(a)


def in_a_rule(a: Any, last: Any) -> Any:
    called = jax.custom_vjp(costly)
    called.defvjp(lambda a: (called(a), a), lambda a, g: (choose(g, costly, last),))
    return jax.grad(lambda a: jnp.sum(called(a).astype(F32)))(a)


def in_shard_map(a: Any, last: Any) -> Any:
    mesh = Mesh(jax.devices()[:2], ("x",))
    spec = PartitionSpec(None, None, "x")
    body = lambda a: choose(a[..., 0], costly, last)[..., None]  # noqa: E731
    stacked = jnp.stack([a, a], axis=-1)
    return jax.shard_map(body, mesh=mesh, in_specs=spec, out_specs=spec)(stacked)


WAYS = [
    *(by_switch, by_platform, nested, in_scan, in_while, in_a_condition),
    *(in_remat, in_custom_vjp, in_a_rule, in_shard_map),
]


@pytest.mark.parametrize("way", WAYS)
def test_a_branch_in_float32_fails_the_check(way: Callable[[Any, Any], Any]) -> None:
    """The branch is cheaper than the other, so that FLOPs alone would leave it out."""
    report = audit(lambda a: way(a, wide), SQUARE)
    for expected in ({"products": "bfloat16"}, {"upcasts": 0}):
        with pytest.raises(AuditError, match=r"\), .*branch [0-3f]") as caught:
            report.check(**expected)  # type: ignore[arg-type]
        # JAX gives all that a rule computes the line of the rule.
        assert way is in_a_rule or line_of("forgotten", "wide") in str(caught.value)
    assert report.share("bfloat16") < 1
    control = audit(lambda a: way(a, costly), SQUARE)
    assert control.check(products="bfloat16", upcasts=0).share("bfloat16") == 1


def test_flops_are_those_of_the_largest_branch() -> None:
    def f(i: Any, x: Any) -> Any:
        once, thrice = (lambda x: x @ x), (lambda x: x @ x @ x @ x)
        return lax.switch(i, [once, thrice, jnp.sin], x)

    report = audit(f, jax.ShapeDtypeStruct((), jnp.int32), jax.ShapeDtypeStruct((8, 8), F32))
    (row,) = report.products
    assert (row.count, row.runs, row.flops, row.share) == (4, 4, 3 * ONE, 1.0)
    assert report.flops == 3 * ONE
    assert report.count("sin") == 1
    assert any("branches of cond and switch (1)" in text for text in report.unseen)


def test_shares_are_the_smallest_that_any_branch_gives() -> None:
    def f(i: Any, a: Any) -> Any:
        return a @ lax.switch(i, [wide, costly, jnp.sin], a)

    report = audit(f, jax.ShapeDtypeStruct((), jnp.int32), SQUARE)
    assert report.flops == 3 * ONE
    assert {row.operands[0]: row.share for row in report.products} == {
        "bfloat16": 1.0,  # if the second branch runs
        "float32": pytest.approx(1 / 3),
    }
    assert report.share("bfloat16") == 0.5  # if the first one runs
    assert report.check(products="bfloat16", share=0.5) is report
    with pytest.raises(AuditError, match=r"50\.0 % of their FLOPs .* where these branches run"):
        report.check(products="bfloat16", share=0.51)


def test_of_all_products_a_tiny_one_is_not_rounded_away() -> None:
    def f(a: Any) -> Any:
        tiny = lax.cond(a[0, 0] > 0, lambda a: wide(a[:2, :2])[:1, :1], lambda a: a[:1, :1], a)
        return lax.scan(lambda c, _: (c @ c, None), a, None, length=10**12)[0] * tiny

    report = audit(f, SQUARE)
    with pytest.raises(AuditError, match=r"99\.9 % of their FLOPs"):
        report.check(products="bfloat16")
    assert report.check(products="bfloat16", share=0.999) is report


def test_branches_are_named() -> None:
    (row,) = audit(lambda a: nested(a, wide), SQUARE).upcasts
    assert row.branch == "branch 0 of 2 / branch 1 of 2"
    report = audit(lambda a: by_platform(a, wide), SQUARE)
    assert [row.branch for row in report.upcasts] == ["branch for tpu"]
    by_default = audit(lambda a: lax.platform_dependent(a, cpu=costly, default=wide), SQUARE)
    assert [row.branch for row in by_default.upcasts] == ["branch for other platforms"]
    twice = audit(lambda a: by_switch(by_switch(a, wide), wide), SQUARE)
    assert [row.branch for row in twice.upcasts] == ["branch 3 of 4"]
    # What also runs outside of a branch is in none.
    assert audit(lambda a: wide(choose(a)), SQUARE).upcasts[0].branch == ""
    assert "(wide)" in str(report)
    assert "branch for tpu" in str(report)


@pytest.mark.jax
@pytest.mark.parametrize("around", [lambda f: f, jaxmp.recompute])
def test_lines_are_not_those_of_a_program_before(around: Any) -> None:
    """JAX keeps what it has traced: a branch of a rule, with the line of the rule."""

    def branch(a: Any) -> Any:
        return wide(jnp.sin(a.astype(F32)).astype(BF16))

    def loss(a: Any) -> Any:
        return jnp.sum(choose(a, costly, branch).astype(F32))

    audit(around(lambda a: in_a_rule(a, branch)), SQUARE)
    report = audit(around(loss), SQUARE)
    lines = [row.line for row in (*report.upcasts, *report.residuals)]
    assert any(line.endswith("(wide)") for line in lines)
    assert not any("in_a_rule" in line for line in lines)


def test_many_branches_are_cut_short() -> None:
    report = audit(
        lambda a: lax.switch(jnp.int32(a[0, 0]), [wide] * 2 + [costly, wide, wide], a), SQUARE
    )
    (row,) = report.upcasts
    assert row.branch == "branch 0 of 5; branch 1 of 5; branch 3 of 5; 1 more"
    assert (row.count, row.flops) == (8, ONE)


def test_upcasts_come_out_of_every_branch() -> None:
    """What a branch widens is followed to a product behind the conditional."""

    def f(a: Any, w: Any) -> Any:
        def first(a: Any) -> Any:
            return (a @ a).astype(F32)

        def second(a: Any) -> Any:
            return a.astype(F32)

        return lax.cond(a[0, 0] > 0, first, second, a) @ w

    report = audit(f, SQUARE, jax.ShapeDtypeStruct((8, 8), F32))
    assert [row.flops for row in report.upcasts] == [ONE, ONE]
    assert {row.branch for row in report.upcasts} == {"branch 0 of 2", "branch 1 of 2"}


def test_residuals_of_every_branch_have_their_line() -> None:
    def loss(w: Any, x: Any) -> Any:
        def large(x: Any) -> Any:
            return jnp.sum((x @ w @ w @ w).astype(F32))

        def small(x: Any) -> Any:
            return jnp.sum(jnp.exp(jnp.sin((x @ w).astype(F32))))  # small keeps

        return lax.cond(x[0, 0] > 0, large, small, x)

    report = audit(loss, SQUARE, SQUARE)
    name = "test_residuals_of_every_branch_have_their_line.loss.small"
    rows = [row for row in report.residuals or () if row.dtype == "float32"]
    assert {row.line for row in rows} == {line_of("small keeps", name)}
    assert {row.branch for row in rows} == {"branch 0 of 2"}
    assert sum(row.bytes for row in rows) == 2 * 8 * 8 * 4  # the cosine, and the exponential
    with pytest.raises(AuditError, match=r"float32  at .*loss\.small.*, branch 0 of 2"):
        report.check(residual_bytes=0)


# --- adding up what excludes each other ---------------------------------------------------------


def random_parts(rng: random.Random, path: tuple[Choice, ...], ids: Any) -> list[BranchPart]:
    parts = []
    for _ in range(rng.randint(0, 2)):
        total = rng.randint(1, 9)
        parts.append(BranchPart(path, rng.choice([0, total]), total))
    if len(path) < 2:
        for _ in range(rng.randint(0, 2)):
            number, of = next(ids), rng.randint(2, 3)
            for i in range(of):
                parts += random_parts(rng, (*path, Choice(number, i, of, "")), ids)
    return parts


@pytest.mark.slow
def test_sums_over_branches_against_all_of_their_combinations() -> None:
    """A reference that tries every way in which a program can run."""
    rng = random.Random(0)
    for _ in range(300):
        parts = random_parts(rng, (), itertools.count())
        sizes = {choice.conditional: choice.of for part in parts for choice in part.branches}
        ran = []
        for taken in itertools.product(*map(range, sizes.values())):
            takes = dict(zip(sizes, taken, strict=True))
            runs = [p for p in parts if all(takes[c.conditional] == c.branch for c in p.branches)]
            ran.append((sum(p.counted for p in runs), sum(p.total for p in runs)))
        assert most(parts) == max(total for _, total in ran)
        shares = [Fraction(counted, total) for counted, total in ran if total]
        assert least_share(parts) == float(min(shares, default=Fraction(0)))


# --- what is not seen ---------------------------------------------------------------------------


def kernel(x: Any) -> Any:
    from jax.experimental import pallas

    def body(source: Any, target: Any) -> None:
        target[...] = source[...] @ source[...]

    return pallas.pallas_call(body, jax.ShapeDtypeStruct(x.shape, x.dtype), interpret=True)(x)


def foreign(x: Any) -> Any:
    return jax.ffi.ffi_call("f", jax.ShapeDtypeStruct(x.shape, x.dtype))(x)


def on_the_host(x: Any) -> Any:
    jax.debug.callback(lambda x: None, x)
    return jax.pure_callback(lambda x: x, jax.ShapeDtypeStruct(x.shape, x.dtype), x)


def of_a_library(x: Any) -> Any:
    primitive = Primitive("some_gemm")
    primitive.def_abstract_eval(lambda x: x)
    return primitive.bind(x)


def factors(x: Any) -> Any:
    return jnp.linalg.cholesky(x.astype(F32)).astype(x.dtype)


KERNELS = "kernels (1 pallas_call): what they multiply is not counted."
HIDDEN = [
    (kernel, "pallas_call", KERNELS),
    (foreign, "ffi_call", "foreign calls (1 ffi_call): what they do is not counted."),
    (on_the_host, "pure_callback", "callbacks (1 debug_callback, 1 pure_callback): what the host"),
    (of_a_library, "some_gemm", ""),
    (factors, "cholesky", "linear algebra (1 cholesky): what it multiplies is not counted."),
    (lambda x: choose(x, jnp.sin, kernel), "pallas_call", KERNELS),
]


@pytest.mark.every_case
@pytest.mark.parametrize(("fn", "name", "sentence"), HIDDEN)
def test_a_check_fails_for_what_it_cannot_see(fn: Any, name: str, sentence: str) -> None:
    """A passing check says that every product has the dtype, and here it does not know."""
    report = audit(lambda x: fn(x) @ x, SQUARE)
    assert report.flops == ONE  # that of the product beside it
    assert any(text.startswith(sentence) for text in report.unseen)
    seen = audit(jnp.sin, SQUARE).unseen  # the partitioner's collectives alone
    assert [text for text in seen if text.startswith(sentence or "kernels")] == [] != seen
    assert name in [row.name for row in report.unseen_lines]
    for expected in ({"products": "bfloat16"}, {"upcasts": 0}):
        told = rf"unseen: what these multiply .* allow_unseen=\('{name}',\)(.|\n)*  1  {name} of "
        with pytest.raises(AuditError, match=told):
            report.check(**expected)  # type: ignore[arg-type]
        for allowed in (name, (name, "fft"), [name], True):
            assert report.check(**expected, allow_unseen=allowed) is report  # type: ignore[arg-type]
        for allowed in ("fft", (), False):
            with pytest.raises(AuditError, match="unseen: "):
                report.check(**expected, allow_unseen=allowed)  # type: ignore[arg-type]


def test_what_is_unseen_has_its_line() -> None:
    def f(x: Any) -> Any:
        with jax.named_scope("attention"):
            x = kernel(x)  # hidden
        return kernel(x)

    first, second = audit(f, SQUARE).unseen_lines
    assert (first.count, first.dtypes, first.path) == (1, ("bfloat16",), "attention")
    assert first.line == second.line
    assert first.line.endswith("(kernel)")


def test_what_only_looks_or_multiplies_no_matrices_hides_nothing() -> None:
    def f(x: Any) -> Any:
        jax.debug.print("{}", x[0, 0])
        return jnp.fft.fft(x[0].astype(F32)), x @ x, jax.random.normal(jax.random.key(0), (3,))

    report = audit(f, SQUARE)
    assert report.unseen_lines == ()
    assert report.check(products="bfloat16", upcasts=0) is report


def looped(x: Any, dtype: Any) -> Any:
    def body(c: Any) -> Any:
        return (c.astype(dtype) @ c.astype(dtype)).astype(c.dtype)  # turns

    return x @ lax.while_loop(lambda c: c[0, 0] > 0, body, x)


def test_a_share_that_depends_on_turns_of_a_loop_fails() -> None:
    report = audit(lambda x: looped(x, F32), SQUARE)
    with pytest.raises(AuditError, match="how often these loops run is not known") as caught:
        report.check(products="bfloat16", share=0.5)
    assert "  1  while of float32  at " in str(caught.value)
    assert report.check(products="bfloat16", share=0.5, allow_unseen="while") is report
    # However often they run: all of the products, or none of the others in the loop.
    assert report.check(products=("bfloat16", "float32")) is report
    low = audit(lambda x: looped(x, BF16), SQUARE)
    assert low.check(products="bfloat16", share=0.5) is low


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize("allowed", [1, None, (1,), 0.5])
def test_names_of_what_may_be_unseen_are_names(allowed: Any) -> None:
    with pytest.raises(ValueError, match=r"allow_unseen is True, or names .* got "):
        audit(costly, SQUARE).check(products="bfloat16", allow_unseen=allowed)
