"""Reduces gradients of live nnx modules in float32."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from flax import nnx

from jaxmp._flax.nnx_modules import call_pure, pure
from jaxmp._float32_reduction.api import GradientReduction, gradient_reduction, reduced_in_float32
from jaxmp._mesh.fsdp import FSDP

_TAG = "jaxmp.reduction"


class NnxReduction(NamedTuple):
    """`GradientReduction` for functions of modules.

    Attributes:
      reduction: how gradients are reduced.
    """

    reduction: GradientReduction

    def rewrite(
        self, fun: Callable[..., Any], args: Sequence[Any], argnums: Sequence[Any]
    ) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        """Rewrites a function of modules so that gradients of its params are reduced this way."""
        pure_fun = pure(fun, _TAG)

        def of_params(graphdef: Any, params: Any, rest: Any) -> Any:
            return pure_fun(graphdef, nnx.merge_state(params, rest))

        def rewritten(graphdef: Any, state: Any) -> Any:
            self.reduction.check(state)
            params, rest = nnx.split_state(state, _is_wanted(argnums), ...)
            layouts = self.reduction.layouts([_state_of(params, x.argnum) for x in argnums])
            call, given = reduced_in_float32(of_params, (graphdef, params, rest), (1,), layouts)
            return call(*given)

        return lambda *nodes: call_pure(rewritten, _TAG, nodes), tuple(args)

    def constrain(self, grads: tuple[Any, ...]) -> tuple[Any, ...]:
        """Returns the gradients with the shardings of the params."""
        return self.reduction.constrain(grads)


def nnx_reduction(reduce_dtype: Any, fsdp: FSDP | None, several: bool) -> NnxReduction | None:
    """Returns the reduction for a `reduce_dtype`; None if there is nothing to do."""
    if fsdp is not None and several:
        raise ValueError("fsdp is for the params of one module: give argnums as one number")
    reduction = gradient_reduction(reduce_dtype, fsdp)
    return None if reduction is None else NnxReduction(reduction)


def _state_of(params: Any, argnum: int) -> Any:
    """Returns the params of one argument, with the structure of their gradients."""
    return nnx.State(params.raw_mapping.get(argnum, {}))


def _is_wanted(argnums: Sequence[Any]) -> Callable[[Any, Any], bool]:
    """Returns a filter for the variables to differentiate."""
    filters = [(x.argnum, nnx.filterlib.to_predicate(x.filter)) for x in argnums]
    return lambda path, value: any(path[0] == i and is_in(path[1:], value) for i, is_in in filters)
