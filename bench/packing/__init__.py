"""The packing experiment of FGD (USENIX ATC'23) replayed: which policy fills the GPUs of a cluster best."""
