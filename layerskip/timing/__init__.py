"""The clocks: what passes and sublayers cost on this machine."""
