"""The data plane: N equal processes that hold Calls, hand them to Replicas and relay the answers."""

PILOTLIGHT = True
