"""Gradients of params in float32, whatever dtype a loss function computes in; see README.md."""
