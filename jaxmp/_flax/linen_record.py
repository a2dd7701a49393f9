"""Records the modules that a call of a linen model runs, and warns of what no policy reaches."""

from collections.abc import Mapping
from typing import Any

import jax
from flax import linen as nn
from jaxtyping import PyTree

from jaxmp._flax.float8_layers import Float8Layers
from jaxmp._flax.module_checks import warn_unreached
from jaxmp._numerics.dtypes import is_floating
from jaxmp._policies.policy_rules import Decision, PolicyRules
from jaxmp._policies.presets import dtypes_of
from jaxmp._program.cpu_compiler import warn_of_cpu_compiler


class ModuleRecord:
    """The modules that were called under rules.

    Attributes:
      rules: the rules.
      modules: every module that was called, by its path from the root.
      others: the paths of modules that have rules of their own.
      used: the rules that decided something.
      unreached: the names of params that no policy reaches, by the path of their module.
      float8: which layers are in float8.
    """

    def __init__(self, rules: PolicyRules, *, strict: bool) -> None:
        self.rules = rules
        self.modules: dict[str, nn.Module] = {}
        self.others: set[str] = set()
        self.used: set[int | None] = set()
        self.unreached: dict[str, list[str]] = {}
        self.float8 = Float8Layers(rules, strict=strict)

    def add(self, path: str, module: nn.Module, decision: Decision) -> str | None:
        """Records a called module; returns the family for which it is left out of float8."""
        self.modules.setdefault(path, module)
        self.used.add(decision.rule)
        return self.float8.family(path, module, decision)

    def without_call(self, params: Any, path: str = "") -> list[str]:
        """Returns the topmost modules with params whose calls came from a cached trace."""
        paths: list[str] = []
        for name, value in params.items():
            inner = f"{path}/{name}" if path else name
            if inner in self.others or not isinstance(value, Mapping):
                continue
            if inner in self.modules or any(key.startswith(f"{inner}/") for key in self.modules):
                paths += self.without_call(value, inner)
            else:
                paths.append(inner)
        return paths

    def warn(
        self, model: nn.Module, variables: Mapping[str, Any], *, whole: bool, again: bool
    ) -> None:
        """Warns of params that no policy reaches, of layers out of 8 bits, and of a CPU's fault."""
        warn_of_cpu_compiler(dtypes_of(self.rules), variables)
        params = variables.get("params", {})
        # A cached trace of nn.jit shows no layers, and nor does a branch that is not taken.
        whole = whole and self.float8.enabled and not self.without_call(params)
        self.float8.warn(model, whole=whole, again=again)
        if self.unreached:
            counts = {
                path: sum(_size(subtree(params, f"{path}/{name}")) for name in names)
                for path, names in self.unreached.items()
            }
            warn_unreached(model, counts, _size(params), again=again)

    def warn_unused(self, *, strict: bool) -> None:
        """Warns of rules that decided nothing; runs after an initialisation."""
        self.rules.warn_unused(self.modules, used=self.used, strict=strict)


def subtree(params: Any, path: str) -> Any:
    """Returns the params of the module at a path; None if it has none."""
    for name in path.strip("/").split("/"):
        params = params.get(name) if isinstance(params, Mapping) else None
    return params


def _size(tree: PyTree) -> int:
    return sum(x.size for x in jax.tree.leaves(tree) if is_floating(x))
