"""Equinox modules: policies by path, and gradients with a loss scale."""

from jaxmp._equinox.filtered_gradients import (
    filter_grad as filter_grad,
    filter_value_and_grad as filter_value_and_grad,
)
from jaxmp._equinox.module_policy import (
    apply_policy as apply_policy,
    remove_policy as remove_policy,
    summary as summary,
    with_scopes as with_scopes,
)
