"""Engine descriptions (YAML)."""
