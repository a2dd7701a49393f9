"""A function under autocast, and all of it in 16 bits; numbers for both."""

from typing import Any

import jax
import numpy as np

import jaxmp
from tests.support.autocast_checks import BF16, LOW, compiled


def rounded(x: Any, policy: str = BF16) -> np.ndarray:
    """To the policy's dtype and back."""
    return np.asarray(x).astype(LOW[policy]).astype(np.float32)


def whole(x: Any, times: float = 4) -> np.ndarray:
    """Integers, whose products are exact."""
    return np.round(np.asarray(x) * times)


def both_ways(f: Any, *args: Any, policy: str = BF16, of: Any = lambda f: f, **options: Any) -> Any:
    """What a function, or a transformation of it, gives under autocast, and what in float32."""
    cast = of(jaxmp.autocast(f, policy, **options))
    return compiled(lambda *args: (cast(*args), of(f)(*args)))(*args)


def in_16_bits(f: Any, policy: str, *args: Any) -> Any:
    """The positive control: everything in 16 bits, as a cast of all arguments makes it."""
    low = [np.asarray(x).astype(LOW[policy]) for x in args]
    exactly = jax.jit(f, compiler_options={"xla_allow_excess_precision": False})
    return jax.tree.map(lambda x: np.asarray(x).astype(np.float32), exactly(*low))
