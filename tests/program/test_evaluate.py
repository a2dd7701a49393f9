"""One evaluator runs every program: rules reach inside of all constructs, and do nothing else."""

import collections
import re
import weakref
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType, PartitionSpec as P

from jaxmp._program import compat
from jaxmp._program.evaluate import Cells, Interpreter, evaluate
from jaxmp._program.program import Op, read
from jaxmp._program.wiring import argument_types, loop_of, wiring_of
from tests.support.dots import equations

pytestmark = pytest.mark.jax

MESH = jax.make_mesh((2,), ("d",), axis_types=(AxisType.Auto,))
X, W = jnp.linspace(-1.0, 1.0, 8).reshape(2, 4), jnp.linspace(0.1, 0.5, 16).reshape(4, 4)


@jax.custom_vjp
def own_vjp(x: Any) -> Any:
    return jnp.tanh(x)


own_vjp.defvjp(lambda x: (jnp.tanh(x), x), lambda x, g: (g * (1 - jnp.tanh(x) ** 2),))


@jax.custom_jvp
def own_jvp(x: Any) -> Any:
    return jnp.tanh(x)


own_jvp.defjvp(lambda x, t: (jnp.tanh(x[0]), t[0] * (1 - jnp.tanh(x[0]) ** 2)))


def looped(x: Any, w: Any) -> Any:
    turn = lambda c: (c[0] + jnp.float32(1), jnp.tanh(c[1] @ w))  # noqa: E731
    return lax.while_loop(lambda c: c[0] < jnp.float32(3), turn, (jnp.float32(0), x))[1]


def scanned(x: Any, w: Any) -> Any:
    """A constant, two carries, slices and stacked results, in reverse."""

    def turn(carry: Any, row: Any) -> Any:
        h, kept = carry
        return (jnp.tanh(h @ w + row[None]), kept * jnp.float32(0.5)), h.sum()

    (h, kept), sums = lax.scan(turn, (x, x[0]), jnp.stack([w[0], w[1], w[2]]), reverse=True)
    return h + kept[None] + sums.sum()


def branched(x: Any, w: Any) -> Any:
    return lax.switch(jnp.int32(x.sum()), [lambda h: jnp.tanh(h @ w), jnp.tanh, lambda h: h * 2], x)


PROGRAMS: dict[str, Callable[[Any, Any], Any]] = {
    "plain": lambda x, w: jnp.tanh(x @ w),
    "jit": lambda x, w: jax.jit(lambda h: jnp.tanh(h @ w))(x),
    "a jit with shardings": lambda x, w: jax.jit(
        lambda h: jnp.tanh(h @ w), out_shardings=jax.NamedSharding(MESH, P("d"))
    )(x),
    "checkpoint": lambda x, w: jax.checkpoint(lambda h: jnp.tanh(h @ w))(x),
    "while": looped,
    "scan": scanned,
    "cond": branched,
    "shard_map": lambda x, w: jax.shard_map(
        lambda x, w: jnp.tanh(x @ w), mesh=MESH, in_specs=(P("d"), P()), out_specs=P("d")
    )(x, w),
    "custom_jvp": lambda x, w: own_jvp(x @ w),
    "custom_vjp": lambda x, w: own_vjp(x @ w),
    "all in all": lambda x, w: lax.scan(
        jax.checkpoint(lambda h, _: (jax.jit(own_vjp)(branched(looped(h, w), w)), None)),
        x,
        None,
        length=2,
    )[0],
}
DIFFERENTIABLE = [name for name in PROGRAMS if name not in ("while", "all in all")]


def run_by(interpreter: Interpreter[Any], fun: Callable[..., Any]) -> Callable[..., Any]:
    def transformed(*args: Any) -> Any:
        closed, shape = jax.make_jaxpr(fun, return_shape=True)(*args)
        results = evaluate(read(closed), jax.tree.leaves(args), interpreter)
        return jax.tree.unflatten(jax.tree.structure(shape), results)

    return transformed


class Sines(Interpreter[Any]):
    """Puts a sine in place of each tanh."""

    def operation(self, op: Op, operands: list[Any]) -> list[Any]:
        return [jnp.sin(operands[0])] if op.name == "tanh" else super().operation(op, operands)


def names(fun: Callable[..., Any]) -> collections.Counter[str]:
    return collections.Counter(each.primitive.name for each in equations(jax.make_jaxpr(fun)(X, W)))


def text(fun: Callable[..., Any]) -> str:
    """A program, without the names of the functions that a `custom_vjp` holds."""
    return re.sub(r"(name|jvp|bwd|fwd|symbolic_zeros)=\S+", "", str(jax.make_jaxpr(fun)(X, W)))


@pytest.mark.parametrize("name", PROGRAMS)
def test_rules_that_change_nothing_leave_the_program(name: str) -> None:
    fun = PROGRAMS[name]
    assert text(run_by(Interpreter(), fun)) == text(fun)
    np.testing.assert_array_equal(run_by(Interpreter(), fun)(X, W), fun(X, W))


@pytest.mark.parametrize("name", DIFFERENTIABLE)
def test_and_its_gradient(name: str) -> None:
    def gradient(fun: Callable[..., Any]) -> Any:
        return jax.jit(jax.grad(lambda w: fun(X, w).sum()))(W)

    fun = PROGRAMS[name]
    np.testing.assert_array_equal(gradient(run_by(Interpreter(), fun)), gradient(fun))


@pytest.mark.parametrize("name", PROGRAMS)
def test_rules_reach_inside(name: str) -> None:
    fun = PROGRAMS[name]
    before, after = names(fun), names(run_by(Sines(), fun))
    assert before["tanh"] > 0
    assert (after["tanh"], after["sin"]) == (0, before["tanh"])


@pytest.mark.parametrize("name", ["custom_jvp", "custom_vjp", "all in all"])
def test_rules_reach_derivatives(name: str) -> None:
    fun = PROGRAMS["custom_vjp" if name == "all in all" else name]
    inside = lambda x, w: jax.jit(jax.checkpoint(fun))(x, w) if name == "all in all" else fun(x, w)  # noqa: E731
    gradient = lambda fun: jax.grad(lambda x, w: fun(x, w).sum())  # noqa: E731
    assert names(gradient(inside))["tanh"] > 0
    assert names(gradient(run_by(Sines(), inside)))["tanh"] == 0


def test_cells_may_be_anything() -> None:
    """Intervals, with a rule for each operation: how a result may vary with its argument."""

    class Intervals(Interpreter[tuple[float, float]]):
        def constant(self, value: Any) -> tuple[float, float]:
            return float(value), float(value)

        def operands(self, op: Op, cells: Cells[tuple[float, float]]) -> list[tuple[float, float]]:
            seen.append(op.name)
            return super().operands(op, cells)

        def operation(self, op: Op, operands: Any) -> Any:
            if op.name == "neg":
                ((low, high),) = operands
                return [(-high, -low)]
            (a, b), (c, d) = operands
            if op.name == "add":
                return [(a + c, b + d)]
            products = a * c, a * d, b * c, b * d
            return [(min(products), max(products))]

    seen: list[str] = []
    program = read(jax.make_jaxpr(lambda x: -(x * 3.0) + x)(1.0))
    assert evaluate(program, [(0.0, 2.0)], Intervals()) == [(-6.0, 2.0)]
    assert seen == ["mul", "neg", "add"]


def test_forgotten_cells_are_freed() -> None:
    """A chain of results holds one of them at a time; without `forgets`, all."""

    class Living(Interpreter[Any]):
        def operation(self, op: Op, operands: Any) -> Any:
            alive.append(sum(ref() is not None for ref in refs))
            cell = np.float32([0.0])  # unlike a number, an array has weak references
            refs.append(weakref.ref(cell))
            return [cell]

    class Forgetting(Living):
        forgets = True

    program = read(jax.make_jaxpr(lambda x: jnp.sin(jnp.cos(jnp.tan(jnp.exp(x)))))(X))
    for interpreter, expected in ((Living(), [0, 1, 2, 3]), (Forgetting(), [0, 1, 1, 1])):
        alive: list[int] = []
        refs: list[Any] = []
        evaluate(program, [np.float32([1.0])], interpreter)
        assert alive == expected


# --------------------------------------------------------------------------------------- wires

LOOPS_AND_BRANCHES = [name for name in PROGRAMS if name not in ("plain", "custom_vjp")]


def connected(name: str) -> list[Any]:
    return [x for x in equations(jax.make_jaxpr(PROGRAMS[name])(X, W)) if compat.sub_jaxprs(x)]


@pytest.mark.parametrize("name", LOOPS_AND_BRANCHES)
def test_operands_have_the_types_of_the_arguments_that_they_become(name: str) -> None:
    for equation in connected(name):
        if equation.primitive.name in ("shard_map", "custom_vjp_call"):  # local; several programs
            continue
        types = argument_types(equation, [atom.aval for atom in equation.invars])
        for jaxpr, avals in zip(compat.sub_jaxprs(equation), types, strict=True):
            assert [(x.shape, x.dtype) for x in avals] == [
                (var.aval.shape, var.aval.dtype) for var in jaxpr.invars
            ]


def test_loops_say_what_they_carry() -> None:
    (scan,) = (x for x in connected("scan") if x.primitive.name == "scan")
    loop = loop_of(scan)
    assert loop is not None
    assert (len(loop.carry), len(loop.slices), loop.turns, loop.tests) == (2, 1, 3, 0)
    # A carry has the type of the result that replaces it.
    for operand, result in zip(loop.carry, scan.outvars, strict=False):
        assert scan.invars[operand].aval.shape == result.aval.shape
    (loop_without_count,) = (x for x in connected("while") if x.primitive.name == "while")
    wiring = wiring_of(loop_without_count)
    assert (wiring.turns, wiring.known_turns, wiring.tests, wiring.loops) == (None, 1, 1, True)
    assert len(wiring.carry) == len(loop_without_count.outvars)
    assert loop_of(loop_without_count) is None


def test_what_is_no_call_has_no_wires() -> None:
    """Of a linear solve nothing says which operand goes to which of its programs."""
    solve = lambda x: lax.custom_linear_solve(lambda y: y * 2, x, lambda _, b: b / 2)  # noqa: E731
    (equation,) = jax.make_jaxpr(solve)(X).eqns
    assert len(compat.sub_jaxprs(equation)) != 1
    assert wiring_of(equation).arguments == ()
