"""Names of floating dtypes, and the few predicates on them that jaxmp uses."""

import difflib
import math
from typing import Any

import jax
import jax.numpy as jnp
import jmp
import numpy as np

DType = np.dtype

HALVES = frozenset(map(jnp.dtype, (jnp.bfloat16, jnp.float16)))

# Long name first, then the short ones. jmp's names and PyTorch's are both accepted.
_NAMES: dict[str, tuple[str, ...]] = {
    "float64": ("f64", "fp64"),
    "float32": ("f32", "fp32", "full"),
    "bfloat16": ("bf16",),
    "float16": ("f16", "fp16"),
    # "e4m3" alone is not a short name: float8_e4m3 and float8_e4m3fn are different formats.
    "float8_e4m3fn": ("f8_e4m3fn", "e4m3fn"),
    "float8_e5m2": ("f8_e5m2", "e5m2"),
    "float8_e3m4": ("f8_e3m4", "e3m4"),
    "float8_e4m3": ("f8_e4m3",),
    "float8_e4m3fnuz": ("f8_e4m3fnuz", "e4m3fnuz"),
    "float8_e4m3b11fnuz": ("f8_e4m3b11fnuz", "e4m3b11fnuz"),
    "float8_e5m2fnuz": ("f8_e5m2fnuz", "e5m2fnuz"),
}
_BY_NAME: dict[str, DType] = {
    name: jnp.dtype(long) for long, short in _NAMES.items() for name in (long, *short)
}
_VALID = ", ".join([*_NAMES, "half", *(s for short in _NAMES.values() for s in short)])


def suggestion(name: str, valid: list[str]) -> str:
    """Returns `" Did you mean 'x'?"` for the nearest valid name, or an empty text.

    >>> suggestion("float8", ["float32", "mixed_float8"])
    " Did you mean 'mixed_float8'?"
    """
    # A name that contains the whole text comes first: "float32" differs in fewer letters, but who
    # writes "float8" does not mean it.
    longer = [candidate for candidate in valid if len(name) > 2 and name in candidate]
    candidates = sorted(longer, key=len) or difflib.get_close_matches(name, valid, n=1)
    return f" Did you mean {candidates[0]!r}?" if candidates else ""


def parse_dtype(value: Any) -> DType:
    """Returns the floating dtype that a name or a dtype-like value stands for.

    Args:
      value: a long or short name (`"bfloat16"`, `"bf16"`, `"float8_e4m3fn"`), `"half"` (jmp's
        name for float16, or bfloat16 on TPU), or anything that `jnp.dtype` accepts.

    Returns:
      The NumPy dtype.

    Raises:
      ValueError: for an unknown name, or a dtype that is not a supported float.

    >>> parse_dtype("bf16").name, parse_dtype(jnp.float16).name
    ('bfloat16', 'float16')
    """
    # `jnp.bfloat16`, "bf16" and `jnp.dtype("bfloat16")` compare, hash and print differently in
    # NumPy and JAX. So every dtype that enters jaxmp passes through here once.
    if isinstance(value, str):
        name = value.strip()
        if name == "half":
            return jnp.dtype(jmp.half_dtype())
        if name not in _BY_NAME:
            hint = suggestion(name, [*_BY_NAME, "half"])
            raise ValueError(f"unknown dtype {name!r}.{hint} Valid names: {_VALID}")
        return _BY_NAME[name]
    try:
        dtype = None if value is None else jnp.dtype(value)  # NumPy reads None as float64
    except TypeError:
        dtype = None
    if dtype is None:
        raise ValueError(f"{value!r} is not a dtype. Valid names: {_VALID}")
    if dtype.name not in _NAMES:
        raise ValueError(
            f"dtype {dtype.name} is not a float that a policy can hold. Valid names: {_VALID}"
        )
    return dtype


def code_kind(name: str) -> str:
    """Returns `"float8"` or `"int8"` for the name of a dtype of codes, and `""` for others.

    >>> code_kind("float8_e5m2"), code_kind("int8"), code_kind("bfloat16")
    ('float8', 'int8', '')
    """
    return next((kind for kind in ("float8", "int8") if name.startswith(kind)), "")


def any_dtype_name(dtype: Any) -> str:
    """Returns the name of a dtype, floating or not, given by name or as a dtype.

    >>> any_dtype_name("bf16"), any_dtype_name("int8"), any_dtype_name(np.float32)
    ('bfloat16', 'int8', 'float32')
    """
    try:
        return str(parse_dtype(dtype).name)
    except ValueError:
        try:
            other = np.dtype(dtype)
        except TypeError:
            other = None
        # Bools, integers and complex numbers are in programs too, though no policy names them.
        if other is None or other.kind not in "biuc":
            raise
        return other.name


def is_floating(x: Any) -> bool:
    """Whether `x` has a real floating dtype; false for keys, float0, complex and non-arrays."""
    return hasattr(x, "dtype") and jnp.issubdtype(x.dtype, jnp.floating)


def is_inexact(x: Any) -> bool:
    """Whether `x` has a real or complex floating dtype, so that it can be differentiated."""
    return hasattr(x, "dtype") and jnp.issubdtype(x.dtype, jnp.inexact)


def is_half(x: Any) -> bool:
    """Whether `x` has bfloat16 or float16 numbers."""
    return getattr(x, "dtype", None) in HALVES


def is_half_or_float32(x: Any) -> bool:
    """Whether `x` has the dtypes of models: float32, bfloat16, float16."""
    return is_half(x) or getattr(x, "dtype", None) == jnp.float32


def is_key(x: Any) -> bool:
    """Whether `x` holds typed PRNG keys."""
    return hasattr(x, "dtype") and jnp.issubdtype(x.dtype, jax.dtypes.prng_key)


def at_least_float32(dtype: Any) -> DType:
    """Returns float32 for narrower floats, else the dtype itself (float64 and complex stay)."""
    dtype = jnp.dtype(dtype)
    return jnp.dtype(jnp.float32) if is_narrow(dtype) else dtype


def is_narrow(dtype: Any) -> bool:
    """Whether a dtype is a float of fewer than 32 bits, which cannot be its own master."""
    dtype = jnp.dtype(dtype)
    return jnp.issubdtype(dtype, jnp.floating) and dtype.itemsize < 4


def nbytes_of(x: Any) -> int:
    """Returns the bytes of an array or a type; of keys, those of their words; 0 for other values.

    >>> nbytes_of(np.zeros((2, 3), np.float32)), nbytes_of(jax.random.key(0)), nbytes_of("text")
    (24, 8, 0)
    """
    if not (hasattr(x, "dtype") and hasattr(x, "shape")):
        return 0
    # Not `x.nbytes`, which types lack. The itemsize of a key's dtype counts all words of the key.
    return math.prod(x.shape) * int(x.dtype.itemsize)
