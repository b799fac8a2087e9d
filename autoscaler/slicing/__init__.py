"""Kinds of Slices: how a node's Devices are shared, and what a pod must say to get its share. One small file each."""
