"""The parts of a plan: programs made flat, splits over a mesh, buffers and how long they live."""

import dataclasses
import functools
import math
from collections import Counter
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P

from jaxmp._planning.array_splits import split_of
from jaxmp._planning.buffers import FUSIONS, buffer_sizes
from jaxmp._planning.flat_program import FlatProgram, flattened
from jaxmp._planning.live_bytes import Live, most_live
from jaxmp._planning.schedule import Run, memory_order, waiting_order
from jaxmp._planning.value_sizes import SizedProgram, tiled_nbytes

pytestmark = pytest.mark.usefixtures("standard_promotion")

KB = 1024
X = jax.ShapeDtypeStruct((16, 16), jnp.float32)  # 1 kB
GPU, TPU = FUSIONS["gpu"], FUSIONS["tpu"]


def flat(fun: Callable[..., Any], *args: Any) -> FlatProgram:
    return flattened(jax.make_jaxpr(fun)(*args), "cuda")


def sized(fun: Callable[..., Any], *args: Any) -> SizedProgram:
    whole = [(frozenset[str](),) * x.ndim for x in jax.tree.leaves(args)]
    return SizedProgram(flat(fun, *args), whole, {})


def held(fun: Callable[..., Any], *args: Any, fusion: Any = GPU) -> float:
    return most_live(sized(fun, *args), fusion).total / KB


def convolved(x: Any, k: Any, groups: int = 1, dtype: Any = None) -> Any:
    numbers = ("NHWC", "HWIO", "NHWC")
    return jax.lax.conv_general_dilated(
        x,
        k,
        (1, 1),
        "SAME",
        dimension_numbers=numbers,
        feature_group_count=groups,
        preferred_element_type=dtype,
    )


@jax.custom_vjp
def squared(x: Any) -> Any:
    return x * x


squared.defvjp(lambda x: (x * x, x), lambda x, g: (2 * g * x,))


def test_calls_become_their_operations() -> None:
    def fun(x: Any) -> Any:
        return jax.jit(jax.checkpoint(jnp.sin))(x) + squared(jax.nn.relu(x))

    assert [op.name for op in flat(fun, X).ops] == ["sin", "max", "mul", "add"]


def test_a_function_that_is_called_twice_is_two() -> None:
    inner = jax.jit(lambda x: jnp.sin(x) * 2)
    ops = flat(lambda x: inner(inner(x)), X).ops
    assert [op.name for op in ops] == ["sin", "mul", "sin", "mul"]
    assert ops[2].inputs == ops[1].outputs


def test_a_branch_that_is_known_before_it_runs_is_a_part_of_the_program() -> None:
    def chosen(x: Any) -> Any:
        return jax.lax.platform_dependent(x, cpu=jnp.cos, tpu=jnp.tan, default=jnp.sin)

    def constant(x: Any) -> Any:
        return jax.lax.cond(jnp.array(False), jnp.cos, jnp.sin, x)

    assert [op.name for op in flat(chosen, X).ops] == ["sin"]
    assert [op.name for op in flattened(jax.make_jaxpr(chosen)(X), "tpu").ops] == ["tan"]
    assert [op.name for op in flat(constant, X).ops] == ["sin"]
    assert flat(lambda p, x: jax.lax.cond(p, jnp.cos, jnp.sin, x), True, X).ops[-1].name == "cond"


def test_what_nobody_reads_is_left_out_of_loops_too() -> None:
    def turn(carry: Any, x: Any) -> Any:
        unread, read = carry
        return (unread @ unread, read + x), (jnp.exp(x), jnp.sin(x))

    def fun(x: Any, xs: Any) -> Any:
        (_, read), (_, stacked) = jax.lax.scan(turn, (x, x), xs)
        return read, stacked

    xs = jax.ShapeDtypeStruct((5, 16, 16), jnp.float32)
    (loop,) = flat(fun, X, xs).ops
    assert [op.name for op in loop.bodies[0].ops] == ["add", "sin"]
    assert loop.inputs[0] is None


# What is split over the axes "a" (4) and "b" (2): arguments with specs.
CASES: dict[str, tuple[Callable[..., Any], list[tuple[tuple[int, ...], P]]]] = {
    "elementwise": (lambda x, y: x * y + 1, [((8, 8), P("a")), ((8, 8), P("a"))]),
    "product": (lambda x, y: x @ y, [((8, 16), P("a")), ((16, 8), P(None, "b"))]),
    "contraction": (lambda x, y: x @ y, [((8, 16), P(None, "a")), ((16, 8), P("a"))]),
    "batched": (
        lambda x, y: jnp.einsum("bqd,bkd->bqk", x, y),
        [((8, 4, 4), P("a", "b")), ((8, 4, 4), P("a"))],
    ),
    "sum": (lambda x: x.sum(0), [((8, 8), P("a", "b"))]),
    "transpose": (lambda x: x.T, [((8, 16), P("a", "b"))]),
    "broadcast": (lambda x: jnp.broadcast_to(x[None], (3, 8, 8)), [((8, 8), P("a", "b"))]),
    "merge": (lambda x: x.reshape(32, 8), [((8, 4, 8), P("a", None, "b"))]),
    "cut": (lambda x: x.reshape(8, 4, 4), [((8, 16), P("a", "b"))]),
    "lookup": (lambda t, i: t[i], [((64, 8), P(None, "b")), ((8, 4), P("a"))]),
    "parts": (lambda x: jnp.split(x, 2, axis=1)[0], [((8, 16), P("a"))]),
    "convolution": (
        convolved,
        [((8, 4, 4, 2), P("a")), ((3, 3, 2, 8), P(None, None, None, "b"))],
    ),
    "convolution of split channels": (
        convolved,
        [((8, 4, 4, 8), P("a", None, None, "b")), ((3, 3, 8, 8), P(None, None, None, "b"))],
    ),
    "convolution that sums channels": (
        convolved,
        [((8, 4, 4, 8), P("a", None, None, "b")), ((3, 3, 8, 4), P(None, None, "b"))],
    ),
    "convolution of each channel": (
        functools.partial(convolved, groups=8),
        [((8, 4, 4, 8), P("a", None, None, "b")), ((3, 3, 1, 8), P(None, None, None, "b"))],
    ),
    "loop": (
        lambda x, w: jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), x), x, w),
        [((8, 8), P("a")), ((3, 8, 8), P())],
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_results_are_split_as_the_partitioner_splits_them(name: str) -> None:
    fun, arguments = CASES[name]
    mesh = jax.make_mesh((4, 2), ("a", "b"), axis_types=(AxisType.Auto,) * 2)
    args = [
        jax.ShapeDtypeStruct(
            shape,
            jnp.int32 if name == "lookup" and i else jnp.float32,
            sharding=NamedSharding(mesh, spec),
        )
        for i, (shape, spec) in enumerate(arguments)
    ]
    compiled = jax.jit(fun).lower(*args).compile()
    wanted = [
        math.prod(sharding.shard_shape(x.shape))
        for sharding, x in zip(
            jax.tree.leaves(compiled.output_shardings),
            jax.tree.leaves(jax.eval_shape(fun, *args)),
            strict=True,
        )
    ]
    program = flat(fun, *args)
    found = SizedProgram(program, [split_of(x.sharding, x.ndim) for x in args], dict(mesh.shape))
    assert [found.bytes_of(v) // 4 for v in program.outputs if v is not None] == wanted


@pytest.mark.parametrize(
    ("groups", "specs", "examples"),
    [
        (1, (P("a", None, None, "b"), P(None, None, None, "b")), 8 // 4),
        (2, (P("a"), P()), 8),
        (8, (P("a"), P()), None),
    ],
)
def test_what_a_product_reads_whole_is_gathered(
    groups: int, specs: Any, examples: int | None
) -> None:
    """An axis cannot split the channels of both operands, and none splits groups of channels."""
    mesh = jax.make_mesh((4, 2), ("a", "b"), axis_types=(AxisType.Auto,) * 2)
    fun = functools.partial(convolved, groups=groups)
    args = [
        jax.ShapeDtypeStruct(shape, jnp.float32, sharding=NamedSharding(mesh, spec))
        for shape, spec in zip([(8, 4, 4, 8), (3, 3, 8 // groups, 8)], specs, strict=True)
    ]
    text = jax.jit(fun).lower(*args).compile().as_text()
    assert ("all-gather" in str(text)) == bool(examples)
    found = SizedProgram(
        flat(fun, *args), [split_of(x.sharding, 4) for x in args], {"a": 4, "b": 2}
    )
    gathered = [op for op in found.program.ops if found.is_gather(op)]
    expected = [examples * 4 * 4 * 8 * 4] if examples else []
    assert [found.bytes_of(v) for op in gathered for v in op.outputs] == expected


def test_elementwise_operations_between_products_are_one_buffer() -> None:
    def fun(x: Any) -> Any:
        return jnp.sin(jnp.cos(x @ x) + 1) @ x

    # On a GPU the product, what is made of it in its place, and the result; a TPU fuses it, and
    # its rows of 16 numbers fill an eighth of those of a tile.
    assert held(fun, X) == 2
    assert held(fun, X, fusion=TPU) == 2 * 8


@pytest.mark.parametrize(
    ("shape", "itemsize", "padded"),
    [
        ((), 4, 4),
        ((16, 16), 4, 16 * 128 * 4),
        ((1024, 512), 4, 1024 * 512 * 4),
        ((1, 1000), 4, 1024 * 4),  # one row, in a tile of one
        ((3, 1000), 4, 4 * 1024 * 4),
        ((64, 56, 56, 64), 2, 64 * 56 * 56 * 128 * 2),  # neither channels nor batch fill 128
        ((128, 28, 28, 32), 2, 128 * 28 * 28 * 32 * 2),  # the batch does, and channels are rows
        ((0, 16), 4, 0),
    ],
)
def test_arrays_of_tpus_fill_tiles(shape: tuple[int, ...], itemsize: int, padded: int) -> None:
    assert tiled_nbytes(shape, itemsize) == padded


def test_a_buffer_lives_until_it_is_read_for_the_last_time() -> None:
    def fun(x: Any) -> Any:
        a = x @ x
        b = a @ x
        c = b @ x
        return a @ c  # `a` is still there when c is made, and b is not when this is

    assert held(fun, X) == 3
    assert held(lambda x: ((x @ x) @ x) @ x, X) == 2


def test_a_chain_of_expensive_operations_is_not_kept_waiting() -> None:
    """Products that only results are made of, as gradients of params, wait until it is done."""

    def fun(x: Any, w: Any) -> Any:
        apart = []
        for _ in range(3):
            x, before = x @ w, x
            apart.append(before.T @ x)
        return x, apart

    ops = sized(fun, X, X).program.ops
    runs = [
        Run(n, frozenset(filter(None, op.inputs)), frozenset(op.outputs))
        for n, op in enumerate(ops)
    ]
    order = [run.number for run in waiting_order(runs, lambda n: ops[n].name == "dot_general")]
    products = [n for n, op in enumerate(ops) if op.name == "dot_general"]
    assert [n for n in order if n in products] == products[::2] + products[1::2]
    assert sorted(order) == list(range(len(runs)))


def test_on_several_devices_operands_of_what_waits_are_held() -> None:
    def fun(x: Any, w: Any) -> Any:
        apart = []
        for _ in range(4):
            x, before = x @ w, x
            apart.append((before.T @ x).sum())
        return apart

    program, whole = flat(fun, X, X), [(frozenset[str](),) * 2] * 2
    one, several = (most_live(SizedProgram(program, whole, {"a": n}), GPU) for n in (1, 2))
    assert one.total < 4 * KB < several.total


def test_convolutions_of_gpus_to_float32_read_float32() -> None:
    x, k = (jax.ShapeDtypeStruct(s, jnp.bfloat16) for s in ((8, 4, 4, 8), (3, 3, 8, 8)))
    wide = functools.partial(convolved, dtype=jnp.float32)
    traced = jax.make_jaxpr(wide)(x, k)
    names = {p: [op.name for op in flattened(traced, p).ops] for p in ("cuda", "tpu")}
    assert names["tpu"] == ["conv_general_dilated"]
    assert names["cuda"] == [*["convert_element_type"] * 2, *names["tpu"]]
    assert len(flat(convolved, x, k).ops) == 1


def test_what_frees_as_much_as_it_writes_runs_at_once() -> None:
    runs = [
        Run(0, frozenset(), frozenset({10})),
        Run(1, frozenset(), frozenset({11})),
        Run(2, frozenset({10}), frozenset({12})),  # frees 4, and writes 4
        Run(3, frozenset({11}), frozenset({13})),  # writes 8, and frees 4: it stays
        Run(4, frozenset({11, 13}), frozenset({14})),
        Run(5, frozenset({12}), frozenset({15})),  # frees nothing, as 12 is kept
    ]
    sizes = {10: 4, 11: 4, 12: 4, 13: 8, 14: 1, 15: 1}
    order = [run.number for run in memory_order(runs, sizes, {12, 14, 15})]
    assert order == [0, 2, 1, 3, 4, 5]


def test_a_gradient_is_added_to_its_sum_before_the_next_is_made() -> None:
    """Four gradients of 1 kB are traced before four sums, which replace arguments."""

    def add_all(x: Any, totals: Any) -> Any:
        gradients = [jnp.sort(x * i) for i in range(1, 5)]
        return [total + g for total, g in zip(totals, gradients, strict=True)]

    program = sized(add_all, X, [X] * 4)
    early, traced = (dataclasses.replace(GPU, frees_early=is_early) for is_early in (True, False))
    # One or all four gradients, and the operand of the last sort.
    assert most_live(program, early, range(4)).total / KB == 2
    assert most_live(program, traced, range(4)).total / KB == 5


def test_results_that_replace_nothing_have_room_of_their_own() -> None:
    """Arrays of no more than its size lie in a room before its result is written."""

    def fun(state: Any, x: Any) -> Any:
        small = x @ x  # 1 kB, which fits
        wide = jnp.concatenate([small] * 8) @ x  # 8 kB, which do not, made of 8
        return state * 2 + jnp.sum(wide)

    shared, own = (dataclasses.replace(GPU, shares_results=is_so) for is_so in (True, False))
    assert held(fun, X, X, fusion=shared) == pytest.approx(16 + 1, abs=0.1)
    assert held(fun, X, X, fusion=own) == pytest.approx(16 + 1, abs=0.1)
    program = sized(lambda x: (jnp.sort(jnp.sort(x) * 2), x * 2), X)
    # Two rooms; what is sorted first fits into one of them.
    assert most_live(program, shared).total / KB == 2
    assert most_live(program, own).total / KB == 2 + 1


@pytest.mark.parametrize(("readers", "is_written"), [(2, False), (3, False), (4, True)])
def test_a_sum_of_two_is_written_where_many_read_it(readers: int, is_written: bool) -> None:
    """Each reader would read two arrays: 2n, beside 2 + 1 to write it and n to read it."""

    def fun(x: Any) -> Any:
        both = (x @ x) + (x @ (2 * x))
        return [jnp.sum(both * i) for i in range(2, readers + 2)]

    program = sized(fun, X)
    (add,) = (op for op in program.program.ops if op.name == "add")
    assert (add.outputs[0] in buffer_sizes(program, GPU)) == is_written


def test_results_of_one_kernel_share_what_they_are_made_of() -> None:
    """An update writes moments and params at once; what a product stands between is computed twice.

    Both functions have four results, made of the same sum of two arrays.
    """

    def update(x: Any, y: Any) -> Any:
        both = x + y
        return [both * i for i in range(2, 6)]

    def apart(x: Any, y: Any) -> Any:
        both = x + y
        found = [both * 2]
        for i in range(3, 6):
            found.append(both * i + found[-1] @ x)
        return found

    for fun, is_written in ((update, False), (apart, True)):
        program = sized(fun, X, X)
        add = next(op for op in program.program.ops if op.name == "add")
        assert (add.outputs[0] in buffer_sizes(program, GPU)) == is_written


def test_what_takes_long_to_compute_is_written_on_gpus() -> None:
    def fun(x: Any) -> Any:
        narrow = jnp.tanh((x @ x).astype(jnp.bfloat16))
        return [jnp.sum(narrow, 0), jnp.sum(narrow * narrow, 0)]

    program = sized(fun, X)
    (tanh,) = (op for op in program.program.ops if op.name == "tanh")
    assert tanh.outputs[0] in buffer_sizes(program, GPU)
    assert tanh.outputs[0] not in buffer_sizes(program, dataclasses.replace(GPU, keeps_work=False))


def test_a_loop_holds_what_it_stacks_and_one_turn() -> None:
    def turn(x: Any, _: Any) -> Any:
        inside = jnp.concatenate([x, x, x]) @ x  # 3 kB, from 3 kB
        return inside[:16], inside

    live = most_live(sized(lambda x: jax.lax.scan(turn, x, None, length=5), X), GPU)
    # The carry, five times 3 kB, and in a turn the concatenation; its product is in the stack.
    assert live.total / KB == pytest.approx(1 + 15 + 3, abs=0.1)


def test_a_loop_writes_its_carry_where_it_began() -> None:
    def fun(x: Any) -> Any:
        begun = x @ x
        return jax.lax.scan(lambda total, _: (total + x, None), begun, None, length=5)[0]

    assert held(fun, X) == 1
    assert held(lambda x: (fun(x), x @ x), X) == 2


def test_what_a_loop_stacks_for_nobody_takes_no_room() -> None:
    def fun(x: Any) -> Any:
        return jax.lax.scan(lambda x, _: (x @ x, x), x, None, length=50)[0]

    assert held(fun, X) < 4


def test_what_replaces_arguments_takes_no_room() -> None:
    program = sized(lambda x: (x @ x) * 2, X)
    assert most_live(program, GPU, [0]) == Live(KB, Counter(temporaries=KB))
    assert most_live(program, GPU).total == KB  # in the place of the product
    donated = sized(lambda x: x * 2, X)
    assert most_live(donated, GPU, [0]).total == 0
    assert most_live(donated, GPU).total == KB


def test_branches_count_as_the_largest() -> None:
    def fun(p: Any, x: Any) -> Any:
        return jax.lax.cond(p, lambda x: ((x @ x) @ x) @ x, lambda x: x, x)

    assert held(fun, jax.ShapeDtypeStruct((), bool), X) == pytest.approx(1 + 2, abs=1)


def test_a_shard_map_holds_the_arrays_of_one_device() -> None:
    mesh = jax.make_mesh((4, 2), ("a", "b"), axis_types=(AxisType.Auto,) * 2)

    @functools.partial(jax.shard_map, mesh=mesh, in_specs=P("a"), out_specs=P("a"))
    def fun(x: Any) -> Any:
        return (x @ x.T) @ x

    x = jax.ShapeDtypeStruct((64, 64), jnp.float32, sharding=NamedSharding(mesh, P("a")))
    program = SizedProgram(flat(fun, x), [split_of(x.sharding, 2)], dict(mesh.shape))
    # A quarter of 16 kB as the result, and inside of it 16 x 16 numbers.
    assert most_live(program, GPU).total / KB == pytest.approx(4 + 1, abs=0.1)
