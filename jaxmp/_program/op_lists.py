"""The table of operations, with the changes that one call of autocast makes to it."""

import dataclasses
from collections.abc import Collection, Iterable

from jaxmp._program.op_classes import CLASSES, OpClass

# Functions with derivatives of their own that have one class as a whole.
_FUNCTIONS: dict[str, OpClass] = {
    "log_ndtr": OpClass.FLOAT32,  # its derivative is an exponential of it
}


@dataclasses.dataclass(frozen=True)
class OpLists:
    """The table, with the changes of one call of autocast.

    Attributes:
      overrides: pairs of a name (of a primitive or a jitted function) and its class.
    """

    overrides: tuple[tuple[str, OpClass], ...] = ()

    def unused(self, names: Collection[str]) -> list[str]:
        """Returns the overridden names that are neither primitives nor among these names.

        >>> op_lists(lower=["tanh", "than"]).unused({"exp"})
        ['than']
        """
        return [name for name, _ in self.overrides if name not in names and name not in CLASSES]

    def of(self, primitive: str, functions: Collection[str] = ()) -> OpClass | None:
        """Returns the class of a primitive inside jitted functions, innermost last.

        >>> OpLists().of("exp").name
        'FLOAT32'
        """
        usual = CLASSES.get(primitive)
        changed = _FUNCTIONS | dict(self.overrides)
        for name in (primitive, *reversed(list(functions))):
            if name in changed and usual is not OpClass.CONTROL:
                return changed[name]
        return usual


def op_lists(
    lower: Iterable[str] = (), float32: Iterable[str] = (), promote: Iterable[str] = ()
) -> OpLists:
    """Returns the table with additions.

    Raises:
      TypeError: if a list is a string, or holds something that is not a string.
      ValueError: if a name is in two lists, or has no dtype to choose.
    """
    classes: dict[str, OpClass] = {}
    for key, names, op_class in (
        ("lower", lower, OpClass.LOWER),
        ("float32", float32, OpClass.FLOAT32),
        ("promote", promote, OpClass.PROMOTE),
    ):
        if isinstance(names, str):
            raise TypeError(f"{key} must be a list of names, got a string. Write {key}=[{names!r}]")
        for name in names:
            if not isinstance(name, str):
                raise TypeError(
                    f"{key} must list names of primitives such as 'exp', or of jitted functions "
                    f"such as 'silu', got {name!r}"
                )
            if CLASSES.get(name) in (OpClass.CONTROL, OpClass.ALONE):
                raise ValueError(
                    f"{name!r} cannot be in {key}: autocast does not choose its dtype. "
                    f"The table of operations says of it: {CLASSES[name].value}"
                )
            if classes.setdefault(name, op_class) is not op_class:
                raise ValueError(f"{name!r} is in two of the lists lower, float32, promote")
    return OpLists(tuple(classes.items()))
