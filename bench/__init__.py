"""Benchmarks side by side with peers (interfaces, section 10). Not shipped; each target is a module that can be run."""
