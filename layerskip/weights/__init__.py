"""Matrices as they are stored or rounded, and hashes that identify them."""
