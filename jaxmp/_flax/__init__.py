"""Policies, autocast and training for Flax modules."""
