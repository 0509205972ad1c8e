"""The planner page of `specsim serve`: what it asks (`planner`), who may ask (`guard`), and the application (`app`)."""
