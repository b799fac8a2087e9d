"""The driver of a cluster: replicas are our pods, and devices belong to the cluster's nodes.

All communication with the API server happens here. Inside, objects are plain dicts as the API sends them; everything
that leaves the package is typed (`autoscaler.state.world`).
"""
