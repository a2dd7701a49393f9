"""Names of contenders that more than one module knows."""

# Of the GPT's part; those with a "{}" for what distinguishes variants.
BY_HAND = "by hand, bfloat16"
BY_HAND_PLAIN = "by hand, bfloat16, plain attention"
BY_HAND_TF32 = "by hand, float32 (TF32)"
BY_HAND_FLOAT32 = "by hand, float32"
BY_HAND_FLOAT16 = "by hand, float16"
AUTOCAST = "jaxmp, autocast"
RECOMPUTED = "jaxmp, recompute auto"
RECOMPUTED_PLAIN = "jaxmp, recompute auto, plain attention"
SMALL_STATE = "jaxmp, remainder and int8"

# Of PyTorch's.
TORCH = "autocast bfloat16, compiled"
TORCH_16_BIT_RESIDUALS = "autocast and residuals bfloat16, compiled"

# Of the optimizer's.
UNCHECKED = "jaxmp, float32, skip none"
CHECKED = "jaxmp, float32, skip auto"

# Of float8's.
WIDE = "by hand, bfloat16, width 4,096"
WIDE_FLOAT8 = "jaxmp, float8, width 4,096"
