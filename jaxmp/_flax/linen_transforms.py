"""Knows which classes Flax's transforms made, and checks the traces that `nn.jit` shares."""

from typing import Any

import jax

from jaxmp._flax.float8_layers import Float8Layers
from jaxmp._flax.linen_record import ModuleRecord, subtree


class LiftedClasses:
    """Notes on the classes that Flax's lifted transforms made, of the modules that were called.

    Attributes:
      jitted: whether nn.jit made one.
      scanned: the classes that nn.scan repeats.
    """

    def __init__(self) -> None:
        self.jitted = False
        self.scanned: set[type] = set()

    def add(self, made: type) -> None:
        """Adds a class that a transform made; only its name tells which transform."""
        cls, inner, *_ = made.__mro__
        self.jitted |= cls.__name__.startswith("Jit")
        # nn.scan may repeat a class that another transform made, such as nn.remat.
        if cls.__name__.startswith(("Scan", "Remat_scan")) or cls in self.scanned:
            self.scanned.add(inner)


def check_shared_traces(record: ModuleRecord, params: Any) -> None:
    """Raises ValueError if nn.jit shared a trace between modules with different policies."""
    for other in record.without_call(params):
        for path, module in list(record.modules.items()):
            twin, suffix = _twin(path, other, params)
            inner = f"{other}{suffix}"
            if twin and _ruling(record, path, module) != _ruling(record, inner, module):
                raise ValueError(
                    f"{other!r} was traced as one with {twin!r}: nn.jit traces modules of one "
                    f"class only once. But the rules give {path!r} another policy than "
                    f"{inner!r}, or leave one of them out of 8 bits. Give both the "
                    "same policy, or use nn.remat or no transform in place of nn.jit"
                )


def _ruling(record: ModuleRecord, path: str, module: Any) -> Any:
    decision = record.rules.decide(path, module)
    layers = Float8Layers(record.rules, strict=False)
    return decision.policy, layers.family(path, module, decision)


def _twin(path: str, other: str, params: Any) -> tuple[str, str]:
    """Finds the module around `path` whose params have the same shapes as another module.

    Returns:
      The path of that module, and the rest of `path`; empty if there is none.
    """
    # A cached trace does not say which module it was made of. Modules of one class with params of
    # the same shapes share it.
    shapes = _shapes(params, other)
    names = path.split("/")
    for i in range(1, len(names) + 1):
        twin = "/".join(names[:i])
        if _shapes(params, twin) == shapes:
            return twin, "".join(f"/{name}" for name in names[i:])
    return "", ""


def _shapes(params: Any, path: str) -> Any:
    leaves, treedef = jax.tree.flatten(subtree(params, path))
    return [(jax.numpy.shape(x), x.dtype) for x in leaves], treedef
