"""`recompute`: computes cheap values again in the backward pass."""
