"""Weights from a registry: Pilotlight's fetch compared with oras-go's, on the same registry, in turns."""
