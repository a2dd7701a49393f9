"""The optimizer's step alone: bytes in a second by storage, and what tests and skips cost."""

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jaxtyping import PyTree
from lab.timing import Contender

import jaxmp
from on_device import ceilings, names
from on_device.gpt import model
from on_device.recorder import Recorder
from on_device.steps import Case, measure, nbytes

OPTAX = "optax, float32"

_STORAGES: tuple[dict[str, str], ...] = (
    {"master": "float32"},
    {"master": "remainder"},
    {"master": "remainder", "moments": "bfloat16"},
    {"master": "remainder", "moments": "int8"},
    {"master": "kahan"},
    {"master": "stochastic", "moments": "int8"},
)


def run(recorder: Recorder) -> None:
    """Records a row for each contender."""
    copy, _ = ceilings.copy_bandwidth(recorder.small)
    init = jax.jit(model(recorder).init)
    grads = _gradients(init())
    measure(recorder, cases(init, grads, _overflowing(grads), copy))


def cases(init: Any, grads: PyTree, overflowing: PyTree, copy: float) -> list[Case]:
    """The contenders, the most worthwhile first; `copy` is the bandwidth of one."""
    optimizer = optax.adamw(3e-4, weight_decay=0.1)
    case = functools.partial(_case, init, copy)

    def plain_step(state: Any, grads: PyTree) -> Any:
        params, opt_state = state
        updates, opt_state = optimizer.update(grads, opt_state, params)
        return (optax.apply_updates(params, updates), opt_state), {}

    def plain_start() -> Any:
        params = init()
        return params, optimizer.init(params)

    def wrapped(policy: str, **options: Any) -> jaxmp.MixedPrecision:
        return jaxmp.mixed_precision(optimizer, policy, **options)

    contenders = [case(Contender(OPTAX, plain_start, plain_step), grads)]
    for skip in ("none", "auto", "cond", "select"):
        tx = wrapped("mixed_bfloat16", skip=skip)
        name = names.CHECKED.replace("auto", skip)
        unchecked = OPTAX if skip == "none" else names.CHECKED.replace("auto", "none")
        contenders.append(case(_contender(name, tx, init), grads, unchecked))
        if skip in ("cond", "select"):
            skipping = _contender(f"{name}, a skipped step", tx, init)
            contenders.append(case(skipping, overflowing, name))
    for storage in _STORAGES:
        name = "jaxmp, bfloat16, " + ", ".join(f"{k} {v}" for k, v in storage.items())
        contenders.append(case(_contender(name, wrapped("bfloat16", **storage), init), grads))
    return contenders


def _contender(name: str, tx: jaxmp.MixedPrecision, init: Any) -> Contender:
    def start() -> Any:
        return tx.init_params(init())

    def step(state: Any, grads: PyTree) -> Any:
        params, opt_state = state
        params, opt_state = tx.apply_gradients(grads, opt_state, params)
        return (params, opt_state), {"skipped": opt_state.skipped}

    return Contender(name, start, step)


def _case(
    init: Any, copy: float, contender: Contender, grads: PyTree, baseline: str = OPTAX
) -> Case:
    moved = 2 * nbytes(jax.eval_shape(contender.start)) + nbytes(grads)
    params = sum(math.prod(x.shape) for x in jax.tree.leaves(jax.eval_shape(init)))
    facts: dict[str, Any] = {"bytes_moved": moved, "bytes_per_param": moved / params}
    facts["copy_bytes_per_second"] = copy
    if contender.name != OPTAX:
        facts["baseline"] = baseline
    return Case(contender, grads, facts, queued=5)  # as the copy


@jax.jit
def _gradients(params: PyTree) -> PyTree:
    return jax.tree.map(lambda x: 1e-3 * jnp.sin(1e3 * x), params)


@jax.jit
def _overflowing(grads: PyTree) -> PyTree:
    """The same with one infinity, in the last array."""
    leaves, structure = jax.tree.flatten(grads)
    leaves[-1] = leaves[-1].at[(0,) * leaves[-1].ndim].set(jnp.inf)
    return jax.tree.unflatten(structure, leaves)
