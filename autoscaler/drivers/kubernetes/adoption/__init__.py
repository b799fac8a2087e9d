"""Adopts existing Deployments and StatefulSets: serves them and scales them by their scale subresource."""
