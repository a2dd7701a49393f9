"""Names that the rows of several modules have in common."""

NOT_RUN = "not run"  # the outcome of a test, until it has ended

# Contenders of the GPT's part.
BY_HAND = "by hand, bfloat16"
BY_HAND_TF32 = "by hand, float32 (TF32)"
BY_HAND_FLOAT32 = "by hand, float32"
BY_HAND_FLOAT16 = "by hand, float16"
AUTOCAST = "jaxmp, autocast"
RECOMPUTED = "jaxmp, recompute auto"
DEFAULT = "jaxmp, as it comes"
RECOMPUTED_PLAIN = "jaxmp, recompute auto, plain attention"
SMALL_STATE = "jaxmp, remainder and int8"

# Of PyTorch's.
TORCH = "autocast bfloat16, compiled"
TORCH_16_BIT_RESIDUALS = "autocast and residuals bfloat16, compiled"

# Of the optimizer's.
CHECKED = "jaxmp, float32, skip auto"

# Of float8's.
WIDE_FLOAT8 = "jaxmp, float8, width 4,096"
