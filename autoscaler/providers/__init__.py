"""Capacity providers. Each adds and removes capacity in one way; none knows the others or the planner."""
