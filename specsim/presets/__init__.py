"""Shipped model configurations (config.json files)."""
