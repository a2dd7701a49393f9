"""What a gradient keeps and computes, read from its program."""

import collections
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

import jaxmp
from jaxmp._program import compat
from jaxmp._program.op_classes import COSTS, Cost
from jaxmp._program.program import plain_call, read, without_dead_code
from tests.support.autocast_checks import compiled, error, is_float, scalar as scalar_and_results
from tests.support.dots import equations

MODES = ("auto", "always")


def norm(x: Any) -> Any:
    """The layer norm of a model, without scales."""
    x = x - x.mean(-1, keepdims=True)
    return x * lax.rsqrt(jnp.square(x).mean(-1, keepdims=True) + 1e-6)


def scalar(fun: Callable[..., Any]) -> Callable[..., Any]:
    """A loss to differentiate: every number that a function returns, each with its own weight."""
    return lambda *args: scalar_and_results(fun)(*args)[0]


def by_floats(fun: Callable[..., Any], args: Any) -> tuple[Callable[..., Any], list[Any]]:
    """The loss of a function by its float arguments alone, and those."""
    leaves, tree = jax.tree.flatten(args)
    chosen = [i for i, x in enumerate(leaves) if is_float(x)]

    def loss(*floats: Any) -> Any:
        full = list(leaves)
        for i, value in zip(chosen, floats, strict=True):
            full[i] = value
        return scalar(fun)(*jax.tree.unflatten(tree, full))

    return loss, [leaves[i] for i in chosen]


def kept(fun: Callable[..., Any], *args: Any) -> list[Any]:
    """The arrays that a backward pass has besides the arguments, as shapes and dtypes."""
    loss, floats = by_floats(fun, args)
    program = jax.make_jaxpr(lambda *given: jax.vjp(loss, *given)[1])(*floats).jaxpr
    given = {*program.invars, *program.constvars}
    results = {v: v for v in program.outvars if not hasattr(v, "val") and v not in given}
    return [v.aval for v in results]


def kept_bytes(fun: Callable[..., Any], *args: Any) -> int:
    """The size of what a backward pass has besides the arguments, without small numbers."""
    return sum(each.size * each.dtype.itemsize for each in kept(fun, *args) if each.size > 1)


def shapes(fun: Any, *args: Any) -> list[str]:
    """The types of what a backward pass has besides the arguments, without small numbers."""
    return sorted(each.str_short() for each in kept(fun, *args) if each.size > 1)


def in_bytes(fun: Any, *args: Any) -> dict[str, int]:
    """The bytes that a backward pass keeps, by dtype."""
    sizes: dict[str, int] = {}
    for x in kept(fun, *args):
        sizes[x.dtype.name] = sizes.get(x.dtype.name, 0) + x.size * x.dtype.itemsize
    return sizes


def dear_operations(fun: Callable[..., Any], *args: Any) -> Mapping[str, int]:
    """How often each operation that is not cheap stands in the program of a gradient."""
    return dear_in(jax.make_jaxpr(gradient(fun))(*args))


def dear_in(closed: Any) -> Mapping[str, int]:
    """The same for a program."""
    found: collections.Counter[str] = collections.Counter()
    # As the compiler does it: jitted functions inlined, and nothing that nobody reads.
    program = without_dead_code(read(closed, plain_call))
    for op in program.ops:
        for inner in compat.sub_jaxprs(op.equation):
            found.update(equation.primitive.name for equation in equations(inner))
        found[op.name] += 1
    wrappers = ["jit", "pjit", "remat2", "checkpoint", "custom_jvp_call", "closed_call", "cond"]
    if jax.config.jax_remat3:  # type: ignore[attr-defined]
        wrappers.append("optimization_barrier")  # of a checkpoint, which shows it only then
    return {
        name: count
        for name, count in found.items()
        if COSTS.get(name, Cost.CHEAP) is not Cost.CHEAP and name not in wrappers
    }


def gradient(fun: Callable[..., Any]) -> Callable[..., Any]:
    """The gradient by every float argument, and the value."""

    def of(*args: Any) -> Any:
        loss, floats = by_floats(fun, args)
        return jax.value_and_grad(loss, argnums=tuple(range(len(floats))))(*floats)

    return of


def check(fun: Callable[..., Any], *args: Any, within: float = 2e-6, mode: str = "auto") -> None:
    """Values to the bit, gradients within roundings, and nothing dear twice."""
    lean = jaxmp.recompute(fun, mode)  # type: ignore[arg-type]
    # XLA leaves out some roundings to 16 bits, and others in a program that computes again.
    options = {"xla_backend_optimization_level": 0, "xla_allow_excess_precision": False}
    got, want = (jax.jit(f, compiler_options=options)(*args) for f in (lean, fun))
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert (a.dtype, a.shape, a.weak_type) == (b.dtype, b.shape, b.weak_type)
        if jnp.issubdtype(a.dtype, jax.dtypes.prng_key):
            a, b = jax.random.key_data(a), jax.random.key_data(b)
        np.testing.assert_array_equal(np.asarray(a), np.asarray(b))
    assert error(compiled(gradient(lean))(*args), compiled(gradient(fun))(*args)) <= within
    plain, now = dear_operations(fun, *args), dear_operations(lean, *args)
    more = {name: (plain.get(name, 0), n) for name, n in now.items() if n > plain.get(name, 0)}
    assert not more, f"computed again (before, now): {more}"
