"""A guard: `mixed_precision` is the outermost of all transformations, or it is wrong."""

import sys
import types


def refuse_to_be_wrapped() -> None:
    """Raises if an optax combinator calls: `chain`, `MultiSteps`, `masked` around the wrapper.

    They would see zero updates on skipped steps as real ones, or scale the updates, after which
    params and masters no longer agree. A combinator keeps no trace of itself in what it passes
    on, so the only place to see it is the caller's module.
    """
    frame: types.FrameType | None = sys._getframe(1)
    # Runtime type checkers put frames of their own between the caller and us.
    while frame is not None and _package(frame) in ("jaxmp", "jaxtyping", "beartype"):
        frame = frame.f_back
    module = frame.f_globals.get("__name__", "") if frame is not None else ""
    # optax.tree_utils calls init to learn the layout of the state, which is fine.
    if module.startswith("optax.") and not module.startswith("optax.tree_utils"):
        raise ValueError(
            f"mixed_precision must be the outermost transformation, but {module} called it. Put "
            "the other transformation inside: mixed_precision(optax.chain(clip, adamw), policy), "
            "mixed_precision(optax.MultiSteps(adamw, 4), policy)"
        )


def _package(frame: types.FrameType) -> str:
    return frame.f_globals.get("__name__", "").partition(".")[0]
