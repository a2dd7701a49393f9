"""The differences between the versions of JAX that jaxmp supports, and nothing else.

The structure of a jaxpr is public (`jax.extend.core`); the names of its equations' params are not.
`tests/program/test_compat.py` lists the names that jaxmp reads, here and elsewhere, and says which
name a new JAX has changed.
"""

import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
import jaxlib.version
import numpy as np
from jax.extend import core, source_info_util
from jax.interpreters import partial_eval

from jaxmp._program.hi_primitives import with_calls_expanded


class ScanCounts(NamedTuple):
    """The numbers of constants and carries of a scan; its other operands are scanned."""

    consts: int
    carry: int


def scan_counts(params: dict[str, Any]) -> ScanCounts:
    """Returns how many operands of a scan are constants, and how many are its carry."""
    if "ft_in" in params:  # jax 0.11 and later
        consts, carry, _ = params["ft_in"].unpack()
        return ScanCounts(len(consts), len(carry))
    return ScanCounts(params["num_consts"], params["num_carry"])


def open_jaxpr(jaxpr: Any, *, as_traced: bool = False) -> core.Jaxpr:
    """Returns the open jaxpr of a closed one; an open one is returned as it is.

    Args:
      jaxpr: the jaxpr.
      as_traced: whether calls of objects stay such calls, so that JAX can run the jaxpr as a part
        of another. Otherwise each becomes the equation that it stands for.
    """
    jaxpr = jaxpr.jaxpr if isinstance(jaxpr, core.ClosedJaxpr) else jaxpr
    return jaxpr if as_traced else with_calls_expanded(jaxpr)


def consts_of(jaxpr: Any) -> list[Any]:
    """Returns the constants of a jaxpr: none for an open jaxpr without constant variables."""
    return list(getattr(jaxpr, "consts", ()))


def lacks_constants(jaxpr: Any) -> bool:
    """Whether only the primitive that holds a program knows its constants, as in Equinox."""
    return len(open_jaxpr(jaxpr).constvars) > len(consts_of(jaxpr))


def holds_arrays(jaxpr: Any) -> bool:
    """Whether a program holds arrays that are not its arguments, at any depth."""
    inner = (body for equation in open_jaxpr(jaxpr).eqns for body in bodies_of(equation))
    return bool(consts_of(jaxpr)) or any(map(holds_arrays, inner))


def programs_of(param: Any) -> list[Any]:
    """Returns the programs that a param of an equation is, or lists."""
    values = param if isinstance(param, (tuple, list)) else (param,)
    return [value for value in values if isinstance(value, (core.Jaxpr, core.ClosedJaxpr))]


def params_with(equation: core.JaxprEqn, programs: Iterable[Any]) -> dict[str, Any]:
    """Returns the params of an equation that hold programs, with others; open ones stay open."""
    replacements = iter(programs)

    def replace(param: Any) -> Any:
        if isinstance(param, (tuple, list)):
            return getattr(type(param), "_make", type(param))(map(replace, param))
        if isinstance(param, core.ClosedJaxpr):
            return next(replacements)
        return without_consts(next(replacements)) if isinstance(param, core.Jaxpr) else param

    return {key: replace(param) for key, param in equation.params.items() if programs_of(param)}


def bind(equation: core.JaxprEqn, values: Sequence[Any], **changed: Any) -> list[Any]:
    """Runs an equation on other values, with some of its params changed."""
    params = {**equation.params, **changed}
    result = equation.primitive.bind(*values, **equation.primitive.get_bind_params(params))
    return list(result) if equation.primitive.multiple_results else [result]


IS_READ: Any = jax.make_user_context(default_value=False)  # whether jaxmp reads what is traced


def to_be_read() -> contextlib.AbstractContextManager[None]:
    """Says that jaxmp reads what is traced within."""
    context: contextlib.AbstractContextManager[None] = IS_READ(IS_READ.value or True)
    return context


def trace(fun: Callable[..., Any], avals: Sequence[Any]) -> core.ClosedJaxpr:
    """Traces a function of arrays as the body of an equation, with an empty name stack."""
    with source_info_util.reset_name_stack():
        return jax.make_jaxpr(fun)(*avals)


def trace_trees(fun: Callable[..., Any], *trees: Any) -> tuple[core.ClosedJaxpr, Any]:
    """Traces a function of trees of arrays as `trace` does.

    Returns:
      The program, from the leaves of the trees to those of the results; and the tree of the
      results, with the number of each.
    """
    # Types are no leaves: two equal ones may be one object, and some trees tell arrays by that.
    leaves, structure = jax.tree.flatten(trees)
    structures: list[Any] = []

    def of_leaves(*leaves: Any) -> list[Any]:
        results, of_results = jax.tree.flatten(fun(*jax.tree.unflatten(structure, leaves)))
        structures[:] = [of_results]
        return results

    program = trace(of_leaves, list(map(type_of, leaves)))
    return program, jax.tree.unflatten(structures[0], range(len(program.out_avals)))


def trace_on_mesh(fun: Callable[..., Any], avals: Sequence[Any]) -> core.ClosedJaxpr:
    """Traces a function as `trace` does, on the mesh of explicit axes that the types are on."""
    meshes = [aval.sharding.mesh for aval in avals if hasattr(aval, "sharding")]
    explicit = next((mesh for mesh in meshes if mesh.explicit_axes), None)
    if explicit is None:
        return trace(fun, avals)
    with jax.sharding.use_abstract_mesh(explicit):
        return trace(fun, avals)


def without_consts(closed: Any) -> core.Jaxpr:
    """Returns an open jaxpr, for params that hold open ones; a closed one may have no constants."""
    if consts_of(closed):
        raise ValueError("a program inside of this equation may not have constants")
    return open_jaxpr(closed)


@contextlib.contextmanager
def where(
    equation: core.JaxprEqn, stack: Any, traceback: Any, *, mesh: bool = True
) -> Iterator[None]:
    """Gives new equations the context of an equation, and these scopes and source lines.

    Args:
      equation: the equation.
      stack: its scopes, inside the scopes that are open here.
      traceback: its source lines.
      mesh: whether they also run on its mesh, and not on the mesh that holds here.
    """
    here = source_info_util.current_name_stack() + stack
    source = source_info_util.user_context(traceback, name_stack=here)
    current = jax.sharding.get_abstract_mesh()
    mesh_context = contextlib.nullcontext() if mesh else jax.sharding.use_abstract_mesh(current)
    with source, equation.ctx.manager, mesh_context:
        yield


def without_lines() -> contextlib.AbstractContextManager[None]:
    """Gives new equations no source lines: those of the equation around them hold."""
    lines: Any = source_info_util.current().traceback
    return source_info_util.user_context(type(lines)())  # an empty one; None would be those here


def is_plain_jit(params: dict[str, Any]) -> bool:
    """Whether a jit names no shardings, layouts, donation or compiler options."""
    shardings = (*params["in_shardings"], *params["out_shardings"])
    layouts = (*params["in_layouts"], *params["out_layouts"])
    return (
        all(map(_is_unspecified, shardings))
        and not any(params["donated_invars"])
        and all(layout is None for layout in layouts)
        and not params["compiler_options_kvs"]
    )


def jit_shardings(params: dict[str, Any]) -> tuple[list[Any], list[Any]]:
    """Returns the shardings that a jit names for operands and results; None for others."""

    def shardings(key: str) -> list[Any]:
        return [None if _is_unspecified(x) else x for x in params[key]]

    return shardings("in_shardings"), shardings("out_shardings")


def _is_unspecified(sharding: Any) -> bool:
    return type(sharding).__name__ == "UnspecifiedValue"  # a private class


def bodies_of(equation: Any) -> list[Any]:
    """Returns the programs in the params of an equation, in order, closed or open."""
    return [value for param in equation.params.values() for value in programs_of(param)]


def sub_jaxprs(equation: Any) -> list[core.Jaxpr]:
    """Returns the programs in the params of an equation, in order, as open jaxprs.

    It may also be of a program that is being traced, as `equations_behind` yields them.
    """
    return list(map(open_jaxpr, bodies_of(equation)))


def linear_program(backward: Any) -> core.Jaxpr:
    """Returns the program of tangents that a function from `jax.vjp` runs backward."""
    return open_jaxpr(backward.jaxpr)


def equations_behind(values: Iterable[Any]) -> Iterator[Any]:
    """Yields what the values of a program that is being traced were computed by, the last first.

    Nothing of arrays, of the arguments of the program, and of values under `vmap`.
    """
    seen: set[int] = set()
    waiting = list(values)
    while waiting:
        equation = getattr(waiting.pop(), "parent", None)
        if equation is not None and id(equation) not in seen:
            seen.add(id(equation))
            waiting += equation.in_tracers
            yield equation


def type_of(value: Any) -> Any:
    """Returns the aval of a value: dtype (not weak), shape, sharding, varying mesh axes."""
    aval = jax.typeof(value)
    return aval.update(weak_type=False) if getattr(aval, "weak_type", False) else aval


def type_or_given(value: Any) -> Any:
    """Returns the aval of a value, which may be one already; a weak type stays weak."""
    is_aval = hasattr(value, "weak_type") and not isinstance(value, jax.Array)
    return value if is_aval else jax.typeof(value)


def unstacked(aval: Any) -> Any:
    """Returns the aval of one of the values that are stacked along the first dimension."""
    return core.mapped_aval(aval.shape[0], 0, aval)


def number(literal: core.Literal, dtype: Any = None) -> jax.Array:
    """Returns a literal as an array, by default of its own dtype: a Python `bool` has none.

    The array is weakly typed if the literal was, and keeps its dtype.
    """
    value, aval = np.asarray(literal.val), cast(Any, literal.aval)
    dtype = aval.dtype if dtype is None else dtype
    if getattr(aval, "weak_type", False) and jnp.result_type(value.item()) == dtype:
        return jnp.asarray(value.item())
    return jnp.asarray(value, dtype)


def shard_map_again(params: dict[str, Any], fun: Callable[..., Any]) -> Callable[..., Any]:
    """Maps another function over devices, as an equation with these params maps its program.

    It has as many arguments and results as the program. Each may be several arrays.
    """
    return jax.shard_map(
        fun,
        mesh=params["mesh"],
        in_specs=tuple(params["in_specs"]),
        out_specs=tuple(params["out_specs"]),
        axis_names=set(params["newly_manual_axes"]),
        check_vma=params["check_vma"],
    )


def is_traced(value: Any) -> bool:
    """Whether a value is a tracer: under jit, grad, vmap."""
    return isinstance(value, jax.core.Tracer)


def is_staged() -> bool:
    """Whether operations are collected in a program now, and not run: under jit, in a loop."""
    # The name warns of a function that may change; what it says is what is asked here.
    return bool(core.unsafe_am_i_under_a_jit_DO_NOT_USE())  # type: ignore[attr-defined]


def is_transposed(values: Any) -> bool:
    """Whether JAX transposes what is done with arrays of a tree, as `jax.linear_transpose` does."""
    return any(isinstance(x, partial_eval.JaxprTracer) for x in jax.tree.leaves(values))


def is_ref(value: Any) -> bool:
    """Whether a value is a mutable reference to an array; it has the array's shape and dtype."""
    return hasattr(jax.typeof(value), "inner_aval")


def is_of_jax(jaxpr: Any, module: str) -> bool:
    """Whether a jitted function is from a module of JAX, and not another of the same name."""
    # A user's own `silu` is another function. Of its module, a jaxpr keeps only the path of the
    # file.
    info = open_jaxpr(jaxpr).debug_info
    return f"jax/_src/{module}" in str(getattr(info, "func_src_info", "")).replace("\\", "/")


def may_sum_bfloat16_wrongly() -> bool:
    """Whether this jaxlib has the fault of the CPU compiler; no release has fixed it yet.

    Of the releases, 0.11.1 is right, and 0.11.2, 0.12.0 and 0.12.0.1 are wrong.
    """
    numbers = [int(part) for part in jaxlib.version.__version__.split(".")[:3] if part.isdecimal()]
    return tuple(numbers) >= (0, 11, 2)


def function_name(equation: core.JaxprEqn) -> str:
    """Returns the name of the function that an equation calls, or the name of its primitive."""
    programs = sub_jaxprs(equation)
    info = getattr(programs[0], "debug_info", None) if programs else None
    return str(getattr(info, "func_name", equation.primitive.name))


def is_for_one_device(ctx: Any) -> bool:
    """Whether a program is lowered for one device, by the context of a lowering rule."""
    return getattr(ctx.module_context.axis_context, "num_devices", None) == 1


def is_alone_in_shard_map(ctx: Any) -> bool:
    """Whether a program is for each device of a `shard_map`, and not for several by Shardy."""
    axes = ctx.module_context.axis_context
    manual = getattr(axes, "manual_axes", None)
    is_by_shardy: bool = jax.config.jax_use_shardy_partitioner  # type: ignore[attr-defined]
    is_alone = manual is not None and manual == set(axes.mesh.axis_names)
    return is_alone and (axes.mesh.size == 1 or not is_by_shardy)


def target_of(ctx: Any) -> tuple[str, float]:
    """Returns what a program is lowered for, by the same context: a name, a compute capability.

    The capability is 0 for all but NVIDIA's GPUs.
    """
    if is_for_export(ctx):  # which knows platforms, and no device
        return "jax.export", 0.0
    others = [platform for platform in ctx.module_context.platforms if platform != "cuda"]
    if others:
        return others[0].upper(), 0.0
    device = ctx.module_context.backend.devices()[0]  # may be of another platform
    return device.device_kind, float(getattr(device, "compute_capability", 0))


def is_for_export(ctx: Any) -> bool:
    """Whether a program is lowered for `jax.export`, by the context of a lowering rule."""
    lowering = getattr(ctx.module_context, "lowering_parameters", None)
    return bool(getattr(lowering, "for_export", False))
