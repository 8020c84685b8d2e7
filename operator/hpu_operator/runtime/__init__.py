"""What moves: the cache, the queue, the reconciler, the lease, the poll of control endpoints."""
