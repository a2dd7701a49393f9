"""An operation on slices computes the slice of what the operation computes on whole arrays."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.extend.core import Literal

from jaxmp._gradient_release.slices import AXES, operand_axes, run_on_slices
from jaxmp._gradient_release.values import Operation
from jaxmp._program import compat
from jaxmp._program.op_classes import ELEMENTWISE, REDUCTIONS, RESHAPES, RUNNING
from jaxmp._program.program import plain_call, read

pytestmark = pytest.mark.jax

X = jnp.arange(3 * 4 * 5, dtype=jnp.float32).reshape(3, 4, 5) % 7 - 2
Y = X[::-1] + 1.5
# For each operation: a function of it, its operands, and the axes of its result that have slices.
CASES: dict[str, tuple[Callable[..., Any], tuple[Any, ...], set[int]]] = {
    "add": (lax.add, (X, Y), {0, 1, 2}),
    "add of a scalar": (lambda x: x + 1, (X,), {0, 1, 2}),
    "select_n by a scalar": (lambda x, y: lax.select_n(jnp.bool_(True), x, y), (X, Y), {0, 1, 2}),
    "clamp": (lambda x: lax.clamp(0.0, x, 1.0), (X,), {0, 1, 2}),
    "reduce_sum": (lambda x: x.sum(1), (X,), {0, 1}),
    "reduce_max": (lambda x: x.max((0, 2)), (X,), {0}),
    "argmax": (lambda x: lax.argmax(x, 2, jnp.int32), (X,), {0, 1}),
    "cumsum": (lambda x: lax.cumsum(x, 1), (X,), {0, 2}),
    "broadcast_in_dim": (
        lambda x: lax.broadcast_in_dim(x, (3, 4, 2, 5), (0, 1, 3)),
        (X,),
        {0, 1, 2, 3},
    ),
    "broadcast_in_dim of one": (
        lambda x: lax.broadcast_in_dim(x, (6, 4, 5), (0, 1, 2)),
        (X[:1],),
        {0, 1, 2},
    ),
    "reshape": (lambda x: x.reshape(3, 2, 2, 5), (X,), {0, 3}),
    "reshape to fewer": (lambda x: x.reshape(3, 20), (X,), {0}),
    "squeeze": (lambda x: lax.squeeze(x, (1,)), (X[:, :1],), {0, 1}),
    "transpose": (lambda x: x.transpose(2, 0, 1), (X,), {0, 1, 2}),
    "rev": (lambda x: lax.rev(x, (1,)), (X,), {0, 2}),
    "slice": (lambda x: lax.slice(x, (0, 1, 0), (3, 3, 5), (1, 1, 2)), (X,), {0}),
    "pad": (lambda x: lax.pad(x, 0.0, ((0, 0, 0), (1, 2, 0), (0, 0, 1))), (X,), {0}),
    "pad that moves": (lambda x: lax.pad(x, 0.0, ((1, -1, 0), (0, 0, 0), (0, 0, 0))), (X,), {1, 2}),
    "optimization_barrier": (lax.optimization_barrier, (X,), {0, 1, 2}),
    "concatenate": (lambda x, y: lax.concatenate((x, y), 1), (X, Y), {0, 2}),
    # NumPy's integers in the params of operations, as `jnp.roll` has them.
    "concatenate by NumPy": (lambda x, y: lax.concatenate((x, y), np.int64(1)), (X, Y), {0, 2}),
    "cumsum by NumPy": (
        lambda x: lax.cumsum_p.bind(x, axis=np.int64(1), reverse=False),
        (X,),
        {0, 2},
    ),
    "sort by NumPy": (
        lambda x: lax.sort_p.bind(x, dimension=np.int64(2), is_stable=True, num_keys=1)[0],
        (X,),
        {0, 1},
    ),
    "sort": (lambda x: lax.sort(x, dimension=2), (X,), {0, 1}),
    "iota": (lambda: lax.broadcasted_iota(jnp.int32, (3, 4, 5), 1), (), {0, 1, 2}),
    "dot_general": (
        lambda x, y: jnp.einsum("bij,bkj->bik", x, y),
        (X, Y[:, :2]),
        {0, 1, 2},
    ),
    "dot_general of free axes": (
        lambda x, y: lax.dot_general(x, y, (((2,), (1,)), ((), ()))),
        (X, Y[0, :2]),
        {0, 1, 2},
    ),
}


def slice_of(x: Any, axis: int | None, number: int) -> Any:
    return x if axis is None else lax.dynamic_slice_in_dim(x, number, 1, axis)


@pytest.mark.parametrize("case", CASES)
def test_slices(case: str) -> None:
    fun, operands, sliced = CASES[case]
    op = read(jax.make_jaxpr(fun)(*operands), plain_call).ops[-1]
    assert op.name == case.split(" ")[0] or case == "squeeze"
    operation = Operation(0, op, (), lambda arrays: arrays)
    values = iter(operands)
    arrays = [compat.number(x) if isinstance(x, Literal) else next(values) for x in op.inputs]
    (whole,) = compat.bind(op.equation, arrays)
    axes = {axis for axis in range(whole.ndim) if operand_axes(operation, axis) is not None}
    assert axes == sliced
    for axis in axes:
        places = operand_axes(operation, axis)
        for number in range(whole.shape[axis]):
            slices = [slice_of(x, place, number) for x, place in zip(arrays, places, strict=True)]
            (result,) = run_on_slices(op.equation, slices, axis, jnp.int32(number))
            np.testing.assert_array_equal(result, slice_of(whole, axis, number))
            assert result.dtype == whole.dtype


def test_all_rules_have_a_case() -> None:
    names = {case.split(" ")[0] for case in CASES} - ELEMENTWISE
    others = REDUCTIONS | RESHAPES | RUNNING | ELEMENTWISE | {"sharding_constraint"}
    assert set(AXES) - others <= names


def test_no_slices_without_a_rule() -> None:
    program = read(jax.make_jaxpr(lambda x: lax.fft(x, "FFT", (4,)))(jnp.ones((3, 4), "complex64")))
    assert operand_axes(Operation(0, program.ops[-1], (), lambda arrays: arrays), 0) is None
