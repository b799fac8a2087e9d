"""Weights: what a model file says about itself (and, later, how it is packed, pulled and kept)."""

PILOTLIGHT = True
