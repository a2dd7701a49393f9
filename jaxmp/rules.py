"""Ready-made rules: the parts of a model that everyone keeps in float32, found by their names."""

from jaxmp._policies.presets import (
    EMBEDDINGS as EMBEDDINGS,
    HEADS as HEADS,
    NORMS as NORMS,
    ROTARY as ROTARY,
    ROUTERS as ROUTERS,
    Family as Family,
    all_policies as all_policies,
    dtypes_of as dtypes_of,
    get_rules as get_rules,
    keep_float32 as keep_float32,
    keep_norms_float32 as keep_norms_float32,
)
