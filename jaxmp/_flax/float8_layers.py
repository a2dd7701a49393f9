"""Which layers of a model are in float8 under rules, and what to say of those that are not."""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

from jaxmp._flax.layer_products import is_layer, what_is_own, why_not_in_float8
from jaxmp._modules.decisions import family_of
from jaxmp._numerics.user_warnings import first_few, warn_once
from jaxmp._policies.policy_rules import Decision, PolicyRules
from jaxmp._policies.presets import all_policies

_REMEDY = (
    "jaxmp.float8.dot_general as the dot_general of a layer puts it in; or give it a policy "
    "without products in float8 by a rule"
)


def has_float8(rules: PolicyRules) -> bool:
    """Whether a policy in rules asks for products in float8."""
    return any(policy.products is not None for policy in all_policies(rules))


class Float8Layers:
    """The layers of a model that rules put in float8, and why others are left out.

    Attributes:
      wanted: whether a policy asks for products in float8.
      families: why each module is left out, if it is for its name, by its path.
      own: what of a layer's products its author wrote, by the path of the layer.
      reasons: why each other layer is left out by its family or its sizes; None for those in
        float8.
      others: whether a layer has a policy without.
      multiplies: whether a module with a policy with products has params of two dimensions.
    """

    def __init__(self, rules: PolicyRules, *, strict: bool) -> None:
        self._strict = strict
        self.wanted = has_float8(rules)
        self.families: dict[str, str | None] = {}
        self.own: dict[str, str] = {}
        self.reasons: dict[str, str | None] = {}
        self.others = self.multiplies = False

    def family(self, path: str, module: Any, decision: Decision) -> str | None:
        """Returns the family for which a module is left out of float8; None if it is not."""
        if not self.wanted:
            return None
        found = self.families[path] = family_of(path, module, decision, self.families)
        return found

    def note(self, path: str, module: Any, decision: Decision, params: Mapping[str, Any]) -> None:
        """Notes whether a module is in float8, once it has its params.

        Args:
          path: the path of the module.
          module: the module.
          decision: the decision of the rules.
          params: its own params, by name.

        Raises:
          ValueError: if a strict rule names a layer whose products are its author's.
        """
        policy, rule = decision
        if policy is None or policy.products is None:
            self.others |= is_layer(module) or what_is_own(module) is not None
            return
        self.multiplies |= any(jnp.ndim(x) > 1 for x in jax.tree.leaves(dict(params)))
        family = self.families.get(path)
        own = what_is_own(module) if family is None else None
        if own is None:
            if is_layer(module):
                self.reasons[path] = family or why_not_in_float8(module, params.get("kernel"))
            return
        if rule is not None and self._strict:
            raise ValueError(
                f"{type(module).__name__} at {path or '(root)'!r} cannot follow its rule into "
                f"float8: it keeps its own {own}. {_REMEDY}"
            )
        self.own[path] = own

    def warn(self, model: Any, *, whole: bool = True, again: bool = True) -> None:
        """Warns of layers that are not in float8 because of their authors, and if none is.

        Args:
          model: the model.
          whole: whether all of the model was noted, and not a part of it.
          again: whether to repeat a warning that was given for this class before.
        """
        if self.own:
            warn_once(
                "layers keep products of their own, which are not in float8: "
                f"{_first_of(self.own)}. {_REMEDY}",
                type(model),
                again=again,
            )
            return
        # Where rules leave every layer out, the default may well ask for float8.
        ruled_out = not self.reasons and (self.others or not self.multiplies)
        if whole and not ruled_out and all(self.reasons.values()):
            why = _first_of(self.reasons) if self.reasons else "it has no Dense or Linear layer"
            warn_once(
                f"a policy asks for products in float8, and no layer of {type(model).__name__} is "
                f"in float8: {why}. Rules can put layers in; for products without a layer there "
                "is jaxmp.float8.dot_general. docs/float8.md says what is left out, and why",
                type(model),
                again=again,
            )


def _first_of(reasons: Mapping[str, str | None]) -> str:
    return first_few([f"{path or '(root)'!r} ({why})" for path, why in reasons.items()], 4)
