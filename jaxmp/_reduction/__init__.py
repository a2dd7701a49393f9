"""Gradients of params in float32, whatever dtype a loss function computes in."""

from jaxmp._reduction._gradient_of import gradient_of as gradient_of
from jaxmp._reduction._layout import Layout as Layout, layout_of as layout_of
from jaxmp._reduction._transform import reduced_in_float32 as reduced_in_float32
