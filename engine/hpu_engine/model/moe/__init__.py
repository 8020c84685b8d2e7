"""Mixture of experts in four parts with one owner each: router, dispatcher, experts, combiner."""
