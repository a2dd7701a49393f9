"""Records which layers of a model are in 8 bits under rules, and warns of those that are not."""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

from jaxmp._flax.layer_products import custom_part, has_dot_general, reason_left_out
from jaxmp._modules.decisions import family_of
from jaxmp._numerics.user_warnings import first_few, warn_once
from jaxmp._policies.policy_rules import Decision, PolicyRules
from jaxmp._policies.presets import all_policies

_REMEDY = (
    "jaxmp.float8.dot_general as the dot_general of a layer puts it in; or give it a policy "
    "without products in 8 bits by a rule"
)


class Float8Layers:
    """The layers of a model that rules put in 8 bits, and why others are left out.

    Attributes:
      enabled: whether a policy asks for products in 8 bits.
      families: the family for which each module is left out, by its path; None if it is not.
      custom: the part of a layer's products that its author wrote, by the path of the layer.
      reasons: why each other layer is left out by its family or its sizes; None for those in
        8 bits.
      others: whether a layer has a policy without products in 8 bits.
      multiplies: whether a module with a policy in 8 bits has params of two dimensions.
    """

    def __init__(self, rules: PolicyRules, *, strict: bool) -> None:
        self._strict = strict
        self.enabled = any(policy.products is not None for policy in all_policies(rules))
        self.families: dict[str, str | None] = {}
        self.custom: dict[str, str] = {}
        self.reasons: dict[str, str | None] = {}
        self.others = self.multiplies = False

    def family(self, path: str, module: Any, decision: Decision) -> str | None:
        """Returns the family for which a module is left out of 8 bits; None if it is not."""
        if self.enabled:
            self.families[path] = family_of(path, module, decision, self.families)
        return self.families.get(path)

    def note(
        self,
        path: str,
        module: Any,
        decision: Decision,
        family: str | None,
        params: Mapping[str, Any],
    ) -> None:
        """Notes whether a module is in 8 bits, once it has its params.

        Raises:
          ValueError: if a strict rule names a layer whose products are its author's.
        """
        policy, rule = decision
        if policy is None or policy.products is None:
            self.others |= has_dot_general(module) or custom_part(module) is not None
            return
        # Params of one dimension, such as the scale of a norm, are in no product.
        self.multiplies |= any(jnp.ndim(x) > 1 for x in jax.tree.leaves(dict(params)))
        custom = custom_part(module) if family is None else None
        if custom is None:
            if has_dot_general(module):
                self.reasons[path] = family or reason_left_out(module, params.get("kernel"))
            return
        if rule is not None and self._strict:
            raise ValueError(
                f"{type(module).__name__} at {path or '(root)'!r} cannot follow its rule into "
                f"8 bits: it keeps its own {custom}. {_REMEDY}"
            )
        self.custom[path] = custom

    def warn(self, model: Any, *, whole: bool = True, again: bool = True) -> None:
        """Warns of layers that are not in 8 bits because of their authors, and if none is.

        Args:
          model: the model.
          whole: whether all of the model was noted, and not a part of it.
          again: whether to repeat a warning that was given for this class before.
        """
        if self.custom:
            warn_once(
                "layers keep products of their own, which are not in 8 bits: "
                f"{_listing(self.custom)}. {_REMEDY}",
                type(model),
                again=again,
            )
            return
        # The default may ask for 8 bits where rules give every layer another policy: no warning.
        is_ruled_out = not self.reasons and (self.others or not self.multiplies)
        if whole and not is_ruled_out and all(self.reasons.values()):
            why = _listing(self.reasons) if self.reasons else "it has no Dense or Linear layer"
            warn_once(
                f"a policy asks for products in 8 bits, and no layer of {type(model).__name__} is "
                f"in 8 bits: {why}. Rules can put layers in; for products without a layer there "
                "is jaxmp.float8.dot_general. docs/float8.md says what is left out, and why",
                type(model),
                again=again,
            )


def _listing(reasons: Mapping[str, str | None]) -> str:
    return first_few([f"{path or '(root)'!r} ({why})" for path, why in reasons.items()], 4)
