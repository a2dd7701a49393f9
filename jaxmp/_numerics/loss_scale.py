"""Loss scales: frozen configs, and a state of arrays that moves through `jit`.

float16 holds nothing below 6e-8, so gradients are lost unless the loss is multiplied by a scale
before differentiation and the gradients divided by it afterwards (Micikevicius et al., 2018).
A dynamic scale grows until gradients overflow, skips that step, and backs off.
"""

import dataclasses
import math
import operator
from collections.abc import Collection
from typing import Any, NamedTuple, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Float32, Int32, PyTree

from jaxmp._numerics.dtypes import DType, at_least_float32, is_inexact
from jaxmp._numerics.tree import check_flag

# Below this 1/scale overflows.
_SMALLEST_SCALE = 2.0**-126
_LARGEST_SCALE = float(np.finfo(np.float32).max)
_LARGEST_COUNT = 2**31 - 1  # steps, in int32: a longer interval never ends


class LossScaleState(NamedTuple):
    """The current loss scale. All leaves are arrays of a named dtype, so a step traces once.

    Attributes:
      scale: what the loss is multiplied by.
      growth_count: finite steps since the scale last changed or a step overflowed.
      hysteresis: overflows still tolerated before the scale backs off; counts on below zero until
        the scale next grows, as in Megatron.
    """

    scale: Float32[Array, ""]
    growth_count: Int32[Array, ""]
    hysteresis: Int32[Array, ""]

    def scale_loss(self, loss: Float[Array, ""]) -> Float[Array, ""]:
        """Multiplies a loss by the scale, in float32: in float16 the product would overflow.

        >>> float(StaticLossScale(2.0**16).init().scale_loss(jnp.float16(3.0)))
        196608.0
        """
        loss = jnp.asarray(loss)
        loss = loss.astype(at_least_float32(loss.dtype))
        return loss * jnp.asarray(self.scale, loss.dtype)

    def unscale(self, grads: PyTree) -> PyTree:
        """Divides gradients by the scale, in float32 (or the gradient's own wider dtype).

        Args:
          grads: gradients of a loss that `scale_loss` scaled with this very state.

        Returns:
          The tree with float16 and bfloat16 leaves in float32; non-float leaves unchanged.

        >>> float(StaticLossScale(2.0**16).init().unscale(jnp.float16(1.0))) == 2.0**-16
        True
        """
        # The inverse of a scale above 2**126 is subnormal, and flushed to zero. The compiler would
        # merge two factors into one; it cannot see through a select.
        scale = jnp.asarray(self.scale)  # nnx.Optimizer keeps it in a variable
        huge = scale > 2.0**126

        def unscale_leaf(grad: Any) -> Any:
            if not is_inexact(grad):
                return grad
            grad = jnp.asarray(grad)
            grad = grad.astype(at_least_float32(grad.dtype))
            # In the gradient's precision: with a float32 inverse, float64 gradients lose theirs.
            divisor = scale.astype(jnp.finfo(grad.dtype).dtype)
            inverse = jnp.where(huge, 4.0 / divisor, 1.0 / divisor)
            return jnp.where(huge, grad / 4, grad) * inverse.astype(grad.dtype)

        return jax.tree.map(unscale_leaf, grads)


@runtime_checkable
class LossScale(Protocol):
    """The interface of a loss-scale config, which the three configs of this module have."""

    def init(self) -> LossScaleState:
        """Returns the state before the first step."""
        ...

    def adjust(self, state: LossScaleState, grads_finite: Bool[Array, ""]) -> LossScaleState:
        """Returns the state after a step with finite or non-finite gradients."""
        ...


@dataclasses.dataclass(frozen=True)
class NoLossScale:
    """A constant scale of 1: for float32 and bfloat16, whose range gradients do not leave.

    >>> float(NoLossScale().init().scale)
    1.0
    """

    def init(self) -> LossScaleState:
        """Returns the state: scale 1."""
        return _state(1.0, 0)

    def adjust(self, state: LossScaleState, grads_finite: Bool[Array, ""]) -> LossScaleState:
        """Returns the same state: this scale never changes."""
        check_flag(grads_finite, "grads_finite")
        return state


@dataclasses.dataclass(frozen=True)
class StaticLossScale:
    """A scale that never changes, for models whose gradient range is known.

    Args:
      scale: a finite number above zero; a power of two rounds nothing.

    Raises:
      ValueError: if the scale is not a finite number of at least 2**-126.

    >>> StaticLossScale(1024.0).init().scale
    Array(1024., dtype=float32)
    """

    scale: float

    def __post_init__(self) -> None:
        object.__setattr__(self, "scale", _check_scale("scale", self.scale))

    def init(self) -> LossScaleState:
        """Returns the state: the configured scale."""
        return _state(self.scale, 0)

    def adjust(self, state: LossScaleState, grads_finite: Bool[Array, ""]) -> LossScaleState:
        """Returns the same state: this scale never changes."""
        check_flag(grads_finite, "grads_finite")
        return state


@dataclasses.dataclass(frozen=True, kw_only=True)
class DynamicLossScale:
    """A scale that backs off on overflow and grows after a run of finite steps.

    The rule of PyTorch's GradScaler, with the bounds and the hysteresis that it lacks: without a
    floor the scale decays to zero and then destroys the params; without a ceiling it reaches
    infinity.

    Args:
      init_scale: the first scale, within the bounds.
      growth_factor: what the scale is multiplied by after `growth_interval` finite steps in a
        row, above 1.
      backoff_factor: what the scale is multiplied by on an overflow, between 0 and 1. Powers of two
        lose no bit of the gradients.
      growth_interval: the number of finite steps before a growth, at least 1; with 2**31 or more
        the scale never grows.
      min_scale: the scale never backs off below this; at least 2**-126, so that 1/scale is finite.
      max_scale: the scale never grows above this.
      hysteresis: the scale backs off at this overflow since the last growth (1 for the first), and
        at every one after it. Each overflow skips its step in any case. As in Megatron; 1 is
        PyTorch's behaviour.
      consecutive_hysteresis: each finite step forgives the overflows before it, as DeepSpeed's
        option of this name does; otherwise only a growth does.

    Raises:
      ValueError: for a number out of its range, a floor above the ceiling, or an `init_scale`
        outside them.

    >>> config = DynamicLossScale(init_scale=8.0, growth_interval=2)
    >>> state = config.adjust(config.init(), jnp.array(False))
    >>> float(state.scale)
    4.0
    >>> for _ in range(2):
    ...     state = config.adjust(state, jnp.array(True))
    >>> float(state.scale)
    8.0
    """

    init_scale: float = 2.0**16
    growth_factor: float = 2.0
    backoff_factor: float = 0.5
    growth_interval: int = 2000
    min_scale: float = 1.0
    max_scale: float = 2.0**24
    hysteresis: int = 1
    consecutive_hysteresis: bool = False

    def __post_init__(self) -> None:
        for name in ("init_scale", "min_scale", "max_scale"):
            object.__setattr__(self, name, _check_scale(name, getattr(self, name)))
        for name in ("growth_interval", "hysteresis"):
            object.__setattr__(self, name, _check_count(name, getattr(self, name)))
        if not (math.isfinite(self.growth_factor) and self.growth_factor > 1.0):
            raise ValueError(f"growth_factor must be finite and above 1, got {self.growth_factor}")
        if not 0.0 < self.backoff_factor < 1.0:
            raise ValueError(f"backoff_factor must be between 0 and 1, got {self.backoff_factor}")
        if self.min_scale > self.max_scale:
            raise ValueError(
                f"min_scale {self.min_scale} is above max_scale {self.max_scale}: "
                "the floor of the loss scale cannot be above its ceiling"
            )
        if not self.min_scale <= self.init_scale <= self.max_scale:
            raise ValueError(
                f"init_scale {self.init_scale} is outside min_scale {self.min_scale} to max_scale "
                f"{self.max_scale}. Move the bound, or start inside it"
            )

    def init(self) -> LossScaleState:
        """Returns the state before the first step."""
        return _state(self.init_scale, self.hysteresis)

    def adjust(self, state: LossScaleState, grads_finite: Bool[Array, ""]) -> LossScaleState:
        """Returns the state after one step.

        Args:
          state: the state with which the step's loss was scaled.
          grads_finite: boolean scalar; on several devices it must be the same on all.

        Returns:
          The next state. Works under `jit`, `vmap` and `scan`.

        Raises:
          TypeError: if `grads_finite` is not a boolean scalar.
        """
        check_flag(grads_finite, "grads_finite")
        state = LossScaleState(*map(jnp.asarray, state))
        streak = state.growth_count + 1
        grow = grads_finite & (streak >= min(self.growth_interval, _LARGEST_COUNT))
        forgive = grads_finite if self.consecutive_hysteresis else grow
        tolerance = jnp.where(grads_finite, state.hysteresis, state.hysteresis - 1)
        back_off = ~grads_finite & (tolerance <= 0)

        grown = _times(state.scale, self.growth_factor)
        # A growth past float32 is refused rather than clipped: the largest float32 is not a power
        # of two, and scaling by it would round every gradient.
        grown = jnp.where(jnp.isfinite(grown), grown, state.scale)
        backed_off = _times(state.scale, self.backoff_factor)
        scale = jnp.where(grow, grown, jnp.where(back_off, backed_off, state.scale))
        return LossScaleState(
            # A scale restored from a run with other bounds is clipped to these.
            scale=jnp.clip(scale, self.min_scale, self.max_scale),
            growth_count=jnp.where(grads_finite & ~grow, streak, 0),
            hysteresis=jnp.where(forgive, _count(self.hysteresis), tolerance),
        )


def _state(scale: float, hysteresis: int) -> LossScaleState:
    return LossScaleState(jnp.float32(scale), jnp.int32(0), _count(hysteresis))


def _count(number: int) -> Int32[Array, ""]:
    return jnp.int32(min(number, _LARGEST_COUNT))


def _check_scale(name: str, value: Any) -> float:
    try:
        number = float(value)
    except (TypeError, ValueError):
        raise ValueError(f"{name} must be a number, got {value!r}") from None
    if not _SMALLEST_SCALE <= number <= _LARGEST_SCALE:
        raise ValueError(
            f"{name} must be a finite float32 above zero, at least 2**-126 so that 1/{name} is "
            f"finite, got {value!r}"
        )
    return number


def _check_count(name: str, value: Any) -> int:
    try:
        number = operator.index(value)
    except TypeError:
        raise ValueError(f"{name} must be a whole number, got {value!r}") from None
    if isinstance(value, bool) or number < 1:
        raise ValueError(f"{name} must be a whole number of at least 1, got {value!r}")
    return number


def _times(scale: Float32[Array, ""], factor: float) -> Float32[Array, ""]:
    """Returns `scale * factor` as PyTorch computes it: with a double factor, rounded once."""
    if math.frexp(factor)[0] == 0.5:
        return scale * np.float32(factor)  # a power of two: exact, and no float64 on a TPU
    # Rounding a factor such as 1.1 to float32 first gives another scale in a quarter of all steps.
    with jax.enable_x64(True):
        return (scale.astype(jnp.float64) * jnp.float64(factor)).astype(jnp.float32)


def choose_loss_scale(loss_scale: Any, dtypes: Collection[DType]) -> LossScale:
    """Returns the config; for "auto", a dynamic loss scale if one of the dtypes is float16.

    Raises:
      TypeError: if `loss_scale` is not a config.

    >>> choose_loss_scale("auto", [jnp.dtype("bfloat16")])
    NoLossScale()
    """
    if isinstance(loss_scale, str) and loss_scale == "auto":
        return DynamicLossScale() if jnp.dtype(jnp.float16) in dtypes else NoLossScale()
    if isinstance(loss_scale, type) or not isinstance(loss_scale, LossScale):
        raise TypeError(
            "loss_scale must be 'auto' or a config such as DynamicLossScale(), "
            f"StaticLossScale(1024.0) or NoLossScale(); got {loss_scale!r}"
        )
    return loss_scale
