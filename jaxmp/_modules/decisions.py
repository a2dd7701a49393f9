"""Decides the policy of each module under rules, and whether it is left out of float8."""

from collections.abc import Mapping
from typing import Any

from jaxmp._policies.policy_rules import Decision, PolicyRules
from jaxmp._policies.presets import all_policies, family_left_out, get_rules


def module_rules(rules: Any) -> PolicyRules:
    """Converts a name, a policy or rules to rules for modules.

    Raises:
      ValueError: for `"O1"`, which is about operations; for a compute dtype of float8, which no
        layer supports.
      TypeError: for anything else.
    """
    if isinstance(rules, str) and rules.strip() == "O1":
        raise ValueError(
            "O1 chooses a dtype for each operation, not for each module: use "
            "jaxmp.autocast(loss_fn, 'O1'), or 'mixed_float16' for modules"
        )
    rules = get_rules(rules)
    for policy in all_policies(rules):
        if policy.compute_dtype.itemsize == 1:
            raise ValueError(
                f"no layer can compute in {policy.compute_dtype} (policy {str(policy)!r}): a "
                "plain cast to float8 loses small values. Use 'mixed_float8', which scales what it "
                "rounds"
            )
    return rules


def kind_text(model: Any) -> str:
    """Names a value that is no module of a library, for the error that says so."""
    return f"the class {model.__name__}" if isinstance(model, type) else type(model).__name__


def has_call(module: Any) -> bool:
    """Whether a module has a `__call__`."""
    # Every class has a __call__ from its metaclass; instances only have one from a class body.
    return any("__call__" in vars(base) for base in type(module).__mro__)


def decide(
    rules: PolicyRules, path: str, module: Any, caller: Decision | None, *, in_layer: bool
) -> Decision:
    """Looks up the rules for a module; layers inside a layer of a library follow the outer layer.

    For example, a rule about an attention layer also holds for its projections, unless a rule
    names these. `in_layer` says that the caller is a layer of the library around this module.
    """
    # Layers inside of a layer are an implementation detail of the library.
    decision = rules.decide(path, module)
    return caller if decision.rule is None and in_layer and caller is not None else decision


def family_of(
    path: str, module: Any, decision: Decision, families: Mapping[str, str | None]
) -> str | None:
    """Returns the family for which a module is left out of float8; None if it is not.

    For example, a layer named `lm_head` is left out as a head. But a module that a rule puts in
    float8 stays in, and so do the modules inside of it. `families` has the results for the modules
    around it, by their paths.

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
    # Only the names below the innermost module around this one are looked at: a rule may have put
    # that module in, although its own name is in a family.
    names = path.split("/") if path else []
    lengths = [i for i in range(len(names)) if "/".join(names[:i]) in families]
    start = max(lengths, default=0)
    outer = families.get("/".join(names[:start]))
    return outer or family_left_out("/".join(names[start:]), module)
