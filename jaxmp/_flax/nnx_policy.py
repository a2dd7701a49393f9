"""Policies on nnx modules: sets the dtypes of the modules of a model, as planned."""

import dataclasses
import functools
from typing import Any, NamedTuple, TypeVar

import jax
import jmp
from flax import nnx

from jaxmp._flax.float8_layers import Float8Layers
from jaxmp._flax.layer_precision import layer_precision
from jaxmp._flax.layer_products import float8_text, has_dot_general, product_attributes
from jaxmp._flax.module_casts import (
    Casts,
    call_with_casts,
    layer_dtype,
    takes_float_dtype,
    with_family,
)
from jaxmp._flax.module_checks import Promise, check_result
from jaxmp._flax.nnx_modules import (
    first_paths,
    is_flax_layer,
    is_node,
    leaves,
    modules,
    modules_with_paths,
    own_params,
    params_in_use,
    takes_dtype,
)
from jaxmp._flax.nnx_plans import (
    ModulePlan,
    check_reached,
    check_shared_params,
    make_plans,
    unreached,
)
from jaxmp._modules.decisions import has_call, kind_text, module_rules
from jaxmp._modules.marks import Method, marked_class
from jaxmp._modules.summary import Row, Summary, dtype_text
from jaxmp._numerics.tree import cast_floating
from jaxmp._policies.policy import Policy
from jaxmp._policies.policy_rules import PolicyRules
from jaxmp._policies.presets import dtypes_of
from jaxmp._program.cpu_compiler import warn_of_cpu_compiler

ModelT = TypeVar("ModelT")


def apply_policy(
    model: ModelT, rules: str | jmp.Policy | PolicyRules, *, strict: bool = False
) -> ModelT:
    """Puts an nnx model under rules, which set the dtype of every layer in it.

    When dtypes are set by hand, layers are easily forgotten, and no shape shows a norm or head in
    the wrong precision. `apply_policy` instead looks up each module's policy by path, and sets it.

    A module with a `dtype` computes in the compute dtype of its policy, and its params
    (`nnx.Param`) are cast to the param dtype. Results of the model are cast to the output dtype of
    its policy. If a module inside it has another policy than its caller, the module's results are
    cast to the output dtype of the module's own policy. A module without a `dtype` is left alone,
    unless a rule names it: then its floating inputs are cast to the compute dtype. These casts are
    around `__call__`; other methods are not cast. Batch statistics, RNG state and all variables
    that are not an `nnx.Param` stay unchanged. A warning reports the share of params that no policy
    reaches, because their module has no `dtype`.

    Args:
      model: an nnx module, real or abstract. It is changed in place; if an argument is wrong,
        nothing is changed. Apply the policy before the model itself is traced as a function, as by
        `jax.jit(model)`: JAX would not notice the change. (`nnx.jit(f)(model)` does.) Inside of
        `nnx.jit`, apply it to models that are made there, not to arguments.
      rules: rules, a policy, or its name.
      strict: whether a rule without effect is an error rather than a warning: a rule that matches
        no module, at once; or a rule that names a module which computes in another dtype, when
        the module is called.

    Returns:
      The model. Applying again replaces the rules; `remove_policy` takes them off. Modules whose
      calls need a cast become instances of a subclass with the same name.

    Raises:
      TypeError: if `model` is not an nnx module.
      ValueError: if a policy cannot be honoured, a module is shared by parts of the model whose
        rules differ, or, with `strict`, a rule matches nothing.

    >>> import jax.numpy as jnp
    >>> rngs = nnx.Rngs(0)
    >>> model = nnx.Sequential(nnx.Linear(3, 4, rngs=rngs), nnx.LayerNorm(4, rngs=rngs))
    >>> rules = PolicyRules({"type:LayerNorm": "float32"}, default="mixed_bfloat16")
    >>> model = apply_policy(model, rules)
    >>> [layer.dtype.dtype.name for layer in model.layers]
    ['bfloat16', 'float32']
    """
    _check_model(model)
    rules = module_rules(rules)
    # Checks read the model as it will be: if one fails, the model gets back all that was changed.
    snapshots = [_Snapshot.of(module) for module in modules(model)]
    try:
        for module in modules(model):
            _restore(module)
        float8 = Float8Layers(rules, strict=strict)
        plans = make_plans(model, rules, float8, strict)
        check_shared_params(plans)
        rules.warn_unused(
            {path: module for path, module, _ in modules_with_paths(model)}, strict=strict
        )
        # All dtypes before the first cast: modules may share params.
        dtypes = {
            id(variable): tuple(getattr(x, "dtype", None) for x in leaves(variable))
            for plan in plans
            for variable in own_params(plan.module)
        }
        for plan in plans:
            _apply_plan(plan, dtypes)
        for plan in plans:
            params = {
                name: variable.get_raw_value()
                for name, variable in vars(plan.module).items()
                if isinstance(variable, nnx.Param)
            }
            float8.note(plan.path, plan.module, plan.decision, plan.family, params)
        float8.warn(model)
        warn_of_cpu_compiler(dtypes_of(rules), [snapshot.values for snapshot in snapshots])
        # These are reported here: without a promise, a call does not report them again.
        for module in check_reached(plans, strict):
            _set(module, "_jaxmp", dataclasses.replace(vars(module)["_jaxmp"], promise=None))
    except BaseException:
        for snapshot in snapshots:
            snapshot.put_back()
        raise
    return model


def remove_policy(model: ModelT) -> ModelT:
    """Removes a policy from a model: restores its dtypes, classes and the dtypes of its params.

    Rounded values stay rounded.

    Args:
      model: an nnx module, under rules or not. It is changed in place.

    Returns:
      The model.

    Raises:
      TypeError: if `model` is not an nnx module.

    >>> layer = apply_policy(nnx.Linear(2, 2, rngs=nnx.Rngs(0)), "bfloat16")
    >>> remove_policy(layer).kernel.dtype.name
    'float32'
    """
    _check_model(model)
    for module in modules(model):
        _restore(module)
    return model


def summary(model: Any) -> Summary:
    """Lists the dtypes in which modules compute.

    Args:
      model: an nnx module, under rules or not.

    Returns:
      A table with a row for each module, to print or to inspect. It shows the output dtype if a
      policy or the layer's `dtype` sets it.

    Raises:
      TypeError: if `model` is not an nnx module.

    >>> model = apply_policy(nnx.Linear(2, 3, rngs=nnx.Rngs(0)), "mixed_bfloat16")
    >>> summary(model).rows[0]
    Row(path='', type='Linear', param='float32', compute='bfloat16', output='float32', params=9)
    """
    _check_model(model)
    rows = []
    unreached_ids = {
        id(param)
        for module in modules(model)
        if "_jaxmp" in vars(module)
        for param in unreached(module, vars(module)["_jaxmp"].policy)
    }
    for path, module in first_paths(model).values():
        own = [x for param in own_params(module) for x in leaves(param) if hasattr(x, "dtype")]
        compute, output = "", ""
        if takes_dtype(module):
            compute = "from inputs" if module.dtype is None else jax.numpy.dtype(module.dtype).name
            output = "" if module.dtype is None else compute
            compute += float8_text(module, vars(module).get("kernel"))
        record = vars(module).get("_jaxmp")
        if record is not None and record.casts.output is not None:
            output = record.casts.output.name
        count = sum(x.size for x in own)
        reached = not any(id(param) in unreached_ids for param in own_params(module))
        name = type(module).__name__
        rows.append(Row(path, name, dtype_text(own), compute, output, count, reached))
    return Summary(tuple(rows))


@dataclasses.dataclass(frozen=True)
class _Placed:
    """The mark of a module under a policy: casts, promise and what it was before.

    `_modules/marks.py` calls it in place of `__call__`.
    """

    # A static attribute, hence part of the graphdef: `nnx.split`, `nnx.merge` and `nnx.jit` keep
    # it, and distinguish models under different rules. Pickles record these names.
    casts: Casts
    promise: Promise | None
    policy: Policy
    plain: type
    before: tuple[tuple[str, Any], ...]
    params: tuple[tuple[Any, ...], ...]

    def call(self, method: Method, module: Any, args: Any, kwargs: Any) -> Any:
        """Calls a module with the casts, and checks its promise."""

        def function(*args: Any, **kwargs: Any) -> Any:
            out = method(module, *args, **kwargs)
            if self.promise is not None:
                check_result(self.promise, (args, kwargs), out)
            return out

        return call_with_casts(function, self.casts, args, kwargs, is_opaque=is_node)


class _Snapshot(NamedTuple):
    """A snapshot of everything that a policy may change about a module."""

    module: Any
    cls: type
    attributes: dict[str, Any]
    values: list[tuple[Any, Any]]

    @classmethod
    def of(cls, module: Any) -> "_Snapshot":
        """Takes a snapshot of a module."""
        # Without copies: a cast makes new arrays, and sets them.
        names = (*_SET_BY_POLICY, "_jaxmp")
        attributes = {name: vars(module)[name] for name in names if name in vars(module)}
        values = [(variable, variable.get_raw_value()) for variable in own_params(module)]
        return cls(module, type(module), attributes, values)

    def put_back(self) -> None:
        """Restores the module."""
        _set(self.module, "__class__", self.cls)
        if "_jaxmp" in vars(self.module):
            object.__delattr__(self.module, "_jaxmp")
        for name, value in self.attributes.items():
            _set(self.module, name, value)
        for variable, value in self.values:
            variable.set_raw_value(value)


# The attributes of a module that a policy may set.
_DTYPES, _PRODUCTS = ("dtype", "param_dtype", "precision"), ("dot_general", "promote_dtype")
_SET_BY_POLICY = (*_DTYPES, *_PRODUCTS)

# Bypasses nnx's own __setattr__, which would keep the names in the module's list of attributes
# forever. A model whose policy was removed must equal one that never had a policy.
_set = object.__setattr__


def _check_model(model: Any) -> None:
    if isinstance(model, nnx.Module):
        return
    hint = ""
    if isinstance(model, type) and issubclass(model, nnx.Module):
        hint = ". Make a module of it first"
    elif any(base.__module__.startswith("flax.linen") for base in type(model).__mro__):
        hint = ". For a linen module use jaxmp.linen"
    elif isinstance(model, (nnx.State, nnx.GraphDef)):
        hint = ". Put the parts together with nnx.merge first"
    raise TypeError(f"jaxmp.nnx works on nnx modules, got {kind_text(model)}{hint}")


def _apply_plan(plan: ModulePlan, dtypes: dict[int, tuple[Any, ...]]) -> None:
    module, policy = plan.module, plan.decision.policy
    if policy is None:
        return
    own, params, casts = vars(module), own_params(module), plan.casts
    products = product_attributes(module, policy, plan.family) if takes_dtype(module) else {}
    before = tuple((name, own[name]) for name in (*_DTYPES, *products) if name in own)
    # A layer of Flax returns the compute dtype anyway. Without casts it keeps its class.
    if is_flax_layer(module) and casts == Casts(output=policy.compute_dtype):
        casts = Casts()
    if has_call(module) and (has_dot_general(module) or not is_flax_layer(module)):
        casts = with_family(casts, policy, plan.family)
    if not (before or params_in_use(module) or casts or plan.promise):
        return
    originals = tuple(dtypes[id(variable)] for variable in params)
    plain = vars(type(module)).get("_jaxmp_plain", type(module))
    record = _Placed(casts, plan.promise, policy, plain, before, originals)
    if takes_dtype(module):
        # These two write the normalised weight back into their inner layer, so their dtype is a
        # storage dtype.
        stores = isinstance(module, (nnx.SpectralNorm, nnx.WeightNorm))
        dtype = policy.param_dtype if stores else policy.compute_dtype
        module.dtype = layer_dtype(dtype, module.dtype)
        if "precision" in own:
            module.precision = layer_precision(module, policy)
        for name, value in products.items():
            setattr(module, name, value)
    if "param_dtype" in own and takes_float_dtype(module.param_dtype):
        module.param_dtype = layer_dtype(policy.param_dtype, module.param_dtype)
    # Params alone: batch statistics and other variables keep their dtypes.
    for variable in params:
        # Use the raw value: reading through a variable's hooks and writing the result back would
        # apply the hooks twice.
        value = variable.get_raw_value()
        variable.set_raw_value(cast_floating(value, policy.param_dtype))
    if casts or plan.promise:
        cls: Any = record.plain
        _set(module, "__class__", _casting(cls, not jax.tree_util.all_leaves([module])))
    _set(module, "_jaxmp", record)


def _restore(module: Any) -> None:
    record = vars(module).get("_jaxmp")
    if record is None:
        return
    _set(module, "__class__", record.plain)
    for name, value in record.before:
        setattr(module, name, value)
    # The model may have changed since: it may have more params, or a param of another structure.
    for variable, dtypes in zip(own_params(module), record.params, strict=False):
        arrays, treedef = jax.tree.flatten(variable.get_raw_value())
        if len(arrays) == len(dtypes):
            pairs = zip(arrays, dtypes, strict=True)
            arrays = [x if dtype is None else cast_floating(x, dtype) for x, dtype in pairs]
            variable.set_raw_value(jax.tree.unflatten(treedef, arrays))
    object.__delattr__(module, "_jaxmp")


# Pickles of modules under rules record this function by its name, with its arguments.
@functools.lru_cache(maxsize=512)
def _casting(cls: Any, is_pytree: bool) -> Any:
    remake, body = (_casting, cls, is_pytree), {"_jaxmp_plain": cls}
    return marked_class(cls, "_jaxmp", remake, body=body, pytree=is_pytree)
