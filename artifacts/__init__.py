"""Weights: where they lie, what they consist of, and what a model file says about itself."""

PILOTLIGHT = True
