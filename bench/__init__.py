"""Benchmarks of Pilotlight and its peers (interfaces, section 10). Not shipped; each target is a runnable module."""
