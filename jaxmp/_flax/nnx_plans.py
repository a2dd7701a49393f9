"""Plans what to do to each module of an nnx model under rules, before anything is changed."""

from typing import Any, NamedTuple

from flax import nnx

from jaxmp._flax.float8_layers import Float8Layers
from jaxmp._flax.module_casts import Casts, ModulePolicy, casts_around
from jaxmp._flax.module_checks import (
    Promise,
    may_refuse,
    promise_of,
    refuse,
    too_wide,
    warn_unreached,
)
from jaxmp._flax.nnx_modules import (
    is_flax_layer,
    is_from_flax,
    leaves,
    modules,
    modules_with_paths,
    own_params,
    params_in_use,
    takes_dtype,
)
from jaxmp._modules.decisions import decide, has_call
from jaxmp._numerics.dtypes import is_floating
from jaxmp._policies.policy import Policy
from jaxmp._policies.policy_rules import Decision, PolicyRules


class ModulePlan(NamedTuple):
    """What to do to a module, which may be at several places.

    Attributes:
      path: its first place, or the first that a rule names.
      module: the module.
      region: its policy there.
      casts: the casts around its calls, right for all places.
      promise: the dtypes that it may return.
      family: the family for which it is left out of float8, at any place.
    """

    path: str
    module: Any
    region: ModulePolicy
    casts: Casts
    promise: Promise | None = None
    family: str | None = None

    @property
    def decision(self) -> Decision:
        """The decision of the rules."""
        return self.region.decision


def make_plans(
    model: Any, rules: PolicyRules, float8: Float8Layers, strict: bool
) -> list[ModulePlan]:
    """Plans what to do to each module of a model.

    Raises:
      ValueError: for a linen module that a rule names, or that is the whole model, or if a module
        is shared by parts of the model whose rules differ.
    """
    decisions: dict[str, Decision] = {}
    layers: set[str] = set()
    plans: dict[int, ModulePlan] = {}
    for path, module, parent in modules_with_paths(model):
        caller = None if parent is None else decisions[parent]
        decision = _decision(rules, path, module, caller, in_layer=parent in layers)
        decisions[path] = decision
        if is_flax_layer(module):
            layers.add(path)
        recurrent = isinstance(module, nnx.RNNCellBase)
        # Flax's layers give all products their precision. Its attention has layers inside, and
        # hands its precision to these alone.
        has_field = is_from_flax(module) and "precision" in vars(module)
        by_field = has_field and len(modules(module)) == 1
        region = ModulePolicy(decision, caller, takes_dtype(module), recurrent, by_field)
        casts = casts_around(region) if has_call(module) else Casts()
        family = float8.family(path, module, decision)
        plan = ModulePlan(path, module, region, casts, family=family)
        first = plans.setdefault(id(module), plan)
        if first.decision.policy != decision.policy:
            raise ValueError(
                f"{type(module).__name__} is one module at two places, {first.path!r} and "
                f"{path!r}, and the rules give them different policies "
                f"({first.decision.policy} and {decision.policy}). Give both the same policy"
            )
        # If callers need different casts around a shared module, no cast is right for all of them.
        if first.casts != casts:
            exact = first.casts.exact or casts.exact
            plans[id(module)] = first._replace(casts=Casts(recurrent=recurrent, exact=exact))
        if first.family is None:  # left out at one place, it is left out at all
            plans[id(module)] = plans[id(module)]._replace(family=family)
        if first.decision.rule is None and decision.rule is not None:
            plans[id(module)] = plans[id(module)]._replace(path=path, region=region)
    policies = {
        path: decisions[path].policy
        for path, module, _ in modules_with_paths(model)
        if has_call(module)
    }
    return [plan._replace(promise=_promise(plan, policies, strict)) for plan in plans.values()]


def _promise(plan: ModulePlan, policies: dict[str, Policy | None], strict: bool) -> Promise | None:
    path, module, region, casts, *_ = plan
    if is_from_flax(module) or not has_call(module):
        return None
    prefix = f"{path}/" if path else ""
    parts = [p for name, p in policies.items() if name != path and name.startswith(prefix)]
    # A submodule without a policy may return any dtype.
    if None in parts:
        return None
    dtypes = [() if p == region.decision.policy else (p.output_dtype,) for p in parts if p]
    has_params = bool(_float_params(module))
    return promise_of(
        region, casts, path, module, parts=dtypes, has_params=has_params, strict=strict
    )


def _float_params(module: Any) -> list[Any]:
    return [x for param in params_in_use(module) for x in leaves(param) if is_floating(x)]


def unreached(module: Any, policy: Policy | None) -> list[Any]:
    """Returns the params that a module uses in their own dtype, whatever its policy says.

    The module has no `dtype`, and its params, cast by the policy already, are too wide.
    """
    # Flax's own layers without a dtype, such as PReLU, follow their inputs.
    if policy is None or takes_dtype(module) or is_from_flax(module):
        return []
    dtypes = [x.dtype for x in _float_params(module)]
    return params_in_use(module) if too_wide(policy, dtypes) else []


def check_reached(plans: list[ModulePlan], strict: bool) -> list[Any]:
    """Warns of params that no policy reaches, and returns their modules.

    Raises:
      ValueError: if `may_refuse` says that it is an error for one of the modules.
    """
    unreached_modules: dict[str, Any] = {}
    for path, module, region, *_ in plans:
        decision = region.decision
        policy = decision.policy
        if policy is None or not unreached(module, policy):
            continue
        parts = [child for child in modules(module) if child is not module and has_call(child)]
        has_children = any(own_params(child) for child in parts)
        if may_refuse(decision, path, has_children=has_children, strict=strict):
            dtypes = too_wide(policy, [x.dtype for x in _float_params(module)])
            refuse(path, module, policy, dtypes[0])
        unreached_modules[path] = module
    # Modules may share params, which count once.
    params = {id(p): p for plan in plans for p in own_params(plan.module)}.values()
    total = sum(x.size for param in params for x in leaves(param) if is_floating(x))
    counts = {path: sum(x.size for x in _float_params(m)) for path, m in unreached_modules.items()}
    warn_unreached(plans[0].module, counts, total)
    return list(unreached_modules.values())


def _decision(
    rules: PolicyRules, path: str, module: Any, caller: Decision | None, *, in_layer: bool
) -> Decision:
    decision = decide(rules, path, module, caller, in_layer=in_layer)
    if not isinstance(module, nnx.bridge.ToNNX):
        return decision
    if decision.policy is not None and (decision.rule is not None or not path):
        raise ValueError(
            f"{path or '(root)'!r} holds a linen module. Put that under a policy before it goes "
            "into the bridge: nnx.bridge.ToNNX(jaxmp.linen.apply_policy(module, rules), ...)"
        )
    # All attributes of the bridge are variables of the linen module: there is no dtype to set.
    return Decision(None, None)


def check_shared_params(plans: list[ModulePlan]) -> None:
    """Raises ValueError if two modules share a param and their policies store it differently."""
    owners: dict[int, tuple[str, Any]] = {}
    for plan in plans:
        policy = plan.decision.policy
        for variable in own_params(plan.module):
            dtypes = tuple(x.dtype for x in leaves(variable) if is_floating(x))
            if policy is not None:
                dtypes = (policy.param_dtype,) * len(dtypes)
            path, others = owners.setdefault(id(variable), (plan.path, dtypes))
            if dtypes != others:
                raise ValueError(
                    f"{path!r} and {plan.path!r} share a param, but the rules store it in "
                    f"{others[0]} for one and in {dtypes[0]} for the other. Give both policies "
                    "with the same params dtype"
                )
