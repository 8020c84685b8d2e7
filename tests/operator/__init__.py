"""Tests of the operator's pure parts: no cluster, no network."""
