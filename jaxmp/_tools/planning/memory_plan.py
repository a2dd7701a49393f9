"""`memory_plan`: the memory of training on each device, before it runs."""

import contextlib
import math
import re
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import jmp
import numpy as np
import optax
from jax.sharding import Mesh
from jaxtyping import PyTree

from jaxmp._numerics.dtypes import is_floating
from jaxmp._policies.policy_rules import PolicyRules
from jaxmp._tools.inspect.api import audit
from jaxmp._tools.planning.absent_devices import DoesNotFit, NoCompiler, compile_for
from jaxmp._tools.planning.devices import Device, device_at_hand, find_device, is_of_kind
from jaxmp._tools.planning.memory_rows import MEANING, OF_A_STEP, MemoryPlan, MemoryRow
from jaxmp._tools.planning.planned_step import (
    Placement,
    PlannedStep,
    abstract_state,
    placement_of,
    planned_step,
)
from jaxmp._training.loss_under_policy import lowered_loss, rules_of_step
from jaxmp._training.optimizer import MixedPrecision, mixed_precision
from jaxmp._training.train_state import TrainState

_ROW = 1024  # numbers in a row of the matrix that stands for a count of params
_UNITS = {"": 1, "k": 10**3, "m": 10**6, "b": 10**9, "t": 10**12}
_NO_STEP = "Not counted: activations and temporaries. Give params, loss_fn and batch."
_NO_COMPILER = "Not counted: activations and temporaries, as {reason}"


def memory_plan(
    params: PyTree | float | str,
    tx: MixedPrecision | str | jmp.Policy | PolicyRules = "mixed_bfloat16",
    loss_fn: Callable[..., Any] | None = None,
    batch: PyTree | None = None,
    *,
    collections: Mapping[str, PyTree] | None = None,
    devices: int = 1,
    shardings: PyTree | None = None,
    device: str | None = None,
    **step_options: Any,
) -> MemoryPlan:
    """Plans the bytes that training takes on each device, which need not be there.

    The memory between steps is counted: from the state that the optimizer makes for these params,
    by shapes and shardings, so that it is exact for any optax optimizer and any storage. With a
    loss and a batch the step is compiled for the device, and the peak is the compiler's; nothing
    runs. The compilers for devices that are not here come with `jaxmp[aot]`. Without one, the plan
    says "at least", and what is missing.

    Args:
      params: the params: arrays, or `jax.ShapeDtypeStruct` as from `jax.eval_shape`, of any tree.
        Or how many there are, as a number or a text such as `"8B"`; then only what lives between
        steps, and gradients, can be planned.
      tx: the optimizer, as `mixed_precision` returned it: with its policy, its masters and its
        moments. A policy or rules stand for AdamW under them.
      loss_fn: the loss function, as for `make_train_step`.
      batch: the batch of one step on all devices: arrays or `jax.ShapeDtypeStruct`. On a mesh, a
        leaf without a sharding is split along its first dimension: over the axes of `fsdp`, and
        those that split no param.
      collections: mutable collections of the state, by name.
      devices: how many devices share params and state, where no shardings are given: by
        `fully_sharded`. A number of params is divided by it.
      shardings: the `NamedSharding` of each param, or a prefix of that tree. By default those that
        the params have. A param without one is whole on each device. The mesh may be a
        `jax.sharding.AbstractMesh`.
      device: the kind of device, such as `"h100"` or `"v5e"`. By default the one at hand; an H100
        where that is a CPU.
      **step_options: options of `make_train_step`, such as `microbatches`, `recompute`, `fsdp`,
        `gradients` and `has_aux`. `policy="none"` is for a model that casts by itself.

    Returns:
      The plan. Print it, or read `plan.persistent`, `plan.peak`, `plan.bytes_of("moments")` and
      `plan.fits()`; `plan.as_dict()` is for `json.dumps`.

    Raises:
      ValueError: for an unknown device, a loss without a batch, a number of params with a loss,
        shardings that do not fit, an option of a step without a loss, or a loss that names a mesh
        of other devices.
      TypeError: if `tx` is neither an optimizer of `mixed_precision` nor a policy.

    >>> tx = mixed_precision(optax.adamw(1e-3), "bfloat16", master="remainder")
    >>> plan = memory_plan("8B", tx, devices=8, device="h100")
    >>> plan.bytes_of("params"), plan.bytes_of("masters"), plan.bytes_of("moments")
    (2000000000, 2000000000, 8000000000)
    >>> plan.persistent // 10**9, plan.fits("v5e")
    (12, True)
    """
    target = device_at_hand("h100") if device is None else find_device(device)
    if isinstance(tx, (str, jmp.Policy, PolicyRules)):
        tx = mixed_precision(optax.adamw(1e-3), tx)
    if not isinstance(tx, MixedPrecision):
        raise TypeError(
            "tx is what mixed_precision returns, or a policy for AdamW, got a "
            f"{type(tx).__name__}. Write jaxmp.mixed_precision(optimizer, policy)"
        )
    count = _number_of_params(params)
    _check_arguments(count, loss_fn, batch, devices, step_options)
    if count is not None:
        return _plan_of_count(count, tx, devices, target)
    placement = placement_of(params, shardings, step_options.get("fsdp"), devices)
    mesh = placement.mesh
    # A mesh of other devices, such as the CPUs here, keeps its shape and loses its devices.
    if not (isinstance(mesh, Mesh) and all(is_of_kind(x, target) for x in mesh.devices.flat)):
        placement = placement.without_devices()
    state = abstract_state(params, tx, collections or {}, placement)
    size = sum(math.prod(x.shape) for x in jax.tree.leaves(state.params))
    floats = [x for x in jax.tree.leaves(state.params) if is_floating(x)]
    # Gradients of 16-bit params are float32 (`value_and_grad`).
    gradient_bytes = sum(
        _bytes_of_leaf(x) * max(4, x.dtype.itemsize) // x.dtype.itemsize for x in floats
    )
    rows, gradients = _persistent_rows(state), {"gradients": gradient_bytes}
    facts = _plan_facts(size, placement.devices, tx, target)
    if loss_fn is None:
        rows += _rows(gradients)
        return MemoryPlan(**facts, rows=tuple(rows), limits=(_NO_STEP,))
    # The real step, as make_train_step makes it: a model of its memory would be another program.
    program = planned_step(loss_fn, state, batch, placement, step_options)
    facts["residual_bytes"] = _residual_bytes(loss_fn, program, placement, **step_options)
    step = {"batch": _bytes_of_tree(program.batch)}
    try:
        memory = compile_for(target, program.step, (state, program.batch)).memory_analysis()
    # The compiler of a TPU makes no program that does not fit. What is counted is still right.
    except (DoesNotFit, NoCompiler) as error:
        is_released = step_options.get("gradients") == "released"
        rows += _rows(step if is_released else step | gradients)
        limit = _NO_COMPILER.format(reason=error) if isinstance(error, NoCompiler) else str(error)
        is_refused = isinstance(error, DoesNotFit)
        return MemoryPlan(**facts, rows=tuple(rows), limits=(limit,), is_refused=is_refused)
    # JAX drops arguments that a step never reads: they are in memory, and not in the peak. So the
    # difference may be negative.
    others = memory.peak_memory_in_bytes - sum(row.bytes for row in rows) - step["batch"]
    rows += _rows(step | {"compiled": max(0, others)})
    return MemoryPlan(**facts, rows=tuple(rows), is_complete=True)


def _number_of_params(params: Any) -> int | None:
    """Returns a number of params that was given in their place; None for params."""
    if isinstance(params, str):
        match = re.fullmatch(r"\s*([\d_,]*\.?\d+(?:e\d+)?)\s*([kmbt]?)\s*", params.lower())
        if not match:
            raise ValueError(
                f"params as a text are a number such as '8B' or '350M', got {params!r}"
            )
        number = match[1].replace(",", "").replace("_", "")
        params = float(number) * _UNITS[match[2]]
    # np.float32 is a number too, and no float of Python.
    if isinstance(params, np.number):
        params = params.item()
    if isinstance(params, bool) or not isinstance(params, (int, float)):
        return None
    if not (math.isfinite(params) and params >= 1):
        raise ValueError(f"the number of params must be positive, got {params!r}")
    return round(params)


def _check_arguments(
    count: int | None, loss_fn: Any, batch: Any, devices: Any, step_options: Mapping[str, Any]
) -> None:
    if isinstance(devices, bool) or not isinstance(devices, int) or devices < 1:
        raise ValueError(f"devices must be a positive number, got {devices!r}")
    if (loss_fn is None) != (batch is None):
        raise ValueError(
            "loss_fn and batch go together: the step is made of both. Give jax.ShapeDtypeStruct "
            "for a batch that is not there yet"
        )
    if count is not None and loss_fn is not None:
        raise ValueError(
            "a loss function needs params, and a number of them is none. Give their shapes: "
            "jax.eval_shape(init, ...)"
        )
    # `fsdp` is also of use without a step: params that it gathers are split between steps.
    if loss_fn is None and (options := sorted(step_options.keys() - {"fsdp"})):
        raise ValueError(
            f"{' and '.join(options)} would be of a step, and there is none without a loss. Give "
            "loss_fn and batch too, or leave this out"
        )


def _plan_of_count(count: int, tx: MixedPrecision, devices: int, target: Device) -> MemoryPlan:
    # A matrix and a vector: storages of 8 bits leave numbers that fill no row in float32.
    share = math.ceil(count / devices)
    sizes = {"matrix": (share // _ROW, _ROW), "rest": (share % _ROW,)}
    params = {
        name: jax.ShapeDtypeStruct(shape, jnp.float32)
        for name, shape in sizes.items()
        if math.prod(shape)
    }
    state = abstract_state(params, tx, {}, Placement())
    rows = _persistent_rows(state) + _rows({"gradients": share * 4})
    return MemoryPlan(
        **_plan_facts(count, devices, tx, target), rows=tuple(rows), limits=(_NO_STEP,)
    )


def _plan_facts(params: int, devices: int, tx: MixedPrecision, target: Device) -> dict[str, Any]:
    return {
        "params": params,
        "devices": devices,
        "policy": str(tx.rules if tx.rules.rules else tx.policy),
        "master": tx._algorithm.masters.name,
        "moments": tx._algorithm.moments,
        "device": target.name,
    }


def _persistent_rows(state: TrainState) -> list[MemoryRow]:
    # From the state itself: any optimizer and any storage is counted as it is.
    # Scalars of the optimizer, such as its step, count with the counters, not with the moments.
    opt_state = state.opt_state
    parts = {
        "params": state.params,
        "masters": opt_state.master,
        "moments": [x for x in jax.tree.leaves(opt_state.inner) if x.ndim],
        "collections": state.collections,
    }
    sizes = {name: _bytes_of_tree(part) for name, part in parts.items()}
    sizes["counters"] = _bytes_of_tree(state) - sum(sizes.values())
    return _rows(sizes)


def _rows(sizes: Mapping[str, int]) -> list[MemoryRow]:
    return [
        MemoryRow(name, sizes[name], name not in OF_A_STEP, name != "gradients")
        for name in MEANING
        if sizes.get(name)
    ]


def _bytes_of_tree(tree: PyTree) -> int:
    """Returns the bytes of all arrays of a tree on one device."""
    return sum(_bytes_of_leaf(x) for x in jax.tree.leaves(tree))


def _bytes_of_leaf(x: Any) -> int:
    sharding = getattr(x, "sharding", None)
    shape = x.shape if sharding is None else sharding.shard_shape(x.shape)
    return math.prod(shape) * x.dtype.itemsize  # a key's dtype counts its words


def _residual_bytes(
    loss_fn: Callable[..., Any],
    program: PlannedStep,
    placement: Placement,
    *,
    policy: Any = None,
    microbatches: int = 1,
    recompute: Any = "loops",
    cast: Any = "products",
    **others: Any,
) -> int | None:
    """Returns the bytes that one microbatch keeps for the backward pass, by `audit`."""
    # Params that are all cast before the loss are residuals of the cast, which `audit` of the loss
    # would not see.
    if cast != "products":
        return None
    rules = rules_of_step(policy, program.state.tx)
    lowered = lowered_loss(loss_fn, rules, cast, recompute)

    def loss(params: PyTree, part: PyTree, collections: PyTree) -> Any:
        result = lowered(params, part, **collections)
        return result[0] if isinstance(result, tuple) else result

    def abstract(x: Any, parts: int = 1) -> Any:
        shape = (x.shape[0] // parts, *x.shape[1:]) if x.shape else ()
        return jax.ShapeDtypeStruct(shape, x.dtype)

    params, collections = jax.tree.map(abstract, (program.state.params, program.state.collections))
    part = jax.tree.map(lambda x: abstract(x, microbatches), program.batch)
    context: Any = contextlib.nullcontext()
    if placement.mesh is not None:  # the loss may name its axes
        context = jax.sharding.use_abstract_mesh(placement.mesh.abstract_mesh)
    # Whole arrays: residuals are of all devices together.
    with context:
        return audit(loss, params, part, collections).residual_bytes
