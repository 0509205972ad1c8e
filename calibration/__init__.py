"""Microbenchmarks that measure a box (torch)."""
