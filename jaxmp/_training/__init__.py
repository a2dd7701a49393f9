"""Gradients, the optimizer and the train step."""
