"""Primitives that jaxmp adds to JAX, and products made of them."""
