"""`memory_plan`: what training takes on each device, before it runs."""

import math
import re
from collections.abc import Callable, Mapping
from typing import Any, Literal

import jax
import jax.numpy as jnp
import jmp
import numpy as np
import optax
import optax.contrib
from jaxtyping import PyTree

from jaxmp._mesh.fsdp import FSDP
from jaxmp._numerics.dtypes import is_floating, parse_dtype
from jaxmp._planning.array_splits import split_of
from jaxmp._planning.buffers import FUSIONS
from jaxmp._planning.compile_absent import compile_for
from jaxmp._planning.devices import Device, find_device
from jaxmp._planning.flat_program import FlatProgram, flattened
from jaxmp._planning.known_errors import known_errors
from jaxmp._planning.live_bytes import most_live
from jaxmp._planning.memory_rows import OF_A_STEP, PERSISTENT, MemoryPlan, MemoryRow
from jaxmp._planning.planned_step import (
    Placement,
    PlannedStep,
    abstract_state,
    placement_of,
    planned_step,
)
from jaxmp._planning.value_sizes import SizedProgram, nbytes_on_device
from jaxmp._policies.policy_rules import PolicyRules
from jaxmp._recompute.api import Recompute
from jaxmp._training.compact_state import Moments
from jaxmp._training.microbatch import check_microbatches
from jaxmp._training.optimizer import MixedPrecision, mixed_precision
from jaxmp._training.train_state import TrainState

Cast = Literal["products", "all", "none"]

_ROW = 1024  # numbers in a row of the matrix that stands for a count of params
_UNITS = {"": 1, "k": 10**3, "m": 10**6, "b": 10**9, "t": 10**12}
# What JAX calls the platforms that it lowers for.
_LOWERED_FOR = {"gpu": "cuda", "tpu": "tpu"}
_NO_ACTIVATIONS = (
    "Not counted: activations and temporaries of a step. Give params, loss_fn= and batch=."
)
_ESTIMATED = (
    "Activations, gradients and temporaries are estimated at the peak, from the traced program: "
    "within 10 % of the compiler's peak on most models (docs/memory.md)."
)
_COMPILED = "The peak is that of the compiler, which compiled the step for this device."


def memory_plan(
    params: PyTree | float | str,
    policy: str | jmp.Policy | PolicyRules = "mixed_bfloat16",
    *,
    optimizer: optax.GradientTransformation | optax.MultiSteps | MixedPrecision | str = "adamw",
    master: Literal["float32", "remainder", "remainder8", "kahan", "stochastic", "none"] = (
        "float32"
    ),
    moments: Moments = "float32",
    loss_fn: Callable[..., Any] | None = None,
    batch: PyTree | None = None,
    collections: Mapping[str, PyTree] | None = None,
    has_aux: bool = False,
    microbatches: int = 1,
    cast: Cast = "products",
    recompute: Recompute = "never",
    devices: int = 1,
    shardings: PyTree | None = None,
    fsdp: FSDP | None = None,
    donate: bool = True,
    gradients: Any = None,
    device: str = "h100",
    compiled: bool = False,
) -> MemoryPlan:
    """Plans the bytes that training takes on each device, which need not be there.

    "Does it fit" is asked before there are devices to try it on. What lives between steps is
    counted: from the state that the optimizer makes for these params, by shapes and shardings, so
    that it is exact for any optax optimizer and any storage. What a step needs beside it is
    estimated, from the traced step, in seconds: see docs/memory.md for the rules, and for how near
    they come to the compilers for an H100 and a TPU v5e. With `compiled=True` the compiler for the
    device says it, in minutes.

    Args:
      params: the params: arrays, or `jax.ShapeDtypeStruct` as from `jax.eval_shape`, of any tree.
        Or how many there are, as a number or a text such as `"8B"`; then only what lives between
        steps, and gradients, can be planned.
      policy: the policy or the rules, as for `mixed_precision`.
      optimizer: an optax optimizer; or the name of one in `optax`, such as `"adamw"` or `"sgd"`,
        with its defaults. What `mixed_precision` returned is taken as it is, with its own policy,
        `master` and `moments`.
      master: how masters of narrow params are kept, as for `mixed_precision`.
      moments: how the state of the optimizer is kept, as for `mixed_precision`.
      loss_fn: the loss function, as for `make_train_step`.
      batch: the batch of one step on all devices: arrays or `jax.ShapeDtypeStruct`. On a mesh, a
        leaf without a sharding is split along its first dimension: over the axes of `fsdp`, and
        those that split no param.
      collections: mutable collections of the state, by name.
      has_aux: whether `loss_fn` returns more, as for `make_train_step`.
      microbatches: in how many parts the batch is evaluated.
      cast: how the step puts `loss_fn` under the policy, as for `make_train_step`; `"none"` for
        models that cast by themselves, as those with rules always do.
      recompute: as for `make_train_step`.
      devices: how many devices share params and state, where no shardings are given: by
        `fully_sharded`. A number of params is divided by it.
      shardings: the `NamedSharding` of each param, or a prefix of that tree. By default those that
        the params have. A param without one is whole on each device. The mesh may be a
        `jax.sharding.AbstractMesh`.
      fsdp: the `FSDP` of the step.
      donate: whether the step may write the new state over the old one.
      gradients: the dtype of gradients for a number of params; float32 if None, as jaxmp's are.
      device: the kind of device, `"h100"` or `"v5e"`: how much memory it has, and whose compiler
        fuses the step.
      compiled: whether to compile the step for `device`, by the compiler that comes with
        `jaxmp[aot]`, and to take the compiler's peak in place of the estimate. Nothing runs.

    Returns:
      The plan. Print it, or read `plan.persistent`, `plan.peak`, `plan.bytes_of("moments")` and
      `plan.fits()`; `plan.as_dict()` is for `json.dumps`.

    Raises:
      ImportError: if the step is to be compiled, and the compiler is not installed.
      ValueError: for an unknown device or optimizer, a loss without a batch, a number of params
        with a loss, shardings that do not fit, or an option of a step without a loss; and for a
        compiled step that a TPU has no memory for, with the compiler's number.
      TypeError: if the number of params is none.

    >>> plan = memory_plan("8B", "bfloat16", master="remainder", devices=8)
    >>> plan.bytes_of("params"), plan.bytes_of("masters"), plan.bytes_of("moments")
    (2000000000, 2000000000, 8000000000)
    >>> params = {"w": jax.ShapeDtypeStruct((512, 512), jnp.float32)}
    >>> plan = memory_plan(
    ...     params,
    ...     optimizer="sgd",
    ...     loss_fn=lambda params, x: jnp.mean((x @ params["w"]) ** 2),
    ...     batch=jax.ShapeDtypeStruct((64, 512), jnp.float32),
    ... )
    >>> plan.persistent // 512**2, plan.fits("v5e")
    (4, True)
    """
    target = find_device(device)
    tx = _optimizer(optimizer, policy, master, moments)
    told, count = _policy_as_text(policy, optimizer, tx), _number_of_params(params)
    of_a_step = {"compiled": compiled, "has_aux": has_aux, "recompute": recompute != "never"}
    _check_asked(count, loss_fn, batch, cast, devices, gradients, of_a_step)
    check_microbatches(microbatches)
    if count is not None:
        return _plan_of_count(count, tx, told, devices, microbatches, gradients, device)
    placement = placement_of(params, shardings, fsdp, devices)
    if compiled:
        placement = placement.without_devices()
    state = abstract_state(params, tx, collections or {}, placement)
    program, rows, limits = None, _persistent_rows(state), [_NO_ACTIVATIONS]
    if loss_fn is not None:
        options: dict[str, Any] = {
            "has_aux": has_aux,
            "microbatches": microbatches,
            "donate": donate,
            "recompute": recompute,
        }
        step_policy = None if cast == "none" or tx.rules.rules else tx.policy
        options |= {} if step_policy is None else {"cast": cast}
        program = planned_step(loss_fn, state, batch, step_policy, placement, options)
        if compiled:
            rows += _compiled_rows(program, target, rows)
            limits = [_COMPILED]
        else:
            flat = _flat_step(program, target.platform)
            rows += _estimated_rows(program, flat, target.platform, donate)
            limits = [_ESTIMATED, *known_errors(flat)]
    else:
        rows += _rows({"gradients": _gradient_bytes(state)}, OF_A_STEP)
    size = sum(math.prod(x.shape) for x in jax.tree.leaves(state.params))
    return _made_plan(rows, size, placement.devices, tx, told, device, tuple(limits), program)


def _optimizer(optimizer: Any, policy: Any, master: Any, moments: Any) -> MixedPrecision:
    if isinstance(optimizer, MixedPrecision):
        return optimizer
    if isinstance(optimizer, str):
        optimizer = _named_optimizer(optimizer)
    return mixed_precision(optimizer, policy, master=master, moments=moments)


def _named_optimizer(name: str) -> Any:
    """Returns an optimizer of optax by its name, with its defaults."""
    make = getattr(optax, name, None) or getattr(optax.contrib, name, None)
    try:
        made = make(learning_rate=1e-3) if callable(make) else None
    except TypeError:
        made = None
    if not isinstance(made, optax.GradientTransformation):
        raise ValueError(
            f"{name!r} is no optimizer of optax that takes a learning rate alone. Give one such as "
            "'adamw', 'sgd' or 'lion', or the optimizer itself: optax.sgd(0.1, momentum=0.9)"
        )
    return made


def _number_of_params(params: Any) -> int | None:
    """Returns a number of params that was given in their place; None for params."""
    if isinstance(params, str):
        found = re.fullmatch(r"\s*([\d_,]*\.?\d+(?:e\d+)?)\s*([kmbt]?)\s*", params.lower())
        if not found:
            raise ValueError(
                f"params as a text are a number such as '8B' or '350M', got {params!r}"
            )
        number = found[1].replace(",", "").replace("_", "")
        params = float(number) * _UNITS[found[2]]
    if isinstance(params, np.number):
        params = params.item()
    if isinstance(params, bool) or not isinstance(params, (int, float)):
        return None
    if not (math.isfinite(params) and params >= 1):
        raise ValueError(f"the number of params must be positive, got {params!r}")
    return round(params)


def _check_asked(
    count: int | None,
    loss_fn: Any,
    batch: Any,
    cast: Any,
    devices: Any,
    gradients: Any,
    of_a_step: Mapping[str, bool],
) -> None:
    if isinstance(devices, bool) or not isinstance(devices, int) or devices < 1:
        raise ValueError(f"devices must be a positive number, got {devices!r}")
    if cast not in ("products", "all", "none"):
        raise ValueError(f"cast must be 'products', 'all' or 'none', got {cast!r}")
    if (loss_fn is None) != (batch is None):
        raise ValueError(
            "loss_fn and batch go together: activations are planned from both. Give "
            "jax.ShapeDtypeStruct for a batch that is not there yet"
        )
    if count is not None and loss_fn is not None:
        raise ValueError(
            "a loss function needs params, and a number of them is none. Give their shapes: "
            "jax.eval_shape(init, ...)"
        )
    if loss_fn is None and (asked := [name for name, given in of_a_step.items() if given]):
        raise ValueError(
            f"{' and '.join(asked)} would be of a step, and there is none without a loss. Give "
            "loss_fn= and batch= too, or leave this out"
        )
    if count is None and gradients is not None:
        raise ValueError("the dtype of gradients is that of the program; leave out gradients=")


def _plan_of_count(
    count: int,
    tx: MixedPrecision,
    policy: str,
    devices: int,
    microbatches: int,
    gradients: Any,
    device: str,
) -> MemoryPlan:
    """Plans for the share of one device, as a matrix and a vector for the rest."""
    share = math.ceil(count / devices)
    sizes = {"matrix": (share // _ROW, _ROW), "rest": (share % _ROW,)}
    params = {
        name: jax.ShapeDtypeStruct(shape, jnp.float32)
        for name, shape in sizes.items()
        if math.prod(shape)
    }
    state = abstract_state(params, tx, {}, Placement())
    dtype = jnp.dtype(jnp.float32) if gradients is None else parse_dtype(gradients)
    step = {"gradients": share * dtype.itemsize}
    if microbatches > 1:
        step["accumulators"] = share * 4
    rows = _persistent_rows(state) + _rows(step, OF_A_STEP)
    return _made_plan(rows, count, devices, tx, policy, device, (_NO_ACTIVATIONS,), None)


def _made_plan(
    rows: list[MemoryRow],
    size: int,
    devices: int,
    tx: MixedPrecision,
    policy: str,
    device: str,
    limits: tuple[str, ...],
    program: PlannedStep | None,
) -> MemoryPlan:
    return MemoryPlan(
        rows=tuple(rows),
        params=size,
        devices=devices,
        policy=policy,
        master=tx._algorithm.masters.name,
        moments=tx._algorithm.moments,
        device=device,
        limits=limits,
        program=program,
    )


def _policy_as_text(policy: Any, optimizer: Any, tx: MixedPrecision) -> str:
    if isinstance(policy, str) and not isinstance(optimizer, MixedPrecision):
        return policy
    return str(tx.rules if tx.rules.rules else tx.policy)


def _persistent_rows(state: TrainState) -> list[MemoryRow]:
    """Returns the rows of a state, by its parts."""
    opt_state = state.opt_state
    parts = {
        "params": state.params,
        "masters": opt_state.master,
        "moments": [x for x in jax.tree.leaves(opt_state.inner) if x.ndim],
        "collections": state.collections,
    }
    sizes = {name: _bytes_of_tree(part) for name, part in parts.items()}
    sizes["counters"] = _bytes_of_tree(state) - sum(sizes.values())
    return _rows(sizes, PERSISTENT)


def _rows(sizes: Mapping[str, int], order: tuple[str, ...]) -> list[MemoryRow]:
    exact = {*PERSISTENT, "batch", "compiled"}
    return [
        MemoryRow(name, sizes[name], name in PERSISTENT, name in exact)
        for name in order
        if sizes.get(name)
    ]


def _bytes_of_tree(tree: PyTree) -> int:
    """Returns the bytes of all arrays of a tree on one device."""
    return sum(_bytes_of_leaf(x) for x in jax.tree.leaves(tree))


def _bytes_of_leaf(x: Any) -> int:
    sharding: Any = getattr(x, "sharding", None)
    sizes = dict(sharding.mesh.shape) if hasattr(sharding, "mesh") else {}
    return nbytes_on_device(x, split_of(sharding, len(x.shape)), sizes)


def _gradient_bytes(state: TrainState) -> int:
    """Returns the bytes of float32 gradients."""
    leaves = [x for x in jax.tree.leaves(state.params) if is_floating(x)]
    return sum(_bytes_of_leaf(x) * max(4, x.dtype.itemsize) // x.dtype.itemsize for x in leaves)


def _compiled_rows(
    program: PlannedStep, device: Device, persistent: list[MemoryRow]
) -> list[MemoryRow]:
    """Returns the rows of what a step holds beside the state, as its compiler says."""
    arguments = (program.state, program.batch)
    memory = compile_for(device, program.step, arguments, {}).memory_analysis()
    batch = _bytes_of_tree(program.batch)
    # What a step never reads is none of its arguments, and lies there all the same.
    beside = memory.peak_memory_in_bytes - sum(row.bytes for row in persistent) - batch
    return _rows({"batch": batch, "compiled": max(0, beside)}, OF_A_STEP)


def _flat_step(program: PlannedStep, compiler: str) -> FlatProgram:
    traced = program.step.trace(program.state, program.batch)
    return flattened(traced.jaxpr, _LOWERED_FOR[compiler])


def _estimated_rows(
    program: PlannedStep, flat: FlatProgram, compiler: str, donate: bool
) -> list[MemoryRow]:
    """Returns the rows of what a step holds beside the state, at its peak."""
    arguments = jax.tree.leaves((program.state, program.batch))
    shardings: list[Any] = [getattr(x, "sharding", None) for x in arguments]
    mesh = next((dict(x.mesh.shape) for x in shardings if hasattr(x, "mesh")), {})
    splits = [split_of(s, x.ndim) for s, x in zip(shardings, arguments, strict=True)]
    sized = SizedProgram(flat, splits, mesh)
    replaced = len(jax.tree.leaves(program.state)) if donate else 0
    live = most_live(sized, FUSIONS[compiler], range(replaced))
    return _rows({**live.kinds, "batch": _bytes_of_tree(program.batch)}, OF_A_STEP)
