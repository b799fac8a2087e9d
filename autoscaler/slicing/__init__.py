"""Slicers: how each sharing mechanism divides a node's devices into slices, and what a pod requests to get one."""
