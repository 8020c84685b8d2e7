"""Tests of the operator against a real API server, controllers and scheduler; nodes and engines are the tests' own."""
