"""Deployments and StatefulSets that exist: served, and scaled through their scale subresource."""
