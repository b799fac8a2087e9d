"""Logins that a cloud gives to its own machines and pods, for its own registries: one module for each cloud."""
