"""What jaxmp reads in JAX's equations is there, and means what it did.

What a param of an equation is called is not public. When a test fails here with a new JAX, its
message says which name is gone and which file has to learn the new one.
"""

import ast
import functools
import pathlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.extend import core
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxmp._program import compat
from tests.support.dots import equations

pytestmark = pytest.mark.jax

PACKAGE = pathlib.Path(__file__).parents[2] / "jaxmp"
COMPAT, FLOPS, PROGRAM = "_program/compat.py", "_program/flops.py", "_program/program.py"
WIRING, EVALUATE = "_program/wiring.py", "_program/evaluate.py"
PARTS = "_program/parts.py"
OPERATIONS, CONTROL, FLOW = (
    "_autocast/planners.py",
    "_autocast/control_flow.py",
    "_autocast/plan.py",
)
READING, RUN = "_autocast/reading.py", "_autocast/run.py"
LEFT, STEPS = "_autocast/coverage.py", "_autocast/op_plans.py"
TALLY = "_tools/inspect/summarize.py"
BRANCHES = "_tools/inspect/branches.py"
STORAGE, AGAIN = "_recompute/storage.py", "_program/control_flow.py"
PIECES, LOOKUPS = "_recompute/run.py", "_recompute/lookups.py"
INVARIANTS = "_recompute/invariants.py"
DERIVATIVES = "_program/derivatives.py"
REDUCED, SUMMED = "_float32_reduction/control_flow.py", "_float32_reduction/custom_derivatives.py"
HI = "_program/hi_primitives.py"
REDUCTION, FREED = "_float32_reduction/reductions.py", "_program/explicit_axes.py"
OPEN = "_float32_reduction/open_sums.py"

LOCK = "_tools/inspect/lock.py"
RELEASED = "_gradient_release/values.py"
# They read the precision of products.
MULTIPLYING = (OPERATIONS, DERIVATIVES, OPEN, TALLY)

# An equation of its own, or a call that is shown as one.
CHECKPOINT = "checkpoint" if jax.config.jax_remat3 else "remat2"  # type: ignore[attr-defined]
X = jnp.ones((4, 4))
MESH = Mesh(np.array(jax.devices()[:2]), ("devices",))
SPEC = PartitionSpec("devices")


@jax.custom_vjp
def own_gradient(x: Any) -> Any:
    return x @ x


own_gradient.defvjp(lambda x: (own_gradient(x), x), lambda x, g: (g,))


@jax.custom_batching.custom_vmap
def own_batching(x: Any) -> Any:
    return x @ x


own_batching.def_vmap(lambda size, batched, x: (x @ x, True))


def solve(x: Any) -> Any:
    return lax.custom_linear_solve(lambda y: x @ y, x, lambda _, b: b, lambda _, b: b)


def shard(fun: Callable[[Any], Any]) -> Callable[[Any], Any]:
    return jax.shard_map(fun, mesh=MESH, in_specs=SPEC, out_specs=PartitionSpec())


def convolve(x: Any) -> Any:
    return lax.conv(x[None], x[:, :, None], (1,), "SAME")


# For each primitive that jaxmp looks into, a function that makes an equation of it.
FUNCTIONS: dict[str, Callable[[Any], Any]] = {
    "jit": jax.jit(lambda x: x @ x),
    "scan": lambda x: lax.scan(lambda c, row: (c @ x + row[:, None], c), x, X)[0],
    "while": lambda x: lax.while_loop(lambda c: jnp.sum(c) < 9, lambda c: c @ x, x),
    "cond": lambda x: lax.cond(jnp.sum(x) > 0, jnp.sin, jnp.cos, x),
    CHECKPOINT: jax.checkpoint(lambda x: x @ x),
    "custom_jvp_call": jax.nn.relu,
    "custom_vjp_call": own_gradient,
    "custom_vmap_call": own_batching,
    "shard_map": shard(lambda x: lax.psum(x, "devices")),
    "custom_linear_solve": solve,
    "dot_general": lambda x: x @ x,
    "integer_pow": lambda x: x**3,
    "reduce_precision": lambda x: lax.reduce_precision(x, 8, 7),
    "sharding_constraint": lambda x: lax.with_sharding_constraint(x, NamedSharding(MESH, SPEC)),
    "gather": lambda x: x[jnp.array([0])],
    "iota": lambda x: x[0] + lax.iota("float32", 4),
    "broadcast_in_dim": lambda x: lax.broadcast_in_dim(x, (4, 4, 4), (1, 2)),
    "concatenate": lambda x: jnp.concatenate([x, x]),
    "scatter-add": lambda x: x.at[jnp.array([0])].add(x[:1]),
    "conv_general_dilated": convolve,
    "ragged_dot_general": lambda x: lax.ragged_dot(x, x[None], jnp.array([4])),
    "convert_element_type": lambda x: x.astype(jnp.bfloat16),
    "psum_invariant": shard(lambda x: lax.psum(x, "devices")),
    "all_gather": shard(lambda x: lax.pmax(jnp.sum(lax.all_gather(x, "devices")), "devices")),
}
# Cannot be bound outside of a shard_map.
COLLECTIVES = ("psum_invariant", "all_gather")
Check = Callable[[Any], bool]


def is_a(*types: type) -> Check:
    return lambda value: isinstance(value, types)


def tuple_of(check: Check) -> Check:
    return lambda value: isinstance(value, tuple) and all(map(check, value))


def is_jaxpr(value: Any) -> bool:
    return isinstance(value, (core.Jaxpr, core.ClosedJaxpr))


def is_precision(value: Any) -> bool:
    return value is None or isinstance(value, (tuple, lax.Precision, lax.DotAlgorithm))


def has(*names: str) -> Check:
    return lambda value: all(hasattr(value, name) for name in names)


is_dtype = is_a(np.dtype, type(None))
are_pairs = tuple_of(tuple_of(is_a(tuple)))
numbers_of_a_convolution = has("lhs_spec", "rhs_spec", "out_spec")


class Read(NamedTuple):
    """A param that is read: of which primitive, in which form, by which files."""

    primitive: str
    param: str
    check: Check
    files: tuple[str, ...]


READ = [
    Read("jit", "jaxpr", is_jaxpr, (CONTROL, PROGRAM, READING, STORAGE)),
    Read("jit", "name", is_a(str), (PROGRAM, READING, FLOW, REDUCED, STORAGE, AGAIN)),
    # A truth value, or in newer versions an enum of such: handed on as it is.
    Read("jit", "inline", lambda value: value is not None, (REDUCED, AGAIN)),
    Read("jit", "in_shardings", is_a(tuple), (COMPAT,)),
    Read("jit", "out_shardings", is_a(tuple), (COMPAT,)),
    Read("jit", "in_layouts", is_a(tuple), (COMPAT,)),
    Read("jit", "out_layouts", is_a(tuple), (COMPAT,)),
    Read("jit", "donated_invars", tuple_of(is_a(bool)), (COMPAT,)),
    Read("jit", "compiler_options_kvs", is_a(tuple), (COMPAT,)),
    Read("scan", "reverse", is_a(bool), (WIRING,)),
    Read("scan", "length", is_a(int), (WIRING,)),
    Read("while", "cond_nconsts", is_a(int), (WIRING,)),
    Read("while", "body_nconsts", is_a(int), (WIRING,)),
    Read("cond", "branches", tuple_of(is_jaxpr), (WIRING,)),
    # Bound again as it is, and so not closed.
    Read(CHECKPOINT, "jaxpr", is_a(core.Jaxpr), (CONTROL,)),
    Read(CHECKPOINT, "differentiated", is_a(bool), (REDUCED,)),
    Read(CHECKPOINT, "prevent_cse", is_a(bool), (REDUCED, RELEASED)),
    Read(CHECKPOINT, "policy", lambda value: value is None or callable(value), (REDUCED, PIECES)),
    Read("custom_jvp_call", "call_jaxpr", is_jaxpr, (CONTROL, STORAGE, EVALUATE)),
    Read("custom_jvp_call", "num_consts", is_a(int), (DERIVATIVES,)),
    Read("custom_jvp_call", "symbolic_zeros", is_a(bool), (PARTS,)),
    Read("custom_vjp_call", "num_consts", is_a(int), (DERIVATIVES,)),
    Read("custom_vjp_call", "call_jaxpr", is_jaxpr, (CONTROL, EVALUATE)),
    Read("shard_map", "jaxpr", is_jaxpr, (CONTROL,)),
    Read("shard_map", "mesh", has("axis_names"), (COMPAT,)),
    Read("shard_map", "in_specs", tuple_of(is_a(PartitionSpec)), (COMPAT,)),
    Read("shard_map", "out_specs", tuple_of(is_a(PartitionSpec)), (COMPAT,)),
    Read("shard_map", "newly_manual_axes", is_a(frozenset, set, tuple), (COMPAT,)),
    Read("shard_map", "check_vma", is_a(bool), (COMPAT,)),
    Read("custom_linear_solve", "jaxprs", has("solve"), (FLOPS,)),
    Read("dot_general", "preferred_element_type", is_dtype, (RUN, STEPS)),
    Read("dot_general", "precision", is_precision, (*MULTIPLYING, LEFT, LOCK, READING)),
    Read("dot_general", "dimension_numbers", are_pairs, (READING, FLOPS)),
    Read("dot_general", "out_sharding", lambda value: value is None, (READING,)),
    Read("conv_general_dilated", "precision", is_precision, MULTIPLYING),
    Read("conv_general_dilated", "dimension_numbers", numbers_of_a_convolution, (FLOPS,)),
    Read("conv_general_dilated", "window_strides", tuple_of(is_a(int)), (FLOPS,)),
    Read("conv_general_dilated", "padding", tuple_of(is_a(tuple)), (FLOPS,)),
    Read("conv_general_dilated", "lhs_dilation", tuple_of(is_a(int)), (FLOPS,)),
    Read("conv_general_dilated", "rhs_dilation", tuple_of(is_a(int)), (FLOPS,)),
    Read("conv_general_dilated", "batch_group_count", is_a(int), (FLOPS,)),
    Read("ragged_dot_general", "precision", is_precision, MULTIPLYING),
    Read(
        "ragged_dot_general",
        "ragged_dot_dimension_numbers",
        has("dot_dimension_numbers", "rhs_group_dimensions"),
        (FLOPS,),
    ),
    Read(
        "gather", "dimension_numbers", has("operand_batching_dims", "offset_dims"), (STEPS, LOOKUPS)
    ),
    Read("gather", "slice_sizes", tuple_of(is_a(int)), (STEPS, LOOKUPS)),
    Read("gather", "mode", is_a(lax.GatherScatterMode), (LOOKUPS,)),
    Read("gather", "fill_value", lambda value: value is None or value == 0, (LOOKUPS,)),
    Read("iota", "dimension", is_a(int), (LOOKUPS, INVARIANTS)),
    Read("iota", "dtype", is_dtype, (INVARIANTS,)),
    Read("iota", "shape", tuple_of(is_a(int)), (INVARIANTS,)),
    Read("concatenate", "dimension", is_a(int), (LOOKUPS,)),
    Read("broadcast_in_dim", "broadcast_dimensions", tuple_of(is_a(int)), (LOOKUPS,)),
    Read("scatter-add", "update_jaxpr", is_a(core.Jaxpr), (OPERATIONS,)),
    *(
        Read("scatter-add", name, lambda value: value is not None, (SUMMED,))
        for name in ("dimension_numbers", "indices_are_sorted", "unique_indices", "mode")
    ),
    Read("sharding_constraint", "sharding", has("num_devices"), (FREED,)),
    Read("convert_element_type", "new_dtype", is_dtype, (OPERATIONS, REDUCTION, OPEN, FREED)),
    Read("reduce_precision", "exponent_bits", is_a(int), (LOCK,)),
    Read("reduce_precision", "mantissa_bits", is_a(int), (LOCK,)),
    Read("psum_invariant", "axes", is_a(tuple), (TALLY, REDUCTION)),
    Read("all_gather", "axis_name", is_a(tuple, str), (TALLY,)),
]
# Read where it is there: no primitive that is tested here needs to have it.
OPTIONAL = {(file, "out_dtype") for file in (OPERATIONS, REDUCTION)}
OPTIONAL |= {(BRANCHES, "branches_platforms")}
OPTIONAL |= {(HI, "_prim"), (HI, "traced"), (HI, "prevent_cse")}
# Of primitives that jaxmp itself adds.
OWN = {
    (REDUCTION, "product_map"),
    (REDUCTION, "specs"),
    *((HI, name) for name in ("call", "jaxpr", "name")),
}
# Told apart by version, in `scan_counts`, which has a test of its own.
BY_VERSION = {(COMPAT, "ft_in"), (COMPAT, "num_consts"), (COMPAT, "num_carry")}


@functools.cache
def equation(primitive: str) -> Any:
    """The first equation of a primitive in the function that is there to make one."""
    names = []
    for found in equations(jax.make_jaxpr(FUNCTIONS[primitive])(X)):
        if found.primitive.name == primitive:
            return found
        names.append(found.primitive.name)
    pytest.fail(
        f"jax {jax.__version__} no longer has an equation {primitive!r} where it had one, only "
        f"{names}: jaxmp/_program/op_classes.py and what reads its params know it by that name"
    )


def check_param(read: Read, params: Mapping[str, Any]) -> None:
    """Fails if a param is missing, or is no longer what the code that reads it takes it for."""
    readers = ", ".join(f"jaxmp/{file}" for file in read.files)
    if read.param not in params:
        pytest.fail(
            f"jax {jax.__version__} no longer has the param {read.param!r} of {read.primitive}, "
            f"which {readers} reads. It has {', '.join(sorted(params))}"
        )
    if not read.check(params[read.param]):
        pytest.fail(
            f"in jax {jax.__version__} the param {read.param!r} of {read.primitive} has another "
            f"form than {readers} expects: {params[read.param]!r}"
        )


@pytest.mark.parametrize("read", READ, ids=lambda read: f"{read.primitive}-{read.param}")
def test_a_param_is_there(read: Read) -> None:
    check_param(read, equation(read.primitive).params)


def test_a_missing_param_is_named() -> None:
    read = Read("scan", "jaxpr", is_jaxpr, (CONTROL,))
    told = r"no longer has the param 'jaxpr' of scan, which jaxmp/_autocast/control_flow.py reads"
    with pytest.raises(pytest.fail.Exception, match=told + r"\. It has body, length"):
        check_param(read, {"body": None, "length": 3})
    with pytest.raises(pytest.fail.Exception, match="'jaxpr' of scan has another form than jaxmp/"):
        check_param(read, {"jaxpr": "f"})


def _params_read(path: pathlib.Path) -> Iterator[str]:
    """The names in `params["name"]` and `params.get("name")`."""
    for node in ast.walk(ast.parse(path.read_text())):
        holder, key = None, None
        if isinstance(node, ast.Subscript):
            holder, key = node.value, node.slice
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.args:
            holder, key = (node.func.value if node.func.attr == "get" else None), node.args[0]
        named = isinstance(holder, ast.Name) and holder.id == "params"
        held = isinstance(holder, ast.Attribute) and holder.attr == "params"
        if (named or held) and isinstance(key, ast.Constant) and isinstance(key.value, str):
            yield key.value


def unchecked(folder: pathlib.Path) -> set[tuple[str, str]]:
    """Params that the code reads and no test here knows: pairs of a file and a name."""
    folders = ("_program", "_autocast", "_tools/inspect", "_recompute", "_float32_reduction")
    files = [path for each in folders for path in folder.glob(f"{each}/*.py")]
    known = (
        {(file, read.param) for read in READ for file in read.files} | OPTIONAL | OWN | BY_VERSION
    )
    return {
        (str(path.relative_to(folder)), name)
        for path in files
        # The example in audit's docstring has params of its own.
        for name in _params_read(path)
    } - known


@pytest.mark.parametrize("read", READ, ids=lambda read: f"{read.primitive}-{read.param}")
def test_a_checked_param_is_read(read: Read) -> None:
    for file in read.files:
        names = set(_params_read(PACKAGE / file))
        assert read.param in names or file == SUMMED, f"{file} no longer reads {read.param}"


def test_every_param_that_the_code_reads_is_checked(tmp_path: pathlib.Path) -> None:
    assert not unchecked(PACKAGE)
    for name in ("_autocast", "_program"):
        (tmp_path / name).mkdir()
    (tmp_path / COMPAT).write_text('a = params["length"]')
    (tmp_path / OPERATIONS).write_text('b = op.params.get("new_dtype"), op.params["sharding"]')
    assert unchecked(tmp_path) == {(COMPAT, "length"), (OPERATIONS, "sharding")}


def test_the_programs_of_a_loop_come_in_order() -> None:
    """The condition of a `while` before its body, as those who bind it again expect."""
    loop = equation("while")
    names = [id(loop.params[name]) for name in ("cond_jaxpr", "body_jaxpr")]
    assert [id(program) for program in compat.bodies_of(loop)] == names


def test_scan_counts() -> None:
    def fun(x: Any, y: Any) -> Any:
        return lax.scan(lambda c, row: ((c[0] @ x, c[1] @ y), row), (x, y), X)

    (found,) = (e for e in equations(jax.make_jaxpr(fun)(X, X)) if e.primitive.name == "scan")
    assert compat.scan_counts(found.params) == (2, 2)
    assert len(found.invars) == 2 + 2 + 1


@pytest.mark.parametrize("primitive", [name for name in FUNCTIONS if name not in COLLECTIVES])
def test_an_equation_can_be_bound_again(primitive: str) -> None:
    """`get_bind_params` gives what `bind` takes, and nothing that a param says is lost."""
    old = equation(primitive)
    avals = [atom.aval for atom in old.invars]
    again = jax.make_jaxpr(lambda *values: compat.bind(old, values))(*avals)
    (new,) = (e for e in equations(again) if e.primitive.name == primitive)
    assert set(new.params) == set(old.params)
    plain = (bool, int, str, type(None), PartitionSpec, tuple)
    for name, value in old.params.items():
        if isinstance(value, plain) and not any(map(is_jaxpr, jax.tree.leaves(value))):
            assert new.params[name] == value, name


def test_a_checkpoint_keeps_its_policy() -> None:
    policy = jax.checkpoint_policies.dots_saveable
    fun = jax.checkpoint(lambda x: x @ x, policy=policy, prevent_cse=False)
    (old,) = (e for e in equations(jax.make_jaxpr(fun)(X)) if e.primitive.name == CHECKPOINT)
    again = jax.make_jaxpr(lambda x: compat.bind(old, [x]))(X)
    (new,) = (e for e in equations(again) if e.primitive.name == CHECKPOINT)
    assert (new.params["policy"], new.params["prevent_cse"]) == (policy, False)


@pytest.mark.parametrize(
    ("options", "plain"),
    [
        ({}, True),
        ({"static_argnums": ()}, True),
        ({"donate_argnums": 0}, False),
        ({"in_shardings": jax.NamedSharding(MESH, PartitionSpec())}, False),
        ({"out_shardings": jax.NamedSharding(MESH, PartitionSpec("devices"))}, False),
    ],
)
def test_is_plain_jit(options: dict[str, Any], plain: bool) -> None:
    jitted = jax.jit(lambda x: x @ x, **options)
    (found,) = (e for e in equations(jax.make_jaxpr(jitted)(X)) if e.primitive.name == "jit")
    assert compat.is_plain_jit(found.params) is plain
    # JAX takes compiler options at the outermost jit only, for now.
    assert not compat.is_plain_jit({**found.params, "compiler_options_kvs": (("key", 1),)})


def test_the_type_of_a_value() -> None:
    aval = compat.type_of(X)
    assert (aval.shape, aval.dtype) == (X.shape, X.dtype)
    assert jax.typeof(1.0).weak_type  # positive control
    assert not compat.type_of(1.0).weak_type
    assert compat.type_of(True).dtype == jnp.bool_
    seen = []

    def varying(x: Any) -> Any:
        seen.append(compat.type_of(x))
        return lax.psum(x, "devices")

    jax.make_jaxpr(shard(varying))(X)
    assert seen[0] != compat.type_of(X[: seen[0].shape[0]])  # it varies over devices
    assert compat.unstacked(aval).shape == (4,)


def test_names_start_afresh_in_a_body() -> None:
    bodies = []

    def fun(x: Any) -> Any:
        with jax.named_scope("outer"):
            bodies.append(compat.trace(jnp.sin, [jax.typeof(x)]))
            return jnp.sin(x)

    (around,) = jax.make_jaxpr(fun)(X).eqns
    (inside,) = bodies[0].eqns
    assert str(around.source_info.name_stack) == "outer"
    assert str(inside.source_info.name_stack) == ""


def test_constants_of_jaxprs() -> None:
    closed = jax.make_jaxpr(lambda x: x + np.ones((4, 4), np.float32))(X)
    assert isinstance(compat.open_jaxpr(closed), core.Jaxpr)
    assert len(compat.open_jaxpr(closed).constvars) == len(compat.consts_of(closed))
    if compat.consts_of(closed):
        with pytest.raises(ValueError, match="may not have constants"):
            compat.without_consts(closed)
    bare = jax.make_jaxpr(jnp.sin)(X)
    assert compat.without_consts(bare).eqns == compat.open_jaxpr(bare).eqns


def test_the_program_of_tangents() -> None:
    _, backward = jax.vjp(lambda x: jnp.sum(x.astype(jnp.bfloat16) * 2), X)
    made = {atom.aval.dtype for e in compat.linear_program(backward).eqns for atom in e.outvars}
    assert jnp.dtype("bfloat16") in made


def test_programs_inside_of_an_equation() -> None:
    assert len(compat.sub_jaxprs(equation("cond"))) == 2
    assert len(compat.sub_jaxprs(equation("while"))) == 2
    assert len(compat.sub_jaxprs(equation("jit"))) == 1
    assert compat.sub_jaxprs(equation("dot_general")) == []
