"""Policies on nnx modules: finds the modules of a model and sets their dtypes."""

import dataclasses
import functools
import types
from collections.abc import Iterator
from typing import Any, NamedTuple, TypeVar

import jax
import jmp
from flax import nnx

from jaxmp._dtypes import DType, is_floating
from jaxmp._policy import Policy
from jaxmp._regions import (
    Casts,
    Region,
    call_with_casts,
    casts_around,
    check_computable,
    check_honoured,
    layer_dtype,
    new_instance,
    takes_float_dtype,
)
from jaxmp._rules import Decision, PolicyRules
from jaxmp._summary import Row, Summary, dtype_text
from jaxmp._tree import cast_floating
from jaxmp.rules import get_rules

ModelT = TypeVar("ModelT")


def apply_policy(
    model: ModelT, rules: str | jmp.Policy | PolicyRules, *, strict: bool = False
) -> ModelT:
    """Puts an nnx model under rules: every layer in it computes in the dtype that they say.

    Layers set by hand are easily forgotten, and a norm or head in the wrong precision shows in no
    shape. Here each module's policy is looked up by its path, and set.

    A module with a `dtype` computes in the compute dtype of its policy, and its `nnx.Param`s are
    cast to the param dtype. What leaves the model, or leaves a part of it under one rule for a
    part under another, is cast to the output dtype of its policy. A module without a `dtype` is
    left alone, unless a rule names it: then its floating inputs are cast to the compute dtype.
    These casts are around `__call__`; other methods return what they return. Batch statistics,
    RNG state and all variables that are no `nnx.Param` stay as they are.

    Args:
      model: an nnx module, real or abstract. It is changed in place; where an argument is wrong,
        nothing is changed. Apply the policy before the model is first traced as a function, as by
        `jax.jit(model)`: JAX would not see the change. (`nnx.jit(f)(model)` does.)
      rules: rules, a policy, or its name.
      strict: whether a rule that matches no module is an error rather than a warning.

    Returns:
      The model. Applying again replaces the rules; `remove_policy` takes them off. Modules whose
      calls need a cast become instances of a subclass with the same name.

    Raises:
      TypeError: if `model` is no nnx module.
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
    rules = get_rules(rules)
    check_computable(rules)
    plans = _plans(model, rules)
    _check_shared_params(plans)
    rules.warn_unused({path: module for path, module, _ in _walk(model)}, strict=strict)
    for plan in plans:
        _restore(plan.module)
        _place(plan)
    return model


def remove_policy(model: ModelT) -> ModelT:
    """Takes a policy off a model: dtypes, classes and the dtypes of params are as they were.

    Params that were rounded stay rounded.

    Args:
      model: an nnx module, under rules or not. It is changed in place.

    Returns:
      The model.

    Raises:
      TypeError: if `model` is no nnx module.

    >>> layer = apply_policy(nnx.Linear(2, 2, rngs=nnx.Rngs(0)), "bfloat16")
    >>> remove_policy(layer).kernel.dtype.name
    'float32'
    """
    _check_model(model)
    for _, module, _ in list(_walk(model)):
        _restore(module)
    return model


def summary(model: Any) -> Summary:
    """Which module computes in which dtype.

    Args:
      model: an nnx module, under rules or not.

    Returns:
      A table with a row for each module, to print or to look into. The output is known where a
      policy or a layer's `dtype` sets it.

    Raises:
      TypeError: if `model` is no nnx module.

    >>> model = apply_policy(nnx.Linear(2, 3, rngs=nnx.Rngs(0)), "mixed_bfloat16")
    >>> summary(model).rows[0]
    Row(path='', type='Linear', param='float32', compute='bfloat16', output='float32', params=9)
    """
    _check_model(model)
    rows, seen = [], set()
    for path, module, _ in _walk(model):
        if id(module) in seen:
            continue
        seen.add(id(module))
        own = [variable.get_value() for variable in _own_params(module)]
        compute, output = "", ""
        if _takes_dtype(module):
            compute = "from inputs" if module.dtype is None else jax.numpy.dtype(module.dtype).name
            output = "" if module.dtype is None else compute
        placed = vars(module).get("_jaxmp")
        if placed is not None and placed.casts.output is not None:
            output = placed.casts.output.name
        count = sum(x.size for x in own)
        rows.append(Row(path, type(module).__name__, dtype_text(own), compute, output, count))
    return Summary(tuple(rows))


class _Plan(NamedTuple):
    """What is to be done to a module."""

    path: str
    module: Any
    decision: Decision
    casts: Casts


@dataclasses.dataclass(frozen=True)
class _Placed:
    """What a module under a policy remembers: how to cast, and how it was before.

    It is a static attribute, hence part of the graphdef: `nnx.split`, `nnx.merge` and `nnx.jit`
    keep it, and tell models under different rules apart.
    """

    policy: Policy
    casts: Casts
    plain: type
    dtypes: tuple[tuple[str, Any], ...]
    params: tuple[DType, ...]


def _check_model(model: Any) -> None:
    if isinstance(model, nnx.Module):
        return
    what = f"the class {model.__name__}" if isinstance(model, type) else type(model).__name__
    hint = ""
    if isinstance(model, type) and issubclass(model, nnx.Module):
        hint = ". Make a module of it first"
    elif any(base.__module__.startswith("flax.linen") for base in type(model).__mro__):
        hint = ". For a linen module use jaxmp.linen"
    elif isinstance(model, (nnx.State, nnx.GraphDef)):
        hint = ". Put the parts together with nnx.merge first"
    raise TypeError(f"jaxmp.nnx works on nnx modules, got {what}{hint}")


def _is_node(x: Any) -> bool:
    return isinstance(x, (nnx.Pytree, nnx.Variable))


def _walk(
    node: Any, path: str = "", parent: str | None = None, above: tuple[int, ...] = ()
) -> Iterator[tuple[str, Any, str | None]]:
    """Path, module and the path of the calling module, parents first.

    A shared module comes once for each of its paths: that is how differing rules are found.
    """
    if id(node) in above:
        return
    if isinstance(node, nnx.Module):
        yield path, node, parent
        # Lists and dictionaries of modules are not called: their owner calls what is in them.
        parent = path if parent is None or _is_called(node) else parent
    for name, value in vars(node).items():
        if name.startswith("_pytree__"):
            continue
        for keys, leaf in jax.tree_util.tree_flatten_with_path(value, is_leaf=_is_node)[0]:
            if isinstance(leaf, nnx.Pytree):
                inner = jax.tree_util.keystr(keys, simple=True, separator="/")
                names = "/".join(part for part in (path, name, inner) if part)
                yield from _walk(leaf, names, parent, (*above, id(node)))


def _plans(model: Any, rules: PolicyRules) -> list[_Plan]:
    decisions: dict[str, Decision] = {}
    layers: set[str] = set()
    plans: dict[int, _Plan] = {}
    for path, module, parent in _walk(model):
        decision = _decide(rules, path, module)
        caller = None if parent is None else decisions[parent]
        # Layers inside a layer of Flax follow it, unless a rule names them.
        if decision.rule is None and caller is not None and parent in layers:
            decision = caller
        decisions[path] = decision
        if _is_flax_layer(module):
            layers.add(path)
        region = Region(
            decision,
            entered=caller is None or caller.rule != decision.rule,
            takes_dtype=_takes_dtype(module),
            recurrent=isinstance(module, nnx.RNNCellBase),
        )
        plan = _Plan(
            path, module, decision, casts_around(region) if _is_called(module) else Casts()
        )
        first = plans.setdefault(id(module), plan)
        if first.decision.policy != decision.policy:
            raise ValueError(
                f"{type(module).__name__} is one module at two places, {first.path!r} and "
                f"{path!r}, and the rules give them different policies "
                f"({first.decision.policy} and {decision.policy}). Give both the same policy"
            )
        if decision.policy is not None and (decision.rule is not None or not path):
            _check_honoured(plan)
    return list(plans.values())


def _decide(rules: PolicyRules, path: str, module: Any) -> Decision:
    decision = rules.decide(path, module)
    if not isinstance(module, nnx.bridge.ToNNX):
        return decision
    if decision.policy is not None and (decision.rule is not None or not path):
        raise ValueError(
            f"{path or '(root)'!r} holds a linen module. Put that under a policy before it goes "
            "into the bridge: nnx.bridge.ToNNX(jaxmp.linen.apply_policy(module, rules), ...)"
        )
    return Decision(None, None)  # its attributes are variables of linen's, all of them


def _check_honoured(plan: _Plan) -> None:
    path, module, decision, _ = plan
    if _takes_dtype(module) or decision.policy is None:
        return
    values = [variable.get_value() for variable in _own_params(module)]
    dtypes = {decision.policy.param_dtype for value in values if is_floating(value)}
    has_children = len(list(_walk(module))) > 1
    check_honoured(path, module, decision.policy, dtypes, has_children=has_children)


def _check_shared_params(plans: list[_Plan]) -> None:
    """Raises ValueError if two modules share a param and their policies store it differently."""
    owners: dict[int, _Plan] = {}
    for plan in plans:
        for variable in _own_params(plan.module):
            first = owners.setdefault(id(variable), plan)
            mine, theirs = plan.decision.policy, first.decision.policy
            if mine and theirs and mine.param_dtype != theirs.param_dtype:
                raise ValueError(
                    f"{first.path!r} and {plan.path!r} share a param, which the rules would have "
                    f"in {theirs.param_dtype} for one and in {mine.param_dtype} for the other. "
                    "Give both policies with the same params"
                )


def _place(plan: _Plan) -> None:
    module, policy = plan.module, plan.decision.policy
    if policy is None:
        return
    own = vars(module)
    params = _own_params(module)
    dtypes = tuple((name, own[name]) for name in ("dtype", "param_dtype") if name in own)
    casts = plan.casts
    if not (dtypes or params or casts):
        return
    if _is_flax_layer(module) and casts == Casts(output=policy.compute_dtype):
        casts = Casts()  # which is what the layer returns anyway
    placed = _Placed(
        policy, casts, type(module), dtypes, tuple(v.get_value().dtype for v in params)
    )
    if _takes_dtype(module):
        # These two write the weight that they have normalised back into the layer inside them:
        # their dtype is one of storage.
        stores = isinstance(module, (nnx.SpectralNorm, nnx.WeightNorm))
        dtype = policy.param_dtype if stores else policy.compute_dtype
        module.dtype = layer_dtype(dtype, module.dtype)
    if takes_float_dtype(own.get("param_dtype")) and "param_dtype" in own:
        module.param_dtype = layer_dtype(policy.param_dtype, module.param_dtype)
    for variable in params:
        variable.set_value(cast_floating(variable.get_value(), policy.param_dtype))
    if casts:
        cls: Any = type(module)
        _set(module, "__class__", _casting(cls, not jax.tree_util.all_leaves([module])))
    _set(module, "_jaxmp", placed)


def _restore(module: Any) -> None:
    placed = vars(module).get("_jaxmp")
    if placed is None:
        return
    _set(module, "__class__", placed.plain)
    for name, dtype in placed.dtypes:
        setattr(module, name, dtype)
    for variable, dtype in zip(_own_params(module), placed.params, strict=False):
        variable.set_value(cast_floating(variable.get_value(), dtype))
    object.__delattr__(module, "_jaxmp")


# Past nnx's own __setattr__, which would keep the names in the module's list of attributes for
# ever: a model whose policy was removed is to be equal to one that never had any.
_set = object.__setattr__


@functools.lru_cache(maxsize=512)
def _casting(cls: Any, is_pytree: bool) -> Any:
    """A subclass with the same name whose calls are cast as its instance remembers."""

    @functools.wraps(cls.__call__)
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        function = functools.partial(cls.__call__, self)
        return call_with_casts(function, self._jaxmp.casts, args, kwargs, is_opaque=_is_node)

    def reduce_ex(self: Any, protocol: Any) -> Any:
        # Pickle finds classes by name, which would be the name of the plain class.
        reduced = super(casting, self).__reduce_ex__(protocol)
        return (new_instance, (_casting, cls, is_pytree), *reduced[2:])

    body = {
        "__call__": call,
        "__reduce_ex__": reduce_ex,
        "__module__": cls.__module__,
        "__qualname__": cls.__qualname__,
        "__doc__": cls.__doc__,
    }
    keywords = {"pytree": is_pytree}
    casting: Any = types.new_class(cls.__name__, (cls,), keywords, lambda space: space.update(body))
    return casting


def _is_called(module: Any) -> bool:
    # Every class has a __call__ of its metaclass; only one in the class body is its instances'.
    return any("__call__" in vars(base) for base in type(module).__mro__)


def _takes_dtype(module: Any) -> bool:
    return "dtype" in vars(module) and takes_float_dtype(module.dtype)


def _is_flax_layer(module: Any) -> bool:
    """Whether Flax's own code is what puts this module together from layers."""
    return _takes_dtype(module) and any(
        base.__module__.startswith("flax.nnx.nn.") for base in type(module).__mro__
    )


def _own_params(module: Any) -> list[Any]:
    return [
        leaf
        for name, value in vars(module).items()
        if not name.startswith("_pytree__")
        for leaf in jax.tree.leaves(value, is_leaf=_is_node)
        if isinstance(leaf, nnx.Param)
    ]
