"""Steps that keep no gradients, as GPU and TPU compilers make them: 16 layers, 537 M params."""

import re
from typing import Any

import jax
import jax.numpy as jnp
import optax
import pytest
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec as P

import jaxmp
from tests.aot.conftest import GPU, Compiler

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("standard_promotion")]

LAYERS, WIDTH, HIDDEN = 16, 2048, 8192
SIZE = 2 * LAYERS * WIDTH * HIDDEN
NARROW = "params=bfloat16,compute=bfloat16,output=float32"
STORAGES: dict[str, Any] = {
    "float32": ("mixed_bfloat16", {}),
    "float32, never skips": ("mixed_bfloat16", {"skip": "none"}),
    "stochastic, int8": (NARROW, {"master": "stochastic", "moments": "int8"}),
    "remainder, int8": (NARROW, {"master": "remainder", "moments": "int8"}),
}
BYTES = {"float32": 12, "float32, never skips": 12, "stochastic, int8": 4, "remainder, int8": 6}


def layer(x: Any, p: Any) -> Any:
    h = x * lax.rsqrt(jnp.mean(jnp.square(x), -1, keepdims=True) + 1e-6).astype(x.dtype)
    return x + (jax.nn.gelu(h @ p["up"]) @ p["down"]).astype(x.dtype)


def loss(params: Any, x: Any) -> Any:
    x, _ = lax.scan(jax.checkpoint(lambda x, p: (layer(x, p), None)), x, params)
    return jnp.mean(jnp.square(x.astype(jnp.float32)))


def step_of(
    compiler: Compiler, storage: str, gradients: str, *, clip: bool = False, loss: Any = loss
) -> Any:
    policy, options = STORAGES[storage]
    optimizer = optax.adamw(1e-3)
    if clip:
        optimizer = optax.chain(optax.clip_by_global_norm(1.0), optimizer)
    tx = jaxmp.mixed_precision(optimizer, policy, **options)
    dtype = tx.policy.param_dtype
    params = {
        "up": jax.ShapeDtypeStruct((LAYERS, WIDTH, HIDDEN), dtype),
        "down": jax.ShapeDtypeStruct((LAYERS, HIDDEN, WIDTH), dtype),
    }
    state = jax.eval_shape(lambda params: jaxmp.TrainState.create(params=params, tx=tx), params)
    x = jax.ShapeDtypeStruct((1, 2048, WIDTH), jnp.bfloat16)
    step: Any = jaxmp.make_train_step(loss, gradients=gradients, donate=False)
    return compiler(lambda state, x: step(state, x), state, x, donate=(0,))


def temporaries(compiled: Any) -> float:
    """Bytes a param."""
    return compiled.memory_analysis().temp_size_in_bytes / SIZE


def copies(program: str) -> list[str]:
    """Copies of a whole stack of params, or of its state, to other memory.

    A TPU's fusions write codes through a copy that lies where its operand does: it copies nothing.
    """
    shape = rf"\[{LAYERS},(?:{WIDTH},{HIDDEN}|{HIDDEN},{WIDTH})\]"
    in_place = re.findall(
        r"output_to_operand_aliasing=\{\{\}: \(0, \{\}\)\}, calls=%(\S+)", program
    )
    computations = re.split(r"\n(?=%|ENTRY)", "\n" + program)
    others = [x for x in computations if not x.startswith(tuple(f"%{name} (" for name in in_place))]
    return re.findall(rf"= \(?\w+{shape}[^=]* copy(?:-start)?\(", "\n".join(others))


def test_copies_are_seen() -> None:
    """Positive control, for both forms in which compilers write them."""
    stack = f"f32[{LAYERS},{WIDTH},{HIDDEN}]{{2,1,0}}"
    assert copies(f"  %copy.1 = {stack} copy(%x)")
    assert copies(f"  %copy-start.1 = ({stack}, {stack}, u32[]) copy-start(%x)")
    assert not copies(f"  %copy.2 = f32[1,{WIDTH},{HIDDEN}] copy(%x)")
    computation = f"%copies.3 (x: {stack}) -> {stack} {{\n  ROOT %copy.3 = {stack} copy(%x)\n}}\n"
    call = f"ENTRY %main () {{\n  %y = {stack} fusion(%x), kind=kLoop, "
    assert copies(f"{computation}{call}calls=%copies.3\n}}")
    in_place = "output_to_operand_aliasing={{}: (0, {})}, "
    assert not copies(f"{computation}{call}{in_place}calls=%copies.3\n}}")


LATER = pytest.mark.exhaustive


# On a TPU 2 bytes are the copy of all params in bfloat16, which the compiler makes before the loop.
@pytest.mark.parametrize(
    ("platform", "storage", "clip", "limit"),
    [
        ("gpu", "float32", True, 1.3),
        ("gpu", "remainder, int8", True, 1.3),
        pytest.param("gpu", "stochastic, int8", True, 1.3, marks=LATER),
        pytest.param("gpu", "float32, never skips", False, 1.3, marks=LATER),
        ("tpu", "float32, never skips", False, 2.4),
        # Two float32 gradients of a layer live in the pass for the norm: 0.5 of 16 layers.
        pytest.param("tpu", "float32", True, 2.9, marks=LATER),
        pytest.param("tpu", "stochastic, int8", True, 1.3, marks=LATER),
    ],
)
def test_temporaries(
    request: pytest.FixtureRequest, platform: str, storage: str, clip: bool, limit: float
) -> None:
    compiled = step_of(request.getfixturevalue(platform), storage, "released", clip=clip)
    memory = compiled.memory_analysis()
    assert temporaries(compiled) < limit
    assert memory.argument_size_in_bytes / SIZE == pytest.approx(BYTES[storage], abs=0.04)
    assert memory.output_size_in_bytes - memory.alias_size_in_bytes < 1e4
    assert not copies(compiled.as_text())


def test_a_checkpoint_around_the_loss_copies_no_params(gpu: Compiler) -> None:
    """The loop reads params behind a barrier, and writes over them."""
    compiled = step_of(gpu, "float32", "released", loss=jax.checkpoint(loss))
    assert temporaries(compiled) < 1.3
    assert not copies(compiled.as_text())


def test_gradients_take_four_bytes(gpu: Compiler) -> None:
    """Positive control: without release."""
    assert temporaries(step_of(gpu, "float32", "buffered")) > 4


def of_devices(compiler: Compiler, gradients: str) -> float:
    """Temporaries of FSDP over eight devices, in bytes for each param that a device has."""
    mesh = compiler.mesh((8,), ("data",))
    tx = jaxmp.mixed_precision(optax.adamw(1e-3), "mixed_bfloat16")

    def placed(x: Any) -> Any:
        spec = P(None, "data") if x.ndim == 3 else P()
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=NamedSharding(mesh, spec))

    params = {
        "up": jax.ShapeDtypeStruct((LAYERS, WIDTH, HIDDEN), jnp.float32),
        "down": jax.ShapeDtypeStruct((LAYERS, HIDDEN, WIDTH), jnp.float32),
    }
    state = jax.eval_shape(lambda params: jaxmp.TrainState.create(params=params, tx=tx), params)
    state = jax.tree.map(placed, state)
    rows = NamedSharding(mesh, P("data"))
    x = jax.ShapeDtypeStruct((8, 2048, WIDTH), jnp.bfloat16, sharding=rows)
    shardings = jax.tree.map(lambda x: x.sharding, state.params)
    fsdp = jaxmp.sharding.FSDP(shardings=shardings, axis="data")
    step: Any = jaxmp.make_train_step(loss, gradients=gradients, fsdp=fsdp)
    with jax.set_mesh(mesh):
        compiled = step.lower(state, x).compile()
    return compiled.memory_analysis().temp_size_in_bytes / (SIZE / 8)


@pytest.mark.parametrize(
    "compiler", [GPU, pytest.param("tpu", marks=pytest.mark.exhaustive)], indirect=True
)
def test_fsdp_saves_an_eighth_for_each_device(compiler: Compiler) -> None:
    """Float32 gradients are 4 bytes for each param that a device has; two of a layer are left."""
    assert of_devices(compiler, "buffered") - of_devices(compiler, "released") > 3.4
