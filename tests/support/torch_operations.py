"""The operations that PyTorch has answers for, in JAX; where jaxmp gives another dtype, and why."""

from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
from jax import lax
from jax.scipy import special

Way = Literal["arguments", "activations"]
Operation = Callable[[Any, Any], Any]


def row(y: Any) -> Any:
    """The first row: a bias, a scale, running statistics."""
    return lax.index_in_dim(y, 0, keepdims=False)


def rows(y: Any) -> Any:
    return jnp.take(y, jnp.arange(2), axis=0)


def unary(fun: Callable[[Any], Any]) -> Operation:
    return lambda x, y: fun(x)


def norm(module: Any) -> Operation:
    return lambda x, y: module.apply({}, x)


def batch_norm(x: Any, y: Any) -> Any:
    module = nn.BatchNorm(use_running_average=True, use_bias=False, use_scale=False)
    return module.apply({"batch_stats": {"mean": row(y), "var": row(y)}}, x)


def scatter_add(x: Any, y: Any) -> Any:
    dtype = jnp.result_type(x, y)
    return x.astype(dtype).at[jnp.arange(2)].add(rows(y).astype(dtype))


def cross_entropy(x: Any, y: Any) -> Any:
    return jnp.mean(optax.losses.softmax_cross_entropy_with_integer_labels(x, jnp.arange(4)))


bare = {"use_bias": False, "use_scale": False}
# For each operation that PyTorch has an answer for, the same in JAX, of two matrices of 4 x 4.
OPERATIONS: dict[str, Operation] = {
    # Products.
    "matmul": lambda x, y: x @ y,
    "mm": jnp.dot,
    "einsum": lambda x, y: jnp.einsum("ij,jk->ik", x, y),
    "tensordot": lambda x, y: jnp.tensordot(x, y, 1),
    "linear": lambda x, y: x @ y.T + row(y),
    "addmm": lambda x, y: x + x @ y,
    # Functions of one number.
    "exp": unary(jnp.exp),
    "exp2": unary(jnp.exp2),
    "expm1": unary(jnp.expm1),
    "log": unary(jnp.log),
    "log1p": unary(jnp.log1p),
    "log2": unary(jnp.log2),
    "sigmoid": unary(jax.nn.sigmoid),
    "tanh": unary(jnp.tanh),
    "sin": unary(jnp.sin),
    "cos": unary(jnp.cos),
    "tan": unary(jnp.tan),
    "sinh": unary(jnp.sinh),
    "cosh": unary(jnp.cosh),
    "asin": unary(jnp.arcsin),
    "acos": unary(jnp.arccos),
    "atan": unary(jnp.arctan),
    "erf": unary(special.erf),
    "erfc": unary(special.erfc),
    "erfinv": unary(special.erfinv),
    "lgamma": unary(special.gammaln),
    "digamma": unary(special.digamma),
    "pow_scalar": unary(lambda x: x**2.5),
    "pow_int2": unary(lambda x: x**2),
    "square": unary(jnp.square),
    "rpow": unary(lambda x: 2.0**x),
    "sqrt": unary(jnp.sqrt),
    "rsqrt": unary(lax.rsqrt),
    "reciprocal": unary(jnp.reciprocal),
    "cbrt_like_pow": unary(jnp.cbrt),
    "neg": unary(jnp.negative),
    "abs": unary(jnp.abs),
    "clamp": unary(lambda x: jnp.clip(x, 0.2, 0.8)),
    "floor": unary(jnp.floor),
    "round": unary(jnp.round),
    # Of two.
    "logaddexp": jnp.logaddexp,
    "atan2": jnp.arctan2,
    "pow_tt": jnp.power,
    "add": jnp.add,
    "sub": jnp.subtract,
    "mul": jnp.multiply,
    "div": jnp.divide,
    "maximum": jnp.maximum,
    "minimum": jnp.minimum,
    "eq": jnp.equal,
    "where": lambda x, y: jnp.where(x > 0.5, x, y),
    "addcmul": lambda x, y: x + x * y,
    "addcdiv": lambda x, y: x + x / y,
    # Along a dimension.
    "sum": unary(jnp.sum),
    "sum_dim": unary(lambda x: jnp.sum(x, 0)),
    "mean": unary(jnp.mean),
    "var": unary(jnp.var),
    "std": unary(jnp.std),
    "prod": unary(jnp.prod),
    "amax": unary(jnp.max),
    "amin": unary(jnp.min),
    "argmax": unary(jnp.argmax),
    "cumsum": unary(lambda x: jnp.cumsum(x, 0)),
    "cumprod": unary(lambda x: jnp.cumprod(x, 0)),
    "cummax": unary(lax.cummax),
    "logcumsumexp": unary(lax.cumlogsumexp),
    "logsumexp": unary(special.logsumexp),
    "sort": unary(jnp.sort),
    "topk": unary(lambda x: lax.top_k(x, 2)[0]),
    "norm": unary(jnp.linalg.norm),
    "vector_norm": unary(jnp.linalg.vector_norm),
    # Activations and norms.
    "softmax": unary(jax.nn.softmax),
    "log_softmax": unary(jax.nn.log_softmax),
    "softplus": unary(jax.nn.softplus),
    "relu": unary(jax.nn.relu),
    "gelu_erf": unary(lambda x: jax.nn.gelu(x, approximate=False)),
    "gelu_tanh": unary(jax.nn.gelu),
    "silu": unary(jax.nn.silu),
    "elu": unary(jax.nn.elu),
    "dropout_eval": norm(nn.Dropout(0.5, deterministic=True)),
    "layer_norm": norm(nn.LayerNorm(**bare)),
    "rms_norm": norm(nn.RMSNorm(use_scale=False)),
    "group_norm": norm(nn.GroupNorm(2, **bare)),
    "batch_norm": batch_norm,
    "normalize": unary(lambda x: x / jnp.linalg.norm(x, axis=-1, keepdims=True)),
    "cosine_similarity": optax.losses.cosine_similarity,
    # Losses.
    "mse_loss": lambda x, y: jnp.mean((x - y) ** 2),
    "l1_loss": lambda x, y: jnp.mean(jnp.abs(x - y)),
    "huber_loss": lambda x, y: jnp.mean(optax.losses.huber_loss(x, y)),
    "cross_entropy": cross_entropy,
    "nll_loss": unary(lambda x: -jnp.mean(jnp.take_along_axis(x, jnp.arange(4)[:, None], 1))),
    "kl_div": lambda x, y: jnp.mean(jnp.exp(y) * (y - x)),
    "bce_with_logits": lambda x, y: jnp.mean(optax.losses.sigmoid_binary_cross_entropy(x, y)),
    "cdist": lambda x, y: jnp.linalg.norm(x[:, None] - y[None], axis=-1),
    # Moving data.
    "cat": lambda x, y: jnp.concatenate([x, y]),
    "stack": lambda x, y: jnp.stack([x, y]),
    "index_select": unary(rows),
    "embedding": unary(lambda x: x[jnp.arange(2)]),
    "scatter_add": scatter_add,
    # Linear algebra.
    "cholesky": unary(jnp.linalg.cholesky),
    "svdvals": unary(jnp.linalg.svdvals),
    "inv": unary(jnp.linalg.inv),
    "fft": unary(jnp.fft.fft),
}


# What JAX itself refuses to do in 16 bits, since 0.11.
REFUSED = ("cholesky", "svdvals", "inv")


class Difference(NamedTuple):
    """Where jaxmp has another dtype than PyTorch.

    Attributes:
      operands: the pairs of dtypes, separated by blanks.
      dtype: what jaxmp gives; "lp" for the 16-bit dtype.
      way: how the operands came to be in 16 bits.
      low: the only 16-bit dtype for which it holds, if not for both.
    """

    operands: str
    dtype: str
    way: Way
    low: str | None = None


def both(operands: str, dtype: str, low: str | None = None) -> list[Difference]:
    return [Difference(operands, dtype, "arguments", low), *activations(operands, dtype, low)]


def arguments(operands: str, dtype: str, low: str | None = None) -> list[Difference]:
    return [Difference(operands, dtype, "arguments", low)]


def activations(operands: str, dtype: str, low: str | None = None) -> list[Difference]:
    operands = " ".join(each for each in operands.split() if "lp" in each)
    return [Difference(operands, dtype, "activations", low)]


FIRST = "lp,lp lp,f32"  # whatever the second operand is, which is not used
OVERFLOWS = (
    "Overflows or cancels in 16 bits as `exp` and `log` do; PyTorch's list does not have it."
)
SUMS = "A sum and so in float32; its result stays there. PyTorch returns it in the operand's dtype."
SQUARES = (
    "Has the range of float32 in bfloat16 and is stored in it, unless a sum or another float32 "
    "operation is all that reads it. In float16, which overflows, it is float32."
)
LAST_BITS = "Reads the last bits of a phase or of a coordinate, which 16 bits do not have."
EXTREMES = (
    "Makes one number of many, as a sum does. What is added to it later, as in the logarithm of a "
    "sum of exponentials, is then added in float32."
)
WEAK = (
    "A float32 argument takes the dtype of the activation that it meets. If it widened that, 16 "
    "bits would end at the first mask or scale."
)
LINALG = (
    "Left as it was traced, in float32. PyTorch has no 16-bit kernel for the dtype it promises."
)
WORDS = "JAX's integers have 32 bits, unless told otherwise."
WHY: dict[str, tuple[list[Difference], str]] = {
    "tensordot": (
        both("f32,f32 f32,lp lp,f32", "lp"),
        "A matrix product like any other to JAX; PyTorch's list only promotes it.",
    ),
    "addmm": (
        both("f32,f32 f32,lp", "float32") + arguments("lp,f32", "float32"),
        "A float32 addend of full shape may be a parameter that is updated, `w - rate * grad`, "
        "which 16 bits would lose. A bias, which is laid out along the batch, leaves 16 bits.",
    ),
    "linear": (
        arguments("f32,lp", "float32"),
        "`jnp` casts a 16-bit bias to float32 where the other operand is float32.",
    ),
    "exp2": (both(FIRST, "float32"), OVERFLOWS),
    "softplus": (
        both(FIRST, "lp"),
        "A maximum plus a logarithm, which joins it in its dtype; PyTorch has one kernel for it.",
    ),
    **{name: (both(FIRST, "float32"), LAST_BITS) for name in ("sin", "cos", "floor", "round")},
    **{name: (both(FIRST, "float32"), EXTREMES) for name in ("amax", "amin")},
    "reciprocal": (both(FIRST, "bfloat16", "bfloat16"), SQUARES),
    **{
        name: (activations("f32,lp lp,f32", "lp"), WEAK)
        for name in ("atan2", "mul", "div", "maximum", "minimum", "cat", "stack")
    },
    **{name: (activations("lp,f32", "lp"), WEAK) for name in ("addcmul", "addcdiv")},
    "lgamma": (both(FIRST, "float32"), OVERFLOWS),
    "digamma": (both(FIRST, "float32"), OVERFLOWS),
    "logcumsumexp": (both(FIRST, "float32"), OVERFLOWS),
    "pow_int2": (both(FIRST, "bfloat16", "bfloat16"), SQUARES),
    "square": (both(FIRST, "bfloat16", "bfloat16"), SQUARES),
    **{name: (both(FIRST, "float32"), SUMS) for name in ("mean", "var", "std")},
    **{
        name: (arguments(FIRST, "lp"), "Flax casts the result back; the norm is in float32.")
        for name in ("layer_norm", "rms_norm", "group_norm")
    },
    "batch_norm": (
        activations("lp,lp", "float32") + arguments("lp,lp", "float32"),
        "Normalised in float32 as every norm is, until it meets 16 bits; PyTorch's kernel does the "
        "same within.",
    ),
    "scatter_add": (
        both("lp,lp", "float32"),
        "Adds up in float32, since many updates may meet in one place.",
    ),
    "argmax": (arguments("f32,f32", "int32") + both("lp,lp f32,lp lp,f32", "int32"), WORDS),
    "cholesky": (activations(FIRST, "float32"), LINALG),
    "svdvals": (activations(FIRST, "float32"), LINALG),
    "fft": (both(FIRST, "complex64", "float16"), "JAX has no complex numbers of 32 bits."),
}
