"""Skip configs, and the names that users choose from."""
