"""Float8: a train step of a wide GPT, and single layers as docs/float8.md estimates them."""

import functools
from typing import Any

import gpt
import handwritten
import jax
import jax.numpy as jnp
from jaxtyping import Array, PyTree
from lab.timing import Contender

import jaxmp
from on_device import names
from on_device.gpt import attention, steps_by_hand, with_jaxmp
from on_device.recorder import Recorder
from on_device.steps import WITHOUT_TRITON, Case, measure

_WIDE = "by hand, bfloat16, width 4,096"

# M, K, N; speedups for an H100 by docs/float8.md.
_SHAPES: dict[tuple[int, int, int], dict[str, float]] = {
    (16384, 4096, 4096): {"tensorwise": 1.35, "rowwise": 1.08, "rowwise_hp": 1.09},
    (16384, 4096, 14336): {"tensorwise": 1.46, "rowwise": 1.20, "rowwise_hp": 1.15},
    (16384, 8192, 8192): {"tensorwise": 1.50, "rowwise": 1.29, "rowwise_hp": 1.20},
    (16384, 2048, 2048): {"tensorwise": 1.11, "rowwise": 0.80, "rowwise_hp": 0.91},
}
_SMALL = {(64, 128, 128): {"tensorwise": 1.0}}


def run(recorder: Recorder) -> None:
    """Records a row for each step, and for each layer under each recipe."""
    if recorder.small:
        size, sequences = gpt.GPT(layers=2, width=64, heads=2, vocab=256, context=32), 2
    else:
        size = gpt.GPT(
            layers=4, width=4096, heads=32, vocab=32768, context=1024, attention=attention()
        )
        sequences = 8
    # The steps first: they are what a user has. A failure of one is that row's alone.
    steps = [*step_cases(size, sequences), *layer_cases(_SMALL if recorder.small else _SHAPES)]
    measure(recorder, steps)


def step_cases(size: gpt.GPT, sequences: int) -> list[Case]:
    """Whole train steps."""
    init = jax.jit(size.init)
    tokens = jax.random.randint(jax.random.key(1), (sequences, size.context + 1), 0, size.vocab)
    by_hand = steps_by_hand(size.loss, init, "bfloat16")
    case = functools.partial(Case, batch=tokens, flops=size.flops(sequences))
    cases = [case(Contender(_WIDE, *by_hand))]
    for name, policy, options in (
        (names.WIDE_FLOAT8, "mixed_float8", {}),
        (f"{names.WIDE_FLOAT8}, cuBLAS", "mixed_float8", WITHOUT_TRITON),
        ("jaxmp, autocast, width 4,096", "mixed_bfloat16", {}),
    ):
        contender = Contender(name, *with_jaxmp(size.loss, init, policy))
        cases.append(case(contender, facts={"baseline": _WIDE}, gpu_options=options))
    return cases


def layer_cases(shapes: dict[tuple[int, int, int], dict[str, float]]) -> list[Case]:
    """A product with its gradients, under each recipe; first the recipe that is the default."""
    cases: dict[str, list[Case]] = {}
    for (m, k, n), estimates in shapes.items():
        shape = f"{m:,} x {k:,} x {n:,}"
        plain = f"bfloat16, {shape}"
        batch = _operand_and_cotangent(m, k, n)
        for recipe in ("bfloat16", *estimates):
            facts: dict[str, Any] = {}
            policy = "mixed_bfloat16"
            if recipe in estimates:
                facts = {"baseline": plain, "estimated": estimates[recipe]}
                policy = f"mixed_float8,products={recipe}:minimum=none"
            case = Case(
                Contender(f"{recipe}, {shape}", *_layer(policy, k, n)),
                batch,
                facts,
                flops=6.0 * m * k * n,
                queued=10,
                gpu_options=WITHOUT_TRITON,
            )
            cases.setdefault(recipe, []).append(case)
    return [case for of_recipe in cases.values() for case in of_recipe]


@functools.partial(jax.jit, static_argnums=(0, 1, 2))
def _operand_and_cotangent(m: int, k: int, n: int) -> tuple[Array, Array]:
    keys = jax.random.split(jax.random.key(0))
    x = jax.random.normal(keys[0], (m, k), jnp.bfloat16)
    return x, jax.random.normal(keys[1], (m, n), jnp.bfloat16)


def _layer(policy: str, k: int, n: int) -> handwritten.Steps:
    def start() -> Array:
        return jax.random.normal(jax.random.key(1), (k, n)) * k**-0.5

    def step(weight: Array, batch: tuple[Array, Array]) -> tuple[Array, PyTree]:
        x, cotangent = batch
        product = jaxmp.autocast(lambda x, w: x @ w, policy)
        y, pull = jax.vjp(product, x, weight)
        dx, dw = pull(cotangent.astype(y.dtype))
        return weight, {"y": y, "dx": dx, "dw": dw}

    return handwritten.Steps(start, step)
