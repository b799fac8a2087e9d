"""Model weights: references and sources, downloads, storage, and the metadata in model files."""

PILOTLIGHT = True
