"""Policies: the dtypes of params, of the computation, of the output and of reduced gradients."""

import dataclasses
from collections.abc import Mapping
from typing import Any

import jmp
from jaxtyping import PyTree

from jaxmp._numerics.dtypes import DType, at_least_float32, parse_dtype, suggestion
from jaxmp._numerics.tree import cast_floating

_KEYS = {"params": "p", "compute": "c", "output": "o", "reduce": "r"}


@dataclasses.dataclass(frozen=True, repr=False, init=False)
class Policy(jmp.Policy):
    """A `jmp.Policy` that also says in which dtype gradients are reduced.

    It is a value: immutable, hashable, compared by its dtypes, and `get_policy(str(policy))`
    gives it back. It is accepted wherever jmp's policies are.

    Args:
      param_dtype: dtype in which the params are stored.
      compute_dtype: dtype of the forward and backward computation.
      output_dtype: dtype of what the model returns.
      reduce_dtype: dtype in which gradients are to be summed over devices; by default the
        widest of float32, the param and the compute dtype. `make_train_step` and `autocast` use it;
        `value_and_grad` has an argument of that name.

    Each may be given as any dtype or name that `get_policy` knows.

    Raises:
      ValueError: for a name or dtype that is not a float.

    >>> policy = Policy("float32", "bf16", "f32")
    >>> str(policy)
    'params=float32,compute=bfloat16,output=float32,reduce=float32'
    >>> import numpy as np
    >>> policy.cast_to_compute({"w": np.zeros(2), "ids": np.zeros(2, int)})["w"].dtype
    dtype(bfloat16)
    """

    reduce_dtype: DType

    def __init__(
        self, param_dtype: Any, compute_dtype: Any, output_dtype: Any, reduce_dtype: Any = None
    ) -> None:
        dtypes = [parse_dtype(dtype) for dtype in (param_dtype, compute_dtype, output_dtype)]
        if reduce_dtype is None:
            widest = max(map(at_least_float32, dtypes[:2]), key=lambda dtype: dtype.itemsize)
            dtypes.append(widest)
        else:
            dtypes.append(parse_dtype(reduce_dtype))
        for field, dtype in zip(dataclasses.fields(self), dtypes, strict=True):
            object.__setattr__(self, field.name, dtype)

    def cast_to_param(self, x: PyTree) -> PyTree:
        """Casts the floating leaves of a tree to `param_dtype`; other leaves pass."""
        return cast_floating(x, self.param_dtype)

    def cast_to_compute(self, x: PyTree) -> PyTree:
        """Casts the floating leaves of a tree to `compute_dtype`; other leaves pass."""
        return cast_floating(x, self.compute_dtype)

    def cast_to_output(self, x: PyTree) -> PyTree:
        """Casts the floating leaves of a tree to `output_dtype`; other leaves pass."""
        return cast_floating(x, self.output_dtype)

    def with_output_dtype(self, output_dtype: Any) -> "Policy":
        """Returns the same policy with another output dtype."""
        return Policy(self.param_dtype, self.compute_dtype, output_dtype, self.reduce_dtype)

    def __str__(self) -> str:
        dtypes = (self.param_dtype, self.compute_dtype, self.output_dtype, self.reduce_dtype)
        return ",".join(f"{key}={dtype}" for key, dtype in zip(_KEYS, dtypes, strict=True))

    def __repr__(self) -> str:
        return f"Policy({str(self)!r})"


_PRESETS: Mapping[str, str] = {
    "mixed_bfloat16": "params=float32,compute=bfloat16,output=float32",
    "mixed_float16": "params=float32,compute=float16,output=float32",
    "O0": "params=float32,compute=float32,output=float32",
    # The dtypes of operations, not of arrays: see jaxmp.autocast.
    "O1": "params=float32,compute=float16,output=float32",
    # O2 differs from O3 by norms in float32: see jaxmp.rules.get_rules.
    "O2": "params=float16,compute=float16,output=float32",
    "O3": "params=float16,compute=float16,output=float32",
}

# Names that users will try, but that this version does not support. An approximation would train
# another model than the user asked for.
_NOT_YET: Mapping[str, str] = {
    "mixed_float8": "it needs scaled float8 matmuls, because casting to float8 without scales "
    "loses small gradients. Use 'mixed_bfloat16'",
}


def get_policy(policy: str | jmp.Policy) -> Policy:
    """Returns the policy for the name of a preset, a string of dtypes, or another policy.

    | preset | params | compute | output | meant for |
    |---|---|---|---|---|
    | `float32` | float32 | float32 | float32 | the reference |
    | `mixed_bfloat16` | float32 | bfloat16 | float32 | the usual choice on TPU, A100 and later |
    | `mixed_float16` | float32 | float16 | float32 | older GPUs; needs loss scaling |
    | `bfloat16` | bfloat16 | bfloat16 | bfloat16 | least memory; masters are float32 |
    | `float16` | float16 | float16 | float16 | the same in float16; needs loss scaling |
    | `mixed_float8` | - | - | - | an error in this version: needs scaled float8 matmuls |
    | `O0` | float32 | float32 | float32 | apex's O0 |
    | `O1` | float32 | float16 | float32 | apex's O1, for `jaxmp.autocast` |
    | `O2` | float16 | float16 | float32 | apex's O2, on a Flax module with norms in float32 |
    | `O3` | float16 | float16 | float32 | apex's O3, which also has no masters and scale 1 |

    All of them ask for float32 reductions. O1 has the dtypes of `mixed_float16`, and chooses one
    for each operation: `jaxmp.autocast(loss_fn, "O1")`, as `make_train_step` does under every
    policy. O2 is more than one policy: `jaxmp.linen.apply_policy` and `jaxmp.nnx.apply_policy`
    add its float32 norms. For all of apex's O3, also give `master="none"` and
    `loss_scale=NoLossScale()` to `mixed_precision`, and `cast="all"` to `make_train_step`.

    Strings of dtypes are jmp's, with blanks allowed and a fourth key: `params` or `p`,
    `compute` or `c`, `output` or `o`, `reduce` or `r`. As in jmp, params default to float32,
    compute follows params and **output follows compute**; reduce is float32 (float64 where the
    params or the compute dtype are). A lone dtype name sets all three.

    Args:
      policy: a preset, a string such as `"p=f32, c=bf16, o=f32"`, or a policy, jmp's included.

    Returns:
      The policy.

    Raises:
      ValueError: for an unknown name or key, a key twice, or a preset this version lacks.
      TypeError: for anything else, such as a dtype, which does not say what it applies to.

    >>> get_policy("mixed_bfloat16").compute_dtype
    dtype(bfloat16)
    >>> get_policy("c=f16") == get_policy("params=float32,compute=float16,output=float16")
    True
    """
    if isinstance(policy, Policy):
        return policy
    if isinstance(policy, jmp.Policy):
        return Policy(policy.param_dtype, policy.compute_dtype, policy.output_dtype)
    if not isinstance(policy, str):
        raise TypeError(f"policy must be a string or a Policy, got {_what_was_given(policy)}")
    name = policy.strip()
    if name in _NOT_YET:
        raise ValueError(f"policy {name!r} is not in this version of jaxmp: {_NOT_YET[name]}.")
    if name in _PRESETS:
        return _parse_pairs(_PRESETS[name])
    if "=" in name:
        return _parse_pairs(name)
    try:
        dtype = parse_dtype(name)
    except ValueError:
        valid = ["float32", "bfloat16", "float16", *_PRESETS]
        near = suggestion(name, [*valid, *_NOT_YET])
        raise ValueError(
            f"unknown policy {name!r}.{near} Valid: {', '.join(valid)}, any other dtype name such "
            "as 'f64', or a string such as 'params=float32,compute=bfloat16,output=float32'."
        ) from None
    return Policy(dtype, dtype, dtype)


def _what_was_given(policy: Any) -> str:
    """Describes what was given as a policy; for a dtype, also the policies that it may mean."""
    try:
        dtype = None if policy is None else parse_dtype(policy)
    except ValueError:
        dtype = None
    if dtype is None:
        return type(policy).__name__
    choices = f"{dtype.name!r} (params, compute and output are all {dtype.name})"
    if f"mixed_{dtype.name}" in _PRESETS:
        choices = f"'mixed_{dtype.name}' (float32 params, the usual choice) or {choices}"
    return (
        f"the dtype {dtype.name}, which does not say what has it: the params, the computation or "
        f"the output. Write {choices}, or 'params=float32,compute={dtype.name},output=float32'"
    )


def short_name(policy: Policy) -> str:
    """Returns the shortest text that `get_policy` reads as this policy: a preset's name if any.

    >>> short_name(get_policy("p=f32,c=bf16,o=f32")), short_name(get_policy("p=f32,c=bf16"))
    ('mixed_bfloat16', 'params=float32,compute=bfloat16,output=bfloat16,reduce=float32')
    """
    for name in ("float32", "bfloat16", "float16", "mixed_bfloat16", "mixed_float16"):
        if policy == get_policy(name):
            return name
    return str(policy)


def _parse_pairs(text: str) -> Policy:
    long_keys = {short: key for key, short in _KEYS.items()} | {key: key for key in _KEYS}
    given: dict[str, DType] = {}
    for part in text.split(","):
        key, equals, value = (piece.strip() for piece in part.partition("="))
        if not equals or not key or not value:
            raise ValueError(f"cannot read {part.strip()!r} in policy {text!r}: expected key=dtype")
        if key not in long_keys:
            near = suggestion(key, list(long_keys))
            raise ValueError(
                f"unknown key {key!r} in policy {text!r}.{near} Valid keys: "
                "params (p), compute (c), output (o), reduce (r)"
            )
        if long_keys[key] in given:
            raise ValueError(f"key {long_keys[key]!r} is given twice in policy {text!r}")
        given[long_keys[key]] = parse_dtype(value)
    params = given.get("params", parse_dtype("float32"))
    compute = given.get("compute", params)
    output = given.get("output", compute)
    return Policy(params, compute, output, given.get("reduce"))
