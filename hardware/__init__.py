"""Shipped hardware profiles (YAML)."""
