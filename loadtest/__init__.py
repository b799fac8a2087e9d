"""Black-box load tests: they know only the inference port, and the operations port when told."""

PILOTLIGHT = True
