"""The front door: the command line, and the one place that composes a process. Nobody imports it."""

PILOTLIGHT = True
__version__ = "0.1.0"
