"""A program of the digests, made from a loss. All arrays are abstract: nothing runs."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jmp
from jaxtyping import PyTree

import jaxmp

Loss = Callable[..., Any]
POLICIES = {"bfloat16": "mixed_bfloat16", "float16": "mixed_float16", "float8": "mixed_float8"}
_SCALE = 1024.0  # of a loss that computes in float16


@dataclasses.dataclass(frozen=True)
class Program:
    """A gradient or a train step.

    Attributes:
      run: the function.
      args: its arguments.
      loss: what its backward pass keeps bytes of; None if that is said by another program.
      loss_args: the arguments of the loss; by default `args`.
    """

    run: Callable[..., Any]
    args: tuple[Any, ...]
    loss: Loss | None = None
    loss_args: tuple[Any, ...] | None = None

    @property
    def is_sharded(self) -> bool:
        """Whether arguments are spread over devices."""
        return any(getattr(x, "sharding", None) is not None for x in jax.tree.leaves(self.args))


Make = Callable[[], Program]


def abstract(make: Callable[..., Any], *args: Any) -> Any:
    """What a function makes of arrays, as shapes and dtypes."""
    return jax.eval_shape(make, *args)


def gradient(loss: Loss, params: PyTree, batch: PyTree, *, dtype: str, **options: Any) -> Program:
    """The gradient of a loss of params and batch; in float16 with a loss scale."""
    if dtype == "float16":
        options["loss_scale"] = _SCALE
    run = jaxmp.value_and_grad(loss, **options)
    lean = jaxmp.recompute(loss, options.get("recompute", "never"))
    return Program(run, (params, batch), lean)


def by_jmp(loss: Loss, dtype: str) -> Loss:
    """A loss whose params and batch jmp casts, as people write it without jaxmp."""
    cast = jmp.get_policy(f"params=float32,compute={dtype},output=float32").cast_to_compute
    return lambda params, batch: loss(cast(params), cast(batch))


def under_autocast(loss: Loss, policy: Any, **options: Any) -> Loss:
    """A loss under autocast; `policy` may be a dtype."""
    known = POLICIES.get(policy, policy) if isinstance(policy, str) else policy
    return jaxmp.autocast(loss, known, **options)


def named(name: str, make: Callable[..., Program], *args: Any, **options: Any) -> dict[str, Make]:
    """An entry of a table of programs."""
    return {name: functools.partial(make, *args, **options)}
