"""The decoding loop on an opened model: rounds of draft, verify and accept."""
