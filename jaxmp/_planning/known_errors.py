"""What a program has of which plans are known to be far off, from steps that were compiled."""

from collections.abc import Callable, Iterator

from jaxmp._jaxpr.op_classes import CONTRACTIONS
from jaxmp._planning.flat_program import FlatOp, FlatProgram


def known_errors(program: FlatProgram) -> list[str]:
    """Returns a sentence for each thing that a program has and that is planned badly.

    A plan is the estimate of a few rules. Whoever reads one should learn from itself, and not only
    from its documentation, where the rules are known to fail.

    Args:
      program: the traced step.

    Returns:
      Sentences for the user.
    """
    ops = list(_ops_everywhere(program))
    return [
        f"With {what}, plans were up to {percent} % off: compiled=True asks the compiler."
        for what, (percent, is_there) in _FARTHEST.items()
        if any(map(is_there, ops))
    ]


def _ops_everywhere(program: FlatProgram) -> Iterator[FlatOp]:
    for op in program.ops:
        yield op
        for body in op.bodies:
            yield from _ops_everywhere(body)


def _is_recomputed(op: FlatOp) -> bool:
    return op.name in CONTRACTIONS and "rematted_computation" in op.scope


def _is_in_float8(op: FlatOp) -> bool:
    dtypes = [getattr(variable.aval, "dtype", None) for variable in op.equation.invars]
    return any(str(dtype).startswith("float8") for dtype in dtypes)


# How far off the plan of a step with it was, of those in docs/memory.md.
_FARTHEST: dict[str, tuple[int, Callable[[FlatOp], bool]]] = {
    "convolutions": (36, lambda op: op.name == "conv_general_dilated"),
    "layers that are computed again": (23, _is_recomputed),
    "float8": (22, _is_in_float8),
}
