"""Capacity providers. Each adds and removes capacity in one way, independently of the others and of the planner."""
