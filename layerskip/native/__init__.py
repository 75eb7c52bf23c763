"""The extension in C++ that runs whole passes, and its loader."""
