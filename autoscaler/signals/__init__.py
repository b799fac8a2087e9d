"""Reads scaling signals of engines and of Prometheus."""
