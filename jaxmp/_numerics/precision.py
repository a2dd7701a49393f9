"""The precision of float32 products: its names in policies and in JAX, and how devices multiply.

A float32 product without a precision is not float32: TPUs multiply bfloat16 roundings of its
operands, GPUs since Ampere their TF32 roundings. docs/precision.md has the table.
"""

import contextlib
from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
from jax import lax

from jaxmp._numerics.dtypes import suggestion


class Meaning(NamedTuple):
    """The meaning of a precision.

    Attributes:
      tpu: how a TPU multiplies.
      gpu: how an NVIDIA GPU since Ampere multiplies.
      rank: 2 if the product has float32's error on every device that has it, 1 as for HIGH, or 0.
    """

    tpu: str
    gpu: str
    rank: int


_REFUSED = "refused"
_LEVELS = {
    "default": Meaning("bf16 x 1", "TF32", 0),
    # XLA's Triton kernels multiply float32, cuBLAS and cuDNN multiply TF32.
    "high": Meaning("bf16 x 3", "TF32 or float32", 1),
    "highest": Meaning("bf16 x 6", "float32", 2),
}
_ALGORITHMS = {
    "BF16_BF16_F32": Meaning("bf16 x 1", "bf16 x 1", 0),
    "BF16_BF16_F32_X3": Meaning("bf16 x 3", "bf16 x 3", 1),
    "BF16_BF16_F32_X6": Meaning("bf16 x 6", "bf16 x 6", 2),
    "TF32_TF32_F32": Meaning(_REFUSED, "TF32", 1),
    "TF32_TF32_F32_X3": Meaning(_REFUSED, "TF32 x 3", 1),
    "F32_F32_F32": Meaning(_REFUSED, "float32", 2),
}
# JAX's other names for its levels. Of these a policy takes only `tensorfloat32`.
_ALIASES = {"bfloat16": "default", "tensorfloat32": "high", "float32": "highest"}
_NAMES = (*_LEVELS, "tensorfloat32")


def parse_precision(value: Any) -> str | None:
    """Returns the canonical name of a precision of float32 products; None stays None.

    Args:
      value: `"default"`, `"high"`, `"highest"`, `"tensorfloat32"` (JAX's name for `"high"`), the
        name of a `jax.lax.DotAlgorithmPreset`, or one of JAX's own objects for these.

    Raises:
      ValueError: for anything else, and for algorithms that are not for float32 operands.

    >>> parse_precision("HIGH"), parse_precision(lax.DotAlgorithmPreset.BF16_BF16_F32_X3)
    ('high', 'BF16_BF16_F32_X3')
    """
    if value is None:
        return None
    is_object = isinstance(value, (lax.Precision, lax.DotAlgorithmPreset))
    text = value.name if is_object else value
    if isinstance(text, str):
        text = text.strip()
        if text.lower() in _NAMES:
            return text.lower()
        if text.upper() in _ALGORITHMS:
            return text.upper()
    name = str(text)
    level = (_ALIASES | {"tf32": "tensorfloat32"}).get(name.lower())
    hint = f" Did you mean {level!r}?" if level else ""
    hint = hint or suggestion(name.lower(), list(_NAMES))
    hint = hint or suggestion(name.upper(), list(_ALGORITHMS))
    raise ValueError(
        f"unknown precision of float32 products {name!r}.{hint} Valid: {', '.join(_NAMES)}, or an "
        f"algorithm for float32 operands: {', '.join(_ALGORITHMS)}"
    )


def is_algorithm(precision: str | None) -> bool:
    """Whether a precision is a dot algorithm, which JAX has for matrix products alone."""
    return precision in _ALGORITHMS


class _Override(NamedTuple):
    """The value of JAX's option that jaxmp has set, and the user's own value."""

    option: str
    users: str | None


# A part of the key of every trace cache: JAX's option alone does not say who has set it.
_OVERRIDE: Any = jax.make_user_context(default_value=None)


def users_option() -> str | None:
    """Returns `jax_default_matmul_precision` as the user has set it, without an override."""
    option: str | None = jax.config.jax_default_matmul_precision  # type: ignore[attr-defined]
    override: _Override | None = _OVERRIDE.value
    return override.users if override is not None and override.option == option else option


def precision_of(precision: str | None) -> str | None:
    """Returns the precision of the float32 products of a policy; None if the user's option decides.

    >>> precision_of(None), precision_of("high")
    ('highest', 'high')
    """
    if precision is None:
        return None if users_option() is not None else "highest"
    return precision


@contextlib.contextmanager
def default_precision(precision: str | None) -> Iterator[None]:
    """Gives a precision to the products that are traced in this context and name none themselves.

    None stands for the user's own option.
    """
    users = users_option()
    # An algorithm would hold for 16-bit products too, and JAX makes them products of float32.
    # HIGHEST changes no 16-bit product.
    option = "highest" if is_algorithm(precision) else precision
    override = None if option is None else _Override(option, users)
    with jax.default_matmul_precision(users if option is None else option), _OVERRIDE(override):
        yield


def as_param(precision: str, *, algorithms: bool = True) -> Any:
    """Returns a precision as JAX's operations take it; HIGHEST for an algorithm if it takes none.

    >>> as_param("tensorfloat32"), as_param("F32_F32_F32")
    (Precision.HIGH, DotAlgorithmPreset.F32_F32_F32)
    """
    if is_algorithm(precision):
        return lax.DotAlgorithmPreset[precision] if algorithms else lax.Precision.HIGHEST
    return lax.Precision[_ALIASES.get(precision, precision).upper()]


def name_of_param(param: Any) -> str:
    """Returns the name of the precision in the params of a product; of two, the lower one.

    >>> name_of_param((lax.Precision.HIGHEST, lax.Precision.HIGH)), name_of_param(None)
    ('high', 'default')
    """
    if isinstance(param, (tuple, list)):
        return min(map(name_of_param, param), key=lambda name: meaning_of(name).rank)
    if isinstance(param, lax.Precision):
        return param.name.lower()
    if isinstance(param, lax.DotAlgorithmPreset) and param.name != "DEFAULT":
        return param.name
    return "default" if param is None or isinstance(param, lax.DotAlgorithmPreset) else str(param)


def meaning_of(name: str) -> Meaning:
    """Returns the meaning of a precision; other algorithms are shown by their name.

    >>> meaning_of("highest").tpu, meaning_of("F64_F64_F64").gpu
    ('bf16 x 6', 'F64_F64_F64')
    """
    meanings = _LEVELS | _ALGORITHMS
    return meanings.get(_ALIASES.get(name, name), Meaning(name, name, 0))


def is_own(param: Any) -> bool:
    """Whether a product has another precision than the user's option gives it."""
    # A jaxpr does not show whether a product got the same precision from its author.
    option = users_option()
    return param is not None and (
        option is None or name_of_param(param) != _ALIASES.get(option, option)
    )
