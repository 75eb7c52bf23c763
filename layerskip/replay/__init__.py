"""What drafts would have drafted along recorded texts; decodes each text once."""
