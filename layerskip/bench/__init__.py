"""Times, compares and checks methods side by side."""
