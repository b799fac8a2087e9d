"""The control plane: decides which Replicas run where, and tells the gateways. One process decides at a time."""

PILOTLIGHT = True
