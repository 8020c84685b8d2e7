"""A real Kubernetes on one machine, for `make demo` and for the tests: see docs/development.md."""
