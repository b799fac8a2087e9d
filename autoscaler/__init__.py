"""The control plane: decides which Replicas run where, and tells the gateways. One process decides, others only tell it what is."""

PILOTLIGHT = True
