"""The Python interface: settings, requests, drafts, `generate`, `decode`, `Session` and loading."""
