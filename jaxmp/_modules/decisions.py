"""Decides the policy of each module under rules, and whether it is left out of float8."""

from collections.abc import Mapping
from typing import Any

from jaxmp._policies.policy_rules import Decision, PolicyRules
from jaxmp._policies.presets import all_policies, family_left_out, get_rules


def module_rules(rules: Any) -> PolicyRules:
    """Converts a name, a policy or rules to rules for modules.

    Raises:
      ValueError: for `"O1"`, which is about operations.
      TypeError: for anything else.
    """
    if isinstance(rules, str) and rules.strip() == "O1":
        raise ValueError(
            "O1 chooses a dtype for each operation, not for each module: use "
            "jaxmp.autocast(loss_fn, 'O1'), or 'mixed_float16' for modules"
        )
    return get_rules(rules)


def check_computable(rules: PolicyRules) -> None:
    """Raises ValueError for rules whose compute dtype is float8, which no layer supports."""
    for policy in all_policies(rules):
        if policy.compute_dtype.itemsize == 1:
            raise ValueError(
                f"no layer can compute in {policy.compute_dtype} (policy {str(policy)!r}): a "
                "plain cast to float8 loses small values. Use 'mixed_float8', which scales what it "
                "rounds"
            )


def decide(
    rules: PolicyRules, path: str, module: Any, caller: Decision | None, *, in_layer: bool
) -> Decision:
    """Looks up the rules for a module; layers inside a layer of a library follow the outer layer.

    For example, a rule about an attention layer also holds for its projections, unless a rule
    names these: they are an implementation detail of the library.

    Args:
      rules: the rules.
      path: the path of the module.
      module: the module.
      caller: the decision for the calling module.
      in_layer: whether the caller is a layer of the library that contains this module.

    Returns:
      The decision.
    """
    decision = rules.decide(path, module)
    return caller if decision.rule is None and in_layer and caller is not None else decision


def family_of(
    path: str, module: Any, decision: Decision, found: Mapping[str, str | None]
) -> str | None:
    """Returns the family for which a module is left out of float8; None if it is not.

    What a rule puts in is not left out, and nor is what is in it.

    Args:
      path: the path of the module.
      module: the module.
      decision: the decision of the rules.
      found: the results for modules around it, by their paths.

    >>> from jaxmp._policies.policy import Policy
    >>> policy = Policy("f32", "bf16", "f32", products="tensorwise")
    >>> by_default = Decision(policy, None)
    >>> family_of("lm_head/Dense_0", None, by_default, {"": None})
    'heads'
    >>> family_of("lm_head/Dense_0", None, by_default, {"": None, "lm_head": None}) is None
    True
    """
    policy, rule = decision
    if rule is not None and policy is not None and policy.products is not None:
        return None
    names = path.split("/") if path else []
    outer = [end for end in range(len(names)) if "/".join(names[:end]) in found]
    start = max(outer, default=0)
    around = found.get("/".join(names[:start]))
    return around or family_left_out("/".join(names[start:]), module)
