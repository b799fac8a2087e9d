"""The packing experiment of FGD (USENIX ATC'23) replayed: which policy fills a cluster's GPUs best."""
