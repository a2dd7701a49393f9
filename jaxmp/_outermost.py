"""A guard: `mixed_precision` is the outermost of all transformations, or it is wrong."""

import sys
import types


def refuse_to_be_wrapped() -> None:
    """Raises if a combinator calls: `chain`, `MultiSteps`, `compact_state` around the wrapper.

    They would see zero updates on skipped steps as real ones, or scale the updates, after which
    params and masters no longer agree. A combinator keeps no trace of itself in what it passes
    on, so the only place to see it is the caller's module.
    """
    frame: types.FrameType | None = sys._getframe(1)
    while frame is not None and _is_transparent(_module(frame)):
        frame = frame.f_back
    module = _module(frame) if frame is not None else ""
    # optax.tree_utils calls init to learn the layout of the state, which is fine.
    if module.startswith(_COMBINATORS) and not module.startswith("optax.tree_utils"):
        raise ValueError(
            f"mixed_precision must be the outermost transformation, but {module} called it. Put "
            "the other transformation inside: mixed_precision(optax.chain(clip, adamw), policy), "
            "mixed_precision(optax.MultiSteps(adamw, 4), policy)"
        )


_COMBINATORS = ("optax.", "jaxmp._compact_state")


def _is_transparent(module: str) -> bool:
    """Our own functions, and runtime type checkers, which put frames between the caller and us."""
    package = module.partition(".")[0]
    return package in ("jaxmp", "jaxtyping", "beartype") and not module.startswith(_COMBINATORS)


def _module(frame: types.FrameType) -> str:
    return frame.f_globals.get("__name__", "")
