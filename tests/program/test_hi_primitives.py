"""Calls of objects, which JAX's coming flags make of checkpoints and functions with derivatives.

Each runs as its older form does. A call that jaxmp does not know is entered, or named in a warning.
"""

import pathlib
import re
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.experimental import hijax
from jax.extend import core
from jax.interpreters import ad, mlir

import jaxmp
from jaxmp._program import compat, hi_primitives
from tests.support.bits import tree_bits
from tests.support.dots import count_dots, equations
from tests.support.recompute_checks import kept_bytes

pytestmark = pytest.mark.jax

FLAGS = ("jax_remat3", "jax_custom_vjp3", "jax_remat_barrier_no_cotangents")
NORMAL = np.random.default_rng(0).standard_normal
X, W = jax.device_put((NORMAL((16, 32)), NORMAL((32, 32)) / 6))
WEIGHTS = jax.device_put({"up": NORMAL((3, 32, 64)) / 6, "down": NORMAL((3, 64, 32)) / 8})
Loss = Callable[[Any, Any], Any]


def set_flags(value: bool) -> None:
    for name in FLAGS:
        if hasattr(jax.config, name):
            jax.config.update(name, value)


@pytest.fixture
def flags() -> Iterator[None]:
    before = {name: getattr(jax.config, name) for name in FLAGS if hasattr(jax.config, name)}
    set_flags(True)
    yield
    for name, value in before.items():
        jax.config.update(name, value)


def layer(h: Any, w: Any) -> Any:
    return h + jax.nn.gelu(checkpoint_name(h @ w["up"], "up")) @ w["down"]


def scanned(checkpoint: Callable[..., Any]) -> Loss:
    def loss(w: Any, x: Any) -> Any:
        step = checkpoint(lambda h, w: (layer(h, w), None))
        return jnp.mean(lax.scan(step, x, w)[0] ** 2)

    return loss


def unrolled(w: Any, x: Any) -> Any:
    for i in range(3):
        x = jax.checkpoint(layer)(x, jax.tree.map(lambda each, i=i: each[i], w))
    return jnp.mean(x**2)


def nested(w: Any, x: Any) -> Any:
    # Without the name: in jax 0.10, `vmap` knows no named values under the flag.
    inner = jax.checkpoint(lambda h, w: h + jax.nn.gelu(h @ w["up"]) @ w["down"])
    twice = jax.checkpoint(lambda x, w: inner(inner(x, w), w))
    return jnp.mean(jax.vmap(twice, (0, None))(x[:, None], jax.tree.map(lambda each: each[0], w)))


def with_rule(w: Any, x: Any) -> Any:
    @jax.custom_vjp
    def scale(x: Any) -> Any:
        return 2 * x

    scale.defvjp(lambda x: (2 * x, None), lambda _, g: (2 * g,))
    return scanned(jax.checkpoint)(w, scale(x))


NAMED = jax.checkpoint_policies.save_only_these_names("up")
LOSSES: dict[str, Loss] = {
    "scanned": scanned(jax.checkpoint),
    "named": scanned(lambda f: jax.checkpoint(f, policy=NAMED, prevent_cse=False)),
    "unrolled": unrolled,
    "nested": nested,
    "with a rule": with_rule,
}


def with_and_without(function: Callable[[], Any]) -> tuple[Any, Any]:
    """What a function returns without the flags, and with them."""
    set_flags(False)
    without = function()
    set_flags(True)
    return without, function()


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("reduce", [None, "float32"])
def test_a_checkpoint_is_entered(flags: None, name: str, reduce: str | None) -> None:
    """`JAX_REMAT3` switched autocast off inside of checkpoints, without a word."""

    def products() -> Any:
        fast = jaxmp.autocast(LOSSES[name], "mixed_bfloat16")
        gradient = jaxmp.grad(fast, reduce_dtype=reduce)
        dots = set(count_dots(gradient, WEIGHTS, X))
        return dots, jax.jit(gradient)(WEIGHTS, X), kept_bytes(fast, WEIGHTS, X)

    old, new = with_and_without(products)
    assert old[0] == new[0] == {"bfloat16"}
    for before, after in zip(jax.tree.leaves(old[1]), jax.tree.leaves(new[1]), strict=True):
        np.testing.assert_allclose(before, after, rtol=2e-2, atol=1e-4 * np.abs(before).max())
    assert new[2] <= 1.05 * old[2]
    # Control: without autocast, the flag's program has calls that hold the products.
    names = {e.primitive.name for e in jax.make_jaxpr(LOSSES["unrolled"])(WEIGHTS, X).eqns}
    assert "call_hi_primitive" in names


def test_recompute_and_float8_enter_it(flags: None) -> None:
    fast = jaxmp.autocast(jaxmp.recompute(LOSSES["scanned"]), "mixed_bfloat16")
    assert set(count_dots(jax.grad(fast), WEIGHTS, X)) == {"bfloat16"}
    low = jaxmp.autocast(LOSSES["scanned"], "mixed_float8")
    report = jaxmp.audit(jax.grad(low), WEIGHTS, X)
    assert {operand for row in report.products for operand in row.operands} == {
        "float8_e4m3fn",
        "float8_e5m2",
    }


def test_a_custom_vjp_is_what_it_was(flags: None) -> None:
    """Left as traced, and entered where that is asked for."""

    @jax.custom_vjp
    def square(x: Any) -> Any:
        return x @ x.T

    square.defvjp(lambda x: (square(x), x), lambda x, g: ((g + g.T) @ x,))
    loss = lambda x: jnp.sum(square(x))  # noqa: E731

    def programs() -> Any:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of what is left in float32
            left = jaxmp.autocast(loss, "mixed_bfloat16", kernels="traced")
            kept = count_dots(jax.grad(left), X)
        entered = jaxmp.autocast(loss, "mixed_bfloat16", enter_custom_vjp=True)
        return kept, count_dots(jax.grad(entered), X)

    old, new = with_and_without(programs)
    assert set(old[0]) == set(new[0]) == {"float32"}
    assert set(old[1]) == set(new[1]) == {"bfloat16"}


# Classes of JAX whose calls need no entry: they hold no product of a loss, or are not public yet.
WITHOUT_ENTRY = {
    "Nonzero", "SearchSorted", "Ldexp", "Frexp",  # of jax.numpy, without products
    "Einsum", "Scan3", "OptRemat", "CustomRemat",  # behind no public name, or a flag of their own
    "Fusible", "Einshape",  # of Pallas
    "VmapOf", "PrimalLeftTangentRight", "NewBox", "BoxSet", "BoxGet",
    "LogExtend", "NewLog", "ReadLog",
}  # fmt: skip


def test_every_class_of_jax_is_known() -> None:
    """A class that a new JAX brings is left alone until it stands in the table, or here."""
    folder = pathlib.Path(jax.__file__).parent
    found = set()
    for file in folder.glob("_src/**/*.py"):
        found |= set(
            re.findall(r"^class (\w+)\([\w.]*(?:HiPrim|HiPrimitive)\)", file.read_text(), re.M)
        )
    assert {"RematTraced", "CustomVJPTraced"} <= found  # control
    abstract = {"VJPHiPrimitive"}
    assert found - set(hi_primitives._CLASSES) - WITHOUT_ENTRY - abstract == set()


def test_a_solver_is_left_alone() -> None:
    """`jax.lax.custom_root` is an object since jax 0.11: a solver may not converge in 16 bits."""

    def root(x: Any, w: Any) -> Any:
        def newton(f: Any, y: Any) -> Any:
            return lax.fori_loop(0, 3, lambda _, y: y - 0.5 * f(y), y)

        tangent = lambda g, y: y / g(jnp.ones_like(y))  # noqa: E731
        return lax.custom_root(lambda y: y - jnp.tanh(x @ w), jnp.zeros_like(x), newton, tangent)

    def loss(w: Any, x: Any) -> Any:
        for _ in range(8):
            x = jnp.tanh(x @ w)
        return jnp.mean(root(x, w) ** 2)

    assert count_dots(jaxmp.autocast(loss, "mixed_bfloat16"), W, X)["bfloat16"] >= 8  # no warning


_Object: Any = getattr(hijax, "HiPrim", None) or hijax.VJPHiPrimitive  # jax 0.10


class TwoProducts(_Object):  # type: ignore[misc]
    """What another library may bring: a function with a derivative of its own."""

    def __init__(self, x: Any, w: Any) -> None:
        self.in_avals, self.out_aval, self.params = (x, w), x, {}
        super().__init__()

    def expand(self, x: Any, w: Any) -> Any:
        return jnp.tanh(x @ w) @ w

    def vjp_fwd(self, _: Any, x: Any, w: Any) -> Any:
        return jax.vjp(self.expand, x, w)

    def vjp_bwd_retval(self, backward: Any, g: Any) -> Any:
        return backward(g)


def two_products(x: Any, w: Any) -> Any:
    return TwoProducts(jax.typeof(x), jax.typeof(w))(x, w)


def mostly_known(w: Any, x: Any) -> Any:
    """So little of it is unknown that the warning about half of the products would not come."""
    for _ in range(8):
        x = jnp.tanh(x @ w)
    return jnp.mean(two_products(x, w) ** 2)


def test_an_unknown_object_is_named() -> None:
    fast = jaxmp.autocast(mostly_known, "mixed_bfloat16", kernels="traced")
    with pytest.warns(UserWarning, match="does not know TwoProducts, and leaves the float32"):
        assert "float32" in count_dots(jax.grad(fast), W, X)


@pytest.mark.parametrize("reduce", [None, "float32"])
def test_an_unknown_object_can_be_entered(reduce: str | None) -> None:
    fast = jaxmp.autocast(mostly_known, "mixed_bfloat16", enter_custom_vjp=True)
    gradient = jaxmp.grad(fast, reduce_dtype=reduce)
    assert set(count_dots(gradient, W, X)) == {"bfloat16"}
    want = jax.jit(jax.grad(mostly_known))(W, X)
    assert np.linalg.norm(jax.jit(gradient)(W, X) - want) < 5e-2 * np.linalg.norm(want)


def test_an_unknown_object_in_full_precision_is_meant() -> None:
    def loss(w: Any, x: Any) -> Any:
        return jnp.mean(jaxmp.full_precision(two_products)(jnp.tanh(x @ w), w))

    assert "float32" in count_dots(jaxmp.autocast(loss, "mixed_bfloat16"), W, X)


def test_an_unknown_object_without_products_is_no_reason_to_warn() -> None:

    class Shift(_Object):  # type: ignore[misc]
        def __init__(self, x: Any) -> None:
            self.in_avals, self.out_aval, self.params = (x,), x, {}
            super().__init__()

        def expand(self, x: Any) -> Any:
            return x + 1

    fast = jaxmp.autocast(lambda x, w: Shift(jax.typeof(x))(x) @ w, "mixed_bfloat16")
    np.testing.assert_allclose(fast(X, W), (X + 1) @ W, rtol=2e-2, atol=2e-2)


def test_an_object_without_a_program_stays() -> None:
    """Its rules may do without: a kernel that only some compilers know."""

    class Opaque(_Object):  # type: ignore[misc]
        def __init__(self, x: Any) -> None:
            self.in_avals, self.out_aval, self.params = (x,), x, {}
            super().__init__()

        def expand(self, x: Any) -> Any:
            raise NotImplementedError("only on a device of another maker")

    fast = jaxmp.autocast(lambda x, w: Opaque(jax.typeof(x))(x) @ w, "mixed_bfloat16")
    program = jax.make_jaxpr(fast)(X, W)
    assert "call_hi_primitive" in [each.primitive.name for each in equations(program)]
    assert set(count_dots(fast, X, W)) == {"bfloat16"}
    report = jaxmp.audit(fast, X, W)
    assert "1 call_hi_primitive" in str(report)


def _call_primitive() -> core.Primitive:
    """A call as a later JAX may bring it: a primitive that this one does not have."""
    primitive = core.Primitive("call_of_tomorrow")
    primitive.multiple_results = True

    def run(*args: Any, jaxpr: Any) -> Any:
        return core.jaxpr_as_fun(jaxpr)(*args)

    def jvp(primals: Any, tangents: Any, *, jaxpr: Any) -> Any:
        dots = tuple(map(ad.instantiate_zeros, tangents))
        return jax.jvp(core.jaxpr_as_fun(jaxpr), tuple(primals), dots)

    primitive.def_impl(run)
    primitive.def_abstract_eval(lambda *_, jaxpr: jaxpr.out_avals)
    mlir.register_lowering(primitive, mlir.lower_fun(run, multiple_results=True))
    ad.primitive_jvps[primitive] = jvp
    return primitive


TOMORROW = _call_primitive()


def test_an_unknown_call_is_entered() -> None:
    """By its program; it keeps the types that it was traced with."""

    def loss(w: Any, x: Any) -> Any:
        (y,) = TOMORROW.bind(x, w, jaxpr=jax.make_jaxpr(lambda x, w: jnp.tanh(x @ w))(x, w))
        return jnp.mean(y**2)

    fast = jaxmp.autocast(loss, "mixed_bfloat16")
    assert set(count_dots(jax.grad(fast), W, X)) == {"bfloat16"}
    names = [each.primitive.name for each in equations(jax.make_jaxpr(fast)(W, X))]
    assert "call_of_tomorrow" in names
    want = jax.jit(jax.grad(loss))(W, X)
    assert np.linalg.norm(jax.jit(jax.grad(fast))(W, X) - want) < 5e-2 * np.linalg.norm(want)


def test_an_unknown_operation_with_a_product_is_named() -> None:
    """Its program has other operands than it has itself, as that of a loop: nobody can enter it."""

    def loss(w: Any, x: Any) -> Any:
        for _ in range(8):
            x = jnp.tanh(x @ w)
        program = jax.make_jaxpr(lambda x: x @ x.T)(x)
        return jnp.mean(x) + SQUARES.bind(x, x, jaxpr=program)[0][0, 0]

    with pytest.warns(UserWarning, match="does not know squares_of_tomorrow"):
        jax.make_jaxpr(jaxmp.autocast(loss, "mixed_bfloat16"))(W, X)


SQUARES = core.Primitive("squares_of_tomorrow")
SQUARES.multiple_results = True
SQUARES.def_abstract_eval(lambda *_, jaxpr: jaxpr.out_avals)


def test_a_program_is_shown_once(flags: None) -> None:
    """Caches know programs by their identity. What is shown runs, and has the same bits."""
    closed = jax.make_jaxpr(LOSSES["unrolled"])(WEIGHTS, X)
    shown = compat.open_jaxpr(closed)
    assert compat.open_jaxpr(closed) is shown
    assert [e.primitive.name for e in shown.eqns].count("checkpoint") == 3
    again = core.jaxpr_as_fun(core.ClosedJaxpr(shown, closed.consts))
    assert tree_bits(again(*jax.tree.leaves((WEIGHTS, X)))) == tree_bits(
        core.jaxpr_as_fun(closed)(*jax.tree.leaves((WEIGHTS, X)))
    )
