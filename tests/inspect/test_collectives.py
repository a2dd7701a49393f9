"""What collectives carry: the report, and the check that gradients are summed in float32."""

import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

import jaxmp
from jaxmp._tools.inspect.collective_report import Collectives
from tests.support.audit_lines import line_of
from tests.support.collective_programs import (
    BF16,
    F32,
    HEAD,
    LAST,
    LAYER,
    LAYERS,
    WIDTH,
    arguments,
    array,
    carried,
    every_kind,
    every_kind_carries,
    fully_sharded,
    size,
    step,
)

pytestmark = [
    pytest.mark.jax,
    pytest.mark.annotations,
    pytest.mark.usefixtures("standard_promotion"),
]

GRADIENTS = LAYERS * LAYER + LAST


def mesh_of(*sizes: int, names: tuple[str, ...] = ("data", "model")) -> Mesh:
    types = (AxisType.Auto,) * len(sizes)
    return jax.make_mesh(sizes, names[: len(sizes)], axis_types=types)


def product(w: Any, x: Any) -> Any:
    return jnp.sum(jnp.tanh(x.astype(BF16) @ w.astype(BF16)).astype(F32))  # the product


def product_arguments(mesh: Any) -> tuple[Any, Any]:
    return array(mesh, (16, 32)), array(mesh, (64, 16), "data")


@pytest.fixture(scope="module")
def low() -> Collectives:
    """Tensor parallel on 4 x 2 devices, computed in bfloat16."""
    return jaxmp.sharding.collectives(
        step(), *arguments(mesh_of(4, 2), (None, "model"), ("model",))
    )


# --- what is read -------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [BF16, F32])
def test_gradients_are_summed_in_the_dtype_that_they_are_computed_in(dtype: Any) -> None:
    """The fault that all this is about, and that it is seen."""
    report = jaxmp.sharding.collectives(step(dtype), *arguments(mesh_of(8)))
    assert report.bytes("all-reduce", dtype, "data", "add") == size(GRADIENTS, dtype=dtype) + (
        4 if dtype == F32 else 0
    )
    assert report.bytes() == size(GRADIENTS, dtype=dtype) + 4  # and the loss
    assert report.mesh_axes == (("data", 8),)
    assert (report.devices, report.origin) == (8, "program after partitioning")


def test_the_compiled_program_of_a_cpu_hides_it() -> None:
    """Why the program is read after partitioning."""
    text = jax.jit(step()).lower(*arguments(mesh_of(8))).compile().as_text()
    report = jaxmp.sharding.collectives(text)
    assert (report.bytes(dtype=BF16), report.origin) == (0, "given program")
    assert report.bytes(dtype=F32) == size(GRADIENTS, dtype=F32) + 4


def test_axes(low: Collectives) -> None:
    """Of a layer and of the head a device has half; activations are 16 x 256 and 16 x 512."""
    layers, activations = size(LAYERS * LAYER), size(LAYERS, 16, WIDTH)
    assert carried(low) == {
        ("all-reduce", "add", "bfloat16", ("data",)): (layers + size(LAST)) // 2,
        ("all-reduce", "add", "bfloat16", ("model",)): activations + size(16, HEAD),
        ("all-gather", "", "bfloat16", ("model",)): 2 * activations,
        ("all-reduce", "add", "float32", ("data",)): 4,
    }
    assert {row.axes: row.group_size for row in low} == {("data",): 4, ("model",): 2}


def test_every_kind() -> None:
    mesh = mesh_of(4, 2)
    run, args = every_kind(mesh)
    assert carried(jaxmp.sharding.collectives(run, *args)) == every_kind_carries(mesh)


@pytest.mark.parametrize("order", [[3, 1, 0, 2, 7, 5, 4, 6], [7, 6, 5, 4, 3, 2, 1, 0]])
def test_axes_of_a_mesh_in_another_order(order: list[int]) -> None:
    """The groups of a program are of positions in the mesh, and not of the numbers of devices."""
    devices = np.asarray(jax.devices())[order].reshape(4, 2)
    mesh = Mesh(devices, ("data", "model"), axis_types=(AxisType.Auto,) * 2)
    run, args = every_kind(mesh)
    report = jaxmp.sharding.collectives(run, *args)
    assert carried(report) == every_kind_carries(mesh)
    (over_model,) = report.select(reducer="max")
    assert over_model.groups == ((0, 1), (2, 3), (4, 5), (6, 7))


def test_three_axes() -> None:
    mesh = mesh_of(2, 2, 2, names=("replica", "data", "model"))

    def body(x: Any) -> Any:
        return lax.psum(x, ("replica", "data")), lax.psum(x, ("replica", "model"))

    specs = {"in_specs": PartitionSpec("data"), "out_specs": PartitionSpec(None)}
    run = jax.shard_map(body, mesh=mesh, check_vma=False, **specs)
    report = jaxmp.sharding.collectives(run, array(mesh, (8,), "data"))
    assert sorted(row.axes or () for row in report) == [("replica", "data"), ("replica", "model")]
    assert report.bytes(axis="data") == report.bytes(axis="model") == 16
    assert report.bytes(axis="replica") == report.bytes(axis=("data", "model")) == 32


@pytest.mark.parametrize("dtype", [BF16, F32])
def test_fully_sharded_gathers(dtype: Any) -> None:
    run, args = fully_sharded(mesh_of(8), dtype)
    report = jaxmp.sharding.collectives(run, *args)
    assert report.bytes("all-gather", dtype) == size(GRADIENTS, dtype=dtype)
    assert report.bytes("all-gather") == size(GRADIENTS, dtype=dtype)


def test_loops(low: Collectives) -> None:
    in_layers = [row for row in low if row.size == size(LAYER) // 2]
    assert [(row.runs, row.bytes) for row in in_layers] == [(LAYERS, LAYERS * size(LAYER) // 2)]
    mesh = mesh_of(8)

    def run(x: Any) -> Any:
        def total(i: Any, y: Any) -> Any:
            return lax.fori_loop(2, 9, lambda j, y: y + jnp.sum(x * j * i, 0), y)

        known = lax.fori_loop(0, 3, total, jnp.zeros(16))
        unknown = lax.while_loop(
            lambda y: jnp.max(y) < 1.0, lambda y: y + jnp.sum(jnp.sin(x * y), 0), known
        )
        return known, unknown

    report = jaxmp.sharding.collectives(run, array(mesh, (8, 16), "data"))
    sums = report.select("all-reduce", F32)
    assert sorted(row.runs for row in sums) == [1, 3 * 7]
    assert report.unseen[1].startswith("while loops with collectives (1): how often they run is")
    assert len(low.unseen) == 2


def first(w: Any, x: Any) -> Any:
    return jnp.sin(x @ w.astype(BF16))


def second(w: Any, x: Any) -> Any:
    return jnp.sin(x @ w.astype(BF16))


def test_lines_are_those_of_the_own_product() -> None:
    """Of products alike, each has its own line, whichever was traced first in this process."""
    mesh = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Auto,))
    w, x = array(mesh, (2, 32, 32)), array(mesh, (64, 32), "data", dtype=BF16)

    def both(w: Any, x: Any) -> Any:
        return jnp.sum(second(w[1], first(w[0], x)).astype(F32))

    def alone(w: Any, x: Any) -> Any:
        return jnp.sum(second(w[0], x).astype(F32))

    for loss, names in ((both, ["(first)", "(second)"]), (alone, ["(second)"])):
        for gradient in (jax.grad(loss), jaxmp.grad(loss, reduce_dtype="float32")):
            rows = jaxmp.sharding.collectives(gradient, w, x)
            assert sorted(row.line.split()[-1] for row in rows) == names


def test_lines_modules_and_passes() -> None:
    from flax import linen as nn

    class Net(nn.Module):
        @nn.compact
        def __call__(self, x: Any) -> Any:
            block = nn.scan(
                nn.remat(Block), variable_axes={"params": 0}, split_rngs={"params": True}, length=3
            )
            return block(name="blocks")(x, None)[0]

    class Block(nn.Module):
        @nn.compact
        def __call__(self, x: Any, _: Any) -> Any:
            return nn.gelu(nn.Dense(16, dtype=BF16, name="up")(x)), None  # the dense layer

    net, mesh = Net(), mesh_of(8)
    x = array(mesh, (32, 16), "data", dtype=BF16)
    params = jax.eval_shape(net.init, jax.random.key(0), x)
    params = jax.tree.map(lambda p: array(mesh, p.shape), params)

    def loss(params: Any, x: Any) -> Any:
        return jnp.sum(net.apply(params, x).astype(F32))

    report = jaxmp.sharding.collectives(jax.grad(loss), params, x)
    kernel, bias = sorted(report, key=lambda row: -row.bytes)
    line = line_of("the dense layer", "test_lines_modules_and_passes.Block.__call__")
    assert (kernel.path, kernel.direction, kernel.runs) == ("Net/blocks/up", "backward", 3)
    assert kernel.line.partition(" ")[0] == line.partition(" ")[0]
    assert (bias.path, bias.elements) == ("Net/blocks/up", 16)
    assert kernel.op_name.endswith("/up/dot_general")


# --- what can be given --------------------------------------------------------------------------


def test_functions_and_what_jit_makes_of_them() -> None:
    args = product_arguments(mesh_of(8))
    want = {("all-reduce", "add", "bfloat16", ("data",)): size(16, 32)}
    fn = jax.grad(product)
    for program, given in (
        (fn, args),
        (jax.jit(fn), args),
        (jax.jit(fn).lower(*args), ()),
        (jax.jit(fn).trace(*args), ()),
    ):
        assert carried(jaxmp.sharding.collectives(program, *given)) == want
    assert carried(jaxmp.sharding.collectives(lambda x, w: fn(w, x), args[1], w=args[0])) == want


def test_arrays_and_what_is_none() -> None:
    mesh = mesh_of(8)
    w, x = (jax.device_put(jnp.ones(s.shape), s.sharding) for s in product_arguments(mesh))

    def run(w: Any, x: Any, name: str, scale: float) -> Any:
        return product(w, x) * scale if name == "scaled" else 0.0

    report = jaxmp.sharding.collectives(jax.grad(run), w, x, "scaled", scale=2.0)
    assert report.bytes(dtype=BF16) == size(16, 32)
    static = jax.jit(jax.grad(run), static_argnames=("name", "scale"), donate_argnums=0)
    assert jaxmp.sharding.collectives(static, w, x, name="scaled", scale=2.0).bytes() == size(
        16, 32
    )
    assert not w.is_deleted()


def test_the_mesh_can_be_given_or_found() -> None:
    mesh = mesh_of(4, 2)
    fn, args = every_kind(mesh)
    text = jax.jit(fn).lower(*args).compile().as_text()
    unknown = jaxmp.sharding.collectives(text)
    assert unknown.mesh_axes == ()
    assert {row.axes for row in unknown} == {None}
    assert jaxmp.sharding.collectives(text, mesh=mesh).rows != unknown.rows
    assert jaxmp.sharding.collectives(text, mesh=mesh.abstract_mesh).bytes(axis="model") > 0
    with jax.set_mesh(mesh):
        assert jaxmp.sharding.collectives(text).mesh_axes == (("data", 4), ("model", 2))


@pytest.fixture
def persistent_cache(tmp_path: Any) -> Iterator[None]:
    from jax.experimental.compilation_cache import compilation_cache

    options = {
        "jax_compilation_cache_dir": str(tmp_path),
        "jax_persistent_cache_min_compile_time_secs": 0.0,
        "jax_persistent_cache_min_entry_size_bytes": -1,
    }
    before = {name: getattr(jax.config, name) for name in options}
    for name, value in options.items():
        jax.config.update(name, value)
    compilation_cache.reset_cache()
    yield
    for name, value in before.items():
        jax.config.update(name, value)
    compilation_cache.reset_cache()


@pytest.mark.usefixtures("persistent_cache")
def test_programs_that_jax_has_on_disk() -> None:
    """JAX would take the compiled program from there, and nothing would be written to read."""
    args = product_arguments(mesh_of(8))
    for _ in range(2):
        jax.clear_caches()
        assert jaxmp.sharding.collectives(jax.grad(product), *args).bytes() == size(16, 32)


PARTLY_MANUAL = """
import jax, jaxmp, jax.numpy as jnp
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P
jax.config.update("jax_num_cpu_devices", 8)
mesh = jax.make_mesh((4, 2), ("data", "model"), axis_types=(AxisType.Auto,) * 2)
def total(x):
    return jax.lax.psum(x, "data")
specs = {"in_specs": P("data"), "out_specs": P(), "axis_names": {"data"}}
total = jax.shard_map(total, mesh=mesh, **specs)
x = jax.ShapeDtypeStruct((8, 8), jnp.bfloat16, sharding=NamedSharding(mesh, P("data")))
(row,) = jaxmp.sharding.collectives(total, x)
print(row.dtype, row.axes, row.bytes)
"""


@pytest.mark.slow
def test_programs_that_a_cpu_cannot_compile() -> None:
    """A sum of bfloat16 in a partly manual shard_map aborts the process that compiles it."""
    command = [sys.executable, "-W", "error", "-c", PARTLY_MANUAL]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    assert done.stdout == "bfloat16 ('data',) 32\n"


def test_one_device() -> None:
    report = jaxmp.sharding.collectives(jnp.sin, jnp.ones(3))
    assert (len(report), report.bytes(), report.devices) == (0, 0, 1)
    assert str(report).startswith("No collectives in the program after partitioning.")


# --- errors -------------------------------------------------------------------------------------


def test_programs_for_cpus_do_not_show_it() -> None:
    compiled = jax.jit(product).lower(*product_arguments(mesh_of(8))).compile()
    with pytest.raises(ValueError, match=r"XLA widens collectives of 16 bits for CPUs.* Give the"):
        jaxmp.sharding.collectives(compiled)


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize(
    ("program", "args", "error", "match"),
    [
        (3, (), TypeError, "give a function and its arguments, .* got int"),
        ("hello", (), ValueError, "this text is not of a compiled program"),
        ("module @jit_f {}", (), ValueError, "of a program before it is compiled"),
        ("HloModule f", (1,), ValueError, "arguments go with a function; this str was made for"),
    ],
)
def test_what_is_no_program(program: Any, args: Any, error: Any, match: str) -> None:
    with pytest.raises(error, match=match):
        jaxmp.sharding.collectives(program, *args)


@pytest.mark.usefixtures("unchecked")
def test_meshes_that_are_not_the_programs() -> None:
    args = product_arguments(mesh_of(8))
    half = Mesh(np.asarray(jax.devices()[:4]), ("data",))
    with pytest.raises(ValueError, match="the mesh has 4 devices, the program runs on 8: give"):
        jaxmp.sharding.collectives(product, *args, mesh=half)
    backwards = Mesh(np.asarray(jax.devices()[::-1]), ("data",))
    with pytest.raises(ValueError, match=r"other devices than that .* in another order"):
        jaxmp.sharding.collectives(product, *args, mesh=backwards)
    with pytest.raises(TypeError, match=r"mesh must be a jax\.sharding\.Mesh, got a tuple"):
        jaxmp.sharding.collectives(product, *args, mesh=("data",))


def test_slices_without_a_mesh() -> None:
    """The text alone has no axes; a mesh of other devices is refused with what would fit."""
    sends = (
        "%send = (bf16[8], u32[], token[]) send(%p, %t), channel_id=2, is_host_transfer=true, "
        'frontend_attributes={_xla_host_transfer_handler_name="xla_megascale_runtime",'
        '_xla_megascale_reduce_operation="SUM",_xla_megascale_target="{1,2}x{0:3}",'
        '_xla_megascale_transfer_type="ALL_REDUCE"}'
    )
    text = f"HloModule f, num_partitions=4\n\nENTRY %main () -> () {{\n  {sends}\n}}\n"
    report = jaxmp.sharding.collectives(text)
    (row,) = report
    assert (report.devices, row.axes, row.between_slices) == (8, None, True)
    assert row.groups == ((0, 4), (1, 5), (2, 6), (3, 7))
    assert report.bytes(between_slices=True) == 16
    assert report.bytes(between_slices=False) == 0
    assert "all-reduce between slices" in str(report)
    with pytest.raises(ValueError, match="the program runs on 2 TPU slices of 4 devices, which Me"):
        jaxmp.sharding.collectives(text, mesh=mesh_of(8))


def test_two_meshes_are_none() -> None:
    w, _ = product_arguments(mesh_of(8))
    _, x = product_arguments(mesh_of(4, 2))
    report = jaxmp.sharding.collectives(product, w, x)
    assert report.no_mesh == "arguments and results are sharded over different meshes"
    with pytest.raises(ValueError, match=r"no mesh axis is known: .* different meshes\. Give the"):
        report.bytes(axis="data")
    assert "No mesh axes: arguments and results" in str(report)


@pytest.mark.parametrize(
    ("chosen", "match"),
    [
        ({"kind": "all_reduce"}, r"unknown kind 'all_reduce'\. Did you mean 'all-reduce'\? Valid:"),
        ({"dtype": "bfloat61"}, r"unknown dtype 'bfloat61'\. Did you mean 'bfloat16'\?"),
        ({"axis": "dat"}, r"unknown mesh axis 'dat'\. Did you mean 'data'\? Valid: data, model"),
        ({"axis": ("data", "pipe")}, "unknown mesh axis 'pipe'"),
        ({"reducer": "sum"}, "unknown reducer 'sum'.* Valid: add, max"),
    ],
)
def test_names_that_do_not_exist(low: Collectives, chosen: Any, match: str) -> None:
    with pytest.raises(ValueError, match=match):
        low.bytes(**chosen)


# --- the report ---------------------------------------------------------------------------------


def test_selecting(low: Collectives) -> None:
    assert low.select() == low
    assert len(low.select("all-gather")) == 2
    assert low.bytes(("all-gather", "all-reduce")) == low.bytes() == sum(row.bytes for row in low)
    assert low.bytes(dtype=("bf16", np.float32)) == low.bytes()
    assert low.bytes(dtype="int8") == low.bytes("all-to-all") == 0
    assert low.select(axis="data").bytes(axis="model") == 0
    assert low.select("all-reduce").mesh_axes == low.mesh_axes
    assert [row.bytes for row in low] == sorted((row.bytes for row in low), reverse=True)


def test_it_prints(low: Collectives) -> None:
    text = str(low)
    assert text.startswith("Collectives of the program after partitioning, whole arrays\n")
    assert "│ all-reduce │ add     │ bfloat16 │ data  │       4 │  448 KiB │     2 │    6 │" in text
    narrow = text.partition("Sums over devices in fewer than 32 bits")[2]
    assert "collective_programs.py:" in narrow
    assert "Not seen:\n - What the compiler does after partitioning" in text


# --- the check ----------------------------------------------------------------------------------


def message(*args: Any, **kwargs: Any) -> list[str]:
    with pytest.raises(jaxmp.AuditError) as caught:
        jaxmp.assert_reduced_in(*args, **kwargs)
    assert isinstance(caught.value, AssertionError)
    return str(caught.value).splitlines()


def test_narrow_sums_are_listed() -> None:
    args = product_arguments(mesh_of(8))
    line = line_of("the product", "product")
    assert message(jax.grad(product), "float32", *args) == [
        "sums over devices should carry float32 or wider, these do not:",
        f"  1,024 bytes  bfloat16  all-reduce over data  at {line}, backward",
        "A program does not say which sums are of activations, which may be narrow, as of experts, "
        "graphs or tensor parallelism. If some of these are, name what makes them: activations=("
        "'a scope, module, function, file, primitive, or pass',)",
    ]
    assert message(jax.grad(product), F32, *args, axis="data")[0] == (
        "sums over the mesh axis 'data' should carry float32 or wider, these do not:"
    )
    jaxmp.assert_reduced_in(jax.grad(product), "bfloat16", *args)
    jaxmp.assert_reduced_in(jax.grad(product), "float16", *args)  # of as many bits


def test_wide_sums_pass() -> None:
    mesh = mesh_of(8)
    jaxmp.assert_reduced_in(step(F32), "float32", *arguments(mesh), axis="data")
    assert "should carry float64" in message(step(F32), "float64", *arguments(mesh))[0]


def test_sums_over_other_axes_may_be_narrow() -> None:
    """A gradient that is summed in float32, of activations that are summed in bfloat16."""
    mesh = mesh_of(4, 2)

    def run(w: Any, x: Any) -> Any:
        h = lax.psum((x.astype(BF16) @ w.astype(BF16)).astype(BF16), "model")
        grads = jnp.matmul(x.T.astype(F32), h.astype(F32))
        return lax.psum(grads, "data")

    specs = PartitionSpec("model"), PartitionSpec("data", "model")
    run = jax.shard_map(run, mesh=mesh, in_specs=specs, out_specs=specs[0])
    args = array(mesh, (16, 32), "model"), array(mesh, (64, 16), "data", "model")
    jaxmp.assert_reduced_in(run, F32, *args, axis="data")
    assert "  1,024 bytes  bfloat16  all-reduce over model  at" in message(run, F32, *args)[1]
    both = message(run, F32, *args, axis=("data", "model"))
    assert both[0].startswith("sums over the mesh axes 'data', 'model' should carry float32")
    assert "over model" in both[1]


def test_each_axis_of_several_must_have_sums() -> None:
    """Replicas that are given the same examples compute the same, for nothing."""
    axes = ("replica", "data", "one")
    mesh = mesh_of(2, 4, 1, names=axes)
    jaxmp.assert_reduced_in(step(F32), F32, *arguments(mesh, batch=("replica", "data")), axis=axes)
    (text,) = message(step(F32), F32, *arguments(mesh), axis=axes)
    assert "has no sum of floats over the mesh axis 'replica', so this check sees nothing" in text


def test_a_check_that_sees_nothing_fails() -> None:
    mesh = mesh_of(4, 2)
    says = (
        "the program after partitioning has no sum of floats over the mesh axis 'model', so this "
        "check sees nothing: give a function that computes gradients, and arguments that are "
        "sharded as in training."
    )
    args = arguments(mesh)
    assert message(step(), F32, *args, axis="model") == [says]
    # A loss alone, integers, and what only moves.
    (text,) = message(product, F32, *product_arguments(mesh_of(8)))
    assert "has only sums of scalars, such as that of a loss, over devices" in text
    assert text.endswith(" Over it go: all-reduce float32.")
    x = array(mesh, (8, 8), "data", dtype=BF16)
    sharding = NamedSharding(mesh, PartitionSpec())
    (text,) = message(lambda x: lax.with_sharding_constraint(x, sharding), F32, x)
    assert text.endswith(" Over it go: all-gather bfloat16.")
    (text,) = message(lambda x: jnp.sum(x.astype(jnp.int32), 0), F32, x)
    assert text.endswith(" Over it go: all-reduce int32.")


def test_the_check_needs_a_mesh_for_an_axis() -> None:
    text = jax.jit(step()).lower(*arguments(mesh_of(8))).compile().as_text()
    jaxmp.assert_reduced_in(text, F32)
    with pytest.raises(ValueError, match=r"no mesh axis is known: .* Give the mesh as mesh="):
        jaxmp.assert_reduced_in(text, F32, axis="data")
    jaxmp.assert_reduced_in(text, F32, mesh=mesh_of(8), axis="data")
    with pytest.raises(ValueError, match=r"unknown mesh axis 'date'\. Did you mean 'data'\?"):
        jaxmp.assert_reduced_in(text, F32, mesh=mesh_of(8), axis="date")
    with pytest.raises(ValueError, match="unknown dtype 'f23'"):
        jaxmp.assert_reduced_in(text, "f23")


# --- in the audit -------------------------------------------------------------------------------


def test_the_audit_can_have_it() -> None:
    args = product_arguments(mesh_of(8))
    fn = jax.grad(product)
    traced = jaxmp.audit(fn, *args)
    assert traced.compiled is None
    report = jaxmp.audit(fn, *args, compiled=True)
    assert report.compiled == jaxmp.sharding.collectives(fn, *args)
    given = jaxmp.audit(fn, *args, compiled=jax.jit(fn).lower(*args))
    assert given.compiled.bytes() == report.compiled.bytes()
    assert report.products == traced.products
    assert not any("partitioner inserts" in sentence for sentence in report.unseen)
    text = str(report)
    assert "Collectives of the program after partitioning, whole arrays" in text
    assert "What the compiler does after partitioning" in text
