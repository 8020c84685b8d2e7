"""Who may write: the lease, and an API server for the leader alone."""
