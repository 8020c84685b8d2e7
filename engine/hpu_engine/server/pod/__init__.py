"""The pod: its ranks and workers, supervision, drain, control endpoint."""
