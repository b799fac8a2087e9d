"""The control plane: decides which replicas run where, and updates the gateways. One process decides at a time."""

PILOTLIGHT = True
