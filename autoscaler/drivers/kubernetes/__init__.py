"""The driver of a cluster: Replicas are pods of ours, Devices are its nodes'.

Owns all that Pilotlight says to an API server. Everything inside is plain dicts as the API sends them; what leaves the
room is typed (`autoscaler.state.world`).
"""
