"""Calls of objects, as the equations that they stand for.

JAX moves checkpoints and functions with derivatives of their own from params of equations into
objects that one primitive calls, `call_hi_primitive`: with `JAX_REMAT3` and `JAX_CUSTOM_VJP3` today
(jax 0.10 to 0.12, off by default), later always. Here such a call becomes an equation with the
older name and params, so that no other file needs to know of the objects. Run again, it is still
the call that JAX made. An object of a class that is not in the table counts as a function whose
author wrote its derivative: JAX cannot say more of it.
"""

import weakref
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.ad_checkpoint import checkpoint_name
from jax.extend import core, source_info_util

_CALL = "call_hi_primitive"
_CUSTOM_VJP = "custom_vjp_call"


class _CallPrimitive(core.Primitive):
    """The primitive of an equation that stands for a call: it makes such a call again."""

    multiple_results = True

    def bind(self, *operands: Any, call: core.JaxprEqn, **params: Any) -> list[Any]:
        callee = call.params["_prim"]
        if self.name == "name":  # of operands of any dtype
            return [checkpoint_name(operands[0], params["name"])]
        if self.name == "checkpoint" and params["jaxpr"] is not callee.jaxpr:
            jaxpr = params["jaxpr"]
            closed = jaxpr if isinstance(jaxpr, core.ClosedJaxpr) else core.ClosedJaxpr(jaxpr, ())
            function = core.jaxpr_as_fun(closed)
            options = {name: params[name] for name in ("policy", "prevent_cse")}
            return list(jax.checkpoint(function, **options)(*operands))
        return list(call.primitive.bind(*operands, **call.params))


def _checkpoint_params(call: core.JaxprEqn) -> dict[str, Any]:
    checkpoint = call.params["_prim"]
    barrier = checkpoint.params.get("prevent_cse", True)  # for each operand, or for all
    return {
        "jaxpr": checkpoint.jaxpr,
        "policy": checkpoint.policy,
        "prevent_cse": any(barrier) if isinstance(barrier, tuple) else barrier,
        "differentiated": False,
    }


def _named_value(call: core.JaxprEqn) -> dict[str, Any]:
    return {"name": call.params["_prim"].name}


def _function(call: core.JaxprEqn) -> dict[str, Any]:
    """Returns params with the program of a call, without its derivatives."""
    callee = call.params["_prim"]

    def expanded(*operands: Any) -> list[Any]:
        return jax.tree.leaves(callee.expand(*callee.in_tree.unflatten(operands)))

    function = callee.params.get("traced")
    expanded.__name__ = expanded.__qualname__ = getattr(function, "fun_name", type(callee).__name__)
    with source_info_util.reset_name_stack():
        program = jax.make_jaxpr(expanded)(*(atom.aval for atom in call.invars))
    return {"call_jaxpr": _callee(program), "num_consts": 0}


def _callee(program: core.ClosedJaxpr) -> core.ClosedJaxpr:
    """Returns the program that another one only calls, as that of a traced function does."""
    jaxpr = program.jaxpr
    for equation in jaxpr.eqns if len(jaxpr.eqns) == 1 else ():
        inner = [x for x in equation.params.values() if isinstance(x, core.ClosedJaxpr)]
        if (equation.invars, equation.outvars) == (jaxpr.invars, jaxpr.outvars) and inner:
            return inner[0]
    return program


# For each class, by name: the primitive that it stands for, and the params.
_CLASSES: dict[str, tuple[str, Callable[[core.JaxprEqn], dict[str, Any]]]] = {
    "RematTraced": ("checkpoint", _checkpoint_params),
    "CheckpointName": ("name", _named_value),
    "CheckpointNameFwd": ("name", _named_value),
    "CustomJVPTraced": ("custom_jvp_call", _function),
    "CustomVJPTraced": (_CUSTOM_VJP, _function),
    "CustomRoot": (_CUSTOM_VJP, _function),  # a solver, of jax.lax.custom_root
    "_RootLinearMap": (_CUSTOM_VJP, _function),  # of its derivative
}
_PRIMITIVES = {name: _CallPrimitive(name) for name, _ in _CLASSES.values()}
# A program expands to one object, as caches know it by its id.
_EXPANDED: weakref.WeakKeyDictionary[core.Jaxpr, core.Jaxpr] = weakref.WeakKeyDictionary()


def with_calls_expanded(jaxpr: core.Jaxpr) -> core.Jaxpr:
    """Returns an open jaxpr with each call of an object as the equation that it stands for."""
    if not getattr(jaxpr, "is_high", False):
        return jaxpr
    if jaxpr not in _EXPANDED:
        _EXPANDED[jaxpr] = jaxpr.replace(eqns=list(map(_expand_call, jaxpr.eqns)), is_high=False)
    return _EXPANDED[jaxpr]


def _expand_call(equation: core.JaxprEqn) -> core.JaxprEqn:
    atoms: Sequence[Any] = (*equation.invars, *equation.outvars)
    if equation.primitive.name != _CALL or not all(hasattr(atom.aval, "dtype") for atom in atoms):
        return equation  # of other values than arrays, such as variables that are written to
    name, params_of = _CLASSES.get(_class_of(equation), (_CUSTOM_VJP, _function))
    try:
        params = {"call": equation, **params_of(equation)}
    except Exception:  # any exception: an object of another library, which may have no program
        if _class_of(equation) in _CLASSES:
            raise
        return equation
    return equation.replace(primitive=_PRIMITIVES[name], params=params)


def _class_of(call: core.JaxprEqn) -> str:
    return type(call.params["_prim"]).__name__


def unknown_class(equation: core.JaxprEqn) -> str | None:
    """Returns the class of the object that an equation calls, if jaxmp does not know it."""
    if not isinstance(equation.primitive, _CallPrimitive):
        return None
    name = _class_of(equation.params["call"])
    return None if name in _CLASSES else name
