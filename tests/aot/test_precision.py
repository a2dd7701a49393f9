"""Float32 products of compiled programs: what TPU v5e and H100 make of what they ask for."""

import collections
import functools
import pathlib
import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from flax import linen as nn, nnx

import jaxmp
from tests.aot.conftest import Compiler
from tests.support.compiled import cycles, products_in

ALGORITHMS = ("BF16_BF16_F32", "BF16_BF16_F32_X3", "BF16_BF16_F32_X6")
HEAD = jaxmp.PolicyRules({"head": "float32"}, default="mixed_bfloat16")


def abstract(*shape: int, dtype: Any = jnp.float32) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype)


X, W = abstract(256, 512), abstract(512, 384)


def products(text: str) -> list[tuple[str, str, str]]:
    """The operands' dtypes, the precision and the algorithm of each product of a program."""
    found = []
    for names, _, rest in products_in(text):
        asked = re.search(r"operand_precision=\{(\w+),\1\}", rest)
        algorithm = re.search(r"algorithm=dot_(\w+)", rest)
        found.append(
            (",".join(sorted(names)), asked[1] if asked else "", algorithm[1] if algorithm else "")
        )
    return found


class LinenModel(nn.Module):
    @nn.compact
    def __call__(self, x: Any) -> Any:
        return nn.Dense(128, name="head")(jnp.tanh(nn.Dense(384, name="body")(x)))


class NNXModel(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.body = nnx.Linear(512, 384, rngs=rngs)
        self.head = nnx.Linear(384, 128, rngs=rngs)

    def __call__(self, x: Any) -> Any:
        return self.head(jnp.tanh(self.body(x)))


def linen_loss(rules: Any) -> tuple[Callable[..., Any], Any]:
    model: Any = LinenModel() if rules is None else jaxmp.linen.apply_policy(LinenModel(), rules)
    return model.apply, jax.eval_shape(model.init, jax.random.key(0), X)


def nnx_loss(rules: Any) -> tuple[Callable[..., Any], Any]:
    model = nnx.eval_shape(lambda: NNXModel(nnx.Rngs(0)))
    model = model if rules is None else jaxmp.nnx.apply_policy(model, rules)
    graphdef, state = nnx.split(model)
    return lambda state, x: nnx.merge(graphdef, state)(x), state


def of_dot(transform: Callable[..., Any] | None) -> tuple[Callable[..., Any], Any]:
    def loss(w: Any, x: Any) -> Any:
        return x @ w

    return transform(loss) if transform else loss, W


# Each makes a loss and its params, of what is to be float32; of None without any of jaxmp.
CASES: dict[str, tuple[Callable[[Any], tuple[Callable[..., Any], Any]], Any]] = {
    "full_precision in autocast": (
        of_dot,
        lambda f: jaxmp.autocast(jaxmp.full_precision(f), "mixed_bfloat16"),
    ),
    "policy float32": (of_dot, lambda f: jaxmp.autocast(f, "float32")),
    "linen head by rule": (linen_loss, HEAD),
    "nnx head by rule": (nnx_loss, HEAD),
}


def compiled(
    compiler: Compiler, made: tuple[Callable[..., Any], Any]
) -> list[tuple[str, str, str]]:
    """The products of a loss and of its gradients by params and input."""
    fun, params = made

    def loss(params: Any, x: Any) -> Any:
        return jnp.sum(fun(params, x).astype(jnp.float32) ** 2)

    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        return products(compiler(jax.value_and_grad(loss, (0, 1)), params, X).as_text())


@pytest.mark.parametrize("name", CASES)
def test_forward_and_both_backward_products(compiler: Compiler, name: str) -> None:
    """What jaxmp calls float32 has both operands at HIGHEST, on both devices."""
    make, exact = CASES[name]
    ours, control = compiled(compiler, make(exact)), compiled(compiler, make(None))
    wide = [each for each in ours if "f32" in each[0]]
    # A TPU reads activations that were rounded before the head from the 16 bits that they have.
    assert [each[1:] for each in wide] == [("highest", "")] * 3
    assert {each for each in ours if "f32" not in each[0]} <= {("bf16", "", "")}
    assert len(ours) == len(control)
    assert {each[1:] for each in control} == {("", "")}  # plain JAX asks for nothing


@pytest.mark.exhaustive
def test_passes_on_a_tpu(tpu: Compiler) -> None:
    """1, 3 and 6 passes of bfloat16, by the compiler's own estimate; 16-bit operands feel none."""
    big = abstract(4096, 4096)

    def estimated(precision: str, dtype: Any = jnp.float32) -> int:
        def fun(x: Any, w: Any) -> Any:
            with jax.default_matmul_precision(precision):
                return x @ w

        return cycles(tpu(fun, *[abstract(*big.shape, dtype=dtype)] * 2).as_text())

    one = estimated("default")
    for precision, passes in (
        ("high", 3),
        ("highest", 6),
        *zip(ALGORITHMS, (1, 3, 6), strict=True),
    ):
        assert estimated(precision) == pytest.approx(passes * one, rel=0.1), precision
    half = {estimated(precision, jnp.bfloat16) for precision in ("default", "high", "highest")}
    assert len(half) == 1
    for precision in ("TF32_TF32_F32", "TF32_TF32_F32_X3", "F32_F32_F32"):
        with pytest.raises(jax.errors.JaxRuntimeError, match="is not supported"):
            estimated(precision)


def placed(compiler: Compiler, dtype: Any) -> jax.ShapeDtypeStruct:
    sharding = jax.sharding.SingleDeviceSharding(compiler.devices[0])
    return jax.ShapeDtypeStruct((1024, 1024), dtype, sharding=sharding)


def instructions(gpu: Compiler, folder: pathlib.Path, precision: str, dtype: Any) -> dict[str, int]:
    """What the machine code of a matrix product multiplies with, and how many are in its text."""

    def fun(x: Any, w: Any) -> Any:
        with jax.default_matmul_precision(precision):
            return x @ w

    gpu.lower(fun, *[placed(gpu, dtype)] * 2).compile({"xla_dump_to": str(folder)})
    text = "".join(path.read_text() for path in folder.glob("*.ptx"))
    found = re.findall(r"mma\.\S*\.f32\.(bf16|tf32)\.|\b(fma)\.rn\.f32", text)
    return collections.Counter(tensor_core or "float32" for tensor_core, _ in found)


dumps_machine_code = pytest.mark.skipif(
    jax.__version_info__ >= (0, 11), reason="newer compilers than that of jax 0.10 dump none"
)


@dumps_machine_code
@pytest.mark.parametrize(
    ("precision", "multiplied", "times"),
    [
        ("default", "tf32", None),
        ("highest", "float32", None),
        ("F32_F32_F32", "float32", None),
        ("BF16_BF16_F32", "bf16", 1),
        ("BF16_BF16_F32_X3", "bf16", 3),
        ("BF16_BF16_F32_X6", "bf16", 6),
        ("TF32_TF32_F32", "tf32", None),
    ],
)
def test_instructions_on_a_gpu(
    gpu: Compiler, tmp_path: pathlib.Path, precision: str, multiplied: str, times: int | None
) -> None:
    """TF32 unless asked, float32 at HIGHEST; an algorithm does as it is called."""
    found = instructions(gpu, tmp_path, precision, jnp.float32)
    assert set(found) == {multiplied}
    assert times is None or found[multiplied] % times == 0


@dumps_machine_code
def test_16_bit_operands_feel_no_level_on_a_gpu(gpu: Compiler, tmp_path: pathlib.Path) -> None:
    """And HIGH is TF32 or float32 there, as the kernel has it: HIGHEST alone is float32."""
    assert set(instructions(gpu, tmp_path / "wide", "high", jnp.float32)) <= {"tf32", "float32"}
    half = jnp.bfloat16
    levels = ("default", "high", "highest")
    found = [instructions(gpu, tmp_path / level, level, half) for level in levels]
    assert found[0] == found[1] == found[2]
    assert set(found[0]) == {"bf16"}
    tripled = instructions(gpu, tmp_path / "x3", "BF16_BF16_F32_X3", half)  # control
    assert tripled != found[0]


def test_what_a_tpu_refuses_in_an_exact_part(tpu: Compiler) -> None:
    """A limit of docs/precision.md, and its way out. If this fails, the limit is gone."""

    def grouped(x: Any, w: Any, precision: Any = None) -> Any:
        return jax.lax.ragged_dot(x, w[None], jnp.array([256]), precision=precision)

    half, wide = ([abstract(256, 256, dtype=dtype)] * 2 for dtype in (jnp.bfloat16, jnp.float32))
    with pytest.raises(jax.errors.JaxRuntimeError, match="Bad lhs type"):
        tpu(jaxmp.full_precision(grouped), *half)
    tpu(jaxmp.full_precision(functools.partial(grouped, precision="default")), *half)
    tpu(jaxmp.full_precision(grouped), *wide)
    tpu(jaxmp.autocast(grouped, "float32"), *half)
