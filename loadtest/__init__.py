"""Black-box load tests. They use only the inference port and, if given, the operations port."""

PILOTLIGHT = True
