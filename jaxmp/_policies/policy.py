"""Policies: dtypes of params, computation, output and reductions, and how products are run."""

import dataclasses
import re
from collections.abc import Mapping
from typing import Any

import jmp
from jaxtyping import PyTree

from jaxmp._numerics.dtypes import DType, at_least_float32, parse_dtype, suggestion
from jaxmp._numerics.precision import parse_precision
from jaxmp._numerics.tree import cast_floating
from jaxmp._numerics.user_warnings import warn
from jaxmp._policies.recipe import Recipe, get_recipe

_KEYS = {"params": "p", "compute": "c", "output": "o", "reduce": "r"}
_PRECISION, _PRODUCTS = "precision", "products"


@dataclasses.dataclass(frozen=True, repr=False, init=False)
class Policy(jmp.Policy):
    """A `jmp.Policy` that also says how gradients are reduced and how precise float32 products are.

    It is a value: immutable, hashable, compared by its fields, and `get_policy(str(policy))`
    gives it back. It is accepted wherever jmp's policies are.

    Args:
      param_dtype: dtype in which the params are stored.
      compute_dtype: dtype of the forward and backward computation.
      output_dtype: dtype of the model's results.
      reduce_dtype: dtype in which gradients are to be summed over devices; by default the
        widest of float32, the param and the compute dtype. `make_train_step` and `autocast` use it;
        `value_and_grad` has an argument of that name.
      precision: the precision of the policy's float32 products, and of its float32 parts. None
        means HIGHEST, which is float32 on every device, unless `jax_default_matmul_precision` is
        set: then that holds. `"tensorfloat32"` or `"high"` is faster: TF32 on a GPU, three passes
        of bfloat16 on a TPU. Also `"default"`, `"highest"`, the name of a
        `jax.lax.DotAlgorithmPreset`, or JAX's object for one of these. Products in 16 bits do not
        change. docs/precision.md has what each is on which device.
      products: how products with params are multiplied in float8: a `jaxmp.float8.Recipe` or its
        name. None means the compute dtype. What is around them does not change. docs/float8.md
        says which products are meant.

    Each dtype may be given as any dtype or name that `get_policy` knows.

    Raises:
      ValueError: for a name or dtype that is not a float, an unknown precision or recipe, or
        products in float8 under a compute dtype of more than 16 bits.

    >>> policy = Policy("float32", "bf16", "f32")
    >>> str(policy)
    'params=float32,compute=bfloat16,output=float32,reduce=float32'
    >>> import numpy as np
    >>> policy.cast_to_compute({"w": np.zeros(2), "ids": np.zeros(2, int)})["w"].dtype
    dtype(bfloat16)
    """

    reduce_dtype: DType
    precision: str | None
    products: Recipe | None

    def __init__(
        self,
        param_dtype: Any,
        compute_dtype: Any,
        output_dtype: Any,
        reduce_dtype: Any = None,
        precision: Any = None,
        products: Any = None,
    ) -> None:
        dtypes = [parse_dtype(dtype) for dtype in (param_dtype, compute_dtype, output_dtype)]
        if reduce_dtype is None:
            widest = max(map(at_least_float32, dtypes[:2]), key=lambda dtype: dtype.itemsize)
            dtypes.append(widest)
        else:
            dtypes.append(parse_dtype(reduce_dtype))
        recipe = get_recipe(products)
        if recipe is not None and dtypes[1].itemsize != 2:
            raise ValueError(
                f"products in 8 bits ({recipe}) need a compute dtype of 16 bits for all that is "
                f"around them, got {dtypes[1].name}. Use 'mixed_float8', or compute=bfloat16"
            )
        # jmp's class is frozen, and its own __init__ takes dtypes as they come.
        values = (*dtypes, parse_precision(precision), recipe)
        for field, value in zip(dataclasses.fields(self), values, strict=True):
            object.__setattr__(self, field.name, value)

    def cast_to_param(self, x: PyTree) -> PyTree:
        """Casts the floating leaves of a tree to `param_dtype`; other leaves pass."""
        return cast_floating(x, self.param_dtype)

    def cast_to_compute(self, x: PyTree) -> PyTree:
        """Casts the floating leaves of a tree to `compute_dtype`; other leaves pass."""
        if self.compute_dtype.itemsize < 2:
            text = "without a scale: small values are lost, and sums stop growing"
            warn(f"cast_to_compute rounds to {self.compute_dtype} {text}. Use 'mixed_float8'")
        return cast_floating(x, self.compute_dtype)

    def cast_to_output(self, x: PyTree) -> PyTree:
        """Casts the floating leaves of a tree to `output_dtype`; other leaves pass."""
        return cast_floating(x, self.output_dtype)

    def with_output_dtype(self, output_dtype: Any) -> "Policy":
        """Returns the same policy with another output dtype."""
        return self._replace(output_dtype=output_dtype)

    def with_products(self, products: Any) -> "Policy":
        """Returns the same policy with another recipe for products; None for no float8."""
        return self._replace(products=products)

    def _replace(self, **changes: Any) -> "Policy":
        fields = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        return Policy(**(fields | changes))

    def __str__(self) -> str:
        dtypes = (self.param_dtype, self.compute_dtype, self.output_dtype, self.reduce_dtype)
        pairs = [f"{key}={dtype}" for key, dtype in zip(_KEYS, dtypes, strict=True)]
        options = {_PRECISION: self.precision, _PRODUCTS: self.products}
        return ",".join(pairs + [f"{key}={value}" for key, value in options.items() if value])

    def __repr__(self) -> str:
        return f"Policy({str(self)!r})"


# float32, bfloat16 and float16 are no rows: the name of any dtype is a policy.
_PRESETS: Mapping[str, str] = {
    "mixed_bfloat16": "params=float32,compute=bfloat16,output=float32",
    "mixed_float16": "params=float32,compute=float16,output=float32",
    "mixed_float8": "params=float32,compute=bfloat16,output=float32,products=tensorwise",
    "mixed_int8": "params=float32,compute=bfloat16,output=float32,products=int8",
    "O0": "params=float32,compute=float32,output=float32",
    # The dtypes of operations, not of arrays: see jaxmp.autocast.
    "O1": "params=float32,compute=float16,output=float32",
    # O2 differs from O3 by norms in float32: see presets.get_rules.
    "O2": "params=float16,compute=float16,output=float32",
    "O3": "params=float16,compute=float16,output=float32",
}


def get_policy(policy: str | jmp.Policy) -> Policy:
    """Returns the policy for the name of a preset, a string of dtypes, or another policy.

    ================ ======== ======== ======== =================================================
    preset           params   compute  output   meant for
    ================ ======== ======== ======== =================================================
    `float32`        float32  float32  float32  the reference
    `mixed_bfloat16` float32  bfloat16 float32  the usual choice on TPU, A100 and later
    `mixed_float16`  float32  float16  float32  older GPUs; needs loss scaling
    `bfloat16`       bfloat16 bfloat16 bfloat16 least memory; masters are float32
    `float16`        float16  float16  float16  the same in float16; needs loss scaling
    `mixed_float8`   float32  bfloat16 float32  large layers on H100 and later, TPU 7x
    `mixed_int8`     float32  bfloat16 float32  large layers on TPU v5e and v6e
    `O0`             float32  float32  float32  apex's O0
    `O1`             float32  float16  float32  apex's O1, for `jaxmp.autocast`
    `O2`             float16  float16  float32  apex's O2, on a Flax module with norms in float32
    `O3`             float16  float16  float32  apex's O3, which also has no masters and scale 1
    ================ ======== ======== ======== =================================================

    All of them reduce in float32. `mixed_float8` is `mixed_bfloat16` with
    `products=tensorwise`: products of layers with their weights in float8. `mixed_int8` has
    `products=int8`. O1 has the dtypes of
    `mixed_float16`, and chooses one for each operation: `jaxmp.autocast(loss_fn, "O1")`, as
    `make_train_step` does under every policy. O2 is more than one policy:
    `jaxmp.linen.apply_policy` and `jaxmp.nnx.apply_policy` add its float32 norms. For all of apex's
    O3, also give `master="none"` and `loss_scale=NoLossScale()` to `mixed_precision`, and
    `cast="all"` to `make_train_step`.

    Strings of dtypes are jmp's, with blanks allowed and more keys: `params` or `p`, `compute` or
    `c`, `output` or `o`, `reduce` or `r`, `precision`, that of float32 products, and `products`, a
    float8 recipe: see `Policy`. As in jmp, params default to float32, compute follows params and
    **output follows compute**; reduce is float32 (float64 where the params or the compute dtype
    are). A lone dtype name sets all three. A dtype, or a name that begins with `mixed_`, may also
    come first, and keys after it then say what differs: `"mixed_bfloat16,precision=high"`.

    Args:
      policy: a preset, a string such as `"p=f32, c=bf16, o=f32"`, or a policy, jmp's included.

    Returns:
      The policy.

    Raises:
      ValueError: for an unknown name or key, or a key twice.
      TypeError: for anything else, such as a dtype, which does not say what it applies to.

    >>> get_policy("mixed_bfloat16").compute_dtype
    dtype(bfloat16)
    >>> get_policy("c=f16") == get_policy("params=float32,compute=float16,output=float16")
    True
    >>> get_policy("float32,precision=tensorfloat32").precision
    'tensorfloat32'
    """
    if isinstance(policy, Policy):
        return policy
    if isinstance(policy, jmp.Policy):  # which has no dtype of reductions, precision or products
        return Policy(policy.param_dtype, policy.compute_dtype, policy.output_dtype)
    if not isinstance(policy, str):
        raise TypeError(f"policy must be a string or a Policy, got {describe_other(policy)}")
    name = policy.strip()
    if name in _PRESETS:
        return _policy_of_pairs(_parse_pairs(_PRESETS[name]))
    if "=" in name:
        return _policy_of_pairs(_parse_pairs(name))
    try:
        dtype = parse_dtype(name)
    except ValueError:
        valid = ["float32", "bfloat16", "float16", *_PRESETS]
        hint = _ONLY_FOR_STEPS if name.lower() == "none" else _suggested(name, valid)
        raise ValueError(
            f"unknown policy {name!r}.{hint} Valid: {', '.join(valid)}, any other dtype name such "
            "as 'f64', or a string such as 'params=float32,compute=bfloat16,output=float32'."
        ) from None
    return Policy(dtype, dtype, dtype)


_ONLY_FOR_STEPS = (
    " 'none' is for make_train_step alone, where the model casts by itself. An optimizer is "
    "wrapped for the policy of its model, and without a policy nothing is to be applied."
)


def _suggested(name: str, valid: list[str]) -> str:
    """Suggests a policy for a name, as other libraries have it: "bf16-mixed", "fp8", "o2"."""
    dtypes = {"bf16": "bfloat16", "fp8": "float8"} | dict.fromkeys(
        ("16", "fp16", "half"), "float16"
    )
    words = [dtypes.get(word, word) for word in re.split(r"[-_ ]", name.lower())]
    (dtype, *_) = [*(word for word in words if word not in ("mixed", "true")), ""]
    meant = [f"mixed_{dtype}", dtype, dtype.upper()]
    meant = meant[1:] if "true" in words else meant
    near = next((choice for choice in meant if choice in valid), None)
    return suggestion(name, valid) if near is None else f" Did you mean {near!r}?"


def check_not_ambiguous(name: Any) -> None:
    """Raises ValueError for "bf16", "fp16", "f16" or "half" as the policy of a whole model."""
    # As jmp reads them, params are narrow too; elsewhere they are what people call mixed precision.
    short = {"bf16": "bfloat16", "fp16": "float16", "f16": "float16", "half": "float16"}
    if dtype := short.get(name):
        raise ValueError(
            f"{name!r} may mean one of two policies: 'mixed_{dtype}' keeps float32 params, as "
            f"torch.amp does, and {dtype!r} stores them in {dtype}. Write which"
        )


def describe_other(policy: Any) -> str:
    """Describes a value that is not a policy; of a dtype, also the policies that it may mean."""
    if policy is None:
        return f"None.{_ONLY_FOR_STEPS}"
    try:
        dtype = parse_dtype(policy)
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
    mixed = [name for name in _PRESETS if name.startswith("mixed_")]
    # Not apex's levels: O0 is float32, and O1 has the dtypes of mixed_float16.
    for name in ("float32", "bfloat16", "float16", *mixed):
        if policy == get_policy(name):
            return name
    return str(policy)


def _parse_pairs(text: str) -> dict[str, str]:
    """Returns the keys and values in a policy's text; those of a name at its start come first."""
    long_keys = {short: key for key, short in _KEYS.items()} | {key: key for key in _KEYS}
    long_keys |= {key: key for key in (_PRECISION, _PRODUCTS)}
    first, _, others = text.partition(",")
    base = {} if "=" in first else _parse_name(first.strip(), text)
    pairs: dict[str, str] = {}
    for part in (others if base else text).split(","):
        key, equals, value = (piece.strip() for piece in part.partition("="))
        if not equals or not key or not value:
            raise ValueError(f"cannot read {part.strip()!r} in policy {text!r}: expected key=dtype")
        if key not in long_keys:
            hint = suggestion(key, list(long_keys))
            raise ValueError(
                f"unknown key {key!r} in policy {text!r}.{hint} Valid keys: "
                "params (p), compute (c), output (o), reduce (r), precision, products"
            )
        if long_keys[key] in pairs:
            raise ValueError(f"key {long_keys[key]!r} is given twice in policy {text!r}")
        pairs[long_keys[key]] = value
    return base | pairs


def _parse_name(name: str, text: str) -> dict[str, str]:
    """Returns the keys and values that the name at the start of a policy's text stands for."""
    if name.startswith("mixed_") and name in _PRESETS:
        return _parse_pairs(_PRESETS[name])
    try:
        return dict.fromkeys(("params", "compute", "output"), parse_dtype(name).name)
    except ValueError:
        # O1 and O2 are more than dtypes.
        mixed = [preset for preset in _PRESETS if preset.startswith("mixed_")]
        hint = suggestion(name, mixed)
        raise ValueError(
            f"cannot read {name!r} in policy {text!r}: expected key=dtype.{hint} Only the name of "
            f"a dtype, {' or '.join(mixed)} may come before the keys"
        ) from None


def _policy_of_pairs(pairs: dict[str, str]) -> Policy:
    # The defaults are jmp's: output follows compute.
    params = pairs.get("params", "float32")
    compute = pairs.get("compute", params)
    output = pairs.get("output", compute)
    products = pairs.get(_PRODUCTS)
    if products is not None and products.lower() == "none":
        products = None
    return Policy(params, compute, output, pairs.get("reduce"), pairs.get(_PRECISION), products)
