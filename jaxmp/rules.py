"""Ready-made rules: the parts of a model that everyone keeps in float32, found by their names."""

from jaxmp._policies.presets import (
    EMBEDDINGS as EMBEDDINGS,
    HEADS as HEADS,
    NORMS as NORMS,
    ROTARY as ROTARY,
    ROUTERS as ROUTERS,
    Family as Family,
    keep_float32 as keep_float32,
    keep_norms_float32 as keep_norms_float32,
)
