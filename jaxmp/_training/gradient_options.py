"""The options that all functions with gradients share: checked once, and what follows from them."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, TypedDict

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, PyTree

from jaxmp._float32_reduction.api import Reduction
from jaxmp._mesh.fsdp import FSDP
from jaxmp._numerics.dtypes import is_inexact
from jaxmp._numerics.loss_scale import LossScaleState, StaticLossScale
from jaxmp._recompute.api import Recompute
from jaxmp._training.microbatch import Evaluation, check_microbatches, sum_over_microbatches

LossScaleLike = LossScaleState | Float[Array, ""] | float | None


class GradientKeywords(TypedDict, total=False):
    """The keyword arguments of `jaxmp.value_and_grad`, which says what they mean."""

    loss_scale: LossScaleLike
    microbatches: int
    batch_argnums: int | Sequence[int] | None
    reduce_dtype: Any
    fsdp: FSDP | None
    recompute: Recompute


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class GradientOptions:
    """Which arguments to differentiate, under which loss scale, and in how many parts.

    Attributes:
      argnums: which positional arguments to differentiate; a tuple once this is made.
      several: whether `argnums` was several numbers, so that the gradients are a tuple.
      has_aux: whether the loss function returns `(loss, aux)`.
      loss_scale: a number or a state, a state once this is made; None for no scaling.
      microbatches: how many parts of the batch are evaluated one after the other.
      batch_argnums: the positional arguments to split; None for all that are not differentiated.
      reduction: how gradients are summed over devices; None leaves it to the loss function.
      devices: over how many devices the batch is split, if each computes its own loss.
    """

    argnums: Any = 0
    several: bool = False
    has_aux: bool = False
    loss_scale: Any = None
    microbatches: int = 1
    batch_argnums: int | Sequence[int] | None = None
    reduction: Reduction | None = None
    devices: int = 1

    def __post_init__(self) -> None:
        argnums = tuple(self.argnums) if self.several else (self.argnums,)
        object.__setattr__(self, "argnums", argnums)
        scale = self.loss_scale
        if isinstance(scale, (int, float)) and not isinstance(scale, bool):
            scale = StaticLossScale(scale).init()
        elif isinstance(scale, (jax.Array, np.ndarray, np.generic)) and (
            scale.shape == () and is_inexact(scale)
        ):
            array = jnp.asarray(scale, jnp.float32)
            scale = StaticLossScale(1.0).init()._replace(scale=array)
        elif scale is not None and not isinstance(scale, LossScaleState):
            raise TypeError(
                "loss_scale must be the state of a loss scale, such as opt_state.loss_scale or "
                f"config.init(), a float scalar or None; got {type(scale).__name__}"
            )
        object.__setattr__(self, "loss_scale", scale)
        check_microbatches(self.microbatches)

    @property
    def weight(self) -> float:
        """The weight of the loss of one part in the mean over all parts."""
        return 1.0 / (self.devices * self.microbatches)

    def positions(self, count: int) -> tuple[int, ...]:
        """Returns which of `count` arguments to differentiate, counted from the first."""
        return check_positions(self.argnums, count, "argnums")

    def batch(
        self, args: Sequence[Any], wrt: Sequence[int], is_state: Callable[[Any], bool] | None = None
    ) -> dict[int, Any]:
        """Returns the arguments to split, by position; by default, none that is state."""
        argnums = self.batch_argnums
        if argnums is None:
            free = [i for i in range(len(args)) if i not in wrt]
            argnums = [i for i in free if is_state is None or not is_state(args[i])]
        argnums = (argnums,) if isinstance(argnums, int) else tuple(argnums)
        positions = check_positions(argnums, len(args), "batch_argnums")
        if both := sorted(set(positions) & set(wrt)):
            raise ValueError(f"arguments {both} are in both argnums and batch_argnums")
        if not positions:
            raise ValueError(
                "microbatches needs a positional batch argument to split; got only those in argnums"
            )
        return {i: args[i] for i in positions}

    def over_microbatches(
        self,
        evaluate: Callable[..., Evaluation],
        args: Sequence[Any],
        wrt: Sequence[int],
        whole: PyTree = None,
    ) -> Evaluation:
        """Evaluates the arguments at once or in microbatches; see `sum_over_microbatches`."""
        # A function of params alone has no batch.
        batch = self.batch(args, wrt) if self.microbatches > 1 else {}

        def evaluate_part(carry: None, part: dict[int, Any]) -> tuple[None, Evaluation]:
            return carry, evaluate(*[part.get(i, arg) for i, arg in enumerate(args)])

        params = tuple(args[i] for i in wrt)
        count = self.microbatches
        return sum_over_microbatches(evaluate_part, None, params, batch, count, whole)[1]

    def one_or_all(self, trees: Sequence[PyTree]) -> PyTree:
        """Returns one tree for each differentiated argument, in the form of `argnums`."""
        return trees if self.several else trees[0]

    def result(self, evaluation: Evaluation) -> tuple[Any, PyTree]:
        """Returns `(loss, grads)`, or `((loss, aux), grads)`."""
        loss, grads, aux = evaluation
        return ((loss, aux) if self.has_aux else loss), self.one_or_all(grads)


def check_positions(positions: Sequence[int], count: int, name: str) -> tuple[int, ...]:
    for i in positions:
        if not -count <= i < count:
            raise ValueError(f"{name} contains {i}, but only {count} positional arguments came")
    return tuple(i % count for i in positions)
