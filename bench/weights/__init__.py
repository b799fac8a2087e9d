"""Weights from a registry: our fetch beside oras-go's, on the same registry, in turns."""
