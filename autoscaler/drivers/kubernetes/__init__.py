"""The driver of a cluster: replicas are our pods, and devices belong to the cluster's nodes.

Inside this package, objects are plain dicts as the API server returns them. Everything that leaves the package is typed
(`autoscaler.state.world`).
"""
