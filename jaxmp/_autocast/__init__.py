"""Mixed precision for any function: the jaxpr is planned, then run again in other dtypes."""

from jaxmp._autocast._scopes import policy_scope as policy_scope
from jaxmp._autocast._transform import (
    Output as Output,
    autocast as autocast,
    full_precision as full_precision,
)
