"""Predicts what a program costs on a device that need not be here, and measures it where it is."""
