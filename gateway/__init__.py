"""The data plane: N equal processes that queue requests, dispatch them to replicas and relay the responses."""

PILOTLIGHT = True
