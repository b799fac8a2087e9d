"""The control plane: decides which replicas run where, and informs the gateways. One process decides at a time."""

PILOTLIGHT = True
