"""What a compiler for GPUs makes of float8 products: calls, copies, collectives, memory.

Without Triton, so that products are calls of cuBLAS whose names say in which dtype they multiply.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding, PartitionSpec as P

import jaxmp
from benchmarks.gpt import GPT
from jaxmp._tools.inspect.collective_report import CompiledCollective
from tests.aot.conftest import Compiler
from tests.support.compiled import WITHOUT_TRITON, beside_products, float8_calls

pytestmark = pytest.mark.usefixtures("standard_promotion")

FLOAT32 = "float32"
LAYERS, WIDTH = 2, 256
# Each block has four products with weights, in the body of one loop.
PRODUCTS = 4


def policy(recipe: str | None) -> str:
    return "mixed_bfloat16" + (f",products={recipe}" if recipe else "")


def gpt(*, remat: bool = False, context: int = 128) -> GPT:
    return GPT(layers=LAYERS, width=WIDTH, heads=4, vocab=512, context=context, remat=remat)


def gradient(model: GPT, recipe: str | None, **options: Any) -> Any:
    fast = jaxmp.autocast(model.loss, policy(recipe))
    return jaxmp.value_and_grad(fast, reduce_dtype=FLOAT32, **options)


def abstract_tokens(model: GPT, examples: int = 8) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct((examples, model.context + 1), jnp.int32)


def compiled(compiler: Compiler, model: GPT, recipe: str | None) -> Any:
    params = jax.eval_shape(model.init)
    fun = gradient(model, recipe)
    return compiler(fun, params, abstract_tokens(model), options=WITHOUT_TRITON)


def dot(recipe: str | None, numbers: Any = (((1,), (0,)), ((), ()))) -> Any:
    return functools.partial(jaxmp.float8.dot_general, dimension_numbers=numbers, recipe=recipe)


def both_passes(product: Any) -> Any:
    """A product, and its gradients for a cotangent."""

    def run(x: Any, w: Any, g: Any) -> Any:
        y, pull = jax.vjp(product, x, w)
        return y, pull(g)

    return run


@pytest.mark.parametrize(
    ("recipe", "calls"),
    [
        pytest.param(None, 0, marks=pytest.mark.exhaustive),
        pytest.param("tensorwise", 3 * PRODUCTS, marks=pytest.mark.jax),
        pytest.param("rowwise", 3 * PRODUCTS, marks=pytest.mark.exhaustive),
        ("rowwise_hp", 2 * PRODUCTS),  # gradients of weights are products in bfloat16
    ],
)
def test_every_chosen_product_is_one_call(gpu: Compiler, recipe: str | None, calls: int) -> None:
    """In a scan over layers; scores, the head and the embedding are left out."""
    assert len(float8_calls(compiled(gpu, gpt(), recipe).as_text())) == calls


def test_a_checkpoint_multiplies_forward_again_in_float8(gpu: Compiler) -> None:
    """All but the last product of a block, whose result nobody asks for."""
    text = compiled(gpu, gpt(remat=True), "tensorwise").as_text()
    assert len(float8_calls(text)) == 3 * PRODUCTS + PRODUCTS - 1


# One layer, x[4096, 2048] @ w[2048, 8192]: megabytes and launches beside its three products, and
# megabytes of these, in docs/float8.md. Operands of one byte move less than those of bfloat16.
BESIDE = {
    None: (101, 1, 386),
    "tensorwise": (420, 12, 268),
    "rowwise": (873, 18, 268),
    "rowwise_hp": (613, 14, 310),
    "mxfp8": (607, 15, 272),
}


@pytest.mark.parametrize("recipe", BESIDE)
def test_the_passes_beside_the_products(gpu: Compiler, b200: Compiler, recipe: str | None) -> None:
    """More means that a cast or a maximum is no longer fused, or a scale no longer folded."""
    shapes = {(4096, 2048): jnp.bfloat16, (2048, 8192): jnp.float32}
    args = [jax.ShapeDtypeStruct(shape, dtype) for shape, dtype in shapes.items()]
    both, g = both_passes(dot(recipe)), jax.ShapeDtypeStruct((4096, 8192), jnp.bfloat16)
    # Products of blocks are kernels of Triton.
    compiler, options = (b200, {}) if recipe == "mxfp8" else (gpu, WITHOUT_TRITON)
    beside = beside_products(compiler(both, *args, g, options=options).as_text())
    megabytes, launches, of_products = BESIDE[recipe]
    assert beside.bytes / 1e6 <= 1.1 * megabytes
    assert beside.launches <= 1.1 * launches
    assert beside.products / 1e6 == pytest.approx(of_products, rel=0.02)


@pytest.mark.parametrize(
    "recipe", ["tensorwise", pytest.param("rowwise_hp", marks=pytest.mark.exhaustive)]
)
def test_memory_of_a_scanned_checkpointed_model(gpu: Compiler, recipe: str) -> None:
    """At most 1.05 of bfloat16. A stack of float32 weights in a second layout would be 1.19."""
    model = GPT(layers=4, width=1024, heads=16, vocab=4096, context=256, remat=True)

    def temporaries(recipe: str | None) -> int:
        args = jax.eval_shape(model.init), abstract_tokens(model, 32)
        program = gpu(gradient(model, recipe), *args, options=WITHOUT_TRITON)
        return int(program.memory_analysis().temp_size_in_bytes)

    assert temporaries(recipe) <= 1.05 * temporaries(None)


def sharded(
    compiler: Compiler, model: GPT, recipe: str | None, layers: int
) -> list[CompiledCollective]:
    """The collectives of a step under FSDP on eight devices; `layers` 0 for a scan."""
    mesh = compiler.mesh((8,), ("data",))

    def place(x: Any) -> Any:
        spec = P(*[None] * (x.ndim - 1), "data") if x.ndim > 1 else P()
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=NamedSharding(mesh, spec))

    params = jax.tree.map(place, jax.eval_shape(model.init))
    loss = model.loss
    if layers:
        shapes = params["blocks"]
        params["blocks"] = [
            jax.tree.map(lambda x: place(jax.ShapeDtypeStruct(x.shape[1:], x.dtype)), shapes)
            for _ in range(layers)
        ]

        def loss(params: Any, tokens: Any) -> Any:
            x = params["embedding"][tokens[:, :-1]] + params["position"]
            for block in params["blocks"]:
                x = model._block(x, block)
            return jnp.mean(x**2)

    layout = jax.tree.map(lambda x: x.sharding, params)
    fsdp = jaxmp.sharding.FSDP(shardings=layout, axis="data")
    fast = jaxmp.autocast(loss, policy(recipe))
    fun = jaxmp.value_and_grad(fast, reduce_dtype=FLOAT32, fsdp=fsdp)
    tokens = jax.ShapeDtypeStruct(
        abstract_tokens(model, 32).shape, jnp.int32, sharding=NamedSharding(mesh, P("data"))
    )
    options = WITHOUT_TRITON if compiler.platform == "gpu" else {}
    program = compiler.lower(fun, params, tokens).compile(options)
    return list(jaxmp.sharding.collectives(program).rows)


@pytest.mark.parametrize(
    ("platform", "recipe", "layers"),
    [
        pytest.param("gpu", "tensorwise", 0, marks=pytest.mark.jax),
        ("gpu", "tensorwise", LAYERS),
        ("gpu", "rowwise_hp", 0),
        pytest.param("gpu", "rowwise_hp", LAYERS, marks=pytest.mark.exhaustive),
        ("gpu", None, 0),
        pytest.param("gpu", None, LAYERS, marks=pytest.mark.exhaustive),
        ("tpu", "int8", 0),
    ],
)
def test_fsdp_gathers_codes_and_sums_float32(
    request: pytest.FixtureRequest, platform: str, recipe: str | None, layers: int
) -> None:
    """Each weight is gathered twice, a byte for each number; no gradient is summed in 16 bits."""
    rows = sharded(request.getfixturevalue(platform), gpt(), recipe, layers)
    weights = LAYERS * 12 * WIDTH**2

    def total(kind: str, dtype: str) -> int:
        found = [row for row in rows if (row.kind, row.dtype) == (kind, dtype)]
        return sum(row.bytes for row in found)

    codes = total("all-gather", "int8" if recipe == "int8" else "float8_e4m3fn")
    assert codes == (2 * weights if recipe else 0)
    assert total("all-gather", "bfloat16") < weights or recipe is None
    summed = total("reduce-scatter", FLOAT32)
    assert summed >= 4 * weights
    assert not [row for row in rows if row.reducer == "add" and row.dtype == "bfloat16"]
    # No gradient of a weight is summed whole: only those of norms are.
    assert total("all-reduce", FLOAT32) < 0.05 * 4 * weights


# In float8: three products for each of a block; with checkpoints, all but the last once more.
@pytest.mark.parametrize(
    ("remat", "products"),
    [
        pytest.param(False, 3 * PRODUCTS, marks=pytest.mark.jax),
        pytest.param(True, 4 * PRODUCTS - 1, marks=pytest.mark.slow),
    ],
)
def test_products_of_blocks_are_native(b200: Compiler, remat: bool, products: int) -> None:
    """The compiler keeps each in one kernel, and decodes no codes."""
    fun = gradient(model := gpt(remat=remat), "mxfp8")
    args = jax.eval_shape(model.init), abstract_tokens(model)
    program = b200(fun, *args)
    rows = [
        row
        for row in jaxmp.sharding.collectives(program).float8_products
        if all(dtype.startswith("float8") for dtype in row.operands)
    ]
    assert sum(row.runs for row in rows) == LAYERS * products
    assert {row.ran for row in rows} == {"float8 operands"}


SHAPES = {
    "one block": ((32, 32), (32, 32), (((1,), (0,)), ((), ()))),
    "experts": ((4, 64, 256), (4, 256, 512), (((2,), (1,)), ((0,), (0,)))),
    "two shared": ((2, 3, 64, 256), (2, 3, 256, 512), (((3,), (2,)), ((0, 1), (0, 1)))),
    "heads": ((4, 64, 8, 32), (8, 32, 512), (((2, 3), (0, 1)), ((), ()))),
}


@pytest.mark.parametrize("batched", [False, True])
@pytest.mark.parametrize("name", SHAPES)
def test_products_of_blocks_of_any_shape_are_native(
    b200: Compiler, name: str, batched: bool
) -> None:
    """Compilers decode the blocks of some arrangements of axes, and fail for a sum of 32."""
    x_shape, w_shape, numbers = SHAPES[name]

    front = (5,) if batched else ()
    shapes = ((*front, *x_shape), jnp.bfloat16), ((*front, *w_shape), jnp.float32)
    operands = [jax.ShapeDtypeStruct(*shape) for shape in shapes]
    product = dot("mxfp8", numbers)
    product = jax.vmap(product) if batched else product
    program = b200(both_passes(product), *operands, jax.eval_shape(product, *operands))
    rows = jaxmp.sharding.collectives(program).float8_products
    assert [(row.operands, row.ran) for row in rows for _ in range(row.runs)] == [
        (("float8_e4m3fn", "float8_e4m3fn"), "float8 operands")
    ] * 3


def test_products_of_blocks_elsewhere(gpu: Compiler, b200: Compiler, tpu: Compiler) -> None:
    """An error that says where they run; over a mesh, each device of a `shard_map` has its own."""
    x, w = (jax.ShapeDtypeStruct((64, 64), dtype) for dtype in (jnp.bfloat16, jnp.float32))

    product = dot("mxfp8")
    for compiler, name in ((gpu, "NVIDIA H100"), (tpu, "TPU")):
        with pytest.raises(NotImplementedError, match=f"compute capability 10.* is for {name}"):
            compiler(product, x, w)
    exported = jax.export.export(jax.jit(product), platforms=["cuda"])
    with pytest.raises(NotImplementedError, match=r"is for jax\.export"):
        exported(x, w)
    with pytest.raises(NotImplementedError, match="is for TPU"):
        jax.jit(product).trace(x, w).lower(lowering_platforms=("cuda", "tpu"))
    with pytest.raises(NotImplementedError, match="is for cpu"):  # without a device of CUDA
        jax.jit(product).trace(x, w).lower(lowering_platforms=("cuda",))
    mesh = b200.mesh((8,), ("data",))
    x, w = (
        jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=NamedSharding(mesh, spec))
        for a, spec in ((x, P("data")), (w, P()))
    )
    local = jax.shard_map(product, mesh=mesh, in_specs=(P("data"), P()), out_specs=P("data"))
    for function in (product, local):
        with pytest.raises(NotImplementedError, match=r"one device, or inside of a jax\.shard_map"):
            b200.lower(function, x, w)
    before = jax.config.jax_use_shardy_partitioner
    jax.config.update("jax_use_shardy_partitioner", False)
    try:
        assert "scaled-dot" in b200.lower(local, x, w).compile().as_text()
        with pytest.raises(NotImplementedError, match="no partitioner splits them"):
            b200.lower(product, x, w)
    finally:
        jax.config.update("jax_use_shardy_partitioner", before)
